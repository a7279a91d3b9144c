"""The manifest: a Delta Lake table that says which shard holds which record, and what made it.

Rows are only ever appended. For an item the row of the newest commit counts, in the order (base_version, time,
position): `base_version` is the table version that its writer had seen, so a row always counts over the rows that its
writer knew, whatever the clocks say. Two writers that did not know of each other are ordered by time.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from storage.errors import StoreNotFound
from storage.files import Folder, check_item, check_stage, sync, unwritable
from storage.fingerprint import recipe_id

EMPTY = -1  # snapshot of a store that has no manifest yet


@dataclass(frozen=True)
class Row:
    """One row of the manifest; the latest for (stage, item) is the one that readers see.

    Attributes:
        fingerprint: digest of the recipe and of the contents of all inputs.
        inputs: digest of the contents of the inputs alone.
        recipe: recipe id.
        status: `ok`, `empty` (no elements), `failed`, or `corrupt` (marked by verify).
        shard: file relative to the store.
        first_row, rows: where in the shard the record's elements lie.
        digest: digest of the record's content.
        bytes: size of the record's values.
        shard_bytes: size of the file.
        mapped: whether the shard's values can be memory-mapped.
        error_class, error_text: why it failed.
        attempts: how often in a row it was tried.
        seconds: how long it took.
        run: id of the run.
    """

    stage: str
    item: str
    fingerprint: bytes
    inputs: bytes
    recipe: str
    status: str
    shard: str = ""
    first_row: int = 0
    rows: int = 0
    digest: bytes = b""
    bytes: int = 0
    shard_bytes: int = 0
    mapped: bool = False
    error_class: str = ""
    error_text: str = ""
    attempts: int = 1
    seconds: float = 0.0
    run: str = ""

    def __post_init__(self) -> None:
        check_stage(self.stage)
        check_item(self.item)
        if self.status not in ("ok", "empty", "failed", "corrupt"):
            raise ValueError(f"status {self.status!r} of {self.stage} {self.item!r}: use ok, empty, failed or corrupt")


_ARROW = {"str": pa.string(), "bytes": pa.binary(), "int": pa.int64(), "bool": pa.bool_(), "float": pa.float64()}
ROW_SCHEMA = pa.schema([(f.name, _ARROW[str(f.type)]) for f in fields(Row)])
ROW_COLUMNS = ROW_SCHEMA.names
_ORDER = ["base_version", "time", "position"]
SCHEMA = pa.schema(
    [*ROW_SCHEMA, ("time", pa.timestamp("us", "UTC")), ("base_version", pa.int64()), ("position", pa.int64())]
)
_FILE_SCHEMA = pa.schema(
    [field for field in SCHEMA if field.name != "stage"]
)  # the partition column is not in the files
_DEFAULTS = {f.name: f.default for f in fields(Row) if isinstance(f.default, str | bytes | int | float)}


class Manifest:
    """The manifest of a store, at one snapshot.

    Args:
        url: the store; a store without a manifest is an empty one, which the first commit makes.
        snapshot: table version to read, the newest by default.

    Raises:
        StoreNotFound: no such snapshot.
    """

    def __init__(self, url: str | os.PathLike[str], snapshot: int | None = None) -> None:
        self.folder = Folder(url)
        self._url = self.folder.path("manifest")
        try:
            self._table: DeltaTable | None = DeltaTable(self._url, version=snapshot)
        except TableNotFoundError:
            self._table = None
            if snapshot is not None and snapshot != EMPTY:
                raise StoreNotFound(f"no store at {self.folder.url}, so no snapshot {snapshot}") from None
        except DeltaError as error:
            raise StoreNotFound(f"{self.folder.url} has no snapshot {snapshot}: {error}") from error
        self._files: list[dict[str, Any]] | None = None

    @property
    def snapshot(self) -> int:
        """Version of the table that is read, -1 where there is none yet."""
        return EMPTY if self._table is None else self._table.version()

    @property
    def id(self) -> str:
        """Id of the table, which a new store in the same folder would not share."""
        return "" if self._table is None else str(self._table.metadata().id)

    def refresh(self) -> None:
        """Move on to the newest snapshot."""
        self._files = None
        try:
            if self._table is None:
                self._table = DeltaTable(self._url)
            else:
                self._table.update_incremental()
        except TableNotFoundError:
            pass

    # Writing

    def commit(self, rows: Sequence[Row]) -> int:
        """Append rows in one atomic commit; all become visible or none.

        Returns:
            A snapshot that has them.

        Raises:
            StoreUnwritable: disk full, read-only, no permission.
        """
        columns = list(zip(*map(attrgetter(*ROW_COLUMNS), rows), strict=True)) or [()] * len(ROW_COLUMNS)
        return self.commit_table(
            pa.table([pa.array(c, f.type) for c, f in zip(columns, ROW_SCHEMA, strict=True)], ROW_SCHEMA)
        )

    def commit_table(self, rows: pa.Table) -> int:
        """`commit` for many rows: a table with columns of `ROW_SCHEMA`; those with a default may be absent."""
        if not rows.num_rows:
            return self.snapshot
        with unwritable(self._url):
            if self._table is None:
                self._create()
            self.refresh()
            base = self.snapshot
            count = rows.num_rows
            columns = [
                rows[f.name].cast(f.type)
                if f.name in rows.column_names
                else pa.repeat(pa.scalar(_DEFAULTS[f.name], f.type), count)
                for f in ROW_SCHEMA
            ]
            now = pa.scalar(time.time_ns() // 1000, SCHEMA.field("time").type)
            columns += [
                pa.repeat(now, count),
                pa.repeat(pa.scalar(base, pa.int64()), count),
                pa.array(np.arange(count)),
            ]
            table = pa.table(columns, SCHEMA)
            stages = pc.unique(table["stage"]).to_pylist()
            adds = [
                self._write(stage, table.filter(pc.equal(table["stage"], stage)) if len(stages) > 1 else table, True)
                for stage in stages
            ]
            self._transact(adds)
            self.refresh()
            self._sync_log(base)
        return self.snapshot

    def compact(self, files: int = 8) -> None:
        """Fold a stage's files into one, sorted by item, where it has more than `files` of them.

        Rows and their order stay; older snapshots still read the files they name. Gives way to a concurrent commit:
        what is not compacted now is compacted next time.
        """
        self.refresh()
        for stage in self.stages():
            old = self._of_stage(stage)
            if len(old) <= files:
                continue
            with unwritable(self._url):
                table = self._read([f["path"] for f in old], None).append_column(
                    "stage", pa.repeat(pa.scalar(stage), sum(f["num_records"] for f in old))
                )
                add = self._write(stage, table.select(SCHEMA.names), False)
                now = int(time.time() * 1000)
                removes = [RemoveAction(f["path"], False, now, f["size_bytes"], {"stage": stage}) for f in old]
                base = self.snapshot
                try:  # no retry: with a concurrent compaction, a second try could add rows twice
                    self._transact([add, *removes], CommitProperties(max_commit_retries=0))
                except DeltaError:
                    self.folder.delete(f"manifest/{add.path}")
                self.refresh()
                self._sync_log(base)

    def snapshot_at(self, when: datetime) -> int:
        """Version that was the newest at a time; the first one where the store is younger."""
        table = DeltaTable(self._url)
        table.load_as_version(when)
        return table.version()

    def vacuum(self, hours: float, snapshots: list[int], dry_run: bool) -> list[str]:
        """Remove the manifest's own files that were replaced over `hours` ago and that none of `snapshots` reads."""
        with unwritable(self._url):
            table = DeltaTable(self._url)
            return table.vacuum(
                math.ceil(hours), dry_run, enforce_retention_duration=False, full=True, keep_versions=snapshots
            )

    def _create(self) -> None:
        if self.folder.local is not None:
            self.folder.local.mkdir(parents=True, exist_ok=True)
        # Without log clean-up a lock file can name a snapshot of any age.
        settings = {"delta.enableExpiredLogCleanup": "false", "delta.appendOnly": "false"}
        try:
            DeltaTable.create(self._url, SCHEMA, mode="ignore", partition_by=["stage"], configuration=settings)
        except DeltaError:  # another process made it at this moment
            if not DeltaTable.is_deltatable(self._url):
                raise

    def _write(self, stage: str, rows: pa.Table, change: bool) -> AddAction:
        """Write rows of one stage as a data file, sorted by item so that one item is found without reading all."""
        rows = rows.take(pc.sort_indices(rows, [("item", "ascending")])).drop_columns(["stage"])
        name = f"stage={stage}/{secrets.token_hex(16)}.parquet"

        def write(path: str) -> None:
            pq.write_table(
                rows, path, compression="zstd", row_group_size=1 << 14, write_statistics=["item"],
                use_dictionary=["recipe", "status", "shard", "error_class", "error_text", "run", *_ORDER[:2]],
            )  # fmt: skip

        size = self.folder.put(f"manifest/{name}", write)
        low, high = rows["item"][0].as_py(), rows["item"][-1].as_py()
        stats = {
            "numRecords": rows.num_rows,
            "minValues": {"item": low[:64]},
            "maxValues": {"item": high if len(high) <= 64 else high[:64] + "\U0010ffff"},
            "nullCount": {"item": 0},
        }
        return AddAction(name, size, {"stage": stage}, int(time.time() * 1000), change, json.dumps(stats))

    def _transact(
        self, actions: Sequence[AddAction | RemoveAction], properties: CommitProperties | None = None
    ) -> None:
        assert self._table is not None
        properties = properties or CommitProperties(max_commit_retries=1000)
        self._table.create_write_transaction(list(actions), "append", SCHEMA, ["stage"], commit_properties=properties)

    def _sync_log(self, base: int) -> None:
        """fsync the log entries since a version, which deltalake leaves to the system."""
        if self.folder.local is not None:
            log = self.folder.local / "manifest" / "_delta_log"
            for version in range(base + 1, self.snapshot + 1):
                sync(log / f"{version:020d}.json")
            sync(log)

    # Recipes

    def save_recipe(self, recipe: dict[str, Any]) -> str:
        """Keep a recipe in full, as readable JSON, and return its id."""
        name = recipe_id(recipe)
        if not self.folder.exists(f"recipes/{name}.json"):
            text = json.dumps(recipe, indent=1, sort_keys=True, ensure_ascii=False)

            def write(path: str) -> None:
                with open(path, "w", encoding="utf8") as file:
                    file.write(text)

            self.folder.put(f"recipes/{name}.json", write)
        return name

    def recipe(self, id: str) -> dict[str, Any]:
        """The recipe of an id; StoreNotFound where it was never saved."""
        try:
            return dict(json.loads(self.folder.read(f"recipes/{id}.json")))
        except FileNotFoundError:
            raise StoreNotFound(f"no recipe {id} in {self.folder.url}/recipes") from None

    # Reading

    def stages(self) -> list[str]:
        """Names of the stages that have rows, sorted."""
        return sorted({f["partition.stage"] for f in self._list()})

    def latest(self, stage: str, columns: Iterable[str] | None = None) -> pa.Table:
        """The newest row of every item of a stage, sorted by item.

        Args:
            columns: names of `Row`'s fields (all by default), `time` and `base_version`.
        """
        table, codes, order = self._ordered(stage, columns)
        last = np.append(codes[order][1:] != codes[order][:-1], True) if len(order) else np.empty(0, bool)
        return self._pick(stage, table, order[last], columns)

    def rows(self, stage: str, columns: Iterable[str] | None = None) -> pa.Table:
        """All rows of a stage, sorted by item, the newest of an item first."""
        table, codes, order = self._ordered(stage, columns)
        newest_first = order[::-1]
        return self._pick(stage, table, newest_first[np.argsort(codes[newest_first], kind="stable")], columns)

    def find(self, stage: str, item: str) -> Row | None:
        """The newest row of one item, found without reading the others; None where there is none."""
        key = item.encode()
        paths = [
            f["path"]
            for f in self._of_stage(stage)
            if f.get("min.item") is None or f["min.item"].encode() <= key <= f["max.item"].encode()
        ]
        table = self._read(paths, None, item)
        if not table.num_rows:
            return None
        order = np.lexsort([_numbers(table[name]) for name in reversed(_ORDER)])
        newest = table.select([n for n in ROW_COLUMNS if n != "stage"]).slice(int(order[-1]), 1).to_pylist()[0]
        return Row(stage=stage, **newest)

    def _list(self) -> list[dict[str, Any]]:
        """Data files of the snapshot: path, size_bytes, num_records, min.item, max.item, partition.stage."""
        if self._files is None:
            self._files = [] if self._table is None else pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return self._files

    def _of_stage(self, stage: str) -> list[dict[str, Any]]:
        return [f for f in self._list() if f["partition.stage"] == stage]

    def _read(self, paths: Sequence[str], columns: list[str] | None, item: str | None = None) -> pa.Table:
        """Rows of data files without the stage; only those of one item where it is given."""
        schema = _FILE_SCHEMA if columns is None else pa.schema([_FILE_SCHEMA.field(name) for name in columns])
        filters = None if item is None else pc.field("item") == item
        fs = None if self.folder.local is not None else self.folder.fs
        tables = [
            pq.read_table(
                self.folder.path(f"manifest/{path}"),
                columns=schema.names,
                filters=filters,
                filesystem=fs,
                partitioning=None,
            )
            for path in paths
        ]
        return pa.concat_tables([table.cast(schema) for table in tables]) if tables else schema.empty_table()

    def _ordered(self, stage: str, columns: Iterable[str] | None) -> tuple[pa.Table, np.ndarray, np.ndarray]:
        """All rows of a stage; of each row the rank of its item; row numbers by item, an item's oldest row first."""
        wanted = set(ROW_COLUMNS if columns is None else columns)
        if unknown := wanted - set(SCHEMA.names):
            raise ValueError(f"unknown columns {sorted(unknown)}; choose from {SCHEMA.names}")
        names = [name for name in _FILE_SCHEMA.names if name in wanted or name in ("item", *_ORDER)]
        table = self._read([f["path"] for f in self._of_stage(stage)], names)
        encoded = pc.dictionary_encode(table["item"].combine_chunks())
        codes, items = encoded.indices.to_numpy(), encoded.dictionary
        if not pc.all(pc.less(items[:-1], items[1:])).as_py():
            rank = np.empty(len(items), np.int64)
            rank[pc.sort_indices(items).to_numpy()] = np.arange(len(items))
            codes = rank[codes]
        if len(items) == len(codes):  # no item twice
            return table, codes, np.argsort(codes)
        return table, codes, np.lexsort([*(_numbers(table[name]) for name in reversed(_ORDER)), codes])

    def _pick(self, stage: str, table: pa.Table, order: np.ndarray, columns: Iterable[str] | None) -> pa.Table:
        names = ROW_COLUMNS if columns is None else list(columns)
        table = table.select([name for name in names if name != "stage"])
        if not np.array_equal(order, np.arange(table.num_rows)):
            table = table.take(pa.array(order))
        if "stage" in names:
            table = table.append_column("stage", pa.repeat(pa.scalar(stage), len(order)))
        return table.select(names)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.int64()).to_numpy() if pa.types.is_timestamp(column.type) else column.to_numpy()

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
from contextlib import suppress
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

from storage.delta_log import File, look, open_table, transact
from storage.errors import StoreNotFound
from storage.files import Folder, check_item, check_stage, plain, storable, sync, unwritable
from storage.fingerprint import recipe_id


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

    def placed(self, **where: Any) -> Row:
        """The row with what is known once its record is in a shard; `replace` would check again what is checked."""
        row = object.__new__(Row)
        row.__dict__.update(self.__dict__, **where)
        return row


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
_REPEATED = ("recipe", "status", "shard", "error_class", "error_text", "run")
_DEFAULTS = {f.name: f.default for f in fields(Row) if isinstance(f.default, str | bytes | int | float)}


class Manifest:
    """The manifest of a store, at one snapshot.

    Reading works in forked processes too. deltalake does not, so a forked process can't commit, and asks a new process
    where it has to look at the table's log.

    Args:
        url: the store; a store without a manifest is an empty one, which the first commit makes.
        snapshot: table version to read, the newest by default.

    Raises:
        StoreNotFound: no such snapshot.
        TypeError: the snapshot is no whole number.
    """

    def __init__(self, url: str | os.PathLike[str], snapshot: int | None = None) -> None:
        if isinstance(snapshot, np.integer):
            snapshot = int(snapshot)
        if snapshot is not None and type(snapshot) is not int:
            raise TypeError(f"snapshot is {snapshot!r}, expected a whole number, as `.snapshot` gives, or None")
        self.folder = Folder(url)
        self._url = self.folder.path("manifest")
        self._at = look(self._url, snapshot)

    @property
    def snapshot(self) -> int:
        """Version of the table that is read, -1 where there is none yet."""
        return self._at.version

    @property
    def id(self) -> str:
        """Id of the table, which a new store in the same folder would not share."""
        return self._at.id

    def refresh(self) -> None:
        """Move on to the newest snapshot."""
        self._at = look(self._url, None)

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
            table = self._create()
            base = table.version()
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
            whole = pa.table(columns, SCHEMA)
            stages = pc.unique(whole["stage"]).to_pylist()
            adds = [
                self._write(stage, whole.filter(pc.equal(whole["stage"], stage)) if len(stages) > 1 else whole, True)
                for stage in stages
            ]
            transact(table, adds, SCHEMA, retries=1000)
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
                rows = self._read(old, None)
                rows = rows.append_column("stage", pa.repeat(pa.scalar(stage), rows.num_rows)).select(SCHEMA.names)
                add = self._write(stage, rows, False)
                now = int(time.time() * 1000)
                removes = [RemoveAction(file.path, False, now, file.bytes, {"stage": stage}) for file in old]
                base = self.snapshot
                # No retry: after a concurrent compaction it would add rows twice. What is left of a vain try is for gc.
                with suppress(DeltaError):
                    transact(open_table(self._url, base), [add, *removes], SCHEMA, retries=0)
                self.refresh()
                self._sync_log(base)

    def snapshot_at(self, when: datetime) -> int:
        """Version that was the newest at a time; the first one where the store is younger."""
        table = open_table(self._url, None)
        table.load_as_version(when)
        return table.version()

    def vacuum(self, hours: float, snapshots: list[int], dry_run: bool) -> list[str]:
        """Remove the manifest's own files that were replaced over `hours` ago and that none of `snapshots` reads."""
        with unwritable(self._url):
            return open_table(self._url, None).vacuum(
                math.ceil(hours), dry_run, enforce_retention_duration=False, full=True, keep_versions=snapshots
            )

    def _create(self) -> DeltaTable:
        """The table at its newest version, made where there is none."""
        with suppress(TableNotFoundError):
            return open_table(self._url, None)
        if self.folder.local is not None:
            self.folder.local.mkdir(parents=True, exist_ok=True)
        # Without log clean-up a lock file can name a snapshot of any age.
        settings = {"delta.enableExpiredLogCleanup": "false"}
        # Of processes that make it at the same time one succeeds. A retry would be a second start amid the others'
        # commits, under a new id.
        once = CommitProperties(max_commit_retries=0)
        with suppress(DeltaError):
            DeltaTable.create(
                self._url, SCHEMA, mode="ignore", partition_by=["stage"], configuration=settings, commit_properties=once
            )
        return open_table(self._url, None)

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
            "maxValues": {"item": high[:64] + "\U0010ffff" if high[64:] and high[64] < "\U0010ffff" else high},
            "nullCount": {"item": 0},
        }
        # As characters: deltalake reads escaped ones beyond U+1FFFF as others.
        text = json.dumps(stats, ensure_ascii=False)
        return AddAction(name, size, {"stage": stage}, int(time.time() * 1000), change, text)

    def _sync_log(self, base: int) -> None:
        """fsync the log since a version, and its checkpoints, which deltalake leaves to the system.

        That version too: who wrote it may not have come to it yet, and only the newest entry can be done without.
        """
        if self.folder.local is not None:
            log = self.folder.local / "manifest" / "_delta_log"
            for version in range(base, self.snapshot + 1):
                sync(log / f"{version:020d}.json")
                with suppress(FileNotFoundError):  # few versions have one
                    sync(log / f"{version:020d}.checkpoint.parquet")
            sync(log)

    # Recipes

    def save_recipe(self, recipe: dict[str, Any]) -> str:
        """Keep a recipe in full, as readable JSON, and return its id. A file of it that is damaged is written again."""
        name = recipe_id(recipe)
        if self.find_recipe(name) is None:
            text = json.dumps(recipe, indent=1, sort_keys=True, ensure_ascii=False)
            self.folder.put_text(f"recipes/{name}.json", text)
        return name

    def recipe(self, id: str) -> dict[str, Any]:
        """The recipe of an id; StoreNotFound where its file is gone, damaged, or was never written."""
        try:
            text = self.folder.read(f"recipes/{id}.json")
        except FileNotFoundError:
            raise StoreNotFound(f"no recipe {id} in {self.folder.url}/recipes") from None
        with suppress(ValueError):  # no UTF-8, no JSON, or values that no recipe has
            recipe = json.loads(text)
            if type(recipe) is dict and recipe_id(recipe) == id:
                return recipe
        raise StoreNotFound(f"recipe {id} in {self.folder.url}/recipes is damaged: its content is not what was written")

    def find_recipe(self, id: str) -> dict[str, Any] | None:
        """`recipe`; None where its file is gone or damaged, which costs no record."""
        try:
            return self.recipe(id)
        except StoreNotFound:
            return None

    # Reading

    def stages(self) -> list[str]:
        """Names of the stages that have rows, sorted."""
        return sorted({file.stage for file in self._at.files})

    def latest(self, stage: str, columns: Iterable[str] | None = None, encoded: bool = False) -> pa.Table:
        """The newest row of every item of a stage, sorted by item.

        Args:
            columns: names of `Row`'s fields (all by default), `time` and `base_version`.
            encoded: give texts that repeat (recipe, status, shard ...) as dictionary columns: a third of the memory.
        """
        table, codes, order = self._ordered(stage, columns, encoded)
        last = np.append(codes[order][1:] != codes[order][:-1], True) if len(order) else np.empty(0, bool)
        return self._pick(stage, table, order[last], columns)

    def rows(self, stage: str, columns: Iterable[str] | None = None, encoded: bool = False) -> pa.Table:
        """All rows of a stage, sorted by item, the newest of an item first; arguments as for `latest`."""
        table, codes, order = self._ordered(stage, columns, encoded)
        newest_first = order[::-1]
        return self._pick(stage, table, newest_first[np.argsort(codes[newest_first], kind="stable")], columns)

    def find(self, stage: str, item: str) -> Row | None:
        """The newest row of one item, found without reading the others; None where there is none."""
        if not storable(item):
            return None
        table = self._read([file for file in self._of_stage(stage) if file.may_hold(item)], None, item)
        if not table.num_rows:
            return None
        order = np.lexsort([_numbers(table[name]) for name in reversed(_ORDER)])
        newest = table.select([n for n in ROW_COLUMNS if n != "stage"]).slice(int(order[-1]), 1).to_pylist()[0]
        return Row(stage=stage, **newest)

    def _of_stage(self, stage: str) -> list[File]:
        return [file for file in self._at.files if file.stage == stage]

    def _read(
        self, files: Sequence[File], columns: list[str] | None, item: str | None = None, encoded: bool = False
    ) -> pa.Table:
        """Rows of data files, without the stage; only those of one item where it is given."""
        schema = _FILE_SCHEMA if columns is None else pa.schema([_FILE_SCHEMA.field(name) for name in columns])
        options: dict[str, Any] = {"columns": schema.names, "partitioning": None}
        if encoded:
            options["read_dictionary"] = [name for name in schema.names if name in _REPEATED]
            text = pa.dictionary(pa.int32(), pa.string())
            schema = pa.schema([(f.name, text if f.name in _REPEATED else f.type) for f in schema])
        if item is not None:
            options["filters"] = pc.field("item") == item
        if self.folder.local is None:
            options["filesystem"] = self.folder.fs
        tables = []
        for file in files:
            try:
                tables.append(pq.read_table(self.folder.path(f"manifest/{file.path}"), **options))
            except (FileNotFoundError, pa.ArrowInvalid) as error:
                raise StoreNotFound(
                    f"{self.folder.url}: snapshot {self.snapshot} needs manifest/{file.path}, which is gone or "
                    f"damaged: {plain(error)}. Put it back, or open another snapshot, which may do without. (`gc` "
                    "removes what old snapshots read, but for those that a lock file names.)"
                ) from error
        if not tables:
            return schema.empty_table()
        return pa.concat_tables([table.cast(schema) for table in tables]).unify_dictionaries()

    def _ordered(
        self, stage: str, columns: Iterable[str] | None, encoded: bool
    ) -> tuple[pa.Table, np.ndarray, np.ndarray]:
        """All rows of a stage; of each row the rank of its item; row numbers by item, an item's oldest row first."""
        wanted = set(ROW_COLUMNS if columns is None else columns)
        if unknown := wanted - set(SCHEMA.names):
            raise ValueError(f"unknown columns {sorted(unknown)}; choose from {SCHEMA.names}")
        names = [name for name in _FILE_SCHEMA.names if name in wanted or name in ("item", *_ORDER)]
        table = self._read(self._of_stage(stage), names, encoded=encoded)
        codes = _ranks(table["item"].combine_chunks())
        if not len(codes) or codes.max() == len(codes) - 1:  # no item twice
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


def _ranks(items: pa.Array) -> np.ndarray:
    """The rank of each item among the different ones."""
    if not pc.any(pc.less(items[1:], items[:-1])).as_py():  # sorted already, as a compacted table is
        return np.cumsum(np.append(False, pc.not_equal(items[1:], items[:-1])))[: len(items)]
    encoded = pc.dictionary_encode(items)
    codes, different = encoded.indices.to_numpy(), encoded.dictionary
    if not pc.all(pc.less(different[:-1], different[1:])).as_py():
        rank = np.empty(len(different), np.int64)
        rank[pc.sort_indices(different).to_numpy()] = np.arange(len(different))
        codes = rank[codes]
    return codes


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.int64()).to_numpy() if pa.types.is_timestamp(column.type) else column.to_numpy()

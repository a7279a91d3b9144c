"""Records by key, from a store at one snapshot."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import zlib
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import lock as lock_file
from storage.columns import Shard
from storage.delta_log import EMPTY
from storage.errors import CorruptShard, RecordMissing, SchemaError, StageMissing, StoreNotFound, StoreUnwritable, near
from storage.files import Folder
from storage.join import Join, StoreMapping
from storage.manifest import Manifest, Row
from storage.schema import Record, Schema
from storage.shards import open_shard

_SINGLE_LOOKUPS = 8  # keys looked up one by one in the manifest before a stage's index is read whole


def open(
    url: str | os.PathLike[str] | None = None, snapshot: int | None = None, lock: str | os.PathLike[str] | None = None
) -> Cache:
    """Open a store for reading.

    Args:
        url: folder or fsspec URL.
        snapshot: version to read, the newest by default.
        lock: a file that `Cache.lock` wrote: reads the snapshot it names (of `url` where that is given too).

    Raises:
        StoreNotFound: no such store or snapshot, no such lock file, or the lock is of another store.
        ValueError: `snapshot` and the lock name different ones.
    """
    if lock is None:
        if url is None:
            raise TypeError("give the store's url, or lock=FILE")
        return Cache(url, snapshot)
    named = lock_file.read(lock)
    if snapshot not in (None, named.snapshot):
        raise ValueError(
            f"snapshot={snapshot}, but {os.fspath(lock)} names snapshot {named.snapshot}: give one of the two"
        )
    cache = Cache(named.url if url is None else url, named.snapshot)
    if cache.manifest.id != named.manifest:
        raise StoreNotFound(
            f"{os.fspath(lock)} is of another store than {cache.url}: it names manifest {named.manifest}, here is "
            f"{cache.manifest.id}"
        )
    return cache


class Cache(StoreMapping["Records"]):
    """A store at one snapshot: stage name -> `Records`. It pickles, and works in forked and spawned processes."""

    def __init__(self, url: str | os.PathLike[str], snapshot: int | None = None) -> None:
        self.manifest = Manifest(url, snapshot)
        self.url = self.manifest.folder.url
        if self.manifest.snapshot == EMPTY:
            raise StoreNotFound(f"no store at {self.url}: it has no manifest. A run with --store makes one")
        self._records: dict[str, Records] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": {}}

    def __repr__(self) -> str:
        return f"Cache({self.url!r}, snapshot={self.snapshot}, stages={self.stages})"

    @property
    def snapshot(self) -> int:
        """Version of the manifest that is read; give it to `open` to read the same again."""
        return self.manifest.snapshot

    @property
    def stages(self) -> list[str]:
        return self.manifest.stages()

    def refresh(self) -> None:
        """Move on to the newest snapshot. `Records` taken before stay where they are."""
        self.manifest = Manifest(self.url)
        self._records = {}

    def __contains__(self, stage: object) -> bool:
        return stage in self.stages

    def __iter__(self) -> Iterator[str]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, stage: str) -> Records:
        if stage not in self._records:
            if stage not in self.stages:
                raise StageMissing(f"{self.url} has no stage {stage!r}{near(stage, self.stages)}")
            self._records[stage] = Records(_Stage(self.manifest, stage))
        return self._records[stage]

    def join(self, *stages: str | Records, missing: Literal["drop", "raise", "mask"] = "drop") -> Join:
        """Several stages under the same keys.

        Args:
            stages: names, or `Records` with a selection of columns.
            missing: what to do about keys that not all stages have: leave them out, raise, or give None.

        Raises:
            RecordMissing: with `raise`, naming some of the keys.
        """
        return Join([self[stage] if isinstance(stage, str) else stage for stage in stages], missing)

    def lock(self, path: str | os.PathLike[str] | None = None) -> Path | str:
        """Write a lock file: what it names is kept by `gc` until the file in the store's `locks` folder is removed.

        Args:
            path: where to write a further copy, beside a checkpoint for instance; `open(lock=path)` reads it.

        Returns:
            Path of that copy, or of the file in the store.

        Raises:
            StoreUnwritable: the file can't be written. Where that is the one in the store, of which there is a copy, it
                is a warning: `gc` must then be given the copy.
        """
        copy = Path(path).absolute() if path is not None else None
        content = {
            "url": self.url, "snapshot": self.snapshot, "stages": self.stages, "manifest": self.manifest.id,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "for": str(copy or ""),
        }  # fmt: skip
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        name = f"{self.snapshot}-{copy.stem}-{zlib.crc32(bytes(copy)):08x}" if copy else f"{self.snapshot}"
        if copy:
            Folder(copy.parent).put_text(copy.name, text)
        try:
            self.manifest.folder.put_text(f"locks/{name}.json", text)
        except StoreUnwritable as error:
            if copy is None:
                raise
            warnings.warn(f"{error}. So gc knows of this lock only as `gc --lock {copy}`", stacklevel=2)
        return copy or self.manifest.folder.path(f"locks/{name}.json")


@dataclass
class _Index:
    """Where the records of a stage lie.

    Attributes:
        position: number of every key's record.
        spans: (record, 3) int64: shard, first row, rows.
        order: numbers of the records, shard by shard.
        shards: file, size in bytes and `mapped` of each shard.
        newest: number of the shard that holds the newest record, 0 where there is none.
    """

    position: dict[str, int]
    spans: np.ndarray
    order: np.ndarray
    shards: list[tuple[str, int, bool]]
    newest: int


class _Stage:
    """What all selections of a stage's records share: its rows in the manifest, and its open shards."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        self.manifest, self.name = manifest, name
        self._found: dict[str, Row | None] = {}
        self._index: _Index | None = None
        self._schema: Schema | None = None
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Stage, (self.manifest, self.name)  # index and mappings are made anew where it arrives

    @property
    def index(self) -> _Index:
        if self._index is None:
            with self.lock:
                if self._index is None:
                    self._index = self._read_index()
        return self._index

    @property
    def indexed(self) -> bool:
        return self._index is not None

    def _read_index(self) -> _Index:
        columns = ["item", "status", "shard", "first_row", "rows", "shard_bytes", "mapped", "time"]
        table = self.manifest.latest(self.name, columns)
        table = table.filter(pc.is_in(table["status"], value_set=pa.array(["ok", "empty"])))
        encoded = pc.dictionary_encode(table["shard"].combine_chunks())
        numbers = encoded.indices.to_numpy()
        _, samples = np.unique(numbers, return_index=True)
        sizes, mapped = table["shard_bytes"].to_numpy()[samples].tolist(), table["mapped"].to_numpy()[samples].tolist()
        spans = np.stack([numbers, table["first_row"].to_numpy(), table["rows"].to_numpy()], axis=1).astype(np.int64)
        index = _Index(
            dict(zip(table["item"].to_pylist(), range(table.num_rows), strict=True)),
            spans,
            np.argsort(spans[:, 0], kind="stable"),
            list(zip(encoded.dictionary.to_pylist(), sizes, mapped, strict=True)),
            int(numbers[np.argmax(table["time"].cast(pa.int64()).to_numpy())]) if len(numbers) else 0,
        )
        del table, encoded, numbers
        pa.default_memory_pool().release_unused()  # a hundred bytes an item, in each process that reads
        return index

    def records(self, shard: int) -> np.ndarray:
        """Numbers of the records in a shard."""
        order, shards = self.index.order, self.index.spans[:, 0]
        first, stop = np.searchsorted(shards, [shard, shard + 1], sorter=order)
        return order[first:stop]

    def row(self, key: str) -> Row:
        """The manifest row of a key, whatever its status; RecordMissing where there is none."""
        if key not in self._found:
            self._found[key] = self.manifest.find(self.name, key) if isinstance(key, str) else None
        row = self._found[key]
        if row is None:
            raise RecordMissing(f"{self.name} has no record for {key!r}{near(key, list(self.index.position))}")
        return row

    def readable(self, key: str) -> Row:
        row = self.row(key)
        if row.status not in ("ok", "empty"):
            text = f": {row.error_class}: {row.error_text}" if row.error_class else ""
            raise RecordMissing(f"{self.name} has no record for {key!r}, it is marked {row.status}{text}")
        return row

    def many_lookups(self) -> bool:
        return len(self._found) >= _SINGLE_LOOKUPS

    def open(self, shard: tuple[str, int, bool]) -> Shard:
        return open_shard(self.manifest.folder, *shard)

    @property
    def schema(self) -> Schema:
        if self._schema is None:
            index = self.index
            if not index.shards:
                raise StoreNotFound(
                    f"{self.name} has no record yet, so its columns are unknown; `scenecache failures` says why"
                )
            self._schema = self.open(index.shards[index.newest]).schema
        return self._schema


class Records(StoreMapping[Record]):
    """The records of a stage by item key, sorted by key.

    Arrays are read-only views of the mapped shard where it is mapped; copy (`np.array`) what you want to change.
    Failed items are not among the keys; asking for one raises RecordMissing with its error. Columns are those of
    `schema`: a record of an older recipe that lacks one raises SchemaError, unless others are selected.
    """

    def __init__(self, stage: _Stage, columns: tuple[str, ...] | None = None) -> None:
        self._stage = stage
        self._names = columns
        # What a read needs of a record is in one place of memory: the shard's number + 1 (0 before the record's first
        # read), the number of elements, and where each column's values start.
        self._places = array("i")
        self._width = 0  # of a place
        self._laid_out: Sequence[str] = ()  # columns in a place
        self._columns: list[list[tuple[str, Any, int]]] = [[]]  # by shard + 1: name, values, step (see `Shard.reach`)
        self._position: Mapping[str, int] = {}  # the index's, once the above is laid out

    def __reduce__(self) -> tuple[Any, ...]:
        return Records, (self._stage, self._names)

    def __repr__(self) -> str:
        return f"Records({self.stage!r}, {self._names or 'all columns'}, snapshot={self._stage.manifest.snapshot})"

    @property
    def stage(self) -> str:
        return self._stage.name

    @property
    def schema(self) -> Schema:
        """Columns of the records, those selected; of the newest one, where an older recipe gave others."""
        schema = self._stage.schema
        if self._names is None:
            return schema
        return Schema({n: schema.columns[n] for n in self._names}, schema.element, schema.format, schema.compress)

    @property
    def recipe(self) -> dict[str, Any]:
        """What made the newest record: extractor, version, settings, weights (`row(key).recipe` is one item's id)."""
        latest = self._stage.manifest.latest(self.stage, ["recipe", "time"])
        newest = int(np.argmax(latest["time"].cast("int64").to_numpy()))
        return self._stage.manifest.recipe(latest["recipe"][newest].as_py())

    def select(self, *columns: str) -> Records:
        """The same records with some columns only, which reads faster."""
        if not columns:
            raise TypeError(
                f"select() needs the names of columns; {self.stage} has {', '.join(self._stage.schema.columns)}"
            )
        known = list(self._stage.schema.columns)
        if unknown := [c for c in columns if c not in known]:
            if not isinstance(unknown[0], str):
                raise TypeError(f"select() takes names one by one, select('{known[0]}', ...), not {unknown[0]!r:.60}")
            raise StoreNotFound(
                f"{self.stage} has no column {unknown[0]!r}{near(unknown[0], known)}; it has {', '.join(known)}"
            )
        return Records(self._stage, columns)

    def row(self, key: str) -> Row:
        """The manifest row of a key: status, fingerprint, recipe, digest, seconds ... also of a failed one."""
        return self._stage.row(key)

    def digest(self, key: str) -> bytes:
        """Digest of a record's content."""
        return self._stage.readable(key).digest

    def shards(self, keys: Sequence[str]) -> np.ndarray:
        """(key,) number of the shard that holds each record, -1 for a key without one: what is near what on disk."""
        index = self._stage.index
        positions = np.array([index.position.get(key, -1) for key in keys], np.int64)
        return np.where(positions < 0, -1, index.spans[positions, 0]) if len(index.spans) else positions

    def __getitem__(self, key: str) -> Record:
        try:
            position = self._position[key]
        except (KeyError, TypeError):
            return self._find(key)
        places, at = self._places, position * self._width
        columns = self._columns[places[at]] or self._open(position)
        rows = places[at + 1]
        record = {}
        for name, values, step in columns:  # a comprehension would cost a call
            start = places[at + 2]
            record[name] = values[start : start + rows * step : step]
            at += 1
        return record

    def _find(self, key: str) -> Record:
        """`__getitem__` before the places are laid out, and for what has none."""
        stage = self._stage
        if not isinstance(key, str):
            raise (RecordMissing if isinstance(key, Hashable) else TypeError)(
                f"{stage.name}: {key!r:.60} is no key, which is a text. By position: list(records)[i], or MapDataset; "
                "several: [records[key] for key in keys]"
            )
        if self._position or not (stage.indexed or stage.many_lookups()) or key not in stage.index.position:
            return self._read(stage.readable(key))
        index = stage.index
        with stage.lock:
            if not self._position:
                self._laid_out = self._names or self._all_columns(index.spans[index.position[key], 0])
                self._width = 2 + len(self._laid_out)
                self._places = array("q", bytes(8 * self._width * len(index.position)))
                self._columns = [[] for _ in range(2 + len(index.shards))]
                self._position = index.position  # last: other threads may be reading
        return self[key]

    def _all_columns(self, shard: int) -> Sequence[str]:
        """Names of the schema's columns; where the shard that would tell them is lost, those of the shard asked for."""
        try:
            return list(self._stage.schema.columns)
        except CorruptShard:
            return list(self._stage.open(self._stage.index.shards[shard]).columns)

    def _open(self, position: int) -> list[tuple[str, Any, int]]:
        """Fill in the places of all records in the shard of one; returns the shard's columns."""
        index = self._stage.index
        number = int(index.spans[position, 0])
        shard = self._stage.open(index.shards[number])
        _check_columns(shard, self._laid_out, index.shards[number][0])
        records = self._stage.records(number)
        places = np.frombuffer(self._places, np.int64).reshape(-1, self._width)
        _, first, rows = index.spans[records].T
        columns = []
        for i, name in enumerate(self._laid_out, 2):
            values, step, starts = shard.reach(name)
            places[records, i] = np.where(rows, starts(first), 0)
            columns.append((name, _Single(values) if shard.schema.element is None else values, step))
        self._columns[1 + number] = columns
        self._columns[-1] = [(name, shard.columns[name][0:0], 1) for name, _, _ in columns]
        places[records, 1] = rows
        places[records, 0] = np.where(rows, 1 + number, 1 + len(index.shards))  # last, too
        return self._columns[places[position, 0]]

    def _read(self, row: Row) -> Record:
        return read_record(self._stage.manifest.folder, row, columns=self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._stage.index.position

    def __iter__(self) -> Iterator[str]:
        return iter(self._stage.index.position)

    def __len__(self) -> int:
        return len(self._stage.index.position)


class _Single:
    """Values without an element axis."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __getitem__(self, rows: slice) -> np.ndarray:
        values = self._values[rows]
        return values.reshape(values.shape[1:])


def read_record(
    url: str | os.PathLike[str] | Folder, row: Row, schema: Schema | None = None, columns: Sequence[str] | None = None
) -> Record:
    """Read one record by its manifest row, without an index; what workers use.

    Args:
        schema: the stage's schema; where given, a shard with other columns is an error.
        columns: names of the columns to read, all by default.

    Raises:
        CorruptShard: the shard is missing or not what the row says.
        SchemaError: it lacks one of `columns`.
    """
    folder = url if isinstance(url, Folder) else Folder(url)
    shard = open_shard(folder, row.shard, row.shard_bytes, row.mapped)
    rows = slice(row.first_row, row.first_row + row.rows)
    if schema is not None and dict(shard.schema.columns) != dict(schema.columns):
        raise CorruptShard(f"{row.shard} holds columns {list(shard.schema.columns)}, expected {list(schema.columns)}")
    _check_columns(shard, columns or (), row.shard)
    record = {name: shard.columns[name][rows] for name in columns or shard.columns}
    if shard.schema.element is None:
        return {name: values.reshape(values.shape[1:]) for name, values in record.items()}
    return record


def _check_columns(shard: Shard, names: Sequence[str], path: str) -> None:
    if lacking := [name for name in names if name not in shard.columns]:
        raise SchemaError(
            f"{path}, of an older recipe, has no column {', '.join(map(repr, lacking))}: it has "
            f"{', '.join(shard.columns)}. select() those, or run the job for its items again"
        )

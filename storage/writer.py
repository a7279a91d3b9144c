"""Records into shards. A shard exists whole or not at all, and counts once the manifest names it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from storage import hdf5, parquet
from storage.errors import SchemaError
from storage.files import Folder, check_stage
from storage.fingerprint import SIZE, record_digest
from storage.manifest import Row
from storage.schema import Record, Schema


class ShardWriter:
    """Collects the records of one stage and writes them as shards.

    Args:
        url: the store.
        stage: name of the stage.
        schema: columns of its records.
        target_bytes: size of a shard, after which `full` is true.
    """

    def __init__(self, url: str | os.PathLike[str], stage: str, schema: Schema, target_bytes: int = 128 << 20) -> None:
        self.folder = Folder(url)
        self.stage = check_stage(stage)
        self.schema = schema
        self.target_bytes = target_bytes
        self._format: Any = hdf5 if schema.format == "hdf5" else parquet
        self._batch: list[tuple[Row, Record]] = []
        self.pending = 0

    @property
    def full(self) -> bool:
        """Whether it is time to flush."""
        return self.pending >= self.target_bytes

    def add(self, row: Row, record: Mapping[str, np.ndarray]) -> None:
        """Take a record; its arrays must not be changed any more.

        Args:
            row: stage, item, fingerprint, inputs and recipe; what depends on the shard is filled in by `flush`.

        Raises:
            SchemaError: the record does not fit the schema.
        """
        where = f"{self.stage} {row.item!r}"
        if row.stage != self.stage:
            raise ValueError(f"{where}: the row is of stage {row.stage}")
        checked = self.schema.check(record, where)
        try:
            digest = record_digest(checked)
        except UnicodeEncodeError as error:
            raise SchemaError(f"{where}: a string is not valid Unicode: {error}") from error
        count = self.schema.rows(checked)
        size = sum(_size(array) for array in checked.values())
        if size > self._format.MAX_BYTES:
            raise SchemaError(f"{where}: {size / 1e9:.1f} GB in one record; use format='hdf5' for records over 1 GB")
        row = replace(row, status="ok" if count else "empty", rows=count, bytes=size, digest=digest)
        self._batch.append((row, checked))
        self.pending += size

    def flush(self) -> list[Row]:
        """Write what is pending.

        Returns:
            The rows of the records, complete, for `Manifest.commit`.

        Raises:
            StoreUnwritable: disk full, read-only ...; what is pending stays pending, so a later flush may succeed.
        """
        batch, self._batch, self.pending = self._batch, [], 0
        done: list[Row] = []
        try:
            while len(done) < len(batch):
                done += self._write(batch[len(done) :])
        except BaseException:
            self._batch = batch + self._batch
            self.pending = sum(row.bytes for row, _ in self._batch)
            raise
        return done

    def _write(self, batch: list[tuple[Row, Record]]) -> list[Row]:
        """Write the first records of a batch, as many as fit one shard, and return their rows."""
        total, count = 0, 0
        for row, _ in batch:
            total += row.bytes
            if count and total > self._format.MAX_BYTES:
                break
            count += 1
        rows = [row for row, _ in batch[:count]]
        records = [record for _, record in batch[:count]]
        name = f"{self.stage}/{self._identity(rows)}{self._format.SUFFIX}"
        mapped = False

        def write(path: str) -> None:
            nonlocal mapped
            mapped = self._format.write(path, self.schema, [row.item for row in rows], records)

        size = self.folder.put(name, write)
        first, done = 0, []
        for row in rows:
            done.append(replace(row, shard=name, first_row=first, shard_bytes=size, mapped=mapped))
            first += row.rows
        return done

    def _identity(self, rows: list[Row]) -> str:
        """Name of a shard: equal content gives an equal file under the same name, however often it is written."""
        digest = hashlib.sha256(f"{self._format.engine()} {json.dumps(self.schema.to_json())}".encode())
        for row in rows:
            item = row.item.encode()
            digest.update(len(item).to_bytes(8, "little") + item + row.digest)
        return digest.hexdigest()[: 2 * SIZE]


def _size(array: np.ndarray) -> int:
    if array.dtype != object:
        return array.nbytes
    return sum(getattr(value, "nbytes", None) or len(value) for value in array.flat)

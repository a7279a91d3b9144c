"""Records into shards. A shard exists whole or not at all, and counts once the manifest names it.

While one shard is hashed, written and synced in a thread, the records of the next are collected.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
        target_bytes: size of a shard; the record after that begins the next one.

    Attributes:
        pending: bytes of records that are not being written yet.
    """

    def __init__(self, url: str | os.PathLike[str], stage: str, schema: Schema, target_bytes: int = 128 << 20) -> None:
        self.folder = Folder(url)
        self.stage = check_stage(stage)
        self.schema = schema
        self.target_bytes = target_bytes
        self._format: Any = hdf5 if schema.format == "hdf5" else parquet
        self._batch: list[tuple[Row, Record, int]] = []
        self.pending = 0
        self._since = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"write-{stage}")
        self._writing: tuple[list[tuple[Row, Record, int]], Future[list[Row]]] | None = None
        self._written: list[Row] = []

    @property
    def waiting_s(self) -> float:
        """Seconds that the oldest of the pending records waits."""
        return time.monotonic() - self._since if self._batch else 0.0

    def add(self, row: Row, record: Mapping[str, np.ndarray]) -> None:
        """Take a record; its arrays must not be changed any more. Begins to write what is pending where that is enough.

        Args:
            row: stage, item, fingerprint, inputs and recipe; what depends on the shard is filled in when it is written.

        Raises:
            SchemaError: the record does not fit the schema.
            StoreUnwritable: the shard before could not be written; its records are pending, this one was not taken.
        """
        where = f"{self.stage} {row.item!r}"
        if row.stage != self.stage:
            raise ValueError(f"{where}: the row is of stage {row.stage}")
        checked = self.schema.check(record, where)
        size = sum(_size(array) for array in checked.values())
        if size > self._format.MAX_BYTES:
            raise SchemaError(f"{where}: {size / 1e9:.1f} GB in one record; use format='hdf5' for records over 1 GB")
        if self.pending >= self.target_bytes:
            self.start()
        if not self._batch:
            self._since = time.monotonic()
        self._batch.append((row, checked, size))
        self.pending += size

    def start(self) -> None:
        """Begin to write what is pending, after the shard before.

        Raises:
            StoreUnwritable: the shard before could not be written: disk full, read-only ...; its records are pending
                again, so a later try may succeed.
        """
        self._finish()
        if self._batch:
            self._writing = self._batch, self._thread.submit(self._write_all, self._batch)
            self._batch, self.pending = [], 0

    def written(self) -> list[Row]:
        """Rows of the records that are in shards by now, each once and complete, for `Manifest.commit`.

        Raises:
            StoreUnwritable: as `start`.
        """
        if self._writing and self._writing[1].done():
            self._finish()
        rows, self._written = self._written, []
        return rows

    def flush(self) -> list[Row]:
        """Write what is pending and wait for it; then `written`.

        Raises:
            StoreUnwritable: as `start`.
        """
        self.start()
        self._finish()
        return self.written()

    def close(self) -> None:
        """Wait for the shard that is being written; what is pending is dropped."""
        self._thread.shutdown()

    def _finish(self) -> None:
        """Wait for the shard that is being written, if any."""
        if self._writing is None:
            return
        batch, shards = self._writing
        wait((shards,))  # what interrupts this leaves the shard being written
        self._writing = None
        try:
            self._written += shards.result()
        except Exception:
            self._batch = batch + self._batch
            self.pending += sum(size for _, _, size in batch)
            raise

    def _write_all(self, batch: list[tuple[Row, Record, int]]) -> list[Row]:
        done: list[Row] = []
        while len(done) < len(batch):
            done += self._write(batch[len(done) :])
        return done

    def _write(self, batch: list[tuple[Row, Record, int]]) -> list[Row]:
        """Write the first records of a batch, as many as fit one shard, and return their rows."""
        total, count = 0, 0
        for _, _, size in batch:
            total += size
            if count and total > self._format.MAX_BYTES:
                break
            count += 1
        rows, records, sizes = zip(*batch[:count], strict=True)
        keys = [row.item for row in rows]
        digests = [b""] * count
        left = iter(range(count))
        mapped = False

        def hash_some() -> None:
            for i in left:  # two threads take from it
                digests[i] = record_digest(records[i])

        def write(path: str) -> str:
            nonlocal mapped
            with ThreadPoolExecutor(1) as hashing:  # sha256 and the writing of large arrays both let other threads run
                hashed = hashing.submit(hash_some)
                mapped = self._format.write(path, self.schema, keys, records)
                hash_some()
                hashed.result()
            return f"{self._identity(keys, digests)}{self._format.SUFFIX}"

        shard, shard_bytes = self.folder.put_new(self.stage, write)
        first, done = 0, []
        for row, record, size, digest in zip(rows, records, sizes, digests, strict=True):
            elements = self.schema.rows(record)
            done.append(
                row.placed(
                    status="ok" if elements else "empty", shard=shard, first_row=first, rows=elements, digest=digest,
                    bytes=size, shard_bytes=shard_bytes, mapped=mapped,
                )
            )  # fmt: skip
            first += elements
        return done

    def _identity(self, keys: list[str], digests: list[bytes]) -> str:
        """Name of a shard: equal content gives an equal file under the same name, however often it is written."""
        digest = hashlib.sha256(f"{self._format.engine()} {json.dumps(self.schema.to_json())}".encode())
        for key, content in zip(keys, digests, strict=True):
            item = key.encode()
            digest.update(len(item).to_bytes(8, "little") + item + content)
        return digest.hexdigest()[: 2 * SIZE]


def _size(array: np.ndarray) -> int:
    if array.dtype != object:
        return array.nbytes
    return sum(getattr(value, "nbytes", None) or len(value) for value in array.flat)

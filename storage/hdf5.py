"""HDF5 shards: one contiguous dataset per column, which numpy maps through the dataset's offset in the file.

The file has the schema as JSON in the attribute `scenecache`, a dataset `item` (the key of every row), and per column a
dataset (row, *dims): numbers as they are, booleans as HDF5's enum, strings and lists of any length as variable-length,
bytes as lists of uint8. A missing value of a nullable column is NaN. With compression (gzip) the datasets are chunked,
and decoded when read.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from storage.columns import Decoded, Shard, Values, map_file, prove
from storage.errors import CorruptShard
from storage.files import Folder
from storage.schema import Column, Record, Schema

SUFFIX = ".h5"
MAX_BYTES = 1 << 40
_GROUP_BYTES = 1 << 20  # raw bytes of a chunk, and of a piece that is decoded at once


def engine() -> str:
    """What decides the bytes of a file besides its content."""
    import h5py

    return f"h5py {h5py.__version__} hdf5 {h5py.version.hdf5_version}"


def write(path: str, schema: Schema, keys: Sequence[str], records: Sequence[Record]) -> bool:
    """Write records as one shard; arguments, result and errors as in `storage.parquet.write`."""
    import h5py

    counts = [schema.rows(record) for record in records]
    rows = sum(counts)
    with _Output(path) as output, h5py.File(output, "w", libver="v110") as file:
        file.attrs["scenecache"] = json.dumps(schema.to_json())
        file.create_dataset("item", data=np.repeat(np.array(keys, object), counts), dtype=h5py.string_dtype())
        for name, column in schema.columns.items():
            dataset = file.create_dataset(name, (rows, *column.element_shape), **_storage(schema, column))
            arrays = [record[name] if schema.element else record[name][None] for record in records]
            if column.numpy.hasobject:
                _write_objects(dataset, np.concatenate(arrays))
                continue
            first = 0
            for array in arrays:
                if len(array):
                    dataset[first : first + len(array)] = array
                first += len(array)
                output.check()
    if schema.compress:
        return False
    shard = read(Folder(os.path.dirname(path)), os.path.basename(path), ("proof",), mapped=True)
    prove(shard, records, path, sorted({0, len(records) - 1}) if records else [])
    return True


class _Output(io.RawIOBase):
    """A new file for HDF5 to write to. It takes everything, and raises when closed where the disk did not.

    HDF5 itself can't be told of a failed write: it would keep the file half open, and end the process with a
    segmentation fault once that is collected.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._position = self._end = 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error of the disk."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)
            self.check()

    def write(self, data: Any) -> int:
        count, done = len(data), 0
        try:
            while done < count and self._error is None:
                done += os.pwrite(self._fd, data[done:], self._position + done)
        except OSError as error:
            self._error = error
        self._position += count
        self._end = max(self._end, self._position)
        return count

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._end - self._position))
        buffer[:count] = os.pread(self._fd, count, self._position).ljust(count, b"\0")  # zeros for what was not written
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._end = self._position if size is None else size
        try:
            os.truncate(self._fd, self._end)
        except OSError as error:
            self._error = self._error or error
        return self._end


def _storage(schema: Schema, column: Column) -> dict[str, Any]:
    """Arguments of create_dataset."""
    import h5py

    if column.dtype == "string":
        return {"dtype": h5py.string_dtype()}
    if column.dtype == "bytes":
        return {"dtype": h5py.vlen_dtype(np.uint8)}
    if None in column.dims:
        return {"dtype": h5py.vlen_dtype(np.dtype(column.dtype))}
    if not schema.compress:
        return {"dtype": column.dtype}
    return {
        "dtype": column.dtype, "chunks": (_group(column), *column.dims), "maxshape": (None, *column.dims),
        "compression": "gzip", "compression_opts": 1, "shuffle": True,
    }  # fmt: skip


def _write_objects(dataset: Any, values: np.ndarray) -> None:
    """Write text or lists. Lists go past h5py's high-level interface, which takes a list of one list for its values."""
    import h5py

    if h5py.check_string_dtype(dataset.dtype):
        dataset[...] = values
        return
    lists = np.empty(len(values), dataset.dtype)
    for i, value in enumerate(values):
        lists[i] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, lists)


def _group(column: Column) -> int:
    """Rows of one chunk, and of one piece that is decoded at once."""
    size = 1024 if column.numpy.hasobject else math.prod(column.element_shape) * np.dtype(column.dtype).itemsize
    return max(1, _GROUP_BYTES // size)


def read(folder: Folder, name: str, state: tuple, mapped: bool) -> Shard:
    """Open a shard (see `storage.shards.open_shard`)."""
    import h5py

    path = folder.path(name)
    buffer = map_file(path) if mapped and folder.local is not None else None

    def opened() -> Any:
        if folder.local is None:
            return h5py.File(folder.fs.open(path), "r")
        return h5py.File(path, "r", locking=False)  # nobody writes a shard, and not every file system has locks

    columns: dict[str, Values] = {}
    with opened() as file:
        if "scenecache" not in file.attrs:
            raise CorruptShard("the file has no 'scenecache' attribute; was it written by another program?")
        schema = Schema.from_json(json.loads(file.attrs["scenecache"]))
        for column_name, column in schema.columns.items():
            dataset = file[column_name]
            offset = dataset.id.get_offset() if not column.numpy.hasobject else None
            if buffer is not None and offset is not None:
                values = np.frombuffer(buffer, column.dtype, dataset.size, offset).reshape(dataset.shape)
                columns[column_name] = values
            else:
                columns[column_name] = _decoded(column_name, column, opened, (path, state), len(dataset))
    return Shard(schema, columns)


def _decoded(name: str, column: Column, opened: Any, source: tuple, rows: int) -> Decoded:
    group = _group(column)
    bounds = [*range(0, rows, group), rows]

    def decode(index: int) -> np.ndarray:
        with opened() as file:
            dataset = file[name].asstr() if column.dtype == "string" else file[name]
            values = dataset[bounds[index] : bounds[index + 1]]
        if column.dtype == "bytes":
            values[:] = [value.tobytes() for value in values]
        return values

    return Decoded((*source, name), bounds, decode, np.empty((0, *column.element_shape), column.numpy))

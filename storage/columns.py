"""Columns of a shard that is open for reading, sliced by element rows.

Columns whose bytes lie in the file as numpy has them (see `storage/parquet.py` and `storage/hdf5.py`) are views of its
mapping; the others are decoded in pieces, of which a process keeps the latest ones.

A Parquet shard is cut into row groups, between records: a record lies in one group. Rows are always counted from the
first of the shard.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from storage.errors import CacheError, CorruptShard, of_this_machine
from storage.files import Folder
from storage.schema import Record, Schema

DECODED_BYTES = 256 << 20  # decoded pieces that a process keeps


class Values(Protocol):
    """One column of a shard. An ndarray is one."""

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Elements `rows` (start and stop given, step 1, in one row group), first axis = elements, read-only."""
        ...


@dataclass(frozen=True)
class Shard:
    """An open shard.

    Attributes:
        schema: what its columns are.
        columns: their values.
    """

    schema: Schema
    columns: Mapping[str, Values]

    def reach(self, name: str) -> tuple[Any, int, Callable[[np.ndarray], np.ndarray]]:
        """The shortest way to a column of many records.

        Returns:
            `values` and `step`, for the whole shard, and a function of records' first rows that gives a `start` each:
            `values[start : start + n * step : step]` are a record's n elements.
        """
        values = self.columns[name]
        if isinstance(values, Fixed):
            return values.at, values.step, values.starts
        return values, 1, lambda rows: rows


class Fixed:
    """Values of a fixed size, side by side in each row group of a file.

    Args:
        at: elements by address: `at[start : stop : step]` are those from `start` to `stop`.
        step: addresses from one element to the next.
        stops: where each group ends (last row + 1).
        begins: address of each group's first element.
    """

    def __init__(self, at: Any, step: int, stops: Sequence[int], begins: Sequence[int]) -> None:
        self.at, self.step, self._stops = at, step, stops
        self._empty = at[0:0:step].copy()  # a slice without elements would have strides that torch refuses
        self._empty.flags.writeable = False
        self._origins = [begin - row * step for begin, row in zip(begins, [0, *stops], strict=False)]

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Addresses of rows."""
        groups = np.minimum(np.searchsorted(self._stops, rows, side="right"), len(self._stops) - 1)
        return np.array(self._origins)[groups] + rows * self.step

    def __getitem__(self, rows: slice) -> np.ndarray:
        if rows.start == rows.stop:
            return self._empty
        start = self._origins[_group(self._stops, rows.start)] + rows.start * self.step
        return self.at[start : start + (rows.stop - rows.start) * self.step : self.step]


def _group(stops: Sequence[int], row: int) -> int:
    return min(bisect_right(stops, row), len(stops) - 1)  # a record without elements may stand behind the last row


def by_byte(buffer: pa.Buffer, dtype: np.dtype, dims: tuple[int, ...]) -> np.ndarray:
    """(byte, *dims) the element that begins at each byte of a mapped file.

    One array, however many row groups: with an array for each, random reads would find these in slow memory every time.
    """
    element: np.ndarray = np.ndarray((1, *dims), dtype, buffer)
    shape, strides = (buffer.size - element.nbytes + 1, *dims), (1, *element.strides[1:])
    return np.ndarray(shape, dtype, buffer, 0, strides)


class Narrow:
    """Integers of 8 and 16 bits, which Parquet keeps in 32."""

    def __init__(self, data: np.ndarray, dtype: np.dtype) -> None:
        self._data, self._dtype = data, dtype

    def __getitem__(self, place: slice) -> np.ndarray:
        values = self._data[place].astype(self._dtype)
        values.flags.writeable = False
        return values


class Bits:
    """Booleans that Parquet keeps as bits, the lowest of each byte first; an address is that of a bit."""

    def __init__(self, buffer: pa.Buffer, dims: tuple[int, ...]) -> None:
        self._data, self._dims = np.frombuffer(buffer, np.uint8), dims

    def __getitem__(self, place: slice) -> np.ndarray:
        first, last = place.start, place.stop
        bits = np.unpackbits(self._data[first // 8 : -(-last // 8)], bitorder="little")
        values = bits[first % 8 : first % 8 + last - first].view(bool).reshape(-1, *self._dims)
        values.flags.writeable = False
        return values


class Ranged:
    """Values of a remote shard, read by byte range."""

    def __init__(self, folder: Folder, path: str, dtype: np.dtype, dims: tuple[int, ...]) -> None:
        self._folder, self._path, self._dtype, self._dims = folder, path, dtype, dims

    def __getitem__(self, place: slice) -> np.ndarray:
        first, last = place.start, place.stop
        data = self._folder.fs.cat_file(self._path, start=first, end=last) if last > first else b""
        return np.frombuffer(data, self._dtype).reshape(-1, *self._dims)


class Text:
    """Strings or bytes, each behind its length in 4 bytes; a row group's are found on its first use.

    Args:
        groups: first row and bytes of each row group.
        kind: str or bytes.
    """

    def __init__(self, groups: Sequence[tuple[int, memoryview]], stops: Sequence[int], kind: type, path: str) -> None:
        self._groups, self._stops, self._kind, self._path = groups, stops, kind, path
        self._starts: dict[int, np.ndarray] = {}

    def __getitem__(self, rows: slice) -> np.ndarray:
        group = _group(self._stops, rows.start)
        first, data = self._groups[group]
        starts = self._starts[group] if group in self._starts else self._find(group)
        values = np.empty(rows.stop - rows.start, object)
        bounds = starts[rows.start - first : rows.stop - first + 1].tolist()
        try:
            for i in range(len(values)):
                value = data[bounds[i] + 4 : bounds[i + 1]]
                values[i] = str(value, "utf8") if self._kind is str else bytes(value)
        except UnicodeDecodeError as error:
            raise CorruptShard(f"shard {self._path}: a text is damaged: {error}") from error
        values.flags.writeable = False
        return values

    def _find(self, group: int) -> np.ndarray:
        first, data = self._groups[group]
        starts = np.zeros(self._stops[group] - first + 1, np.int64)
        unpack, position = struct.Struct("<I").unpack_from, 0
        try:
            for i in range(1, len(starts)):
                position += 4 + unpack(data, position)[0]
                starts[i] = position
        except struct.error as error:
            raise CorruptShard(f"shard {self._path}: the length of text {i - 1} is damaged") from error
        if position != len(data):
            raise CorruptShard(f"shard {self._path}: the lengths of its texts are damaged")
        self._starts[group] = starts
        return starts


class Decoded:
    """Values that a library decodes, a group of rows at a time.

    Args:
        source: identity of the file and column, for the pieces that are kept.
        bounds: first row of each group, and the number of rows at the end.
        decode: group number -> its values.
        empty: array of no elements.
    """

    def __init__(
        self, source: tuple, bounds: list[int], decode: Callable[[int], np.ndarray], empty: np.ndarray
    ) -> None:
        self._source, self._bounds, self._decode, self._empty = source, np.array(bounds), decode, empty
        empty.flags.writeable = False

    def __getitem__(self, rows: slice) -> np.ndarray:
        if rows.start >= rows.stop:
            return self._empty
        first, last = np.searchsorted(self._bounds, [rows.start, rows.stop - 1], side="right") - 1
        parts = []
        for group in range(first, last + 1):
            start = int(self._bounds[group])
            parts.append(
                _pieces.get((*self._source, group), self._group)[max(rows.start - start, 0) : rows.stop - start]
            )
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        values.flags.writeable = False
        return values

    def _group(self, key: tuple) -> np.ndarray:
        try:
            return self._decode(key[-1])
        except CacheError:
            raise
        except Exception as error:  # what damaged bytes make a decoder say has no common base
            if of_this_machine(error):
                raise
            raise CorruptShard(f"shard {key[0]}: rows of {key[2]!r} can't be decoded: {error}") from error


class _Pieces:
    """Decoded pieces of shards, the least recently used dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple, decode: Callable[[tuple], np.ndarray]) -> np.ndarray:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        values = decode(key)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = values
                self._bytes += _memory(values)
                while self._bytes > DECODED_BYTES and len(self._kept) > 1:
                    self._bytes -= _memory(self._kept.popitem(last=False)[1])
        return values

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


def _memory(values: np.ndarray) -> int:
    if values.dtype != object:
        return values.nbytes
    return sum(getattr(value, "nbytes", None) or len(value) + 60 for value in values.flat) + values.nbytes


_pieces = _Pieces()
# A fork may happen while another thread holds the lock: the child starts with fresh ones.
os.register_at_fork(after_in_child=_pieces.clear)


def prove(shard: Shard, records: Sequence[Record], path: str, chosen: Sequence[int]) -> None:
    """Compare what the mapping of a shard shows with records that were to be written, to the last bit.

    A column is one raw array in each row group (in HDF5, in the file), so that it lies where the mapping has it once
    the first and the last record do: `chosen` names those of each group. What is in between, the manifest's digests
    tell (`verify --deep`).

    Raises:
        CorruptShard: they differ.
    """
    element = shard.schema.element
    firsts = list(itertools.accumulate((shard.schema.rows(record) for record in records), initial=0))
    for name, values in shard.columns.items():
        if isinstance(values, Decoded):
            continue
        for index in chosen:
            expected = records[index][name] if element else records[index][name][None]
            if not same(values[firsts[index] : firsts[index + 1]], expected):
                raise CorruptShard(
                    f"{path}: '{name}' reads back differently from row {firsts[index]} on. The record was changed "
                    "after it was added, or the disk is faulty, or this library version lays files out in another "
                    "way (then compress=True in the schema avoids the mapping)"
                )


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal to the last bit, NaN payloads too."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.dtype == object:
        return bool(np.array_equal(found, expected))
    return found.size == 0 or pa.py_buffer(found).equals(pa.py_buffer(expected))


def map_file(path: str) -> pa.Buffer:
    """A file's bytes, mapped read-only; no file descriptor stays open, so a process can map any number of shards."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise CorruptShard(f"{path} is empty")
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}", path)
    finally:
        os.close(fd)
    return pa.foreign_buffer(address, size, _Mapping(address, size))


class _Mapping:
    """Unmaps when the last view of it is gone."""

    def __init__(self, address: int, size: int) -> None:
        self._at = (address, size)

    def __del__(self, munmap: Any = None) -> None:
        (munmap or _libc.munmap)(*self._at)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

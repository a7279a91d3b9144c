"""Parquet shards: tables that any Parquet tool reads, laid out so that numpy can map them.

A shard has row groups of about 8 MiB (4 where it is compressed), which end between records. Without compression each
column of a group is one page of PLAIN values without nulls. The values of such a column are the last bytes of its
chunk: they start at data_page_offset + total_compressed_size - nbytes. `write` proves it. (Shards of one large group,
which earlier versions wrote, are read in the same way.)

| column | Arrow type in the file | how it is read |
| --- | --- | --- |
| one value per element | the same number | mapped (8 and 16 bit integers are 32 wide in Parquet, bools are bits) |
| up to 32 values per element | fixed_shape_tensor | the same |
| more values | fixed-size binary; dtype and shape in the field's metadata | mapped |
| string, bytes | string, binary | mapped; offsets are found on first use |
| nullable | float or list of float, NaN as null | decoded |
| lists of any length | list | decoded |

With compression (zstd) all columns are decoded.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.columns import Bits, Decoded, Fixed, Narrow, Ranged, Shard, Text, Values, by_byte, map_file, prove
from storage.errors import CorruptShard
from storage.files import Folder
from storage.schema import TEXT, Column, Record, Schema, one_nan

SUFFIX = ".parquet"
MAX_BYTES = 1 << 30  # of one shard: a page's size is a signed 32-bit number
_SMALL = 32  # values per element up to which a column keeps its numbers visible to other tools
_GROUP_BYTES = 8 << 20  # values of a row group: little enough that Arrow's buffers are used again and stay in the cache
_COMPRESSED_GROUP_BYTES = 4 << 20  # where it is compressed: for one key a whole group is decoded


def engine() -> str:
    """What decides the bytes of a file besides its content."""
    return f"pyarrow {pa.__version__} groups {_GROUP_BYTES} {_COMPRESSED_GROUP_BYTES}"


def write(path: str, schema: Schema, keys: Sequence[str], records: Sequence[Record]) -> bool:
    """Write records as one shard.

    Args:
        keys: item keys of the records.
        records: checked records.

    Returns:
        Whether the values can be mapped, proven by reading them back.

    Raises:
        CorruptShard: what was read back is not what was written.
    """
    counts = [schema.rows(record) for record in records]
    stops = _stops(counts, records, _COMPRESSED_GROUP_BYTES if schema.compress else _GROUP_BYTES)
    dictionary = pa.DictionaryArray.from_arrays(
        np.repeat(np.arange(len(keys), dtype=np.int32), counts), pa.array(keys, pa.string())
    )
    columns: list[Any] = [dictionary.cast(pa.string())]
    fields = [pa.field("item", pa.string(), nullable=False)]
    for name, column in schema.columns.items():
        field = _field(name, column)
        values = _arrow(column, field.type, [record[name] for record in records], schema.element is None)
        if column.dtype in TEXT:  # the size of each page's values, which the footer does not tell
            ends = np.cumsum(4 + pc.binary_length(values).to_numpy(), dtype=np.int64)
            sizes = np.diff(ends[np.array(stops, int) - 1], prepend=0)
            field = field.with_metadata({"value_bytes": " ".join(map(str, sizes))})
        fields.append(field)
        columns.append(values)
    table = pa.table(columns, schema=pa.schema(fields, {"scenecache": json.dumps(schema.to_json())}))
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd" if schema.compress else "none",
        use_dictionary=True if schema.compress else ["item"],
        write_statistics=["item"],
        data_page_size=MAX_BYTES if not schema.compress else None,
        max_rows_per_page=max(table.num_rows, 1),
    ) as file:
        for first, stop in itertools.pairwise([0, *stops]):
            file.write_table(table.slice(first, stop - first), row_group_size=stop - first)
    if schema.compress:
        return False
    shard = read(Folder(os.path.dirname(path)), os.path.basename(path), ("proof",), mapped=True)
    ends = np.searchsorted(np.cumsum(counts), stops)  # the record that ends each group
    prove(shard, records, path, sorted({0, *ends.tolist(), *(ends[:-1] + 1).tolist()}) if stops else [])
    return True


def _stops(counts: Sequence[int], records: Sequence[Record], group_bytes: int) -> list[int]:
    """Where the row groups end: between records, the last row + 1 of each group."""
    stops, rows, size = [], 0, 0
    for count, record in zip(counts, records, strict=True):
        rows += count
        size += sum(array.nbytes for array in record.values())
        if size >= group_bytes:
            stops.append(rows)
            size = 0
    return stops if rows == (stops[-1] if stops else 0) else [*stops, rows]


def _field(name: str, column: Column) -> pa.Field:
    value = pa.from_numpy_dtype(column.dtype) if column.dtype not in TEXT else None
    if value is None:
        return pa.field(name, pa.string() if column.dtype == "string" else pa.binary(), nullable=False)
    if None in column.dims:
        return pa.field(name, pa.list_(pa.field("element", value, nullable=False)), nullable=False)
    width = math.prod(column.element_shape)
    if column.nullable:
        return pa.field(name, pa.list_(value, width) if column.dims else value, nullable=not column.dims)
    if not column.dims:
        return pa.field(name, value, nullable=False)
    if width <= _SMALL:
        return pa.field(name, pa.fixed_shape_tensor(value, column.dims), nullable=False)
    metadata = {"dtype": np.dtype(column.dtype).str, "shape": json.dumps(column.dims)}
    return pa.field(name, pa.binary(width * np.dtype(column.dtype).itemsize), nullable=False, metadata=metadata)


def _arrow(column: Column, type: pa.DataType, arrays: list[np.ndarray], single: bool) -> Any:
    """One Arrow column from the arrays of all records; large ones are not copied."""
    if single:
        arrays = [array[None] for array in arrays]
    if pa.types.is_fixed_size_binary(type):
        chunks = [
            pa.FixedSizeBinaryArray.from_buffers(type, len(array), [None, pa.py_buffer(array)])
            for array in arrays
            if len(array)
        ]
        return pa.chunked_array(chunks, type)
    values = np.concatenate(arrays) if arrays else np.empty((0, *column.element_shape), column.numpy)
    if column.numpy.hasobject:
        return pa.array(values, type, from_pandas=False)
    flat = values.reshape(-1)
    if column.nullable:
        numbers = pa.array(flat, mask=np.isnan(flat))
        return pa.FixedSizeListArray.from_arrays(numbers, type=type) if column.dims else numbers
    if column.dims:
        return pa.ExtensionArray.from_storage(
            type, pa.FixedSizeListArray.from_arrays(pa.array(flat), type=type.storage_type)
        )
    return pa.array(flat)


@dataclass(frozen=True)
class _File:
    """An open Parquet file: how to read it again, its footer, and its mapping where values may be taken from there."""

    folder: Folder
    path: str
    state: tuple
    metadata: Any
    arrow: pa.Schema
    stops: list[int]
    open: Callable[[], Any]
    buffer: pa.Buffer | None


def read(folder: Folder, name: str, state: tuple, mapped: bool) -> Shard:
    """Open a shard (see `storage.shards.open_shard`)."""
    path = folder.path(name)
    buffer = map_file(path) if folder.local is not None else None

    def opened() -> Any:
        return pa.PythonFile(folder.fs.open(path), mode="r") if buffer is None else pa.BufferReader(buffer)

    with opened() as source:
        parsed = pq.ParquetFile(source)
        metadata = parsed.metadata
        groups = range(metadata.num_row_groups)
        stops = list(itertools.accumulate(metadata.row_group(group).num_rows for group in groups)) or [0]
        if stops != sorted(stops):
            raise CorruptShard(f"shard {path}: the footer names row groups of less than no rows")
        file = _File(folder, path, state, metadata, parsed.schema_arrow, stops, opened, buffer)
    if b"scenecache" not in (file.arrow.metadata or {}):
        raise CorruptShard("the file has no 'scenecache' schema in its metadata; was it written by another program?")
    schema = Schema.from_json(json.loads(file.arrow.metadata[b"scenecache"]))
    columns = {name: _values(file, name, column, mapped) for name, column in schema.columns.items()}
    return Shard(schema, columns)


def _values(file: _File, name: str, column: Column, mapped: bool) -> Values:
    """A column, by the fastest way that there is."""
    buffer, path, stops, text = file.buffer, file.path, file.stops, column.dtype in TEXT
    if not (mapped and stops[-1] and (column.fixed or (text and buffer is not None))):
        return _decoded(file, name, column)
    field = file.arrow.get_field_index(name)
    chunks = [file.metadata.row_group(group).column(field) for group in range(len(stops))]
    ends = [chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks]
    starts, dims = [0, *stops[:-1]], column.element_shape
    width, dtype = math.prod(dims), np.dtype(object if text else column.dtype)
    bits = chunks[0].physical_type == "BOOLEAN"
    narrow = chunks[0].physical_type == "INT32" and dtype.itemsize < 4
    raw = np.dtype(np.int32) if narrow else dtype
    if buffer is None and (bits or narrow):
        return _decoded(file, name, column)
    if text:
        sizes = list(map(int, file.arrow.field(field).metadata[b"value_bytes"].split()))
    elif bits:
        sizes = [-(-(stop - start) * width // 8) for start, stop in zip(starts, stops, strict=True)]
    else:
        sizes = [(stop - start) * width * raw.itemsize for start, stop in zip(starts, stops, strict=True)]
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    length = buffer.size if buffer is not None else file.state[1]
    if not all(0 <= begin <= end <= length for begin, end in zip(begins, ends, strict=True)):
        raise CorruptShard(f"shard {path}: the footer names values of {name!r} outside of the file")
    if text:
        parts = memoryview(buffer)  # type: ignore[arg-type]  # text is decoded where nothing is mapped
        groups = [(row, parts[begin:end]) for row, begin, end in zip(starts, begins, ends, strict=True)]
        return Text(groups, stops, TEXT[column.dtype], path)
    if buffer is None:
        return Fixed(Ranged(file.folder, path, dtype, dims), width * raw.itemsize, stops, begins)
    if bits:
        return Fixed(Bits(buffer, dims), width, stops, [8 * begin for begin in begins])
    values = by_byte(buffer, raw, dims)
    return Fixed(Narrow(values, dtype) if narrow else values, width * raw.itemsize, stops, begins)


def _decoded(file: _File, name: str, column: Column) -> Decoded:
    """A column by way of pyarrow."""

    def decode(group: int) -> np.ndarray:
        with file.open() as opened:
            table = pq.ParquetFile(opened, metadata=file.metadata).read_row_group(group, columns=[name])
        return _numpy(column, table.column(0).combine_chunks())

    return Decoded(
        (file.path, file.state, name), [0, *file.stops], decode, np.empty((0, *column.element_shape), column.numpy)
    )


def _numpy(column: Column, array: Any) -> np.ndarray:
    """An Arrow array as the numpy array it was made from (`_arrow` backwards)."""
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    shape = (len(array), *column.element_shape)
    if column.dtype in TEXT:
        texts = np.empty(shape, object)
        texts[:] = array.to_pylist()
        return texts
    if None in column.dims:
        flat = array.flatten().to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
        bounds = array.offsets.to_numpy() - array.offsets[0].as_py()
        lists = np.empty(shape, object)
        for i in range(len(lists)):
            lists[i] = flat[bounds[i] : bounds[i + 1]]
        return lists
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
        return data.view(column.dtype).reshape(shape)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    numbers = array.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    if column.nullable:  # Arrow's NaN for a null of float16 has other bits than numpy's
        numbers = one_nan(numbers)
    return numbers.reshape(shape)

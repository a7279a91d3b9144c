"""Parquet shards: tables that any Parquet tool reads, laid out so that numpy can map them.

Without compression a shard is one row group, and each column one page of PLAIN values without nulls. The values of such a
column are the last bytes of its chunk: they start at data_page_offset + total_compressed_size - nbytes. `write` proves it.

| column | Arrow type in the file | how it is read |
| --- | --- | --- |
| one value per element | the same number | mapped (8 and 16 bit integers are 32 wide in Parquet, bools are bits) |
| up to 32 values per element | fixed_shape_tensor | the same |
| more values | fixed-size binary; dtype and shape in the field's metadata | mapped |
| string, bytes | string, binary | mapped; offsets are found on first use |
| nullable | float or list of float, NaN as null | decoded |
| lists of any length | list | decoded |

With compression (zstd) a shard has small row groups and all columns are decoded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import CorruptShard
from storage.files import Folder
from storage.schema import Column, Record, Schema
from storage.shards import Bits, Decoded, Narrow, Shard, Text, Values, map_file, prove

SUFFIX = ".parquet"
MAX_BYTES = 1 << 30  # of one shard: a page's size is a signed 32-bit number
_SMALL = 32  # values per element up to which a column keeps its numbers visible to other tools
_GROUP_BYTES = 4 << 20  # raw bytes of a row group in compressed shards


def engine() -> str:
    """What decides the bytes of a file besides its content."""
    return f"pyarrow {pa.__version__}"


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
    rows = sum(counts)
    dictionary = pa.DictionaryArray.from_arrays(
        np.repeat(np.arange(len(keys), dtype=np.int32), counts), pa.array(keys, pa.string())
    )
    columns: list[Any] = [dictionary.cast(pa.string())]
    fields = [pa.field("item", pa.string(), nullable=False)]
    for name, column in schema.columns.items():
        field = _field(name, column)
        values = _arrow(column, field.type, [record[name] for record in records], schema.element is None)
        if column.dtype in ("string", "bytes"):  # the size of the page's values, which the footer does not tell
            size = 4 * rows + (pc.sum(pc.binary_length(values)).as_py() or 0)
            field = field.with_metadata({"value_bytes": str(size)})
        fields.append(field)
        columns.append(values)
    table = pa.table(columns, schema=pa.schema(fields, {"scenecache": json.dumps(schema.to_json())}))
    group = rows
    if schema.compress:
        size = sum(array.nbytes for record in records for array in record.values())
        group = min(rows, _GROUP_BYTES * rows // max(size, 1) + 1)
    pq.write_table(
        table,
        path,
        compression="zstd" if schema.compress else "none",
        use_dictionary=True if schema.compress else ["item"],
        write_statistics=["item"],
        row_group_size=max(group, 1),
        data_page_size=MAX_BYTES if not schema.compress else None,
        max_rows_per_page=max(rows, 1),
    )
    if schema.compress:
        return False
    prove(read(Folder(os.path.dirname(path)), os.path.basename(path), ("proof",), mapped=True), records, path)
    return True


def _field(name: str, column: Column) -> pa.Field:
    value = pa.from_numpy_dtype(column.dtype) if column.dtype not in ("string", "bytes") else None
    if value is None:
        return pa.field(name, pa.string() if column.dtype == "string" else pa.binary(), nullable=False)
    if None in column.dims:
        return pa.field(name, pa.list_(pa.field("element", value, nullable=False)), nullable=False)
    width = int(np.prod(column.dims, dtype=int))
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
    values = np.concatenate(arrays) if arrays else np.empty((0, *column.dims), column.numpy)
    if column.numpy == object:
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


def read(folder: Folder, name: str, state: tuple, mapped: bool) -> Shard:
    """Open a shard (see `storage.shards.open_shard`)."""
    path = folder.path(name)
    if folder.local is None:
        with folder.fs.open(path) as file:
            parsed = pq.ParquetFile(file)
            return _shard(
                parsed.metadata, parsed.schema_arrow, lambda: pa.PythonFile(folder.fs.open(path)), (path, state), None
            )
    buffer = map_file(path)
    parsed = pq.ParquetFile(pa.BufferReader(buffer))
    source = (path, state)
    return _shard(
        parsed.metadata, parsed.schema_arrow, lambda: pa.BufferReader(buffer), source, buffer if mapped else None
    )


def _shard(metadata: Any, arrow: pa.Schema, file: Any, source: tuple, buffer: pa.Buffer | None) -> Shard:
    if b"scenecache" not in (arrow.metadata or {}):
        raise CorruptShard("the file has no 'scenecache' schema in its metadata; was it written by another program?")
    schema = Schema.from_json(json.loads(arrow.metadata[b"scenecache"]))
    bounds = np.cumsum([0, *(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))]).tolist()
    columns: dict[str, Values] = {}
    for name, column in schema.columns.items():
        text = column.dtype in ("string", "bytes")
        if buffer is not None and (column.fixed or text) and metadata.num_rows:
            columns[name] = _mapped(column, metadata, arrow, arrow.get_field_index(name), buffer)
        else:
            columns[name] = _decoded(name, column, metadata, file, source, bounds)
    return Shard(schema, columns)


def _mapped(column: Column, metadata: Any, arrow: pa.Schema, index: int, buffer: pa.Buffer) -> Values:
    """The values of a column as they lie in the file."""
    chunk = metadata.row_group(0).column(index)
    rows, end = metadata.num_rows, chunk.data_page_offset + chunk.total_compressed_size
    if not column.fixed:
        start = end - int(arrow.field(index).metadata[b"value_bytes"])
        return Text(memoryview(buffer)[start:end], rows, str if column.dtype == "string" else bytes)
    dtype, shape = np.dtype(column.dtype), (rows, *column.dims)
    count = int(np.prod(shape, dtype=int))
    if chunk.physical_type == "BOOLEAN":
        size = -(-count // 8)
        return Bits(np.frombuffer(buffer, np.uint8, size, end - size), shape[1:])
    if chunk.physical_type == "INT32" and dtype.itemsize < 4:
        return Narrow(np.frombuffer(buffer, np.int32, count, end - 4 * count).reshape(shape), dtype)
    return np.frombuffer(buffer, dtype, count, end - count * dtype.itemsize).reshape(shape)


def _decoded(name: str, column: Column, metadata: Any, file: Any, source: tuple, bounds: list[int]) -> Decoded:
    """The values of a column by way of pyarrow."""

    def decode(group: int) -> np.ndarray:
        with file() as opened:
            table = pq.ParquetFile(opened, metadata=metadata).read_row_group(group, columns=[name])
        return _numpy(column, table.column(0).combine_chunks())

    return Decoded((*source, name), bounds, decode, np.empty((0, *_dims(column)), column.numpy))


def _dims(column: Column) -> tuple[int, ...]:
    return () if None in column.dims else column.dims  # type: ignore[return-value]


def _numpy(column: Column, array: Any) -> np.ndarray:
    """An Arrow array as the numpy array it was made from (`_arrow` backwards)."""
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    shape = (len(array), *_dims(column))
    if column.numpy == object:
        values = np.empty(shape, object)
        if None in column.dims:
            flat, bounds = (
                array.flatten().to_numpy(zero_copy_only=False),
                array.offsets.to_numpy() - array.offsets[0].as_py(),
            )
            values[:] = [flat[i:j].astype(column.dtype) for i, j in zip(bounds[:-1], bounds[1:], strict=True)] or None
        else:
            values[:] = array.to_pylist()
        return values
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
        return data.view(column.dtype).reshape(shape)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False).reshape(shape)

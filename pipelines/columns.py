"""Arrow columns and numpy arrays, back and forth: item keys, digests and repeated texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DIGEST = pa.binary(16)
TEXT = pa.dictionary(pa.int32(), pa.string())  # texts that repeat


def find(items: pa.Array, among: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Position (int64) of each item among others, -1 where absent (or null)."""
    among = among.combine_chunks() if isinstance(among, pa.ChunkedArray) else among
    items = items.combine_chunks() if isinstance(items, pa.ChunkedArray) else items
    if items.equals(among) and not items.null_count:
        return np.arange(len(items))
    place = pc.index_in(items, value_set=among)
    return place.fill_null(-1).to_numpy().astype(np.int64) if len(among) else np.full(len(items), -1)


def match(items: pa.Array, rows: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Unique items against the item column of rows in which equal items stand together.

    Returns:
        Per item the first row that has it, per row the item it has; -1 where there is none.
    """
    array = rows.combine_chunks()
    first = np.ones(len(array), bool)
    first[1:] = pc.not_equal(array[1:], array[:-1]).to_numpy(zero_copy_only=False)
    starts, group = np.flatnonzero(first), np.cumsum(first) - 1
    place = find(items, array if len(starts) == len(array) else array.take(pa.array(starts)))
    there = place >= 0
    item_of = np.full(len(starts), -1)
    item_of[place[there]] = np.flatnonzero(there)
    return np.where(there, at(starts, place), -1), at(item_of, group)


def as_bytes(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Digests as (item, 16) uint8; null and empty become zeros."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if column.type != DIGEST:  # of any length: only 0 and 16 occur
        column = column.cast(pa.binary()).fill_null(b"")
        offsets = np.frombuffer(column.buffers()[1] or bytes(4), np.int32)[column.offset :][: len(column) + 1]
        full = np.diff(offsets) == 16
        if len(column) and offsets[-1] - offsets[0] != 16 * full.sum():
            raise ValueError("a digest of the manifest has neither 0 nor 16 bytes")
        digests = np.zeros((len(column), 16), np.uint8)
        data = np.frombuffer(column.buffers()[2] or b"", np.uint8)
        digests[full] = data[offsets[0] : offsets[-1]].reshape(-1, 16)
        return digests
    whole = np.frombuffer(column.buffers()[1] or b"", np.uint8)
    values = whole[16 * column.offset : 16 * (column.offset + len(column))].reshape(-1, 16)
    if column.null_count:
        values = np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], values, np.uint8(0))
    return values


def as_column(digests: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """(item, 16) uint8 as a column, null where not valid."""
    data = pa.py_buffer(np.ascontiguousarray(digests))
    if valid is None or valid.all():
        return pa.FixedSizeBinaryArray.from_buffers(DIGEST, len(digests), [None, data])
    bits = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.FixedSizeBinaryArray.from_buffers(DIGEST, len(digests), [bits, data])


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per row: the two digests (item, 16) are equal."""
    return (np.ascontiguousarray(a).view(np.uint64) == np.ascontiguousarray(b).view(np.uint64)).all(axis=1)


def at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """values[index]; anything where index is -1 (the caller masks it)."""
    return values[index] if len(values) else np.zeros(len(index), values.dtype)


def codes(column: pa.ChunkedArray) -> np.ndarray:
    return column.combine_chunks().indices.to_numpy()


def is_text(column: pa.ChunkedArray, *texts: str) -> np.ndarray:
    """Per row of a dictionary column: it is one of the texts."""
    array = column.combine_chunks()
    wanted = [i for i, text in enumerate(array.dictionary.to_pylist()) if text in texts]
    return np.isin(array.indices.to_numpy(), wanted)


def as_texts(codes: np.ndarray, texts: Sequence[str]) -> pa.DictionaryArray:
    """Codes and their texts as a dictionary column in which each text occurs once."""
    unique = list(dict.fromkeys(texts))
    place = np.array([unique.index(text) for text in texts], np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(place[codes]), unique)

"""Samples to a batch of torch tensors, ragged or padded, in one piece of memory.

All tensors of a batch lie in one buffer, into which each column is gathered straight from the mapped shards. In a
DataLoader's worker that buffer is shared memory already and the whole batch travels as one handle, where a handle of
its own for every tensor would cost more than the gathering. A `Stream` also uses the buffers again (`storage.recycle`).
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from storage.errors import SchemaError
from storage.schema import Column, Schema

try:
    import torch
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map  # where default_collate's documentation points

    from storage.recycle import HEADER, Pool, Slot, lease, shared_bytes
except ImportError as error:  # the core of storage does without torch
    raise ImportError(f"batches need torch ({error}): pip install 'scenecache[heads]'") from error

Batch = dict[str, Any]
_ALIGN = 64  # bytes; tensors begin on a cache line


class Sample(dict[str, Any]):
    """One item: `item`, its key, and its columns as read-only views; or one dict of columns per stage.

    Attributes:
        schema: the schema of the columns, or one per stage. Batching needs it.
    """

    __slots__ = ("schema",)

    def __init__(self, content: Mapping[str, Any], schema: Schema | Mapping[str, Schema]) -> None:
        super().__init__(content)
        self.schema = schema

    def __reduce__(self) -> tuple[Any, ...]:
        return Sample, (dict(self), self.schema)


def collate_padded(
    samples: Sequence[Sample],
    max_elements: int | Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
    fixed: bool = False,
) -> Batch:
    """Batch samples; the element axis is filled with zeros up to the longest record of the batch.

    Args:
        samples: what `MapDataset` gives.
        max_elements: elements kept of each record, the first ones as stored; None keeps all. Where stages with
            different elements are read together, {"object": 80, "frame": 16}; those not named are kept.
        dtype: torch dtype for the floating-point columns; None keeps what is stored.
        fixed: fill up to `max_elements`, so that all batches have the same shape.

    Returns:
        `item`: list of keys. With an element axis, columns of shape (batch, element, *dims) and
        `<element>_mask`, (batch, element) bool, as in `object_mask`; without one, (batch, *dims).
        Columns of text and lists of any length are Python lists, one entry per item, unpadded.
        Nested by stage where samples are.

    Raises:
        SchemaError: a column has the name that the mask needs, or was changed to a dtype or dims that its schema does
            not say.
        ValueError: `fixed` without a number of elements to fill up to.
    """
    return _collate(samples, max_elements, dtype, "fixed" if fixed else "longest")


def collate_ragged(
    samples: Sequence[Sample], max_elements: int | Mapping[str, int] | None = None, dtype: torch.dtype | None = None
) -> Batch:
    """Batch samples without padding: the elements of all records laid end to end.

    Args:
        samples, max_elements, dtype: as for `collate_padded`.

    Returns:
        As `collate_padded`, but columns with an element axis have shape (sum of elements, *dims), and
        `<element>_offsets`, (batch + 1,) int64, says that item i has elements offsets[i] : offsets[i + 1].
    """
    return _collate(samples, max_elements, dtype, None)


class _Planned(NamedTuple):
    """A tensor of the batch before there is memory for it; `fill` writes all of its values."""

    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype
    fill: Callable[[np.ndarray], None]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def write(self, out: torch.Tensor) -> None:
        if self.dtype == self.stored:
            self.fill(out.numpy())
        else:
            native = torch.empty(self.shape, dtype=self.stored)
            self.fill(native.numpy())
            out.copy_(native)


def _by_default(samples: Sequence[Sample], *, collate_fn_map: object = None) -> Batch:
    return collate_padded(samples)


default_collate_fn_map[Sample] = _by_default  # a DataLoader without collate_fn pads too

_Limit = int | Mapping[str, int] | None
_Padding = Literal["fixed", "longest"] | None


def _collate(samples: Sequence[Sample], max_elements: _Limit, dtype: torch.dtype | None, padding: _Padding) -> Batch:
    limits = max_elements.values() if isinstance(max_elements, Mapping) else [max_elements]
    if any(limit is not None and limit < 1 for limit in limits):
        raise ValueError(f"max_elements is {max_elements}, expected at least 1, or None for all")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is {dtype!r}, expected a floating-point one of torch, such as torch.float32")
    schema = getattr(samples[0], "schema", None) if samples else None
    if schema is None:
        kind = f"{type(samples[0]).__name__}s" if samples else "nothing"
        raise TypeError(
            f"a batch is made of samples of a MapDataset, not of {kind}: change a sample in place, or give "
            "Sample(content, schema)"
        )
    items = [sample["item"] for sample in samples]
    batch: Batch = {"item": items}
    if isinstance(schema, Schema):
        batch |= _columns(items, samples, schema, max_elements, dtype, padding)
    else:
        for stage, of_stage in schema.items():
            records = [sample[stage] for sample in samples]
            batch[stage] = _columns(items, records, of_stage, max_elements, dtype, padding)
            present = np.array([record is not None for record in records])
            _add(batch[stage], "present", present)
    return _in_one_piece(batch)


def _columns(
    items: Sequence[str],
    records: Sequence[Mapping[str, Any] | None],
    schema: Schema,
    max_elements: _Limit,
    dtype: torch.dtype | None,
    padding: _Padding,
) -> Batch:
    """The columns of one stage; an absent record counts as one without elements, or as zeros."""
    batch: Batch = {}
    stored_counts = counts = length = None
    if schema.element:
        name = next(iter(schema.columns))
        stored_counts = counts = [0 if record is None else len(record[name]) for record in records]
        limit = max_elements.get(schema.element) if isinstance(max_elements, Mapping) else max_elements
        if limit is not None:
            counts = [min(count, limit) for count in counts]
        if padding == "fixed" and limit is None:
            raise ValueError(f"fixed=True needs max_elements, here for elements called {schema.element!r}")
        if padding is not None:
            length = limit if padding == "fixed" else max(counts)
    for name, column in schema.columns.items():
        arrays = _arrays(items, records, name, column, stored_counts)
        if column.numpy.hasobject:
            batch[name] = _python(arrays, counts)
            continue
        stored = torch.from_numpy(np.empty(0, column.numpy)).dtype
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        shape, fill = _gather(arrays, counts, column, length)
        batch[name] = _Planned(shape, stored, wanted, fill)
    if counts is not None and length is not None:
        _add(batch, f"{schema.element}_mask", np.arange(length) < np.array(counts)[:, None])
    elif counts is not None:
        _add(batch, f"{schema.element}_offsets", np.cumsum([0, *counts]))
    return batch


def _arrays(
    items: Sequence[str],
    records: Sequence[Mapping[str, Any] | None],
    name: str,
    column: Column,
    counts: list[int] | None,
) -> list[np.ndarray | None]:
    """A column of each record. What would be cut, cast or broadcast on its way into the batch is refused: training
    code may have changed the samples."""
    arrays = [None if record is None else record[name] for record in records]
    dtype, dims = column.numpy, () if None in column.dims else column.dims
    for i, array in enumerate(arrays):
        if array is None:
            continue
        if type(array) is not np.ndarray:
            arrays[i] = array = np.asarray(array)
        shape, expected = array.shape, dims if counts is None else (counts[i], *dims)
        if shape != expected or (array.dtype is not dtype and array.dtype != dtype):
            raise SchemaError(
                f"sample {items[i]!r}: '{name}' is {array.dtype} of shape {shape}, its schema says {dtype} {expected}: "
                "batches go by the schema. Change the batch instead, or give Sample(content, schema)"
            )
    return arrays


def _add(batch: Batch, name: str, values: np.ndarray) -> None:
    """Add what the store does not have."""
    if name in batch:
        raise SchemaError(f"column '{name}' has the name of something that batches add: leave it out with select()")
    dtype = torch.from_numpy(values).dtype
    batch[name] = _Planned(values.shape, dtype, dtype, lambda out: np.copyto(out, values))


def _gather(
    arrays: Sequence[np.ndarray | None], counts: list[int] | None, column: Column, length: int | None
) -> tuple[tuple[int, ...], Callable[[np.ndarray], None]]:
    """Shape of a column in the batch, padded to a length or laid end to end, and what writes it there."""
    dims = tuple(size for size in column.dims if size is not None)
    if counts is None:

        def stack(out: np.ndarray) -> None:
            for i, array in enumerate(arrays):
                out[i] = 0 if array is None else array

        return (len(arrays), *dims), stack

    if length is not None:

        def pad(out: np.ndarray) -> None:
            for row, array, count in zip(out, arrays, counts, strict=True):
                if array is not None:
                    row[:count] = array[:count]
                row[count:] = 0

        return (len(arrays), length, *dims), pad

    def lay_end_to_end(out: np.ndarray) -> None:
        if parts := [array[:count] for array, count in zip(arrays, counts, strict=True) if array is not None]:
            np.concatenate(parts, out=out)

    return (sum(counts), *dims), lay_end_to_end


def _python(arrays: Sequence[np.ndarray | None], counts: list[int] | None) -> list[Any]:
    """Text and lists: a list per item of its elements, or the item's value where there is no element axis."""
    if counts is None:
        return [None if array is None else array.tolist() for array in arrays]
    return [[] if array is None else array[:count].tolist() for array, count in zip(arrays, counts, strict=True)]


class _View(NamedTuple):
    """Where in a batch's memory a tensor lies."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memory.untyped_storage(), self.offset // self.dtype.itemsize, self.shape, self.stride)


class _Shared(dict[str, Any]):
    """A batch in a worker. Pickled it is one shared buffer and where in it the tensors lie; unpickled, a plain dict."""

    def __init__(self, batch: Batch, memory: torch.Tensor, slot: Slot | None) -> None:
        super().__init__(batch)
        self._memory, self._slot = memory, slot
        if slot is not None:
            slot.batch = weakref.ref(self)

    def __reduce__(self) -> tuple[Any, ...]:
        tree = _described(dict(self), self._memory)
        if self._slot is None or _recycling is None:
            return _viewed, (tree, self._memory)
        slot, (stream, pool) = self._slot, _recycling
        memory = None if slot.known else self._memory
        retired, pool.retired = pool.retired, []
        slot.known = slot.sent = True
        return _leased, (tree, stream, (os.getpid(), slot.number), memory, retired)


class Recycled:
    """A collate function for the workers of one stream, which take their memory from a pool.

    Args:
        collate: `collate_padded`, `collate_ragged` or a function that calls one of them.
        stream: name of the stream, unique in the trainer's process.
    """

    def __init__(self, collate: Callable[[Sequence[Sample]], Batch], stream: str) -> None:
        self.collate, self.stream = collate, stream

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        global _recycling
        if _recycling is None and get_worker_info() is not None:
            _recycling = (self.stream, Pool())
        return self.collate(samples)


_recycling: tuple[str, Pool] | None = None  # of this worker process


def _in_one_piece(batch: Batch) -> Batch:
    """Give the planned tensors their memory and their values."""
    size = sum(-(-plan.bytes // _ALIGN) * _ALIGN for plan in _plans(batch))
    slot, offset = None, 0
    in_worker = get_worker_info() is not None and size > 0
    if in_worker and _recycling is not None:
        slot, offset = _recycling[1].take(size), HEADER
        memory = slot.memory
    else:
        memory = shared_bytes(size) if in_worker else torch.empty(size, dtype=torch.uint8)

    def made(tree: Batch) -> Batch:
        nonlocal offset
        done: Batch = {}
        for name, value in tree.items():
            if isinstance(value, _Planned):
                stride = torch.empty(value.shape, device="meta").stride()
                done[name] = _View(offset, value.shape, stride, value.dtype).of(memory)
                value.write(done[name])
                offset += -(-value.bytes // _ALIGN) * _ALIGN
            else:
                done[name] = made(value) if isinstance(value, dict) else value
        return done

    done = made(batch)
    return _Shared(done, memory, slot) if in_worker else done


def _plans(tree: Batch) -> list[_Planned]:
    inner = [plan for value in tree.values() if isinstance(value, dict) for plan in _plans(value)]
    return inner + [value for value in tree.values() if isinstance(value, _Planned)]


def _described(tree: Any, memory: torch.Tensor) -> Any:
    """The batch with a `_View` in place of each tensor that lies in its memory."""
    if isinstance(tree, dict):
        return {name: _described(value, memory) for name, value in tree.items()}
    if isinstance(tree, torch.Tensor) and tree.untyped_storage().data_ptr() == memory.data_ptr():
        return _View(int(tree.storage_offset()) * tree.dtype.itemsize, tuple(tree.shape), tree.stride(), tree.dtype)
    return tree


def _viewed(tree: Any, memory: torch.Tensor) -> Any:
    """`_described` backwards."""
    if isinstance(tree, dict):
        return {name: _viewed(value, memory) for name, value in tree.items()}
    return tree.of(memory) if isinstance(tree, _View) else tree


def _leased(tree: Any, stream: str, slot: tuple[int, int], memory: torch.Tensor | None, retired: list[int]) -> Any:
    return _viewed(tree, lease(stream, slot, memory, retired))

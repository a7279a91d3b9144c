"""From a store to torch batches: a map-style dataset, two ways to batch, a shuffled stream that resumes.

    records = storage.open("store")["votenet"].select("feature", "center")
    for batch in Stream(records, batch_size=64, seed=0, num_workers=2):
        batch["item"]             list of 64 keys
        batch["feature"]          (64, objects, 128): padded to the longest record of the batch
        batch["object_mask"]      (64, objects) bool: true where there is an object

Wherever `data` is asked for, any mapping from key to record with a `schema` will do (`Records`), and any
mapping from key to {stage: record or None} with `schemas` (`Join`, `Lookup`); those give nested batches,
{"item": keys, "votenet": {...}, "bev_grid": {...}}, where each stage also has `present`, (batch,) bool.

Nothing is copied before the batch: samples are views of the mapped shards, and each column of a batch is
gathered from them into one buffer, which in a loader's worker already is the shared memory that travels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from storage.errors import RecordMissing, SchemaError, StateMismatch
from storage.order import Last, Order
from storage.schema import Column, Schema

try:
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info
except ImportError as error:  # the core of storage does without torch
    raise ImportError(f"storage.torch_data needs torch ({error}): pip install 'scenecache[heads]'") from error

Batch = dict[str, Any]


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


class MapDataset(Dataset[Sample]):
    """Samples by position, for a torch DataLoader of your own.

        DataLoader(MapDataset(records), batch_size=64, shuffle=True, collate_fn=collate_padded)

    Attributes:
        data: where records come from.
        keys: item keys in the order of their positions.
    """

    def __init__(self, data: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
        """
        Args:
            data: `Records`, `Join`, `Lookup`, or another mapping like them.
            keys: the items to read, in this order (a split); all of `data`, sorted, by default.

        Raises:
            RecordMissing: `data` lacks one of the keys.
        """
        self.data = data
        self.keys = sorted(data) if keys is None else list(keys)
        if keys is not None and (missing := [key for key in self.keys if key not in data]):
            raise RecordMissing(f"{len(missing)} of {len(self.keys)} keys have no record, the first is {missing[0]!r}")
        schema = getattr(data, "schemas", None)
        self.schema: Schema | Mapping[str, Schema] = data.schema if schema is None else schema  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, position: int) -> Sample:
        key = self.keys[position]
        return Sample({"item": key, **self.data[key]}, self.schema)

    def __getitems__(self, positions: Sequence[int]) -> list[Sample]:
        """The samples of a batch, which a DataLoader asks for in one call."""
        keys, data, schema = self.keys, self.data, self.schema
        return [Sample({"item": keys[i], **data[keys[i]]}, schema) for i in positions]


def collate_padded(
    samples: Sequence[Sample], max_elements: int | None = None, dtype: torch.dtype | None = None
) -> Batch:
    """Batch samples; the element axis is filled with zeros up to the longest record of the batch.

    Args:
        samples: what `MapDataset` gives.
        max_elements: elements kept of each record, the first ones as stored; None keeps all.
        dtype: torch dtype for the floating-point columns; None keeps what is stored.

    Returns:
        `item`: list of keys. With an element axis, columns of shape (batch, element, *dims) and
        `<element>_mask`, (batch, element) bool, as in `object_mask`; without one, (batch, *dims).
        Columns of text and lists of any length are Python lists, one entry per item, unpadded.
        Nested by stage where samples are.
    """
    return _collate(samples, max_elements, dtype, padded=True)


def collate_ragged(
    samples: Sequence[Sample], max_elements: int | None = None, dtype: torch.dtype | None = None
) -> Batch:
    """Batch samples without padding: the elements of all records laid end to end.

    Args:
        samples, max_elements, dtype: as for `collate_padded`.

    Returns:
        As `collate_padded`, but columns with an element axis have shape (sum of elements, *dims), and
        `<element>_offsets`, (batch + 1,) int64, says that item i has elements offsets[i] : offsets[i + 1].
    """
    return _collate(samples, max_elements, dtype, padded=False)


class Stream(DataLoader[Batch]):
    """A shuffled, resumable torch DataLoader over a store, for any number of ranks and workers.

    Every epoch has one order, a function of seed and epoch (`storage.order`); step s takes its next
    batch_size x world_size items, and each rank a part of them. Workers only fetch what this process
    tells them to and hand batches on in order, so their number changes nothing but speed.

        stream = Stream(records, batch_size=64, seed=0, num_workers=2)
        for epoch in range(stream.epoch, epochs):
            stream.set_epoch(epoch)
            for batch in stream:
                ...
                torch.save({"model": model.state_dict(), "stream": stream.state_dict()}, path)

    `state_dict` counts the batches that the loop was handed, not those that workers have fetched ahead,
    so after `load_state_dict` the next one is the first that the loop had not seen. The state is the
    same on all ranks, and it may be loaded with another number of workers or ranks, or batch size.

    An iteration starts at the beginning of `epoch`, or where a loaded state says; one that is run to its
    end moves `epoch` on by one. `set_epoch` is needed only where iterations are broken off.

    Attributes:
        epoch: the epoch under way, or the next one between two.
        order: which items each batch of this rank holds.
    """

    dataset: MapDataset

    def __init__(
        self,
        data: Mapping[str, Any] | MapDataset,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        last: Last = "keep",
        collate: Callable[[Sequence[Sample]], Batch] = collate_padded,
        **loader: Any,
    ) -> None:
        """
        Args:
            data: as for `MapDataset`, or one (to read a split).
            batch_size: items per batch and rank.
            seed, shuffle, last: see `Order`.
            window: None shuffles fully; a number of items keeps reads local (`epoch_order`), for
                stores that are not on a local disk.
            rank, world_size: by default those of torch.distributed where it is initialised, else 0 of 1.
            collate: `collate_padded`, `collate_ragged`, or a `functools.partial` of one with its options.
            loader: further arguments of DataLoader: num_workers, pin_memory, persistent_workers,
                prefetch_factor, multiprocessing_context ...
        """
        dataset = data if isinstance(data, MapDataset) else MapDataset(data)
        if rank is None and world_size is None:
            rank, world_size = _distributed()
        if rank is None or world_size is None:
            raise ValueError(f"rank is {rank} and world_size {world_size}: give both or neither")
        self.order = Order(
            len(dataset), batch_size, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size, last=last,
            shards=None if window is None else dataset.data.shards(dataset.keys),  # type: ignore[attr-defined]
            window=window,
        )  # fmt: skip
        self._resume = 0  # items of the epoch that the next iteration skips
        self._seen = 0  # items of the epoch that all ranks together have been handed
        self._identity = ""
        super().__init__(dataset, batch_sampler=self.order, collate_fn=collate, **loader)

    @property
    def epoch(self) -> int:
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration visit this epoch; a position loaded for that very epoch is kept."""
        if epoch != self.order.epoch:
            self.order.epoch, self._resume, self._seen = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        order = self.order
        order.start = self._seen = self._resume
        self._resume = 0
        epoch = order.epoch
        for batch in super().__iter__():
            self._seen = min(self._seen + order.step, order.n)
            yield batch
        if order.epoch == epoch:
            order.epoch, self._seen = epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far, as plain numbers and strings."""
        return {**self._settings(), "epoch": self.order.epoch, "items": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that `state_dict` gave; takes effect with the next iteration.

        Raises:
            StateMismatch: it belongs to other items or to another order.
        """
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise StateMismatch(
                    f"the saved position has {name}={state.get(name)!r}, this stream {value!r}: a position means "
                    "the same only over the same items in the same order; use the snapshot and settings it was saved with"
                )
        self.order.epoch = state["epoch"]
        self._resume = self._seen = state["items"]

    def _settings(self) -> dict[str, Any]:
        """What a position depends on."""
        if not self._identity:
            keys = "\0".join(self.dataset.keys).encode()
            self._identity = f"{len(self.dataset)} keys, sha256 {hashlib.sha256(keys).hexdigest()[:16]}"
        order = self.order
        return {"items_of": self._identity, "seed": order.seed, "shuffle": order.shuffle, "window": order.window}


def _distributed() -> tuple[int, int]:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _collate(samples: Sequence[Sample], max_elements: int | None, dtype: torch.dtype | None, padded: bool) -> Batch:
    batch: Batch = {"item": [sample["item"] for sample in samples]}
    schema = samples[0].schema
    if isinstance(schema, Schema):
        return batch | _columns(samples, schema, max_elements, dtype, padded)
    for stage, of_stage in schema.items():
        records = [sample[stage] for sample in samples]
        batch[stage] = _columns(records, of_stage, max_elements, dtype, padded)
        batch[stage]["present"] = torch.tensor([record is not None for record in records])
    return batch


def _columns(
    records: Sequence[Mapping[str, Any] | None],
    schema: Schema,
    max_elements: int | None,
    dtype: torch.dtype | None,
    padded: bool,
) -> Batch:
    """The columns of one stage; an absent record counts as one without elements, or as zeros."""
    batch: Batch = {}
    counts: list[int] | None = None
    if schema.element:
        name = next(iter(schema.columns))
        counts = [0 if record is None else len(record[name]) for record in records]
        if max_elements is not None:
            counts = [min(count, max_elements) for count in counts]
    for name, column in schema.columns.items():
        arrays = [None if record is None else record[name] for record in records]
        if column.numpy.hasobject:
            batch[name] = _python(arrays, counts)
        elif counts is None:
            batch[name] = _stack(arrays, column, dtype)
        elif padded:
            batch[name] = _pad(arrays, counts, column, dtype)
        else:
            batch[name] = _lay_end_to_end(arrays, counts, column, dtype)
    if counts is not None:
        extra = f"{schema.element}_mask" if padded else f"{schema.element}_offsets"
        if extra in batch:
            raise SchemaError(f"column '{extra}' has the name that batches give their own: leave it out with select()")
        if padded:
            batch[extra] = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        else:
            batch[extra] = torch.tensor([0, *counts]).cumsum(0)
    return batch


Arrays = Sequence[np.ndarray | None]


def _pad(arrays: Arrays, counts: list[int], column: Column, dtype: torch.dtype | None) -> torch.Tensor:
    def fill(out: np.ndarray) -> None:
        for row, array, count in zip(out, arrays, counts, strict=True):
            if array is not None:
                row[:count] = array[:count]
            row[count:] = 0

    return _filled((len(arrays), max(counts), *_sizes(column)), column, dtype, fill)


def _lay_end_to_end(arrays: Arrays, counts: list[int], column: Column, dtype: torch.dtype | None) -> torch.Tensor:
    def fill(out: np.ndarray) -> None:
        if parts := [array[:count] for array, count in zip(arrays, counts, strict=True) if array is not None]:
            np.concatenate(parts, out=out)

    return _filled((sum(counts), *_sizes(column)), column, dtype, fill)


def _stack(arrays: Arrays, column: Column, dtype: torch.dtype | None) -> torch.Tensor:
    def fill(out: np.ndarray) -> None:
        for i, array in enumerate(arrays):
            out[i] = 0 if array is None else array

    return _filled((len(arrays), *_sizes(column)), column, dtype, fill)


def _python(arrays: Arrays, counts: list[int] | None) -> list[Any]:
    """Text and lists: a list per item of its elements, or the item's value where there is no element axis."""
    if counts is None:
        return [None if array is None else array.tolist() for array in arrays]
    return [[] if array is None else array[:count].tolist() for array, count in zip(arrays, counts, strict=True)]


def _filled(
    shape: tuple[int, ...], column: Column, dtype: torch.dtype | None, fill: Callable[[np.ndarray], None]
) -> torch.Tensor:
    """A tensor whose stored values `fill` writes, cast to `dtype` where they are floats."""
    stored = torch.from_numpy(np.empty(0, column.numpy)).dtype
    wanted = dtype if dtype is not None and stored.is_floating_point else stored
    out = _buffer(shape, wanted)
    if wanted == stored:
        fill(out.numpy())
        return out
    native = torch.empty(shape, dtype=stored)
    fill(native.numpy())
    return out.copy_(native)


def _buffer(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory; in a loader's worker it is shared, or the queue to the trainer would copy it once more."""
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None or size == 0:
        return torch.empty(shape, dtype=dtype)
    shared = torch.UntypedStorage._new_shared(size, device="cpu")
    return torch.empty(0, dtype=dtype).set_(shared, 0, shape)


def _sizes(column: Column) -> tuple[int, ...]:
    return tuple(size for size in column.dims if size is not None)

"""From a store to torch batches: a map-style dataset, two ways to batch, a shuffled stream that resumes.

    records = storage.open("store")["votenet"].select("feature", "center")
    for batch in Stream(records, batch_size=64, seed=0, num_workers=2):
        batch["item"]             list of 64 keys
        batch["feature"]          (64, objects, 128): padded to the longest record of the batch
        batch["object_mask"]      (64, objects) bool: true where there is an object

Wherever `data` is asked for, any mapping from key to record with a `schema` will do (`Records`), and any
mapping from key to {stage: record or None} whose `records` have `stage` and `schema` (`Join`, `Lookup`); those give
nested batches, {"item": keys, "votenet": {...}, "bev_grid": {...}}, where each stage also has `present`, (batch,) bool.

Nothing is copied before the batch: samples are views of the mapped shards, and each column of a batch is
gathered from them into one buffer, which in a loader's worker already is the shared memory that travels.
"""

from __future__ import annotations

import hashlib
import operator
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from storage.collate import Batch, Recycled, Sample, collate_padded, collate_ragged
from storage.errors import RecordMissing, StateMismatch
from storage.join import StoreMapping
from storage.order import Last, Order
from storage.recycle import forget
from storage.schema import Schema

__all__ = ["MapDataset", "Sample", "Stream", "collate_padded", "collate_ragged"]


class MapDataset(Dataset[Sample]):
    """Samples by position, for a torch DataLoader of your own.

        DataLoader(MapDataset(records), batch_size=64, shuffle=True)

    Without `collate_fn` that makes the batches of `collate_padded`.

    A subclass may override `__getitem__` to change samples: values, and which elements there are; not dtypes or
    dims, which batches take from the schema.

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
            TypeError: `data` is something else, such as a whole cache.
            ValueError: one of the stages is called `item`, as the keys are in samples and batches.
        """
        joined = getattr(data, "records", None)  # Join and Lookup
        if joined is None and not hasattr(data, "schema"):
            raise TypeError(
                f"{type(data).__name__} has no records to read: give those of a stage, such as cache['votenet'], or "
                "several, cache.join('votenet', 'bev_grid') or a Lookup"
            )
        if joined is not None and any(records.stage == "item" for records in joined):
            raise ValueError(
                "a stage called 'item' can't be among those of a join: batches keep the keys under that name"
            )
        if isinstance(keys, str):
            raise TypeError(f"keys is the text {keys!r:.60}: give a list of keys")
        self.data = data
        self.keys = sorted(data) if keys is None else list(keys)
        if keys is not None and (missing := [key for key in self.keys if key not in data]):
            raise RecordMissing(f"{len(missing)} of {len(self.keys)} keys have no record, the first is {missing[0]!r}")
        self.schema: Schema | Mapping[str, Schema] = (
            data.schema if joined is None else {records.stage: records.schema for records in joined}  # type: ignore[attr-defined]
        )

    def __repr__(self) -> str:
        ours = isinstance(self.data, StoreMapping)  # another mapping may show all its content
        return f"{type(self).__name__}({self.data if ours else type(self.data).__name__}: {len(self)} items)"

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, position: int) -> Sample:
        key = self.keys[position]
        return Sample({"item": key, **self.data[key]}, self.schema)

    def __getitems__(self, positions: Sequence[int]) -> list[Sample]:
        """The samples of a batch, which a DataLoader asks for in one call."""
        if type(self).__getitem__ is not MapDataset.__getitem__:
            return [self[position] for position in positions]
        keys, data, schema = self.keys, self.data, self.schema
        return [Sample({"item": keys[i], **data[keys[i]]}, schema) for i in positions]


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

    An iteration starts at the beginning of `epoch`, or where a loaded state says; after one that was handed
    the last batch the next is of the next epoch. `set_epoch` is needed only where iterations are broken off
    before that.

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
            rank, world_size: by default those of torch.distributed at the time of each iteration, 0 of 1 where it
                is not initialised.
            collate: `collate_padded`, `collate_ragged`, or a `functools.partial` of one with its options.
            loader: further arguments of DataLoader: num_workers, pin_memory, persistent_workers,
                prefetch_factor, multiprocessing_context ...
        """
        for name, instead in _INSTEAD.items():
            if name in loader:
                raise TypeError(f"Stream takes no {name}: {instead}")
        dataset = data if isinstance(data, MapDataset) else MapDataset(data)
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size {world_size}: give both or neither")
        self._follows = rank is None
        if rank is None or world_size is None:
            rank, world_size = _distributed()
        self.order = Order(
            len(dataset), batch_size, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size, last=last,
            shards=None if window is None else _shards(dataset), window=window,
        )  # fmt: skip
        self._resume = 0  # items of the epoch that the next iteration skips
        self._seen = 0  # items of the epoch that all ranks together have been handed
        self._ended = False  # this rank has been handed the last batch of the epoch
        self._identity = ""
        self._iterations = 0  # under way
        super().__init__(dataset, batch_sampler=self.order, collate_fn=self._named(collate), **loader)

    def _named(self, collate: Callable[[Sequence[Sample]], Batch]) -> Recycled:
        """The collate function under a name that no other stream has."""
        self._name = uuid.uuid4().hex
        weakref.finalize(self, forget, self._name)
        return Recycled(collate, self._name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has workers of its own, whose memory is not that of the original's."""
        self.__dict__.update(state)
        self._iterations = 0
        self.collate_fn = self._named(state["collate_fn"].collate)

    def __repr__(self) -> str:
        o = self.order
        return (
            f"Stream({self.dataset!r}, batch_size={o.batch_size}, seed={o.seed}, shuffle={o.shuffle}, last={o.last!r}, "
            f"rank={o.rank}, world_size={o.world_size}, num_workers={self.num_workers}, epoch={o.epoch})"
        )

    @property
    def epoch(self) -> int:
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration visit this epoch; a position loaded for that very epoch is kept."""
        if epoch != self.order.epoch:
            self._move(epoch)
        self._ended = False

    def _move(self, epoch: int) -> None:
        self.order.epoch = operator.index(epoch)
        self._resume = self._seen = 0
        self._ended = False

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        self._follow()
        return len(self.order)

    def _follow(self) -> None:
        """Training code may well set up torch.distributed after its loaders."""
        if self._follows:
            self.order.rank, self.order.world_size = _distributed()

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._follow()
        order = self.order
        if self._ended:  # some trainers count batches, and never ask for one more than there are
            self._move(order.epoch + 1)
        order.start = self._seen = self._resume
        self._resume = 0
        if order.uneven(order.start) and _distributed() != (0, 1):
            warnings.warn(
                f"with last='keep' some ranks have a batch less than others ({order.n - order.start} items in steps of "
                f"{order.step}): training in which they wait for each other hangs. Use last='drop' or 'pad'",
                stacklevel=2,
            )
        epoch, left = order.epoch, order.batches(order.start)
        batches = super().__iter__()
        self._iterations += 1
        try:
            for batch in batches:
                left -= 1
                self._seen = min(self._seen + order.step, order.n)
                self._ended = not left and order.epoch == epoch
                yield batch
                del batch  # or this frame would hold it, and its memory, until the next one is there
        finally:
            del batches  # ends the workers, unless they are persistent
            self._iterations -= 1
            if not self._iterations and not self.persistent_workers:
                forget(self._name)
        if order.epoch == epoch:
            self._move(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far, as plain numbers and strings.

        After the last batch of an epoch it is the beginning of the next one.
        """
        epoch, items = self.order.epoch, self._seen
        if items and self.order.over(items):
            epoch, items = epoch + 1, 0
        return {**self._settings(), "epoch": epoch, "items": items}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that `state_dict` gave; takes effect with the next iteration.

        Raises:
            StateMismatch: it belongs to other items or to another order.
        """
        self._follow()
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise StateMismatch(
                    f"the saved position has {name}={state.get(name)!r}, this stream {value!r}: a position means "
                    "the same only over the same items in the same order; use the snapshot and settings of then"
                )
        epoch, items = state["epoch"], state["items"]
        if items and self.order.over(items):  # what is left fills no batch of this size
            epoch, items = epoch + 1, 0
        self._move(epoch)
        self._resume = self._seen = items

    def _settings(self) -> dict[str, Any]:
        """What a position depends on."""
        if not self._identity:
            keys = "\0".join(self.dataset.keys).encode()
            self._identity = f"{len(self.dataset)} keys, sha256 {hashlib.sha256(keys).hexdigest()[:16]}"
        order = self.order
        return {"items_of": self._identity, "seed": order.seed, "shuffle": order.shuffle, "window": order.window}


def _shards(dataset: MapDataset) -> np.ndarray:
    if not hasattr(dataset.data, "shards"):
        raise TypeError(f"{type(dataset.data).__name__} does not say what lies together (`shards`): leave out window")
    return np.asarray(dataset.data.shards(dataset.keys))


_INSTEAD = {
    "collate_fn": "give collate=",
    "drop_last": "give last='drop', 'keep' or 'pad'",
    "in_order": "batches come in order, or a position would not say which are done",
    "keys": "give Stream(MapDataset(data, keys), ...)",
    "sampler": "DataLoader(MapDataset(data), ..., collate_fn=collate_padded) takes one",
    "batch_sampler": "DataLoader(MapDataset(data), ..., collate_fn=collate_padded) takes one",
}  # what a DataLoader takes, or what one might try


def _distributed() -> tuple[int, int]:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

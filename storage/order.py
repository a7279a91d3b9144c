"""The order in which an epoch visits its items, as a pure function of seed and epoch.

    epoch        e0 e1 e2 ...                     one permutation of all items, the same everywhere
    step s       batch_size x world_size of them, in that order
    rank r       the r-th batch of the step
    worker w     every workers-th batch of its rank; the loader hands them on in order

So what the ranks see, put side by side, is the same sequence for any number of ranks and workers,
and a position in it is one number: how many items of the epoch all ranks together have had.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Literal

import numpy as np

Last = Literal["keep", "drop", "pad"]


def epoch_order(
    n: int, seed: int, epoch: int, *, shards: np.ndarray | None = None, window: int | None = None
) -> np.ndarray:
    """A permutation of `range(n)`; equal arguments give equal orders on every machine and numpy version.

    Args:
        n: number of items.
        seed, epoch: any integers.
        shards: (n,) integer shard of each item; only with `window`.
        window: None for a full shuffle, every order equally likely up to the quality of a 64-bit
            hash: right for a local store, whose memory-mapped shards have no seek to save. Else
            shards are shuffled as wholes, laid end to end, and items shuffled only within
            successive windows of this many items, so that a stretch of the epoch reads few shards.

    Returns:
        (n,) int64 item indices.
    """
    if window is None:
        return np.argsort(_hashes(n, "item", seed, epoch), kind="stable")
    if window < 1:
        raise ValueError(f"window is {window}, expected a number of items >= 1, or None for a full shuffle")
    if shards is None or len(shards) != n:
        raise ValueError(f"a window needs the shard of each of the {n} items")
    names, shard = np.unique(shards, return_inverse=True)
    end_to_end = np.argsort(_hashes(len(names), "shard", seed, epoch)[shard], kind="stable")
    within = np.lexsort((_hashes(n, "item", seed, epoch), np.arange(n) // window))
    return end_to_end[within]


class Order:
    """The batches of one rank: a `batch_sampler` for a torch DataLoader that knows ranks, epochs and resuming.

    Attributes:
        epoch: epoch that the next iteration visits.
        start: items of that epoch that all ranks together have had already, 0 at its beginning.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        last: Last = "keep",
        shards: np.ndarray | None = None,
        window: int | None = None,
    ) -> None:
        """
        Args:
            n: number of items.
            batch_size: items per batch and rank.
            seed: seed of all epochs; with `shuffle` False it plays no part.
            shuffle: False visits the items as they come.
            rank, world_size: this process among those that train together.
            last: what to do with the last items, which do not fill a batch on every rank.
                `keep`: each item exactly once; they are spread evenly, and where there are fewer of
                them than ranks, the last ranks have one batch less (fit for one process and for
                evaluation; collective operations of several ranks would wait for ever).
                `drop`: leave them out; `pad`: fill up with the first items of the epoch. Both give
                every rank the same number of full batches.
            shards, window: see `epoch_order`.
        """
        # Plain integers: numpy's are hashed otherwise, and do not belong in a checkpoint.
        batch_size, seed, rank, world_size = map(operator.index, (batch_size, seed, rank, world_size))
        window = None if window is None else operator.index(window)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not among the ranks 0 .. {world_size - 1}")
        if last not in ("keep", "drop", "pad"):
            raise ValueError(f"last is {last!r}, expected 'keep', 'drop' or 'pad'")
        self.n, self.batch_size, self.seed, self.shuffle = n, batch_size, seed, shuffle
        self.rank, self.world_size, self.last = rank, world_size, last
        self.shards, self.window = shards, window
        self.epoch = 0
        self.start = 0

    @property
    def step(self) -> int:
        """Items that one step of all ranks takes."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.batches(0)

    def batches(self, start: int) -> int:
        """Batches of this rank from a position to the end of the epoch."""
        full, left = divmod(self.n - start, self.step)
        if self.last == "drop" or not left:
            return full
        return full + (1 if self.last == "pad" or left > self.rank else 0)

    def over(self, start: int) -> bool:
        """Whether no rank has a batch left from a position on."""
        left = self.n - start
        return left < self.step if self.last == "drop" else left <= 0

    def uneven(self, start: int) -> bool:
        """Whether some ranks have a batch less than others from a position on."""
        return self.last == "keep" and 0 < (self.n - start) % self.step < self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.n)
        if self.shuffle:
            order = epoch_order(self.n, self.seed, self.epoch, shards=self.shards, window=self.window)
        rest = order[self.start :]
        if self.last == "pad" and len(rest) % self.step:
            rest = np.concatenate([rest, np.resize(order, -len(rest) % self.step)])
        return self._batches(rest, self.batches(self.start))

    def _batches(self, rest: np.ndarray, count: int) -> Iterator[list[int]]:
        for i in range(count):
            step = rest[i * self.step : (i + 1) * self.step]
            if len(step) == self.step:
                yield step[self.rank * self.batch_size : (self.rank + 1) * self.batch_size].tolist()
            else:
                yield np.array_split(step, self.world_size)[self.rank].tolist()


def _hashes(n: int, *salt: str | int) -> np.ndarray:
    """(n,) uint64: SplitMix64 of 0 .. n-1, from a start that depends on the salt."""
    start = int.from_bytes(hashlib.sha256(repr(salt).encode()).digest()[:8], "little")
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

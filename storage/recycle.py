"""Shared memory that a worker fills again once the trainer has let go of the batch in it.

A page of fresh shared memory costs many times what copying into it does, and sending a new file handle costs more
again. So a worker of a `Stream` keeps its buffers: the first batch in a buffer brings its handle along, later ones
only say which buffer it is. The trainer's tensors hold a lease on it; when the last of them is gone the buffer's
first byte is cleared, which the worker sees. Who keeps batches only makes the worker allocate more.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
import torch

HEADER = 64  # bytes before the batch; the first is 1 while the batch is in use


def shared_bytes(size: int) -> torch.Tensor:
    """Uninitialised uint8 tensor in shared memory, which a queue between processes does not copy."""
    # share_memory_() would copy it once; torch's own default_collate allocates in this way too.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Slot:
    """A worker's buffer for one batch."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.memory = shared_bytes(size)
        self._bytes = self.memory.numpy()
        self.known = False  # the trainer has its handle
        self.sent = False  # the batch now in it is on its way, or was
        self.batch: weakref.ref[Any] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._bytes[0])

    @property
    def lost(self) -> bool:
        """The batch was dropped, or its tensors were sent by torch's own means: nobody will clear the first byte."""
        return self.busy and not self.sent and (self.batch is None or self.batch() is None)

    def begin(self) -> None:
        self._bytes[0] = 1
        self.sent, self.batch = False, None


class Pool:
    """The buffers of one worker process."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._made = 0
        self.retired: list[int] = []  # numbers that the trainer may forget

    def take(self, size: int) -> Slot:
        """A buffer for a batch of `size` bytes behind the header."""
        size += HEADER
        self._slots = [slot for slot in self._slots if not slot.lost]
        free = [slot for slot in self._slots if not slot.busy]
        fitting = next((slot for slot in free if len(slot.memory) >= size), None)
        if fitting is None:
            if free:
                self._slots.remove(free[0])
                self.retired.append(free[0].number)
            largest = max((len(slot.memory) for slot in self._slots), default=0)
            fitting = Slot(self._made, max(largest, size * 5 // 4))  # padded batches differ in size
            self._made += 1
            self._slots.append(fitting)
        fitting.begin()
        return fitting


_held: dict[
    str, dict[tuple[int, int], np.ndarray]
] = {}  # stream -> (worker's process id, slot) -> its bytes, mapped here


def lease(stream: str, slot: tuple[int, int], memory: torch.Tensor | None, retired: list[int]) -> torch.Tensor:
    """The trainer's side: a tensor over a slot's bytes. Its storage holds the lease.

    Args:
        stream: which stream's worker it is.
        slot: process id and slot number.
        memory: the slot's bytes, with the first batch in it.
        retired: slots of that worker that are gone.
    """
    slots = _held.setdefault(stream, {})
    for number in retired:
        slots.pop((slot[0], number), None)
    if memory is not None:
        slots[slot] = memory.numpy()
    leased = slots[slot][:]  # an object of its own, which the tensor's storage keeps alive
    weakref.finalize(leased, _release, slots[slot], os.getpid()).atexit = False
    return torch.from_numpy(leased)


def _release(memory: np.ndarray, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has copies of our objects, but no say in this
        memory[0] = 0


def forget(stream: str) -> None:
    """Unmap a stream's slots once nothing uses them; its workers are gone."""
    _held.pop(stream, None)

"""Run an extractor over a few items: in this process, or in a helper where it can hang, crash or leak."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from extractors.base import Extractor
from extractors.child import Child, place
from extractors.errors import ChildDied, DeadlineExceeded, MissingPackage, WeightsError
from storage.errors import SchemaError
from storage.schema import Record

STOPS_STAGE = (WeightsError, MissingPackage)  # concern every item: never recorded as one item's failure
_TEXT_LENGTH = 1000


@dataclass(frozen=True)
class Failure:
    """Why an item has no record: the error's class, and its cause and place in one line."""

    error_class: str
    text: str


@dataclass
class Outcome:
    """What became of one item: its record or a failure, the seconds it took, how often it was tried."""

    result: Record | Failure
    seconds: float
    attempts: int = 1


@dataclass
class Prepared:
    """One item on its way to `Extraction.run`: what `prepare` gave, or why it could not, and the seconds so far."""

    item: str
    value: Any
    seconds: float = 0.0


def failure(error: BaseException) -> Failure:
    """Describe an error in one line; one that is not ours also says where in the code it came up."""
    text = " ".join(str(error).split()) or "no message"
    if not type(error).__module__.startswith(("extractors.", "storage.")) and (where := place(error)):
        text += f" ({where})"
    return Failure(type(error).__name__, text[:_TEXT_LENGTH])


def _left(error: SystemExit) -> RuntimeError:
    """`sys.exit` in an extractor's code as an error like any other: it must not end the run."""
    return RuntimeError(f"sys.exit({error.code!r})").with_traceback(error.__traceback__)


class Extraction:
    """An extractor in this process."""

    def __init__(self, extractor: Extractor, device: str = "cpu") -> None:
        self.extractor = extractor
        self.device = device
        self._call: Callable[[Sequence[Any]], list[Record]] | None = None

    def load(self) -> None:
        """Load the weights; `run` does it where this was not called."""
        if self._call is None:
            try:
                self._call = self.extractor.load(self.device)
            except SystemExit as error:
                raise _left(error) from error

    def prepare(self, item: str, inputs: Sequence[Any]) -> Prepared:
        """The item's prepared input, or a Failure in its place."""
        start = time.perf_counter()
        try:
            value = self.extractor.prepare(item, *inputs)
        except STOPS_STAGE:
            raise
        except SystemExit as error:
            value = failure(_left(error))
        except Exception as error:
            value = failure(error)
        return Prepared(item, value, time.perf_counter() - start)

    def run(self, batch: Sequence[Prepared]) -> list[Outcome]:
        """Records or failures, in order. Where a batch fails, each of its items is tried alone.

        Raises:
            WeightsError, MissingPackage, and whatever `load` raises: the stage can't run at all.
        """
        good = [p for p in batch if not isinstance(p.value, Failure)]
        outcomes = iter(self._run(good))
        return [Outcome(p.value, p.seconds) if isinstance(p.value, Failure) else next(outcomes) for p in batch]

    def close(self) -> None:
        self._call = None

    def _run(self, batch: Sequence[Prepared]) -> list[Outcome]:
        if not batch:
            return []
        self.load()
        assert self._call is not None
        start = time.perf_counter()
        results: Sequence[Record | Failure]
        try:
            results = self._call([p.value for p in batch])
            if not isinstance(results, Sequence) or len(results) != len(batch):
                found = f"{len(results)} records" if isinstance(results, Sequence) else type(results).__name__
                raise SchemaError(
                    f"{self.extractor.name}: {found} for a batch of {len(batch)}, expected a list, one each"
                )
        except STOPS_STAGE:
            raise
        except (Exception, SystemExit) as error:
            if len(batch) > 1:
                return [outcome for one in batch for outcome in self._run([one])]
            results = [failure(_left(error) if isinstance(error, SystemExit) else error)]
        each = (time.perf_counter() - start) / len(batch)
        return [Outcome(result, p.seconds + each) for result, p in zip(results, batch, strict=True)]


class HostedExtraction(Extraction):
    """An extractor in a helper process (`pipelines.host`) under its deadline and memory cap.

    A helper that dies takes its batch with it; each item of it is then tried alone. An item that
    was alone is tried once more in a fresh helper, unless it ran into the deadline.
    """

    def __init__(self, extractor: Extractor, device: str = "cpu") -> None:
        super().__init__(extractor, device)
        if type(extractor).__module__ == "__main__":
            name = type(extractor).__name__
            raise TypeError(
                f"{name} is defined in the program that was started, so its helper process can't import it: "
                f"move it to a module of its own, or do without deadline_s, memory_gb and recycle_after"
            )
        self._child = Child(
            [sys.executable, "-m", "pipelines.host"],
            name=extractor.name,
            deadline_s=extractor.deadline_s,
            memory_gb=extractor.memory_gb,
            recycle_after=extractor.recycle_after,
            setup={"extractor": extractor, "device": device},
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )

    def load(self) -> None:
        """Each helper loads when it starts, outside the deadline of its first items."""

    def prepare(self, item: str, inputs: Sequence[Any]) -> Prepared:
        return Prepared(item, tuple(inputs))  # `prepare` runs in the helper too: decoders may sit there

    def close(self) -> None:
        self._child.close()

    def _run(self, batch: Sequence[Prepared], attempt: int = 1) -> list[Outcome]:
        if not batch:
            return []
        start = time.perf_counter()
        try:
            outcomes = self._child.call({"items": [(p.item, p.value) for p in batch]}, items=len(batch))
        except ChildDied as error:
            if len(batch) > 1:
                return [outcome for one in batch for outcome in self._run([one])]
            if attempt == 1 and not isinstance(error, DeadlineExceeded):
                return self._run(batch, attempt=2)
            outcomes = [Outcome(failure(error), 0.0)]
        each = (time.perf_counter() - start) / len(batch)
        return [Outcome(o.result, p.seconds + each, attempt) for o, p in zip(outcomes, batch, strict=True)]


def extraction(extractor: Extractor, device: str = "cpu") -> Extraction:
    """In a helper where the extractor sets a limit, else in this process."""
    limits = (extractor.deadline_s, extractor.memory_gb, extractor.recycle_after)
    return (Extraction if limits == (None, None, None) else HostedExtraction)(extractor, device)

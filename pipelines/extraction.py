"""Run an extractor over a few items: in this process, or in a helper where it can hang, crash or leak."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extractors.base import Extractor, Weights
from extractors.child import Child, place
from extractors.errors import ChildDied, DeadlineExceeded, MissingPackage, WeightsChanged, WeightsError
from storage.errors import SchemaError
from storage.schema import Record

STOPS_STAGE = (WeightsError, WeightsChanged, MissingPackage)  # concern every item: never recorded as one item's failure
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
    try:
        text = str(error)
    except Exception as another:
        text = f"its text can't be made: {type(another).__name__}"
    text = text.encode(errors="backslashreplace").decode()  # paths may hold bytes that are no text
    text = " ".join(text.split()) or "no message"
    if not type(error).__module__.startswith(("extractors.", "storage.")) and (where := place(error)):
        text += f" ({where})"
    return Failure(type(error).__name__, text[:_TEXT_LENGTH])


def _as_error(error: BaseException) -> Exception:
    """What is no Exception (`sys.exit`, a panic in Rust code) as an error like any other: it must not end the run.

    A KeyboardInterrupt is no user's: a run handles SIGINT itself. In a Ray worker it would take all of Ray with it.
    """
    if isinstance(error, Exception):
        return error
    text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return RuntimeError(text).with_traceback(error.__traceback__)


class Extraction:
    """An extractor in this process.

    Args:
        extractor: what runs.
        device: torch device name.
        weights: what its recipe says of its weights; a file that is another one by now is refused. None: not looked at.
    """

    def __init__(self, extractor: Extractor, device: str = "cpu", weights: Mapping[str, str] | None = None) -> None:
        self.extractor = extractor
        self.device = device
        self.weights = weights or {}
        self._call: Callable[[Sequence[Any]], list[Record]] | None = None

    def load(self) -> None:
        """Load the weights; `run` does it where this was not called."""
        if self._call is None:
            try:
                call = self.extractor.load(self.device)
            except BaseException as error:
                cause = _as_error(error)
                self._check_weights()  # half a file has errors of all kinds
                raise cause from None
            self._check_weights()
            self._call = call

    def prepare(self, item: str, inputs: Sequence[Any]) -> Prepared:
        """The item's prepared input, or a Failure in its place."""
        start = time.perf_counter()
        try:
            value = self.extractor.prepare(item, *inputs)
        except STOPS_STAGE:
            raise
        except BaseException as error:
            value = failure(_as_error(error))
        return Prepared(item, value, time.perf_counter() - start)

    def run(self, batch: Sequence[Prepared]) -> list[Outcome]:
        """Records or failures, in order. Where a batch fails, each of its items is tried alone.

        Raises:
            WeightsError, WeightsChanged, MissingPackage, and whatever `load` raises: the stage can't run at all.
        """
        good = [p for p in batch if not isinstance(p.value, Failure)]
        outcomes = iter(self._run(good))
        return [Outcome(p.value, p.seconds) if isinstance(p.value, Failure) else next(outcomes) for p in batch]

    def close(self) -> None:
        self._call = None

    def _check_weights(self) -> None:
        """Long after the plan, a file may be another one: `latest.pth` of a training that goes on."""
        if not self.weights:
            return
        from pipelines.inputs import digest_file  # helpers without weights start faster without it

        for name, planned in self.weights.items():
            weights: Weights = getattr(self.extractor, name)
            try:
                now = weights.identity(digest_file)
            except (WeightsError, OSError):
                now = "gone"
            if now != planned:
                raise WeightsChanged(
                    f"{name}: {weights.source} was replaced while the run went on; run again to use what is there now"
                )

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
        except BaseException as error:
            cause = _as_error(error)
            if len(batch) > 1:
                return [outcome for one in batch for outcome in self._run([one])]
            results = [failure(cause)]
        results = [self._own(p.item, one) for p, one in zip(batch, results, strict=True)]
        each = (time.perf_counter() - start) / len(batch)
        return [Outcome(result, p.seconds + each) for result, p in zip(results, batch, strict=True)]

    def _own(self, item: str, result: Record | Failure) -> Record | Failure:
        """The record in arrays of its own, or why it is none.

        An extractor may fill the same arrays for the next batch, or give small views of large ones, while the writer
        still collects; and a helper can send no arbitrary objects.
        """
        if isinstance(result, Failure):
            return result
        try:
            checked = self.extractor.schema.check(result, item)
        except SchemaError as error:
            return failure(error)
        return {name: array.copy() for name, array in checked.items()}


class HostedExtraction(Extraction):
    """An extractor in a helper process (`pipelines.host`) under its deadline and memory cap.

    A helper that dies takes its batch with it; each item of it is then tried alone. An item that
    was alone is tried once more in a fresh helper, unless it ran into the deadline.
    """

    def __init__(self, extractor: Extractor, device: str = "cpu", weights: Mapping[str, str] | None = None) -> None:
        super().__init__(extractor, device, weights)
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
            setup={"extractor": extractor, "device": device, "weights": weights},
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


def extraction(extractor: Extractor, device: str = "cpu", weights: Mapping[str, str] | None = None) -> Extraction:
    """In a helper where the extractor sets a limit, else in this process."""
    limits = (extractor.deadline_s, extractor.memory_gb, extractor.recycle_after)
    return (Extraction if limits == (None, None, None) else HostedExtraction)(extractor, device, weights)

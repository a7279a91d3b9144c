"""What every runner does with the items of a stage: open inputs, extract, write shards, give back manifest rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from extractors.base import Extractor
from pipelines.extraction import STOPS_STAGE, Failure, Outcome, Prepared, extraction, failure
from pipelines.stage import Source, Stage
from storage.errors import CacheError, SchemaError
from storage.manifest import Row
from storage.reader import read_record
from storage.schema import Schema
from storage.writer import ShardWriter

FLUSH_S = 30.0  # a record waits no longer for its shard to be full


@dataclass(frozen=True)
class Work:
    """One item of one stage, as the driver sends it to a worker: no arrays.

    Attributes:
        upstream: rows of the earlier stages' records that the stage reads, in the order of `stage.of`.
        attempts: the how-manyth try under this fingerprint this is.
    """

    item: str
    fingerprint: bytes
    inputs: bytes
    upstream: tuple[Row, ...] = ()
    attempts: int = 1


@dataclass(frozen=True)
class StageTask:
    """All that a worker needs to know about its stage. Picklable.

    Attributes:
        url: the store.
        recipe: recipe id, already saved in the store.
        weights: what the recipe says of the weights.
        upstream: names of the earlier stages it reads -> their schemas, in the order of `stage.of`.
        run: id of the run, for the rows.
    """

    stage: Stage
    source: Source | None
    url: str
    recipe: str
    upstream: Mapping[str, Schema] = field(default_factory=dict)
    run: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.stage.name


@dataclass
class Report:
    """What a worker tells the driver.

    Attributes:
        made: items that have a record now, written or waiting to be.
        rows: rows ready for the manifest: of flushed shards, and of failures.
        seconds: working time spent, without loading weights.
        stopped: why the stage can't run at all; its other items are not tried then.
    """

    stage: str
    made: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    stopped: Failure | None = None


def open_inputs(task: StageTask, work: Work) -> list[Any]:
    """The inputs of an item, one per entry of `stage.of`."""
    rows = iter(work.upstream)
    inputs: list[Any] = []
    for entry in task.stage.of:
        if entry in task.upstream:
            inputs.append(read_record(task.url, next(rows), schema=task.upstream[entry]))
        else:
            assert task.source is not None, f"stage {task.name} takes '{entry}' and the job has no source"
            inputs.append(task.source.open(work.item, entry))
    return inputs


class StageWorker:
    """One stage in one process. Shards are written by the writer's thread while the next batch runs.

    Args:
        task: the stage.
        device: torch device name.
        target_bytes: size of a shard at which it is written; None for the writer's default.
    """

    def __init__(self, task: StageTask, device: str = "cpu", target_bytes: int | None = None) -> None:
        self.task = task
        self._extraction = extraction(task.stage.extractor, device, task.weights)
        sizes = {} if target_bytes is None else {"target_bytes": target_bytes}
        self._writer = ShardWriter(task.url, task.name, task.stage.extractor.schema, **sizes)

    def prepare(self, works: Sequence[Work]) -> list[Prepared]:
        """Open and prepare items; one whose data can't be used carries a Failure."""
        prepared = []
        for work in works:
            start = time.perf_counter()
            try:
                inputs = open_inputs(self.task, work)
            except STOPS_STAGE:
                raise
            except Exception as error:
                prepared.append(Prepared(work.item, failure(error), time.perf_counter() - start))
                continue
            opened = time.perf_counter() - start
            one = self._extraction.prepare(work.item, inputs)
            one.seconds += opened
            prepared.append(one)
        return prepared

    def run(self, works: Sequence[Work], prepared: Sequence[Prepared] | None = None, flush: bool = False) -> Report:
        """Extract items, in batches of the stage's size, and hand the records to the writer.

        Args:
            works: the items.
            prepared: what another worker's `prepare` gave for them; None to do it here.
            flush: write all records out before returning, so that their rows are in the report.

        Raises:
            StoreUnwritable: a shard could not be written.
        """
        report = Report(self.task.name)
        start = time.perf_counter()
        try:
            self._extraction.load()
            start = time.perf_counter()
            size = self.task.stage.batch or 1
            for at in range(0, len(works), size):
                batch = works[at : at + size]
                ready = self.prepare(batch) if prepared is None else prepared[at : at + size]
                self._write(batch, self._extraction.run(ready), report)
        except CacheError:
            raise
        except Exception as error:  # what concerns one item is an outcome, so this concerns all
            report.stopped = failure(error)
        if flush or report.stopped:
            self.flush(report)
        elif self._writer.waiting_s > FLUSH_S:
            self._writer.start()
        report.rows += self._writer.written()
        report.seconds = time.perf_counter() - start
        return report

    def flush(self, report: Report | None = None) -> Report:
        """Write what is pending and wait for it; its rows are in the report."""
        report = report if report is not None else Report(self.task.name)
        report.rows += self._writer.flush()
        return report

    def close(self) -> None:
        """End helper and writer; records that were not flushed are dropped."""
        self._extraction.close()
        self._writer.close()

    def _write(self, works: Sequence[Work], outcomes: Sequence[Outcome], report: Report) -> None:
        for work, outcome in zip(works, outcomes, strict=True):
            row = replace(
                new_row(self.task.name, self.task.recipe, self.task.run, work),
                attempts=work.attempts + outcome.attempts - 1,
                seconds=outcome.seconds,
            )
            result = outcome.result
            if not isinstance(result, Failure):
                try:
                    self._writer.add(row, result)
                    report.made += 1
                    continue
                except SchemaError as error:
                    result = failure(error)
            report.rows.append(failed_row(row, result))


def new_row(stage: str, recipe: str, run: str, work: Work) -> Row:
    """The row of an item before its record is written."""
    return Row(
        stage=stage, item=work.item, fingerprint=work.fingerprint, inputs=work.inputs, recipe=recipe,
        status="ok", attempts=work.attempts, run=run,
    )  # fmt: skip


def failed_row(row: Row, cause: Failure) -> Row:
    """The row of an item that has no record."""
    return replace(row, status="failed", error_class=cause.error_class, error_text=cause.text)


def device_for(extractor: Extractor) -> str:
    """The torch device an extractor runs on in this process."""
    if extractor.device != "gpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

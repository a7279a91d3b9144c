"""Carry out a plan: feed a runner, commit what comes back, decide what hangs on it.

An item of a stage becomes ready when its upstream records are committed. One that may be reused
(`maybe`) is decided then: where the upstream record has the digest it had before, nothing is computed.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import RunnerError
from pipelines.extraction import Failure, failure
from pipelines.inputs import digest_items, missing_files
from pipelines.plan import Decision, Plan, StagePlan
from pipelines.progress import Progress
from pipelines.runners import Runner
from pipelines.stage import Job, Stage
from pipelines.stage_plan import entries
from pipelines.summary import REMEMBERED, StageResult, Summary
from pipelines.tables import build_table
from pipelines.worker import Report, StageTask, Work, failed_row, new_row
from storage.errors import CacheError, CorruptShard
from storage.manifest import Manifest, Row

COMMIT_S = 5.0  # rows wait for others at most so long
_WINDOW = 50  # results over which the failure rate is taken
_UNREADABLE = ("MissingFile", "FileNotFoundError", "PermissionError", "TimeoutError")  # as OSErrors with a number
_LATE_LIMIT = 10_000  # items that may wait behind a stage before the stages that feed it pause


def execute(
    job: Job,
    plan: Plan,
    url: str,
    runner: Runner,
    *,
    max_failure_rate: float = 0.5,
    stream: TextIO | None = None,
) -> Summary:
    """Run what a plan says and commit it.

    SIGINT and SIGTERM end the run after committing what is finished; a second one ends it at once.

    Args:
        url: the store.
        runner: where stages run; it is closed at the end.
        max_failure_rate: share of the last 50 results of a stage above which the run stops.
        stream: where progress goes, standard error by default.
    """
    return _Execution(job, plan, url, max_failure_rate, runner).run(stream)


class _StageState:
    """Where the items of one stage stand during a run. Items are known by their row in the plan's table."""

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self.name = plan.name
        stage = plan.stage
        self.kinds = [e for e in entries(stage) if e not in plan.feeds] if isinstance(stage, Stage) else []  # raw input
        table = plan.table
        action = pc.cast(table["action"], pa.string()).to_numpy(zero_copy_only=False)
        unknown = table["fingerprint"].is_null().to_numpy(zero_copy_only=False) if len(table) else np.zeros(0, bool)
        pending = (action == "compute") | (action == "maybe")
        self.reusable = action == "reuse"
        self.ready = np.flatnonzero(pending & ~unknown)  # rows to compute, known from the plan
        self.cursor = 0
        self.late: deque[tuple[int, Decision, tuple[Row, ...]]] = deque()  # rows to compute, known since
        self.waits = pending & unknown  # an upstream record is not known yet
        self.out: dict[str, tuple[int, Work]] = {}  # with the runner: item -> row here, and what was sent
        self.at: dict[str, np.ndarray] = {}  # upstream stage -> its row, by row here
        self.back: dict[str, np.ndarray] = {}  # upstream stage -> row here, by its row
        self.records: dict[int, Row | None] = {}  # outcomes of this run that others still wait for
        self.digests: dict[int, bytes | None] = {}  # outcomes of this run, for the tables that join them
        self.window: deque[bool] = deque(maxlen=_WINDOW)
        self.todo = int(pending.sum())
        self.started = self.ended = 0.0
        self.stopped: Failure | None = None  # why it can't run
        self.result = StageResult(self.name, reused=int(self.reusable.sum()), skipped=int((action == "skip").sum()))

    def link(self, upstream: _StageState, key: str) -> None:
        """Map rows here to rows of an upstream stage and back, by the key column here."""
        at = pc.index_in(self.plan.table[key], upstream.plan.table["item"])
        self.at[upstream.name] = places = pc.fill_null(at, -1).to_numpy().astype(np.int64)
        if key == "item":
            self.back[upstream.name] = back = np.full(len(upstream.plan.table), -1)
            back[places[places >= 0]] = np.flatnonzero(places >= 0)

    @property
    def busy(self) -> bool:
        return bool(self.out or self.late or self.cursor < len(self.ready))


_Outcome = tuple[_StageState | None, int, Row]  # a row, and whose outcome it is


class _Execution:
    def __init__(self, job: Job, plan: Plan, url: str, max_failure_rate: float, runner: Runner) -> None:
        self.job = job
        self.url = url
        self.max_failure_rate = max_failure_rate
        self.runner = runner
        self.manifest = Manifest(url)
        self.run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}"
        self.states = {p.name: _StageState(p) for p in plan.stages}
        self.stages = {n: s for n, s in self.states.items() if isinstance(s.plan.stage, Stage)}
        self.tables = {n: s for n, s in self.states.items() if n not in self.stages}
        self.readers: dict[str, list[_StageState]] = {name: [] for name in self.states}
        self.joined: set[str] = set()
        for state in self.states.values():
            for name in state.plan.feeds:
                state.link(self.states[name], "item" if state.name in self.stages else "parent")
                if state.name in self.stages:
                    self.readers[name].append(state)
                else:
                    self.joined.add(name)
        self.buffer: list[_Outcome] = []  # to be committed
        self.committed_at = time.monotonic()
        self.signal = 0
        self.error = ""
        self.progress = Progress({})

    def run(self, stream: TextIO | None) -> Summary:
        started = time.monotonic()
        with Progress({n: s.todo for n, s in self.states.items()}, stream) as self.progress, self._signals():
            for state in self.states.values():
                if state.todo or len(state.plan.again) or state.plan.recipe_lost:
                    self.manifest.save_recipe(state.plan.recipe)
                if len(state.plan.again):
                    self.manifest.commit_table(state.plan.again)
            if any(s.todo for s in self.stages.values()):
                self._run_stages()
            for state in self.tables.values():
                if state.todo and not (self.signal or self.error):
                    self._run_table(state)
        if any(s.result.made or s.result.failed for s in self.states.values()):
            try:
                self.manifest.compact()
            except CacheError as error:  # all is committed; the next run folds the files
                self.error = self.error or str(error)
        for state in self.states.values():
            r = state.result
            r.left = max(state.todo - r.made - r.failed, 0)
            r.wall_s = max(state.ended - state.started, 0.0)
        results = [s.result for s in self.states.values()]
        seconds = time.monotonic() - started
        return Summary(self.job.name, self.run_id, results, seconds, self.manifest.snapshot, self.signal, self.error)

    # ------------------------------------------------------------------------------------ stages

    def _run_stages(self) -> None:
        """Run until nothing is left, or a signal or an error ends it; what is finished is committed in any case."""
        finished = False
        try:
            try:
                tasks = [self._task(state) for state in self.stages.values() if state.todo]
                if can_run := [task for task in tasks if task is not None]:
                    self.runner.start(can_run)
                self._work_off()
                finished = True
            finally:
                for report in self.runner.close(flush=finished):
                    self._take(report)
                self._commit()
        except (CacheError, RunnerError) as error:  # the store can't be written, or no worker had: nothing can be done
            self.error = str(error)

    def _work_off(self) -> None:
        while not self.signal and not self.error:
            for state in self.stages.values():
                self._feed(state)
            if not self.buffer and not any(s.busy for s in self.stages.values()):
                return
            for report in self.runner.poll(1.0):
                self._take(report)
            nothing_left = not any(s.busy for s in self.stages.values())
            if self.buffer and (nothing_left or time.monotonic() - self.committed_at > COMMIT_S):
                self._commit()

    def _task(self, state: _StageState) -> StageTask | None:
        """What a worker is told; None where the stage stops here: a schema can't be built with its settings."""
        stage = state.plan.stage
        assert isinstance(stage, Stage)
        try:
            _ = stage.extractor.schema
            schemas = {name: self.states[name].plan.stage.extractor.schema for name in state.plan.feeds}  # type: ignore[union-attr]
        except Exception as error:
            self._stop_stage(state, failure(error))
            return None
        plan = state.plan
        return StageTask(
            stage, self.job.source, self.url, plan.recipe_id, schemas, self.run_id, plan.recipe["weights"]
        )  # fmt: skip

    def _feed(self, state: _StageState) -> None:
        """Give the runner as much of a stage as it takes, unless a stage behind it lags."""
        if not (state.late or state.cursor < len(state.ready)):
            return
        if state.stopped is not None:  # these have come since
            self._forget(state, state.stopped)
            return
        if any(len(reader.late) > _LATE_LIMIT for reader in self.readers[state.name]):
            return
        room = self.runner.room(state.name)
        works: list[Work] = []
        while state.late and len(works) < room:
            index, decision, rows = state.late.popleft()
            works.append(self._work(state, index, decision.fingerprint, decision.attempts, rows))
        if len(works) < room and state.cursor < len(state.ready):
            chosen = state.ready[state.cursor : state.cursor + room - len(works)]
            state.cursor += len(chosen)
            for index in chosen.tolist():
                rows = tuple(self.states[name].plan.row(int(state.at[name][index])) for name in state.plan.feeds)
                works.append(self._work(state, index, *self._planned(state, index), rows))
        if works:
            state.started = state.started or time.monotonic()
            self.runner.put(state.name, works)

    @staticmethod
    def _planned(state: _StageState, index: int) -> tuple[bytes, int]:
        """Fingerprint and earlier tries of a row of the plan."""
        table = state.plan.table
        return table["fingerprint"][index].as_py(), table["tries"][index].as_py() or 0

    def _work(
        self, state: _StageState, index: int, fingerprint: bytes, tries: int, upstream: tuple[Row, ...] = ()
    ) -> Work:
        item, inputs = (state.plan.table[name][index].as_py() for name in ("item", "inputs"))
        work = Work(item, fingerprint, inputs, upstream, tries + 1)
        state.out[item] = index, work
        return work

    def _take(self, report: Report) -> None:
        """Note what a runner reports; its rows are committed later."""
        state = self.states[report.stage]
        state.result.work_s += report.seconds
        failed = 0
        for row in report.rows:
            if row.item not in state.out:
                continue  # of a stage that was stopped meanwhile
            index, work = state.out.pop(row.item)
            if row.error_class == CorruptShard.__name__:
                row = self._mark_corrupt(row, work)
            elif self._out_of_reach(state, row, work):
                row = replace(row, fingerprint=bytes(16))  # not held against the files that the plan saw
            self.buffer.append((state, index, row))
            state.ended = time.monotonic()
            if row.status == "failed":
                failed += 1
                self._count_failure(state, row)
            else:
                state.result.made += 1
        state.window.extend([False] * max(report.made, 0) + [True] * failed)
        self.progress.update(state.name, made=report.made, failed=failed)
        if report.stopped and state.stopped is None:
            self.runner.stop(state.name)
            self._stop_stage(state, report.stopped)
        elif len(state.window) == _WINDOW and sum(state.window) > self.max_failure_rate * _WINDOW and not self.error:
            kind, _ = state.result.errors.most_common(1)[0]
            self.error = (
                f"{sum(state.window)} of the last {_WINDOW} items of {state.name} failed, most of all with {kind}: "
                f"{state.result.examples[kind]}. Mend the cause and run again with --retry-failed, "
                f"or accept it with --max-failure-rate 1"
            )

    def _out_of_reach(self, state: _StageState, row: Row, work: Work) -> bool:
        """A worker could not read files that the plan saw: their mount is gone, for a while or on its node."""
        if row.error_class not in _UNREADABLE and not row.error_text.startswith("[Errno "):
            return False
        if self.job.source is None or not state.kinds:
            return False
        try:
            return not missing_files(self.job.source, state.kinds, [work.item])
        except Exception:  # the source can't say it: it may be gone itself
            return True

    def _checked(self, batch: list[_Outcome]) -> list[_Outcome]:
        """Rows to commit; one whose files are no longer those that the plan saw stands under no fingerprint."""
        for state in self.states.values():
            places = [p for p, (whose, _, row) in enumerate(batch) if whose is state and row.inputs != bytes(16)]
            if self.job.source is None or not state.kinds or not places:
                continue
            rows = [batch[place][2] for place in places]
            try:
                now = digest_items(self.job.source, [row.item for row in rows], state.kinds)
            except Exception:  # the source can't say it: it may be gone itself
                now = np.zeros((len(rows), 16), np.uint8)
            changed = [p for p, row, found in zip(places, rows, now, strict=True) if found.tobytes() != row.inputs]
            for place in changed:
                _, index, row = batch[place]
                batch[place] = state, index, replace(row, fingerprint=bytes(16), inputs=bytes(16))
            if changed:
                others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                self.progress.note(
                    f"{state.name} {batch[changed[0]][2].item}{others}: "
                    f"input changed while the run went on; the next run makes it again"
                )
        return batch

    def _mark_corrupt(self, row: Row, work: Work) -> Row:
        """Mark the record that could not be read, so that the next run makes it again, and then this item too.

        Returns:
            The item's row, under no fingerprint: a damaged shard is not held against it.
        """
        for read in work.upstream:
            if read.shard and read.shard in row.error_text:
                marked = replace(read, status="corrupt", error_class=row.error_class, error_text=row.error_text)
                self.buffer.append((None, -1, replace(marked, run=self.run_id)))
        return replace(row, fingerprint=bytes(16))

    def _count_failure(self, state: _StageState, row: Row) -> None:
        state.result.failed += 1
        state.result.errors[row.error_class] += 1
        if row.error_class not in state.result.examples:
            text = row.error_text.removeprefix(f"{row.item}: ")
            state.result.examples[row.error_class] = f"{row.item}: {text}"
            if state.stopped is None:  # else it has been said
                self.progress.note(f"{state.name} {row.item}: {row.error_class}: {text}")

    def _stop_stage(self, state: _StageState, cause: Failure) -> None:
        """A stage can't run: nothing more of it is handed out."""
        state.stopped = cause
        state.result.stopped = f"{cause.error_class}: {cause.text}"
        self.progress.note(f"{state.name} stopped: {state.result.stopped}")
        self._forget(state, cause)

    def _forget(self, state: _StageState, cause: Failure) -> None:
        """Leave the items of a stopped stage, or record the cause for each where it is bound to the recipe."""
        if cause.error_class in REMEMBERED:
            for index, decision, rows in state.late:
                self._work(state, index, decision.fingerprint, decision.attempts, rows)
            for index in state.ready[state.cursor :].tolist():
                self._work(state, index, *self._planned(state, index))
            for index, work in state.out.values():
                row = failed_row(new_row(state.name, state.plan.recipe_id, self.run_id, work), cause)
                self.buffer.append((state, index, row))
                self._count_failure(state, row)
        state.out.clear()
        state.late.clear()
        state.cursor = len(state.ready)

    # ------------------------------------------------------------------------------------ outcomes

    def _commit(self) -> None:
        """Commit the rows that have come, then decide what waited for them; that may give more rows."""
        while self.buffer:
            batch, self.buffer = self._checked(self.buffer), []
            try:
                self.manifest.commit([row for _, _, row in batch])
            except BaseException:
                self.buffer = batch + self.buffer
                raise
            for state, index, row in batch:
                if state is not None:
                    self._settle(state, index, None if row.status == "failed" else row)
        self.committed_at = time.monotonic()

    def _settle(self, state: _StageState, index: int, row: Row | None) -> None:
        """The outcome of an item is known: its record's row, or None."""
        if state.name in self.joined:
            state.digests[index] = row.digest if row else None
        if not self.readers[state.name]:
            return
        state.records[index] = row
        for reader in self.readers[state.name]:
            here = int(reader.back[state.name][index])
            if here >= 0 and reader.waits[here]:
                self._decide(reader, here)
        if not any(
            (here := int(reader.back[state.name][index])) >= 0 and reader.waits[here]
            for reader in self.readers[state.name]
        ):
            del state.records[index]

    def _decide(self, state: _StageState, index: int) -> None:
        """Decide a waiting item if all its upstream outcomes are known."""
        rows: dict[str, Row | None] = {}
        for name in state.plan.feeds:
            upstream, there = self.states[name], int(state.at[name][index])
            if there in upstream.records:
                rows[name] = upstream.records[there]
            elif upstream.reusable[there]:
                rows[name] = upstream.plan.row(there)
            else:
                return
        state.waits[index] = False
        decision = state.plan.decide(index, {name: row.digest if row else None for name, row in rows.items()})
        if decision.action == "compute":
            state.late.append((index, decision, tuple(row for row in rows.values() if row)))
        else:
            self._no_work(state, decision)
            if decision.commit is not None:
                self.buffer.append((None, -1, decision.commit))
            self._settle(state, index, decision.row)

    def _no_work(self, state: _StageState, decision: Decision) -> None:
        state.todo -= 1
        self.progress.update(state.name, dropped=1)
        if decision.action == "reuse":
            state.result.reused += 1
        else:
            state.result.skipped += 1

    # ------------------------------------------------------------------------------------ tables

    def _run_table(self, state: _StageState) -> None:
        """Build a bulk table in this process, once all that it joins is committed."""
        table = state.plan.stage
        assert not isinstance(table, Stage)
        works = [self._work(state, index, *self._planned(state, index)) for index in state.ready.tolist()]
        for index in np.flatnonzero(state.waits).tolist():
            upstream = self.states[table.of]
            there = int(state.at[table.of][index])
            if there not in upstream.digests:
                continue  # the upstream stage was stopped before it came to this item
            state.waits[index] = False
            decision = state.plan.decide(index, {table.of: upstream.digests[there]})
            if decision.action == "compute":
                works.append(self._work(state, index, decision.fingerprint, decision.attempts))
                continue
            self._no_work(state, decision)
            if decision.commit is not None:
                self.buffer.append((None, -1, decision.commit))
        state.started = since = time.monotonic()
        try:
            for rows in build_table(table, self.url, state.plan.recipe_id, works, self.run_id) if works else ():
                made = sum(row.status != "failed" for row in rows)
                self._take(Report(state.name, made, rows, time.monotonic() - since))
                self._commit()
                since = time.monotonic()
                if self.signal or self.error:
                    break
            self._commit()
        except CacheError as error:
            self.error = str(error)
        except Exception as error:
            state.result.stopped = "{0.error_class}: {0.text}".format(failure(error))
            self.progress.note(f"{state.name} stopped: {state.result.stopped}")
        state.ended = time.monotonic()

    # ------------------------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM asks the run to end; the next one ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def ask(number: int, _: Any) -> None:
            self.signal = number
            for again in before:  # at once, even from within native code: nothing that is committed can be lost
                signal.signal(again, signal.SIG_DFL)
            self.progress.plain()
            self.progress.note("Ending: finishing and committing what is under way; once more to quit at once.")

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

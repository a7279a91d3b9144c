"""Run stages on Ray: this machine by default, a cluster with an address.

The run reserves *slots*, one CPU or one GPU each, as one placement group. Actors of several stages may live on
a slot (they reserve nothing themselves) and one of them works at a time. So a stage that waits holds no CPU, nothing is
loaded twice when work moves to and fro between stages, and actors can't lock each other out.

A CPU stage's actor does everything: it opens inputs, extracts, and writes shards. A stage with `device = "gpu"`
is split where there are GPUs: actors on CPU slots prepare items, and what they give goes through Ray's object store
to the actor on a GPU, which batches it across items and writes in a thread. The driver sees rows alone.

When an actor dies, what it held and had not written is queued again. The items it worked on are suspects: each is tried
alone, and one whose actor dies twice while it is alone is recorded as WorkerDied. An actor that can't be made is no
death: the next would fail in the same way, so the stage stops.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.errors import RunnerError
from pipelines.extraction import Failure, Prepared, failure
from pipelines.runners.ray_session import import_ray, start_ray
from pipelines.worker import Report, StageTask, StageWorker, Work, device_for, failed_row, new_row
from storage.manifest import Row

_CALL_S = 0.5  # a call should take about so long: long against its cost, short against the run
_CALLS_AHEAD = 2  # calls an actor has at most: the one it works on and the next
_LONG_S = 5.0  # no next one beside a call that takes longer: the end of a run would wait for both
_PREPARED_AHEAD = 4  # prepared calls that may wait for a GPU slot; bounds the object store
_START_S = 300.0  # an actor that is not up by then is on a node that is not coming back
_CAUSE_LENGTH = 400  # of what is kept of a death's cause
_DEATHS = 20  # deaths of a stage's actors in a row, with nothing made in between, that stop the stage


class _StageActor:
    """One stage in one process of the cluster."""

    def __init__(self, task: StageTask, on_gpu: bool, folder: str) -> None:
        with contextlib.suppress(OSError):  # where the driver is, for the relative paths of a job in Python
            os.chdir(folder)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"  # a slot is one core; read when torch is imported, helpers inherit it
        self.worker = StageWorker(task, device_for(task.stage.extractor) if on_gpu else "cpu")

    def up(self) -> None:
        """Answers once the actor is there."""

    def run(self, works: Sequence[Work], prepared: Sequence[Prepared] | None, flush: bool) -> Report:
        return self.worker.run(works, prepared, flush)

    def prepare(self, works: Sequence[Work]) -> tuple[Report, list[Prepared]]:
        start = time.perf_counter()
        report = Report(self.worker.task.name)
        prepared: list[Prepared] = []
        try:
            prepared = self.worker.prepare(works)
        except Exception as error:  # what concerns one item is in its Prepared, so this concerns all
            report.stopped = failure(error)
        report.seconds = time.perf_counter() - start
        return report, prepared

    def flush(self) -> Report:
        return self.worker.flush()


@dataclass(eq=False)
class _Call:
    what: str  # up, run, prepare, flush
    works: Sequence[Work]
    report: Any  # reference of the Report
    prepared: Any = None  # reference of what a prepare gives, or of what a run takes
    suspect: bool = False


@dataclass(eq=False)
class _Actor:
    handle: Any
    lane: _Lane
    slot: _Slot
    calls: deque[_Call] = field(default_factory=deque)
    unwritten: dict[str, Work] = field(default_factory=dict)  # given to it, no row yet
    made: int = 0  # of these, how many were reported as made
    up: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Slot:
    index: int  # bundle of the placement group
    gpu: bool
    actors: dict[str, _Actor] = field(default_factory=dict)  # by lane; one of them works, at most

    def busy(self) -> _Actor | None:
        """The actor that works or is being started."""
        return next((a for a in self.actors.values() if not a.up or any(call.works for call in a.calls)), None)


@dataclass(eq=False)
class _Lane:
    """The actors that do the same: a whole stage, its preparing half, or its GPU half."""

    name: str
    what: str  # whole, prepare, gpu
    stage: _Stage
    per_item_s: float = 0.0

    @property
    def waiting(self) -> int:
        """Items that this lane could take now."""
        stage = self.stage
        if self.what == "gpu":
            return sum(len(works) for works, _ in stage.prepared)
        if self.what == "prepare" and len(stage.prepared) + stage.preparing >= _PREPARED_AHEAD:
            return 0
        return len(stage.suspects) + len(stage.queue)

    def chunk(self, slots: int) -> int:
        """Items of the next call: about half a second of work in whole batches, less at the end."""
        batch = self.stage.task.stage.batch or 1
        items = int(_CALL_S / self.per_item_s) if self.per_item_s else batch
        fair = -(-len(self.stage.queue) // (2 * max(slots, 1)))
        return max(min(items, fair) // batch * batch, batch)

    @property
    def calls_ahead(self) -> int:
        """Calls that an actor may have; one until it is known how long they take."""
        each = self.per_item_s * (self.stage.task.stage.batch or 1)
        return _CALLS_AHEAD if 0 < each < _LONG_S else 1

    def learn(self, seconds: float, items: int) -> None:
        if items:
            each = max(seconds / items, 1e-6)
            self.per_item_s = 0.7 * self.per_item_s + 0.3 * each if self.per_item_s else each


@dataclass(eq=False)
class _Stage:
    task: StageTask
    queue: deque[Work] = field(default_factory=deque)
    suspects: deque[Work] = field(default_factory=deque)  # tried alone
    prepared: deque[tuple[Sequence[Work], Any]] = field(default_factory=deque)
    preparing: int = 0  # calls
    deaths: dict[str, int] = field(default_factory=dict)  # of suspects: actors that died while it was alone
    deaths_in_a_row: int = 0
    stopped: bool = False


class RayRunner:
    """Args:
    workers: CPU slots; all CPUs that are free by default.
    address: of a cluster (`auto`, `ray://host:10001`, `host:6379`); None starts Ray on this machine.
    init: further arguments of `ray.init`, for a Ray on this machine.
    """

    def __init__(self, workers: int | None = None, address: str | None = None, **init: Any) -> None:
        self._workers = workers
        self._address = address
        self._init = init
        self._started_ray = False
        self._group: Any = None
        self._stages: dict[str, _Stage] = {}
        self._lanes: list[_Lane] = []
        self._slots: list[_Slot] = []
        self._reports: list[Report] = []
        self._closing = False

    # ------------------------------------------------------------------------------------ the Runner

    def start(self, tasks: Sequence[StageTask]) -> None:
        ray = import_ray()
        from ray.util.placement_group import placement_group

        if not ray.is_initialized():
            self._started_ray = True
            start_ray(self._workers, self._address, **self._init)
        for task in tasks:
            if (task.stage.gpus or 0) > 1:
                raise ValueError(f"stage {task.name}: gpus={task.stage.gpus}; a worker uses one GPU or a part of one")
        free = ray.available_resources() if self._address else ray.cluster_resources()
        share = max((_gpus(task) for task in tasks), default=0.0)
        gpus = int(free.get("GPU", 0)) if share else 0
        cpus = max(int(free.get("CPU", 1)), 1)
        spare = cpus - gpus >= 1  # where there are enough, a GPU slot holds a CPU too
        count = min(self._workers or cpus, max(cpus - gpus, 1) if spare else cpus)
        per_gpu = int(1 / share) if share else 0  # workers that share a GPU also share the CPU that goes with it
        gpu_bundle = {"GPU": share, "CPU": 1 / per_gpu} if gpus and spare else {"GPU": share}
        bundles = [gpu_bundle] * gpus * per_gpu + [{"CPU": 1.0}] * count
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(timeout_seconds=120):
            raise RunnerError(
                f"Ray could not reserve {count} CPUs and {gpus} GPUs within 2 minutes (free: {free}): "
                f"other jobs hold them; wait, or run with fewer --workers"
            )
        self._actor_class = ray.remote(_StageActor)
        self._slots = [_Slot(i, "GPU" in bundle) for i, bundle in enumerate(bundles)]
        for task in tasks:
            stage = self._stages[task.name] = _Stage(task)
            parts = ("prepare", "gpu") if gpus and _gpus(task) else ("whole",)
            self._lanes += [_Lane(f"{task.name} {part}", part, stage) for part in parts]

    def room(self, stage: str) -> int:
        lanes = [lane for lane in self._lanes if lane.stage.task.name == stage and lane.what != "gpu"]
        batch = self._stages[stage].task.stage.batch or 1
        per_call = max(batch, int(_CALL_S / lanes[0].per_item_s) if lanes[0].per_item_s else batch)
        return max(8 * per_call * len(self._slots) - len(self._stages[stage].queue), 0)

    def put(self, stage: str, works: Sequence[Work]) -> None:
        self._stages[stage].queue.extend(works)

    def stop(self, stage: str) -> None:
        state = self._stages[stage]
        state.stopped = True
        state.queue.clear()
        state.suspects.clear()
        state.prepared.clear()

    def poll(self, timeout_s: float) -> list[Report]:
        self._dispatch()
        self._receive(timeout_s)
        self._dispatch()
        reports, self._reports = self._reports, []
        return reports

    def close(self, flush: bool) -> list[Report]:
        import ray

        if not ray.is_initialized():
            return []
        try:
            if flush:
                self._closing = True
                for name in self._stages:
                    self.stop(name)
                while any(actor.unwritten or any(c.works for c in actor.calls) for actor in self._actors()):
                    self._dispatch()
                    self._receive(1.0)
        finally:
            with contextlib.suppress(Exception):
                for actor in self._actors():
                    ray.kill(actor.handle)
                if self._group is not None:
                    ray.util.remove_placement_group(self._group)
            if self._started_ray:
                ray.shutdown()
        reports, self._reports = self._reports, []
        return reports

    # ------------------------------------------------------------------------------------ giving out work

    def _actors(self) -> list[_Actor]:
        return [actor for slot in self._slots for actor in slot.actors.values()]

    def _dispatch(self) -> None:
        """Keep every slot supplied."""
        for slot in self._slots:
            while (actor := self._next(slot)) is not None:
                self._give(actor)
        for actor in self._actors():
            idle = not actor.calls and actor.unwritten
            if idle and (self._closing or not self._stage_has_work(actor.lane.stage)):
                self._call(actor, "flush")

    @staticmethod
    def _stage_has_work(stage: _Stage) -> bool:
        return bool(stage.queue or stage.suspects or stage.prepared or stage.preparing)

    def _next(self, slot: _Slot) -> _Actor | None:
        """The actor of a slot that gets the next call; None where it is supplied or nothing waits."""
        busy = slot.busy()
        if busy is not None and (not busy.up or len(busy.calls) >= busy.lane.calls_ahead):
            return None
        # A suspect has its actor to itself, before and behind: an actor that dies at once in the next call can take the
        # answer of the one before with it, and that one would be blamed.
        if busy is not None and (busy.lane.stage.suspects or any(call.suspect for call in busy.calls)):
            return None
        on = Counter(other.lane.name for s in self._slots if s is not slot and (other := s.busy()))
        wanting = [
            lane
            for lane in self._lanes
            if lane.waiting
            and (lane.what == "gpu") == slot.gpu
            and on[lane.name] < (lane.stage.task.stage.workers or len(self._slots))
        ]
        if not wanting:
            return None
        # the lane on the fewest slots; of equals the one at work here, then one that has an actor here, then the last
        best = min(
            reversed(wanting),
            key=lambda lane: (on[lane.name], busy is None or busy.lane is not lane, lane.name not in slot.actors),
        )
        if busy is not None:
            return busy if busy.lane is best else None  # else it runs dry, then the slot changes
        if best.name not in slot.actors:
            self._new_actor(slot, best)
            return None  # nothing is given to an actor that is not up: its node may be gone
        return slot.actors[best.name]

    def _new_actor(self, slot: _Slot, lane: _Lane) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot.index)
        options = {"num_cpus": 0, "num_gpus": 0.01 if slot.gpu else 0, "max_restarts": 0, "scheduling_strategy": place}
        handle = self._actor_class.options(**options).remote(lane.stage.task, slot.gpu, os.getcwd())
        actor = slot.actors[lane.name] = _Actor(handle, lane, slot)
        self._call(actor, "up")

    def _give(self, actor: _Actor) -> None:
        lane, stage = actor.lane, actor.lane.stage
        if lane.what == "gpu":
            works, prepared = stage.prepared.popleft()
            self._call(actor, "run", works, prepared, suspect=works[0].item in stage.deaths)
            return
        if stage.suspects:
            works, suspect = [stage.suspects.popleft()], True
        else:
            slots = sum(slot.gpu == actor.slot.gpu for slot in self._slots)
            count = min(lane.chunk(slots), len(stage.queue))
            works, suspect = [stage.queue.popleft() for _ in range(count)], False
        self._call(actor, "prepare" if lane.what == "prepare" else "run", works, suspect=suspect)

    def _call(
        self, actor: _Actor, what: str, works: Sequence[Work] = (), prepared: Any = None, suspect: bool = False
    ) -> None:
        handle = actor.handle
        if what == "run":
            report = handle.run.remote(works, prepared, suspect)
        elif what == "prepare":
            report, prepared = handle.prepare.options(num_returns=2).remote(works)
            actor.lane.stage.preparing += 1
        else:
            report = (handle.flush if what == "flush" else handle.up).remote()
        actor.unwritten.update((work.item, work) for work in works)
        actor.calls.append(_Call(what, works, report, prepared, suspect))

    # ------------------------------------------------------------------------------------ what comes back

    def _receive(self, timeout_s: float) -> None:
        import ray

        waiting = {call.report: actor for actor in self._actors() for call in actor.calls}
        if not waiting:
            return
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s, fetch_local=False)
        if done:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0, fetch_local=False)
        ready = set(done)
        for actor in {waiting[reference]: None for reference in done}:
            while actor.calls and actor.calls[0].report in ready:
                try:
                    report = ray.get(actor.calls[0].report)
                except ray.exceptions.RayTaskError as error:
                    if not isinstance(error.cause, ray.exceptions.RayError):
                        raise (error.cause if isinstance(error.cause, Exception) else error) from None
                    self._again(actor, actor.calls.popleft())  # what it was to work on was lost with its node
                    continue
                except ray.exceptions.RayError as error:  # died, unavailable, out of memory, its node is gone
                    self._bury(actor, error)
                    break
                self._answer(actor, actor.calls.popleft(), report)
        for actor in self._actors():
            if not actor.up and time.monotonic() - actor.since > _START_S:
                self._abandon(actor)

    def _answer(self, actor: _Actor, call: _Call, report: Report | None) -> None:
        stage = actor.lane.stage
        if call.what == "up" or report is None:
            actor.up = True
            return
        if call.what == "prepare":
            stage.preparing -= 1
            for work in call.works:
                del actor.unwritten[work.item]
            if not (report.stopped or stage.stopped):
                stage.prepared.append((call.works, call.prepared))
        if call.what != "flush":
            actor.lane.learn(report.seconds, len(call.works))
        for row in report.rows:
            actor.unwritten.pop(row.item, None)
        if report.stopped:  # what came after the cause was not tried
            actor.unwritten.clear()
        actor.made += report.made - sum(row.status != "failed" for row in report.rows)
        if report.made or report.rows:
            stage.deaths_in_a_row = 0
        self._reports.append(report)

    # ------------------------------------------------------------------------------------ deaths

    def _bury(self, actor: _Actor, error: Exception) -> None:
        """An actor is gone: queue again what it held, and suspect what it worked on."""
        import ray

        stage = actor.lane.stage
        with contextlib.suppress(Exception):  # one that is only out of reach must not write on
            ray.kill(actor.handle)
        actor.slot.actors.pop(actor.lane.name, None)
        stage.preparing -= sum(call.what == "prepare" for call in actor.calls)
        current = actor.calls[0].works
        for work in current:
            actor.unwritten.pop(work.item, None)
        self._reports.append(Report(stage.task.name, made=-actor.made))
        if stage.stopped:
            return
        cause = _cause(error)
        if getattr(error, "actor_init_failed", False):
            self._reports.append(Report(stage.task.name, stopped=Failure("WorkerNotMade", cause)))
            return
        stage.deaths_in_a_row += 1
        if stage.deaths_in_a_row >= _DEATHS:
            text = f"{stage.deaths_in_a_row} workers died one after the other: {cause}"
            self._reports.append(Report(stage.task.name, stopped=Failure("WorkerDied", text)))
            return
        for work in reversed(list(actor.unwritten.values())):
            (stage.suspects if work.item in stage.deaths else stage.queue).appendleft(work)
        self._suspect(stage, current, cause)

    def _again(self, actor: _Actor, call: _Call) -> None:
        """Queue the items of a call again that came to nothing through no fault of theirs."""
        for work in reversed(call.works):
            actor.unwritten.pop(work.item, None)
            if not actor.lane.stage.stopped:
                actor.lane.stage.queue.appendleft(work)

    def _suspect(self, stage: _Stage, works: Sequence[Work], cause: str) -> None:
        dead: list[Row] = []
        alone = len(works) == 1
        for work in works:
            stage.deaths[work.item] = deaths = stage.deaths.get(work.item, 0) + alone
            if deaths < 2:
                stage.suspects.append(work)
                continue
            row = new_row(stage.task.name, stage.task.recipe, stage.task.run, replace(work, attempts=work.attempts + 1))
            dead.append(failed_row(row, Failure("WorkerDied", f"its worker died twice: {cause}")))
        if dead:
            self._reports.append(Report(stage.task.name, rows=dead))

    def _abandon(self, actor: _Actor) -> None:
        """Do without a slot on which no actor comes up."""
        self._slots.remove(actor.slot)
        if not any(slot.gpu == actor.slot.gpu for slot in self._slots):
            raise RunnerError(f"no worker came up within {_START_S:g} s; see `ray status` and the logs of the cluster")


def _gpus(task: StageTask) -> float:
    """GPUs that one worker of a stage is to have."""
    if task.stage.gpus is not None:
        return task.stage.gpus
    return 1.0 if task.stage.extractor.device == "gpu" else 0.0


def _cause(error: Exception) -> str:
    """What Ray says about a death, in one line without its advice, colours and underlines; the cause is at the end."""
    text = re.sub(r"\x1b\[[0-9;]*m|\^{2,}", "", str(error))
    text = " ".join(text.split()).split("Some common causes include")[0]
    text = text.split("Worker exit type:")[-1].strip()
    return (text if len(text) <= _CAUSE_LENGTH else f"... {text[-_CAUSE_LENGTH:]}") or type(error).__name__

"""Run stages in this process, one batch at a time: small jobs and debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from pipelines.extraction import failure
from pipelines.worker import Report, StageTask, StageWorker, Work, device_for
from storage.errors import CacheError

_QUEUE = 64  # batches that wait


class LocalRunner:
    """Runs the furthest stage that has items first, so that little waits between stages."""

    def __init__(self) -> None:
        self._tasks: dict[str, StageTask] = {}
        self._queues: dict[str, deque[Work]] = {}
        self._workers: dict[str, StageWorker] = {}
        self._unwritten: set[str] = set()

    def start(self, tasks: Sequence[StageTask]) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._queues = {task.name: deque() for task in tasks}

    def room(self, stage: str) -> int:
        return _QUEUE * (self._tasks[stage].stage.batch or 1) - len(self._queues[stage])

    def put(self, stage: str, works: Sequence[Work]) -> None:
        self._queues[stage].extend(works)

    def stop(self, stage: str) -> None:
        self._queues[stage].clear()

    def poll(self, timeout_s: float) -> list[Report]:
        for name in reversed(self._tasks):
            if queue := self._queues[name]:
                size = self._tasks[name].stage.batch or 1
                works = list(islice(queue, size))
                for _ in works:
                    queue.popleft()
                try:
                    worker = self._worker(name)
                except CacheError:
                    raise
                except Exception as error:
                    return [Report(name, stopped=failure(error))]
                self._unwritten.add(name)
                return [worker.run(works)]
        return self._flush()

    def close(self, flush: bool) -> list[Report]:
        try:
            return self._flush() if flush else []
        finally:
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()

    def _flush(self) -> list[Report]:
        written = [self._workers[name].flush() for name in self._tasks if name in self._unwritten]
        self._unwritten.clear()
        return written

    def _worker(self, name: str) -> StageWorker:
        if name not in self._workers:
            task = self._tasks[name]
            self._workers[name] = StageWorker(task, device_for(task.stage.extractor))
        return self._workers[name]

"""Where stages run. `pipelines.execute` is the only user of a runner; it decides what runs, a runner decides where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipelines.worker import Report, StageTask, Work


class Runner(Protocol):
    """Takes items of stages and gives back manifest rows, in any order.

    For every item that was put, exactly one row comes back, of status `ok`, `empty` or `failed`, unless the
    stage was stopped or the runner closed before.
    """

    def start(self, tasks: Sequence[StageTask]) -> None:
        """Get ready for these stages, which come in the job's order."""
        ...

    def room(self, stage: str) -> int:
        """How many more items of a stage it takes now; 0 while its queue is full."""
        ...

    def put(self, stage: str, works: Sequence[Work]) -> None:
        """Queue items of a stage."""
        ...

    def stop(self, stage: str) -> None:
        """Forget the queued items of a stage."""
        ...

    def poll(self, timeout_s: float) -> list[Report]:
        """Work, or wait for workers, up to about `timeout_s`; what has come back. Pending records of a stage
        without queued items are written out, so that nothing waits for more work to come."""
        ...

    def close(self, flush: bool) -> list[Report]:
        """End all workers. With `flush`, first let them finish what they hold and write it out, and
        report that; queued items are forgotten."""
        ...

"""What a run did, stage by stage, and how it ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipelines.progress import span

REMEMBERED = ("WeightsError",)  # of what stops a stage: recorded for its items, since new weights are a new recipe

_KINDS = 5  # of errors that the text gives an example of


@dataclass
class StageResult:
    """What became of a stage's items.

    Attributes:
        reused: their record stood already. made: computed now. failed: tried now, no record.
        skipped: failed before, or their upstream did. left: not tried (stopped, interrupted).
        work_s: seconds of all workers; wall_s: from the first item handed out to the last row.
        errors: error class -> how many; examples: error class -> `item: text` of the first.
        stopped: why the stage could not run at all, "" if it could.
    """

    name: str
    reused: int = 0
    made: int = 0
    failed: int = 0
    skipped: int = 0
    left: int = 0
    work_s: float = 0.0
    wall_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    stopped: str = ""


@dataclass
class Summary:
    """The end of a run.

    Attributes:
        snapshot: manifest version after its last commit, -1 where there was never one.
        signal: number of the signal that ended it early, 0 for none.
        error: why the whole run stopped early, "" if it did not.
    """

    job: str
    run: str
    stages: list[StageResult]
    seconds: float
    snapshot: int
    signal: int = 0
    error: str = ""

    @property
    def exit_code(self) -> int:
        """0 done, 1 stopped by an error, 3 done with failures, 128 + signal where one ended it."""
        if self.signal:
            return 128 + self.signal
        if self.error or any(s.stopped and not s.stopped.startswith(REMEMBERED) for s in self.stages):
            return 1
        return 3 if any(s.failed or s.skipped for s in self.stages) else 0

    def text(self) -> str:
        """Lines for a terminal."""
        lines = []
        for s in self.stages:
            counts = {"made": s.made, "reused": s.reused, "failed": s.failed, "skipped": s.skipped, "left": s.left}
            line = f"{s.name}: " + ", ".join(f"{n} {what}" for what, n in counts.items() if n or what == "made")
            if s.made and s.wall_s:
                line += f" in {span(s.wall_s)} ({s.made / s.wall_s:.3g}/s, {s.work_s / s.made:.3g} s of work each)"
            lines.append(line)
            for kind, n in s.errors.most_common(_KINDS):
                told = s.stopped.startswith(kind)
                lines.append(f"    {n} x {kind}" + ("" if told else f", such as {s.examples[kind]}"))
            if others := sum(s.errors.values()) - sum(n for _, n in s.errors.most_common(_KINDS)):
                lines.append(f"    {others} x others")
            if s.stopped:
                lines.append(f"    stopped: {s.stopped}")
        if self.error:
            lines.append(f"The run stopped: {self.error}")
        if self.signal:
            lines.append("Interrupted; what was finished is committed. The same command goes on from here.")
        snapshot = f"snapshot {self.snapshot}" if self.snapshot >= 0 else "no snapshot: nothing was ever committed"
        lines.append(f"{self.job}: {span(self.seconds)}, {snapshot}")
        return "\n".join(lines)

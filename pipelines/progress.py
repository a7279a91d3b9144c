"""Progress of a run: done, failed, left, rate and time left of each stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

_PLAIN_S = 10.0  # seconds between plain lines


class Progress:
    """Bars on a terminal, a plain line per stage every ten seconds elsewhere.

    Args:
        totals: items to do per stage, in order; stages with none are not shown.
        stream: where to; standard error by default.
    """

    def __init__(self, totals: Mapping[str, int], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = dict(totals)
        self._done = dict.fromkeys(totals, 0)
        self._failed = dict.fromkeys(totals, 0)
        # when a stage's results first came, and how many then: rates count from there
        self._first: dict[str, tuple[float, int]] = {}
        self._said: dict[str, tuple[int, int]] = {}  # what the last plain line of a stage told
        self._printed = time.monotonic()
        self._bars: Any = None
        self._ids: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        if self._stream.isatty() and any(self._total.values()):
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.description:<16}"), BarColumn(bar_width=24), TextColumn("{task.fields[counts]}"),
                console=Console(file=self._stream), refresh_per_second=4,
            )  # fmt: skip
            self._bars.start()
            for stage, total in self._total.items():
                if total:
                    self._ids[stage] = self._bars.add_task(stage, total=total, counts=f"{total} left")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self.plain()
        else:
            self._lines()

    def plain(self) -> None:
        """Leave the bars as they are and go on with lines; the terminal is as it was before."""
        if self._bars:
            self._bars.stop()
            self._bars = None

    def update(self, stage: str, made: int = 0, failed: int = 0, dropped: int = 0) -> None:
        """Count items of a stage: made, failed, or found to need no work."""
        self._done[stage] += made
        self._failed[stage] += failed
        if made or failed:
            self._first.setdefault(stage, (time.monotonic(), self._done[stage] + self._failed[stage]))
        self._total[stage] -= dropped
        if self._bars and stage in self._ids:
            finished = self._done[stage] + self._failed[stage]
            self._bars.update(
                self._ids[stage], total=self._total[stage], completed=finished, counts=self._counts(stage)
            )
        elif not self._bars and time.monotonic() - self._printed > _PLAIN_S:
            self._lines()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._bars:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _lines(self) -> None:
        self._printed = time.monotonic()
        for stage in self._first:
            told = self._done[stage], self._failed[stage]
            if self._said.get(stage) != told:
                self._said[stage] = told
                print(f"{stage}: {self._counts(stage)}", file=self._stream, flush=True)

    def _counts(self, stage: str) -> str:
        done, failed = self._done[stage], self._failed[stage]
        left = max(self._total[stage] - done - failed, 0)
        now = time.monotonic()
        since, before = self._first.get(stage, (now, 0))
        rate = (done + failed - before) / (now - since) if now > since else 0.0
        text = f"{done} done, {failed} failed, {left} left"
        if rate:
            text += f", {rate:.3g}/s"
        if rate and left:
            text += f", {span(left / rate)} to go"
        return text


def span(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `5 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

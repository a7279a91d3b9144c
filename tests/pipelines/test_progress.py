"""What a run says of itself while it goes on."""

from __future__ import annotations

import io

import pytest

from pipelines import progress
from pipelines.progress import Progress, span


class Clock:
    """A clock that stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_there_is_a_plain_line_per_stage_every_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress({"video": 100, "votenet": 100, "idle": 0}, stream) as shown:
        shown.update("video", made=10)
        clock.now += 9
        shown.update("video", made=8, failed=1)
        assert stream.getvalue() == ""
        clock.now += 1.5
        shown.update("video", made=2, dropped=5)  # 11 in 10.5 s since the first results; 74 are left
        assert stream.getvalue() == "video: 20 done, 1 failed, 74 left, 1.05/s, 1 min 11 s to go\n"
        shown.update("votenet", made=100)
    *_, last = stream.getvalue().splitlines()
    assert last == "votenet: 100 done, 0 failed, 0 left"
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_there_are_bars_with_the_same_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with Progress({"video": 4, "idle": 0}, stream) as shown:
        shown.update("video", made=1)
        clock.now += 2
        shown.update("video", made=1)
        shown.note("a line that stays")
    text = stream.getvalue()
    assert "━━━" in text
    assert "video: " not in text
    assert "a line that stays" in text
    assert "2 done, 0 failed, 2 left, 0.5/s, 4 s to go" in text
    assert "idle" not in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (18720, "5 h 12 min")]
)
def test_spans_of_time_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text

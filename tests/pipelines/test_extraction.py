"""What an extractor may do with its arrays and its errors: nothing of it reaches other items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from extractors.base import Extractor
from pipelines.extraction import Extraction, Failure, HostedExtraction, Prepared
from storage.schema import Column, Record, Schema


class Panic(BaseException):
    """As Rust code raises it into Python."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True, kw_only=True)
class Fills(Extractor):
    """Fills one array again and again; an item may ask for trouble."""

    name: ClassVar[str] = "fills"
    takes: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def schema(self) -> Schema:
        return Schema({"value": Column((2,))})

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        kept = np.zeros(2, np.float32)

        def run(batch: Sequence[Any]) -> list[Record]:
            return [fill(text) for text in batch]

        def fill(text: str) -> Record:
            match text:
                case "panic":
                    raise Panic("index out of bounds")
                case "interrupt":
                    raise KeyboardInterrupt
                case "mute":
                    raise Mute
                case "no text":
                    raise ValueError("scan\udcff.ply: odd")
                case "view":
                    return {"value": np.arange(1000, dtype=np.float32)[:2]}
                case "foreign":
                    return {"value": np.ones(2, np.float32), "more": lambda: 0}  # type: ignore[dict-item]
            kept[:] = float(text)
            return {"value": kept}

        return run


@dataclass(frozen=True, kw_only=True)
class HostedFills(Fills):
    recycle_after: ClassVar[int | None] = 100


def run(texts: Sequence[str], hosted: bool = False) -> list[Any]:
    """What each text gives, one call for each."""
    made = HostedExtraction(HostedFills()) if hosted else Extraction(Fills())
    try:
        prepared = [[Prepared(text, (text,) if hosted else text)] for text in texts]
        return [made.run(batch)[0].result for batch in prepared]
    finally:
        made.close()


def test_an_array_that_the_extractor_fills_again_stays_as_it_was_given() -> None:
    assert [record["value"].tolist() for record in run(["1", "2", "3"])] == [[1, 1], [2, 2], [3, 3]]


def test_a_small_view_does_not_keep_a_large_array() -> None:
    (record,) = run(["view"])
    assert record["value"].base is None
    assert record["value"].tolist() == [0, 1]


@pytest.mark.parametrize("hosted", [False, True])
def test_whatever_is_raised_or_given_is_the_failure_of_one_item(hosted: bool) -> None:
    texts = ["panic", "interrupt", "mute", "no text", "foreign", "5"]
    panic, interrupt, mute, no_text, foreign, good = run(texts, hosted)
    assert panic.error_class == "RuntimeError"
    assert panic.text.startswith("Panic: index out of bounds")
    assert interrupt.text.startswith("KeyboardInterrupt")
    assert mute.error_class == "Mute"
    assert isinstance(no_text, Failure)
    assert no_text.text.encode().startswith(b"scan\\udcff.ply: odd")
    assert foreign.error_class == "SchemaError"
    assert "more" in foreign.text
    assert good["value"].tolist() == [5, 5]

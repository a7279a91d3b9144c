"""What an extractor has to be, and how its settings become a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from extractors.base import Extractor, Weights, check, recipe
from extractors.fake import Fake


@dataclass(frozen=True, kw_only=True)
class Settings(Fake):
    ratio: float = 1
    pair: tuple[float, ...] = (1, 2)
    nested: tuple[tuple[int, int], ...] = ((1, 2),)
    names: dict[str, int] = field(default_factory=dict)
    limit: float | None = None
    weights: Weights | None = None


@dataclass(frozen=True, kw_only=True)
class Odd(Fake):
    odd: Any = None


class Undecorated(Fake):
    depth: int = 3


class OnlyHow(Fake):
    """No setting of its own, so no decorator is needed."""

    version: ClassVar[int] = 2
    batch = 4


@dataclass(frozen=True, kw_only=True)
class BatchAsSetting(Fake):
    batch: int = 4  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Nameless(Extractor):
    takes: ClassVar[tuple[str, ...]] = ("scan",)


@dataclass(frozen=True, kw_only=True)
class TakesText(Fake):
    takes: ClassVar[Any] = "scan"


@pytest.mark.parametrize("good", [Fake(), Settings(), Settings(weights=Weights("untrained:0")), OnlyHow()])
def test_an_extractor_whose_settings_fit_a_recipe_is_accepted(good: Extractor) -> None:
    check(good)
    assert recipe(good) == recipe(good)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Odd(odd=Path("x")), r"odd = PosixPath\('x'\) is no setting: .*a Weights"),
        (Odd(odd=np.zeros(2)), "odd = array.* is no setting"),
        (Odd(odd=float("nan")), "odd = nan is no setting"),
        (Odd(odd={1: 2}), "odd = {1: 2} is no setting"),
        (Odd(odd=(1, np.float32(2))), "odd = .* is no setting"),
        (Undecorated(), r"depth would not count: put @dataclass\(frozen=True, kw_only=True\) above the class"),
        (BatchAsSetting(), "batch can be no setting: .*make it a ClassVar"),
        (Nameless(), "test_base.Nameless: it has no name"),
        (TakesText(), "takes is 'scan', expected a tuple"),
    ],
)
def test_an_extractor_that_its_recipe_could_not_hold_is_refused_with_what_to_do(bad: Extractor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(bad)


def test_a_whole_number_for_a_float_is_the_same_setting_as_that_float() -> None:
    assert recipe(Settings(ratio=2, pair=(3, 4), limit=5)) == recipe(Settings(ratio=2.0, pair=(3.0, 4.0), limit=5.0))
    settings = recipe(Settings())["settings"]
    assert [type(settings["ratio"]), type(settings["pair"][0]), type(settings["objects"])] == [float, float, int]
    assert settings["nested"] == [[1, 2]]


def test_what_is_missing_of_an_extractor_is_named_when_it_is_asked_for() -> None:
    with pytest.raises(NotImplementedError, match="Nameless has no load"):
        Nameless().load()
    with pytest.raises(NotImplementedError, match="Nameless has no schema"):
        _ = Nameless().schema

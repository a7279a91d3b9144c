"""Situated questions about a room whose answers follow from its geometry, in the words of SQA3D."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipelines.make_data.furniture import Thing
from pipelines.make_data.rooms import Room

DIRECTIONS = ("in front of me", "to my left", "behind me", "to my right")  # by quarter turns to the left
_TURN = ("forward", "left", "backward", "right")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
_PLURAL = {"couch": "couches", "bookshelf": "bookshelves"}
_CLEAR = np.deg2rad(12)  # an object nearer than this to a border between directions has none
_REACH = 0.3  # metres that somebody keeps from furniture


@dataclass(frozen=True)
class Situation:
    """Somebody standing in a room.

    Attributes:
        x, y: where, room frame, metres.
        yaw: direction of view, radians from +x to +y.
        text: a description that is true there.
        alternatives: two other true descriptions.
    """

    x: float
    y: float
    yaw: float
    text: str
    alternatives: tuple[str, str]


@dataclass(frozen=True)
class Question:
    """A question with its answer."""

    situation: Situation
    text: str
    answer: str

    @property
    def kind(self) -> str:
        """First word: what SQA3D's question types go by."""
        return self.text.split()[0].lower()


def ask(rng: np.random.Generator, room: Room, count: int) -> list[Question]:
    """Questions of a room, balanced over kinds and, within a kind, over answers as far as the room allows."""
    pool: list[Question] = []
    for situation in _situations(rng, room, count // 2):
        pool += _questions(rng, room, situation)
    order = rng.permutation(len(pool))
    kinds: Counter[str] = Counter()
    answers: Counter[tuple[str, str]] = Counter()
    chosen: list[Question] = []
    left = [pool[i] for i in order]
    while left and len(chosen) < count:
        best = min(range(len(left)), key=lambda i: (kinds[left[i].kind], answers[left[i].kind, left[i].answer], i))
        question = left.pop(best)
        kinds[question.kind] += 1
        answers[question.kind, question.answer] += 1
        chosen.append(question)
    return chosen


def direction(situation: Situation, thing: Thing) -> int | None:
    """Quarter (index into DIRECTIONS) in which the middle of a thing is; None near a border or underfoot."""
    dx, dy = thing.bounds.mean(axis=0)[:2] - (situation.x, situation.y)
    if np.hypot(dx, dy) < 0.3:
        return None
    turn = (np.arctan2(dy, dx) - situation.yaw) / (np.pi / 2)
    if abs(turn - np.round(turn)) * np.pi / 2 > np.pi / 4 - _CLEAR:
        return None
    return int(np.round(turn)) % 4


def distance(situation: Situation, thing: Thing) -> float:
    """Horizontal metres to the nearest edge of a thing's bounds."""
    low, high = thing.bounds[:, :2]
    place = np.array([situation.x, situation.y])
    return float(np.linalg.norm(np.maximum(np.maximum(low - place, place - high), 0)))


def _situations(rng: np.random.Generator, room: Room, count: int) -> Iterator[Situation]:
    single = [t for t in room.things if _count(room, t.label) == 1]
    made = 0
    for _ in range(400):
        if made == count:
            return
        x = rng.uniform(0.4 - room.width / 2, room.width / 2 - 0.4)
        y = rng.uniform(0.4 - room.depth / 2, room.depth / 2 - 0.4)
        here = Situation(x, y, 0, "", ("", ""))
        if any(t.bounds[0, 2] < 1.0 and distance(here, t) < _REACH for t in room.things):
            continue
        ahead = single[rng.integers(len(single))]
        dx, dy = ahead.bounds.mean(axis=0)[:2] - (x, y)
        here = Situation(x, y, float(np.arctan2(dy, dx)), "", ("", ""))
        beside = [t for t in single if t is not ahead and direction(here, t) in (1, 2, 3)]
        if len(beside) < 2 or direction(here, ahead) != 0:
            continue
        near, other = sorted(beside, key=lambda t: distance(here, t))[:2]
        where = [DIRECTIONS[direction(here, t) or 0] for t in (near, other)]
        yield Situation(
            x, y, here.yaw,
            f"I am facing the {ahead.label}, and the {near.label} is {where[0]}.",
            (f"I am looking at the {ahead.label} with the {other.label} {where[1]}.",
             f"Standing with the {near.label} {where[0]}, I have the {ahead.label} in front of me."),
        )  # fmt: skip
        made += 1


def _questions(rng: np.random.Generator, room: Room, here: Situation) -> Iterator[Question]:
    quarters: dict[int, list[Thing]] = {i: [] for i in range(4)}
    unclear: list[Thing] = []
    for thing in room.things:
        quarter = direction(here, thing)
        (unclear if quarter is None else quarters[quarter]).append(thing)
    labels = sorted({t.label for t in room.things})
    for quarter, where in enumerate(DIRECTIONS):
        near = sorted(quarters[quarter], key=lambda t: distance(here, t))
        rivals = [distance(here, t) for t in [*near, *unclear] if not near or t.label != near[0].label]
        if near and distance(here, near[0]) + 0.4 < min(rivals, default=np.inf):
            yield Question(here, f"What is the closest thing {where}?", near[0].label)
        for label in labels:
            if any(t.label == label for t in unclear):
                continue
            count = sum(t.label == label for t in near)
            article = "an" if label[0] in "aeiou" else "a"
            yield Question(here, f"Is there {article} {label} {where}?", "yes" if count else "no")
            if _count(room, label) > 1:
                yield Question(here, f"How many {_plural(label)} are {where}?", _NUMBERS[count])
        for thing in near:
            if _count(room, thing.label) == 1:
                elsewhere = DIRECTIONS[(quarter + rng.integers(1, 4)) % 4]
                yield Question(here, f"Which direction should I go to reach the {thing.label}?", _TURN[quarter])
                yield Question(here, f"Can I find the {thing.label} {where}?", "yes")
                yield Question(here, f"Can I find the {thing.label} {elsewhere}?", "no")
                yield Question(
                    here, f"Do I have to turn left to face the {thing.label}?", "yes" if quarter == 1 else "no"
                )
    for label in labels:
        yield Question(here, f"How many {_plural(label)} are in this room?", _NUMBERS[_count(room, label)])
    single = [t for t in room.things if _count(room, t.label) == 1]
    for _ in range(6):
        a, b = (single[i] for i in rng.choice(len(single), 2, replace=False))
        if abs(distance(here, a) - distance(here, b)) > 0.4:
            closer = "yes" if distance(here, a) < distance(here, b) else "no"
            yield Question(here, f"Is the {a.label} closer to me than the {b.label}?", closer)


def _count(room: Room, label: str) -> int:
    return sum(t.label == label for t in room.things)


def _plural(label: str) -> str:
    return _PLURAL.get(label, label + "s")

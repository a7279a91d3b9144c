"""Questions in the manner of NuScenes-QA, with answers that follow from a key frame's annotations.

A key frame is a graph: the annotated objects with class and status, the ego car (`me`), and six relations between any
two, all seen in the direction that the ego car faces (NuScenes-QA paper, section 3). The wordings are ours, the
programs are those of the paper's templates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RELATIONS = ("front", "front left", "front right", "back left", "back right", "back")
CLASSES = {
    "vehicle.car": "car", "vehicle.truck": "truck", "vehicle.bus.bendy": "bus", "vehicle.bus.rigid": "bus",
    "vehicle.construction": "construction vehicle", "vehicle.trailer": "trailer", "vehicle.motorcycle": "motorcycle",
    "vehicle.bicycle": "bicycle", "human.pedestrian.adult": "pedestrian", "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian", "human.pedestrian.police_officer": "pedestrian",
    "movable_object.barrier": "barrier", "movable_object.trafficcone": "traffic cone",
}  # fmt: skip
STATUS = {
    "vehicle.moving": "moving", "vehicle.parked": "parked", "vehicle.stopped": "stopped",
    "pedestrian.moving": "moving", "pedestrian.standing": "standing", "pedestrian.sitting_lying_down": "not standing",
    "cycle.with_rider": "with rider", "cycle.without_rider": "without rider",
}  # fmt: skip
_STATUSES = {
    **dict.fromkeys(("car", "truck", "bus", "construction vehicle", "trailer"), ("moving", "parked", "stopped")),
    **dict.fromkeys(("motorcycle", "bicycle"), ("with rider", "without rider")),
    "pedestrian": ("moving", "standing", "not standing"),
    "barrier": (), "traffic cone": (),
    "thing": tuple(dict.fromkeys(STATUS.values())),
}  # fmt: skip
_FROM = {"front": -30, "front left": 30, "front right": -90, "back left": 90, "back right": -150}  # degrees
SHARES = {"exist": 4, "object": 3, "count": 3, "comparison": 2, "status": 2}  # questions of a key frame
_TRIES = 60  # per program
_MOST = 10  # larger counts are no answers


@dataclass(frozen=True)
class Node:
    """An object, or the ego car (`me`).

    Attributes:
        kind: class name with spaces.
        status: as in answers, `` for none.
        x, y: metres, ego frame (x forward, y left).
    """

    kind: str
    status: str
    x: float
    y: float


ME = Node("me", "", 0.0, 0.0)


def node(category: str, attribute: str, place: np.ndarray) -> Node | None:
    """Node of an annotation at (3,) metres in the ego frame; None for a category that has no class."""
    if category not in CLASSES:
        return None
    return Node(CLASSES[category], STATUS.get(attribute, ""), float(place[0]), float(place[1]))


def relation(of: Node, to: Node) -> str | None:
    """Where `of` is, seen from `to`, in the ego car's direction; None where both are in one place.

    Ranges are open at the lower and closed at the upper end, degrees counter-clockwise from ahead.
    """
    dx, dy = of.x - to.x, of.y - to.y
    if dx == 0 and dy == 0:
        return None
    angle = np.degrees(np.arctan2(dy, dx))
    return next((name for name, low in _FROM.items() if low < angle <= low + 60), "back")


@dataclass(frozen=True)
class Words:
    """A status (or ``) and a class (or `thing`): how objects are spoken of."""

    status: str
    kind: str

    def fits(self, one: Node) -> bool:
        """Whether a node is meant, among others perhaps."""
        return self.status in ("", one.status) and self.kind in ("thing", one.kind) and one is not ME

    def __str__(self) -> str:
        return f"{self.status} {self.kind}".strip()

    @property
    def many(self) -> str:
        """Plural."""
        return f"{self}es" if self.kind == "bus" else f"{self}s"


def ask(rng: np.random.Generator, nodes: Sequence[Node], before: Counter[str]) -> list[dict[str, Any]]:
    """Questions of one key frame.

    Args:
        rng: chooses.
        nodes: the objects of the key frame.
        before: how often hops and answers were chosen so far: rare ones are preferred; updated.

    Returns:
        question, answer (a text, or an int for counts), template_type, num_hop of each; as many as `SHARES` says
        where the graph has that many.
    """
    pool: dict[str, list[tuple[str, str | int, int]]] = {kind: [] for kind in SHARES}
    graph = _Graph(rng, nodes)
    for kind, hop, program in _PROGRAMS:
        for _ in range(_TRIES):
            made = program(graph)
            if made is not None and 5 <= len(made[0].split()) <= 35:
                pool[kind].append((*made, hop))
    chosen = []
    for kind, share in SHARES.items():
        left = list(dict.fromkeys(pool[kind]))
        for _ in range(min(share, len(left))):
            costs = [(before[f"{kind} {q[2]}"], before[f"{kind} {q[1]}"]) for q in left]
            text, answer, hop = left.pop(min(range(len(left)), key=lambda i: (costs[i], i)))
            before[f"{kind} {hop}"] += 1
            before[f"{kind} {answer}"] += 1
            chosen.append({"question": text, "answer": answer, "template_type": kind, "num_hop": hop})
            left = [q for q in left if q[0] != text]
    return chosen


class _Graph:
    """A key frame with dice: draws slots of templates, None where the graph has nothing that fits."""

    def __init__(self, rng: np.random.Generator, nodes: Sequence[Node]) -> None:
        self.rng, self.nodes = rng, list(nodes)
        known = [Words(status, kind) for kind, states in _STATUSES.items() for status in ("", *states)]
        self.words = [w for w in known if w != Words("", "thing")]
        self.single = [(w, found[0]) for w in self.words if len(found := self.all(w)) == 1]
        self._around: dict[Node, dict[str, list[Node]]] = {}

    def pick(self, some: Sequence[Any]) -> Any:
        return some[self.rng.integers(len(some))] if some else None

    def all(self, words: Words) -> list[Node]:
        return [one for one in self.nodes if words.fits(one)]

    def reference(self, *, me: bool = True) -> tuple[str, Node] | None:
        """Something that one can point to: the only object of some words, or `me`."""
        if me and self.rng.random() < 0.4:
            return "me", ME
        found = self.pick(self.single)
        return None if found is None else (f"the {found[0]}", found[1])

    def around(self, to: Node) -> dict[str, list[Node]]:
        """The other objects by their relation to one."""
        if to not in self._around:
            found = self._around[to] = {where: [] for where in RELATIONS}
            for one in self.nodes:
                if (where := relation(one, to)) is not None:
                    found[where].append(one)
        return self._around[to]

    def beside(self, words: Words, to: Node, where: str) -> list[Node]:
        return [one for one in self.around(to)[where] if words.fits(one)]

    def only_beside(self, kinds: Iterator[Words]) -> tuple[str, Node] | None:
        """The only object of some words in some relation to a reference: `the car to the front of me`."""
        reference = self.reference()
        if reference is None:
            return None
        choices = [
            (f"{words} to the {where} of {reference[0]}", found[0])
            for words in kinds
            for where in RELATIONS
            if len(found := self.beside(words, reference[1], where)) == 1
        ]
        return self.pick(choices)

    def alike(self, words: Words, one: Node) -> list[Node]:
        """Other objects of these words that have the same status."""
        return [other for other in self.all(words) if other is not one and other.status == one.status]

    def any_words(self, *, status: bool = True) -> Words:
        return self.pick([w for w in self.words if status or not w.status])


_Made = tuple[str, str | int] | None


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _plain() -> Iterator[Words]:
    yield from (Words("", kind) for kind in _STATUSES)


def _things() -> Iterator[Words]:
    yield from (Words(status, "thing") for status in ("", *_STATUSES["thing"]))


def _exist(graph: _Graph) -> _Made:
    words = graph.any_words()
    text = graph.pick([f"Are there any {words.many}?", f"Are any {words.many} visible?"])
    return text, _yes(bool(graph.all(words)))


def _exist_alike(graph: _Graph) -> _Made:
    one = graph.reference(me=False)
    return None if one is None else _other(graph, one)


def _exist_beside(graph: _Graph) -> _Made:
    words, one, where = graph.any_words(), graph.reference(), graph.pick(RELATIONS)
    if one is None:
        return None
    text = f"Are there any {words.many} to the {where} of {one[0]}?"
    if one[1] is not ME and graph.rng.random() < 0.5:
        text = f"There is {_a(one[0][4:])}; are there any {words.many} to the {where} of it?"
    return text, _yes(bool(graph.beside(words, one[1], where)))


def _exist_alike_beside(graph: _Graph) -> _Made:
    one = graph.only_beside(_plain())
    return None if one is None else _other(graph, (f"the {one[0]}", one[1]))


def _other(graph: _Graph, one: tuple[str, Node]) -> _Made:
    if not one[1].status:
        return None
    words = graph.any_words(status=False)
    text = graph.pick([
        f"Is there another {words} that has the same status as {one[0]}?",
        f"Are there any other {words.many} of the same status as {one[0]}?",
    ])  # fmt: skip
    return text, _yes(bool(graph.alike(words, one[1])))


def _count(graph: _Graph) -> _Made:
    words = graph.any_words()
    number = len(graph.all(words))
    text = graph.pick([f"How many {words.many} are there?", f"What number of {words.many} are there?"])
    return (text, number) if number <= _MOST else None


def _count_alike(graph: _Graph) -> _Made:
    one = graph.reference(me=False)
    if one is None or not one[1].status:
        return None
    number = len(graph.alike(Words("", "thing"), one[1]))
    text = graph.pick([
        f"How many other things are in the same status as {one[0]}?",
        f"What number of other things are of the same status as {one[0]}?",
    ])  # fmt: skip
    return (text, number) if number <= _MOST else None


def _count_beside(graph: _Graph) -> _Made:
    words, one, where = graph.any_words(), graph.reference(), graph.pick(RELATIONS)
    if one is None:
        return None
    number = len(graph.beside(words, one[1], where))
    start = graph.pick(["How many", "What number of"])
    text = f"{start} {words.many} are to the {where} of {one[0]}?"
    return (text, number) if number <= _MOST else None


def _count_alike_beside(graph: _Graph) -> _Made:
    one = graph.only_beside(_plain())
    if one is None or not one[1].status:
        return None
    words = graph.any_words(status=False)
    number = len(graph.alike(words, one[1]))
    text = f"How many other {words.many} have the same status as the {one[0]}?"
    return (text, number) if number <= _MOST else None


def _object(graph: _Graph) -> _Made:
    return _what(graph, graph.pick([(str(w), one) for w, one in graph.single if w.kind == "thing"]))


def _object_beside(graph: _Graph) -> _Made:
    return _what(graph, graph.only_beside(_things()))


def _object_both(graph: _Graph) -> _Made:
    first, second = graph.reference(), graph.reference()
    if first is None or second is None or first[1] is second[1]:
        return None
    choices = [
        (f"{words} that is both to the {a} of {first[0]} and the {b} of {second[0]}", found[0])
        for a, some in graph.around(first[1]).items()
        for b, others in graph.around(second[1]).items()
        for both in [[one for one in some if one in others]]
        for words in (_things() if both else ())
        if len(found := [one for one in both if words.fits(one)]) == 1
    ]
    return _what(graph, graph.pick(choices))


def _what(graph: _Graph, one: tuple[str, Node] | None) -> _Made:
    if one is None:
        return None
    text = graph.pick([f"What is the {one[0]}?", f"The {one[0]} is what?", f"There is {_a(one[0])}; what is it?"])
    return text, one[1].kind


def _status(graph: _Graph) -> _Made:
    return _how(graph, graph.pick([(str(w), one) for w, one in graph.single if not w.status]))


def _status_beside(graph: _Graph) -> _Made:
    return _how(graph, graph.only_beside(_plain()))


def _how(graph: _Graph, one: tuple[str, Node] | None) -> _Made:
    if one is None or not one[1].status:
        return None
    text = graph.pick([
        f"What is the status of the {one[0]}?", f"What status is the {one[0]}?", f"The {one[0]} is in what status?",
        f"There is {_a(one[0])}; what is its status?",
    ])  # fmt: skip
    return text, one[1].status


def _compare(graph: _Graph) -> _Made:
    return _same(graph, graph.reference(me=False), graph.reference(me=False))


def _compare_beside(graph: _Graph) -> _Made:
    beside = graph.only_beside(_plain())
    if beside is None:
        return None
    pair = [(f"the {beside[0]}", beside[1]), graph.reference(me=False)]
    return _same(graph, *(pair if graph.rng.random() < 0.5 else pair[::-1]))


def _compare_both_beside(graph: _Graph) -> _Made:
    one, other = graph.only_beside(_plain()), graph.only_beside(_plain())
    if one is None or other is None:
        return None
    return _same(graph, (f"the {one[0]}", one[1]), (f"the {other[0]}", other[1]))


def _same(graph: _Graph, one: tuple[str, Node] | None, other: tuple[str, Node] | None) -> _Made:
    if one is None or other is None or one[1] is other[1] or not one[1].status or not other[1].status:
        return None
    text = graph.pick([
        f"Is the status of {one[0]} the same as {other[0]}?",
        f"Do {one[0]} and {other[0]} have the same status?",
        f"Does {one[0]} have the same status as {other[0]}?",
    ])  # fmt: skip
    return text, _yes(one[1].status == other[1].status)


def _a(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


_PROGRAMS: tuple[tuple[str, int, Callable[[_Graph], _Made]], ...] = (
    ("exist", 0, _exist), ("exist", 0, _exist_alike), ("exist", 1, _exist_beside), ("exist", 1, _exist_alike_beside),
    ("count", 0, _count), ("count", 0, _count_alike), ("count", 1, _count_beside), ("count", 1, _count_alike_beside),
    ("object", 0, _object), ("object", 1, _object_beside), ("object", 1, _object_both),
    ("status", 0, _status), ("status", 1, _status_beside),
    ("comparison", 0, _compare), ("comparison", 1, _compare_beside), ("comparison", 1, _compare_both_beside),
)  # fmt: skip

"""Who is on the road, where, and how they move; nothing touches anything else at any time.

Frame as in streets.py. Traffic on one of the streets has green; there it moves, on the other one it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipelines.make_data.road_users import SHAPES, Size
from pipelines.make_data.solids import Solid
from pipelines.make_data.streets import BAY, LANES, STOP_LINE, ZEBRA

EGO_SIZE: Size = (4.08, 1.73, 1.44)
EGO_MIDDLE = 1.2  # metres from the rear axle, where the ego frame is, to the car's middle
_CLEAR = 0.15  # metres at least between two things
_STEP_S = 0.25  # how often that is looked at


@dataclass(frozen=True)
class Track:
    """A way at constant speed: straight, then an arc, then straight.

    Attributes:
        x, y, yaw: at time 0; metres, radians counter-clockwise from +x.
        speed: metres per second.
        ahead: metres to the arc.
        radius, angle: of the arc; metres, radians, counter-clockwise positive.
    """

    x: float
    y: float
    yaw: float
    speed: float = 0.0
    ahead: float = np.inf
    radius: float = 1.0
    angle: float = 0.0

    def at(self, time_s: float) -> tuple[float, float, float]:
        """x, y, yaw at a time; before 0 the first straight goes on backwards."""
        way = self.speed * time_s
        first = min(way, self.ahead)
        turned = min(max(way - self.ahead, 0.0) / self.radius, abs(self.angle))
        rest = way - first - turned * self.radius
        side = np.sign(self.angle)
        yaw = self.yaw + side * turned
        forward = first + self.radius * np.sin(turned)
        left = side * self.radius * (1 - np.cos(turned))
        c, s = np.cos(self.yaw), np.sin(self.yaw)
        x = self.x + c * forward - s * left + rest * np.cos(yaw)
        y = self.y + s * forward + c * left + rest * np.sin(yaw)
        return float(x), float(y), float(yaw)


@dataclass(frozen=True, eq=False)
class Thing:
    """Something annotated.

    Attributes:
        category, attribute: nuScenes' names; attribute `` for none.
        size: length, width, height, metres.
        track: of the middle of its underside.
        solids, trim: in its own frame (road_users.py); trim is for cameras alone.
    """

    category: str
    attribute: str
    size: Size
    track: Track
    solids: list[Solid]
    trim: list[Solid]

    def pose(self, time_s: float) -> np.ndarray:
        """(4, 4) own frame -> street."""
        x, y, yaw = self.track.at(time_s)
        return planar_pose(x, y, yaw)


@dataclass(frozen=True)
class Slot:
    """A place that a thing of some shape may take."""

    shape: str
    track: Track
    attribute: str


def planar_pose(x: float, y: float, yaw: float) -> np.ndarray:
    """(4, 4) of a turn about z, then a move."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, -s, 0, x], [s, c, 0, y], [0, 0, 1, 0], [0, 0, 0, 1.0]])


def ego_track(manoeuvre: str) -> Track:
    """Way of the ego car's rear axle: it comes along +x and `left`, `right` (turns), goes `straight`, or `wait`s."""
    inner, outer = -LANES[0], -LANES[1]
    return {
        "left": Track(-10.0, inner, 0.0, 6.0, 2.75, LANES[0] + 7.25, np.pi / 2),
        "straight": Track(-34.0, inner, 0.0, 9.0),
        "right": Track(-16.25, outer, 0.0, 5.5, 3.0, 8.0, -np.pi / 2),
        "wait": Track(-STOP_LINE - 4.2, inner, 0.0),
    }[manoeuvre]


def populate(rng: np.random.Generator, manoeuvre: str, duration_s: float) -> list[Thing]:
    """Fill a crossing for so many seconds.

    Every one of the ten classes that detectors know is tried for until it fits; so are some categories that they
    ignore. The order follows from the generator, not from the class.
    """
    times = np.arange(-_STEP_S, duration_s + 2 * _STEP_S, _STEP_S)
    ego = _rectangles(ego_track(manoeuvre), EGO_SIZE, times, EGO_MIDDLE)
    taken = ego[None]
    things: list[Thing] = []
    for wanted, slots in _wishes(rng, green_along_x=manoeuvre != "wait"):
        for slot in slots:
            if wanted == 0:
                break
            size = SHAPES[slot.shape].sample(rng)
            mine = _rectangles(slot.track, size, times)
            if overlap(mine[None], taken).any():
                continue
            solids, trim = SHAPES[slot.shape].build(rng, size, _ridden(slot.attribute))
            things.append(Thing(SHAPES[slot.shape].category, slot.attribute, size, slot.track, solids, trim))
            taken = np.concatenate([taken, mine[None]])
            wanted -= 1
    return [things[i] for i in rng.permutation(len(things))]


def _ridden(attribute: str) -> bool:
    return attribute in ("cycle.with_rider", "pedestrian.moving")


def _rectangles(track: Track, size: Size, times: np.ndarray, ahead: float = 0.0) -> np.ndarray:
    """(time, 5) x, y, length, width, yaw of the footprint, a little enlarged."""
    poses = np.array([track.at(t) for t in times])
    x = poses[:, 0] + ahead * np.cos(poses[:, 2])
    y = poses[:, 1] + ahead * np.sin(poses[:, 2])
    sides = np.broadcast_to(np.array(size[:2]) + _CLEAR, (len(times), 2))
    return np.column_stack([x, y, sides, poses[:, 2]])


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether rectangles (..., 5) x, y, length, width, yaw meet, by the separating axis theorem; they broadcast."""
    a, b = np.broadcast_arrays(a, b)
    apart = b[..., :2] - a[..., :2]
    axes = []
    for rectangle in (a, b):
        c, s = np.cos(rectangle[..., 4]), np.sin(rectangle[..., 4])
        axes += [np.stack([c, s], -1), np.stack([-s, c], -1)]
    meet = np.ones(apart.shape[:-1], bool)
    for axis in axes:
        reach = np.zeros(apart.shape[:-1])
        for rectangle, (u, v) in ((a, axes[:2]), (b, axes[2:])):
            reach += np.abs((axis * u).sum(-1)) * rectangle[..., 2] / 2
            reach += np.abs((axis * v).sum(-1)) * rectangle[..., 3] / 2
        meet &= np.abs((apart * axis).sum(-1)) <= reach
    return meet


def _along(along_x: bool, way: int, at: float, right: float, speed: float = 0.0, turn: float = 0.0) -> Track:
    """Along a street in direction `way` (+1 or -1), from `at` metres past the crossing, `right` of the middle."""
    x, y, yaw = way * at, -way * right, 0.0 if way > 0 else np.pi
    if not along_x:
        x, y, yaw = way * right, way * at, way * np.pi / 2
    return Track(float(x), float(y), float(yaw + turn), speed)


def _wishes(rng: np.random.Generator, green_along_x: bool) -> Iterator[tuple[int, list[Slot]]]:
    """How many of what, and places to try."""

    def way() -> int:
        return int(rng.choice([-1, 1]))

    def street() -> bool:
        return bool(rng.integers(2))

    def far(low: float, high: float) -> float:
        return float(rng.uniform(low, high) * rng.choice([-1, 1]))

    def driving(shape: str, lane: float | None = None) -> Slot:
        speed = float(rng.uniform(4, 11))
        right = LANES[rng.integers(2)] if lane is None else lane
        attribute = "cycle.with_rider" if "cycl" in shape else "vehicle.moving"
        return Slot(shape, _along(green_along_x, way(), float(rng.uniform(-55, 45)), right, speed), attribute)

    def waiting(shape: str, back: float) -> Slot:
        track = _along(not green_along_x, way(), -STOP_LINE - back, LANES[rng.integers(2)])
        return Slot(shape, track, "vehicle.stopped")

    def parked(shape: str, attribute: str = "vehicle.parked") -> Slot:
        return Slot(shape, _along(street(), way(), far(20, 48), BAY), attribute)

    def on_pavement(shape: str, attribute: str, speed: float = 0.0, right: float | None = None) -> Slot:
        right = float(rng.uniform(10.3, 12.3)) if right is None else right
        turn = 0.0 if speed else float(rng.uniform(-np.pi, np.pi))
        return Slot(shape, _along(street(), way(), far(10.5, 34), right, speed, turn), attribute)

    along_x, side, start = street(), way(), float(rng.uniform(18, 22))  # a building site in one bay
    site = [-start - 0.6 - 2.7 * i for i in range(5)]
    yield 1, [Slot("construction vehicle", _along(along_x, side, site[2], BAY + 0.5), "vehicle.stopped")]
    yield 5, [Slot("barrier", _along(along_x, side, at, 6.5, turn=np.pi / 2), "") for at in site]
    yield 4, [Slot("cone", _along(along_x, side, -start + 1.6, right), "") for right in (6.6, 7.4, 8.2, 9.0)]
    yield 1, [Slot("worker", _along(along_x, side, -start + 0.6, 7.9, turn=0.7), "pedestrian.standing")]
    yield 1, [driving("bus", LANES[1]) for _ in range(40)]
    yield 2, [waiting(shape, float(rng.uniform(3.6, 5))) for shape in ("truck", "car", "car", "car")]
    yield 1, [parked("trailer") for _ in range(20)]
    yield 1, [driving("truck", LANES[1]) for _ in range(40)]
    yield 6, [driving("car") for _ in range(60)]
    yield 1, [waiting("car", float(rng.uniform(11, 14))) for _ in range(6)]
    yield 1, [driving("motorcyclist") for _ in range(40)]
    yield 2, [driving("cyclist", 6.5) for _ in range(40)]
    yield 8, [parked("car") for _ in range(30)]
    yield 1, [parked("truck") for _ in range(20)]
    yield 1, [parked("police car") for _ in range(20)]
    yield 1, [parked("motorcycle", "cycle.without_rider") for _ in range(20)]
    yield 2, [on_pavement("bicycle", "cycle.without_rider", right=10.0) for _ in range(20)]
    for _ in range(3):  # over the zebra of the street that waits
        at, step = float(rng.uniform(*ZEBRA)) * rng.choice([-1, 1]), float(rng.uniform(1.0, 1.6))
        track = _along(green_along_x, way(), float(rng.uniform(-8, 4)), at, step)
        yield 1, [Slot("adult", track, "pedestrian.moving")]
    yield 6, [on_pavement("adult", "pedestrian.moving", float(rng.uniform(0.8, 1.7))) for _ in range(40)]
    yield 1, [on_pavement("child", "pedestrian.moving", 1.1) for _ in range(20)]
    yield 4, [on_pavement("adult", "pedestrian.standing") for _ in range(40)]
    yield 1, [on_pavement("seated", "pedestrian.sitting_lying_down", right=12.4) for _ in range(20)]
    yield 1, [on_pavement("stroller", "") for _ in range(20)]
    yield 1, [on_pavement("debris", "") for _ in range(20)]

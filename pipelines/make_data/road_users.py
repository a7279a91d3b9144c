"""Shapes of what is found on roads: cars, buses, cyclists, pedestrians, cones ... in nuScenes' categories.

Frame of a thing: x forward, y left, z up, the origin in the middle of its underside; metres. A shape fills its box to
the sides, less a few cm, so that a noisy LiDAR point still lies in the box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipelines.make_data.solids import Rgb, Solid, block, prism

Size = tuple[float, float, float]  # length, width, height
Parts = tuple[list[Solid], list[Solid]]  # what LiDAR and cameras meet, and what cameras alone see

_INSET = 0.02
_TYRE, _GLASS, _METAL, _SKIN = (28, 28, 30), (44, 58, 72), (96, 100, 106), (196, 150, 120)
_ORANGE, _WHITE, _YELLOW = (232, 96, 24), (236, 236, 236), (236, 178, 30)
_PAINTS: tuple[Rgb, ...] = (
    (186, 30, 36), (32, 72, 156), (228, 228, 232), (52, 54, 60), (152, 158, 166), (24, 112, 80), (214, 166, 44),
)  # fmt: skip
_CLOTHES: tuple[Rgb, ...] = ((170, 48, 60), (48, 86, 150), (74, 120, 62), (206, 190, 150), (90, 60, 120), (40, 44, 52))


@dataclass(frozen=True)
class Shape:
    """How big a category is and what it looks like.

    Attributes:
        category: nuScenes' name.
        size: usual length, width, height, metres.
        spread: relative standard deviation of the sizes.
        build: makes the parts of one of this size; `ridden` is whether somebody sits on it, or moves it.
    """

    category: str
    size: Size
    spread: float
    build: Callable[[np.random.Generator, Size, bool], Parts]

    def sample(self, rng: np.random.Generator) -> Size:
        """A size: three numbers in whole millimetres, as annotators' boxes have."""
        scale = 1 + np.clip(rng.normal(0, self.spread), -2 * self.spread, 2 * self.spread)
        length, width, height = (round(float(side * scale), 3) for side in self.size)
        return length, width, height


def _wheels(length: float, width: float, radius: float, at: tuple[float, ...]) -> list[Solid]:
    y = width / 2 - _INSET - 0.11  # a little outside of a truck's body, or the two would flicker
    return [
        prism((x * length, side * y, radius + 0.01), radius, 0.22, _TYRE, lying=True, caps=(58, 58, 62), echo=0.08)
        for x in at
        for side in (-1, 1)
    ]


def _lights(x_front: float, x_back: float, width: float, z: float) -> list[Solid]:
    lights = []
    for side in (-1, 1):
        y = side * (width / 2 - 0.3)
        lights.append(block((x_front - 0.02, y - 0.17, z), (x_front + 0.01, y + 0.17, z + 0.14), (255, 246, 206)))
        lights.append(block((x_back - 0.01, y - 0.17, z), (x_back + 0.02, y + 0.17, z + 0.14), (214, 18, 22)))
    return lights


def _car(rng: np.random.Generator, size: Size, ridden: bool, paint: Rgb | None = None) -> Parts:
    length, width, height = size
    x, y, waist = length / 2 - _INSET, width / 2 - _INSET, 0.56 * height
    paint = paint or _PAINTS[rng.integers(len(_PAINTS))]
    body = block((-x, -y, 0.22), (x, y, waist), paint, top=(-x + 0.08, x - 0.14, -y + 0.04, y - 0.04))
    cabin = block(
        (-x + 0.2, -y + 0.07, waist), (0.27 * length, y - 0.07, height - _INSET), paint, sides=_GLASS,
        top=(-0.36 * length, 0.1 * length, -y + 0.24, y - 0.24),
    )  # fmt: skip
    plate = block((-x - 0.005, -0.26, 0.4), (-x + 0.02, 0.26, 0.52), _WHITE)
    return [body, cabin, *_wheels(length, width, 0.33, (-0.31, 0.32))], [*_lights(x, -x, width, 0.6), plate]


def _police(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    solids, trim = _car(rng, (length, width, height - 0.14), ridden, paint=_WHITE)
    for side, color in ((-1, (30, 60, 220)), (1, (220, 30, 30))):
        low, high = sorted((0.02 * side, 0.55 * side))
        solids.append(block((-0.4, low, height - 0.16), (-0.1, high, height - _INSET), color))
    trim.append(block((-1.2, 0.01 - width / 2, 0.6), (1.2, width / 2 - 0.01, 0.78), (28, 48, 120)))
    return solids, trim


def _truck(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y, cab = length / 2 - _INSET, width / 2 - _INSET, min(2.0, 0.3 * length)
    paint, cargo = _PAINTS[rng.integers(len(_PAINTS))], (206, 208, 202)
    solids = [
        block((-x, 0.02 - y, 0.75), (x - cab - 0.25, y - 0.02, height - _INSET), cargo, echo=0.5),
        block((x - cab, -y + 0.08, 0.45), (x, y - 0.08, 0.6 * height), paint),
        block((x - cab, -y + 0.1, 0.6 * height), (x, y - 0.1, 0.88 * height), paint, sides=_GLASS,
              top=(x - cab, x - 0.35, -y + 0.16, y - 0.16)),
        block((-x + 0.1, -0.45, 0.5), (x - cab, 0.45, 0.75), _METAL),
        *_wheels(length, width, 0.48, (-0.32, 0.33)),
    ]  # fmt: skip
    stripe = block((-x + 0.5, -y - 0.01, 0.55 * height), (x - cab - 0.9, y + 0.01, 0.68 * height), paint)
    return solids, [stripe, *_lights(x, -x, width, 0.8)]


def _bus(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    paint = ((196, 40, 44), (36, 92, 170), (40, 128, 84))[rng.integers(3)]
    solids = [
        block((-x, 0.02 - y, 0.3), (x, y - 0.02, height - 0.22), paint, echo=0.4),
        block((-x + 0.6, -y + 0.2, height - 0.22), (x - 1.2, y - 0.2, height - _INSET), _WHITE),
        *_wheels(length, width, 0.48, (-0.3, 0.32)),
    ]
    trim = [block((x - 0.03, -y + 0.15, 1.15), (x + 0.01, y - 0.15, 2.6), _GLASS), *_lights(x, -x, width, 0.65)]
    trim += [
        block((left, -y - 0.01, 1.35), (left + 1.25, y + 0.01, 2.45), _GLASS)
        for left in np.arange(-x + 0.5, x - 1.6, 1.45)
    ]
    return solids, trim


def _trailer(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    paint = ((70, 110, 160), (190, 190, 184), (150, 70, 50))[rng.integers(3)]
    solids = [
        block((-x, -y, 1.05), (x, y, height - _INSET), paint, echo=0.5),
        block((-x + 0.3, -0.5, 0.7), (x - 0.3, 0.5, 1.05), _METAL),
        block((0.22 * length, -0.7, 0.02), (0.22 * length + 0.15, 0.7, 0.7), _METAL),
        *_wheels(length, width, 0.5, (-0.4, -0.28)),
    ]
    ribs = [
        block((left, -y - 0.01, 1.1), (left + 0.12, y + 0.01, height - 0.1), (120, 124, 128))
        for left in np.arange(0.3 - x, x - 0.2, 1.2)
    ]
    return solids, ribs


def _construction(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    back = -x + 0.62 * length
    solids = [
        block((-x, -y, 0.02), (back, -y + 0.6, 0.9), _TYRE, echo=0.1),
        block((-x, y - 0.6, 0.02), (back, y, 0.9), _TYRE, echo=0.1),
        block((-x + 0.1, -y + 0.25, 0.9), (back, y - 0.25, 1.9), _YELLOW),
        block((-0.05 * length, 0.1, 1.9), (back, y - 0.3, height - _INSET), _YELLOW, sides=_GLASS),
        block((back, -0.9, 1.5), (x - 0.5, -0.4, 2.1), _YELLOW, top=(back, x - 0.9, -0.9, -0.4)),
        block((x - 0.85, -1.0, 0.1), (x, -0.2, 1.5), _METAL, top=(x - 0.7, x - 0.4, -0.9, -0.3)),
    ]
    return solids, [block((-x + 0.09, -y + 0.4, 1.1), (-x + 0.12, y - 0.4, 1.3), (30, 30, 30))]


def _rider(z: float, height: float, rng: np.random.Generator) -> list[Solid]:
    shirt = _CLOTHES[rng.integers(len(_CLOTHES))]
    neck = height - 0.26
    return [
        block((-0.25, -0.2, z), (0.1, 0.2, neck), shirt, top=(-0.1, 0.14, -0.22, 0.22), echo=0.25),
        block((-0.05, -0.24, z - 0.3), (0.32, 0.24, z), (40, 44, 60), echo=0.2),
        block((0.1, -0.27, neck - 0.3), (0.5, 0.27, neck - 0.16), shirt, echo=0.2),
        prism((0.06, 0, height - _INSET - 0.12), 0.13, 0.24, (180, 40, 40), echo=0.2),
    ]


def _motorcycle(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, paint = length / 2 - _INSET, _PAINTS[rng.integers(len(_PAINTS))]
    bars = 0.98 if ridden else height - _INSET
    solids = [
        prism((-x + 0.32, 0, 0.32), 0.32, 0.16, _TYRE, lying=True, caps=_METAL, echo=0.1),
        prism((x - 0.32, 0, 0.32), 0.32, 0.14, _TYRE, lying=True, caps=_METAL, echo=0.1),
        block((-x + 0.2, -0.16, 0.4), (x - 0.45, 0.16, 0.82), paint, top=(-x + 0.1, x - 0.7, -0.13, 0.13)),
        block((x - 0.75, -width / 2 + _INSET, bars - 0.12), (x - 0.62, width / 2 - _INSET, bars), _METAL),
        block((x - 0.72, -0.06, 0.6), (x - 0.4, 0.06, bars), _METAL, top=(x - 0.8, x - 0.62, -0.06, 0.06)),
    ]
    return solids + (_rider(0.82, height, rng) if ridden else []), []


def _bicycle(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, paint = length / 2 - _INSET, _PAINTS[rng.integers(len(_PAINTS))]
    bars = 1.0 if ridden else height - _INSET
    solids = [
        prism((-x + 0.34, 0, 0.34), 0.34, 0.05, _TYRE, lying=True, sides=10, caps=(150, 150, 150), echo=0.1),
        prism((x - 0.34, 0, 0.34), 0.34, 0.05, _TYRE, lying=True, sides=10, caps=(150, 150, 150), echo=0.1),
        block((-x + 0.5, -0.04, 0.4), (x - 0.55, 0.04, 0.72), paint, top=(-x + 0.4, x - 0.4, -0.03, 0.03)),
        block((-x + 0.42, -0.1, 0.85), (-x + 0.72, 0.1, 0.95), (30, 30, 30)),
        block((x - 0.55, -width / 2 + _INSET, bars - 0.07), (x - 0.47, width / 2 - _INSET, bars), _METAL),
        block((x - 0.52, -0.04, 0.5), (x - 0.36, 0.04, bars), _METAL, top=(x - 0.56, x - 0.48, -0.04, 0.04)),
    ]
    return solids + (_rider(0.9, height, rng) if ridden else []), []


def _pedestrian(rng: np.random.Generator, size: Size, ridden: bool, jacket: Rgb | None = None) -> Parts:
    length, width, height = size
    x, y, step = length / 2 - _INSET, width / 2 - _INSET, ridden
    shirt, trousers = jacket or _CLOTHES[rng.integers(len(_CLOTHES))], _CLOTHES[rng.integers(len(_CLOTHES))]
    hip, neck = 0.48 * height, 0.84 * height
    reach = x if step else 0.18
    solids = [
        block((-reach, 0.03, 0.02), (-reach + 0.24, 0.19, hip), trousers, top=(-0.1, 0.12, 0.03, 0.19), echo=0.2),
        block((reach - 0.24, -0.19, 0.02), (reach, -0.03, hip), trousers, top=(-0.1, 0.12, -0.19, -0.03), echo=0.2),
        block((-0.15, -0.2, hip), (0.13, 0.2, neck), shirt, top=(-0.12, 0.12, -0.23, 0.23), echo=0.25),
        block((-0.07, y - 0.1, hip), (0.07, y, neck), shirt, top=(-0.07, 0.07, 0.22, 0.32), echo=0.25),
        block((-0.07, -y, hip), (0.07, -y + 0.1, neck), shirt, top=(-0.07, 0.07, -0.32, -0.22), echo=0.25),
        prism((0.02, 0, (neck + height - _INSET) / 2), 0.12, height - _INSET - neck, _SKIN, echo=0.2),
    ]
    return solids, []


def _worker(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    return _pedestrian(rng, size, ridden, jacket=(232, 232, 40))


def _seated(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    shirt, trousers = _CLOTHES[rng.integers(len(_CLOTHES))], _CLOTHES[rng.integers(len(_CLOTHES))]
    solids = [
        block((-x, -y, 0.02), (-x + 0.4, y, 0.42), (120, 90, 60)),
        block((-x + 0.1, -0.2, 0.42), (x, 0.2, 0.58), trousers, echo=0.2),
        block((x - 0.18, -0.2, 0.02), (x, 0.2, 0.42), trousers, echo=0.2),
        block((-x + 0.05, -0.24, 0.58), (-x + 0.33, 0.24, height - 0.28), shirt, echo=0.25),
        prism((-x + 0.2, 0, height - 0.15), 0.12, 0.26, _SKIN, echo=0.2),
    ]
    return solids, []


def _stroller(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    return [
        block((-x + 0.2, -y, 0.35), (x, y, 0.75), (60, 70, 110), top=(-x + 0.1, x - 0.1, -y, y)),
        block((-x, -y, height - 0.08), (-x + 0.12, y, height - _INSET), _METAL),
        *_wheels(length, width, 0.12, (-0.2, 0.25)),
    ], []


def _cone(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    solids = [
        block((-x, -y, 0.0), (x, y, 0.05), (40, 40, 42)),
        prism((0, 0, 0.015 + height / 2), 0.8 * x, height - 0.07, _ORANGE, top_radius=0.03, echo=0.6),
    ]
    share = [0.42, 0.62]  # of the height: where the white band begins and ends
    radii = [0.8 * x + (0.03 - 0.8 * x) * s + 0.008 for s in share]
    band = prism((0, 0, 0.05 + 0.52 * (height - 0.07)), radii[0], 0.2 * (height - 0.07), _WHITE, top_radius=radii[1])
    return solids, [band]


def _barrier(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    color, other = ((_ORANGE, _WHITE), (_WHITE, _ORANGE))[rng.integers(2)]
    solid = block((-x, -y, 0), (x, y, height - _INSET), color, top=(-0.3 * x, 0.3 * x, -y, y), echo=0.5)
    band = block((-0.7 * x - 0.01, -y / 3, 0.3 * height), (0.7 * x + 0.01, y / 3, 0.55 * height), other,
                 top=(-0.55 * x, 0.55 * x, -y / 3, y / 3))  # fmt: skip
    return [solid], [band]


def _debris(rng: np.random.Generator, size: Size, ridden: bool) -> Parts:
    length, width, height = size
    x, y = length / 2 - _INSET, width / 2 - _INSET
    return [block((-x, -y, 0), (x, y, height - _INSET), (120, 86, 52), top=(-0.5 * x, 0.6 * x, -0.6 * y, 0.4 * y))], []


SHAPES: dict[str, Shape] = {
    "car": Shape("vehicle.car", (4.6, 1.95, 1.7), 0.05, _car),
    "truck": Shape("vehicle.truck", (6.9, 2.5, 2.85), 0.06, _truck),
    "bus": Shape("vehicle.bus.rigid", (10.6, 2.75, 3.4), 0.03, _bus),
    "trailer": Shape("vehicle.trailer", (10.4, 2.5, 3.6), 0.04, _trailer),
    "construction vehicle": Shape("vehicle.construction", (6.3, 2.6, 3.1), 0.05, _construction),
    "police car": Shape("vehicle.emergency.police", (4.8, 1.95, 1.8), 0.03, _police),
    "motorcycle": Shape("vehicle.motorcycle", (2.1, 0.8, 1.2), 0.04, _motorcycle),
    "motorcyclist": Shape("vehicle.motorcycle", (2.1, 0.8, 1.65), 0.04, _motorcycle),
    "bicycle": Shape("vehicle.bicycle", (1.75, 0.6, 1.1), 0.04, _bicycle),
    "cyclist": Shape("vehicle.bicycle", (1.75, 0.62, 1.75), 0.04, _bicycle),
    "adult": Shape("human.pedestrian.adult", (0.74, 0.7, 1.76), 0.05, _pedestrian),
    "child": Shape("human.pedestrian.child", (0.66, 0.68, 1.3), 0.05, _pedestrian),
    "worker": Shape("human.pedestrian.construction_worker", (0.74, 0.72, 1.78), 0.04, _worker),
    "seated": Shape("human.pedestrian.adult", (0.95, 0.7, 1.25), 0.03, _seated),
    "stroller": Shape("human.pedestrian.stroller", (0.95, 0.6, 1.05), 0.04, _stroller),
    "cone": Shape("movable_object.trafficcone", (0.42, 0.42, 0.95), 0.08, _cone),
    "barrier": Shape("movable_object.barrier", (0.55, 2.4, 1.0), 0.04, _barrier),
    "debris": Shape("movable_object.debris", (0.9, 0.7, 0.5), 0.1, _debris),
}

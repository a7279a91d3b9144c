"""Furniture as boxes: each piece is designed with its back at +y, and turned when it is placed. Lengths are metres."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# label -> (nyu40 id, nyu40 class) as ScanNet's label table has it
NYU40 = {
    "wall": (1, "wall"), "floor": (2, "floor"), "cabinet": (3, "cabinet"), "bed": (4, "bed"), "chair": (5, "chair"),
    "armchair": (5, "chair"), "couch": (6, "sofa"), "table": (7, "table"), "coffee table": (7, "table"),
    "door": (8, "door"), "window": (9, "window"), "bookshelf": (10, "bookshelf"), "picture": (11, "picture"),
    "desk": (14, "desk"), "dresser": (17, "dresser"), "pillow": (18, "pillow"), "refrigerator": (24, "refridgerator"),
    "tv": (25, "television"), "whiteboard": (30, "whiteboard"), "nightstand": (32, "night stand"), "lamp": (35, "lamp"),
    "trash can": (39, "otherfurniture"), "monitor": (40, "otherprop"),
}  # fmt: skip

Color = tuple[int, int, int]
WOODS: tuple[Color, ...] = ((150, 103, 62), (112, 74, 46), (186, 148, 104))
FABRICS: tuple[Color, ...] = ((88, 104, 132), (140, 76, 70), (98, 122, 90), (150, 138, 120))


@dataclass(frozen=True)
class Box:
    """An axis-aligned box of a piece of furniture: centre, size, look."""

    center: tuple[float, float, float]
    size: tuple[float, float, float]
    color: Color
    look: str = "plain"  # plain, wood, fabric, books, doors, screen, picture, panes, board, planks


@dataclass(frozen=True)
class Thing:
    """A labelled object in its place.

    Attributes:
        label: raw category.
        boxes: its boxes in its own frame.
        x, y, z, yaw: where that frame is; yaw in quarter turns for what stands at a wall, any angle for chairs.
    """

    label: str
    boxes: tuple[Box, ...]
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    yaw: float = 0.0

    @property
    def rotation(self) -> np.ndarray:
        c, s = np.cos(self.yaw), np.sin(self.yaw)
        return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]])

    @property
    def bounds(self) -> np.ndarray:
        """(2, 3) low and high corner in the room frame."""
        corners = [
            np.array(b.center) + np.array(b.size) / 2 * (i, j, k)
            for b in self.boxes for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)
        ]  # fmt: skip
        moved = np.array(corners) @ self.rotation.T + (self.x, self.y, self.z)
        return np.stack([moved.min(axis=0), moved.max(axis=0)])


def _legs(width: float, depth: float, height: float, color: Color, thick: float = 0.05) -> tuple[Box, ...]:
    x, y = width / 2 - thick, depth / 2 - thick
    return tuple(
        Box((i * x, j * y, height / 2), (thick, thick, height), color, "wood") for i in (-1, 1) for j in (-1, 1)
    )


def chair(cloth: Color) -> Thing:
    seat = Box((0, 0, 0.45), (0.44, 0.44, 0.06), cloth, "fabric")
    back = Box((0, 0.2, 0.7), (0.42, 0.05, 0.44), cloth, "fabric")
    return Thing("chair", (seat, back, *_legs(0.44, 0.44, 0.42, (70, 60, 52), 0.04)))


def table(label: str, wood: Color, width: float, depth: float, height: float) -> Thing:
    top = Box((0, 0, height - 0.02), (width, depth, 0.04), wood, "planks")
    return Thing(label, (top, *_legs(width, depth, height - 0.04, wood, 0.06)))


def desk(wood: Color) -> Thing:
    sides = (Box((i * 0.6, 0, 0.35), (0.05, 0.6, 0.7), wood, "wood") for i in (-1, 1))
    return Thing(
        "desk",
        (
            Box((0, 0, 0.72), (1.3, 0.64, 0.04), wood, "planks"),
            *sides,
            Box((0, 0.28, 0.45), (1.15, 0.03, 0.4), wood, "wood"),
        ),
    )


def bed(wood: Color, cloth: Color) -> Thing:
    return Thing("bed", (
        Box((0, 0, 0.16), (1.55, 2.05, 0.28), wood, "wood"),
        Box((0, -0.02, 0.4), (1.5, 1.96, 0.2), (226, 222, 212), "fabric"),
        Box((0, -0.4, 0.51), (1.52, 1.2, 0.03), cloth, "fabric"),
        Box((0, 1.04, 0.5), (1.6, 0.06, 1.0), wood, "planks"),
    ))  # fmt: skip


def pillow() -> Thing:
    return Thing("pillow", (Box((0, 0, 0.06), (0.6, 0.38, 0.12), (236, 234, 228), "fabric"),))


def nightstand(wood: Color) -> Thing:
    return Thing("nightstand", (Box((0, 0, 0.26), (0.42, 0.4, 0.52), wood, "drawers"),))


def dresser(wood: Color) -> Thing:
    return Thing("dresser", (Box((0, 0, 0.5), (1.0, 0.48, 1.0), wood, "drawers"),))


def cabinet(wood: Color) -> Thing:
    return Thing("cabinet", (Box((0, 0, 0.65), (0.9, 0.45, 1.3), wood, "doors"),))


def tv_cabinet(wood: Color) -> Thing:
    return Thing("cabinet", (Box((0, 0, 0.25), (1.4, 0.42, 0.5), wood, "doors"),))


def tv() -> Thing:
    return Thing(
        "tv",
        (
            Box((0, 0, 0.03), (0.4, 0.2, 0.05), (30, 30, 32)),
            Box((0, 0, 0.38), (1.05, 0.06, 0.62), (24, 24, 27), "screen"),
        ),
    )


def monitor() -> Thing:
    return Thing(
        "monitor",
        (
            Box((0, 0, 0.07), (0.16, 0.14, 0.14), (40, 40, 44)),
            Box((0, 0, 0.32), (0.52, 0.05, 0.34), (28, 28, 32), "screen"),
        ),
    )


def bookshelf(wood: Color) -> Thing:
    frame = [Box((i * 0.44, 0, 0.95), (0.03, 0.3, 1.9), wood, "wood") for i in (-1, 1)]
    frame += [Box((0, 0.14, 0.95), (0.86, 0.02, 1.9), wood, "wood")]
    for z in (0.02, 0.42, 0.82, 1.22, 1.62, 1.88):
        frame.append(Box((0, 0, z), (0.86, 0.3, 0.03), wood, "wood"))
    books = [Box((x, 0.02, z + 0.155), (w, 0.22, 0.28), (120, 60, 50), "books") for z, x, w in (
        (0.02, -0.05, 0.72), (0.42, 0.04, 0.76), (0.82, -0.12, 0.58), (1.22, 0.06, 0.7))]  # fmt: skip
    return Thing("bookshelf", (*frame, *books))


def _seat(label: str, width: float, cloth: Color) -> Thing:
    arms = (Box((i * (width / 2 - 0.09), 0, 0.3), (0.18, 0.84, 0.6), cloth, "fabric") for i in (-1, 1))
    light: Color = (min(cloth[0] + 18, 255), min(cloth[1] + 18, 255), min(cloth[2] + 18, 255))
    return Thing(label, (
        Box((0, 0, 0.2), (width - 0.36, 0.84, 0.36), cloth, "fabric"),
        Box((0, -0.08, 0.43), (width - 0.38, 0.62, 0.1), light, "fabric"),
        Box((0, 0.32, 0.6), (width - 0.36, 0.2, 0.5), cloth, "fabric"), *arms,
    ))  # fmt: skip


def couch(cloth: Color) -> Thing:
    return _seat("couch", 2.0, cloth)


def armchair(cloth: Color) -> Thing:
    return _seat("armchair", 0.95, cloth)


def lamp() -> Thing:
    return Thing("lamp", (
        Box((0, 0, 0.02), (0.28, 0.28, 0.04), (60, 58, 55)), Box((0, 0, 0.7), (0.04, 0.04, 1.35), (80, 76, 70)),
        Box((0, 0, 1.5), (0.34, 0.34, 0.3), (240, 224, 180), "fabric"),
    ))  # fmt: skip


def trash_can() -> Thing:
    blue = (62, 92, 128)
    walls = [Box((i * 0.14, 0, 0.2), (0.02, 0.3, 0.4), blue) for i in (-1, 1)]
    walls += [Box((0, i * 0.14, 0.2), (0.26, 0.02, 0.4), blue) for i in (-1, 1)]
    return Thing("trash can", (*walls, Box((0, 0, 0.02), (0.26, 0.26, 0.02), (40, 50, 62))))


def refrigerator() -> Thing:
    return Thing("refrigerator", (Box((0, 0, 0.88), (0.7, 0.68, 1.76), (214, 216, 220), "doors"),))


def door(wood: Color) -> Thing:
    return Thing(
        "door",
        (Box((0, 0, 1.02), (0.9, 0.05, 2.04), (wood[0] // 2 + 100, wood[1] // 2 + 96, wood[2] // 2 + 90), "panels"),),
    )


def window() -> Thing:
    return Thing("window", (Box((0, 0, 1.5), (1.3, 0.04, 1.05), (176, 206, 232), "panes"),))


def picture() -> Thing:
    return Thing("picture", (Box((0, 0, 1.6), (0.7, 0.03, 0.5), (90, 70, 50), "picture"),))


def whiteboard() -> Thing:
    return Thing("whiteboard", (Box((0, 0, 1.45), (1.6, 0.03, 0.95), (240, 242, 244), "board"),))

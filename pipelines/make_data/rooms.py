"""Furnished rooms as textured rectangles: what both the mesh and the pictures are made of.

Everything is a box, and a box is six rectangles. Lengths are metres; the room frame has z up, the floor at z = 0 and
the origin at the middle of the floor. Furniture is designed with its back at +y and turned when it is placed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np

TEXEL = 0.02  # metres per texture pixel
WALL_HEIGHT = 2.5
_LIGHT = np.array([0.35, -0.5, 0.79])
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
class Patch:
    """A textured rectangle, seen from the side of its normal.

    Attributes:
        origin, u, v: (3,) corner and the two edges from it, room frame; the normal is u x v.
        texture: (rows along v, columns along u, 3) uint8 RGB, shaded.
        part: number of the piece (mesh segment) that it belongs to.
    """

    origin: np.ndarray
    u: np.ndarray
    v: np.ndarray
    texture: np.ndarray
    part: int


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


@dataclass(frozen=True)
class Room:
    """A furnished room.

    Attributes:
        width, depth: extent along x and y.
        things: the objects; walls and floor are not among them.
        patches: all rectangles; `part_owner[patch.part]` is the index of the thing it belongs to, -1 the floor, -2 to
            -5 the walls, -9 what nobody annotated.
    """

    width: float
    depth: float
    things: tuple[Thing, ...]
    patches: tuple[Patch, ...]
    part_owner: tuple[int, ...]


def make_room(rng: np.random.Generator, kind: int) -> Room:
    """Furnish a bedroom (kind 0), a living room (1) or an office (2); the same generator state gives the same room."""
    width, depth = rng.uniform(4.6, 6.0), rng.uniform(4.2, 5.2)
    things = _furnish(rng, kind % 3, width, depth)
    patches: list[Patch] = []
    owners: list[int] = []
    _add_shell(rng, width, depth, things, patches, owners)
    for index, thing in enumerate(things):
        for box in thing.boxes:
            _add_box(rng, thing, box, len(owners), patches)
            owners.append(index)
    return Room(width, depth, tuple(things), tuple(patches), tuple(owners))


def _furnish(rng: np.random.Generator, kind: int, width: float, depth: float) -> list[Thing]:
    wood = WOODS[rng.integers(len(WOODS))]
    cloth = FABRICS[rng.integers(len(FABRICS))]
    at_wall: list[Thing] = [_door(wood)]
    if kind == 0:
        at_wall += [
            _bed(wood, cloth),
            _window(),
            _desk(wood),
            _dresser(wood),
            _bookshelf(wood),
            _picture(),
            _lamp(),
            _trash_can(),
        ]
        middle: list[Thing] = []
    elif kind == 1:
        at_wall += [
            _couch(cloth),
            _window(),
            _tv_cabinet(wood),
            _bookshelf(wood),
            _armchair(cloth),
            _picture(),
            _cabinet(wood),
            _lamp(),
        ]
        middle = [_table("coffee table", wood, 1.1, 0.65, 0.42)]
    else:
        at_wall += [
            _whiteboard(),
            _window(),
            _desk(wood),
            _cabinet(wood),
            _refrigerator(),
            _desk(wood),
            _trash_can(),
            _picture(),
        ]
        middle = [_table("table", wood, 1.5, 0.9, 0.74)]
    placed: list[Thing] = []
    for thing in middle:
        placed.append(
            replace(thing, x=rng.uniform(-0.4, 0.4), y=rng.uniform(-0.3, 0.3), yaw=np.pi / 2 * rng.integers(2))
        )
        if thing.label == "table":
            placed += _chairs_around(rng, placed[-1], cloth)
    for thing in at_wall:
        placed += _at_wall(rng, thing, placed, width, depth, wood, cloth)
    return placed


def _at_wall(
    rng: np.random.Generator, thing: Thing, placed: list[Thing], width: float, depth: float, wood: Color, cloth: Color
) -> list[Thing]:
    """The thing with its back at a wall, and what belongs with it, where nothing is in their way; nothing where no
    such place was found."""
    back = thing.bounds[1, 1]
    half = (thing.bounds[1, 0] - thing.bounds[0, 0]) / 2
    for _ in range(200):
        wall = rng.integers(4)
        long, short = (width, depth) if wall % 2 == 0 else (depth, width)
        along = rng.uniform(half - long / 2 + 0.06, long / 2 - half - 0.06)
        yaw = wall * np.pi / 2  # wall 0 is at +y
        c, s = np.cos(yaw), np.sin(yaw)
        out = short / 2 - back - 0.02
        there = replace(thing, x=c * along - s * out, y=s * along + c * out, yaw=yaw)
        if not any(_in_the_way(there, other) for other in placed):
            companions = _companions(rng, there, wood, cloth)
            inside = all((abs(c.bounds[:, :2]) < (width / 2, depth / 2)).all() for c in companions)
            if inside and not any(_in_the_way(c, other) for c in companions for other in placed):
                return [there, *companions]
    return []


def _in_the_way(a: Thing, b: Thing) -> bool:
    margin = np.array([0.06, 0.06, 0.0])
    if "door" in (a.label, b.label):
        margin = np.array([0.55, 0.55, 0.0])
    elif {a.label, b.label} & {"desk", "bed"}:
        margin = np.array([0.25, 0.25, 0.0])
    (low_a, high_a), (low_b, high_b) = a.bounds, b.bounds
    return bool((low_a - margin < high_b).all() and (low_b - margin < high_a).all())


def _companions(rng: np.random.Generator, host: Thing, wood: Color, cloth: Color) -> list[Thing]:
    """What belongs with a piece of furniture, in its place."""

    def beside(thing: Thing, x: float, y: float, z: float, turn: float = 0.0) -> Thing:
        moved = host.rotation @ (x, y, z) + (host.x, host.y, host.z)
        return replace(thing, x=moved[0], y=moved[1], z=moved[2], yaw=host.yaw + turn)

    if host.label == "bed":
        found = [beside(_pillow(), x, 0.7, 0.52) for x in (-0.38, 0.38)]
        return [*found, beside(_nightstand(wood), 1.03, 0.79, 0)]
    if host.label == "desk":
        chair = beside(_chair(cloth), rng.uniform(-0.15, 0.15), -0.62, 0, np.pi + rng.uniform(-0.3, 0.3))
        return [beside(_monitor(), 0, 0.12, 0.74), chair]
    if host.label == "cabinet" and host.boxes[0].look == "doors" and host.bounds[1, 2] < 0.6:
        return [beside(_tv(), 0, 0.05, 0.5)]
    return []


def _chairs_around(rng: np.random.Generator, table: Thing, cloth: Color) -> list[Thing]:
    chairs = []
    for x, y, turn in ((-0.38, -0.66, np.pi), (0.38, -0.66, np.pi), (-0.38, 0.66, 0), (0.38, 0.66, 0))[
        : rng.integers(2, 5)
    ]:
        moved = table.rotation @ (x, y, 0.0)
        yaw = table.yaw + turn + rng.uniform(-0.25, 0.25)
        chairs.append(replace(_chair(cloth), x=table.x + moved[0], y=table.y + moved[1], yaw=yaw))
    return chairs


# ------------------------------------------------------------------------------------------------ furniture


def _legs(width: float, depth: float, height: float, color: Color, thick: float = 0.05) -> tuple[Box, ...]:
    x, y = width / 2 - thick, depth / 2 - thick
    return tuple(
        Box((i * x, j * y, height / 2), (thick, thick, height), color, "wood") for i in (-1, 1) for j in (-1, 1)
    )


def _chair(cloth: Color) -> Thing:
    seat = Box((0, 0, 0.45), (0.44, 0.44, 0.06), cloth, "fabric")
    back = Box((0, 0.2, 0.7), (0.42, 0.05, 0.44), cloth, "fabric")
    return Thing("chair", (seat, back, *_legs(0.44, 0.44, 0.42, (70, 60, 52), 0.04)))


def _table(label: str, wood: Color, width: float, depth: float, height: float) -> Thing:
    top = Box((0, 0, height - 0.02), (width, depth, 0.04), wood, "planks")
    return Thing(label, (top, *_legs(width, depth, height - 0.04, wood, 0.06)))


def _desk(wood: Color) -> Thing:
    sides = (Box((i * 0.6, 0, 0.35), (0.05, 0.6, 0.7), wood, "wood") for i in (-1, 1))
    return Thing(
        "desk",
        (
            Box((0, 0, 0.72), (1.3, 0.64, 0.04), wood, "planks"),
            *sides,
            Box((0, 0.28, 0.45), (1.15, 0.03, 0.4), wood, "wood"),
        ),
    )


def _bed(wood: Color, cloth: Color) -> Thing:
    return Thing("bed", (
        Box((0, 0, 0.16), (1.55, 2.05, 0.28), wood, "wood"),
        Box((0, -0.02, 0.4), (1.5, 1.96, 0.2), (226, 222, 212), "fabric"),
        Box((0, -0.4, 0.51), (1.52, 1.2, 0.03), cloth, "fabric"),
        Box((0, 1.04, 0.5), (1.6, 0.06, 1.0), wood, "planks"),
    ))  # fmt: skip


def _pillow() -> Thing:
    return Thing("pillow", (Box((0, 0, 0.06), (0.6, 0.38, 0.12), (236, 234, 228), "fabric"),))


def _nightstand(wood: Color) -> Thing:
    return Thing("nightstand", (Box((0, 0, 0.26), (0.42, 0.4, 0.52), wood, "drawers"),))


def _dresser(wood: Color) -> Thing:
    return Thing("dresser", (Box((0, 0, 0.5), (1.0, 0.48, 1.0), wood, "drawers"),))


def _cabinet(wood: Color) -> Thing:
    return Thing("cabinet", (Box((0, 0, 0.65), (0.9, 0.45, 1.3), wood, "doors"),))


def _tv_cabinet(wood: Color) -> Thing:
    return Thing("cabinet", (Box((0, 0, 0.25), (1.4, 0.42, 0.5), wood, "doors"),))


def _tv() -> Thing:
    return Thing(
        "tv",
        (
            Box((0, 0, 0.03), (0.4, 0.2, 0.05), (30, 30, 32)),
            Box((0, 0, 0.38), (1.05, 0.06, 0.62), (24, 24, 27), "screen"),
        ),
    )


def _monitor() -> Thing:
    return Thing(
        "monitor",
        (
            Box((0, 0, 0.07), (0.16, 0.14, 0.14), (40, 40, 44)),
            Box((0, 0, 0.32), (0.52, 0.05, 0.34), (28, 28, 32), "screen"),
        ),
    )


def _bookshelf(wood: Color) -> Thing:
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


def _couch(cloth: Color) -> Thing:
    return _seat("couch", 2.0, cloth)


def _armchair(cloth: Color) -> Thing:
    return _seat("armchair", 0.95, cloth)


def _lamp() -> Thing:
    return Thing("lamp", (
        Box((0, 0, 0.02), (0.28, 0.28, 0.04), (60, 58, 55)), Box((0, 0, 0.7), (0.04, 0.04, 1.35), (80, 76, 70)),
        Box((0, 0, 1.5), (0.34, 0.34, 0.3), (240, 224, 180), "fabric"),
    ))  # fmt: skip


def _trash_can() -> Thing:
    blue = (62, 92, 128)
    walls = [Box((i * 0.14, 0, 0.2), (0.02, 0.3, 0.4), blue) for i in (-1, 1)]
    walls += [Box((0, i * 0.14, 0.2), (0.26, 0.02, 0.4), blue) for i in (-1, 1)]
    return Thing("trash can", (*walls, Box((0, 0, 0.02), (0.26, 0.26, 0.02), (40, 50, 62))))


def _refrigerator() -> Thing:
    return Thing("refrigerator", (Box((0, 0, 0.88), (0.7, 0.68, 1.76), (214, 216, 220), "doors"),))


def _door(wood: Color) -> Thing:
    return Thing(
        "door",
        (Box((0, 0, 1.02), (0.9, 0.05, 2.04), (wood[0] // 2 + 100, wood[1] // 2 + 96, wood[2] // 2 + 90), "panels"),),
    )


def _window() -> Thing:
    return Thing("window", (Box((0, 0, 1.5), (1.3, 0.04, 1.05), (176, 206, 232), "panes"),))


def _picture() -> Thing:
    return Thing("picture", (Box((0, 0, 1.6), (0.7, 0.03, 0.5), (90, 70, 50), "picture"),))


def _whiteboard() -> Thing:
    return Thing("whiteboard", (Box((0, 0, 1.45), (1.6, 0.03, 0.95), (240, 242, 244), "board"),))


# ------------------------------------------------------------------------------------------------ surfaces


def _add_shell(
    rng: np.random.Generator, width: float, depth: float, things: list[Thing], patches: list[Patch], owners: list[int]
) -> None:
    """Floor, four walls, and skirting boards that nobody annotated."""
    floor = _texture(rng, (172, 140, 104) if rng.random() < 0.6 else (150, 148, 142), depth, width, "planks", 1.0)
    shade = np.ones(floor.shape[:2], np.float32)
    for thing in things:  # a soft shadow where something stands
        low, high = thing.bounds
        if low[2] < 0.1:
            c0, c1 = ((np.array([low[0], high[0]]) + width / 2) / TEXEL).astype(int)
            r0, r1 = ((np.array([low[1], high[1]]) + depth / 2) / TEXEL).astype(int)
            shade[max(r0, 0) : r1, max(c0, 0) : c1] = 0.6
    floor = (floor * cv2.GaussianBlur(shade, (0, 0), 8)[..., None]).astype(np.uint8)
    x, y = width / 2, depth / 2
    patches.append(Patch(np.array([-x, -y, 0]), np.array([width, 0, 0]), np.array([0, depth, 0]), floor, len(owners)))
    owners.append(-1)
    paint: Color = tuple(int(c) for c in rng.integers(198, 232, 3))  # type: ignore[assignment]
    up = np.array([0, 0, WALL_HEIGHT])
    sides = (
        ((-x, y), (width, 0)),
        ((-x, -y), (0, depth)),
        ((x, -y), (-width, 0)),
        ((x, y), (0, -depth)),
    )  # walls 0 to 3
    for number, (start, edge) in enumerate(sides):
        origin, u = np.array([*start, 0.0]), np.array([*edge, 0.0])
        normal = np.cross(u, up)
        texture = _texture(rng, paint, WALL_HEIGHT, float(np.linalg.norm(u)), "plain", _brightness(normal))
        fade = np.clip(np.linspace(0.82, 1.08, len(texture)), 0, 1)[:, None, None]
        patches.append(Patch(origin, u, up, (texture * fade).astype(np.uint8), len(owners)))
        owners.append(-2 - number)
    for start, edge in sides:
        origin, u = np.array([*start, 0.0]), np.array([*edge, 0.0])
        inward = np.cross(u, up) / np.linalg.norm(np.cross(u, up)) * 0.012
        texture = _texture(rng, (236, 234, 228), 0.08, float(np.linalg.norm(u)), "plain", _brightness(inward))
        patches.append(Patch(origin + inward, u, np.array([0, 0, 0.08]), texture, len(owners)))
        owners.append(-9)


def _add_box(rng: np.random.Generator, thing: Thing, box: Box, part: int, patches: list[Patch]) -> None:
    """The faces of a box; the one on the floor is left out, as no scanner sees it."""
    half = np.array(box.size) / 2
    for axis in range(3):
        for sign in (-1, 1):
            if axis == 2 and sign < 0 and box.center[2] - half[2] + thing.z < 0.01:
                continue
            # on the sides u is horizontal and v up, so that pictures stand upright
            along, rise = ((1, 2), (0, 2), (0, 1))[axis]
            u, v, origin = np.zeros(3), np.zeros(3), np.array(box.center)
            flip = sign * (-1 if axis == 1 else 1)
            u[along], v[rise] = flip * box.size[along], box.size[rise]
            origin[axis] += sign * half[axis]
            origin -= (u + v) / 2
            normal = thing.rotation @ np.cross(u, v)
            front = axis == 1 and sign < 0
            look = box.look if front or box.look in ("wood", "planks", "fabric", "books") else "plain"
            texture = _texture(rng, box.color, box.size[rise], box.size[along], look, _brightness(normal))
            place = thing.rotation @ origin + (thing.x, thing.y, thing.z)
            patches.append(Patch(place, thing.rotation @ u, thing.rotation @ v, texture, part))


def _brightness(normal: np.ndarray) -> float:
    return 0.66 + 0.34 * max(0.0, float(normal @ _LIGHT / np.linalg.norm(normal) / np.linalg.norm(_LIGHT)))


def _texture(
    rng: np.random.Generator, color: Color, height: float, width: float, look: str, light: float
) -> np.ndarray:
    """(rows, columns, 3) uint8; row 0 is at the bottom."""
    rows, columns = max(2, round(height / TEXEL)), max(2, round(width / TEXEL))
    image = np.empty((rows, columns, 3), np.float32)
    image[:] = color
    grain = rng.normal(0, 1, (rows, columns)).astype(np.float32)
    y, x = np.mgrid[0:rows, 0:columns]
    match look:
        case "wood":
            image *= 1 + 0.07 * cv2.GaussianBlur(grain, (0, 0), sigmaX=8, sigmaY=0.6)[..., None] * 2
        case "planks":
            plank = (y // 6).astype(int)
            tone = rng.normal(0, 0.06, plank.max() + 1)[plank]
            image *= (1 + tone + 0.05 * cv2.GaussianBlur(grain, (0, 0), sigmaX=9, sigmaY=0.5))[..., None]
            image[(y % 6 == 0)] *= 0.82
        case "fabric":
            image *= (1 + 0.05 * grain + 0.03 * ((x + y) % 2))[..., None]
        case "books":
            edges = np.cumsum(rng.integers(1, 4, columns))
            spine = np.searchsorted(edges, np.arange(columns), side="right")
            image[:] = rng.integers(40, 220, (spine.max() + 1, 3))[spine]
            image[-max(1, rows // 8) :, rng.random(columns) < 0.4] *= 0.35
        case "doors":
            image[:, columns // 2] *= 0.45
            image[rows // 3 : 2 * rows // 3, [max(columns // 2 - 3, 0), min(columns // 2 + 3, columns - 1)]] = (
                60,
                60,
                64,
            )
        case "drawers":
            for k in (1, 2):
                image[k * rows // 3] *= 0.45
            for k in (1, 3, 5):
                image[k * rows // 6, columns // 2 - 2 : columns // 2 + 3] = (60, 60, 64)
        case "panels":
            for r0, r1 in ((0.08, 0.45), (0.55, 0.92)):
                a, b, c, d = int(r0 * rows), int(r1 * rows), int(0.16 * columns), int(0.84 * columns)
                image[a:b, c:d] *= 0.88
                image[a + 2 : b - 2, c + 2 : d - 2] *= 1.1
            image[rows // 2 - 1 : rows // 2 + 2, -6:-3] = (196, 178, 110)
        case "screen":
            image[2:-2, 2:-2] = (44, 58, 84)
            image[2:-2, 2:-2] += (x + y)[2:-2, 2:-2, None] * 0.4
        case "picture":
            image[3:-3, 3:-3] = (206, 220, 226)
            hills = rows * (0.35 + 0.15 * np.sin(np.arange(columns) * rng.uniform(0.15, 0.3)))
            image[3:-3, 3:-3][(y < hills)[3:-3, 3:-3]] = rng.integers(40, 170, 3)
        case "panes":
            image += (y[..., None] / rows - 0.5) * 36
            image[[0, 1, rows // 2, -2, -1]] = (244, 244, 240)
            image[:, [0, 1, columns // 2, -2, -1]] = (244, 244, 240)
        case "board":
            image[[0, -1]] = image[:, [0, -1]] = (120, 124, 128)
            for _ in range(6):
                r, c = rng.integers(6, rows - 6), rng.integers(4, max(5, columns // 2))
                image[r, c : c + rng.integers(8, columns // 2)] = ((40, 70, 150), (160, 50, 50), (40, 110, 60))[
                    rng.integers(3)
                ]
    image *= light * (1 + 0.012 * grain[..., None])
    return np.clip(image, 0, 255).astype(np.uint8)

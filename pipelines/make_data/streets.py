"""A crossing of two streets with its buildings, trees and paint: what stands still and is not annotated.

Frame: x and y along the two streets, z up, the origin in the middle of the crossing; metres. Traffic keeps to the
right. The ground is the plane z = 0; what is painted on it lies some millimetres above, in pictures alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipelines.make_data.solids import Mesh, Rgb, Solid, block, prism

LANES = (1.75, 5.25)  # metres from the middle of the street to the middle of each lane
ROAD = 9.4  # half the street's width, with a bay for parked cars
BAY = 8.25  # middle of that bay
PAVEMENT = 13.0  # where the pavement ends
STOP_LINE = 14.6  # from the middle of the crossing
ZEBRA = (10.4, 13.2)
LENGTH = 110.0  # that far from the crossing the streets are on the map

_GROUND, ASPHALT, _SLABS, _PAINT, _KERB = (
    (112, 126, 92), (84, 86, 90), (156, 152, 144), (226, 226, 220), (186, 184, 178),
)  # fmt: skip
_WALLS: tuple[Rgb, ...] = ((168, 128, 104), (196, 186, 166), (140, 146, 152), (176, 154, 120), (128, 108, 100))
_CELL = 0.1  # metres
_FAR = 260.0  # metres, where the ground ends in pictures
_SKY_RADIUS = 600.0


@dataclass(frozen=True, eq=False)
class Street:
    """What is the same at all times.

    Attributes:
        buildings, furniture: solids; furniture are trees, lamps and traffic lights, which throw shadows in pictures.
        mesh: all of it for a camera, with ground, paint and sky.
        painted: (cell, cell) bool, x first: where the ground is bright, in cells of `_CELL` from -`LENGTH` on.
    """

    buildings: tuple[Solid, ...]
    furniture: tuple[Solid, ...]
    mesh: Mesh
    painted: np.ndarray

    def echo(self, xy: np.ndarray) -> np.ndarray:
        """(point,) share of light that the ground at (point, 2) gives back."""
        at = np.clip(((xy + LENGTH) / _CELL).astype(np.int64), 0, len(self.painted) - 1)
        painted = self.painted[at[:, 0], at[:, 1]]
        asphalt = (np.abs(xy) < ROAD).any(axis=1)
        return np.where(painted, 0.55, np.where(asphalt, 0.1, 0.2))


def drivable() -> list[np.ndarray]:
    """Rectangles (4, 2) that cars may use: the mask of nuScenes' maps."""
    corners = np.array([[-LENGTH, -ROAD], [LENGTH, -ROAD], [LENGTH, ROAD], [-LENGTH, ROAD]])
    return [corners, corners[:, ::-1]]


def make_street(rng: np.random.Generator) -> Street:
    """Build the crossing's surroundings."""
    buildings: list[Solid] = []
    furniture: list[Solid] = []
    windows: list[Mesh] = []
    for sx in (-1, 1):
        for sy in (-1, 1):
            for first, along_x in ((15.5, True), (33.5, False)):
                at = first
                while at < 95:
                    front, depth = rng.uniform(11, 19), rng.uniform(9, 15)
                    height, back = rng.choice([2, 3, 3, 4, 6]) * 3.3 + 0.8, rng.uniform(15.5, 17.5)
                    low, high = np.array([at, back, 0]), np.array([at + front, back + depth, height])
                    if not along_x:
                        low, high = low[[1, 0, 2]], high[[1, 0, 2]]
                    ends = np.sort(np.stack([low, high]) * (sx, sy, 1), axis=0)
                    buildings.append(block(ends[0], ends[1], _WALLS[rng.integers(len(_WALLS))], echo=0.4))
                    windows.append(_windows(rng, ends[0], ends[1]))
                    at += front + rng.choice([0.0, 0.0, 4.0])
            for along_x in (True, False):
                for at in np.arange(rng.uniform(18, 21), 90, 12.0):
                    place = np.array([at, 13.4]) if along_x else np.array([13.4, at])
                    furniture += _tree(rng, place * (sx, sy)) if rng.random() < 0.7 else _lamp(place * (sx, sy))
            furniture += _traffic_light(np.array([11.2 * sx, 10.0 * sy]))

    paint, zebra = _markings()
    ground = [
        _flat(np.array([[-_FAR, -_FAR, _FAR, _FAR]]), 0.0, _GROUND),
        _flat(_mirrored(np.array([[ROAD, ROAD, _FAR, PAVEMENT + 3], [ROAD, PAVEMENT + 3, PAVEMENT + 3, _FAR]])),
              0.006, _SLABS),
        _asphalt(rng, np.array([[-_FAR, -ROAD, _FAR, ROAD]])),
        _asphalt(rng, np.array([[-ROAD, ROAD, ROAD, _FAR], [-ROAD, -_FAR, ROAD, -ROAD]])),
        _flat(_mirrored(np.array([[ROAD, ROAD, _FAR, ROAD + 0.18], [ROAD, ROAD, ROAD + 0.18, _FAR]])), 0.012, _KERB),
        _flat(np.concatenate([paint, zebra]), 0.018, _PAINT),
    ]  # fmt: skip
    mesh = Mesh.join([*ground, Mesh.of([*buildings, *furniture]), *windows, _sky()])
    painted = np.zeros((round(2 * LENGTH / _CELL),) * 2, bool)
    for x0, y0, x1, y1 in np.rint((np.concatenate([paint, zebra]) + LENGTH) / _CELL).astype(int):
        painted[x0 : max(x1, x0 + 1), y0 : max(y1, y0 + 1)] = True
    return Street(tuple(buildings), tuple(furniture), mesh, painted)


def _mirrored(rectangles: np.ndarray) -> np.ndarray:
    """Rectangles of the quarter x, y > 0 in all four."""
    low, high = rectangles[:, :2], rectangles[:, 2:]
    found = []
    for signs in ((1, 1), (-1, 1), (1, -1), (-1, -1)):
        ends = np.sort(np.stack([low * signs, high * signs]), axis=0)
        found.append(np.concatenate([ends[0], ends[1]], axis=1))
    return np.concatenate(found)


def _flat(rectangles: np.ndarray, z: float, rgb: Rgb) -> Mesh:
    """Rectangles (n, 4) that face up."""
    x0, y0, x1, y1 = rectangles.T
    xyz = np.stack([np.stack([x, y, np.full_like(x, z)], 1) for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], 1)
    n = len(rectangles)
    faces = np.arange(n, dtype=np.int32)[:, None, None] * 4 + np.array([[0, 1, 2], [0, 2, 3]], np.int32)
    return Mesh(
        xyz.reshape(-1, 3), np.tile([0.0, 0.0, 1.0], (4 * n, 1)), np.tile(np.array(rgb, np.uint8), (4 * n, 1)),
        faces.reshape(-1, 3),
    )  # fmt: skip


def _asphalt(rng: np.random.Generator, rectangles: np.ndarray) -> Mesh:
    """Mottled ground: a grid whose vertices differ in brightness."""
    meshes = []
    for x0, y0, x1, y1 in rectangles:
        xs, ys = (np.linspace(a, b, max(2, round((b - a) / 2.4) + 1)) for a, b in ((x0, x1), (y0, y1)))
        x, y = np.meshgrid(xs, ys, indexing="ij")
        corner = (np.arange(len(xs) - 1)[:, None] * len(ys) + np.arange(len(ys) - 1)).ravel()
        ahead, left, both = corner + len(ys), corner + 1, corner + len(ys) + 1
        faces = np.concatenate([np.stack([corner, ahead, both], 1), np.stack([corner, both, left], 1)])
        shade = 1 + rng.uniform(-0.09, 0.09, x.size)[:, None]
        meshes.append(
            Mesh(
                np.stack([x, y, np.full_like(x, 0.006)], -1).reshape(-1, 3), np.tile([0.0, 0.0, 1.0], (x.size, 1)),
                np.rint(np.array(ASPHALT) * shade).astype(np.uint8), faces.astype(np.int32),
            )
        )  # fmt: skip
    return Mesh.join(meshes)


def _markings() -> tuple[np.ndarray, np.ndarray]:
    """Lane lines and stop lines, and the stripes of the zebra crossings."""
    dashes = [[at, 3.42, at + 3, 3.58] for at in np.arange(STOP_LINE + 2, LENGTH, 9.0)]
    solid = [[STOP_LINE, 0.05, LENGTH, 0.2], [STOP_LINE, 6.95, LENGTH, 7.05], [STOP_LINE, 0.2, STOP_LINE + 0.4, 6.9]]
    stripes = [[ZEBRA[0], at, ZEBRA[1], at + 0.5] for at in np.arange(0.25, ROAD - 0.5, 1.0)]
    both = [np.concatenate([a, a[:, [1, 0, 3, 2]]]) for a in (np.array(dashes + solid), np.array(stripes))]
    return _mirrored(both[0]), _mirrored(both[1])


def _windows(rng: np.random.Generator, low: np.ndarray, high: np.ndarray) -> Mesh:
    """Rows of windows on the four walls of a building."""
    quads, normals = [], []
    for axis in (0, 1):
        other = 1 - axis
        for end, sign in ((low, -1), (high, 1)):
            columns = np.arange(low[other] + 1.0, high[other] - 1.8, 2.5)
            rows = np.arange(1.2, high[2] - 2.2, 3.3)
            left, sill = (grid.ravel() for grid in np.meshgrid(columns, rows))
            quad = np.empty((len(left), 4, 3))
            quad[..., axis] = end[axis] + 0.06 * sign
            quad[..., other] = left[:, None] + np.array([0, 1.3, 1.3, 0])
            quad[..., 2] = sill[:, None] + np.array([0, 0, 1.6, 1.6])
            quads.append(quad)
            normals.append(np.tile(sign * np.eye(3)[axis], (4 * len(left), 1)))
    xyz = np.concatenate(quads)
    glass = np.repeat(np.array([52, 66, 84]) + rng.integers(-14, 30, (len(xyz), 1)), 4, axis=0)
    faces = np.arange(len(xyz))[:, None, None] * 4 + np.array([[0, 1, 2], [0, 2, 3]])
    return Mesh(
        xyz.reshape(-1, 3), np.concatenate(normals), glass.astype(np.uint8), faces.reshape(-1, 3).astype(np.int32)
    )


def _tree(rng: np.random.Generator, place: np.ndarray) -> list[Solid]:
    x, y = place
    height, radius = rng.uniform(4.5, 7.5), rng.uniform(1.1, 1.7)
    green = (int(rng.integers(40, 80)), int(rng.integers(96, 132)), int(rng.integers(40, 64)))
    trunk = 2.3
    half = (height - trunk) / 2
    return [
        prism((x, y, trunk / 2), 0.16, trunk, (92, 70, 52), sides=6),
        prism((x, y, trunk + half / 2), 0.5 * radius, half, green, top_radius=radius, sides=7, echo=0.45),
        prism((x, y, height - half / 2), radius, half, green, top_radius=0.3 * radius, sides=7, echo=0.45),
    ]


def _lamp(place: np.ndarray) -> list[Solid]:
    x, y = place
    grey = (110, 112, 116)
    arm = np.where(np.abs(place) > 13.3, np.sign(place) * 1.4, 0.0)  # towards the street
    (x0, y0), (x1, y1) = np.minimum(place, place - arm) - 0.07, np.maximum(place, place - arm) + 0.07
    return [prism((x, y, 3.5), 0.09, 7.0, grey, sides=6), block((x0, y0, 7.0), (x1, y1, 7.15), grey)]


def _traffic_light(place: np.ndarray) -> list[Solid]:
    x, y = place
    return [
        prism((x, y, 1.5), 0.07, 3.0, (70, 72, 74), sides=6),
        block((x - 0.16, y - 0.16, 3.0), (x + 0.16, y + 0.16, 3.9), (34, 36, 36)),
    ]


def _sky() -> Mesh:
    """Bands of a dome, brighter towards the horizon."""
    elevation = np.deg2rad([-6, 0, 4, 12, 30, 60, 89])
    color = np.array([[150, 160, 150], [214, 222, 226], [204, 218, 230], [176, 204, 230], [138, 180, 222],
                      [104, 156, 212], [92, 146, 206]], np.uint8)  # fmt: skip
    around = np.arange(24) * 2 * np.pi / 24
    e, a = np.meshgrid(elevation, around, indexing="ij")
    xyz = _SKY_RADIUS * np.stack([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)], -1)
    band, step = (grid.ravel() for grid in np.meshgrid(np.arange(6), np.arange(24), indexing="ij"))
    here, right = band * 24 + step, band * 24 + (step + 1) % 24
    faces = np.concatenate([np.stack([here, right, right + 24], 1), np.stack([here, right + 24, here + 24], 1)])
    return Mesh(xyz.reshape(-1, 3), np.zeros((e.size, 3)), np.repeat(color, 24, axis=0), faces.astype(np.int32))

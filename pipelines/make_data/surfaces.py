"""What the surfaces of a room look like: textured rectangles of floor, walls and boxes. Lengths are metres."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from pipelines.make_data.furniture import Box, Color, Thing

TEXEL = 0.02  # metres per texture pixel
WALL_HEIGHT = 2.5
_LIGHT = np.array([0.35, -0.5, 0.79])


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


def add_shell(
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


def add_box(rng: np.random.Generator, thing: Thing, box: Box, part: int, patches: list[Patch]) -> None:
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

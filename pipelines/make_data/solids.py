"""Coloured convex polyhedra: what LiDAR rays meet and cameras see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Rgb = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Solid:
    """A convex polyhedron in the frame of what it belongs to.

    Attributes:
        vertices: (vertex, 3) float64, metres.
        faces: vertex indices of each face, counter-clockwise as seen from outside.
        rgb: (face, 3) uint8, sRGB.
        echo: share of the LiDAR's light that it gives back, 0 to 1.
    """

    vertices: np.ndarray
    faces: tuple[tuple[int, ...], ...]
    rgb: np.ndarray
    echo: float = 0.3

    @cached_property
    def planes(self) -> np.ndarray:
        """(face, 4) float64: a point x is inside where normal . x <= offset for every face; normals point out."""
        a, b, c = (self.vertices[[face[i] for face in self.faces]] for i in range(3))
        normal = np.cross(b - a, c - b)
        normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        return np.column_stack([normal, (normal * a).sum(axis=1)])


def block(
    low: Sequence[float], high: Sequence[float], rgb: Rgb, *, top: Sequence[float] | None = None,
    sides: Rgb | None = None, echo: float = 0.3,
) -> Solid:  # fmt: skip
    """A box along the axes, or a frustum.

    Args:
        low, high: opposite corners.
        rgb: colour.
        top: x low, x high, y low, y high of the upper face, where it is smaller than the lower one.
        sides: colour of the four sides, where it is another.
        echo: see Solid.
    """
    (x0, y0, z0), (x1, y1, z1) = low, high
    u0, u1, v0, v1 = (x0, x1, y0, y1) if top is None else top
    vertices = np.array([
        [x0, y0, z0], [x1, y0, z0], [x1, y1, z0], [x0, y1, z0],
        [u0, v0, z1], [u1, v0, z1], [u1, v1, z1], [u0, v1, z1],
    ], np.float64)  # fmt: skip
    faces = ((0, 3, 2, 1), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7))
    return Solid(vertices, faces, np.array([rgb, rgb, *[sides or rgb] * 4], np.uint8), echo)


def prism(
    centre: Sequence[float], radius: float, length: float, rgb: Rgb, *, top_radius: float | None = None,
    sides: int = 8, lying: bool = False, caps: Rgb | None = None, echo: float = 0.3,
) -> Solid:  # fmt: skip
    """A regular prism, or a cut pyramid, that stands (along z) or lies (along y).

    Args:
        centre: its middle.
        radius, length: of the circle around it, and along its axis.
        rgb: colour.
        top_radius: radius at the upper end, where it is another.
        sides: number of them.
        lying: along y instead of z: a wheel.
        caps: colour of both ends, where it is another.
        echo: see Solid.
    """
    angle = (np.arange(sides) + 0.5) * 2 * np.pi / sides
    rings = [
        np.column_stack([r * np.cos(angle), r * np.sin(angle), np.full(sides, z)])
        for r, z in ((radius, -length / 2), (radius if top_radius is None else top_radius, length / 2))
    ]
    vertices = np.concatenate(rings)
    if lying:
        vertices = vertices[:, [0, 2, 1]] * (1, -1, 1)
    around = [(i, (i + 1) % sides, sides + (i + 1) % sides, sides + i) for i in range(sides)]
    faces = (tuple(range(sides))[::-1], tuple(range(sides, 2 * sides)), *around)
    colors = np.array([caps or rgb, caps or rgb, *[rgb] * sides], np.uint8)
    return Solid(vertices + centre, faces, colors, echo)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Coloured triangles.

    Attributes:
        xyz: (vertex, 3) float64, metres.
        normal: (vertex, 3) float64, unit length; zero for what has no shade (the sky).
        rgb: (vertex, 3) uint8, sRGB, before shading.
        faces: (triangle, 3) int32.
    """

    xyz: np.ndarray
    normal: np.ndarray
    rgb: np.ndarray
    faces: np.ndarray

    @classmethod
    def of(cls, solids: Sequence[Solid]) -> Mesh:
        """Every face has vertices of its own, so that edges are sharp."""
        xyz: list[np.ndarray] = []
        normal: list[np.ndarray] = []
        rgb: list[np.ndarray] = []
        faces: list[tuple[int, int, int]] = []
        for solid in solids:
            for face, plane, color in zip(solid.faces, solid.planes, solid.rgb, strict=True):
                start, n = len(xyz), len(face)
                xyz += list(solid.vertices[list(face)])
                normal += [plane[:3]] * n
                rgb += [color] * n
                faces += [(start, start + i, start + i + 1) for i in range(1, n - 1)]
        return cls(
            np.array(xyz, np.float64).reshape(-1, 3), np.array(normal, np.float64).reshape(-1, 3),
            np.array(rgb, np.uint8).reshape(-1, 3), np.array(faces, np.int32).reshape(-1, 3),
        )  # fmt: skip

    @classmethod
    def join(cls, meshes: Sequence[Mesh]) -> Mesh:
        """All of them in one."""
        starts = np.cumsum([0, *[len(m.xyz) for m in meshes[:-1]]])
        return cls(
            np.concatenate([m.xyz for m in meshes]), np.concatenate([m.normal for m in meshes]),
            np.concatenate([m.rgb for m in meshes]),
            np.concatenate([m.faces + start for m, start in zip(meshes, starts, strict=True)]).astype(np.int32),
        )  # fmt: skip

    def moved(self, pose: np.ndarray) -> Mesh:
        """The same after a rigid (4, 4) matrix."""
        return Mesh(self.xyz @ pose[:3, :3].T + pose[:3, 3], self.normal @ pose[:3, :3].T, self.rgb, self.faces)

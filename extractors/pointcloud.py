"""Prepare the points of a scan as ScanQA, VoteNet and mmdetection3d do; numpy only.

ScanQA's order of columns: x y z | r g b | normal | height.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from extractors.errors import EmptyInput, InvalidValues

MEAN_COLOR = np.array([109.8, 97.2, 83.8])  # of ScanNet, 0..255
FEWEST = 10  # usable vertices below which a scan is refused
_FURTHEST_M = 1e4  # beyond it float32 no longer resolves a millimetre: not a scan in metres


def usable(xyz: np.ndarray, where: str) -> np.ndarray:
    """Indices of the vertices with finite coordinates, ascending.

    Raises:
        EmptyInput: no vertex at all.
        InvalidValues: fewer than 10 finite ones, or coordinates beyond 10 km.
    """
    if len(xyz) == 0:
        raise EmptyInput(f"{where}: the scan has no vertices")
    finite = np.flatnonzero(np.isfinite(xyz).all(1))
    if len(finite) < FEWEST:
        raise InvalidValues(
            f"{where}: {len(finite)} of {len(xyz)} vertices have finite coordinates, at least {FEWEST} are needed"
        )
    if (furthest := float(np.abs(xyz[finite]).max())) > _FURTHEST_M:
        raise InvalidValues(f"{where}: a coordinate of {furthest:.4g}; expected metres near the origin (within 10 km)")
    return finite


def draw(rng: np.random.RandomState, vertices: np.ndarray, count: int) -> np.ndarray:
    """`count` of the vertices in random order, each once where there are enough of them, else with repetition."""
    chosen: np.ndarray = rng.choice(vertices, count, replace=len(vertices) < count)
    return chosen


def floor_height(z: np.ndarray, percentile: float = 0.99) -> float:
    """The z that heights are measured from.

    The official codes take the 0.99-th percentile, nearly the minimum, where the 99-th of "99 %" may have been meant.
    """
    return float(np.percentile(z.astype(np.float64), percentile))


def normalise_colors(rgb: np.ndarray, mode: Literal["exact", "legacy_saturated"] = "exact") -> np.ndarray:
    """Colours as the network takes them, (point, 3) float64.

    Args:
        rgb: (point, 3), 0..255.
        mode: `exact`: (rgb - mean) / 256. `legacy_saturated`: the constant -mean / 255 that SQA3D's loader arrives at,
            since it normalises the cached colours again at each visit (c = (c - mean) / 256 has this fixed point).
    """
    if mode == "legacy_saturated":
        return np.tile(-MEAN_COLOR / 255, (len(rgb), 1))
    return (rgb.astype(np.float64) - MEAN_COLOR) / 256


def vertex_normals(xyz: np.ndarray, faces: np.ndarray, mode: Literal["exact", "legacy"] = "exact") -> np.ndarray:
    """Unit vertex normals (vertex, 3) float32: the normalised sum of the unit normals of faces around each vertex.

    Vertices without a face get zeros; so do those of faces with a vertex that is not finite.

    Args:
        xyz: (vertex, 3) metres.
        faces: (face, 3) vertex indices.
        mode: `legacy` reproduces ScanQA's `normals[faces[:, c]] += n`, in which numpy keeps one face per corner column
            and vertex, the last.
    """
    corners = xyz.astype(np.float64)[faces]
    face_normals = _unit(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]))
    face_normals[~np.isfinite(face_normals).all(1)] = 0
    normals = np.zeros((len(xyz), 3))
    for column in faces.T:
        if mode == "legacy":
            normals[column] += face_normals  # not accumulating: repeated vertices are written once
        else:
            for axis in range(3):  # what np.add.at does, several times faster
                normals[:, axis] += np.bincount(column, face_normals[:, axis], len(xyz))
    return _unit(normals).astype(np.float32)


def _unit(vectors: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = vectors / (np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-8)
    return scaled

"""Hard voxelisation (VoxelNet, Zhou & Tuzel 2018) with the deterministic rules of mmcv and of MSMDFusion's fork."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from extractors.errors import InvalidValues

Overflow = Literal["skip", "stop"]


@dataclass(frozen=True)
class Voxels:
    """Occupied voxels, in the order in which points opened them.

    Attributes:
        coords: (voxel, 3) int32 indices z, y, x.
        mean: (voxel, column) float32: mean of the kept points' columns (HardSimpleVFE).
        counts: (voxel,) int32: kept points, 1 to `max_points`.
    """

    coords: np.ndarray
    mean: np.ndarray
    counts: np.ndarray


def grid_shape(voxel_size: Sequence[float], point_range: Sequence[float]) -> tuple[int, int, int]:
    """Voxels along z, y, x of a range given as x, y, z minima, then maxima (metres)."""
    low, high = np.reshape(point_range, (2, 3))
    x, y, z = np.round((high - low) / np.asarray(voxel_size)).astype(int).tolist()
    return z, y, x


def voxelize(
    points: np.ndarray,
    voxel_size: Sequence[float],
    point_range: Sequence[float],
    max_points: int,
    max_voxels: int,
    overflow: Overflow = "skip",
) -> Voxels:
    """Sort points into voxels, as a loop over the points would.

    A point's voxel is floor((p - min) / size) in float32; points outside the grid, and those with NaN or infinity in
    any column, are left out. A voxel keeps its first `max_points` points. Once `max_voxels` are open, a point that
    would open another is skipped (`skip`, mmcv) or ends the loop (`stop`, MSMDFusion's fork).

    Args:
        points: (point, column >= 3) float32; x, y, z first, in metres.
        voxel_size: metres along x, y, z.
        point_range: x, y, z minima, then maxima; metres.

    Raises:
        InvalidValues: `points` has another shape.
    """
    points = np.asarray(points, np.float32)
    if points.ndim != 2 or points.shape[1] < 3:
        raise InvalidValues(f"points have shape {points.shape}, expected (n, 3 or more columns: x, y, z first)")
    shape = grid_shape(voxel_size, point_range)
    index, cell = _cells(points, np.array(voxel_size, np.float32), np.array(point_range[:3], np.float32), shape)

    first = _first_of_equal(cell)
    opens = first == np.arange(len(first), dtype=np.int32)
    voxel = (np.cumsum(opens, dtype=np.int32) - 1)[first]
    opener = np.flatnonzero(opens)
    if len(opener) > max_voxels:
        if overflow == "stop":
            voxel, index = voxel[: opener[max_voxels]], index[: opener[max_voxels]]
        keep = voxel < max_voxels
        voxel, index, opener = voxel[keep], index[keep], opener[:max_voxels]

    counts = np.bincount(voxel, minlength=len(opener))
    if len(voxel) and counts.max() > max_points:
        keep = _rank_below(voxel, counts, max_points)
        voxel, index = voxel[keep], index[keep]
        counts = np.minimum(counts, max_points)
    mean = np.empty((len(opener), points.shape[1]), np.float32)
    for column in range(points.shape[1]):
        total = np.bincount(voxel, points[index, column], len(opener))
        np.divide(total, counts, out=mean[:, column], casting="same_kind")
    coords = np.stack(np.unravel_index(cell[opener], shape), 1).astype(np.int32)
    return Voxels(coords, mean, counts.astype(np.int32))


def _cells(
    points: np.ndarray, size: np.ndarray, low: np.ndarray, shape: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Which points lie in the grid, and the flat index (int64) of each one's cell."""
    with np.errstate(invalid="ignore", over="ignore"):
        x, y, z = np.floor((points[:, :3].T - low[:, None]) / size[:, None])
        inside = (x >= 0) & (x < shape[2]) & (y >= 0) & (y < shape[1]) & (z >= 0) & (z < shape[0])
        if points.shape[1] > 3:
            inside &= np.isfinite(points[:, 3:]).all(1)
    index = np.flatnonzero(inside)
    x, y, z = (axis[index].astype(np.int64) for axis in (x, y, z))
    return index, (z * shape[1] + y) * shape[2] + x


def _first_of_equal(cell: np.ndarray) -> np.ndarray:
    """For each entry, the index of the first entry with the same value."""
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    return first.astype(np.int32)[inverse]


def _rank_below(voxel: np.ndarray, counts: np.ndarray, limit: int) -> np.ndarray:
    """Which points are among the first `limit` of their voxel."""
    keep = np.ones(len(voxel), bool)
    crowded = np.flatnonzero(counts[voxel] > limit)
    order = crowded[np.argsort(voxel[crowded], kind="stable")]
    sizes = counts[counts > limit]
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    keep[order[np.arange(len(order)) - starts >= limit]] = False
    return keep

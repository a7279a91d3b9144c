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
    index, cell = _inside(points, np.array(voxel_size, np.float32), np.array(point_range[:3], np.float32), shape)

    first = _first_of_equal(cell)
    opens = first == np.arange(len(first), dtype=np.int32)
    voxel = (np.cumsum(opens) - 1)[first]
    opener = np.flatnonzero(opens)
    if len(opener) > max_voxels:
        if overflow == "stop":
            voxel, index = voxel[: opener[max_voxels]], index[: opener[max_voxels]]
        keep = voxel < max_voxels
        voxel, index, opener = voxel[keep], index[keep], opener[:max_voxels]

    counts = np.bincount(voxel, minlength=len(opener))
    if len(voxel) and counts.max() > max_points:
        keep = _first_in_voxel(voxel, counts, max_points)
        voxel, index = voxel[keep], index[keep]
        counts = np.minimum(counts, max_points)
    mean = np.empty((len(opener), points.shape[1]), np.float32)
    for column in range(points.shape[1]):
        total = np.bincount(voxel, points[:, column][index], len(opener))
        np.divide(total, counts, out=mean[:, column], casting="same_kind")
    coords = np.empty((len(opener), 3), np.int32)
    rest = cell[opener]
    for axis in (2, 1):
        line = rest // shape[axis]
        coords[:, axis] = rest - line * shape[axis]
        rest = line
    coords[:, 0] = rest
    return Voxels(coords, mean, counts.astype(np.int32))


def _inside(
    points: np.ndarray, size: np.ndarray, low: np.ndarray, shape: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Which points lie in the grid, and the flat index (int64) of each one's cell."""
    inside = np.ones(len(points), bool)
    places = []
    with np.errstate(invalid="ignore", over="ignore"):
        if not np.isfinite(points.sum()):
            inside &= np.isfinite(points).all(1)
        for axis, end in zip((2, 1, 0), shape, strict=True):
            place = points[:, axis] - low[axis]
            place /= size[axis]
            inside &= place >= 0
            inside &= place < end
            places.append(place)
    index = np.flatnonzero(inside)
    z, y, x = (place[index].astype(np.int64) for place in places)
    return index, (z * shape[1] + y) * shape[2] + x


def _first_of_equal(values: np.ndarray) -> np.ndarray:
    """For each entry, the index (int32) of the first entry with the same value.

    All entries with one value meet in one slot of a table, where the first of them is written last. Of different values
    that meet in a slot, one gets its answer and the others go on to another table.
    """
    bits = max(10, 1 + len(values).bit_length())
    table = np.empty(1 << bits, np.int32)  # no slot is read before it is written
    waiting, keys, factor = np.arange(len(values), dtype=np.int32), values.view(np.uint64), 0x9E3779B97F4A7C15
    first = waiting
    while len(waiting):
        slot = keys * np.uint64(factor)
        slot >>= np.uint64(64 - bits)
        slot = slot.view(np.int64)
        table[slot[::-1]] = waiting[::-1]
        found = table[slot]
        lost = values[found] != keys.view(np.int64)
        if len(waiting) == len(values):
            first = found
        else:
            first[waiting] = found
        waiting, keys = waiting[lost], keys[lost]
        factor = (factor * 6364136223846793005 + 2) % 2**64  # odd stays odd
    return first


def _first_in_voxel(voxel: np.ndarray, counts: np.ndarray, limit: int) -> np.ndarray:
    """Which points are among the first `limit` of their voxel."""
    crowded = counts > limit
    index = np.flatnonzero(crowded[voxel])
    number = np.cumsum(crowded) - 1
    number = number.astype(np.min_scalar_type(number[-1]))  # sorting 16 bits is faster by far
    order = index[np.argsort(number[voxel[index]], kind="stable")]
    sizes = counts[crowded]
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    keep = np.ones(len(voxel), bool)
    keep[order[np.arange(len(order)) - starts >= limit]] = False
    return keep

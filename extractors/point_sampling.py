"""Furthest point sampling by the rules of the CUDA kernels that VoteNet and mmcv ship, on CPU and GPU.

Squared distances are `(dx*dx + dy*dy) + dz*dz` in float32 without fused multiply-add.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_FAR = 1e10  # the kernels' initial squared distance
_DENSE = 4096  # below this many points, pruning costs more than it saves
_PARTS = (10, 10, 2)  # cells of the pruned sampling, along the longest axis first
_NEARLY = 0.93  # of the largest distance: what a candidate has; only speed depends on it
_FEW = 256  # candidates up to which their mutual distances are computed at once


def furthest_point_sample(
    xyz: Tensor, count: int, *, lanes: int = 512, skip_origin: bool = False
) -> tuple[Tensor, int]:
    """Pick `count` points, each the furthest from those before it.

    Index 0 comes first. Ties are won as in the kernels' reduction: point i belongs to lane i mod L, with L the largest
    power of two up to min(points, `lanes`); the smallest bit-reversed lane wins, then the smallest index.

    Args:
        xyz: (batch, point, 3) float32, finite, within 10 km of the origin.
        count: points to pick; when the points run out, indices repeat.
        lanes: 512 for VoteNet's kernel, 1024 for mmcv's.
        skip_origin: never pick points with x² + y² + z² <= 1e-3, as VoteNet's kernel does and mmcv's does not.
            Where all points are such, index 0 is repeated.

    Returns:
        (batch, count) int64 indices, and how many of the first picks are known to have had no rival at the same
        distance. Sampling that many points or fewer from the picks, in their order, gives 0, 1, 2 ... again.
    """
    points = xyz.shape[1]
    order = _tie_order(points, lanes)  # in this order the first maximum is the one that wins
    if xyz.device.type == "cpu":
        scans = [_sample_scan(scan[order], count, skip_origin) for scan in xyz.detach().numpy()]
        return torch.from_numpy(order[np.stack([picked for picked, _ in scans])]), min(sole for _, sole in scans)
    ranked = torch.from_numpy(order).to(xyz.device)
    picked, sole = _sample_dense_torch(xyz[:, ranked], count, skip_origin)
    return ranked[picked], sole


def _tie_order(points: int, lanes: int) -> np.ndarray:
    """Point indices by (bit-reversed lane, index); index 0 stays first."""
    bits = min(points, lanes).bit_length() - 1
    lane = np.arange(points) & ((1 << bits) - 1)
    reversed_lane = np.zeros_like(lane)
    for _ in range(bits):
        reversed_lane = (reversed_lane << 1) | (lane & 1)
        lane >>= 1
    return np.argsort(reversed_lane, kind="stable")


def _start_distance(xyz: np.ndarray, skip_origin: bool) -> np.ndarray:
    """Initial squared distances (point,); -1 marks points that are never picked."""
    distance = np.full(len(xyz), _FAR, np.float32)
    if skip_origin:
        x, y, z = xyz.T
        squared = (x * x + y * y) + z * z
        distance[squared.astype(np.float64) <= 1e-3] = -1  # the kernel compares with a double
    return distance


def _sample_scan(xyz: np.ndarray, count: int, skip_origin: bool) -> tuple[np.ndarray, int]:
    distance = _start_distance(xyz, skip_origin)
    if len(xyz) <= _DENSE:
        return _sample_dense(xyz, distance, count), 1  # ties are not looked for
    return _sample_pruned(xyz, distance, count)


def _sample_dense(xyz: np.ndarray, distance: np.ndarray, count: int) -> np.ndarray:
    """The rule as it stands: every pick updates every point. xyz (point, 3) in tie order, point 0 first."""
    rows = np.ascontiguousarray(xyz.T)
    columns = np.ascontiguousarray(xyz)[:, :, None]
    difference, squared = np.empty_like(rows), np.empty_like(distance)
    picked = np.zeros(count, np.int64)
    last = 0
    for k in range(1, count):
        np.subtract(rows, columns[last], difference)
        np.multiply(difference, difference, difference)
        np.add.reduce(difference, 0, None, squared)  # (x + y) + z, in this order
        np.minimum(distance, squared, distance)
        last = int(distance.argmax())
        if distance[last] < 0:
            last = 0
        picked[k] = last
    return picked


def _sample_pruned(xyz: np.ndarray, distance: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """The same picks, faster, in rounds.

    As distances only shrink, the next pick is among the points whose distance is near the largest, as long as one of
    these keeps it above the threshold. So a round picks among these candidates alone, and then brings the other points
    up to date, those near a pick: points lie in compact cells, and a cell is passed over where the distance from the
    pick to its bounding box, rounded as any distance, is not below the largest distance in it.

    Returns:
        (count,) indices into xyz, and how many of the first picks had no rival.
    """
    points, order, live = _compact_cells(xyz)
    low, high = points.min(2), points.max(2)
    by_cell = np.where(live, distance[order], np.float32(-1)).reshape(points.shape[1:])
    flat = by_cell.reshape(-1)
    picked, sole = np.zeros(count, np.int64), count
    begin, k = 0, 1
    while k < count:
        picks, begin = xyz[picked[begin:k]].T, k
        _update_cells(points, low, high, by_cell, picks)
        largest = flat.max()
        if largest <= 0:  # every point left is a copy of a pick, or none can be picked at all
            picked[k:] = order[flat == 0].min() if largest == 0 else 0
            return picked, min(sole, k)
        threshold = largest * np.float32(_NEARLY)
        place = np.flatnonzero(flat > threshold)
        place = place[order[place].argsort()]  # in tie order
        candidate, left = order[place], flat[place]
        rows = np.ascontiguousarray(xyz[candidate].T)
        between = _squared(rows[:, :, None] - rows[:, None]) if len(candidate) <= _FEW else None
        while k < count:
            i = left.argmax()
            furthest = left[i]
            if furthest <= threshold:
                break
            if len((left == furthest).nonzero()[0]) > 1:
                sole = min(sole, k)
            picked[k] = candidate[i]
            k += 1
            np.minimum(left, between[i] if between is not None else _squared(rows - rows[:, i, None]), left)
        flat[place] = left
    return picked, sole


def _compact_cells(xyz: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the points along their longest axis, each part along the next, and those along the last, into equal parts.

    Returns:
        Coordinates (3, cell, point), index of each in xyz (cell * point,), and False where it only fills up (same).
    """
    rows = np.ascontiguousarray(xyz.T)
    low, extent = rows.min(1, keepdims=True), np.ptp(rows, axis=1)
    step = ((rows - low) * np.float32(255.99 / max(float(extent.max()), 1e-6))).astype(np.uint16)  # 8 bits
    cells = math.prod(_PARTS)
    size = -(-len(xyz) // cells)  # points per cell
    order, part = np.arange(len(xyz)), np.zeros(len(xyz), np.uint16)
    below = cells
    for axis, parts in zip(np.argsort(-extent), _PARTS, strict=True):
        order = order[np.argsort(part << 8 | step[axis, order], kind="stable")]  # 16 bits: a radix sort
        below //= parts
        part = (np.arange(len(xyz)) // (below * size)).astype(np.uint16)
    order = np.append(order, np.full(cells * size - len(xyz), order[-1]))
    points = np.ascontiguousarray(rows[:, order]).reshape(3, cells, size)
    return points, order, np.arange(len(order)) < len(xyz)


def _update_cells(
    points: np.ndarray, low: np.ndarray, high: np.ndarray, by_cell: np.ndarray, picks: np.ndarray
) -> None:
    """Lower the distances (cell, point) of all points to those from the picks (3, pick), in place."""
    gap = np.maximum(low[:, :, None] - picks[:, None], picks[:, None] - high[:, :, None])
    cell, pick = np.nonzero(_squared(np.maximum(gap, 0, gap)) < by_cell.max(1)[:, None])
    if len(cell) == 0:
        return
    squared = _squared(points.take(cell, 1) - picks.take(pick, 1)[:, :, None])  # (pair, point)
    first = np.flatnonzero(np.diff(cell, prepend=-1))  # pairs come by cell
    pairs = np.diff(first, append=len(cell))
    for j in range(pairs.max()):  # the j-th pair of each cell that has so many
        pair = first[pairs > j] + j
        by_cell[cell[pair]] = np.minimum(by_cell[cell[pair]], squared[pair])


def _squared(difference: np.ndarray) -> np.ndarray:
    """(x² + y²) + z² over the first axis, in float32 and in this order; overwrites its argument."""
    np.multiply(difference, difference, difference)
    squared: np.ndarray = difference[0]
    squared += difference[1]
    squared += difference[2]
    return squared


def _sample_dense_torch(xyz: Tensor, count: int, skip_origin: bool) -> tuple[Tensor, int]:
    """`_sample_dense` for a batch on an accelerator: no value leaves the device inside the loop."""
    start = np.stack([_start_distance(scan, skip_origin) for scan in xyz.cpu().numpy()])
    distance = torch.from_numpy(start).to(xyz.device)
    x, y, z = xyz.permute(2, 0, 1).contiguous()
    picked = torch.zeros(len(xyz), count, dtype=torch.int64, device=xyz.device)
    last = picked[:, :1]
    equals = torch.ones_like(picked)
    for k in range(1, count):
        dx, dy, dz = x - x.gather(1, last), y - y.gather(1, last), z - z.gather(1, last)
        distance = torch.minimum(distance, (dx * dx + dy * dy) + dz * dz)
        largest, last = distance.max(1, keepdim=True)  # the first maximum
        equals[:, k] = (distance == largest).sum(1)
        last = torch.where(largest < 0, 0, last)
        picked[:, k : k + 1] = last
    return picked, int((equals.amax(0) == 1).long().cumprod(0).sum())

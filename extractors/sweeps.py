"""Put a key frame's LiDAR and the sweeps before it into one cloud, as CenterPoint and MSMDFusion read it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from extractors.inputs import LidarScan, LidarSweeps


def aggregate(
    lidar: LidarSweeps,
    sweeps: int = 9,
    remove_close: float = 1.0,
    pad_empty: bool = True,
    choice: Literal["nearest", "random"] = "nearest",
    seed: int = 0,
) -> np.ndarray:
    """Move sweeps to the key frame and give each point the time since it was measured.

    The key frame comes first, as it is; sweeps follow in the order in which they were picked. mmdetection3d's loader
    of infos 1.1 subtracts the inverse's translation and so misplaces sweeps when the car turns (its issue 3054); here
    p' = R p + t, as in the loaders that the checkpoints were trained with.

    Args:
        lidar: the key frame and the sweeps before it.
        sweeps: how many to add (CenterPoint 9, MSMDFusion 10); all where there are fewer.
        remove_close: points of a sweep with |x| and |y| below this many metres in its own sensor frame are left out
            (echoes of the car itself); 0 keeps them. The key frame keeps all of its points.
        pad_empty: where there is no sweep at all, `sweeps` copies of the key frame stand in, lag 0, close points out.
        choice: which sweeps where there are more than needed: the `nearest`, or `random` ones without replacement, as
            in mmdetection3d's own evaluation.
        seed: of the random choice (`extractors.base.seed_for`).

    Returns:
        (point, 5) float32: x, y, z in metres in the LIDAR_TOP frame of the key frame, intensity 0..255, lag in seconds.
    """
    key = _points(lidar.key.points)
    parts = [key]
    before = pick(lidar, sweeps, choice, seed)
    for scan in before:
        points = _points(_far(scan.points, remove_close))
        # rounded to float32 between R p and + t, as the reference does
        points[:, :3] = points[:, :3].astype(np.float64) @ scan.to_key[:3, :3].T
        points[:, :3] += scan.to_key[:3, 3]
        points[:, 4] = scan.lag
        parts.append(points)
    if pad_empty and not lidar.before:
        parts += [_far(key, remove_close)] * sweeps
    return np.concatenate(parts)


def pick(
    lidar: LidarSweeps, sweeps: int, choice: Literal["nearest", "random"] = "nearest", seed: int = 0
) -> tuple[LidarScan, ...]:
    """The sweeps that `aggregate` adds; detectors trained on ten scans find less where these are fewer."""
    if choice == "nearest" or len(lidar.before) <= sweeps:
        return lidar.before[:sweeps]
    chosen = np.random.default_rng(seed).choice(len(lidar.before), sweeps, replace=False)
    return tuple(lidar.before[i] for i in chosen)


def _points(points: np.ndarray) -> np.ndarray:
    """A copy with the ring number replaced by lag 0."""
    if points.ndim != 2 or points.shape[1] != 5:
        raise ValueError(f"points of shape {points.shape}, expected (point, 5): x, y, z, intensity, ring")
    points = points.astype(np.float32)
    points[:, 4] = 0
    return points


def _far(points: np.ndarray, radius: float) -> np.ndarray:
    """Points outside the square around the sensor."""
    return points[~((abs(points[:, 0]) < radius) & (abs(points[:, 1]) < radius))] if radius > 0 else points

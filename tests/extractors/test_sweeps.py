"""Sweeps put together against the definition point by point."""

from __future__ import annotations

import numpy as np
import pytest

from extractors.inputs import LidarScan, LidarSweeps
from extractors.sweeps import aggregate, pick


def scan(seed: int, lag: float = 0.0, yaw: float = 0.0, shift: tuple[float, float, float] = (0, 0, 0)) -> LidarScan:
    rng = np.random.default_rng(seed)
    points = rng.uniform([-4, -4, -2, 0, 0], [4, 4, 2, 255, 0], (50, 5)).astype(np.float32)
    points[:, 4] = np.arange(50) % 32
    to_key = np.eye(4)
    to_key[:2, :2] = [[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]
    to_key[:3, 3] = shift
    return LidarScan(points, to_key, lag)


def drive(count: int) -> LidarSweeps:
    before = [scan(k, 0.05 * k, 0.1 * k, (-0.4 * k, 0.05 * k, 0.01)) for k in range(1, count + 1)]
    return LidarSweeps(scan(0), tuple(before), 0, np.eye(4))


def by_definition(lidar: LidarSweeps, sweeps: int, radius: float) -> np.ndarray:
    rows = [[*point[:4], 0.0] for point in lidar.key.points]
    for one in lidar.before[:sweeps]:
        for point in one.points:
            if abs(point[0]) < radius and abs(point[1]) < radius:
                continue
            moved = one.to_key @ [*point[:3], 1.0]
            rows.append([*moved[:3], point[3], one.lag])
    return np.array(rows)


@pytest.mark.parametrize(("listed", "wanted", "radius"), [(10, 9, 1.0), (10, 10, 0.0), (3, 9, 1.0), (4, 2, 2.5)])
def test_points_are_those_of_the_definition(listed: int, wanted: int, radius: float) -> None:
    lidar = drive(listed)
    cloud = aggregate(lidar, wanted, radius)
    assert cloud.dtype == np.float32
    np.testing.assert_allclose(cloud, by_definition(lidar, wanted, radius), atol=1e-5)


def test_a_sweep_taken_before_a_quarter_turn_is_where_it_was() -> None:
    """With R^T t in place of t, as in mmdetection3d 1.1's loader, the point would be 14 m away."""
    before = LidarScan(
        np.array([[5, 0, 1, 7, 3]], np.float32),
        np.array([[0, -1, 0, 10], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], float),
        0.5,
    )
    key = LidarScan(np.zeros((1, 5), np.float32), np.eye(4), 0.0)
    cloud = aggregate(LidarSweeps(key, (before,), 0, np.eye(4)))
    np.testing.assert_array_equal(cloud[1], np.array([10, 5, 1, 7, 0.5], np.float32))


def test_close_points_are_left_out_in_the_sweeps_own_frame_and_kept_in_the_key_frame() -> None:
    near = np.array([[0.5, -0.9, 0, 1, 0], [0.5, 1.0, 0, 2, 0], [-1.5, 0.2, 0, 3, 0]], np.float32)
    away = np.eye(4)
    away[0, 3] = 20.0  # what was near is far, and what was 20 m ahead is here
    there = np.vstack([near, np.array([[-20, 0, 0, 4, 0]], np.float32)])
    lidar = LidarSweeps(LidarScan(near, np.eye(4), 0.0), (LidarScan(there, away, 0.05),), 0, np.eye(4))
    np.testing.assert_array_equal(aggregate(lidar)[:, 3], [1, 2, 3, 2, 3, 4])
    np.testing.assert_array_equal(aggregate(lidar, remove_close=0.0)[:, 3], [1, 2, 3, 1, 2, 3, 4])


def test_a_key_frame_without_sweeps_is_padded_with_copies_of_its_far_points() -> None:
    lidar = drive(0)
    far = lidar.key.points[(abs(lidar.key.points[:, :2]) >= 1).any(1)]
    assert 0 < len(far) < 50
    padded = aggregate(lidar)
    assert len(padded) == 50 + 9 * len(far)
    np.testing.assert_array_equal(padded[-len(far) :, :4], far[:, :4])
    assert not padded[:, 4].any()
    assert len(aggregate(lidar, pad_empty=False)) == 50
    assert len(aggregate(drive(1))) < 101, "one sweep is enough for no padding"


def test_the_same_call_gives_the_same_points_and_leaves_the_input_alone() -> None:
    lidar = drive(10)
    before = [one.points.copy() for one in (lidar.key, *lidar.before)]
    np.testing.assert_array_equal(aggregate(lidar), aggregate(lidar))
    for one, points in zip((lidar.key, *lidar.before), before, strict=True):
        np.testing.assert_array_equal(one.points, points)


def test_random_sweeps_follow_from_the_seed_and_none_is_taken_twice() -> None:
    lidar = drive(10)
    lags = {seed: [one.lag for one in pick(lidar, 9, "random", seed)] for seed in range(20)}
    assert lags[3] == [one.lag for one in pick(lidar, 9, "random", 3)]
    assert all(len(set(chosen)) == 9 for chosen in lags.values())
    assert len({tuple(sorted(chosen)) for chosen in lags.values()}) > 3, "another one is left out"
    np.testing.assert_array_equal(np.unique(aggregate(lidar, choice="random", seed=3)[:, 4])[1:],
                                  np.sort(np.float32(lags[3])))  # fmt: skip


def test_nearest_sweeps_are_taken_first_and_all_where_there_are_few() -> None:
    lidar = drive(10)
    assert pick(lidar, 9) == lidar.before[:9]
    assert pick(lidar, 0) == ()
    few = drive(2)
    assert pick(few, 9) == pick(few, 9, "random", 1) == few.before


def test_scans_without_points_are_fine_and_other_columns_are_not() -> None:
    nothing = LidarScan(np.empty((0, 5), np.float32), np.eye(4), 0.0)
    assert aggregate(LidarSweeps(nothing, (), 0, np.eye(4))).shape == (0, 5)
    assert aggregate(LidarSweeps(nothing, (nothing,), 0, np.eye(4))).shape == (0, 5)
    four = LidarScan(np.zeros((3, 4), np.float32), np.eye(4), 0.0)
    with pytest.raises(ValueError, match=r"shape \(3, 4\), expected \(point, 5\)"):
        aggregate(LidarSweeps(four, (), 0, np.eye(4)))

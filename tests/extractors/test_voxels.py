"""Hard voxelisation against the loop that defines it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractors.errors import InvalidValues
from extractors.voxels import Voxels, grid_shape, voxelize

SIZE, RANGE = (0.5, 0.5, 1.0), (-2.0, -1.5, -1.0, 2.0, 1.5, 2.0)
CENTERPOINT = ((0.075, 0.075, 0.2), (-54, -54, -5, 54, 54, 3))


def by_loop(
    points: np.ndarray, size: tuple, limits: tuple, max_points: int, max_voxels: int, overflow: str
) -> tuple[list, list]:
    """Coordinates and kept points of each voxel, point by point."""
    low, step = np.array(limits[:3], np.float32), np.array(size, np.float32)
    extent = grid_shape(size, limits)[::-1]
    opened: dict[tuple[int, ...], list[np.ndarray]] = {}
    for point in points:
        if not np.isfinite(point).all():
            continue
        with np.errstate(over="ignore"):
            cell = np.floor((point[:3] - low) / step)
        if (cell < 0).any() or (cell >= extent).any():
            continue
        place = tuple(int(c) for c in cell[::-1])
        if place not in opened:
            if len(opened) == max_voxels:
                if overflow == "stop":
                    break
                continue
            opened[place] = []
        if len(opened[place]) < max_points:
            opened[place].append(point)
    return list(opened), list(opened.values())


def assert_equals_loop(points: np.ndarray, size: tuple, limits: tuple, *rule: object) -> None:
    ours = voxelize(points, size, limits, *rule)
    coords, kept = by_loop(points, size, limits, *rule)
    assert ours.coords.dtype == ours.counts.dtype == np.int32
    assert ours.mean.dtype == np.float32
    assert ours.coords.tolist() == [list(c) for c in coords]
    assert ours.counts.tolist() == [len(k) for k in kept]
    means = [np.mean(k, 0, dtype=np.float64) for k in kept]
    np.testing.assert_allclose(ours.mean, np.reshape(means, (-1, points.shape[1])), rtol=1e-6, atol=1e-7)


coordinate = st.one_of(
    st.integers(-10, 10).map(lambda i: i / 4),
    st.floats(-3, 3, width=32),
    st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38]),
)


@given(
    st.lists(st.tuples(coordinate, coordinate, coordinate, st.floats(0, 255, width=32)), max_size=120),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from(["skip", "stop"]),
)
def test_equals_the_loop_over_points(points: list, max_points: int, max_voxels: int, overflow: str) -> None:
    rows = np.array(points, np.float32).reshape(-1, 4)
    assert_equals_loop(rows, SIZE, RANGE, max_points, max_voxels, overflow)


@pytest.mark.parametrize("overflow", ["skip", "stop"])
@pytest.mark.parametrize("max_voxels", [700, 100_000])
def test_equals_the_loop_on_a_crowded_scan(overflow: str, max_voxels: int) -> None:
    rng = np.random.RandomState(0)
    points = np.concatenate([rng.randn(12_000, 3) * [6, 6, 1], rng.rand(12_000, 2)], 1).astype(np.float32)
    points[3000:9000, :3] = points[rng.randint(0, 200, 6000), :3]  # far over ten points in some voxels
    assert_equals_loop(points, *CENTERPOINT, 10, max_voxels, overflow)


def test_overflow_skips_new_voxels_or_ends_the_loop() -> None:
    points = np.array([[0.1, 0, 0], [1.1, 0, 0], [0.2, 0, 0]], np.float32)
    skip = voxelize(points, (1, 1, 1), (0, 0, 0, 4, 4, 4), 5, 1, "skip")
    stop = voxelize(points, (1, 1, 1), (0, 0, 0, 4, 4, 4), 5, 1, "stop")
    assert (skip.counts.tolist(), stop.counts.tolist()) == ([2], [1])


def test_a_value_on_a_border_belongs_to_the_upper_voxel_and_the_upper_end_is_out() -> None:
    points = np.array([[0.5, 0.25, 1.0], [2.0, 0, 0], [-2.0, -1.5, -1.0]], np.float32)
    assert voxelize(points, SIZE, RANGE, 5, 9).coords.tolist() == [[2, 3, 5], [0, 0, 0]]


def test_grid_of_centerpoint() -> None:
    assert grid_shape(*CENTERPOINT) == (40, 1440, 1440)
    assert grid_shape((0.1, 0.1, 0.2), (-51.2, -51.2, -5, 51.2, 51.2, 3)) == (40, 1024, 1024)


def _empty(found: Voxels, columns: int) -> bool:
    return found.coords.shape == (0, 3) and found.mean.shape == (0, columns) and found.counts.shape == (0,)


def test_no_points_and_no_points_in_range_give_no_voxels() -> None:
    assert _empty(voxelize(np.zeros((0, 5), np.float32), *CENTERPOINT, 10, 100), 5)
    assert _empty(voxelize(np.full((7, 5), 1e6, np.float32), *CENTERPOINT, 10, 100), 5)
    assert _empty(voxelize(np.full((7, 5), np.nan, np.float32), *CENTERPOINT, 10, 100), 5)


def test_one_point() -> None:
    found = voxelize(np.array([[0, 0, 0, 7, 0.5]], np.float32), *CENTERPOINT, 10, 100)
    assert found.coords.tolist() == [[25, 720, 720]]
    assert found.mean.tolist() == [[0, 0, 0, 7, 0.5]]


def test_a_point_with_nan_in_any_column_is_left_out() -> None:
    points = np.ones((3, 5), np.float32)
    points[0, 3] = np.nan
    points[1, 1] = np.inf
    found = voxelize(points, *CENTERPOINT, 10, 100)
    assert found.counts.tolist() == [1]
    assert np.isfinite(found.mean).all()


@pytest.mark.parametrize("shape", [(5,), (4, 2), (2, 3, 4)])
def test_points_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValues, match="expected"):
        voxelize(np.zeros(shape, np.float32), *CENTERPOINT, 10, 100)


def test_the_same_points_give_the_same_bytes() -> None:
    points = np.random.RandomState(1).randn(5000, 5).astype(np.float32)
    one, two = (voxelize(points, *CENTERPOINT, 10, 3000) for _ in range(2))
    assert one.mean.tobytes() == two.mean.tobytes()
    assert one.coords.tobytes() == two.coords.tobytes()


def test_two_million_points() -> None:
    points = (np.random.RandomState(2).uniform(-60, 60, (2_000_000, 5)) * [1, 1, 0.1, 1, 1]).astype(np.float32)
    found = voxelize(points, *CENTERPOINT, 10, 120_000)
    assert len(found.coords) == 120_000
    assert len(np.unique(found.coords, axis=0)) == 120_000

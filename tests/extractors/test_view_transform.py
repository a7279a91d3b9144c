"""Lift and splat against their definitions, written out point by point."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from extractors.view_transform import DEPTHS, Ground, frustum, ground_cells, place, splat

SMALL = Ground((-2.0, -3.0, -1.0), (1.0, 1.0, 2.0), (4, 6, 1))  # 4 cells along x, 6 along y
BD1 = Ground((-51.2, -51.2, -10.0), (0.8, 0.8, 20.0), (128, 128, 1))


def test_sums_are_those_of_a_loop_over_all_points() -> None:
    rng = np.random.RandomState(0)
    batch, cameras, depths, rows, columns, channels = 2, 3, 5, 2, 4, 7
    points = rng.uniform(-4, 4, (batch, cameras, depths, rows, columns, 3)).astype(np.float32)
    depth = rng.rand(batch, cameras, depths, rows, columns).astype(np.float32)
    context = rng.randn(batch, cameras, channels, rows, columns).astype(np.float32)
    expected, kept = np.zeros((batch, channels, 6, 4)), 0
    for b, n, d, y, x in np.ndindex(depth.shape):
        column, row, layer = (int(v) for v in (points[b, n, d, y, x] - SMALL.lower) / SMALL.step)  # int() cuts to zero
        if 0 <= column < 4 and 0 <= row < 6 and layer == 0:
            expected[b, :, row, column] += depth[b, n, d, y, x] * context[b, n, :, y, x].astype(float)
            kept += 1
    assert 20 < kept < depth.size - 20

    cells = ground_cells(torch.from_numpy(points), SMALL)
    ours = splat(torch.from_numpy(depth), torch.from_numpy(context), cells, SMALL)
    assert ours.shape == (batch, channels, 6, 4)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-5)
    alone = splat(torch.from_numpy(depth[1:]), torch.from_numpy(context[1:]), cells[1:], SMALL)
    assert torch.equal(alone[0], ours[1])
    half = splat(torch.from_numpy(depth), torch.from_numpy(context).bfloat16(), cells, SMALL)
    assert half.dtype == torch.float32
    assert (half - ours).norm() < 5e-3 * ours.norm()


@pytest.mark.parametrize(
    ("point", "cell"),
    [
        ((-51.2, -51.2, 0), 0),
        ((-51.2 - 0.79, -51.2, 0), 0),  # cut towards zero, not downwards
        ((-51.2, -51.2 - 0.79, 0), 0),
        ((-51.2 - 0.81, 0, 0), None),
        ((0.1, -51.1, 0), 64),  # x runs along a row
        ((-51.1, 0.1, 0), 64 * 128),
        ((51.19, 51.19, 0), 128 * 128 - 1),
        ((51.21, 0, 0), None),
        ((0, 51.21, 0), None),
        ((0.1, 0.1, 9.9), 64 * 128 + 64),
        ((0.1, 0.1, 10.1), None),
        ((0.1, 0.1, -29.9), 64 * 128 + 64),  # and so one step further down
        ((0.1, 0.1, -30.1), None),
        ((np.nan, 0, 0), None),
        ((0, np.inf, 0), None),
        ((0, 0, -np.inf), None),
        ((1e30, 1e30, 0), None),
    ],
)
def test_cells_are_cut_towards_zero(point: tuple[float, float, float], cell: int | None) -> None:
    found = ground_cells(torch.tensor([point]), BD1)
    assert found.dtype == torch.int32
    assert found.item() == (128 * 128 if cell is None else cell)


def test_constants_are_those_of_the_first_generation() -> None:
    constants = {name: value.tolist() for name, value in BD1.constants().items()}
    assert constants == {
        "dx": pytest.approx([0.8, 0.8, 20.0]),
        "bx": pytest.approx([-50.8, -50.8, 0.0]),
        "nx": [128, 128, 1],
    }


def test_frustum_has_its_outer_cells_on_the_edge() -> None:
    points = frustum(256, 704)
    assert points.shape == (DEPTHS, 16, 44, 3)
    assert points[0, 0, 0].tolist() == [0, 0, 1]
    assert points[-1, -1, -1].tolist() == [703, 255, 59]
    assert points[10, 3, 5].tolist() == pytest.approx([5 * 703 / 43, 3 * 255 / 15, 11])


def test_points_project_back_to_where_they_came_from() -> None:
    rng = np.random.RandomState(1)
    turns = [np.linalg.qr(rng.randn(3, 3))[0] for _ in range(2)]
    rots = np.stack([turn * np.linalg.det(turn) for turn in turns])
    trans = rng.randn(2, 3)
    intrins = np.array([[[1260.0, 0, 816], [0, 1250, 491], [0, 0, 1]], [[800, 0, 700], [0, 810, 400], [0, 0, 1]]])
    post_rot, post_tran = np.diag([0.48, 0.44, 1]), np.array([-32.0, -176, 0])
    arrays = (torch.from_numpy(a.astype(np.float32)) for a in (rots, trans, intrins, post_rot, post_tran))
    pixels = frustum(256, 704)
    points = place(pixels, *arrays).numpy().astype(float)
    assert points.shape == (2, DEPTHS, 16, 44, 3)
    for camera in range(2):
        seen = (points[camera] - trans[camera]) @ rots[camera]  # the transpose, from the right
        image = seen @ intrins[camera].T
        image[..., :2] = image[..., :2] / image[..., 2:] * np.diag(post_rot)[:2] + post_tran[:2]
        np.testing.assert_allclose(image, pixels, atol=2e-2)


@pytest.mark.parametrize(("x", "y"), [(20.3, 35.7), (-20.3, 35.7), (20.3, -35.7)])
def test_what_is_seen_at_x_y_lights_column_x_and_row_y(x: float, y: float) -> None:
    points = torch.full((1, 1, 1, 1, 2, 3), 1e6)
    points[..., 1, :] = torch.tensor([x, y, 0.0])
    context = torch.tensor([[3.0, 5.0], [7.0, 11.0]])[None, None, :, None]  # two channels of two image cells
    bev = splat(torch.full((1, 1, 1, 1, 2), 0.5), context, ground_cells(points, BD1), BD1)
    assert bev.shape == (1, 2, 128, 128)
    assert bev.nonzero().tolist() == [[0, channel, int((y + 51.2) / 0.8), int((x + 51.2) / 0.8)] for channel in (0, 1)]
    assert bev[bev != 0].tolist() == [2.5, 5.5]

"""Which cells are under a box and what is pooled, against the definitions cell by cell, and every kind of odd box."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from extractors.crop import cells_under, crop
from extractors.errors import InvalidValues

HEIGHT, WIDTH = 20, 33


def some_map(channels: int = 5, height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(3).standard_normal((channels, height, width)).astype(np.float32))


def some_boxes(count: int = 300) -> np.ndarray:
    """Boxes of a tenth of a cell to half the map, in it, across its border and off it."""
    rng = np.random.RandomState(4)
    centre = rng.uniform([-8, -8], [WIDTH + 8, HEIGHT + 8], (count, 2))
    return np.concatenate([centre, np.exp(rng.uniform(-2.3, 2.5, (count, 2))), rng.uniform(-7, 7, (count, 1))], 1)


def named(cells: np.ndarray, counts: np.ndarray, width: int = WIDTH) -> list[set[tuple[int, int]]]:
    """(x, y) of the cells of each box."""
    parts = np.split(cells, np.cumsum(counts)[:-1])
    return [{(int(cell % width), int(cell // width)) for cell in part} for part in parts]


def exact_cells(box: np.ndarray, circumscribed: bool) -> set[tuple[int, int]]:
    """The definition: cells whose centre is inside; else the one that holds the box's centre; else none."""
    cx, cy, sx, sy, rot = box.tolist()
    c, s = math.cos(rot), math.sin(rot)
    inside, around = set(), set()
    for y in range(HEIGHT):
        for x in range(WIDTH):
            dx, dy = x + 0.5 - cx, y + 0.5 - cy
            if abs(c * dx + s * dy) <= sx / 2 and abs(c * dy - s * dx) <= sy / 2:
                inside.add((x, y))
            if abs(dx) <= (abs(c) * sx + abs(s) * sy) / 2 and abs(dy) <= (abs(s) * sx + abs(c) * sy) / 2:
                around.add((x, y))
    lone = {(math.floor(cx), math.floor(cy))} if 0 <= cx < WIDTH and 0 <= cy < HEIGHT else set()
    if not inside and not lone:
        return set()
    return (around if circumscribed else inside) or lone


def legacy_cells(box: np.ndarray) -> tuple[set[tuple[int, int]], bool]:
    """The published helper's rule with both ends of the rectangle kept on the map, and whether any of it was."""
    cx, cy, sx, sy, rot = box.tolist()
    c, s = math.cos(rot), math.sin(rot)
    corners = []
    for y in (int(cy - sy / 2), int(cy + sy / 2)):
        for x in (int(cx - sx / 2), int(cx + sx / 2)):
            dx, dy = x - cx, y - cy
            corners.append((float(round(dx * c - dy * s + cx)), float(round(dx * s + dy * c + cy))))
    xs, ys = zip(*corners, strict=True)
    on = max(xs) >= 0 and min(xs) < WIDTH and max(ys) >= 0 and min(ys) < HEIGHT
    low_x, high_x = (int(min(max(v, 0), WIDTH - 1)) for v in (min(xs), max(xs)))
    low_y, high_y = (int(min(max(v, 0), HEIGHT - 1)) for v in (min(ys), max(ys)))
    rectangle = {(x, y) for x in range(low_x, high_x + 1) for y in range(low_y, high_y + 1)}
    inside = {p for p in rectangle if any(in_triangle(p, corners[0], corners[k], corners[3]) for k in (1, 2))}
    return inside or rectangle, on


def in_triangle(point: Any, first: Any, second: Any, third: Any) -> bool:
    (px, py), (x0, y0), (x1, y1), (x2, y2) = point, first, second, third
    area = 0.5 * (-y1 * x2 + y0 * (-x1 + x2) + x0 * (y1 - y2) + x1 * y2)
    if area == 0:
        return False
    s = 1 / (2 * area) * (y0 * x2 - x0 * y2 + (y2 - y0) * px + (x0 - x2) * py)
    t = 1 / (2 * area) * (x0 * y1 - y0 * x1 + (y0 - y1) * px + (x1 - x0) * py)
    return s > 0 and t > 0 and 1 - s - t > 0


@pytest.mark.parametrize("shape", ["rotated", "circumscribed"])
def test_exact_takes_the_cells_of_the_definition(shape: Any) -> None:
    boxes = some_boxes()
    cells, counts, valid = cells_under(boxes, HEIGHT, WIDTH, "exact", shape)
    expected = [exact_cells(box, shape == "circumscribed") for box in boxes]
    assert named(cells, counts) == expected
    assert valid.tolist() == [bool(cells) for cells in expected]
    assert 0 < valid.sum() < len(boxes)
    features = {pool: crop(some_map(), boxes, "exact", shape, pool)[0] for pool in ("mean", "max")}
    for i, cells_of_box in enumerate(expected):
        values = torch.stack([some_map()[:, y, x] for x, y in cells_of_box] or [torch.zeros(5)])
        torch.testing.assert_close(features["mean"][i], values.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(features["max"][i], values.amax(0), rtol=0, atol=0)


def test_legacy_takes_the_cells_of_the_published_helper() -> None:
    boxes = some_boxes()
    cells, counts, valid = cells_under(boxes, HEIGHT, WIDTH, "legacy")
    expected = [legacy_cells(box) for box in boxes]
    assert named(cells, counts) == [cells_of_box for cells_of_box, _ in expected]
    assert valid.tolist() == [on for _, on in expected]
    assert 0 < valid.sum() < len(boxes)


def test_one_lit_cell_shows_that_x_is_a_column_and_y_a_row() -> None:
    bev = torch.zeros(1, HEIGHT, WIDTH)
    bev[0, 4, 21] = 1
    for mode, boxes in (
        ("exact", [[21.5, 4.5, 1, 1, 0], [4.5, 19.5, 1, 1, 0]]),
        ("legacy", [[21.4, 4.4, 0.5, 0.5, 0]]),
    ):
        features, valid = crop(bev, np.array(boxes, float), mode)
        assert features[:, 0].tolist() == [1.0, 0.0][: len(boxes)]
        assert valid.all()


@pytest.mark.parametrize(
    ("degrees", "cells"),
    [
        (0, {(x, y) for x in (8, 9, 10, 11) for y in (9, 10)}),
        (90, {(x, y) for x in (9, 10) for y in (8, 9, 10, 11)}),
        (45, {(9, 8), (8, 9), (9, 9), (10, 9), (9, 10), (10, 10), (11, 10), (10, 11)}),
        (-45, {(10, 8), (9, 9), (10, 9), (11, 9), (8, 10), (9, 10), (10, 10), (9, 11)}),
    ],
)
def test_positive_rotation_turns_from_x_towards_y(degrees: float, cells: set[tuple[int, int]]) -> None:
    found, counts, _ = cells_under(np.array([[10, 10, 4.1, 2.1, math.radians(degrees)]]), HEIGHT, WIDTH)
    assert named(found, counts) == [cells]


def test_half_a_turn_changes_nothing_in_exact() -> None:
    boxes = some_boxes()
    turned = boxes + np.array([0, 0, 0, 0, np.pi])
    for shape in ("rotated", "circumscribed"):
        here, there = (cells_under(rows, HEIGHT, WIDTH, "exact", shape) for rows in (boxes, turned))
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize(
    ("box", "cells"),
    [
        ([7.9, 3.1, 0.4, 0.4, 0.7], {(7, 3)}),  # in a cell, off its centre
        ([8.0, 3.0, 0.4, 0.4, 0.7], {(8, 3)}),  # on the corner of four cells
        ([0, 0, 0.4, 0.4, 0.7], {(0, 0)}),
        ([WIDTH - 0.01, HEIGHT - 0.01, 0.4, 0.4, 0.7], {(WIDTH - 1, HEIGHT - 1)}),
        ([0, 5.5, 6, 1, 0], {(0, 5), (1, 5), (2, 5)}),  # half of it off the map
        ([-2, 5.5, 6, 1, 0], {(0, 5)}),  # its centre off the map
        ([-0.2, 5.5, 1, 1, 0], set()),  # it touches the map, with no cell's centre and not its own
        ([-9, 5.5, 6, 1, 0], set()),
        ([WIDTH + 9, 5.5, 6, 1, 0], set()),
        ([5.5, -9, 6, 1, 0], set()),
        ([5.5, HEIGHT + 9, 6, 1, 0], set()),
    ],
)
def test_exact_defines_tiny_boxes_and_the_border(box: list[float], cells: set[tuple[int, int]]) -> None:
    found, counts, valid = cells_under(np.array([box], float), HEIGHT, WIDTH)
    assert named(found, counts) == [cells]
    assert valid.tolist() == [bool(cells)]
    features, _ = crop(some_map(), np.array([box], float))
    assert bool(features.any()) == bool(cells)


@pytest.mark.parametrize("mode", ["exact", "legacy"])
@pytest.mark.parametrize("shape", ["rotated", "circumscribed"])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_what_makes_no_box_is_zero_and_flagged(mode: Any, shape: Any, pool: Any) -> None:
    good = [10.0, 10, 4, 2, 0.3]
    bad = [
        [*good[:2], 0, 2, 0.3], [*good[:2], 4, 0, 0.3], [*good[:2], 0, 0, 0.3], [*good[:2], -4, 2, 0.3],
        *([*good[:i], value, *good[i + 1 :]] for i in range(5) for value in (np.nan, np.inf, -np.inf)),
    ]  # fmt: skip
    features, valid = crop(some_map(), np.array([good, *bad, good]), mode, shape, pool)
    assert valid.tolist() == [True, *[False] * len(bad), True]
    assert not features[1:-1].any()
    assert torch.equal(features[0], features[-1])


@pytest.mark.parametrize("mode", ["exact", "legacy"])
def test_sizes_up_to_the_largest_float_give_numbers(mode: Any) -> None:
    huge = [1e6, 1e18, 1e200, 1.7e308]
    boxes = np.array([[10, 10, a, b, rot] for a in huge for b in (1.0, *huge) for rot in (0.0, 0.3, 2.0)])
    far = np.array([[x, y, 3, 2, 0.3] for x in (-1e300, 1e18, 5.0) for y in (1e300, -1e18)])
    features, valid = crop(some_map(), np.concatenate([boxes, far]), mode)
    assert torch.isfinite(features).all()
    assert not valid[len(boxes) :].any()
    around = crop(some_map(), np.array([[10, 10, 1e6, 1e6, 0.3]]))[0]
    torch.testing.assert_close(around[0], some_map().mean((1, 2)), rtol=1e-4, atol=1e-5)


def test_legacy_off_the_map_takes_the_nearest_border_cells_and_says_so() -> None:
    bev = some_map()
    features, valid = crop(bev, np.array([[-6, 8.2, 3, 3, 0], [WIDTH + 6, 8.2, 3, 3, 0]], float), "legacy")
    assert not valid.any()
    torch.testing.assert_close(features, torch.stack([bev[:, 6:10, column].mean(1) for column in (0, WIDTH - 1)]))


def test_a_feature_does_not_depend_on_the_other_boxes() -> None:
    bev, boxes = some_map(), some_boxes(60)
    for mode in ("exact", "legacy"):
        together, valid = crop(bev, boxes, mode)
        for i in range(len(boxes)):
            alone, one = crop(bev, boxes[i : i + 1], mode)
            assert torch.equal(alone[0], together[i])
            assert one[0] == valid[i]


def test_no_boxes_and_no_cells_give_empty_and_zero_features() -> None:
    features, valid = crop(some_map(), np.zeros((0, 5)))
    assert (features.shape, features.dtype, valid.shape, valid.dtype) == ((0, 5), torch.float32, (0,), bool)
    features, valid = crop(some_map(), np.array([[-50.0, 0, 1, 1, 0]] * 3))
    assert (features.shape, features.any(), valid.any()) == ((3, 5), False, False)


def test_many_boxes_over_the_whole_map_are_pooled_in_parts() -> None:
    bev = some_map(2, 180, 180)
    boxes = np.array([[90, 90, 400, 400, 0.1 * i] for i in range(150)])
    cells, counts, _ = cells_under(boxes, 180, 180)
    assert counts.tolist() == [180 * 180] * 150
    assert len(cells) == 150 * 180 * 180
    features, _ = crop(bev, boxes)
    mean = bev.double().mean((1, 2))
    assert ((features - mean).norm(dim=1) / mean.norm()).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_maps_of_other_dtypes_are_pooled_in_float32(dtype: torch.dtype, pool: Any) -> None:
    bev, boxes = some_map().to(dtype), some_boxes(50)
    features, _ = crop(bev, boxes, pool=pool)
    assert features.dtype == torch.float32
    assert torch.equal(features, crop(bev.float(), boxes, pool=pool)[0])


def test_the_layout_of_the_map_changes_no_bit_and_the_map_is_left_alone() -> None:
    bev, boxes = some_map(), some_boxes()
    last = bev[None].contiguous(memory_format=torch.channels_last)[0]
    parts = torch.zeros(5, HEIGHT + 3, WIDTH + 3)
    parts[:, 2:-1, 1:-2] = bev
    for other in (last, parts[:, 2:-1, 1:-2]):
        assert not other.is_contiguous()
        for mode in ("exact", "legacy"):
            assert torch.equal(crop(bev, boxes, mode)[0], crop(other, boxes, mode)[0])
    assert torch.equal(bev, some_map())


def test_a_map_with_nan_under_a_box_is_an_error_that_names_the_box() -> None:
    bev = some_map()
    bev[2, 10, 10] = np.nan
    boxes = np.array([[3, 3, 2, 2, 0], [10, 10, 3, 3, 0]], float)
    with pytest.raises(InvalidValues, match="under box 1"):
        crop(bev, boxes)
    assert torch.isfinite(crop(bev, boxes[:1])[0]).all()
    large = torch.full_like(bev, 3e38)  # numbers whose sum is infinite are fine
    assert torch.equal(crop(large, boxes, pool="max")[0], large[:, :2, 0].T)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mode": "exakt"}, "mode is 'exakt'"), ({"shape": "round"}, "shape is 'round'"), ({"pool": "sum"}, "pool is"),
        ({"boxes": np.zeros((3, 7))}, r"boxes have shape \(3, 7\)"), ({"bev": torch.zeros(2, 3)}, "the map has shape"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        crop(**{"bev": some_map(), "boxes": some_boxes(2), **change})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", ["exact", "legacy"])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_a_gpu_gives_the_same_features_and_repeats_them(mode: Any, pool: Any) -> None:
    bev, boxes = some_map(512, 180, 180), some_boxes()
    here, valid = crop(bev, boxes, mode, pool=pool)
    there, valid_there = crop(bev.cuda(), boxes, mode, pool=pool)
    assert there.is_cuda
    assert np.array_equal(valid, valid_there)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)
    assert torch.equal(there, crop(bev.cuda(), boxes, mode, pool=pool)[0])

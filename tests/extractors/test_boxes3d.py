"""Box conventions against the definitions in words, and footprints that do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from extractors.boxes3d import (
    CLASSES,
    CONVENTIONS,
    bottom_from_centre,
    convert,
    corners,
    footprint,
    wrap,
)

NEW, OLD = CONVENTIONS


def some_boxes(dtype: type = np.float64) -> np.ndarray:
    rng = np.random.default_rng(3)
    boxes = rng.uniform([-50, -50, -3, 0.3, 0.3, 0.5, -np.pi, -9, -9], [50, 50, 2, 9, 3, 4, np.pi, 9, 9], (500, 9))
    boxes[:6, 6] = [-np.pi, -np.pi / 2, 0, np.pi / 2, np.nextafter(np.pi, 0), -1e-17]
    return boxes.astype(dtype)


def test_a_car_heading_along_x_has_these_rows_in_the_two_conventions() -> None:
    new = np.array([[10.0, 5.0, -1.0, 4.5, 1.8, 1.5, 0.0, 3.0, 0.5]])
    old = np.array([[10.0, 5.0, -1.0, 1.8, 4.5, 1.5, -np.pi / 2, 3.0, 0.5]])
    np.testing.assert_allclose(convert(new, NEW, OLD), old)
    np.testing.assert_allclose(convert(old, OLD, NEW), new, atol=1e-15)


def test_old_yaw_zero_heads_along_minus_y_and_grows_clockwise_seen_from_above() -> None:
    headings = footprint(np.array([[0, 0, 0, 2, 4, 1, yaw] for yaw in (0, np.pi / 2, -np.pi / 2, 0.3)], float), OLD)
    vectors = np.stack([np.cos(headings[:, 4]), np.sin(headings[:, 4])], 1)
    np.testing.assert_allclose(vectors[:3], [[0, -1], [-1, 0], [1, 0]], atol=1e-15)
    assert vectors[3, 0] < 0, "a little clockwise from -y is towards -x"
    np.testing.assert_array_equal(headings[:, 2:4], [[4, 2]] * 4)


def test_old_boxes_span_their_third_size_along_x_and_turn_by_minus_yaw() -> None:
    boxes = some_boxes()
    local = np.stack([boxes[:, 3, None] * [1, -1, -1, 1], boxes[:, 4, None] * [1, 1, -1, -1]], -1) / 2
    cos, sin = np.cos(-boxes[:, 6]), np.sin(-boxes[:, 6])
    expected = np.einsum("nij,nkj->nki", np.array([[cos, -sin], [sin, cos]]).transpose(2, 0, 1), local)
    expected += boxes[:, None, :2]
    ours = corners(boxes, OLD)[:, :4, :2]
    distance = np.linalg.norm(ours[:, :, None] - expected[:, None], axis=-1)
    assert distance.min(2).max() < 1e-12
    assert distance.min(1).max() < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("source", "target"), [(NEW, OLD), (OLD, NEW), (NEW, NEW), (OLD, OLD)])
def test_there_and_back_is_the_same_box_with_yaw_in_range(source: str, target: str, dtype: type) -> None:
    boxes = some_boxes(dtype)
    there = convert(boxes, source, target)
    back = convert(there, target, source)
    assert there.dtype == boxes.dtype
    for rows in (there, back):
        assert rows[:, 6].min() >= -dtype(np.pi)
        assert rows[:, 6].max() < dtype(np.pi)
    np.testing.assert_array_equal(np.delete(back, 6, 1), np.delete(boxes, 6, 1))
    turn = np.exp(1j * back[:, 6].astype(float)) / np.exp(1j * boxes[:, 6].astype(float))
    np.testing.assert_allclose(turn, 1, atol=4 * np.finfo(dtype).eps)


def test_footprints_and_corners_do_not_depend_on_the_convention() -> None:
    boxes = some_boxes()
    other = convert(boxes, OLD, NEW)
    np.testing.assert_allclose(footprint(boxes, OLD), footprint(other, NEW), atol=1e-14)
    np.testing.assert_allclose(corners(boxes, OLD), corners(other, NEW), atol=1e-13)


def test_columns_behind_the_seventh_and_the_input_stay_as_they_were() -> None:
    boxes = some_boxes()
    before = boxes.copy()
    np.testing.assert_array_equal(convert(boxes, NEW, OLD)[:, 7:], before[:, 7:])
    np.testing.assert_array_equal(boxes, before)


def test_corners_go_round_from_the_front_left_below_then_above() -> None:
    box = np.array([[1.0, 2.0, -1.0, 4.0, 2.0, 3.0, 0.0]])
    front_left_round = [[3, 3], [-1, 3], [-1, 1], [3, 1]]
    expected = [[*xy, z] for z in (-1, 2) for xy in front_left_round]
    np.testing.assert_allclose(corners(box, NEW)[0], expected)


def test_the_bottom_is_half_a_height_below_the_centre() -> None:
    boxes = some_boxes()
    bottom = bottom_from_centre(boxes)
    np.testing.assert_allclose(boxes[:, 2] - bottom[:, 2], boxes[:, 5] / 2)
    np.testing.assert_array_equal(np.delete(bottom, 2, 1), np.delete(boxes, 2, 1))


def test_no_boxes_are_fine() -> None:
    empty = np.empty((0, 9), np.float32)
    assert convert(empty, NEW, OLD).shape == (0, 9)
    assert footprint(empty, OLD).shape == (0, 5)
    assert corners(empty, OLD).shape == (0, 8, 3)


def test_wrapped_angles_lie_in_the_half_open_turn() -> None:
    angles = np.array([np.pi, -np.pi, 3 * np.pi, -1e-17, 7.0, -7.0, np.nextafter(-np.pi, -4)])
    wrapped = wrap(angles)
    assert ((wrapped >= -np.pi) & (wrapped < np.pi)).all()
    np.testing.assert_allclose(np.exp(1j * wrapped), np.exp(1j * angles), atol=1e-14)


@pytest.mark.parametrize(
    ("boxes", "convention", "expected"),
    [
        (np.zeros((2, 7)), "mmdet3d-2", "no box convention 'mmdet3d-2'; there are mmdet3d-1.0 and mmdet3d-0.x"),
        (np.zeros((2, 6)), NEW, r"shape \(2, 6\), expected floats \(n, 7 or more\)"),
        (np.zeros(7), NEW, "expected floats"),
        (np.zeros((2, 7), int), NEW, "boxes are int64"),
    ],
)
def test_wrong_boxes_and_conventions_are_named(boxes: np.ndarray, convention: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        convert(boxes, convention, OLD)


def test_classes_are_the_ten_of_the_detection_task_in_model_order() -> None:
    assert len(set(CLASSES)) == 10
    assert [CLASSES.index(n) for n in ("car", "truck", "construction_vehicle", "barrier", "traffic_cone")] == [
        0, 1, 2, 5, 9,
    ]  # fmt: skip

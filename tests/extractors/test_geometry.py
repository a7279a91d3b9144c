"""Rotations, situation poses and boxes, against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractors.errors import InvalidValues
from extractors.geometry import (
    box_corners,
    facing,
    matrix_to_quaternion,
    quaternion_to_matrix,
    situation_pose,
    transform,
)

quaternions = st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: np.linalg.norm(q) > 0.1)


def about_z(angle):
    return np.array([0, 0, np.sin(angle / 2), np.cos(angle / 2)])


def test_a_quarter_turn_about_z_takes_x_to_y():
    np.testing.assert_allclose(quaternion_to_matrix(about_z(np.pi / 2)) @ [1, 0, 0], [0, 1, 0], atol=1e-15)
    np.testing.assert_allclose(quaternion_to_matrix(np.array([1, 0, 0, 1])) @ [0, 1, 0], [0, 0, 1], atol=1e-15)


@given(quaternions)
def test_quaternions_survive_the_way_through_matrices(q):
    q = np.array(q) / np.linalg.norm(q)
    m = quaternion_to_matrix(q)
    np.testing.assert_allclose(m @ m.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(m) == pytest.approx(1)
    back = matrix_to_quaternion(m)
    assert back[np.argmax(abs(back))] > 0
    np.testing.assert_allclose(abs(back @ q), 1, atol=1e-12)


def test_many_quaternions_are_turned_at_once():
    many = np.stack([about_z(a) for a in (0, 1, 2)])
    np.testing.assert_allclose(quaternion_to_matrix(many)[2], quaternion_to_matrix(many[2]))


@pytest.mark.parametrize("q", [[0, 0, 0, 0], [0, 0, np.nan, 1], [np.inf, 0, 0, 1]])
def test_a_quaternion_without_direction_is_refused(q):
    with pytest.raises(InvalidValues):
        quaternion_to_matrix(np.array(q, float))


def test_no_rotation_faces_minus_x():
    np.testing.assert_allclose(facing(np.eye(3)), [-1, 0])
    np.testing.assert_allclose(facing(quaternion_to_matrix(about_z(np.pi / 2))), [0, -1], atol=1e-15)


def test_a_situation_goes_from_the_centred_to_the_scan_to_the_aligned_frame():
    pose = situation_pose(np.array([1, 2, 0]), about_z(np.pi / 2), np.array([10, 20, 1.5]))
    np.testing.assert_allclose(pose.position, [11, 22, 1.5])
    quarter = np.array([[0, -1, 0, 100], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    aligned = pose.aligned(quarter)
    np.testing.assert_allclose(aligned.position, [78, 11, 1.5])
    np.testing.assert_allclose(aligned.quaternion, about_z(np.pi), atol=1e-12)
    np.testing.assert_allclose(aligned.facing, [1, 0], atol=1e-12)


def test_transform_keeps_dtype_and_moves():
    points = np.array([[1, 0, 0]], np.float32)
    moved = transform(points, np.array([[0, -1, 0, 5], [1, 0, 0, 6], [0, 0, 1, 7], [0, 0, 0, 1.0]]))
    np.testing.assert_array_equal(moved, [[5, 7, 7]])
    assert moved.dtype == np.float32


def test_corners_are_in_scanqa_order():
    corners = box_corners(np.array([1, 2, 3, 2, 4, 6.0]))
    assert corners.tolist() == [
        [2, 4, 6], [2, 0, 6], [0, 0, 6], [0, 4, 6], [2, 4, 0], [2, 0, 0], [0, 0, 0], [0, 4, 0],
    ]  # fmt: skip
    assert box_corners(np.zeros((5, 6), np.float32)).shape == (5, 8, 3)

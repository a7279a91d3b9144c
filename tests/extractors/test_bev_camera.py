import numpy as np
import pytest

from extractors.bev_camera import BevCamera, centre_and_radius

BOX = np.array([[1, 2, 0], [5, 5, 2]], np.float32)  # a box of 4 x 3 x 2 m


def camera(**settings) -> BevCamera:
    return BevCamera(*centre_and_radius(BOX), **settings)


def test_radius_is_a_sixth_of_the_summed_extents_by_the_code():
    centre, radius = centre_and_radius(BOX, "code")
    np.testing.assert_array_equal(centre, [3, 3.5, 1])
    assert radius == pytest.approx((4 + 3 + 2) / 6)


def test_radius_of_the_sphere_reaches_the_farthest_vertex():
    xyz = np.array([[0, 0, 0], [4, 0, 0], [2, 3, 0], [2, -3, 0]], np.float32)
    centre, radius = centre_and_radius(xyz, "sphere")
    np.testing.assert_array_equal(centre, [2, 0, 0])
    assert radius == pytest.approx(3), "not the half diagonal of the box, 3.6"


def test_extents_are_not_rounded_far_from_the_origin():
    xyz = np.array([[4e6, 0, 0], [4e6 + 1, 1, 1]], np.float32)
    assert centre_and_radius(xyz)[1] == 0.5


def test_focal_length_is_2400_pixels_at_the_official_size():
    assert camera().focal_px == 2400


def test_longer_side_carries_the_sensor():
    assert camera(width=540, height=960).focal_px == 1200


def test_centre_is_in_the_middle_and_up_is_plus_y():
    view = camera()
    middle, right, up = view.project(view.centre + np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]]))
    np.testing.assert_allclose(middle, [960, 540])
    pixels_per_metre = 2400 / (7 * 1.5)
    np.testing.assert_allclose(right, [960 + pixels_per_metre, 540])
    np.testing.assert_allclose(up, [960, 540 - pixels_per_metre])


def test_what_is_higher_is_larger():
    view = camera()
    low, high = view.project(view.centre + np.array([[1, 0, -1], [1, 0, 1]]))
    assert high[0] > low[0] > 960


def test_points_behind_the_camera_have_no_pixel():
    view = camera()
    assert np.isnan(view.project(view.centre + view.location + [0.1, 0, 0.1])).all()


def test_projection_matrix_says_the_same_as_project():
    view = camera(width=640, height=480, lens_mm=30.0)
    xyz = np.random.default_rng(0).uniform(BOX[0], BOX[1], (50, 3))
    offset = xyz - view.centre - view.location
    clip = np.concatenate([offset, np.ones((50, 1))], 1) @ view.projection.T
    x, y, depth = (clip[:, :3] / clip[:, 3:]).T
    np.testing.assert_allclose(np.stack([(x + 1) / 2 * 640, (1 - y) / 2 * 480], 1), view.project(xyz), rtol=1e-12)
    assert (np.abs(depth) < 1).all(), "all between the clipping planes"

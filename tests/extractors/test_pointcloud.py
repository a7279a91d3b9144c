import numpy as np
import pytest

from extractors import pointcloud
from extractors.errors import EmptyInput, InvalidValues


def cube() -> tuple[np.ndarray, np.ndarray]:
    """A unit cube of 8 vertices and 12 triangles that face outwards."""
    xyz = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], np.float32)
    quads = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    faces = [t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))]
    return xyz, np.array(faces, np.int32)


def loop_normals(xyz: np.ndarray, faces: np.ndarray) -> np.ndarray:
    normals = np.zeros((len(xyz), 3))
    for face in faces:
        a, b, c = xyz[face].astype(float)
        normal = np.cross(b - a, c - a)
        for vertex in face:
            normals[vertex] += normal / (np.linalg.norm(normal) + 1e-8)
    return normals / (np.linalg.norm(normals, axis=1, keepdims=True) + 1e-8)


def test_exact_normals_sum_all_faces_around_a_vertex() -> None:
    xyz, faces = cube()
    normals = pointcloud.vertex_normals(xyz, faces)
    assert normals.dtype == np.float32
    np.testing.assert_allclose(normals, loop_normals(xyz, faces), atol=1e-6)
    assert ((normals * (xyz - 0.5)).sum(1) > 0.7).all()  # outwards


def test_legacy_normals_keep_the_last_face_of_each_corner_column() -> None:
    xyz = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    faces = np.array([[0, 1, 2], [0, 2, 3]], np.int32)  # vertex 0 is the first corner of both: the second face wins
    legacy = pointcloud.vertex_normals(xyz, faces, "legacy")
    np.testing.assert_allclose(legacy[0], [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(pointcloud.vertex_normals(xyz, faces)[0], np.array([1, 0, 1]) / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(legacy[2], np.array([1, 0, 1]) / 2**0.5, atol=1e-6)  # another column for each face


def test_a_vertex_that_is_not_finite_spoils_no_other_normal() -> None:
    xyz, faces = cube()
    xyz = np.append(xyz, [[np.nan, 0, 0]], 0).astype(np.float32)
    broken = np.append(faces, [[0, 1, 8]], 0)
    np.testing.assert_array_equal(pointcloud.vertex_normals(xyz, broken)[:8], pointcloud.vertex_normals(xyz[:8], faces))


def test_colours_are_centred_and_scaled() -> None:
    rgb = np.array([[109.8, 97.2, 83.8], [255, 0, 128]])
    np.testing.assert_allclose(
        pointcloud.normalise_colors(rgb), [[0, 0, 0], [145.2 / 256, -97.2 / 256, 44.2 / 256]], atol=1e-12
    )


def test_saturated_colours_are_where_repeated_normalisation_ends() -> None:
    rgb = np.random.RandomState(0).randint(0, 256, (50, 3)).astype(float)
    repeated = rgb
    for _ in range(8):
        repeated = pointcloud.normalise_colors(repeated)
    np.testing.assert_allclose(pointcloud.normalise_colors(rgb, "legacy_saturated"), repeated, atol=1e-9)
    np.testing.assert_allclose(repeated[0], [-0.430588, -0.381176, -0.328627], atol=1e-6)


def test_floor_is_the_percentile_below_one_percent() -> None:
    z = np.linspace(0, 10, 10001, dtype=np.float32)
    assert pointcloud.floor_height(z) == pytest.approx(0.099, abs=1e-5)
    assert pointcloud.floor_height(z, 99) == pytest.approx(9.9, abs=1e-5)


def test_points_repeat_only_where_there_are_too_few() -> None:
    enough = pointcloud.draw(np.random.RandomState(0), np.arange(100), 100)
    assert sorted(enough) == list(range(100))
    few = pointcloud.draw(np.random.RandomState(0), np.arange(5, 15), 1000)
    assert set(few) == set(range(5, 15))


def test_vertices_that_are_not_finite_are_left_out() -> None:
    xyz = np.zeros((20, 3), np.float32)
    xyz[[3, 7], [0, 2]] = [np.nan, np.inf]
    assert pointcloud.usable(xyz, "scan").tolist() == [i for i in range(20) if i not in (3, 7)]


@pytest.mark.parametrize(
    ("xyz", "error", "text"),
    [
        (np.zeros((0, 3), np.float32), EmptyInput, "lobby: the scan has no vertices"),
        (np.full((50, 3), np.nan, np.float32), InvalidValues, "lobby: 0 of 50 vertices"),
        (np.zeros((9, 3), np.float32), InvalidValues, "at least 10"),
        (np.full((50, 3), 4e5, np.float32), InvalidValues, "expected metres"),
    ],
)
def test_unusable_scans_are_named(xyz: np.ndarray, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pointcloud.usable(xyz, "lobby")

"""PLY files of every dialect give the same scan; damaged ones give errors that name them."""

import numpy as np
import plyfile
import pytest

from extractors.errors import EmptyInput, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from pipelines.sources.ply import read_ply, write_ply

XYZ = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.5], [2, 2, 2]], np.float32)
RGB = np.arange(15, dtype=np.uint8).reshape(5, 3) * 17
TRIANGLES = np.array([[0, 1, 2], [0, 2, 3], [1, 2, 4]], np.int32)


def elements(
    faces=((0, 1, 2), (0, 2, 3), (1, 2, 4)), *, colors=True, xyz_type="f4", extra=False, index_name="vertex_indices"
):
    fields = [("x", xyz_type), ("y", xyz_type), ("z", xyz_type)]
    if colors:
        fields += [("red", "u1"), ("green", "u1"), ("blue", "u1"), ("alpha", "u1")]
    if extra:
        fields = [("quality", "f8"), *fields, ("label", "i4")]
    vertex = np.zeros(len(XYZ), fields)
    for i in range(3):
        vertex["xyz"[i]] = XYZ[:, i]
        if colors:
            vertex[("red", "green", "blue")[i]] = RGB[:, i]
    face = np.empty(len(faces), [(index_name, object), *([("kind", "u1")] if extra else [])])
    for i, polygon in enumerate(faces):
        face[index_name][i] = np.array(polygon, np.int32)
    return [plyfile.PlyElement.describe(vertex, "vertex"), plyfile.PlyElement.describe(face, "face")]


def save(path, parts, **how):
    plyfile.PlyData(parts, **how).write(str(path))
    return path


DIALECTS = {
    "little": {"byte_order": "<"},
    "big": {"byte_order": ">"},
    "ascii": {"text": True},
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", [{}, {"extra": True}, {"xyz_type": "f8"}, {"index_name": "vertex_index"}])
def test_every_dialect_gives_the_same_mesh(tmp_path, dialect, shape):
    scan = read_ply(save(tmp_path / "a.ply", elements(**shape), **DIALECTS[dialect]))
    np.testing.assert_array_equal(scan.xyz, XYZ)
    np.testing.assert_array_equal(scan.rgb, RGB)
    np.testing.assert_array_equal(scan.faces, TRIANGLES)
    assert (scan.xyz.dtype, scan.rgb.dtype, scan.faces.dtype) == (np.float32, np.uint8, np.int32)
    assert scan.frame == "scan"
    assert scan.axis_align is None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_polygons_become_fans(tmp_path, dialect):
    scan = read_ply(save(tmp_path / "a.ply", elements([[0, 1, 2, 3], [1, 2], [2, 3, 4]]), **DIALECTS[dialect]))
    assert scan.faces.tolist() == [[0, 1, 2], [0, 2, 3], [2, 3, 4]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_zero_faces_and_no_colours_are_told_apart_from_errors(tmp_path, dialect):
    scan = read_ply(save(tmp_path / "a.ply", elements([], colors=False), **DIALECTS[dialect]))
    assert scan.rgb is None
    assert scan.faces.shape == (0, 3)
    np.testing.assert_array_equal(scan.xyz, XYZ)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_file_without_a_face_element_is_a_point_cloud(tmp_path, dialect):
    scan = read_ply(save(tmp_path / "a.ply", elements()[:1], **DIALECTS[dialect]))
    assert scan.faces.shape == (0, 3)
    np.testing.assert_array_equal(scan.rgb, RGB)


def test_what_is_written_is_read_back_in_the_official_dialect(tmp_path):
    write_ply(tmp_path / "a.ply", XYZ, RGB, TRIANGLES)
    scan = read_ply(tmp_path / "a.ply", axis_align=np.eye(4))
    np.testing.assert_array_equal(scan.xyz, XYZ)
    np.testing.assert_array_equal(scan.rgb, RGB)
    np.testing.assert_array_equal(scan.faces, TRIANGLES)
    np.testing.assert_array_equal(scan.axis_align, np.eye(4))
    official = plyfile.PlyData.read(str(tmp_path / "a.ply"))
    assert [p.name for p in official["vertex"].properties] == ["x", "y", "z", "red", "green", "blue", "alpha"]
    np.testing.assert_array_equal(np.stack(official["face"]["vertex_indices"]), TRIANGLES)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nan_vertices_are_kept(tmp_path, dialect):
    parts = elements()
    parts[0].data["y"][2] = np.nan
    scan = read_ply(save(tmp_path / "a.ply", parts, **DIALECTS[dialect]))
    assert np.isnan(scan.xyz[2, 1])
    assert np.isfinite(scan.xyz).sum() == 14


@pytest.mark.parametrize(("dtype", "scale"), [("f4", 1 / 255), ("f4", 1), ("u2", 257)])
def test_colours_of_other_types_become_bytes(tmp_path, dtype, scale):
    vertex = np.zeros(5, [(n, "f4") for n in "xyz"] + [(n, dtype) for n in ("red", "green", "blue")])
    for i, name in enumerate(("red", "green", "blue")):
        vertex[name] = RGB[:, i] * scale
    scan = read_ply(save(tmp_path / "a.ply", [plyfile.PlyElement.describe(vertex, "vertex")]))
    np.testing.assert_array_equal(scan.rgb, RGB)


def test_normals_are_read(tmp_path):
    vertex = np.zeros(5, [(n, "f4") for n in ("x", "y", "z", "nx", "ny", "nz")])
    vertex["nz"] = 1
    scan = read_ply(save(tmp_path / "a.ply", [plyfile.PlyElement.describe(vertex, "vertex")]))
    np.testing.assert_array_equal(scan.normals, [[0, 0, 1]] * 5)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("faces", [TRIANGLES.tolist(), [[0, 1, 2, 3], [2, 3, 4]]])
def test_a_file_cut_anywhere_behind_its_first_line_is_called_truncated(tmp_path, dialect, faces):
    data = save(tmp_path / "a.ply", elements(faces), **DIALECTS[dialect]).read_bytes()
    body = data.index(b"end_header") + len(b"end_header\n")
    for cut in [20, body - 12, body, body + 5, body + 40, len(data) - 30, len(data) - 3]:
        (tmp_path / "cut.ply").write_bytes(data[:cut])
        with pytest.raises(TruncatedFile, match=r"cut\.ply"):
            read_ply(tmp_path / "cut.ply")


def test_missing_empty_and_foreign_files_have_their_own_errors(tmp_path):
    with pytest.raises(MissingFile, match=r"a\.ply: no such file"):
        read_ply(tmp_path / "a.ply")
    (tmp_path / "a.ply").touch()
    with pytest.raises(EmptyInput, match="zero bytes"):
        read_ply(tmp_path / "a.ply")
    for data in (b"solid cube\n", b"\x00" * 200, b"\x89PNG\r\n\x1a\n" + bytes(100)):
        (tmp_path / "a.ply").write_bytes(data)
        with pytest.raises(UnsupportedFile, match="not a PLY file"):
            read_ply(tmp_path / "a.ply")
    (tmp_path / "a.ply").write_bytes(b"ply\nformat ascii 1.0\nelement vertex many\nend_header\n")
    with pytest.raises(UnsupportedFile, match="element vertex many"):
        read_ply(tmp_path / "a.ply")


def test_no_vertices_is_empty_input(tmp_path):
    with pytest.raises(EmptyInput, match="no vertices"):
        read_ply(save(tmp_path / "a.ply", [plyfile.PlyElement.describe(elements()[0].data[:0], "vertex")]))


def test_vertices_without_coordinates_are_refused(tmp_path):
    vertex = np.zeros(5, [("x", "f4"), ("y", "f4")])
    with pytest.raises(UnsupportedFile, match="need x, y, z"):
        read_ply(save(tmp_path / "a.ply", [plyfile.PlyElement.describe(vertex, "vertex")]))


@pytest.mark.parametrize("element", ["nothing 5", "nothing 0"])
def test_an_element_without_properties_takes_no_room(tmp_path, element):
    data = save(tmp_path / "a.ply", elements(), byte_order="<").read_bytes()
    for place in (b"element vertex", b"element face"):
        (tmp_path / "b.ply").write_bytes(data.replace(place, f"element {element}\n".encode() + place))
        np.testing.assert_array_equal(read_ply(tmp_path / "b.ply").faces, TRIANGLES)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("which", ["vertex 5", "face 3"])
def test_more_rows_than_a_file_can_hold_are_refused_before_room_is_made_for_them(tmp_path, dialect, which):
    data = save(tmp_path / "a.ply", elements(), **DIALECTS[dialect]).read_bytes()
    (tmp_path / "b.ply").write_bytes(data.replace(which.encode(), f"{which[:-1]}{10**12}".encode()))
    with pytest.raises((TruncatedFile, UnsupportedFile), match=r"b\.ply: .* rows"):  # text: faces stand in their place
        read_ply(tmp_path / "b.ply")


@pytest.mark.parametrize("index", [-1, 5])
def test_a_face_of_vertices_that_are_not_there_is_refused(tmp_path, index):
    with pytest.raises(InvalidValues, match="there are 5"):
        read_ply(save(tmp_path / "a.ply", elements([[0, 1, index]])))


def test_windows_line_ends_and_blank_lines_are_read(tmp_path):
    text = "ply\r\nformat ascii 1.0\r\ncomment a b\r\nelement vertex 2\r\nproperty float x\r\nproperty float y\r\n"
    (tmp_path / "a.ply").write_bytes((text + "property float z\r\nend_header\r\n1 2 3\r\n\r\n4 5 6\r\n").encode())
    assert read_ply(tmp_path / "a.ply").xyz.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("name", "vertices", "faces"),
    [("cube_blender_uv", 24, 12), ("fuze_ascii", 502, 1000), ("metadata", 4, 2), ("points_bin", 5, 0),
     ("points_emptyface", 1024, 0)],
)  # fmt: skip
def test_files_of_other_programs_are_read(data_dir, name, vertices, faces):
    scan = read_ply(data_dir / "meshes" / f"{name}.ply")
    assert (len(scan.xyz), len(scan.faces)) == (vertices, faces)
    assert np.isfinite(scan.xyz).all()

"""Loose files become items, whatever their names."""

import numpy as np
import pytest

from extractors.errors import MissingFile, TruncatedFile, UnsupportedFile
from pipelines.sources.folder import Folder
from pipelines.sources.ply import write_ply

XYZ = np.eye(3, dtype=np.float32)
LONG = "x" * 120 + "/" + "y" * 120 + "/" + "z" * 80


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_the_key_is_the_path_without_suffix(tmp_path):
    for name in ("a.ply", "b/c d.mp4", "b/ünï.MOV", "b/e.sens", f"{LONG}.avi", "notes.txt", ".hidden.mp4"):
        touch(tmp_path / name)
    assert Folder(tmp_path).keys() == sorted(["a", "b/c d", "b/ünï", "b/e", LONG])
    assert Folder(tmp_path).open("b/ünï", "clip").kind == "video"
    assert Folder(tmp_path).open("b/e", "clip").kind == "sens"


def test_a_mesh_and_a_video_of_one_name_are_one_item(tmp_path):
    write_ply(tmp_path / "a.ply", XYZ, np.zeros((3, 3), np.uint8), np.array([[0, 1, 2]]))
    touch(tmp_path / "a.mp4")
    touch(tmp_path / "only.mp4")
    source = Folder(tmp_path)
    assert source.keys() == ["a", "only"]
    np.testing.assert_array_equal(source.open("a", "scan").xyz, XYZ)
    assert source.open("a", "clip").path == tmp_path / "a.mp4"
    assert source.files("only", "scan") == []
    with pytest.raises(MissingFile, match="has no scan"):
        source.open("only", "scan")


def test_two_inputs_of_one_kind_keep_their_suffixes(tmp_path):
    for name in ("a.mp4", "a.mov", "b.mp4"):
        touch(tmp_path / name)
    source = Folder(tmp_path)
    assert source.keys() == ["a.mov", "a.mp4", "b"]
    assert {source.open(k, "clip").path.name for k in source.keys()} == {"a.mp4", "a.mov", "b.mp4"}  # noqa: SIM118


def test_a_folder_of_jpegs_is_a_clip(tmp_path):
    for i in range(3):
        touch(tmp_path / "walk" / "color" / f"frame-{i:06d}.color.jpg")
    source = Folder(tmp_path)
    assert source.keys() == ["walk/color"]
    clip = source.open("walk/color", "clip")
    assert (clip.kind, clip.path) == ("folder", tmp_path / "walk/color")
    assert Folder(tmp_path / "walk/color").keys() == ["color"]


def test_a_video_beside_the_folder_of_its_frames_does_not_take_its_place(tmp_path):
    touch(tmp_path / "walk" / "1.jpg")
    touch(tmp_path / "walk.mp4")
    source = Folder(tmp_path)
    assert source.keys() == ["walk", "walk.mp4"]
    assert [source.open(k, "clip").kind for k in ("walk", "walk.mp4")] == ["folder", "video"]


def test_a_pattern_chooses(tmp_path):
    for name in ("a.mp4", "b.ply", "c/d.mp4"):
        touch(tmp_path / name)
    assert Folder(tmp_path, match="*.mp4").keys() == ["a", "c/d"]
    assert Folder(tmp_path, match="c/*").keys() == ["c/d"]


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(MissingFile, match="no file matches"):
        Folder(tmp_path).keys()
    with pytest.raises(MissingFile, match="no such folder"):
        Folder(tmp_path / "no").keys()


@pytest.mark.parametrize(
    ("array", "error"),
    [(np.zeros((4, 5)), UnsupportedFile), (np.array(["a", "b"]), UnsupportedFile), (np.array([{}]), UnsupportedFile)],
    ids=["five columns", "text", "pickled objects"],
)
def test_arrays_that_are_no_points_are_refused(tmp_path, array, error):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(error, match=r"a\.npy"):
        Folder(tmp_path).open("a", "scan")


def test_a_truncated_array_is_called_so(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((100, 6)))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-100])
    with pytest.raises(TruncatedFile, match=r"a\.npy"):
        Folder(tmp_path).open("a", "scan")

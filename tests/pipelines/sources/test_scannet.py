"""The ScanNet source: three layouts, splits, alignment, annotation, and files that are not as they should be."""

import json
import os
import pickle

import numpy as np
import pytest

from extractors.errors import EmptyInput, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from pipelines.sources.ply import write_ply
from pipelines.sources.scannet import ScanNet, read_axis_alignment

XYZ = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
RGB = np.arange(60, dtype=np.uint8).reshape(20, 3)
FACES = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
ALIGN = np.array([[0, -1, 0, 0.5], [1, 0, 0, -2], [0, 0, 1, 0.25], [0, 0, 0, 1]])


def add_scene(root, scene, *, align=True, base="scans"):
    folder = root / base / scene
    folder.mkdir(parents=True)
    write_ply(folder / f"{scene}_vh_clean_2.ply", XYZ, RGB, FACES)
    numbers = " ".join(map(str, ALIGN.ravel()))
    (folder / f"{scene}.txt").write_text(
        (f"axisAlignment = {numbers} \n" if align else "") + "colorHeight = 968\nsceneType = Living room / Lounge\n"
    )
    (folder / f"{scene}_vh_clean_2.0.010000.segs.json").write_text(json.dumps({"segIndices": [7] * 10 + [9] * 10}))
    groups = [{"id": 0, "objectId": 0, "segments": [7], "label": "office chair"}]
    (folder / f"{scene}.aggregation.json").write_text(json.dumps({"segGroups": groups}))
    return folder


@pytest.fixture
def root(tmp_path):
    for scene in ("scene0000_00", "scene0000_01", "scene0011_00"):
        add_scene(tmp_path, scene)
    add_scene(tmp_path, "scene0707_00", align=False, base="scans_test")
    (tmp_path / "scannetv2_train.txt").write_text("scene0000_00\nscene0000_01\nscene0999_00\n")
    (tmp_path / "scannetv2_val.txt").write_text("scene0011_00\r\n")
    (tmp_path / "scannetv2-labels.combined.tsv").write_bytes(
        b"id\traw_category\tcategory\tcount\tnyu40id\r\n1\toffice chair\tchair\t9\t5\r\n2\todd\todd\t1\t\r\n"
    )
    return tmp_path


def test_every_scene_is_an_item(root):
    assert ScanNet(root).keys() == ["scene0000_00", "scene0000_01", "scene0011_00", "scene0707_00"]


def test_a_root_of_bare_scene_folders_is_read(root):
    assert ScanNet(root / "scans").keys() == ["scene0000_00", "scene0000_01", "scene0011_00"]


def test_splits_come_from_the_list_files(root):
    assert ScanNet(root, split="train").keys() == ["scene0000_00", "scene0000_01"]
    assert ScanNet(root, split="val").keys() == ["scene0011_00"]
    (root / "mine.txt").write_text("scene0011_00")
    assert ScanNet(root, split=str(root / "mine.txt")).keys() == ["scene0011_00"]
    with pytest.raises(MissingFile, match=r"scannetv2_test\.txt"):
        ScanNet(root, split="test").keys()
    with pytest.raises(MissingFile, match=r"lists/mine.txt: no such list; give train, val, test"):
        ScanNet(root, split="lists/mine.txt").keys()


def test_a_scene_that_was_asked_for_and_is_absent_fails_by_name(root):
    source = ScanNet(root, scenes=("scene0000_00", "scene0500_00"))
    assert source.keys() == ["scene0000_00", "scene0500_00"]
    with pytest.raises(MissingFile, match=r"scene0500_00_vh_clean_2\.ply"):
        source.open("scene0500_00", "scan")


def test_a_mesh_comes_with_its_alignment_in_the_raw_frame(root):
    scan = ScanNet(root).open("scene0000_00", "scan")
    np.testing.assert_array_equal(scan.xyz, XYZ)
    np.testing.assert_array_equal(scan.axis_align, ALIGN)
    assert scan.frame == "scan"
    assert ScanNet(root).open("scene0707_00", "scan").axis_align is None


def test_files_are_those_that_are_read(root):
    source = ScanNet(root)
    assert [p.name for p in source.files("scene0000_00", "scan")] == ["scene0000_00_vh_clean_2.ply", "scene0000_00.txt"]
    assert [p.name for p in source.files("scene0000_00", "clip")] == ["scene0000_00.sens"]
    assert [p.name for p in source.files("scene0000_00", "labels")] == [
        "scene0000_00_vh_clean_2.0.010000.segs.json", "scene0000_00.aggregation.json", "scannetv2-labels.combined.tsv",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="scan, clip, labels"):
        source.files("scene0000_00", "mesh")


def test_a_missing_recording_says_what_to_do(root):
    with pytest.raises(MissingFile, match=r"download the \.sens"):
        ScanNet(root).open("scene0000_00", "clip")


def test_labels_are_read_with_either_line_end(root):
    labels = ScanNet(root).open("scene0000_00", "labels")
    assert labels.segment.tolist() == [7] * 10 + [9] * 10
    assert [(g.object_id, g.label, g.segments.tolist()) for g in labels.groups] == [(0, "office chair", [7])]
    assert labels.nyu40 == {"office chair": 5}


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [("aggregation", "", EmptyInput), ("aggregation", '{"segGroups": [{"id": 0, "obj', TruncatedFile),
     ("aggregation", "{}", UnsupportedFile), ("aggregation", "hello", UnsupportedFile)],
)  # fmt: skip
def test_a_damaged_annotation_is_named(root, name, text, error):
    (root / "scans" / "scene0000_00" / f"scene0000_00.{name}.json").write_text(text)
    with pytest.raises(error, match=r"scene0000_00\.aggregation\.json"):
        ScanNet(root).open("scene0000_00", "labels")


@pytest.mark.parametrize("numbers", ["1 0 0", "nan " * 16, "0 " * 16, "2 0 0 0 0 2 0 0 0 0 2 0 0 0 0 1"])
def test_a_damaged_alignment_is_named(tmp_path, numbers):
    (tmp_path / "s.txt").write_text(f"axisAlignment = {numbers}\n")
    with pytest.raises(InvalidValues, match=r"s\.txt: axisAlignment"):
        read_axis_alignment(tmp_path / "s.txt")


def test_arrays_of_scanqa_are_read_in_their_own_frame(tmp_path):
    (tmp_path / "scannet_data").mkdir()
    table = np.concatenate([XYZ, RGB, np.ones((20, 3))], axis=1).astype(np.float32)
    np.save(tmp_path / "scannet_data" / "scene0000_00_aligned_vert.npy", table)
    np.save(tmp_path / "scannet_data" / "scene0001_00_vert.npy", table)
    source = ScanNet(tmp_path)
    assert source.keys() == ["scene0000_00", "scene0001_00"]
    aligned, raw = source.open("scene0000_00", "scan"), source.open("scene0001_00", "scan")
    assert (aligned.frame, raw.frame) == ("aligned", "scan")
    np.testing.assert_array_equal(aligned.xyz, XYZ)
    np.testing.assert_array_equal(aligned.rgb, RGB)
    np.testing.assert_array_equal(aligned.normals, np.ones((20, 3)))
    assert source.files("scene0000_00", "clip") == []


@pytest.mark.parametrize("old", [False, True])
def test_points_of_mmdetection3d_are_read_with_the_alignment_of_their_infos(tmp_path, old):
    (tmp_path / "points").mkdir()
    np.concatenate([XYZ, RGB], axis=1).astype("<f4").tofile(tmp_path / "points" / "scene0000_00.bin")
    if old:
        infos = [{"point_cloud": {"lidar_idx": "scene0000_00"}, "annos": {"gt_num": 0, "axis_align_matrix": ALIGN}}]
    else:
        lidar = {"lidar_path": "scene0000_00.bin"}
        infos = {"metainfo": {}, "data_list": [{"lidar_points": lidar, "axis_align_matrix": ALIGN.tolist()}]}
    (tmp_path / "scannet_infos_val.pkl").write_bytes(pickle.dumps(infos))
    scan = ScanNet(tmp_path).open("scene0000_00", "scan")
    np.testing.assert_array_equal(scan.xyz, XYZ)
    np.testing.assert_array_equal(scan.rgb, RGB)
    np.testing.assert_array_equal(scan.axis_align, ALIGN)
    assert scan.faces.shape == (0, 3)


def test_shared_files_are_read_again_when_they_change_whatever_their_time(root, tmp_path):
    def rewrite(path, content):
        before = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    table = root / "scannetv2-labels.combined.tsv"
    known = ScanNet(root).open("scene0000_00", "labels").nyu40
    label, number = next(iter(known.items()))
    other = 9 if number != 9 else 8
    lines = table.read_text().splitlines()
    cells = lines[1].split("\t")
    assert cells[1] == label
    cells[4] = str(other)
    rewrite(table, "\n".join([lines[0], "\t".join(cells), *lines[2:]]).encode())
    assert ScanNet(root).open("scene0000_00", "labels").nyu40[label] == other

    points, infos = tmp_path / "mmdet3d", tmp_path / "mmdet3d" / "scannet_infos_val.pkl"
    points.mkdir()
    np.zeros((4, 6), "<f4").tofile(points / "scene0000_00.bin")
    for shift in (1.0, 2.0):
        align = np.array(ALIGN, np.float64)
        align[0, 3] = shift
        entry = {"point_cloud": {"lidar_idx": "scene0000_00"}, "annos": {"axis_align_matrix": align}}
        if infos.exists():
            rewrite(infos, pickle.dumps([entry]))
        else:
            infos.write_bytes(pickle.dumps([entry]))
        assert ScanNet(points).open("scene0000_00", "scan").axis_align[0, 3] == shift


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scannetv2-labels.combined.tsv", b"raw_category\tnyu40id\nchair\tfive\n"),
        ("scannetv2-labels.combined.tsv", b"raw_category\tnyu40id\nch\xff\xfeair\t5\n"),
        ("scans/scene0000_00/scene0000_00_vh_clean_2.0.010000.segs.json", b'{"segIndices": ["seven", 7]}'),
        ("scans/scene0000_00/scene0000_00.aggregation.json",
         b'{"segGroups": [{"objectId": "x", "label": "chair", "segments": [7]}]}'),
        ("scans/scene0000_00/scene0000_00.aggregation.json",
         b'{"segGroups": [{"objectId": 0, "label": "chair", "segments": [1e99]}]}'),
    ],
)  # fmt: skip
def test_an_annotation_of_other_values_is_named(root, name, content):
    (root / name).write_bytes(content)
    with pytest.raises(UnsupportedFile, match=name.rpartition("/")[2].replace(".", r"\.")):
        ScanNet(root).open("scene0000_00", "labels")


@pytest.mark.parametrize(
    "infos",
    [
        {"data_list": [{"lidar_path": "scene0000_00.bin"}]},
        {"metainfo": {}},
        [{"annos": {}}],
        [3],
        3,
        [{"point_cloud": {"lidar_idx": 5}}],
    ],
)
def test_an_info_pickle_of_another_dataset_is_named(tmp_path, infos):
    np.zeros((4, 6), "<f4").tofile(tmp_path / "scene0000_00.bin")
    (tmp_path / "scannet_infos.pkl").write_bytes(pickle.dumps(infos))
    with pytest.raises(UnsupportedFile, match=r"scannet_infos\.pkl: not mmdetection3d's infos of ScanNet"):
        ScanNet(tmp_path).open("scene0000_00", "scan")


class Trap:
    ran = False

    def __reduce__(self):
        return setattr, (Trap, "ran", True)


def test_code_in_an_info_pickle_is_refused_and_not_run(tmp_path):
    np.zeros((4, 6), "<f4").tofile(tmp_path / "scene0000_00.bin")
    (tmp_path / "scannet_infos.pkl").write_bytes(pickle.dumps([Trap()]))
    with pytest.raises(UnsupportedFile, match=r"builtins\.setattr"):
        ScanNet(tmp_path).open("scene0000_00", "scan")
    assert not Trap.ran


@pytest.mark.parametrize(
    ("data", "error"), [(b"", EmptyInput), (bytes(25), TruncatedFile)], ids=["no bytes", "part of a point"]
)
def test_damaged_point_files_are_named(tmp_path, data, error):
    (tmp_path / "scene0000_00.bin").write_bytes(data)
    with pytest.raises(error, match=r"scene0000_00\.bin"):
        ScanNet(tmp_path).open("scene0000_00", "scan")


def test_a_root_that_is_not_there_or_not_scannet_says_what_was_expected(tmp_path):
    with pytest.raises(MissingFile, match="no such folder"):
        ScanNet(tmp_path / "no").keys()
    with pytest.raises(MissingFile, match="SCENE_vh_clean_2"):
        ScanNet(tmp_path).keys()


def test_a_source_travels_to_workers(root):
    source = ScanNet(root)
    source.keys()
    assert pickle.loads(pickle.dumps(source)).keys() == source.keys()


def test_the_real_scan_is_read_with_its_alignment(data_dir):
    scan = ScanNet(data_dir / "scannet").open("scene0000_00", "scan")
    assert scan.xyz.shape == (40_684, 3)
    assert np.isfinite(scan.xyz).all()
    np.testing.assert_allclose(scan.axis_align[0], [0.945519, 0.325568, 0, -5.38439])
    aligned = scan.xyz @ scan.axis_align[:3, :3].T + scan.axis_align[:3, 3]
    assert abs(np.median(aligned, axis=0)[:2]).max() < 2.5  # the aligned room lies around the origin

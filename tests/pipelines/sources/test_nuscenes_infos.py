"""The nuScenes source on info pickles: every generation against the tables, and what is wrong by name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.boxes3d import CLASSES
from extractors.errors import InvalidValues, UnsupportedFile
from pipelines.inputs import missing_files
from pipelines.sources.nuscenes import NuScenes
from tests.pipelines import small_nuscenes
from tests.pipelines.small_nuscenes import token, write_pickle
from tests.pipelines.sources.small_drive import KEY, keys_of


@pytest.mark.parametrize("generation", ["0.x", "1.0", "1.1", "BEVDet"])
def test_infos_of_every_generation_give_what_the_tables_give(
    drive: Path, own_drive: Path, nusc: Any, infos: dict[str, Any], generation: str
) -> None:
    data, dialect, sharp = {
        "0.x": (small_nuscenes.old_infos(nusc, old_boxes=True), "infos before 1.1, boxes as in mmdet3d-0.x", True),
        "1.0": (infos, "mmdetection3d infos before 1.1, boxes as in mmdet3d-1.0", True),
        "1.1": (small_nuscenes.new_infos(infos), "mmdetection3d infos 1.1, boxes as in mmdet3d-1.0", False),
        "BEVDet": (_bevdet(infos), "BEVDet infos, boxes as in mmdet3d-1.0", True),
    }[generation]
    write_pickle(own_drive / "infos.pkl", data)
    tables, source = NuScenes(drive), NuScenes(own_drive, "infos.pkl")
    assert dialect in source.dialect
    assert source.keys() == tables.keys()
    tolerance = 1e-9 if sharp else 1e-6
    for key in keys_of(tables):
        ours, theirs = source.open(key, "lidar"), tables.open(key, "lidar")
        assert len(ours.before) == len(theirs.before)
        for one, other in zip((ours.key, *ours.before), (theirs.key, *theirs.before), strict=True):
            np.testing.assert_array_equal(one.points, other.points)
            np.testing.assert_allclose(one.to_key, other.to_key, atol=tolerance)
            assert one.lag == other.lag
        np.testing.assert_allclose(ours.to_ego, theirs.to_ego, atol=tolerance)
        for view, same in zip(source.open(key, "cameras").views, tables.open(key, "cameras").views, strict=True):
            assert (view.name, view.path.name) == (same.name, same.path.name)
            np.testing.assert_allclose(view.to_lidar, same.to_lidar, atol=tolerance)
            np.testing.assert_allclose(view.to_ego, same.to_ego, atol=tolerance)
            np.testing.assert_array_equal(view.intrinsic, same.intrinsic)
        found, known = source.open(key, "annotations"), tables.open(key, "annotations")
        np.testing.assert_allclose(found.boxes, known.boxes, atol=1e-8)
        np.testing.assert_allclose(found.velocity, known.velocity, rtol=1e-5, atol=1e-9)
        assert found.names == known.names
        np.testing.assert_array_equal(found.lidar_points, known.lidar_points)
        np.testing.assert_array_equal(found.radar_points, known.radar_points)
        if sharp:  # to the last bit: changing from tables to pickles runs nothing again
            assert source.facts(key, "lidar") == tables.facts(key, "lidar")
            assert source.facts(key, "cameras") == tables.facts(key, "cameras")


def test_classes_of_new_infos_go_by_name_not_by_number(own_drive: Path, infos: dict[str, Any]) -> None:
    data = small_nuscenes.new_infos(infos)
    order = {name: 9 - number for name, number in data["metainfo"]["categories"].items()}
    shuffled = pickle.loads(pickle.dumps(data))
    shuffled["metainfo"]["categories"] = order
    for sample in shuffled["data_list"]:
        for one in sample["instances"]:
            one["bbox_label_3d"] = 9 - one["bbox_label_3d"] if one["bbox_label_3d"] >= 0 else -1
    for name, content in (("a.pkl", data), ("b.pkl", shuffled)):
        write_pickle(own_drive / name, content)
    key = token("sample", "scene-0061", 0)
    first, second = (NuScenes(own_drive, name).open(key, "annotations") for name in ("a.pkl", "b.pkl"))
    assert first.names == second.names
    assert {"car", "bus", "pedestrian", "barrier", ""} == set(first.names) <= {*CLASSES, ""}


def test_files_converted_with_wrong_translations_are_refused_by_name(own_drive: Path, infos: dict[str, Any]) -> None:
    write_pickle(own_drive / "wrong.pkl", small_nuscenes.new_infos(infos, wrong_translation=True))
    source = NuScenes(own_drive, "wrong.pkl")
    with pytest.raises(UnsupportedFile, match=rf"sample {KEY}: .*lidar2cam of CAM_.* moves the car by .*PR 2110"):
        source.open(KEY, "cameras")


def test_sweeps_of_wrongly_converted_files_come_from_their_poses(
    drive: Path, own_drive: Path, infos: dict[str, Any]
) -> None:
    wrong, right = (small_nuscenes.new_infos(infos, wrong_translation=wrong) for wrong in (True, False))
    for sample, good in zip(wrong["data_list"], right["data_list"], strict=True):
        sample["images"] = good["images"]
    write_pickle(own_drive / "half.pkl", wrong)
    ours, theirs = NuScenes(own_drive, "half.pkl").open(KEY, "lidar"), NuScenes(drive).open(KEY, "lidar")
    assert len(ours.before) == 10
    for one, other in zip(ours.before, theirs.before, strict=True):
        np.testing.assert_allclose(one.to_key, other.to_key, atol=2e-3)  # through world coordinates in float32


def test_mirrored_calibration_is_refused_by_name(own_drive: Path, infos: dict[str, Any]) -> None:
    data = small_nuscenes.new_infos(infos)
    sample = next(sample for sample in data["data_list"] if sample["token"] == KEY)
    sample["images"]["CAM_BACK"]["cam2img"][0][0] *= -1
    write_pickle(own_drive / "mirrored.pkl", data)
    with pytest.raises(InvalidValues, match=f"sample {KEY}: CAM_BACK: .*no camera matrix"):
        NuScenes(own_drive, "mirrored.pkl").open(KEY, "cameras")
    sample["images"]["CAM_BACK"]["cam2img"][0][0] *= -1
    for pose in ("lidar2cam", "cam2ego"):
        sample["images"]["CAM_BACK"][pose] = (np.array(sample["images"]["CAM_BACK"][pose]) * [-1, 1, 1, 1]).tolist()
    write_pickle(own_drive / "mirrored.pkl", data)
    source = NuScenes(own_drive, "mirrored.pkl")
    with pytest.raises(InvalidValues, match=f"sample {KEY}: CAM_BACK: .*no rotation"):
        source.open(KEY, "cameras")
    other = next(key for key in keys_of(source) if key != KEY)
    assert len(source.open(other, "cameras").views) == 6


def test_boxes_whose_convention_nothing_tells_are_refused(own_drive: Path, infos: dict[str, Any]) -> None:
    data = pickle.loads(pickle.dumps(infos))
    for info in data["infos"]:
        info["gt_names"] = np.full(len(info["gt_boxes"]), "pedestrian")
        info["gt_boxes"][:, 6] = 0.1
    write_pickle(own_drive / "vague.pkl", data)
    with pytest.raises(
        UnsupportedFile, match=f"sample {KEY}: .*vague.pkl: neither sizes nor yaws tell which box convention"
    ):
        NuScenes(own_drive, "vague.pkl").open(KEY, "annotations")
    for info in data["infos"]:
        info["gt_boxes"][:, 6] = -4.0
    write_pickle(own_drive / "old.pkl", data)
    assert NuScenes(own_drive, "old.pkl").dialect.endswith("mmdet3d-0.x")


def test_infos_of_the_test_split_offer_no_annotations(own_drive: Path, infos: dict[str, Any]) -> None:
    bare = [{k: v for k, v in info.items() if not k.startswith("gt_")} for info in infos["infos"]]
    write_pickle(own_drive / "old.pkl", {"infos": bare, "metadata": {}})
    data = small_nuscenes.new_infos(infos)
    for sample in data["data_list"]:
        del sample["instances"]
    write_pickle(own_drive / "new.pkl", data)
    for name in ("old.pkl", "new.pkl"):
        assert NuScenes(own_drive, name).facts(KEY, "annotations") == b""


class _Attack:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"samples": []}, "dict with samples; infos of mmdetection3d have `infos` and `metadata`"),
        ([{"point_cloud": 1}], "list with no keys"),
        ({"infos": [{"token": "a", "lidar_path": "x"}]}, "no info file of nuScenes: sample 0 .*'sweeps'"),
        ({"data_list": [{"lidar_points": {}}], "metainfo": {"categories": {}}}, "KeyError: 'token'"),
        ({"infos": _Attack()}, "refers to .*system"),
    ],
)
def test_other_pickles_are_named_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pickle(tmp_path / "infos.pkl", content)
    with pytest.raises(UnsupportedFile, match=expected):
        NuScenes(tmp_path).keys()
    assert not (tmp_path / "attacked").exists()


def test_infos_do_not_name_scenes(own_drive: Path, infos: dict[str, Any]) -> None:
    write_pickle(own_drive / "infos.pkl", infos)
    with pytest.raises(UnsupportedFile, match="do not name scenes; leave out source.split"):
        NuScenes(own_drive, "infos.pkl", split="val").keys()


def test_the_real_key_frame_opens(data_dir: Path) -> None:
    source = NuScenes(data_dir / "nuscenes")
    (key,) = source.keys()
    assert key == "ca9a282c9e77460f8360f564131a8af5"
    assert source.dialect == "mmdetection3d infos 1.1, boxes as in mmdet3d-1.0"
    assert missing_files(source, source.kinds) == {}
    lidar, cameras, found = (source.open(key, kind) for kind in ("lidar", "cameras", "annotations"))
    assert lidar.key.points.shape == (34688, 5)
    assert lidar.before == ()
    assert len(found.boxes) == 69
    # cars' boxes hold the points that the file says they do
    inside = [_inside(lidar.key.points, box) for box in found.boxes]
    np.testing.assert_allclose(inside, found.lidar_points, rtol=0.05, atol=3)
    # and most annotated objects are in sight of a camera at their pixels
    seen = set()
    for view in cameras.views:
        points = (found.boxes[:, :3] - view.to_lidar[:3, 3]) @ view.to_lidar[:3, :3] @ view.intrinsic.T
        u, v = points[:, :2].T / points[:, 2]
        seen |= set(np.flatnonzero((points[:, 2] > 1) & (u > 0) & (u < 1600) & (v > 0) & (v < 900)))
    assert len(seen) >= 66


def _bevdet(infos: dict[str, Any]) -> dict[str, Any]:
    more = {"ann_infos": ([], []), "scene_token": "x", "occ_path": "y"}
    return {**infos, "infos": [{**info, **more} for info in infos["infos"]]}


def _inside(points: np.ndarray, box: np.ndarray) -> int:
    cos, sin = np.cos(box[6]), np.sin(box[6])
    local = (points[:, :3] - box[:3]) @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    return int((abs(local) <= box[3:6] / 2).all(1).sum())

"""The nuScenes source: tables against the devkit, info pickles against the tables, and what is wrong by name."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.boxes3d import CLASSES
from extractors.errors import EmptyInput, ExtractError, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from extractors.sweeps import aggregate
from pipelines.inputs import StatCache, digest_inputs, missing_files
from pipelines.job_spec import JobSpec
from pipelines.sources import nuscenes_tables
from pipelines.sources.nuscenes import NuScenes
from pipelines.sources.nuscenes_index import CAMERAS, Index, open_index
from pipelines.sources.nuscenes_splits import SPLITS, scenes_of
from pipelines.sources.points import read_lidar
from tests.pipelines import small_nuscenes
from tests.pipelines.front_door import FrontDoor
from tests.pipelines.small_nuscenes import read_table, token, write_pickle, write_table

VERSION = "v1.0-mini"
KEY = token("sample", "scene-0061", 1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drive that no test changes."""
    return small_nuscenes.make(tmp_path_factory.mktemp("drive"))


@pytest.fixture
def own_drive(drive: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(drive, tmp_path / "drive"))


@pytest.fixture(scope="module")
def nusc(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same drive in nuscenes-devkit."""
    pytest.importorskip("nuscenes", reason="nuscenes-devkit, the oracle, is not installed")
    return small_nuscenes.devkit(small_nuscenes.make(tmp_path_factory.mktemp("devkit")))


@pytest.fixture(scope="module")
def infos(nusc: Any) -> dict[str, Any]:
    return small_nuscenes.old_infos(nusc)


# --- official tables


def test_keys_are_sample_tokens_and_can_be_narrowed(drive: Path, tmp_path: Path) -> None:
    keys = NuScenes(drive).keys()
    assert keys == sorted(token("sample", scene, frame) for scene in small_nuscenes.SCENES for frame in range(3))
    train = [key for key in keys if key in {token("sample", "scene-0061", frame) for frame in range(3)}]
    assert NuScenes(drive, scenes=("scene-0061",)).keys() == train
    assert NuScenes(drive, split="mini_train").keys() == NuScenes(drive, split="train").keys() == train
    assert NuScenes(drive, split="mini_val").keys() == [key for key in keys if key not in train]
    assert NuScenes(drive, samples=(KEY,)).keys() == [KEY]
    (tmp_path / "mine.txt").write_text("scene-0103\nscene-9999\n")
    assert NuScenes(drive, split=str(tmp_path / "mine.txt")).keys() == NuScenes(drive, split="val").keys()


def test_splits_are_the_devkits() -> None:
    splits = pytest.importorskip("nuscenes.utils.splits")
    official = splits.create_splits_scenes()
    assert {name: scenes_of(name) for name in SPLITS} == {name: set(official[name]) for name in SPLITS}


def test_sweeps_are_where_the_devkit_puts_them(drive: Path, nusc: Any) -> None:
    from nuscenes.utils.data_classes import LidarPointCloud

    source = NuScenes(drive)
    for key in _keys(source):
        lidar = source.open(key, "lidar")
        cloud, times = LidarPointCloud.from_file_multisweep(
            nusc, nusc.get("sample", key), "LIDAR_TOP", "LIDAR_TOP", nsweeps=11, min_distance=1.0
        )
        # the devkit takes close points out of the key frame too, and sweeps with the key frame first
        ours = aggregate(lidar, 10, 1.0)
        keep = np.ones(len(ours), bool)
        keep[:60] = (abs(lidar.key.points[:, :2]) >= 1).any(1)
        np.testing.assert_allclose(ours[keep, :4].T, cloud.points, atol=1e-4)
        np.testing.assert_allclose(ours[keep, 4], times[0], atol=1e-6)
        np.testing.assert_allclose(lidar.to_ego, small_nuscenes.pose(_calibration(nusc, key, "LIDAR_TOP")), atol=1e-12)
    counts = [len(source.open(key, "lidar").before) for key in _keys(source)]
    assert sorted(counts) == [2, 2, 10, 10, 10, 10], "a scene's first key frame has only what was recorded before it"


def test_cameras_are_where_the_devkit_has_them_through_their_own_ego_poses(drive: Path, nusc: Any) -> None:
    source = NuScenes(drive)
    for key in _keys(source):
        sample = nusc.get("sample", key)
        data = {name: nusc.get("sample_data", sample["data"][name]) for name in ("LIDAR_TOP", *CAMERAS)}
        to_world = {
            name: small_nuscenes.pose(nusc.get("ego_pose", d["ego_pose_token"]))
            @ small_nuscenes.pose(nusc.get("calibrated_sensor", d["calibrated_sensor_token"]))
            for name, d in data.items()
        }
        views = source.open(key, "cameras").views
        assert tuple(view.name for view in views) == CAMERAS
        for view in views:
            expected = np.linalg.inv(to_world["LIDAR_TOP"]) @ to_world[view.name]
            np.testing.assert_allclose(view.to_lidar, expected, atol=1e-9)
            to_ego = small_nuscenes.pose(_calibration(nusc, key, "LIDAR_TOP")) @ expected
            np.testing.assert_allclose(view.to_ego, to_ego, atol=1e-9)
            np.testing.assert_array_equal(view.intrinsic, _calibration(nusc, key, view.name)["camera_intrinsic"])
            assert view.path == drive / data[view.name]["filename"]


def test_annotations_are_the_devkits_boxes_in_the_lidar_frame(drive: Path, nusc: Any) -> None:
    source = NuScenes(drive)
    unknown = 0
    for key in _keys(source):
        sample = nusc.get("sample", key)
        found = source.open(key, "annotations")
        _, boxes, _ = nusc.get_sample_data(sample["data"]["LIDAR_TOP"])
        assert found.tokens == tuple(sample["anns"])
        np.testing.assert_allclose(found.boxes[:, :3], [box.center for box in boxes], atol=1e-9)
        np.testing.assert_array_equal(found.boxes[:, 3:6], [box.wlh[[1, 0, 2]] for box in boxes])
        yaws = [box.orientation.yaw_pitch_roll[0] for box in boxes]
        np.testing.assert_allclose(np.exp(1j * found.boxes[:, 6]), np.exp(1j * np.array(yaws)), atol=1e-8)
        records = [nusc.get("sample_annotation", name) for name in sample["anns"]]
        assert found.categories == tuple(record["category_name"] for record in records)
        assert found.names == tuple(small_nuscenes.MODEL_NAMES.get(name, "") for name in found.categories)
        attributes = [[nusc.get("attribute", a)["name"] for a in r["attribute_tokens"]] for r in records]
        assert found.attributes == tuple(names[0] if names else "" for names in attributes)
        np.testing.assert_array_equal(found.lidar_points, [record["num_lidar_pts"] for record in records])
        np.testing.assert_array_equal(found.radar_points, [record["num_radar_pts"] for record in records])
        data = nusc.get("sample_data", sample["data"]["LIDAR_TOP"])
        turn = small_nuscenes.pose(nusc.get("ego_pose", data["ego_pose_token"]))[:3, :3]
        turn = turn @ small_nuscenes.pose(_calibration(nusc, key, "LIDAR_TOP"))[:3, :3]
        world = np.array([[*nusc.box_velocity(name)[:2], 0] for name in sample["anns"]])
        np.testing.assert_allclose(found.velocity, (world @ turn)[:, :2], rtol=1e-5, atol=1e-9)
        unknown += int(np.isnan(found.velocity).any(1).sum())
    assert unknown == 2, "each scene has one box that is seen once"


def test_a_split_without_annotations_does_not_offer_them(tmp_path: Path) -> None:
    small_nuscenes.make(tmp_path, "v1.0-test", annotated=False)
    for delete in (False, True):
        if delete:
            for name in ("sample_annotation", "instance"):
                (tmp_path / f"v1.0-test/{name}.json").unlink()
        source = NuScenes(tmp_path)
        digests = digest_inputs(source, source.kinds, StatCache(tmp_path / "files.sqlite"))
        assert digests.kinds["annotations"].null_count == len(digests.items) == 6
        assert digests.kinds["lidar"].null_count == digests.kinds["cameras"].null_count == 0
        assert digests.kinds["foreground"].null_count == 6
        with pytest.raises(MissingFile, match="official tables v1.0-test have no annotations"):
            source.open(KEY, "annotations")


@pytest.mark.parametrize("indent", [None, 4])
def test_tables_may_be_laid_out_in_any_way(own_drive: Path, indent: int | None) -> None:
    before = _facts(NuScenes(own_drive))
    for table in nuscenes_tables.TABLES:
        write_table(own_drive / VERSION, table, read_table(own_drive / VERSION, table)[::-1], indent)
    after = _facts(NuScenes(own_drive))
    assert {k: v for k, v in before.items() if k[1] != "annotations"} == {
        k: v for k, v in after.items() if k[1] != "annotations"
    }, "boxes are in the table's order, nothing else depends on it"
    assert before.keys() == after.keys()


def test_small_pieces_give_the_same_index(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _facts(NuScenes(drive))
    monkeypatch.setattr(nuscenes_tables, "_PIECE", 8 * 1500)
    tables = nuscenes_tables.build(drive / VERSION)
    pieces = dataclasses.replace(NuScenes(drive))
    pieces.__dict__["_index"] = Index(tables)
    assert _facts(pieces) == whole


# --- info pickles


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
    for key in _keys(tables):
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
    other = next(key for key in _keys(source) if key != KEY)
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


# --- what is missing or wrong


def test_a_missing_key_frame_file_is_named_with_its_sample(own_drive: Path) -> None:
    source = NuScenes(own_drive)
    (path, *_) = source.files(KEY, "lidar")
    path.unlink()
    with pytest.raises(MissingFile, match=f"sample {KEY}: LIDAR_TOP: {path}: no such file"):
        source.open(KEY, "lidar")


def test_missing_images_are_named_with_sample_and_camera(own_drive: Path) -> None:
    source = NuScenes(own_drive)
    paths = source.files(KEY, "cameras")
    paths[1].unlink()
    paths[3].unlink()
    with pytest.raises(MissingFile, match=f"sample {KEY}: .*CAM_FRONT_RIGHT: {paths[1]}; CAM_BACK: {paths[3]}"):
        source.open(KEY, "cameras")
    assert missing_files(source, source.kinds) == {KEY: [paths[1], paths[3]]}
    assert missing_files(source, ["lidar"], [KEY]) == {}


def test_a_plan_lists_missing_files_of_the_kinds_that_the_job_takes(
    own_drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = FrontDoor(tmp_path, monkeypatch)
    job = front.job({"type": "nuscenes", "root": str(own_drive)}, {"centerpoint": {"weights": "untrained:0"}})
    assert front.json("plan", job, "--missing") == {}
    source = NuScenes(own_drive)
    sweep, image = source.files(KEY, "lidar")[3], source.files(KEY, "cameras")[0]
    sweep.unlink()
    image.unlink()
    assert front.json("plan", job, "--missing") == {KEY: [str(sweep)]}
    code, out, err = front("plan", job, "--missing", "--item", KEY)
    assert (code, out, err) == (0, f"{KEY}: {sweep}\n", "1 missing files of 1 items\n")


def test_missing_sweeps_are_skipped_and_counted_or_refused(own_drive: Path) -> None:
    source = NuScenes(own_drive)
    paths = source.files(KEY, "lidar")
    paths[2].unlink()
    paths[5].unlink()
    lidar = source.open(KEY, "lidar")
    assert (len(lidar.before), lidar.missing) == (8, 2)
    assert [round(scan.lag, 2) for scan in lidar.before] == [0.05, 0.15, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5]
    strict = dataclasses.replace(source, missing_sweeps="raise")
    with pytest.raises(MissingFile, match=f"sample {KEY}: LIDAR_TOP: 2 of 10 sweeps are not there, such as {paths[2]}"):
        strict.open(KEY, "lidar")
    assert strict.open(token("sample", "scene-0103", 1), "lidar").missing == 0
    whole, torn = token("sample", "scene-0103", 1), KEY
    assert strict.facts(whole, "lidar") == source.facts(whole, "lidar")
    assert strict.facts(torn, "lidar") != source.facts(torn, "lidar"), "once refused, it runs when the setting changes"


@pytest.mark.parametrize("sweeps", [0, 3, 10])
def test_no_more_sweeps_than_asked_for(drive: Path, sweeps: int) -> None:
    source = NuScenes(drive, sweeps=sweeps)
    assert len(source.files(KEY, "lidar")) == 1 + sweeps == 1 + len(source.open(KEY, "lidar").before)


def test_tokens_of_other_tables_are_told_apart_from_samples(drive: Path) -> None:
    data = next(
        row
        for row in read_table(drive / VERSION, "sample_data")
        if row["sample_token"] == KEY and row["is_key_frame"] and "CAM_BACK_LEFT" in row["filename"]
    )
    for given in ({"samples": (data["token"],)}, {}):
        source = NuScenes(drive, **given)
        with pytest.raises(
            MissingFile,
            match=rf"'{data['token']}' is a sample_data \(CAM_BACK_LEFT\) of sample {KEY}; items go by sample",
        ):
            source.keys() if given else source.open(data["token"], "lidar")
    with pytest.raises(MissingFile, match=f"is a sample_annotation of sample {KEY}"):
        NuScenes(drive).open(NuScenes(drive).open(KEY, "annotations").tokens[0], "cameras")
    with pytest.raises(MissingFile, match="'nonsense' is no sample token"):
        NuScenes(drive, samples=("nonsense",)).keys()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"version": "v1.0-trainval"}, "no tables or info pickle 'v1.0-trainval'"),
        ({"split": "vall"}, "no split 'vall': give one of train, val, test, mini_train, mini_val"),
        ({"split": "test"}, "no samples of split test"),
        ({"scenes": ("scene-0001",)}, "no scene 'scene-0001'; it has 2, scene-0061 to scene-0103"),
        ({"root": Path("/nowhere")}, "/nowhere: no such folder; source.root is"),
    ],
)
def test_what_is_not_there_is_named(drive: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(MissingFile, match=expected):
        NuScenes(**{"root": drive, **settings}).keys()


def test_one_of_several_versions_must_be_chosen(own_drive: Path) -> None:
    shutil.copytree(own_drive / VERSION, own_drive / "v1.0-trainval")
    with pytest.raises(MissingFile, match="has v1.0-mini, v1.0-trainval; choose one: source.version=v1.0-mini"):
        NuScenes(own_drive).keys()
    assert len(NuScenes(own_drive, "v1.0-trainval").keys()) == 6
    (own_drive / "empty").mkdir()
    with pytest.raises(MissingFile, match="neither tables"):
        NuScenes(own_drive / "empty").keys()


def test_sweeps_out_of_range_are_refused(drive: Path) -> None:
    with pytest.raises(ValueError, match="sweeps is 11, expected 0 to 10"):
        NuScenes(drive, sweeps=11)


@pytest.mark.parametrize(
    ("table", "damage", "error", "expected"),
    [
        ("sample_data", lambda text: text[: len(text) // 2], TruncatedFile, "ends within the list of records"),
        ("ego_pose", lambda text: text[:-1], TruncatedFile, "ends within the list of records"),
        ("sample_annotation", lambda text: b"", EmptyInput, "empty"),
        ("sample_data", lambda text: b"<html>", UnsupportedFile, "no list of records"),
        ("ego_pose", lambda text: text.replace(b'"rotation"', b'"turn"'), UnsupportedFile, "have no 'rotation'"),
        ("ego_pose", lambda text: text.replace(b"0.0\n]", b"0.0,\n1.0\n]"), UnsupportedFile, "other than 3 numbers"),
        ("sample_data", lambda text: text.replace(b": true", b": 7"), UnsupportedFile, "JSON parse error"),
        ("calibrated_sensor", lambda text: text.replace(b"sensor_token", b"sensor"), UnsupportedFile, "'sensor_token'"),
        ("sample", lambda text: text[:-9], TruncatedFile, "download"),
        ("scene", None, MissingFile, "no such file"),
        ("ego_pose", None, MissingFile, "no such file"),
    ],
)
def test_broken_tables_are_named(
    own_drive: Path, table: str, damage: Callable[[bytes], bytes] | None, error: type[ExtractError], expected: str
) -> None:
    path = own_drive / VERSION / f"{table}.json"
    if damage:
        text = damage(path.read_bytes())
        assert text != path.read_bytes()
        path.write_bytes(text)
    else:
        path.unlink()
    with pytest.raises(error, match=f"{path}: .*{expected}"):
        NuScenes(own_drive).keys()


def test_a_bad_pose_fails_its_own_items_by_name(own_drive: Path) -> None:
    poses = read_table(own_drive / VERSION, "ego_pose")
    data = [row for row in read_table(own_drive / VERSION, "sample_data") if row["sample_token"] == KEY]
    image = next(row for row in data if row["is_key_frame"] and "CAM_BACK_RIGHT" in row["filename"])
    next(row for row in poses if row["token"] == image["ego_pose_token"])["rotation"] = [0.0, 0.0, 0.0, 0.0]
    write_table(own_drive / VERSION, "ego_pose", poses)
    source = NuScenes(own_drive)
    with pytest.raises(InvalidValues, match=f"sample {KEY}: CAM_BACK_RIGHT"):
        source.open(KEY, "cameras")
    assert len(source.open(KEY, "lidar").before) == 10
    assert all(len(source.open(key, "cameras").views) == 6 for key in _keys(source) if key != KEY)


def test_a_sample_without_its_lidar_or_a_camera_fails_by_name(own_drive: Path) -> None:
    rows = read_table(own_drive / VERSION, "sample_data")
    other = token("sample", "scene-0103", 1)
    kept = [
        row
        for row in rows
        if not (row["is_key_frame"] and row["sample_token"] == KEY and "CAM_FRONT_LEFT" in row["filename"])
        and not (row["is_key_frame"] and row["sample_token"] == other and "LIDAR" in row["filename"])
    ]
    assert len(rows) - len(kept) == 2
    write_table(own_drive / VERSION, "sample_data", kept)
    source = NuScenes(own_drive)
    with pytest.raises(MissingFile, match=f"sample {KEY}: .* do not name one image of CAM_FRONT_LEFT"):
        source.open(KEY, "cameras")
    for kind in ("lidar", "cameras"):
        with pytest.raises(UnsupportedFile, match=f"sample {other}: .*no key frame of LIDAR_TOP"):
            source.open(other, kind)
        assert source.facts(other, kind), "it is offered, so that it fails by name"


@pytest.mark.parametrize(
    ("content", "error", "expected"),
    [
        (b"", EmptyInput, "zero bytes"),
        (np.zeros(24, np.float32).tobytes(), TruncatedFile, "96 bytes are no whole number of points of 20 bytes"),
        (np.full((4, 5), np.nan, np.float32).tobytes(), InvalidValues, "4 of 4 points"),
        (np.arange(1, 41, dtype=np.float32).tobytes()[:80] + np.full(20, 0.3, np.float32).tobytes(), UnsupportedFile,
         "the fifth value of a point is no ring number, such as 0.3"),
    ],
)  # fmt: skip
def test_bad_lidar_files_are_named(tmp_path: Path, content: bytes, error: type[ExtractError], expected: str) -> None:
    path = tmp_path / "a.pcd.bin"
    path.write_bytes(content)
    with pytest.raises(error, match=f"{path}: {expected}"):
        read_lidar(path)


# --- virtual points


def test_virtual_points_go_with_the_scans(own_drive: Path) -> None:
    source = NuScenes(own_drive)
    assert source.files(KEY, "foreground") == [], "none were made"
    scans = source.files(KEY, "lidar")
    files = [path.parent.parent / "FOREGROUND_MIXED_6NN_WITH_DEPTH" / f"{path.name}.pkl.npy" for path in scans]
    for path in (files[0], files[1], files[4]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"points")
    source = NuScenes(own_drive)
    assert source.files(KEY, "foreground") == files
    scans[2].unlink()
    found = source.open(KEY, "foreground")
    assert found.files == (files[0], files[1], None, files[4], *[None] * 6)
    assert len(found.files) == 1 + len(source.open(KEY, "lidar").before)
    assert found.absent == (files[3], *files[5:])
    with pytest.raises(MissingFile, match="FOREGROUND.*make virtual points first"):
        source.open(token("sample", "scene-0103", 1), "foreground")


# --- identity


def test_a_changed_calibration_changes_only_its_own_items(own_drive: Path, tmp_path: Path) -> None:
    before = _digests(own_drive, tmp_path)
    rows = read_table(own_drive / VERSION, "calibrated_sensor")
    next(row for row in rows if row["token"] == token("calibration", "scene-0061", "CAM_BACK"))["translation"][0] += (
        1e-9
    )
    write_table(own_drive / VERSION, "calibrated_sensor", rows)
    after = _digests(own_drive, tmp_path)
    changed = {item for item in before if before[item] != after[item]}
    assert changed == {(token("sample", "scene-0061", frame), "cameras") for frame in range(3)}


def test_a_changed_box_a_changed_pose_and_a_changed_file_change_only_their_items(
    own_drive: Path, tmp_path: Path
) -> None:
    before = _digests(own_drive, tmp_path)
    boxes = read_table(own_drive / VERSION, "sample_annotation")
    next(row for row in boxes if row["sample_token"] == KEY)["num_lidar_pts"] += 1
    write_table(own_drive / VERSION, "sample_annotation", boxes)
    data = read_table(own_drive / VERSION, "sample_data")
    last = token("sample", "scene-0103", 2)
    image = next(r for r in data if r["sample_token"] == last and r["is_key_frame"] and "CAM_BACK_R" in r["filename"])
    poses = read_table(own_drive / VERSION, "ego_pose")
    next(row for row in poses if row["token"] == image["ego_pose_token"])["translation"][1] += 1e-6
    write_table(own_drive / VERSION, "ego_pose", poses)
    sweep = NuScenes(own_drive).files(token("sample", "scene-0061", 2), "lidar")[10]
    sweep.write_bytes(sweep.read_bytes()[::-1])
    after = _digests(own_drive, tmp_path)
    changed = {item for item in before if before[item] != after[item]}
    third = token("sample", "scene-0061", 2)
    assert changed == {(KEY, "annotations"), (last, "cameras"), (third, "lidar"), (KEY, "lidar")}, (
        "the tenth sweep before the third key frame is the second key frame"
    )


def test_tables_that_only_move_or_are_rewritten_change_no_item(own_drive: Path, tmp_path: Path) -> None:
    before = _digests(own_drive, tmp_path)
    moved = own_drive.rename(tmp_path / "elsewhere")
    for table in nuscenes_tables.TABLES:
        write_table(moved / VERSION, table, read_table(moved / VERSION, table), indent=2)
    assert _digests(moved, tmp_path) == before


def test_a_source_travels_without_its_index(drive: Path) -> None:
    source = NuScenes(drive, sweeps=3, samples=(KEY,))
    source.keys()
    sent = pickle.dumps(source)
    assert len(sent) < 500
    assert pickle.loads(sent) == source
    assert pickle.loads(sent).open(KEY, "lidar").before[2].lag == source.open(KEY, "lidar").before[2].lag


def test_a_job_names_the_source_and_its_settings(drive: Path) -> None:
    spec = JobSpec.model_validate({"name": "drive", "source": {"type": "nuscenes", "root": str(drive)}})
    job = spec.override(["source.split=mini_val", "source.sweeps=4"]).build()
    assert job.source == NuScenes(drive, split="mini_val", sweeps=4)


# --- the index


def test_an_index_is_built_once(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _facts(NuScenes(drive))
    monkeypatch.setattr(nuscenes_tables, "build", lambda folder: pytest.fail("built again"))
    assert _facts(NuScenes(drive)) == facts


def test_changed_tables_are_read_again_and_the_old_index_goes(own_drive: Path) -> None:
    path = own_drive / VERSION / "sample_annotation.json"
    os.utime(path)
    assert len(NuScenes(own_drive).open(KEY, "annotations").boxes) == 6
    found = path.stat()
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"num_lidar_pts": 3,', b'"num_lidar_pts": 4,'))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # the same size and time, as within the clock's grain
    assert 4 in NuScenes(own_drive).open(KEY, "annotations").lidar_points
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "scenecache/nuscenes"
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 1


def test_a_damaged_index_is_built_again(drive: Path) -> None:
    facts = _facts(NuScenes(drive))
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "scenecache/nuscenes"
    (table,) = cache.glob("*/lidar.arrow")
    table.write_bytes(table.read_bytes()[:100])
    assert _facts(NuScenes(drive)) == facts
    assert table.stat().st_size > 100


def test_without_a_cache_folder_the_index_is_built_in_memory(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = _facts(NuScenes(drive))
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _facts(NuScenes(drive)) == facts


def test_processes_that_open_at_once_build_one_index(drive: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        counts = pool.map(_build_and_count, [drive] * 3)
    assert sum(built for built, _ in counts) == 1
    assert {rows for _, rows in counts} == {6}


def _build_and_count(root: Path) -> tuple[int, int]:
    built = 0

    def build() -> Any:
        nonlocal built
        built += 1
        return nuscenes_tables.build(root / VERSION)

    files = [root / VERSION / f"{table}.json" for table in nuscenes_tables.TABLES]
    index = open_index(files, build, Path(os.environ["XDG_CACHE_HOME"]) / "together")
    return built, len(index.row)


def _keys(source: NuScenes) -> list[str]:
    return source.keys()


def _facts(source: NuScenes) -> dict[tuple[str, str], bytes]:
    return {(key, kind): source.facts(key, kind) for key in _keys(source) for kind in source.kinds}


def _digests(root: Path, cache: Path) -> dict[tuple[str, str], bytes | None]:
    digests = digest_inputs(NuScenes(root), NuScenes.kinds, StatCache(cache / "files.sqlite"))
    items = digests.items.to_pylist()
    return {
        (item, kind): value
        for kind in digests.kinds
        for item, value in zip(items, digests.kinds[kind].to_pylist(), strict=True)
    }


def _calibration(nusc: Any, key: str, channel: str) -> dict[str, Any]:
    data = nusc.get("sample_data", nusc.get("sample", key)["data"][channel])
    found: dict[str, Any] = nusc.get("calibrated_sensor", data["calibrated_sensor_token"])
    return found


def _bevdet(infos: dict[str, Any]) -> dict[str, Any]:
    more = {"ann_infos": ([], []), "scene_token": "x", "occ_path": "y"}
    return {**infos, "infos": [{**info, **more} for info in infos["infos"]]}


def _inside(points: np.ndarray, box: np.ndarray) -> int:
    cos, sin = np.cos(box[6]), np.sin(box[6])
    local = (points[:, :3] - box[:3]) @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    return int((abs(local) <= box[3:6] / 2).all(1).sum())

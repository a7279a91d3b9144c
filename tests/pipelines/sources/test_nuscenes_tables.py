"""The nuScenes source on official tables: what nuscenes-devkit says of the same drive."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.errors import MissingFile
from extractors.sweeps import aggregate
from pipelines.inputs import StatCache, digest_inputs
from pipelines.job_spec import JobSpec
from pipelines.sources.nuscenes import NuScenes
from pipelines.sources.nuscenes_index import CAMERAS
from pipelines.sources.nuscenes_splits import SPLITS, scenes_of
from tests.pipelines import small_nuscenes
from tests.pipelines.small_nuscenes import token
from tests.pipelines.sources.small_drive import KEY, keys_of


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
    for key in keys_of(source):
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
    counts = [len(source.open(key, "lidar").before) for key in keys_of(source)]
    assert sorted(counts) == [2, 2, 10, 10, 10, 10], "a scene's first key frame has only what was recorded before it"


def test_cameras_are_where_the_devkit_has_them_through_their_own_ego_poses(drive: Path, nusc: Any) -> None:
    source = NuScenes(drive)
    for key in keys_of(source):
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
    for key in keys_of(source):
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


@pytest.mark.parametrize("sweeps", [0, 3, 10])
def test_no_more_sweeps_than_asked_for(drive: Path, sweeps: int) -> None:
    source = NuScenes(drive, sweeps=sweeps)
    assert len(source.files(KEY, "lidar")) == 1 + sweeps == 1 + len(source.open(KEY, "lidar").before)


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


def _calibration(nusc: Any, key: str, channel: str) -> dict[str, Any]:
    data = nusc.get("sample_data", nusc.get("sample", key)["data"][channel])
    found: dict[str, Any] = nusc.get("calibrated_sensor", data["calibrated_sensor_token"])
    return found

"""The made drive is in the official layout by the devkit's judgement, and the same every time."""

import re

import cv2
import numpy as np
import pytest

from pipelines.errors import JobError
from pipelines.make_data.folder import LIST
from pipelines.make_data.nuscenes import SCENES, make
from pipelines.make_data.nuscenes_drive import CAMERAS
from pipelines.make_data.nuscenes_questions import node
from pipelines.make_data.nuscenes_tables import TABLES
from tests.pipelines.make_data.made_files import CLASSES, attributes_of, digest, points_of


@pytest.mark.blender
def test_the_devkit_finds_what_the_summary_says(made, devkit):
    out, summary = made
    assert {p.stem for p in (out / "v1.0-mini").iterdir()} == set(TABLES)
    assert summary["scenes"] == len(devkit.scene) == 1
    assert summary["key frames"] == len(devkit.sample) == 2
    assert summary["sweeps"] == 11
    assert summary["images"] == 12
    assert summary["sweeps"] + summary["images"] == len(devkit.sample_data) == len(devkit.ego_pose)
    assert summary["annotations"] == len(devkit.sample_annotation) > 60
    assert summary["points"] == sum(
        len(points_of(devkit, d["token"])) for d in devkit.sample_data if d["channel"] == "LIDAR_TOP"
    )
    assert devkit.scene[0]["name"] == "scene-0061"
    for sample in devkit.sample:
        assert set(sample["data"]) == {"LIDAR_TOP", *CAMERAS}


@pytest.mark.blender
def test_tokens_are_32_hex_digits_and_files_are_those_of_the_tables(made, devkit):
    out, _ = made
    for table in set(TABLES) - {"visibility"}:
        tokens = [row["token"] for row in getattr(devkit, table)]
        assert len(set(tokens)) == len(tokens)
        assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    named = {d["filename"] for d in devkit.sample_data} | {m["filename"] for m in devkit.map}
    found = {str(p.relative_to(out)) for d in ("samples", "sweeps", "maps") for p in (out / d).rglob("*.*")}
    assert named == found


@pytest.mark.blender
def test_sweeps_are_at_20_hz_from_a_key_frame_without_any(devkit):
    first, second = (devkit.get("sample_data", sample["data"]["LIDAR_TOP"]) for sample in devkit.sample)
    assert first["prev"] == ""
    assert second["next"] == ""
    walked, times = second, [second["timestamp"]]
    while walked["prev"]:
        walked = devkit.get("sample_data", walked["prev"])
        times.append(walked["timestamp"])
        assert walked["is_key_frame"] == (walked["token"] == first["token"])
        assert walked["sample_token"] == (first if walked is first else second)["sample_token"]
    assert walked is first
    assert len(times) == 11
    assert np.abs(np.diff(times) + 50_000).max() < 1_000
    assert [s["timestamp"] for s in devkit.sample] == [first["timestamp"], second["timestamp"]]


@pytest.mark.blender
def test_the_map_has_the_road_and_not_the_pavement(devkit):
    mask = devkit.map[0]["mask"]
    x, y = np.array([pose["translation"][:2] for pose in devkit.ego_pose]).T
    assert mask.is_on_mask(x, y).all()
    driving = [
        devkit.get_box(a["token"]) for a in devkit.sample_annotation if "vehicle.moving" in attributes_of(devkit, a)
    ]
    assert mask.is_on_mask(*np.array([b.center[:2] for b in driving]).T).all()
    sitting = [a for a in devkit.sample_annotation if "pedestrian.sitting_lying_down" in attributes_of(devkit, a)]
    assert sitting  # on the pavement
    assert not any(mask.is_on_mask(*np.array(a["translation"])[:2, None])[0] for a in sitting)


@pytest.mark.blender
def test_the_same_seed_gives_the_same_bytes_wherever_another_gave_others(tmp_path):
    def made(name, seed):
        make(tmp_path / name, seed=seed, scenes=1, key_frames=1, image_scale=0.1)
        return digest(tmp_path / name)

    one, other = made("a", 1), made("b", 2)
    assert {n.split("/")[0] for n in one} == {"v1.0-mini", "maps", "masks", "samples", "questions", LIST}
    assert not {d for n, d in one.items() if n.startswith("samples")} & set(other.values())
    assert one["v1.0-mini/sample_annotation.json"] != other["v1.0-mini/sample_annotation.json"]
    assert made("b", 1) == one


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scenes": 0}, "need 1 to 10"),
        ({"scenes": 11}, "need 1 to 10"),
        ({"key_frames": 0}, "at least 1"),
        ({"image_scale": 0.0}, "1600 x 900"),
        ({"image_scale": float("nan")}, "1600 x 900"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_written(tmp_path, settings, text):
    with pytest.raises(JobError, match=text):
        make(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_scene_names_are_of_the_devkits_mini_splits():
    splits = pytest.importorskip("nuscenes.utils.splits", reason="nuscenes-devkit is not installed")
    assert set(SCENES) == {*splits.mini_train, *splits.mini_val}
    assert SCENES[1] in splits.mini_val
    assert SCENES[0] in splits.mini_train


@pytest.mark.slow
@pytest.mark.blender
def test_the_default_has_every_class_and_both_splits(tmp_path):
    nuscenes = pytest.importorskip("nuscenes.nuscenes", reason="nuscenes-devkit is not installed")
    summary = make(tmp_path)
    devkit = nuscenes.NuScenes("v1.0-mini", str(tmp_path), verbose=False)
    assert [s["name"] for s in devkit.scene] == ["scene-0061", "scene-0103"]
    assert summary["images"] == 48
    assert summary["train questions"] == summary["val questions"] == 56
    met = [a for a in devkit.sample_annotation if a["num_lidar_pts"]]
    assert {k.kind for a in met if (k := node(a["category_name"], "", np.zeros(3)))} == CLASSES
    for sample in devkit.sample:
        assert len(sample["anns"]) > 40
        image = cv2.imread(devkit.get_sample_data_path(sample["data"]["CAM_FRONT"]))
        assert image.shape == (900, 1600, 3)
    assert {a["visibility_token"] for a in devkit.sample_annotation} == {"1", "2", "3", "4"}
    assert any(a["num_lidar_pts"] == 0 for a in devkit.sample_annotation)
    categories = {a["category_name"] for a in devkit.sample_annotation}
    assert {"vehicle.emergency.police", "movable_object.debris", "human.pedestrian.stroller"} & categories

"""Real files through `scenecache run`: records that are there, finite and of their schema."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import storage
from tests.pipelines.front_door import FrontDoor


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontDoor:
    return FrontDoor(tmp_path, monkeypatch)


def linked(root: Path, files: Mapping[str, Path]) -> Path:
    """A folder of links to real files; the test is skipped where one is absent."""
    for name, target in files.items():
        if not target.is_file():
            pytest.skip(f"no file {target}")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return root


def assert_valid(records: storage.Records) -> None:
    """Every record fits the stage's schema, is not empty, and finite where the schema asks for it."""
    assert len(records)
    for key, record in records.items():
        records.schema.check(dict(record), key)
        for name, column in records.schema.columns.items():
            values = np.asarray(record[name])
            assert values.size, f"{key}: {name} is empty"
            if values.dtype.kind == "f" and not column.nullable:
                assert np.isfinite(values).all(), f"{key}: {name}"


def scannet(folder: Path, data: Path) -> Path:
    real = data / "scannet"
    names = {"points/scene0000_00.bin": "scene0000_00.bin", "scannet_infos_val.pkl": "scannet_infos.pkl"}
    return linked(folder, {name: real / file for name, file in names.items()})


def test_a_real_scan_of_mmdetection3d(door: FrontDoor, data_dir: Path, tmp_path: Path) -> None:
    scannet(tmp_path / "raw", data_dir)
    votenet = {"weights": "untrained:0", "num_points": 4096, "proposals": 32}
    path = door.job({"type": "scannet", "root": "raw", "layout": "mmdet3d"}, {"scan_info": {}, "votenet": votenet})
    code, _, err = door("run", path)
    assert code == 0, err
    info, votes = door.records("scan_info"), door.records("votenet")
    assert_valid(info)
    assert_valid(votes)
    record = info["scene0000_00"]
    assert record["vertices"] == (data_dir / "scannet/scene0000_00.bin").stat().st_size // 24
    assert record["has_axis_align"]
    assert record["frame"] == "scan"
    assert ((record["bbox_max"] - record["bbox_min"]) > 1).all()
    assert votes["scene0000_00"]["feature"].shape == (32, 128)
    assert votes["scene0000_00"]["feature"].std() > 0


def test_real_clips(door: FrontDoor, data_dir: Path, tmp_path: Path) -> None:
    clips = sorted((data_dir / "videos").glob("v_*.mp4"))
    assert len(clips) == 2
    linked(tmp_path / "raw", {clip.name: clip for clip in clips})
    path = door.job({"type": "folder", "root": "raw"}, {"video": {"size": 64}})
    code, _, err = door("run", path)
    assert code == 0, err
    records = door.records("video")
    assert set(records) == {clip.stem for clip in clips}
    for record in records.values():
        assert record["frame"].shape[1:] == (64, 64, 3)
        assert (np.diff(record["frame_index"]) == 20).all()
        assert (np.diff(record["time_s"]) > 0).all()
        assert record["frame"].std() > 5
    records.schema.check(dict(records[clips[0].stem]), clips[0].stem)


def test_real_videos_of_odd_kinds(door: FrontDoor, data_dir: Path, tmp_path: Path) -> None:
    names = ("h264_10bits.mp4", "testsrc2_odd_height_and_width_vp9.mp4", "nasa_13013_rotated.mp4", "video_90.mov")
    linked(tmp_path / "raw", {name: data_dir / "videos" / name for name in names})
    path = door.job({"type": "folder", "root": "raw"}, {"video": {"size": 32}})
    code, _, err = door("run", path)
    assert code == 0, err
    records = door.records("video")
    assert set(records) == {Path(name).stem for name in names}
    assert all(len(record["frame"]) and record["frame"].std() > 1 for record in records.values())
    assert set(records["video_90"]["rotation"].tolist()) == {270}


def test_the_real_test_split_of_sqa3d(door: FrontDoor, data_dir: Path, tmp_path: Path) -> None:
    import json

    scannet(tmp_path / "raw", data_dir)
    questions = data_dir / "sqa3d" / "v1_balanced_questions_test_scannetv2.json"
    answers = data_dir / "sqa3d" / "v1_balanced_sqa_annotations_test_scannetv2.json"
    linked(tmp_path / "sqa", {questions.name: questions, answers.name: answers})
    tables = {"sqa3d_questions": {"root": "sqa"}}
    path = door.job({"type": "scannet", "root": "raw", "layout": "mmdet3d"}, {"scan_info": {}}, tables)
    code, _, err = door("run", path)
    assert code == 0, err
    asked = json.loads(questions.read_text())["questions"]
    records = door.records("sqa3d_questions")
    assert len(records) == len(asked) == len({str(q["question_id"]) for q in asked})
    for question in asked[::50]:
        key = str(question["question_id"])
        record = records[key]
        records.schema.check(dict(record), key)
        assert (record["question"], record["scene_id"]) == (question["question"], question["scene_id"])
        assert record["answer"] != ""
        assert record["split"] == "test"

"""What is missing or wrong in a nuScenes drive is named, with its sample."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.errors import EmptyInput, ExtractError, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from pipelines.inputs import missing_files
from pipelines.sources.nuscenes import NuScenes
from pipelines.sources.points import read_lidar
from tests.pipelines.front_door import FrontDoor
from tests.pipelines.small_nuscenes import read_table, token, write_table
from tests.pipelines.sources.small_drive import KEY, VERSION, keys_of


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
    assert (code, out, err) == (0, f"{KEY}: {sweep}\n", "1 items looked at: 1 files of 1 of them are missing\n")


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
    assert all(len(source.open(key, "cameras").views) == 6 for key in keys_of(source) if key != KEY)


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

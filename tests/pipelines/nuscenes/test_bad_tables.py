"""Tables, tokens and places that are wrong, through the command line: each is named, with what to do."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.pipelines.front_door import FrontDoor
from tests.pipelines.nuscenes.spoilt_drive import CAMERA, VERSION, Canary, Drive, assert_named, source
from tests.pipelines.small_nuscenes import read_table, write_table


def test_a_split_without_annotations_leaves_their_stage_without_items(
    door: FrontDoor, spoil: Callable[..., Drive]
) -> None:
    drive = spoil("a", "b")
    write_table(drive.root / VERSION, "sample_annotation", [])
    stages = {"groundtruth": {"vectors": "untrained:0"}, "virtual_points": {}}
    path = door.job(source(drive), stages)
    code, out, _ = door("run", path)
    assert code == 0, out
    assert len(door.records("virtual_points")) == 2
    assert door.plan(path, "groundtruth") == {}


def _spoilt_rotation(tables: dict[str, list[dict[str, Any]]], key: str) -> None:
    (row,) = (r for r in tables["sample_data"] if r["sample_token"] == key and r["is_key_frame"] and _of_lidar(r))
    (pose,) = (p for p in tables["ego_pose"] if p["token"] == row["ego_pose_token"])
    pose["rotation"] = [0, 0, 0, 0]


def _without_lidar(tables: dict[str, list[dict[str, Any]]], key: str) -> None:
    tables["sample_data"] = [r for r in tables["sample_data"] if not (r["sample_token"] == key and _of_lidar(r))]


def _spoilt_box(tables: dict[str, list[dict[str, Any]]], key: str) -> None:
    next(r for r in tables["sample_annotation"] if r["sample_token"] == key)["translation"] = [0, 0, float("nan")]


def _of_lidar(row: dict[str, Any]) -> bool:
    return "/LIDAR_TOP/" in row["filename"]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (_spoilt_rotation, "InvalidValues", "LIDAR_TOP: a pose or calibration is no rotation and translation; mend"),
        (_without_lidar, "UnsupportedFile", "the tables have no key frame of LIDAR_TOP"),
        (_spoilt_box, "InvalidValues", "the box of annotation"),
    ],
)
def test_a_wrong_record_of_a_table_costs_its_sample_alone(
    change: Callable[[dict[str, list[dict[str, Any]]], str], None], kind: str, text: str, door: FrontDoor,
    spoil: Callable[..., Drive],
) -> None:  # fmt: skip
    drive = spoil("a", "bad", "b")
    folder = drive.root / VERSION
    tables = {name: read_table(folder, name) for name in ("sample_data", "ego_pose", "sample_annotation")}
    change(tables, drive.key["bad"])
    for name, records in tables.items():
        write_table(folder, name, records)
    path = door.job(source(drive), {"groundtruth": {"vectors": "untrained:0", "keep": "all"}})
    assert door("run", path)[0] == 3
    assert_named(door, "groundtruth", drive, {"bad": (kind, text)})
    assert set(drive.label(door.records("groundtruth"))) == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("sample", lambda records: records.append(records[0]), "sample.json: token .* is there twice; download"),
        ("sample", lambda records: records.clear(), "v1.0-mini: no samples; get it again"),
        ("sample_data", lambda records: records.clear(), "sample_data.json: no records"),
        ("calibrated_sensor", lambda records: records[0].update(translation=[0, 0]), "record .* shape .*; download"),
        ("sample_annotation", lambda records: records[0].update(size=[1, 2]), "a size has other than 3 numbers"),
        ("sample_annotation", lambda records: records[0].pop("size"), "1 records have no 'size'; download"),
    ],
)
def test_a_table_of_another_form_is_named_and_nothing_runs(
    name: str, change: Callable[[list[dict[str, Any]]], Any], text: str, door: FrontDoor, spoil: Callable[..., Drive]
) -> None:
    drive = spoil()
    records = read_table(drive.root / VERSION, name)
    change(records)
    write_table(drive.root / VERSION, name, records)
    stages = {"groundtruth": {"vectors": "untrained:0"}}
    code, out, err = door("run", door.job({"type": "nuscenes", "root": "drive"}, stages))
    assert (code, bool(re.search(text, err))) == (2, True), (code, out, err)


def test_another_record_s_token_is_told_to_be_one(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("good")
    row = drive.row("good", CAMERA)
    says = f"{row['token']!r} is a sample_data ({CAMERA}) of sample {drive.key['good']}; items go by sample tokens"
    stages = {"groundtruth": {"vectors": "untrained:0"}}
    everything = door.job({"type": "nuscenes", "root": "drive"}, stages)
    for verb in ("plan", "run"):
        code, _, err = door(verb, everything, "--item", row["token"])
        assert (code, says in err) == (2, True), err
    code, _, err = door("plan", everything, "--item", "nobody's")
    assert (code, "is no sample token" in err) == (2, True), err
    code, _, err = door("plan", everything, f"source.samples={row['token']}")
    assert (code, says in err) == (2, True), err


def test_wrong_places_are_told_with_the_right_ones(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("good")
    (door.folder / "file").touch()
    (door.folder / "code.pkl").write_bytes(pickle.dumps({"infos": [Canary(door.folder / "canary")]}))
    (door.folder / "list.pkl").write_bytes(pickle.dumps([1]))
    path = door.job(source(drive), {"virtual_points": {}})
    key, folder = drive.key["good"], door.folder
    assert door("run", path)[0] == 0
    for argv, code, text in (
        (["plan", path, "source.root=/nowhere"], 2, "source.root is the folder that holds nuScenes' samples/"),
        (["plan", path, f"source.root={drive.root / VERSION}"], 2, "source.root is the folder above"),
        (["plan", path, "source.version=v1.0-test"], 2, f"no tables or info pickle 'v1.0-test'; it has {VERSION}"),
        (["plan", path, f"source.version={folder / 'code.pkl'}"], 2, "only plain values and numpy arrays are read"),
        (["plan", path, f"source.version={folder / 'list.pkl'}"], 2, f"{folder / 'list.pkl'}: list with no keys"),
        (["draw", path, key, str(folder / "a.xyz")], 2, "give a file name that ends in .png"),
        (["draw", path, key, str(folder / "no" / "a.png")], 2, "in a folder that is there"),
        (["draw", path, key, str(folder / "a.png"), "--stage", "virtual_points"], 2, "name a stage that finds objects"),
        (["export", "virtual_points", str(folder / "file")], 2, f"{folder / 'file'} is a file"),
        (["make-data", "scannet", str(folder / "file")], 2, "is a file"),
        (["doctor", "--checkpoint", str(folder / "no.pth")], 2, "no.pth: no such file"),
        (["doctor", "--checkpoint", str(folder)], 2, "a folder, expected a file"),
    ):
        found, out, err = door(*argv)
        assert (found, text in err) == (code, True), (argv, found, out, err)
    assert not (folder / "canary").exists()

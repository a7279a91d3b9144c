"""What runs again after a change in a nuScenes drive, and that records are the same whatever runs beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.front_door import FrontDoor
from tests.pipelines.nuscenes.spoilt_drive import CAMERA, CENTERPOINT, FRAMES, VERSION, Drive, source
from tests.pipelines.small_nuscenes import write_table


def test_a_change_runs_what_depends_on_it_and_nothing_else(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("first", *(f"other {i}" for i in range(FRAMES - 1)), "second")
    stages = {
        "centerpoint": CENTERPOINT,
        "bev": {"extractor": "centerpoint", **CENTERPOINT, "give": "bev"},
        "head": {"extractor": "centerpoint_head", "weights": "untrained:0", "voxel": 0.1, "of": ["bev"]},
        "crop": {"extractor": "object_crop", "of": ["bev", "head"]},
        "virtual_points": {},
        "groundtruth": {"vectors": "untrained:0"},
    }
    path = door.job(source(drive, "first", "second"), stages)
    assert door("run", path)[0] == 0
    first = {name: door.digests(name) for name in stages}
    assert all(len(digests) == 2 for digests in first.values())

    def computed(*overrides: str) -> dict[str, set[str]]:
        """Stage -> labels of the items that a run would compute, or might."""
        found = {
            stage["stage"]: {row["item"] for row in stage["items"] if row["action"] not in ("reuse", "skip")}
            for stage in door.json("plan", path, *overrides, "--list")["stages"]
        }
        return {name: set(drive.label(dict.fromkeys(keys))) for name, keys in found.items() if keys}

    assert computed() == {}
    write_table(drive.root / VERSION, "calibrated_sensor", drive.calibrations, indent=2)  # other bytes, same content
    assert computed() == {}
    both = {"first", "second"}
    for stage in ("crop", "centerpoint"):
        assert computed(f"{stage}.pool=max") == {stage: both}
        assert door("run", path, f"{stage}.pool=max")[0] == 0
        changed = {name for name in stages if door.digests(name) != first[name]}
        assert changed == {stage}
        assert door("run", path)[0] == 0  # the earlier records are still there
        assert door.digests(stage) == first[stage]

    def calibration(label: str, channel: str) -> dict[str, Any]:
        token = drive.row(label, channel)["calibrated_sensor_token"]
        (found,) = (c for c in drive.calibrations if c["token"] == token)
        return found

    calibration("first", CAMERA)["translation"][2] += 0.01
    drive.save()
    assert computed() == {"virtual_points": {"first"}}
    calibration("first", CAMERA)["translation"][2] -= 0.01
    calibration("second", "LIDAR_TOP")["rotation"] = [1, 0, 0, 0]
    drive.save()
    assert computed() == {name: {"second"} for name in stages}


def _mixed(root: Path, door: FrontDoor, *how: str) -> dict[str, dict[str, bytes]]:
    """Digests after a run of three key frames, the second of them bad."""
    drive = Drive(shutil.copytree(root, door.folder / "drive"), ("a", "bad", "b"))
    drive.file("bad").write_bytes(b"")
    stages = {"centerpoint": CENTERPOINT, "virtual_points": {}, "groundtruth": {"vectors": "untrained:0"}}
    code, out, err = door("run", door.job(source(drive), stages), *how, "--max-failure-rate", "1")
    assert code == 3, out + err
    return {name: door.digests(name) for name in stages}


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many threads here as Ray gives a worker: another number moves sums by 2e-6 of the largest."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_by_one(whole: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, dict[str, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        digests = _mixed(whole, FrontDoor(tmp_path_factory.mktemp("alone"), patch), "centerpoint.batch=1")
    assert [len(found) for found in digests.values()] == [2, 2, 3]
    return digests


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("centerpoint.batch=4",), id="batch 4"),
        pytest.param(("--runner", "ray", "--workers", "1"), marks=[pytest.mark.ray, pytest.mark.slow], id="ray 1"),
        pytest.param(("--runner", "ray", "--workers", "2"), marks=pytest.mark.ray, id="ray 2"),
    ],
)
def test_records_are_the_same_whatever_runs_beside_them(
    how: tuple[str, ...], one_by_one: dict[str, dict[str, bytes]], whole: Path, door: FrontDoor
) -> None:
    """Bit for bit, since on the CPU key frames go through the network one by one."""
    assert _mixed(whole, door, *how) == one_by_one

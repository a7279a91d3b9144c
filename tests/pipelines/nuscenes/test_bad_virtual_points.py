"""Virtual points and masks of every kind, through `scenecache run`: each is right, or under its own error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipelines.front_door import FrontDoor
from tests.pipelines.nuscenes.spoilt_drive import CAMERA, LISTS, Canary, Drive, assert_named, foreground, source

FOREGROUND_FAULTS = {
    "absent": ("MissingFile", "make virtual points first"),
    "empty": ("EmptyInput", "no bytes; is the download complete?"),
    "noise": ("UnsupportedFile", "not a file of numpy.save"),
    "cut": ("UnsupportedFile", "cannot be unpickled"),
    "code": ("UnsupportedFile", "refers to"),
    "array": ("UnsupportedFile", "expected one pickled object"),
    "none": ("UnsupportedFile", "virtual_pixel_indices is a NoneType, expected a list of arrays"),
    "five": ("UnsupportedFile", "expected 6 each"),
    "narrow": ("InvalidValues", "expected (n, 3) u, v, depth and (n, 14)"),
    "nan": ("InvalidValues", "NaN or infinity"),
}


def test_files_of_virtual_points_are_read_or_named(
    door: FrontDoor, spoil: Callable[..., Drive], tmp_path: Path
) -> None:
    drive = spoil("good", "nothing", *FOREGROUND_FAULTS)
    canary, control = tmp_path / "canary", tmp_path / "control"
    pickle.loads(pickle.dumps(Canary(control)))
    assert control.exists()  # the trap works
    drive.virtual("absent").unlink()
    drive.virtual("empty").write_bytes(b"")
    drive.virtual("noise").write_bytes(b"garbage")
    drive.virtual("cut").write_bytes(drive.virtual("good").read_bytes()[:-200])
    bad = foreground()
    bad["real_points"] = [bad["real_points"][0] * np.nan] * 6
    contents = {
        "nothing": {name: [] for name in LISTS}, "code": {"a": Canary(canary)}, "array": np.zeros((4, 14)),
        "none": dict.fromkeys(LISTS), "five": {name: value[:5] for name, value in foreground().items()},
        "narrow": {name: [np.zeros((2, 3))] * 6 for name in LISTS}, "nan": bad,
    }  # fmt: skip
    for label, content in contents.items():
        np.save(drive.virtual(label), content, allow_pickle=True)
    path = door.job(source(drive), {"virtual_points": {"extractor": "virtual_points_files"}})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3
    assert_named(door, "virtual_points", drive, FOREGROUND_FAULTS)
    assert not canary.exists()
    records = drive.label(door.records("virtual_points"))
    assert {label: len(record["depth"]) for label, record in records.items()} == {"good": 36, "nothing": 0}

    fused = {"virtual_points": {"extractor": "virtual_points_files"}, "msmdfusion": {"weights": "untrained:0"}}
    plan = drive.label(door.plan(door.job(source(drive), fused), "msmdfusion"))
    assert {k for k, v in plan.items() if v == ("skip", "upstream failed")} == set(FOREGROUND_FAULTS)


@pytest.mark.slow
def test_fusion_without_virtual_points_or_with_misplaced_ones(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("good", "nothing", "outside")
    np.save(drive.virtual("nothing"), {name: [] for name in LISTS}, allow_pickle=True)  # type: ignore[arg-type]
    misplaced = foreground()
    misplaced["real_pixel_indices"] = [np.float32([[5000, 20, 10]] * 3)] * 6
    np.save(drive.virtual("outside"), misplaced, allow_pickle=True)  # type: ignore[arg-type]
    stages = {"virtual_points": {"extractor": "virtual_points_files"}, "msmdfusion": {"weights": "untrained:0"}}
    assert door("run", door.job(source(drive), stages), "--max-failure-rate", "1")[0] == 3
    assert_named(door, "msmdfusion", drive, {"outside": ("InvalidValues", "pixel (5000, 20), outside 1600 x 900")})
    records = drive.label(door.records("msmdfusion"))
    assert {label: set(r["painted_points"].tolist()) for label, r in records.items()} == {"good": {36}, "nothing": {0}}
    assert all(np.isfinite(record["feature"]).all() for record in records.values())


BOX = np.array([[0, 0, 1600, 900.0]])
CAR, SURE = np.array(["car"]), np.ones(1)
MASK_FAULTS: dict[str, tuple[dict[str, Any] | bytes | None, str, str]] = {
    "absent": (None, "MissingFile", f"no masks of {CAMERA}; source.masks is their folder"),
    "empty": (b"", "UnsupportedFile", "not a .npz of plain arrays"),
    "noise": (b"garbage", "UnsupportedFile", "not a .npz of plain arrays"),
    "small": ({"names": CAR, "scores": SURE, "masks": np.ones((1, 450, 800), bool)}, "InvalidValues", "900, 1600)"),
    "neither": ({"names": CAR, "scores": SURE}, "UnsupportedFile", "expected names, scores, and either masks or boxes"),
    "text": ({"names": CAR, "scores": np.array(["x"]), "boxes": BOX}, "UnsupportedFile", "expected text and numbers"),
    "number": ({"names": SURE, "scores": SURE, "boxes": BOX}, "UnsupportedFile", "expected text and numbers"),
    "nan": ({"names": CAR, "scores": SURE * np.nan, "boxes": BOX}, "InvalidValues", "NaN or infinity"),
    "percent": ({"names": CAR, "scores": SURE * 90, "boxes": BOX}, "InvalidValues", "expected 0 to 1"),
    "size": ({"names": CAR, "scores": SURE, "boxes": np.array([[900, 400, 50, 60.0]])}, "InvalidValues",
             "a box ends before it begins; expected left, upper, right, lower"),
}  # fmt: skip


def test_masks_are_read_or_named(door: FrontDoor, spoil: Callable[..., Drive], tmp_path: Path) -> None:
    drive = spoil("good", "none", "strange", "code", *MASK_FAULTS)
    for label, (content, _, _) in MASK_FAULTS.items():
        if isinstance(content, dict):
            np.savez(drive.masks(label), **content)
        elif content is None:
            drive.masks(label).unlink()
        else:
            drive.masks(label).write_bytes(content)
    np.savez(drive.masks("none"), names=np.array([]), scores=np.array([]), boxes=np.zeros((0, 4)))
    np.savez(drive.masks("strange"), names=np.array(["tank"]), scores=SURE, boxes=BOX)
    code = np.empty(1, object)
    code[0] = Canary(tmp_path / "canary")
    np.savez(drive.masks("code"), names=code, scores=SURE, boxes=BOX)
    path = door.job(source(drive), {"virtual_points": {}})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3
    expected = {label: (kind, text) for label, (_, kind, text) in MASK_FAULTS.items()}
    assert_named(door, "virtual_points", drive, {**expected, "code": ("UnsupportedFile", "plain arrays")})
    assert not (tmp_path / "canary").exists()
    camera = 4  # of CAM_BACK in records
    seen = {label: camera in r["camera"] for label, r in drive.label(door.records("virtual_points")).items()}
    assert seen == {"good": True, "none": False, "strange": False}

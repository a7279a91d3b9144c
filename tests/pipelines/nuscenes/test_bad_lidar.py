"""LiDAR scans of every kind, through `scenecache run`: each is right, or under its own error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.pipelines.front_door import FrontDoor
from tests.pipelines.nuscenes.spoilt_drive import CENTERPOINT, Drive, assert_named, source

LIDAR_FAULTS = {
    "zero": ("EmptyInput", "zero bytes, no points; get the file again"),
    "far": ("EmptyInput", "none of 60 LiDAR points lies within 51.2 m"),
    "nan": ("InvalidValues", "60 of 60 points have values that are not finite; get the file again"),
    "inf": ("InvalidValues", "1 of 60 points have values that are not finite; get the file again"),
    "cut": ("TruncatedFile", "1193 bytes are no whole number of points of 20 bytes"),
    "four": ("UnsupportedFile", "no ring number"),
    "six": ("UnsupportedFile", "no ring number"),
    "absent": ("MissingFile", "get the archive that holds it"),
    "turn": ("InvalidValues", "no rotation and translation; mend"),
}


def test_scans_of_every_kind_are_right_or_named(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("good", "twin", "one", "few", "huge", *LIDAR_FAULTS)
    points = drive.points("good")
    spots = {"far": (slice(None), slice(0, 2), 1e4), "nan": (slice(None), 1, np.nan), "inf": (3, 3, np.inf),
             "huge": (slice(20, None), slice(0, 3), 1e38)}  # fmt: skip
    for label, (rows, columns, value) in spots.items():
        spoilt = points.copy()
        spoilt[rows, columns] = value
        drive.file(label).write_bytes(spoilt.tobytes())
    tables = {"zero": points[:0], "one": points[:1], "few": points[:20], "four": points[:, :4],
              "six": np.hstack([points, points[:, :1]])}  # fmt: skip
    for label, table in tables.items():
        drive.file(label).write_bytes(table.tobytes())
    drive.file("cut").write_bytes(points.tobytes()[:-7])
    drive.file("absent").unlink()
    drive.calibrate("turn", "LIDAR_TOP", rotation=[0, 0, 0, 0])
    drive.row("twin", "LIDAR_TOP")["filename"] = drive.row("good", "LIDAR_TOP")["filename"]
    drive.save()

    many = {**CENTERPOINT, "objects": 500, "score_threshold": 0.0}
    path = door.job(source(drive), {"centerpoint": many})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3
    assert_named(door, "centerpoint", drive, LIDAR_FAULTS)
    records, digests = drive.label(door.records("centerpoint")), drive.label(door.digests("centerpoint"))
    assert set(records) == {"good", "twin", "one", "few", "huge"}
    for record in records.values():
        assert 100 < len(record["score"]) <= 500
        assert np.isfinite(record["feature"]).all()
        assert (np.diff(record["score"]) <= 0).all()
    assert digests["twin"] == digests["good"]  # the same file
    assert digests["huge"] == digests["few"]  # points beyond the range do not count
    assert digests["one"] != digests["few"] != digests["good"]
    plan = drive.label(door.plan(path, "centerpoint"))
    assert {k for k, v in plan.items() if v == ("reuse", "unchanged")} == set(records)
    assert {k for k, v in plan.items() if v == ("skip", "failed before")} == set(LIDAR_FAULTS)
    drive.file("cut").write_bytes(points.tobytes())
    assert drive.label(door.plan(path, "centerpoint"))["cut"] == ("compute", "input changed")

    stages = {
        "capped": {"extractor": "centerpoint", **many, "max_voxels": 20},
        "sure": {"extractor": "centerpoint", **CENTERPOINT, "score_threshold": 1.0},
    }
    assert door("run", door.job(source(drive, "good"), stages))[0] == 0
    # 60 points in 60 voxels: at a cap of 20 the first 20 points are left
    assert drive.label(door.digests("capped")) == {"good": digests["few"]}
    (status,) = (s for s in door.json("status")["stages"] if s["stage"] == "sure")
    assert (status["empty"], status["ok"], status["failed"]) == (1, 0, 0)
    nothing = door.records("sure")[drive.key["good"]]
    assert nothing["feature"].shape == (0, 512)
    assert nothing["box"].shape == (0, 7)
    for stage, note in (("centerpoint", "with more than the 100 objects"), ("sure", "1 without objects")):
        code, out, _ = door("export", stage, str(door.folder / stage), "--format", "nuscenes-qa")
        assert (code, note in out) == (0, True), out
        written = np.load(door.folder / stage / f"{drive.key['good']}.npz", allow_pickle=True)["results"]
        assert len(written) == len(door.records(stage)[drive.key["good"]]["score"])


def test_sweeps_that_are_not_there_are_counted_or_refused(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("whole", "lacks", "bad")
    drive.sweep("lacks", 1).unlink()
    noise = drive.points("bad")
    noise[5] = np.nan
    drive.sweep("bad", 2).write_bytes(noise.tobytes())
    path = door.job(source(drive, sweeps=2), {"centerpoint": CENTERPOINT})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3
    bad = ("InvalidValues", str(drive.sweep("bad", 2)))
    assert_named(door, "centerpoint", drive, {"bad": bad})
    records = drive.label(door.records("centerpoint"))
    assert {label: set(record["sweeps"].tolist()) for label, record in records.items()} == {"whole": {2}, "lacks": {1}}

    strict = "source.missing_sweeps=raise"
    assert drive.label(
        {k: v[0] for k, v in _plan(door, path, strict, "centerpoint").items()}
    ) == {"whole": "reuse", "lacks": "compute", "bad": "skip"}  # fmt: skip
    assert door("run", path, strict, "--max-failure-rate", "1")[0] == 3
    lacks = ("MissingFile", f"1 of 2 sweeps are not there, such as {drive.sweep('lacks', 1)}; get the archives")
    assert_named(door, "centerpoint", drive, {"bad": bad, "lacks": lacks})

    few = "centerpoint.min_sweeps=2"
    assert door("run", path, few, "--item", drive.key["lacks"], "--max-failure-rate", "1")[0] == 3
    short = ("InvalidValues", "1 sweeps before the key frame, 1 are not on the disk; min_sweeps is 2")
    assert_named(door, "centerpoint", drive, {"bad": bad, "lacks": short})


def _plan(door: FrontDoor, path: str, override: str, stage: str) -> dict[str, tuple[str, str]]:
    (lines,) = (s for s in door.json("plan", path, override, "--list")["stages"] if s["stage"] == stage)
    return {row["item"]: (row["action"], row["reason"]) for row in lines["items"]}


@pytest.mark.slow
def test_two_million_points_are_only_many(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("many", "good")
    rng = np.random.default_rng(0)
    points = rng.uniform([-60, -60, -6, 0, 0], [60, 60, 4, 255, 0], (2_000_000, 5)).astype(np.float32)
    drive.file("many").write_bytes(points.tobytes())
    assert door("run", door.job(source(drive), {"centerpoint": CENTERPOINT}))[0] == 0
    for record in door.records("centerpoint").values():
        assert record["feature"].shape[0] > 0
        assert np.isfinite(record["feature"]).all()

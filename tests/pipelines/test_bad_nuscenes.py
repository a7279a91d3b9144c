"""Bad key frames of nuScenes beside good ones, through `scenecache run`: each is right, or under its own error."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pipelines import small_nuscenes
from tests.pipelines.front_door import FrontDoor
from tests.pipelines.small_nuscenes import CAMERAS, SCENES, read_table, token, write_pickle, write_table

VERSION, FRAMES, CAMERA = "v1.0-mini", 8, "CAM_BACK"
VIRTUAL = Path("samples/FOREGROUND_MIXED_6NN_WITH_DEPTH")
CENTERPOINT = {"weights": "untrained:0", "voxel": 0.1, "pad_empty": False}  # small map, no copies: the cheapest network
LISTS = ("virtual_pixel_indices", "virtual_points", "real_pixel_indices", "real_points")


class Drive:
    """A drive on disk whose key frames can be spoiled one by one.

    Attributes:
        key: label -> sample token.
    """

    def __init__(self, root: Path, labels: Iterable[str] = ()) -> None:
        self.root = root
        self.data = read_table(root / VERSION, "sample_data")
        self.calibrations = read_table(root / VERSION, "calibrated_sensor")
        self.key = dict(zip(labels, [token("sample", s, i) for s in SCENES for i in range(FRAMES)], strict=False))

    def row(self, label: str, channel: str) -> dict[str, Any]:
        """Record of sample_data of a key frame."""
        (found,) = (
            row for row in self.data
            if row["sample_token"] == self.key[label] and row["is_key_frame"] and f"/{channel}/" in row["filename"]
        )  # fmt: skip
        return found

    def file(self, label: str, channel: str = "LIDAR_TOP") -> Path:
        return self.root / self.row(label, channel)["filename"]

    def sweep(self, label: str, back: int) -> Path:
        row, rows = self.row(label, "LIDAR_TOP"), {row["token"]: row for row in self.data}
        for _ in range(back):
            row = rows[row["prev"]]
        return self.root / row["filename"]

    def points(self, label: str) -> np.ndarray:
        return np.fromfile(self.file(label), np.float32).reshape(-1, 5)

    def masks(self, label: str) -> Path:
        return self.root / "masks" / f"{self.file(label, CAMERA).stem}.npz"

    def virtual(self, label: str) -> Path:
        return self.root / VIRTUAL / f"{self.file(label).name}.pkl.npy"

    def calibrate(self, label: str, channel: str, **changes: Any) -> None:
        """Give one key frame of a sensor a calibration of its own."""
        row = self.row(label, channel)
        (known,) = (c for c in self.calibrations if c["token"] == row["calibrated_sensor_token"])
        self.calibrations.append({**known, "token": token("own", label, channel), **changes})
        row["calibrated_sensor_token"] = self.calibrations[-1]["token"]

    def save(self) -> None:
        write_table(self.root / VERSION, "sample_data", self.data)
        write_table(self.root / VERSION, "calibrated_sensor", self.calibrations)

    def label(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The same by label instead of by token."""
        names = {key: label for label, key in self.key.items()}
        return {names[key]: value for key, value in found.items() if key in names}


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


GREY = Image.fromarray(np.add.outer(np.arange(900) % 200, np.arange(1600) % 50).astype(np.uint8))
JPEG = encoded(GREY.convert("RGB"))


def foreground(count: int = 3) -> dict[str, Any]:
    """Content of a file of virtual points, alike in all six cameras."""
    pixels, points = np.tile(np.float32([100, 200, 10]), (count, 1)), np.zeros((count, 14), np.float32)
    points[:, :4], points[:, 13] = (1, 10, 0, 1), 1
    return {name: [pixels if "pixel" in name else points] * 6 for name in LISTS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drive without a fault: 16 key frames, images, masks and virtual points."""
    root = small_nuscenes.make(tmp_path_factory.mktemp("drive"), key_frames=FRAMES)
    (root / "masks").mkdir()
    (root / VIRTUAL).mkdir()
    for row in read_table(root / VERSION, "sample_data"):
        path = root / row["filename"]
        if row["is_key_frame"] and "/CAM" in row["filename"]:
            path.write_bytes(JPEG)
            boxes = np.array([[400, 200, 1200, 700.0]])
            np.savez(root / "masks" / f"{path.stem}.npz", names=np.array(["car"]), scores=np.ones(1), boxes=boxes)
        elif row["is_key_frame"] and "/LIDAR" in row["filename"]:
            np.save(root / VIRTUAL / f"{path.name}.pkl.npy", foreground(), allow_pickle=True)  # type: ignore[arg-type]
    return root


@pytest.fixture
def spoil(whole: Path, tmp_path: Path) -> Callable[..., Drive]:
    """A copy of the drive, with names for its first key frames."""
    return lambda *labels: Drive(shutil.copytree(whole, tmp_path / "drive"), labels)


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontDoor:
    return FrontDoor(tmp_path, monkeypatch)


def source(drive: Drive, *labels: str, **settings: Any) -> dict[str, Any]:
    samples = [drive.key[label] for label in labels or drive.key]
    return {"type": "nuscenes", "root": "drive", "sweeps": 0, "samples": samples, "masks": "drive/masks", **settings}


def assert_named(door: FrontDoor, stage: str, drive: Drive, expected: dict[str, tuple[str, str]]) -> None:
    """Exactly these items have failed, each under its class, with the item and so much else in its text."""
    found = drive.label(door.failures(stage))
    assert {label: kind for label, (kind, _) in found.items()} == {k: kind for k, (kind, _) in expected.items()}
    for label, (_, text) in found.items():
        assert drive.key[label] in text, text
        assert expected[label][1] in text, text


# LiDAR

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


# images

IMAGE_FAULTS = {
    "small": ("InvalidValues", "has 800 x 450 pixels, expected 1600 x 900"),
    "cut": ("TruncatedFile", "is the download complete?"),
    "corrupt": ("DecodeError", "is a damaged JPEG: part of its data does not decode; fetch it again"),
    "noise": ("DecodeError", "is no image that Pillow knows"),
    "empty": ("EmptyInput", "has no bytes; is the download complete?"),
    "deep": ("UnsupportedFile", "expected 8-bit RGB or grey"),
    "absent": ("MissingFile", "get the archive that holds it"),
    "unnamed": ("MissingFile", f"do not name one image of {CAMERA}; get them again"),
    "twice": ("MissingFile", f"do not name one image of {CAMERA}; get them again"),
    "mirrored": ("InvalidValues", "is no camera matrix; mend"),
    "blind": ("InvalidValues", "is no camera matrix; mend"),
    "turn": ("InvalidValues", "no rotation and translation; mend"),
}


def test_images_of_every_kind_are_right_or_named(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("good", "grey", *IMAGE_FAULTS)
    corrupt = bytearray(JPEG)
    corrupt[len(JPEG) // 2 : len(JPEG) // 2 + 40] = bytes(40)
    contents = {
        "small": encoded(GREY.resize((800, 450)).convert("RGB")), "cut": JPEG[: len(JPEG) // 2],
        "corrupt": bytes(corrupt), "noise": np.random.default_rng(0).bytes(5000), "empty": b"",
        "deep": encoded(Image.fromarray(np.asarray(GREY, np.uint16) * 200), "PNG"),
    }  # fmt: skip
    for label, content in contents.items():
        drive.file(label, CAMERA).write_bytes(content)
    for camera in CAMERAS:
        drive.file("grey", camera).write_bytes(encoded(GREY))
    for channel in ("LIDAR_TOP", *CAMERAS):  # the same place, so that the record has to be the same too
        drive.row("grey", channel)["ego_pose_token"] = drive.row("good", channel)["ego_pose_token"]
    drive.file("absent", CAMERA).unlink()
    drive.data.remove(drive.row("unnamed", CAMERA))
    drive.data.append({**drive.row("twice", CAMERA), "token": token("twice")})
    drive.calibrate("mirrored", CAMERA, camera_intrinsic=[[-1266, 0, 816], [0, 1266, 491], [0, 0, 1]])
    drive.calibrate("blind", CAMERA, camera_intrinsic=[])
    drive.calibrate("turn", CAMERA, rotation=[0, 0, 0, 0])
    drive.save()
    path = door.job(source(drive), {"bevdet": {"weights": "untrained:0"}})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3
    assert_named(door, "bevdet", drive, IMAGE_FAULTS)
    assert all(CAMERA in text for _, text in door.failures("bevdet").values())
    digests = drive.label(door.digests("bevdet"))
    assert set(digests) == {"good", "grey"}
    assert digests["grey"] == digests["good"]
    record = door.records("bevdet")[drive.key["good"]]
    assert len(record["score"]) > 0
    assert np.isfinite(record["feature"]).all()


# virtual points and masks


class Canary:
    """Pickled code that would leave a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


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


def infos(drive: Drive) -> dict[str, Any]:
    """An info pickle of mmdetection3d 1.1 with the poses of nobody."""
    lidar2cam = np.array([[1, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1.0]])
    cam2ego = np.linalg.inv(lidar2cam)
    image = {"cam2img": [[1266, 0, 816], [0, 1266, 491], [0, 0, 1]], "lidar2cam": lidar2cam.tolist(),
             "cam2ego": cam2ego.tolist(), "timestamp": 1.0}  # fmt: skip
    return {
        "metainfo": {"categories": {"car": 0}},
        "data_list": [
            {
                "token": drive.key[label], "timestamp": 1.0, "ego2global": np.eye(4).tolist(), "instances": [],
                "lidar_points": {"lidar_path": drive.file(label).name, "lidar2ego": np.eye(4).tolist()},
                "images": {c: {**image, "img_path": drive.file(label, c).name} for c in CAMERAS},
            }
            for label in drive.key
        ],
    }  # fmt: skip


def test_mirrored_and_missing_cameras_of_an_info_pickle_are_named(door: FrontDoor, spoil: Callable[..., Drive]) -> None:
    drive = spoil("good", "mirrored", "skewed", "nan", "unnamed", "lidar")
    content = infos(drive)
    samples = dict(zip(drive.key, content["data_list"], strict=True))
    for label, (row, column, value) in {"mirrored": (0, 0, -1), "skewed": (0, 1, 0.5), "nan": (0, 3, np.nan)}.items():
        samples[label]["images"][CAMERA]["lidar2cam"] = np.array(samples[label]["images"][CAMERA]["lidar2cam"])
        samples[label]["images"][CAMERA]["lidar2cam"][row, column] = value
    del samples["unnamed"]["images"][CAMERA]
    samples["lidar"]["lidar_points"]["lidar2ego"] = np.diag([-1.0, 1, 1, 1]).tolist()
    write_pickle(drive.root / "infos.pkl", content)
    path = door.job(source(drive, version="infos.pkl"), {"virtual_points": {}})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3
    turned = ("InvalidValues", f"{CAMERA}: pose and calibration are no rotation and translation; mend")
    expected = dict.fromkeys(("mirrored", "skewed", "nan"), turned)
    expected["unnamed"] = ("MissingFile", f"do not name one image of {CAMERA}")
    expected["lidar"] = ("InvalidValues", "LIDAR_TOP: the calibration is no rotation and translation; mend")
    assert_named(door, "virtual_points", drive, expected)
    assert set(drive.label(door.records("virtual_points"))) == {"good"}


# tables


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


# what runs again, and on what


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

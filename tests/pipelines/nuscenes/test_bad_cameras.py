"""Images and calibrations of every kind, through `scenecache run`: each is right, or under its own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests.pipelines.front_door import FrontDoor
from tests.pipelines.nuscenes.spoilt_drive import CAMERA, GREY, JPEG, Drive, assert_named, encoded, source
from tests.pipelines.small_nuscenes import CAMERAS, token, write_pickle

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

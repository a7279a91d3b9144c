"""A drive whose key frames can be spoiled one by one, and what is expected of a job on it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.pipelines.front_door import FrontDoor
from tests.pipelines.small_nuscenes import SCENES, read_table, token, write_table

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


class Canary:
    """Pickled code that would leave a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


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

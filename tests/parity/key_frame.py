"""The real key frame that the references of nuScenes' detectors were made of, changed as their recipes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.inputs import Camera, Cameras
from extractors.safe_pickle import read_pickle


def read_info(data_dir: Path) -> tuple[dict[str, Any], Path]:
    """The key frame's info pickle and its folder."""
    files = sorted((data_dir / "nuscenes").glob("*.pkl"))
    if not files:
        pytest.skip(f"no info pickle in {data_dir / 'nuscenes'}")
    return read_pickle(files[0]), files[0].parent


def read_points(data_dir: Path, negate_x: bool = False) -> np.ndarray:
    """(point, 5) float32: x, y, z, intensity, ring."""
    info, folder = read_info(data_dir)
    points = np.fromfile(folder / info["data_list"][0]["lidar_points"]["lidar_path"], np.float32).reshape(-1, 5)
    if negate_x:
        points[:, 0] *= -1
    return points


def read_cameras(data_dir: Path) -> Cameras:
    """The six cameras, calibrated as the references had it: by `lidar2cam` alone."""
    info, folder = read_info(data_dir)
    return Cameras(
        tuple(
            Camera(name, folder / one["img_path"], np.array(one["cam2img"]), np.linalg.inv(one["lidar2cam"]), None)
            for name, one in info["data_list"][0]["images"].items()
        )
    )

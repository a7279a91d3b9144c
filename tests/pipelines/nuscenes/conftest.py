"""A drive without a fault, copies of it to spoil, and the command line to run jobs on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.pipelines import small_nuscenes
from tests.pipelines.front_door import FrontDoor
from tests.pipelines.nuscenes.spoilt_drive import FRAMES, JPEG, VERSION, VIRTUAL, Drive, foreground
from tests.pipelines.small_nuscenes import read_table


@pytest.fixture(scope="session")
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

"""`scenecache draw`: where a box's edges fall in an image, and one picture of a real key frame."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from extractors.boxes3d import CLASSES, bottom_from_centre
from extractors.inputs import Camera
from pipelines.draw import annotated, edges_in_image
from pipelines.sources.nuscenes import NuScenes
from tests.pipelines.front_door import FrontDoor

AHEAD = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])  # a camera that looks along the LiDAR's y
VIEW = Camera("CAM_FRONT", Path("none.jpg"), np.array([[100.0, 0, 50], [0, 100, 30], [0, 0, 1]]), AHEAD, None)


@pytest.fixture
def real(data_dir: Path) -> NuScenes:
    if not (data_dir / "nuscenes").is_dir():
        pytest.skip(f"no folder {data_dir / 'nuscenes'}")
    return NuScenes(data_dir / "nuscenes")


def test_a_box_ahead_is_where_the_pinhole_camera_has_it() -> None:
    box = np.array([[0.0, 10.0, -1.0, 2.0, 4.0, 2.0, np.pi / 2]])  # 2 m long and 4 m wide, ahead; it faces away
    edges = edges_in_image(box, VIEW)[0].reshape(-1, 2)
    u, v = 50 + 100 * 2 / 9, 30 + 100 * 1 / 9  # its near face: 9 m away, 2 m to each side, 1 m up and down
    assert np.allclose(edges.max(0), [u, v])
    assert np.allclose(edges.min(0), [100 - u, 60 - v])


def test_a_box_behind_is_not_drawn_and_one_that_passes_the_camera_is_cut() -> None:
    behind = np.array([[0.0, -10.0, -1.0, 2.0, 4.0, 2.0, np.pi / 2]])
    assert np.isnan(edges_in_image(behind, VIEW)).all()
    beside = np.array([[3.0, 0.0, -1.0, 20.0, 1.0, 2.0, np.pi / 2]])  # from 10 m behind to 10 m ahead
    edges = edges_in_image(beside, VIEW)[0]
    seen = np.isfinite(edges).all((1, 2))
    assert 0 < seen.sum() < len(edges)
    assert (edges[seen][..., 0] > 50).all()  # all of it to the right


def test_real_echoes_of_objects_are_seen_within_their_boxes(real: NuScenes) -> None:
    (key,) = real.keys()
    boxes, points = annotated(real.open(key, "annotations")), real.open(key, "lidar").key.points[:, :3]
    checked = 0
    for view in real.open(key, "cameras").views:
        camera = np.linalg.inv(view.to_lidar)
        for box in boxes.boxes:
            turn = np.array([[np.cos(box[6]), np.sin(box[6])], [-np.sin(box[6]), np.cos(box[6])]])
            local = np.c_[(points[:, :2] - box[:2]) @ turn.T, points[:, 2] - box[2] - box[5] / 2]
            echoes = points[(np.abs(local) <= box[3:6] / 2).all(1)] @ camera[:3, :3].T + camera[:3, 3]
            edges = edges_in_image(box[None], view)[0]
            if len(echoes) < 5 or not np.isfinite(edges).all():
                continue
            pixels = (echoes @ view.intrinsic.T)[:, :2] / echoes[:, 2:]
            low, high = edges.reshape(-1, 2).min(0), edges.reshape(-1, 2).max(0)
            assert ((pixels >= low - 1e-6) & (pixels <= high + 1e-6)).all()
            checked += 1
    assert checked >= 10


def test_the_picture_of_a_real_key_frame_shows_its_boxes(
    real: NuScenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = FrontDoor(tmp_path, monkeypatch)
    (key,) = real.keys()
    found = real.open(key, "annotations")
    wanted = sum(name in CLASSES for name in found.names)
    assert len(bottom_from_centre(found.boxes)) >= wanted > 0
    path = door.job({"type": "nuscenes", "root": str(real.root)}, {})
    code, out, err = door("draw", path, key, str(tmp_path / "key_frame.png"))
    assert code == 0, err
    assert f"{wanted} annotated" in out
    picture = cv2.imread(str(tmp_path / "key_frame.png")).astype(int)
    assert picture.shape == (720, 2640, 3)
    above = picture[:, 1920:]  # grey echoes on black, and the boxes
    assert (above[..., 1] - above[..., 2] > 40).sum() > 1000
    assert door("draw", path, key, str(tmp_path / "nowhere/key_frame.png"))[0] == 2

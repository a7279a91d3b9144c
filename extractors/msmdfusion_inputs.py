"""What MSMDFusion's network takes of a key frame: points, images, calibration, and painted points with their pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from extractors.errors import InvalidValues
from extractors.image_preprocess import named_views, open_rgb
from extractors.inputs import Camera, Cameras, LidarSweeps

CAMERAS = ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_RIGHT", "CAM_BACK", "CAM_BACK_LEFT")
"""The order of cameras in virtual point files, records and the network."""

IMAGE_SIZE = (1600, 900)  # (width, height) of nuScenes; pixels of virtual points count in it
RESIZED = (796, 448)  # fits (800, 448) with the aspect kept
PADDED = (800, 448)  # the next multiples of 32
POINT_RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)


@dataclass(frozen=True)
class Frame:
    """A key frame, ready for the network.

    Attributes:
        points: (n, 5) float32 x, y, z, intensity, seconds back.
        images: (6, 448, 796, 3) uint8 RGB, by `CAMERAS`.
        lidar_to_image: (6, 4, 4) float32, LIDAR_TOP -> pixels of the original images.
        depth: (6, 448, 800) float32 metres at the pixels of real foreground points, else 0.
        pixels: (p, 3) float32 u, v in the resized image, depth in metres, of the painted points.
        camera: (p,) int64 index into `CAMERAS`.
        painted: (p, 15) float32 x, y, z, one-hot of ten classes, mask score, seconds back.
        embeddings: four of (1, channels) float32, see `modality_fusion.ModalityFusion`.
        sweeps: earlier sweeps among the points.
    """

    points: np.ndarray
    images: np.ndarray
    lidar_to_image: np.ndarray
    depth: np.ndarray
    pixels: np.ndarray
    camera: np.ndarray
    painted: np.ndarray
    embeddings: tuple[np.ndarray, ...]
    sweeps: int = 0


def read_images(cameras: Cameras, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The six images, resized as OpenCV does (bilinear), and their projections.

    Returns:
        images (6, 448, 796, 3) uint8 RGB, lidar_to_image (6, 4, 4) float64.

    Raises:
        MissingFile, InvalidValues, DecodeError ...: see `image_preprocess`.
    """
    import cv2

    views = named_views(cameras, CAMERAS, key)
    images = np.empty((len(views), *RESIZED[::-1], 3), np.uint8)
    for view, image in zip(views, images, strict=True):
        whole = np.asarray(open_rgb(view.path, IMAGE_SIZE, f"{key} {view.name}"))
        cv2.resize(whole, RESIZED, dst=image, interpolation=cv2.INTER_LINEAR)
    return images, np.stack([lidar_to_image(view) for view in views])


def lidar_to_image(view: Camera) -> np.ndarray:
    """(4, 4) float64: LIDAR_TOP of the key frame, metres -> (u d, v d, d, 1), pixels of the original image."""
    intrinsic = np.eye(4)
    intrinsic[:3, :3] = view.intrinsic
    projection: np.ndarray = intrinsic @ np.linalg.inv(view.to_lidar)
    return projection


def foreground(
    record: Mapping[str, np.ndarray], lidar: LidarSweeps, sweeps: int, key: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Painted points of a record of virtual points, moved to the key frame.

    Pixels of sweeps stay as they are, although the key frame's images are read there, as in the official pipeline.

    Args:
        record: see `virtual_points.SCHEMA`.
        lidar: gives the sweeps' poses and lags.
        sweeps: how many are used.

    Returns:
        pixels, camera, painted and depth of `Frame`.

    Raises:
        InvalidValues: a pixel outside the image, or a sweep that the LiDAR does not have.
    """
    sweep = record["sweep"].astype(np.int64)
    if len(sweep) and sweep.max() > len(lidar.before):
        raise InvalidValues(
            f"{key}: virtual points of sweep {sweep.max()}, but the source has {len(lidar.before)} LiDAR sweeps before "
            f"this key frame; were they made for another set of files?"
        )
    used = np.flatnonzero(sweep <= sweeps)  # also keeps the official order: by camera, then sweep, then virtual, real
    sweep, camera, real = sweep[used], record["camera"][used].astype(np.int64), record["real"][used]
    scale = np.array([RESIZED[0] / IMAGE_SIZE[0], RESIZED[1] / IMAGE_SIZE[1]], np.float32)
    pixels = np.column_stack([record["pixel"][used] * scale, record["depth"][used]])
    outside = ~((pixels[:, :2] >= 0) & (pixels[:, :2] < PADDED)).all(1)
    if outside.any():
        u, v = record["pixel"][used][outside][0]
        raise InvalidValues(
            f"{key}: a virtual point at pixel ({u:g}, {v:g}), outside {IMAGE_SIZE[0]} x {IMAGE_SIZE[1]}"
        )

    scans = (lidar.key, *lidar.before[: int(sweep.max(initial=0))])
    poses = np.stack([scan.to_key for scan in scans])[sweep]
    xyz = np.einsum("pij,pj->pi", poses[:, :3, :3], record["xyz"][used].astype(np.float64)) + poses[:, :3, 3]
    lag = np.array([scan.lag for scan in scans])[sweep]
    painted = np.column_stack([xyz, record["paint"][used], lag]).astype(np.float32)

    depth = depth_canvas(pixels[real], camera[real])
    low, high = np.reshape(POINT_RANGE, (2, 3)).astype(np.float32)
    inside = ((painted[:, :3] > low) & (painted[:, :3] < high)).all(1)
    return pixels[inside], camera[inside], painted[inside], depth


def depth_canvas(pixels: np.ndarray, camera: np.ndarray) -> np.ndarray:
    """(6, 448, 800) float32: depths at their pixels, of several the last; zeros elsewhere. See `Frame.pixels`."""
    canvas = np.zeros((len(CAMERAS), *PADDED[::-1]), np.float32)
    u, v = pixels[:, :2].astype(np.int64).T
    canvas[camera, v, u] = pixels[:, 2]
    return canvas

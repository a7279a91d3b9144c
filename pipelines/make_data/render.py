"""Pictures and depth of textured rectangles, by z-buffer (numpy and OpenCV)."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from pipelines.make_data.surfaces import Patch

_NEAR = 0.05  # metres
_SEAM = 1e-4  # share of an edge by which neighbours overlap, so that no ray passes between them


def render(
    patches: Sequence[Patch], camera_to_world: np.ndarray, intrinsic: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw what a pinhole camera sees; rectangles are seen from the side of their normal alone.

    Args:
        patches: what there is, in the world frame.
        camera_to_world: (4, 4); the camera looks along +z, x right, y down.
        intrinsic: (3, 3) pixels; pixel centres are at whole numbers.
        size: (width, height), pixels.

    Returns:
        (height, width, 3) uint8 RGB, black where nothing is, and (height, width) float32 depth along the optical
        axis, metres, infinite where nothing is.
    """
    width, height = size
    fx, fy, cx, cy = intrinsic[0, 0], intrinsic[1, 1], intrinsic[0, 2], intrinsic[1, 2]
    rotation, position = camera_to_world[:3, :3], camera_to_world[:3, 3]
    origin = (np.array([p.origin for p in patches]) - position) @ rotation  # camera frame
    u = np.array([p.u for p in patches]) @ rotation
    v = np.array([p.v for p in patches]) @ rotation
    normal = np.cross(u, v)
    distance = (normal * origin).sum(axis=1)
    corners = np.stack([origin, origin + u, origin + u + v, origin + v], axis=1)  # (patch, 4, 3)
    x, y, z = np.moveaxis(corners, -1, 0)
    outside = (
        (z < _NEAR).all(1)
        | (x * fx > z * (width - cx)).all(1) | (x * fx < -z * (cx + 1)).all(1)
        | (y * fy > z * (height - cy)).all(1) | (y * fy < -z * (cy + 1)).all(1)
    )  # fmt: skip

    image = np.zeros((height, width, 3), np.uint8)
    depth = np.full((height, width), np.inf, np.float32)
    ray_x = ((np.arange(width) - cx) / fx).astype(np.float32)[None, :]
    ray_y = ((np.arange(height) - cy) / fy).astype(np.float32)[:, None]
    for i in np.flatnonzero((distance < 0) & ~outside):
        polygon = corners[i] if z[i].min() >= _NEAR else _clip(corners[i])
        pixels = polygon[:, :2] / polygon[:, 2:] * (fx, fy) + (cx, cy)
        low = np.maximum(np.floor(pixels.min(axis=0)).astype(int), 0)
        high = np.minimum(np.ceil(pixels.max(axis=0)).astype(int) + 1, (width, height))
        if (high <= low).any():
            continue
        rows, columns = slice(low[1], high[1]), slice(low[0], high[0])
        rx, ry = ray_x[:, columns], ray_y[rows]
        facing = normal[i, 0] * rx + normal[i, 1] * ry + normal[i, 2]
        far = (distance[i] / np.minimum(facing, -1e-9)).astype(np.float32)  # z where the ray meets the plane
        near = (far < depth[rows, columns]) & (far >= _NEAR)
        texture = patches[i].texture
        at = []  # texture coordinates, which also say what lies in the rectangle
        for edge, count in ((u[i], texture.shape[1]), (v[i], texture.shape[0])):
            share = (far * (edge[0] * rx + edge[1] * ry + edge[2]) - edge @ origin[i]) / (edge @ edge)
            near &= (share > -_SEAM) & (share < 1 + _SEAM)
            at.append((share * count - 0.5).astype(np.float32))
        if not near.any():
            continue
        color = cv2.remap(texture, at[0], at[1], cv2.INTER_LINEAR, None, cv2.BORDER_REPLICATE)
        np.copyto(depth[rows, columns], far, where=near)
        np.copyto(image[rows, columns], color, where=near[..., None])
    return image, depth


def _clip(polygon: np.ndarray) -> np.ndarray:
    """The part of a polygon (corner, 3) in front of the near plane."""
    kept = []
    for a, b in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if a[2] >= _NEAR:
            kept.append(a)
        if (a[2] >= _NEAR) != (b[2] >= _NEAR):
            kept.append(a + (b - a) * (_NEAR - a[2]) / (b[2] - a[2]))
    return np.array(kept)

"""The camera of a bird's-eye view: straight above a scan, looking down, image up = +y, image right = +x.

SQA3D, appendix (the paper's distance) and SQA3D code, `mesh2img.py` (distance, lens, resolution).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

CLIP_START, CLIP_END = 0.1, 1000.0  # metres


@dataclass(frozen=True)
class BevCamera:
    """A pinhole camera above the middle of a scan's bounding box.

    Attributes:
        centre: (3,) float64, metres: middle of the bounding box. The camera is at `centre + (0, 0, 7 radius)`.
        radius: metres.
        width, height: image size in pixels.
        lens_mm, sensor_mm: focal length, and size of the sensor along the longer side of the image.
    """

    centre: np.ndarray
    radius: float
    width: int = 1920
    height: int = 1080
    lens_mm: float = 45.0
    sensor_mm: float = 36.0

    @property
    def location(self) -> np.ndarray:
        """(3,) float64, metres: the camera, relative to `centre`."""
        return np.array([0.0, 0.0, 7.0 * self.radius])

    @property
    def focal_px(self) -> float:
        """Focal length in pixels (2400 for SQA3D's 45 mm, 36 mm and 1920 pixels)."""
        return self.lens_mm / self.sensor_mm * max(self.width, self.height)

    @property
    def projection(self) -> np.ndarray:
        """(4, 4) float64: camera coordinates (x right, y up, -z ahead) to clip coordinates, as OpenGL has them."""
        near, far = CLIP_START, CLIP_END
        return np.array(
            [
                [2 * self.focal_px / self.width, 0.0, 0.0, 0.0],
                [0.0, 2 * self.focal_px / self.height, 0.0, 0.0],
                [0.0, 0.0, -(far + near) / (far - near), -2 * far * near / (far - near)],
                [0.0, 0.0, -1.0, 0.0],
            ]
        )

    def project(self, xyz: np.ndarray) -> np.ndarray:
        """Where points of the scan are in the image.

        Args:
            xyz: (..., 3) metres, in the frame of `centre`.

        Returns:
            (..., 2) float64 pixels: x from the left edge, y from the top edge; the middle of the first pixel is
            (0.5, 0.5). NaN for points that are not in front of the camera.
        """
        offset = np.asarray(xyz, np.float64) - self.centre - self.location
        depth = np.where(offset[..., 2] < 0, -offset[..., 2], np.nan)
        x = self.width / 2 + self.focal_px * offset[..., 0] / depth
        y = self.height / 2 - self.focal_px * offset[..., 1] / depth
        return np.stack([x, y], -1)


def centre_and_radius(xyz: np.ndarray, rule: Literal["code", "sphere"] = "code") -> tuple[np.ndarray, float]:
    """Middle of the bounding box, and the radius that sets the camera's height.

    Args:
        xyz: (vertex, 3), metres, finite, at least one.
        rule: `code`: mean half extent of the box, (X + Y + Z) / 6 (SQA3D code). `sphere`: smallest sphere about the
            middle of the box that holds every vertex (what the paper's text says).

    Returns:
        (3,) float64 and a float, metres.
    """
    xyz = xyz.astype(np.float64)
    low, high = xyz.min(0), xyz.max(0)
    centre = (low + high) / 2
    if rule == "code":
        return centre, float((high - low).sum() / 6)
    return centre, float(np.sqrt(((xyz - centre) ** 2).sum(1).max()))

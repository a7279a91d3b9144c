"""Boxes in space: the two conventions of mmdetection3d, footprints and corners.

Both conventions give rows x, y, z of the bottom's centre, three sizes, yaw, and whatever comes behind (velocity):

    mmdet3d-1.0   l, w, h   yaw counter-clockwise seen from above, 0 along +x   checkpoints since 2022, BEVDet 2
    mmdet3d-0.x   w, l, h   yaw clockwise seen from above, 0 along -y           older ones, BEVDet 1, MSMDFusion

Length runs along the heading. The same box has `yaw_new = -yaw_old - pi / 2`.
"""

from __future__ import annotations

import numpy as np

CLASSES = (
    "car", "truck", "construction_vehicle", "bus", "trailer",
    "barrier", "motorcycle", "bicycle", "pedestrian", "traffic_cone",
)  # fmt: skip
"""Classes of the detectors in the order of their labels; other files have other orders, so map through names."""

CONVENTIONS = ("mmdet3d-1.0", "mmdet3d-0.x")


def convert(boxes: np.ndarray, source: str, target: str) -> np.ndarray:
    """Give boxes in another convention.

    Args:
        boxes: (n, 7 or more) floats, rows of the convention `source`.
        source, target: names of `CONVENTIONS`.

    Returns:
        A new array of the same shape and dtype, yaw in [-pi, pi); columns behind the seventh are as they were.

    Raises:
        ValueError: another convention, or another shape.
    """
    boxes = _checked(boxes, source, target)
    yaw = boxes[:, 6].astype(np.float64)
    result = boxes.copy()
    if source != target:  # the rule is its own inverse
        result[:, 3], result[:, 4] = boxes[:, 4], boxes[:, 3]
        yaw = -yaw - np.pi / 2
    result[:, 6] = wrap(yaw)
    half_turn = result.dtype.type(np.pi)
    result[result[:, 6] >= half_turn, 6] = -half_turn  # rounded up to it by float32
    return result


def footprint(boxes: np.ndarray, convention: str) -> np.ndarray:
    """Rectangles that boxes cover on the ground; equal for the same box in either convention.

    Args:
        boxes: (n, 7 or more), metres and radians.
        convention: one of `CONVENTIONS`.

    Returns:
        (n, 5) float64: x, y of the centre, extent along the heading, extent across it, rotation of the heading from +x
        in radians, counter-clockwise.

    Raises:
        ValueError: another convention, or another shape.
    """
    return convert(np.asarray(boxes, np.float64), convention, "mmdet3d-1.0")[:, [0, 1, 3, 4, 6]]


def corners(boxes: np.ndarray, convention: str) -> np.ndarray:
    """Corners of boxes whose z is that of the bottom.

    Args:
        boxes: (n, 7 or more), metres and radians.
        convention: one of `CONVENTIONS`.

    Returns:
        (n, 8, 3) float64: the bottom's four, counter-clockwise seen from above from the one at the front left, then the
        four above them.

    Raises:
        ValueError: another convention, or another shape.
    """
    rectangle = footprint(boxes, convention)
    along, across = rectangle[:, 2] / 2, rectangle[:, 3] / 2
    ahead = along[:, None] * [1, -1, -1, 1]
    left = across[:, None] * [1, 1, -1, -1]
    cos, sin = np.cos(rectangle[:, 4:]), np.sin(rectangle[:, 4:])
    points = np.empty((len(rectangle), 2, 4, 3))
    points[..., 0] = (rectangle[:, :1] + ahead * cos - left * sin)[:, None]
    points[..., 1] = (rectangle[:, 1:2] + ahead * sin + left * cos)[:, None]
    points[..., 2] = (boxes[:, 2:3] + boxes[:, 5:6] * [0.0, 1.0])[:, :, None]
    return points.reshape(-1, 8, 3)


def bottom_from_centre(boxes: np.ndarray) -> np.ndarray:
    """A copy of (n, 7 or more) boxes whose z, so far of the box's centre, is that of its bottom."""
    result = np.array(boxes)
    result[:, 2] -= result[:, 5] / 2
    return result


def wrap(angle: np.ndarray) -> np.ndarray:
    """The same angle in [-pi, pi), radians."""
    wrapped = np.mod(angle + np.pi, 2 * np.pi) - np.pi
    return np.where(wrapped >= np.pi, -np.pi, wrapped)  # the remainder of a tiny negative number rounds to 2 pi


def _checked(boxes: np.ndarray, *conventions: str) -> np.ndarray:
    boxes = np.asarray(boxes)
    for name in conventions:
        if name not in CONVENTIONS:
            raise ValueError(f"no box convention {name!r}; there are {' and '.join(CONVENTIONS)}")
    if boxes.ndim != 2 or boxes.shape[1] < 7 or boxes.dtype.kind != "f":
        raise ValueError(f"boxes are {boxes.dtype} of shape {boxes.shape}, expected floats (n, 7 or more)")
    return boxes

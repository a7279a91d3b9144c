"""Frames, rotations, situation poses and boxes; numpy only.

Frames of an indoor scan: `scan` is the mesh as in the file; `aligned` is axis_align applied to it. A situation of
SQA3D is given in a third one, the scan frame minus the centre of the mesh's bounding box (half height, not floor).
Quaternions are (x, y, z, w), matrices act on column vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extractors.errors import InvalidValues


def transform(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Apply a (4, 4) rigid or affine matrix to (..., 3) points; the result has the points' dtype."""
    moved = points.astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3]
    return moved.astype(points.dtype, copy=False)


def quaternion_to_matrix(xyzw: np.ndarray) -> np.ndarray:
    """Rotation matrices (..., 3, 3) float64 of quaternions (..., 4), which need not have unit length.

    Raises:
        InvalidValues: a quaternion of length zero, or not finite.
    """
    q = np.asarray(xyzw, np.float64)
    length = np.linalg.norm(q, axis=-1, keepdims=True)
    if not (np.isfinite(length) & (length > 1e-12)).all():
        raise InvalidValues(f"no rotation: quaternion {q.tolist()} has no direction")
    x, y, z, w = np.moveaxis(q / length, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), (0, 1), (-2, -1))


def matrix_to_quaternion(matrix: np.ndarray) -> np.ndarray:
    """Unit quaternion (4,) float64 of one rotation matrix (3, 3).

    Of q and -q, which turn alike, the one whose largest component is positive.
    """
    m = np.asarray(matrix, np.float64)
    # 4 q q^T, by entries of the matrix; the column of the largest diagonal entry is q times its largest component
    k = np.array([
        [1 + m[0, 0] - m[1, 1] - m[2, 2], m[0, 1] + m[1, 0], m[0, 2] + m[2, 0], m[2, 1] - m[1, 2]],
        [m[0, 1] + m[1, 0], 1 - m[0, 0] + m[1, 1] - m[2, 2], m[1, 2] + m[2, 1], m[0, 2] - m[2, 0]],
        [m[0, 2] + m[2, 0], m[1, 2] + m[2, 1], 1 - m[0, 0] - m[1, 1] + m[2, 2], m[1, 0] - m[0, 1]],
        [m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1], 1 + m[0, 0] + m[1, 1] + m[2, 2]],
    ])  # fmt: skip
    column: np.ndarray = k[:, np.argmax(np.diag(k))]
    return column / np.linalg.norm(column)


def facing(rotation: np.ndarray) -> np.ndarray:
    """Horizontal direction (..., 2) in which a situation of rotation (..., 3, 3) looks: zero rotation faces -x."""
    direction: np.ndarray = -rotation[..., :2, 0]
    return direction


@dataclass(frozen=True)
class SituationPose:
    """Where somebody stands, in one frame.

    Attributes:
        position: (3,) float64, metres.
        rotation: (3, 3) float64.
    """

    position: np.ndarray
    rotation: np.ndarray

    @property
    def quaternion(self) -> np.ndarray:
        """(4,) float64, xyzw."""
        return matrix_to_quaternion(self.rotation)

    @property
    def facing(self) -> np.ndarray:
        """(2,) float64, unit vector."""
        return facing(self.rotation)

    def aligned(self, axis_align: np.ndarray) -> SituationPose:
        """The same pose after a rigid (4, 4) matrix."""
        return SituationPose(transform(self.position, axis_align), axis_align[:3, :3] @ self.rotation)


def situation_pose(position: np.ndarray, xyzw: np.ndarray, bbox_center: np.ndarray) -> SituationPose:
    """Pose in the scan frame of an SQA3D annotation (SQA3D code: visualiser and Blender script).

    Args:
        position: (3,) as annotated, relative to the centre of the bounding box.
        xyzw: (4,) as annotated.
        bbox_center: (3,) (max + min) / 2 over all vertices of the raw mesh.
    """
    return SituationPose(np.asarray(position, np.float64) + bbox_center, quaternion_to_matrix(xyzw))


def box_corners(box: np.ndarray) -> np.ndarray:
    """Corners of axis-aligned boxes in the order of ScanQA.

    Args:
        box: (..., 6) centre and size.

    Returns:
        (..., 8, 3), dtype of `box`: at +z (x, y) = (+,+), (+,-), (-,-), (-,+), then the same at -z.
    """
    signs = np.array([[x, y, z] for z in (1, -1) for x, y in ((1, 1), (1, -1), (-1, -1), (-1, 1))], box.dtype) / 2
    corners: np.ndarray = box[..., None, :3] + signs * box[..., None, 3:6]
    return corners

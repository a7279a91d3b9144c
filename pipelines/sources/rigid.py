"""Rigid transforms as (..., 3, 4) float64 arrays `[R | t]`, p' = R p + t.

Sums of products are written out instead of handed to BLAS, whose last bits differ between machines: poses count in
fingerprints by their bytes.
"""

from __future__ import annotations

import numpy as np

IDENTITY = np.eye(3, 4)


def from_quaternion(translation: np.ndarray, quaternion: np.ndarray) -> np.ndarray:
    """(..., 3) metres and (..., 4) w x y z -> (..., 3, 4); NaN where the quaternion is not of unit length."""
    quaternion = np.asarray(quaternion, np.float64)
    length = np.sqrt((quaternion * quaternion).sum(-1, keepdims=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        w, x, y, z = np.moveaxis(np.where(abs(length - 1) < 1e-3, quaternion / length, np.nan), -1, 0)
    result = np.empty((*quaternion.shape[:-1], 3, 4))
    result[..., 0, 0], result[..., 0, 1], result[..., 0, 2] = (
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
    )
    result[..., 1, 0], result[..., 1, 1], result[..., 1, 2] = (
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
    )
    result[..., 2, 0], result[..., 2, 1], result[..., 2, 2] = (
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    )
    result[..., 3] = translation
    return result


def compose(then: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The transform that applies `first`, then `then`."""
    result = sum(then[..., :, k, None] * first[..., None, k, :] for k in range(3))
    result[..., 3] += then[..., 3]
    return result


def invert(transform: np.ndarray) -> np.ndarray:
    """The inverse of rigid transforms."""
    rotation, shift = np.swapaxes(transform[..., :3], -1, -2), transform[..., 3]
    back = sum(rotation[..., :, k] * shift[..., k, None] for k in range(3))
    return np.concatenate([rotation, -np.asarray(back)[..., None]], -1)


def apply(transform: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Move (..., 3) points."""
    moved = sum(transform[..., :, k] * points[..., k, None] for k in range(3))
    return np.asarray(moved + transform[..., 3])


def is_rigid(transform: np.ndarray) -> bool:
    """All finite, and every R a rotation (to 1e-3) that mirrors nothing."""
    if not np.isfinite(transform).all():
        return False
    rotation = transform[..., :3]
    product = rotation @ np.swapaxes(rotation, -1, -2)
    return bool((abs(product - np.eye(3)) < 1e-3).all() and (np.linalg.det(rotation) > 0).all())


def homogeneous(transform: np.ndarray) -> np.ndarray:
    """(3, 4) -> (4, 4)."""
    return np.concatenate([transform, [[0.0, 0.0, 0.0, 1.0]]])

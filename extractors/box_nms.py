"""Overlap of turned rectangles, and the two ways of suppressing duplicates that CenterPoint's heads use.

A rectangle is x, y, extent along its heading, extent across, and the heading counter-clockwise from +x in radians
(`extractors.boxes3d.footprint`). Everything is float64 on the CPU: these are a few hundred rows.
"""

from __future__ import annotations

import numpy as np


def rotated_iou(boxes_a: np.ndarray, boxes_b: np.ndarray) -> np.ndarray:
    """Intersection over union of every pair, exact up to rounding.

    Rectangles that are not finite, or have no area, overlap with nothing.

    Args:
        boxes_a: (n, 5).
        boxes_b: (m, 5).

    Returns:
        (n, m) float64.
    """
    a, b = np.asarray(boxes_a, np.float64), np.asarray(boxes_b, np.float64)
    iou = np.zeros((len(a), len(b)))
    reach = np.hypot(a[:, 2], a[:, 3])[:, None] / 2 + np.hypot(b[:, 2], b[:, 3]) / 2
    with np.errstate(invalid="ignore"):
        apart = np.hypot(a[:, None, 0] - b[:, 0], a[:, None, 1] - b[:, 1])
        near = apart < reach
    near &= _solid(a)[:, None] & _solid(b)
    i, j = near.nonzero()
    both = _intersection(a[i], b[j])
    iou[i, j] = both / (a[i, 2] * a[i, 3] + b[j, 2] * b[j, 3] - both)
    return iou


def rotated_nms(
    boxes: np.ndarray, scores: np.ndarray, iou_threshold: float, pre: int | None = None, post: int | None = None
) -> np.ndarray:
    """Greedy suppression by overlap: a box goes when its IoU with a better one that stays is above the threshold.

    Args:
        boxes: (n, 5).
        scores: (n,); of equal scores the earlier row is the better one.
        iou_threshold: boxes at exactly this IoU stay.
        pre: only so many best rows take part; all for None.
        post: only so many of those that stay are returned.

    Returns:
        int64 rows that stay, best first.
    """
    order = np.argsort(-np.asarray(scores), kind="stable")[:pre]
    ranked = np.asarray(boxes)[order]
    return order[_greedy(rotated_iou(ranked, ranked) > iou_threshold)][:post]


def circle_nms(
    centres: np.ndarray, scores: np.ndarray, min_squared_distance: float, post: int | None = None
) -> np.ndarray:
    """Greedy suppression by distance: a centre goes when a better one that stays is no further than the threshold.

    The threshold is one of **squared** distance (mmdetection3d calls it `min_radius` and compares it so).

    Args:
        centres: (n, 2) metres; distances are taken in their dtype.
        scores: (n,); of equal scores the earlier row is the better one.
        min_squared_distance: square metres; at exactly this distance the worse one goes.
        post: only so many of those that stay are returned.

    Returns:
        int64 rows that stay, best first.
    """
    order = np.argsort(-np.asarray(scores), kind="stable")
    x, y = np.asarray(centres)[order].T
    squared = (x[:, None] - x) ** 2 + (y[:, None] - y) ** 2
    return order[_greedy(squared <= min_squared_distance)][:post]


def _greedy(conflicts: np.ndarray) -> np.ndarray:
    """Rows that stay of (n, n) bool, whose rows are ranked best first."""
    alive = np.ones(len(conflicts), bool)
    for row in range(len(conflicts)):
        if alive[row]:
            alive[row + 1 :] &= ~conflicts[row, row + 1 :]
    return alive.nonzero()[0]


def _solid(boxes: np.ndarray) -> np.ndarray:
    """(n,) bool: finite, both extents positive, and an area that is a number."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        area = boxes[:, 2] * boxes[:, 3]
    solid: np.ndarray = np.isfinite(boxes).all(1) & (boxes[:, 2] > 0) & (area > 0) & np.isfinite(area)
    return solid


def _intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(k,) areas that rows of a and b (k, 5) share.

    In the frame of b, where b is |x| <= X, |y| <= Y, walk a's outline counter-clockwise: the shared area is minus the
    sum of the integrals of clamp(y, -Y, Y) dx over that part of each side where |x| <= X (Green's theorem). Each is
    exact, and none has a special case: touching, coinciding and nested outlines need no care.
    """
    x, y = _corners_in(a, b)
    limit_x, limit_y = b[:, 2, None] / 2, b[:, 3, None] / 2
    area = np.zeros(len(a))
    for side in range(4):
        x0, y0, x1, y1 = x[:, side], y[:, side], x[:, (side + 1) % 4], y[:, (side + 1) % 4]
        # Cut the side where it crosses x = -X and X, then where it crosses y = -Y and Y: between cuts, what is
        # integrated is linear, so the trapezoid rule is exact.
        cuts = np.concatenate([_crossings(x0, x1, limit_x), _crossings(y0, y1, limit_y)], 1)
        at = np.sort(np.concatenate([np.zeros((len(a), 1)), cuts, np.ones((len(a), 1))], 1), 1)
        px = np.clip(x0[:, None] + at * (x1 - x0)[:, None], -limit_x, limit_x)
        py = np.clip(y0[:, None] + at * (y1 - y0)[:, None], -limit_y, limit_y)
        area -= (np.diff(px, axis=1) * (py[:, 1:] + py[:, :-1]) / 2).sum(1)
    return np.clip(area, 0, np.minimum(a[:, 2] * a[:, 3], b[:, 2] * b[:, 3]))


def _corners_in(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y, (k, 4) each, of a's corners, counter-clockwise, in the frame of b's centre and heading."""
    along = a[:, 2, None] / 2 * np.array([1, -1, -1, 1])
    across = a[:, 3, None] / 2 * np.array([1, 1, -1, -1])
    cos, sin = np.cos(b[:, 4]), np.sin(b[:, 4])
    dx, dy = a[:, 0] - b[:, 0], a[:, 1] - b[:, 1]
    turn = a[:, 4] - b[:, 4]
    cos_turn, sin_turn = np.cos(turn)[:, None], np.sin(turn)[:, None]
    x = (cos * dx + sin * dy)[:, None] + cos_turn * along - sin_turn * across
    y = (cos * dy - sin * dx)[:, None] + sin_turn * along + cos_turn * across
    return x, y


def _crossings(start: np.ndarray, end: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """(k, 2) places 0..1 along the way from start to end (k,) where it meets -limit and limit (k, 1); else an end."""
    with np.errstate(divide="ignore", invalid="ignore"):
        at = (np.concatenate([-limit, limit], 1) - start[:, None]) / (end - start)[:, None]
    return np.clip(np.nan_to_num(at, nan=0.0), 0, 1)

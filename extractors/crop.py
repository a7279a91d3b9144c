"""Cut object features out of a bird's-eye map: a vector per box, pooled over the cells under it (NuScenes-QA, Alg. 1).

Boxes are in cell units of the map: cell (column i, row j) is the square [i, i + 1) x [j, j + 1).

Two rules say which cells are under a box:

    exact     those whose centre is inside the turned rectangle, borders included. A box without any (smaller than a
              cell) takes the cell that holds its centre; where that is off the map the box is invalid, its feature 0.
    legacy    as the helper published with MSMDFusion: corners are truncated before they are turned and rounded after,
              a cell counts by its corner (half a cell off), strictly inside one of two triangles. A box without any
              takes the whole axis-aligned rectangle around its corners. A box off the map is invalid; its feature is
              that of the nearest border cells (the helper stops there, or averages nearly the whole map).

`exact` does not change when a box turns by half a turn, `legacy` does. Under both, a box with NaN, infinity or a size
that is not positive is invalid, its feature 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from extractors.errors import InvalidValues

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 20  # candidate cells looked at in one go: bounds the memory of many map-sized boxes


def crop(
    bev: torch.Tensor,
    boxes: np.ndarray,
    mode: Literal["exact", "legacy"] = "exact",
    shape: Literal["rotated", "circumscribed"] = "rotated",
    pool: Literal["mean", "max"] = "mean",
) -> tuple[torch.Tensor, np.ndarray]:
    """Pool a map under boxes.

    A box's feature does not depend on the other boxes.

    Args:
        bev: (C, H, W) floats, y along H and x along W, on any device.
        boxes: (n, 5): x and y of the centre, extent along the heading, extent across it, all in cells; rotation of the
            heading from +x towards +y, radians.
        mode: which cells are under a box, see above.
        shape: the turned rectangle, or the axis-aligned one around its corners.
        pool: over cells.

    Returns:
        (n, C) float32 features on the map's device, never NaN; (n,) bool, false for invalid boxes.

    Raises:
        InvalidValues: the map holds NaN or infinity under a box.
        ValueError: arrays of another shape, or an unknown choice.
    """
    import torch
    from torch.nn.functional import embedding_bag

    if bev.ndim != 3:
        raise ValueError(f"the map has shape {tuple(bev.shape)}, expected (C, H, W)")
    if pool not in ("mean", "max"):
        raise ValueError(f"pool is {pool!r}, expected mean or max")
    channels, height, width = bev.shape
    cells, counts, valid = cells_under(boxes, height, width, mode, shape)
    if not len(cells):
        return torch.zeros(len(counts), channels, device=bev.device), valid
    # Cells are the rows of a table (a view of the map, never copied) and a box is a bag of them.
    table, index = bev.permute(1, 2, 0).flatten(0, 1), torch.from_numpy(cells).to(bev.device)
    if bev.dtype != torch.float32:
        table, index = table.index_select(0, index).float(), torch.arange(len(index), device=bev.device)
    offsets = torch.from_numpy(np.append(0, np.cumsum(counts))).to(bev.device)
    features = embedding_bag(index, table, offsets, mode=pool, include_last_offset=True)
    if not bool(features.sum().isfinite()):  # quicker than to look at each number; a sum may be too large though
        for box in (~features.isfinite()).any(1).nonzero()[:1].flatten().tolist():
            raise InvalidValues(f"the map holds NaN or infinity under box {box}; look at what the network was given")
    return features, valid


def cells_under(
    boxes: np.ndarray,
    height: int,
    width: int,
    mode: Literal["exact", "legacy"] = "exact",
    shape: Literal["rotated", "circumscribed"] = "rotated",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cells that `crop` pools.

    Args:
        boxes, mode, shape: as for `crop`.
        height, width: of the map, in cells.

    Returns:
        (m,) int64 cells as row * width + column, those of the first box first; (n,) int64 how many each box has; (n,)
        bool, false for invalid boxes.
    """
    boxes = np.asarray(boxes, np.float64)
    if boxes.ndim != 2 or boxes.shape[1] != 5:
        raise ValueError(f"boxes have shape {boxes.shape}, expected (n, 5)")
    if mode not in ("exact", "legacy"):
        raise ValueError(f"mode is {mode!r}, expected exact or legacy")
    if shape not in ("rotated", "circumscribed"):
        raise ValueError(f"shape is {shape!r}, expected rotated or circumscribed")
    rule = _exact if mode == "exact" else _legacy
    valid = np.zeros(len(boxes), bool)
    owners, cells = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with np.errstate(all="ignore"):  # sizes near the largest float overflow, flat triangles divide by zero
        good = np.flatnonzero(np.isfinite(boxes).all(1) & (boxes[:, 2] > 0) & (boxes[:, 3] > 0))
        area = np.minimum((boxes[good, 2] + boxes[good, 3] + 3) ** 2, height * width)  # of any rectangle around it
        for some in np.split(good, np.flatnonzero(np.diff(np.cumsum(area) // _BLOCK)) + 1):
            box, x, y, valid[some] = rule(boxes[some], height, width, shape == "circumscribed")
            owners.append(some[box])
            cells.append(y * width + x)
    return np.concatenate(cells), np.bincount(np.concatenate(owners), minlength=len(boxes)), valid


def _exact(boxes: np.ndarray, height: int, width: int, around: bool) -> tuple[np.ndarray, ...]:
    """Box, column and row of every cell under a box, sorted by box; whether each box is valid."""
    cx, cy, sx, sy, rot = boxes.T
    cos, sin = np.cos(rot), np.sin(rot)
    reach_x = (np.abs(cos) * sx + np.abs(sin) * sy) / 2  # half the sides of the rectangle around the corners
    reach_y = (np.abs(sin) * sx + np.abs(cos) * sy) / 2
    box, x, y = _lattice(
        np.clip(np.ceil(cx - reach_x - 0.5 - 1e-6), 0, width),
        np.clip(np.floor(cx + reach_x - 0.5 + 1e-6), -1, width - 1),
        np.clip(np.ceil(cy - reach_y - 0.5 - 1e-6), 0, height),
        np.clip(np.floor(cy + reach_y - 0.5 + 1e-6), -1, height - 1),
    )  # a hair wider, for rounding
    dx, dy = x + 0.5 - cx[box], y + 0.5 - cy[box]
    c, s = cos[box], sin[box]
    inside = (np.abs(c * dx + s * dy) <= sx[box] / 2) & (np.abs(c * dy - s * dx) <= sy[box] / 2)
    centred = (cx >= 0) & (cx < width) & (cy >= 0) & (cy < height)
    valid = centred | _any(inside, box, len(boxes))
    if around:
        inside = (np.abs(dx) <= reach_x[box]) & (np.abs(dy) <= reach_y[box]) & valid[box]
    small = np.flatnonzero(valid & ~_any(inside, box, len(boxes)))
    box = np.concatenate([box[inside], small])
    x = np.concatenate([x[inside], cx[small].astype(np.int64)])
    y = np.concatenate([y[inside], cy[small].astype(np.int64)])
    order = np.argsort(box, kind="stable")
    return box[order], x[order], y[order], valid


def _legacy(boxes: np.ndarray, height: int, width: int, around: bool) -> tuple[np.ndarray, ...]:
    """As `_exact`. The order of the terms counts: where rounding decides, it decides as in the published helper."""
    cx, cy, sx, sy, rot = boxes.T
    cos, sin = np.cos(rot), np.sin(rot)
    x1, x2, y1, y2 = np.trunc([cx - sx / 2, cx + sx / 2, cy - sy / 2, cy + sy / 2])
    from_x, from_y = np.array([x1, x2, x1, x2]) - cx, np.array([y1, y1, y2, y2]) - cy
    corner_x = np.rint(from_x * cos - from_y * sin + cx)  # (4, n)
    corner_y = np.rint(from_x * sin + from_y * cos + cy)
    low_x, high_x, low_y, high_y = corner_x.min(0), corner_x.max(0), corner_y.min(0), corner_y.max(0)
    usable = np.isfinite(corner_x + corner_y).all(0)
    valid = usable & (high_x >= 0) & (low_x < width) & (high_y >= 0) & (low_y < height)
    box, x, y = _lattice(
        np.where(usable, np.clip(low_x, 0, width - 1), 0),
        np.where(usable, np.clip(high_x, 0, width - 1), -1),
        np.where(usable, np.clip(low_y, 0, height - 1), 0),
        np.where(usable, np.clip(high_y, 0, height - 1), -1),
    )
    if around:
        return box, x, y, valid
    inside = np.zeros(len(box), bool)
    for middle in (1, 2):
        x0, x1, x2 = corner_x[[0, middle, 3]]
        y0, y1, y2 = corner_y[[0, middle, 3]]
        scale = 1 / (2 * (0.5 * (-y1 * x2 + y0 * (-x1 + x2) + x0 * (y1 - y2) + x1 * y2)))
        s = scale[box] * ((y0 * x2 - x0 * y2)[box] + (y2 - y0)[box] * x + (x0 - x2)[box] * y)
        t = scale[box] * ((x0 * y1 - y0 * x1)[box] + (y0 - y1)[box] * x + (x1 - x0)[box] * y)
        inside |= (s > 0) & (t > 0) & (1 - s - t > 0)
    inside |= ~_any(inside, box, len(boxes))[box]
    return box[inside], x[inside], y[inside], valid


def _lattice(low_x: np.ndarray, high_x: np.ndarray, low_y: np.ndarray, high_y: np.ndarray) -> tuple[np.ndarray, ...]:
    """Box, column and row of every cell of (n,) rectangles, both ends included, row by row; int64."""
    low_x, low_y = low_x.astype(np.int64), low_y.astype(np.int64)
    columns = np.maximum(high_x.astype(np.int64) - low_x + 1, 0)
    count = columns * np.maximum(high_y.astype(np.int64) - low_y + 1, 0)
    box = np.repeat(np.arange(len(count)), count)
    row, column = np.divmod(np.arange(len(box)) - (np.cumsum(count) - count)[box], columns[box])
    return box, low_x[box] + column, low_y[box] + row


def _any(hit: np.ndarray, box: np.ndarray, count: int) -> np.ndarray:
    """(count,) bool: whether a box has a hit."""
    return np.bincount(box[hit], minlength=count) > 0

"""Cutting object features out of a bird's-eye map, against plain loops.

200 boxes of the sizes of nuScenes' objects on a 512 x 180 x 180 map (0.6 m a cell), laid out as the detectors hand it
over: the channels of a cell side by side. All see the same map; each loop is checked to give the same features:

    loop             the paper's Algorithm 1 taken literally: for each box, for each cell of the map, test the cell,
                     keep its feature; average. Rule `exact`.
    rectangle        the same, only over the cells of the rectangle around the box. Rule `exact`.
    helper           rule `legacy` as its published helper is written: over that rectangle, on numpy numbers.

One thread; `all threads` is ours on as many as PyTorch takes by default. `channels apart` is for a map laid out plane
by plane, where 512 places of memory are waited for at each cell, by the loops too (`rectangle, channels apart`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import harness
import numpy as np
import torch

from extractors.crop import cells_under, crop

SIZES = {  # mean length and width in metres, share of the objects (nuScenes)
    "car": (4.63, 1.97, 0.43), "truck": (6.93, 2.51, 0.08), "bus": (10.5, 2.94, 0.02), "trailer": (12.3, 2.92, 0.02),
    "barrier": (0.5, 2.53, 0.13), "motorcycle": (2.11, 0.77, 0.02), "pedestrian": (0.73, 0.67, 0.2),
    "traffic_cone": (0.41, 0.41, 0.1),
}  # fmt: skip
Point = tuple[float, float]


def objects(count: int, cell: float = 0.6, width: int = 180) -> np.ndarray:
    """(count, 5) boxes in cells, anywhere on the map."""
    rng = np.random.RandomState(0)
    table = np.array(list(SIZES.values()))
    size = table[rng.choice(len(table), count, p=table[:, 2] / table[:, 2].sum()), :2]
    size = size * rng.uniform(0.8, 1.2, (count, 2)) / cell
    return np.concatenate([rng.uniform(0, width, (count, 2)), size, rng.uniform(-np.pi, np.pi, (count, 1))], 1)


def loop_exact(bev: np.ndarray, boxes: np.ndarray, everywhere: bool) -> np.ndarray:
    """Cells whose centre is in the box; else the one under the box's centre."""
    _, height, width = bev.shape
    features = []
    for cx, cy, sx, sy, rot in boxes.tolist():
        c, s = math.cos(rot), math.sin(rot)
        reach_x, reach_y = (abs(c) * sx + abs(s) * sy) / 2, (abs(s) * sx + abs(c) * sy) / 2
        rows, columns = range(height), range(width)
        if not everywhere:
            rows = range(max(int(cy - reach_y), 0), min(int(cy + reach_y), height - 1) + 1)
            columns = range(max(int(cx - reach_x), 0), min(int(cx + reach_x), width - 1) + 1)
        found = []
        for y in rows:
            for x in columns:
                dx, dy = x + 0.5 - cx, y + 0.5 - cy
                if abs(c * dx + s * dy) <= sx / 2 and abs(c * dy - s * dx) <= sy / 2:
                    found.append(bev[:, y, x])
        features.append(np.mean(np.stack(found), 0) if found else bev[:, int(cy), int(cx)])
    return np.stack(features)


def in_triangle(px: int, py: int, a: Point, b: Point, c: Point) -> bool:
    """Strictly inside, by barycentric coordinates."""
    (x0, y0), (x1, y1), (x2, y2) = a, b, c
    area = 0.5 * (-y1 * x2 + y0 * (-x1 + x2) + x0 * (y1 - y2) + x1 * y2)
    s = 1 / (2 * area) * (y0 * x2 - x0 * y2 + (y2 - y0) * px + (x0 - x2) * py)
    t = 1 / (2 * area) * (x0 * y1 - y0 * x1 + (y0 - y1) * px + (x1 - x0) * py)
    return s > 0 and t > 0 and 1 - s - t > 0


def loop_legacy(bev: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Lattice points strictly inside the rounded corners' triangles; else the rectangle around the corners."""
    channels, height, width = bev.shape
    features = []
    for cx, cy, sx, sy, rot in boxes:
        ys, xs = (int(cy - sy / 2), int(cy + sy / 2)), (int(cx - sx / 2), int(cx + sx / 2))
        centre = np.array([cx, cy])
        turn = np.array([[np.cos(rot), np.sin(rot)], [-np.sin(rot), np.cos(rot)]])
        corners = np.rint((np.array([(x, y) for y in ys for x in xs]) - centre) @ turn + centre)
        low, high = np.clip([corners.min(0), corners.max(0)], 0, [width - 1, height - 1]).astype(int)
        found = [
            bev[:, y, x]
            for x in range(low[0], high[0] + 1)
            for y in range(low[1], high[1] + 1)
            if any(in_triangle(x, y, corners[0], corners[k], corners[3]) for k in (1, 2))
        ]
        around = bev[:, low[1] : high[1] + 1, low[0] : high[0] + 1].reshape(channels, -1)
        features.append(np.mean(np.stack(found), 0) if found else around.mean(1))
    return np.stack(features)


def each(function: Callable[[], object], calls: int = 5) -> Callable[[], float]:
    """A function that gives the mean seconds of some calls in a row: one takes a few milliseconds."""

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    return timed


def main() -> None:
    options = harness.options(__doc__)
    apart = torch.from_numpy(np.random.RandomState(1).standard_normal((512, 180, 180)).astype(np.float32))
    bev = apart.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    array, boxes = bev.numpy(), objects(200)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    np.seterr(divide="ignore", invalid="ignore")  # flat triangles, as in the helper
    loops = {
        "loop": lambda: loop_exact(array, boxes, everywhere=True),
        "rectangle": lambda: loop_exact(array, boxes, everywhere=False),
        "helper": lambda: loop_legacy(array, boxes),
    }
    with torch.inference_mode():
        difference = {}
        for name, loop in loops.items():
            plain, ours = loop(), crop(bev, boxes, "legacy" if name == "helper" else "exact")[0].numpy()
            difference[name] = np.max(np.linalg.norm(plain - ours, axis=1) / np.linalg.norm(plain, axis=1))
            assert difference[name] < 1e-5, f"{name} and ours differ by {difference[name]}"
        assert torch.equal(crop(bev, boxes)[0], crop(apart, boxes)[0])
        medians = harness.compare(
            {
                **loops,
                "exact": each(lambda: crop(bev, boxes)),
                "legacy": each(lambda: crop(bev, boxes, "legacy")),
                "max": each(lambda: crop(bev, boxes, pool="max")),
                "circumscribed": each(lambda: crop(bev, boxes, shape="circumscribed")),
                "channels apart": each(lambda: crop(apart, boxes)),
                "rectangle, channels apart": lambda: loop_exact(apart.numpy(), boxes, everywhere=False),
                "finding cells": each(lambda: cells_under(boxes, 180, 180)),
            },
            repeats=3 if options.quick else 11,
        )
        torch.set_num_threads(threads)
        parallel = harness.compare({"all threads": each(lambda: crop(bev, boxes))}, repeats=7)
    harness.emit(
        "crop",
        ratios={
            "ours_vs_loop": medians["loop"] / medians["exact"],
            "exact_vs_rectangle_loop": medians["rectangle"] / medians["exact"],
            "legacy_vs_helper_loop": medians["helper"] / medians["legacy"],
        },
        figures={
            "boxes": len(boxes),
            "cells_exact": cells_under(boxes, 180, 180)[1].sum(),
            "cells_legacy": cells_under(boxes, 180, 180, "legacy")[1].sum(),
            "ms": {name: 1e3 * value for name, value in (medians | parallel).items()},
            "share_of_finding_cells": medians["finding cells"] / medians["exact"],
            "threads": threads,
            "largest_relative_difference": difference,
        },
    )


if __name__ == "__main__":
    main()

"""CenterPoint's head (Yin et al. 2021): heat maps whose peaks are objects, and maps that say what they are like.

As mmdetection3d has it, for CenterPoint and BEVDet: official keys (`pts_bbox_head.*`), classes in groups (tasks), no
search for local maxima, duplicates suppressed within a task, results task by task.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.bev_detector import Convention, Detections, Grid
from extractors.box_nms import circle_nms, rotated_nms
from extractors.boxes3d import CLASSES, bottom_from_centre, footprint
from extractors.errors import InvalidValues

TASKS = (
    ("car",),
    ("truck", "construction_vehicle"),
    ("bus", "trailer"),
    ("barrier",),
    ("motorcycle", "bicycle"),
    ("pedestrian", "traffic_cone"),
)
"""nuScenes' classes as CenterPoint groups them."""

CENTRE_RANGE = (-61.2, -61.2, -10.0, 61.2, 61.2, 10.0)
"""x, y, z of the lowest and highest centre that stays, metres."""

_BROKEN = "the head gave NaN or infinity for this map; are the weights whole?"
_MAPS = {"reg": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2}  # and a heat map of each class


@dataclass(frozen=True)
class Suppression:
    """How duplicates of one task go.

    Attributes:
        kind: `circle` by the distance of centres, `rotate` by the overlap of footprints.
        squared_distance: circle: square metres within which a worse centre goes.
        iou: rotate: overlap above which a worse box goes.
        pre: rotate: only so many best candidates take part.
        post: at most so many stay.
        scale: rotate: by class of the task, what extents on the ground are multiplied by before overlaps are taken
            (scale-NMS of BEVDet); none for (). Boxes keep their size.
    """

    kind: Literal["circle", "rotate"]
    squared_distance: float = 0.0
    iou: float = 0.2
    pre: int = 1000
    post: int = 83
    scale: tuple[float, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """Decoded peaks of one task in one map, best first.

    Attributes:
        boxes: (n, 9) float32 as in `Detections`, but z is that of the box's centre.
        scores: (n,) float32.
        labels: (n,) int64, class within the task.
        cells: (n,) int64, y * W + x of the peak.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    cells: np.ndarray


class CenterHead(nn.Module):
    """From a bird's-eye map to boxes.

    Args:
        grid: the map that it takes.
        convention: how its boxes are given; the numbers are the same, what they mean differs.
        suppression: one per task.
        tasks: class names by task.
        score_threshold: candidates score above it.
        candidates: at most so many per task.
        centre_range: see `CENTRE_RANGE`; the limits themselves stay.
    """

    def __init__(
        self,
        grid: Grid,
        convention: Convention,
        suppression: Sequence[Suppression],
        tasks: Sequence[Sequence[str]] = TASKS,
        score_threshold: float = 0.1,
        candidates: int = 500,
        centre_range: tuple[float, ...] = CENTRE_RANGE,
    ) -> None:
        super().__init__()
        if len(suppression) != len(tasks):
            raise ValueError(f"{len(suppression)} ways of suppression for {len(tasks)} tasks, expected one each")
        self.grid, self.convention, self.suppression = grid, convention, tuple(suppression)
        self.score_threshold, self.candidates, self.centre_range = score_threshold, candidates, centre_range
        self.labels = [np.array([CLASSES.index(name) for name in names], np.int64) for names in tasks]
        self.shared_conv = _conv3x3(grid.channels, 64)
        self.task_heads = nn.ModuleList(
            nn.ModuleDict({
                name: nn.Sequential(_conv3x3(64, 64), nn.Conv2d(64, channels, 3, padding=1))
                for name, channels in (*_MAPS.items(), ("heatmap", len(names)))
            })
            for names in tasks
        )  # fmt: skip

    def forward(self, bev: Tensor) -> dict[str, Tensor]:
        """(B, C, H, W) -> raw maps `task0_reg` (B, 2, H, W) ..., heat maps before the sigmoid."""
        shared = self.shared_conv(bev)
        return {
            f"task{task}_{name}": head(shared)
            for task, heads in enumerate(self.task_heads)
            for name, head in cast("nn.ModuleDict", heads).items()
        }

    def find(self, bev: Tensor) -> list[Detections]:
        """What `detect` gives for `forward`'s maps, up to rounding, without making them where nothing is.

        Raises:
            InvalidValues: as `detect`.
        """
        shared = self.shared_conv(bev)
        found = []
        for heads in self.task_heads:
            heads = cast("nn.ModuleDict", heads)
            peaks = self._peaks(heads["heatmap"](shared))
            some = int((peaks[0] > self.score_threshold).sum(1).max())
            scores, label, cell = (part[:, :some] for part in peaks)
            found.append(self._candidates(scores, label, cell, _at(heads, shared, cell)))
        return self._detections(found)

    def detect(self, outputs: Mapping[str, Tensor]) -> list[Detections]:
        """Objects of each map of the batch: task by task, best first inside a task.

        Raises:
            InvalidValues: a heat map or a candidate's position, angle or velocity is NaN or infinite.
        """
        return self._detections([self.decode(outputs, task) for task in range(len(self.labels))])

    def decode(self, outputs: Mapping[str, Tensor], task: int) -> list[Candidates]:
        """Candidates of one task in each map of the batch; equal scores in the order of class, y, x.

        Raises:
            InvalidValues: as `detect`.
        """
        scores, label, cell = self._peaks(outputs[f"task{task}_heatmap"])
        maps = torch.cat([outputs[f"task{task}_{name}"] for name in _MAPS], 1).flatten(2)
        return self._candidates(scores, label, cell, maps.gather(2, cell[:, None].expand(-1, maps.shape[1], -1)).mT)

    def suppress(self, task: int, found: Candidates) -> np.ndarray:
        """int64 rows of candidates that stay, best first."""
        rule = self.suppression[task]
        if rule.kind == "circle":
            return circle_nms(found.boxes[:, :2], found.scores, rule.squared_distance, rule.post)
        rectangles = footprint(found.boxes, self.convention)
        if rule.scale:
            rectangles[:, 2:4] *= np.array(rule.scale)[found.labels, None]
        return rotated_nms(rectangles, found.scores, rule.iou, rule.pre, rule.post)

    def _peaks(self, heatmap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, classes and cells, (B, candidates) each, of the best of (B, classes, H, W), best first."""
        if not heatmap.isfinite().all():
            raise InvalidValues(_BROKEN)
        # The official top 500 of each class, then of all, is the top 500 of all.
        scores, place = heatmap.float().sigmoid().flatten(1).sort(dim=1, descending=True, stable=True)
        scores, place = scores[:, : self.candidates], place[:, : self.candidates]
        cells = self.grid.height * self.grid.width
        return scores, place // cells, place % cells

    def _candidates(self, scores: Tensor, label: Tensor, cell: Tensor, rows: Tensor) -> list[Candidates]:
        """Those that score enough and lie in range, of peaks (B, k) and what the maps say there (B, k, 10)."""
        if not rows.isfinite().all():
            raise InvalidValues(_BROKEN)
        dx, dy, z, *sizes, sin, cos, vx, vy = rows.float().unbind(2)
        x = ((cell % self.grid.width) + dx) * self.grid.cell + self.grid.origin[0]
        y = ((cell // self.grid.width) + dy) * self.grid.cell + self.grid.origin[1]
        boxes = torch.stack([x, y, z, *(size.exp() for size in sizes), torch.atan2(sin, cos), vx, vy], 2)
        centre, limits = boxes[..., :3], boxes.new_tensor(self.centre_range)
        inside = ((centre >= limits[:3]) & (centre <= limits[3:])).all(2)
        keep = inside & (scores > self.score_threshold)
        batch = zip(*(part.cpu().numpy() for part in (boxes, scores, label, cell, keep)), strict=True)
        return [Candidates(*(part[one[-1]] for part in one[:-1])) for one in batch]

    def _detections(self, found: Sequence[Sequence[Candidates]]) -> list[Detections]:
        """By task, by map -> by map."""
        by_map: list[list[Detections]] = [[] for _ in found[0]]
        for task, maps in enumerate(found):
            for parts, every in zip(by_map, maps, strict=True):
                rows = self.suppress(task, every)
                labels = self.labels[task][every.labels[rows]]
                parts.append(Detections(bottom_from_centre(every.boxes[rows]), every.scores[rows], labels))
        return [_concatenate(parts) for parts in by_map]


def output_shapes(grid: Grid, tasks: Sequence[Sequence[str]] = TASKS) -> dict[str, tuple[int, ...]]:
    """Name -> (channels, H, W) of a head's raw maps."""
    return {
        f"task{task}_{name}": (channels, grid.height, grid.width)
        for task, names in enumerate(tasks)
        for name, channels in (*_MAPS.items(), ("heatmap", len(names)))
    }


def _at(heads: nn.ModuleDict, shared: Tensor, cell: Tensor) -> Tensor:
    """(B, k, 10): what all maps but the heat map say at cells (B, k), from the 5 x 5 cells around each."""
    batch, height, width = shared.shape[0], *shared.shape[2:]
    y, x = cell.flatten() // width, cell.flatten() % width
    image = torch.arange(batch, device=cell.device).repeat_interleave(cell.shape[1])
    reach = torch.arange(5, device=cell.device)
    rows = F.pad(shared, (2, 2, 2, 2)).permute(0, 2, 3, 1)
    around = rows[image[:, None, None], (y[:, None] + reach)[:, :, None], (x[:, None] + reach)[:, None]]
    patches = around.permute(0, 3, 1, 2)
    step = reach[:3] - 1
    down, right = y[:, None] + step, x[:, None] + step
    # Past the map's border the second convolution sees zeros, not what the first would give there.
    inside = ((down >= 0) & (down < height))[:, None, :, None] & ((right >= 0) & (right < width))[:, None, None]
    values = []
    for name in _MAPS:
        first, second = cast("Any", heads[name])
        hidden = first.activate(first.bn(F.conv2d(patches, first.conv.weight, first.conv.bias)))
        values.append(F.conv2d(hidden * inside, second.weight, second.bias).flatten(1))
    return torch.cat(values, 1).view(*cell.shape, sum(_MAPS.values()))


def _conv3x3(cin: int, cout: int) -> nn.Sequential:
    conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(cout), activate=nn.ReLU(inplace=True)))


def _concatenate(parts: Sequence[Detections]) -> Detections:
    return Detections(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("boxes", "scores", "labels")))

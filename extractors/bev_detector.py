"""What CenterPoint, BEVDet and MSMDFusion share: a bird's-eye map, a head on it, and one feature per detected object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from extractors.base import Extractor, Weights
from extractors.boxes3d import CLASSES, footprint
from storage.schema import Column, Record, Schema

Convention = Literal["mmdet3d-1.0", "mmdet3d-0.x"]
Frame = Literal["lidar", "ego"]


@dataclass(frozen=True)
class Grid:
    """The bird's-eye map of a detector.

    Attributes:
        channels, height, width: its shape (C, H, W); H runs along y, W along x.
        cell: side of a cell in metres.
        origin: (x, y) in metres of the corner where both indices start.
        frame: `lidar` (LIDAR_TOP of the key frame) or `ego` (ego of the key frame).
    """

    channels: int
    height: int
    width: int
    cell: float
    origin: tuple[float, float]
    frame: Frame

    def to_cells(self, boxes: np.ndarray, convention: Convention) -> np.ndarray:
        """(n, 5) float64 footprints in cells: centre, extents along and across the heading, rotation (paper, Eq. 6)."""
        rows = footprint(boxes, convention)
        rows[:, :2] = (rows[:, :2] - np.asarray(self.origin)) / self.cell
        rows[:, 2:4] /= self.cell
        return rows


@dataclass(frozen=True)
class Detections:
    """Objects found in one key frame, in the detector's own order.

    Attributes:
        boxes: (n, 9) float32: x, y, z of the bottom's centre, three sizes, yaw, vx, vy; metres, radians, m/s.
        scores: (n,) float32.
        labels: (n,) int64, index into `CLASSES`.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray

    def pick(self, order: Literal["score", "detector"], count: int) -> Detections:
        """The first `count`, by falling score (ties: the detector's order) or as the detector lists them."""
        chosen = np.argsort(-self.scores, kind="stable") if order == "score" else np.arange(len(self.scores))
        chosen = chosen[:count]
        return Detections(self.boxes[chosen], self.scores[chosen], self.labels[chosen])


class Head(Protocol):
    """The part of a detector behind its map."""

    def __call__(self, bev: Any) -> dict[str, Any]:
        """(B, C, H, W) tensor -> named raw outputs, each (B, ...)."""
        ...

    def detect(self, outputs: Mapping[str, Any]) -> list[Detections]:
        """Objects of each map of the batch."""
        ...


def object_columns(convention: Convention, frame: Frame) -> dict[str, Column]:
    """Columns that describe a detected object."""
    sizes = "l, w" if convention == "mmdet3d-1.0" else "w, l"
    return {
        "box": Column((7,), "float32", "m, rad", frame, doc=f"x, y, z of the bottom, {sizes}, h, yaw ({convention})"),
        "velocity": Column((2,), "float32", "m/s", frame, doc="vx, vy"),
        "score": Column((), "float32"),
        "label": Column((), "int16", doc="index into " + ", ".join(CLASSES)),
        "class_name": Column((), "string"),
        "frame": Column((), "string", doc="lidar: LIDAR_TOP of the key frame; ego: ego of the key frame"),
        "convention": Column((), "string", doc="how sizes and yaw are given, `extractors.boxes3d.CONVENTIONS`"),
    }


def object_record(found: Detections, convention: Convention, frame: Frame) -> Record:
    """The columns of `object_columns`."""
    names = np.array(CLASSES, object)
    return {
        "box": found.boxes[:, :7].astype(np.float32),
        "velocity": found.boxes[:, 7:9].astype(np.float32),
        "score": found.scores.astype(np.float32),
        "label": found.labels.astype(np.int16),
        "class_name": names[found.labels],
        "frame": np.full(len(found.scores), frame, object),
        "convention": np.full(len(found.scores), convention, object),
    }


@dataclass(frozen=True, kw_only=True)
class BevDetector(Extractor):
    """Detect objects and cut each one's feature out of the bird's-eye map (NuScenes-QA, Algorithm 1).

    Attributes:
        weights: an official checkpoint, or `untrained:SEED`.
        give: what a record holds. `objects`: detections with their features. `detections`: without them. `bev`: the map
            itself. `heads`: the head's raw outputs. The last two are dense tensors (docs/nuscenes.md says what they cost).
        crop, shape, pool: how a feature is cut, see `extractors.crop.crop`.
        objects: how many are kept, 1 to 500 (NuScenes-QA's trainer reads 100).
        order: by `score`, or as the `detector` lists them.
        dtype: of features and maps.
    """

    weights: Weights
    give: Literal["objects", "detections", "bev", "heads"] = "objects"
    crop: Literal["exact", "legacy"] = "exact"
    shape: Literal["rotated", "circumscribed"] = "rotated"
    pool: Literal["mean", "max"] = "mean"
    objects: int = 80
    order: Literal["score", "detector"] = "score"
    dtype: Literal["float16", "float32"] = "float16"

    device: ClassVar[str] = "gpu"

    def __post_init__(self) -> None:
        if not 1 <= self.objects <= 500:
            raise ValueError(f"objects is {self.objects}, expected 1 to 500")

    @property
    def grid(self) -> Grid:
        """The map's shape and place."""
        raise NotImplementedError

    @property
    def box_convention(self) -> Convention:
        """How the checkpoint's boxes are given."""
        raise NotImplementedError

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the head's raw outputs."""
        raise NotImplementedError

    def network(self, device: str) -> tuple[Callable[[Sequence[Any]], Any], Head]:
        """Load the weights: a function from prepared inputs to their (B, C, H, W) map, and the head."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        grid = self.grid
        if self.give == "bev":
            return bev_schema(grid, self.dtype)
        if self.give == "heads":
            return Schema({name: Column(shape, "float32") for name, shape in self.outputs.items()}, format="hdf5")
        columns = object_columns(self.box_convention, grid.frame)
        if self.give == "objects":
            columns = {
                "feature": Column((grid.channels,), self.dtype, doc=f"{self.pool} of the map under the box"),
                **columns,
                "valid": Column((), "bool", doc="false where the box lies off the map; its feature is zeros"),
            }
        return Schema(columns, element="object")

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        import torch

        from extractors.crop import crop

        body, head = self.network(device)
        grid, dtype = self.grid, np.dtype(self.dtype)

        @torch.inference_mode()
        def run(batch: Sequence[Any]) -> list[Record]:
            maps = body(batch)
            if self.give == "bev":
                return [bev_record(one, grid, self.dtype) for one in maps.cpu().numpy()]
            outputs = head(maps)
            if self.give == "heads":
                arrays = {name: outputs[name].float().cpu().numpy() for name in self.outputs}
                return [{name: array[i] for name, array in arrays.items()} for i in range(len(batch))]
            records = []
            for one, found in zip(maps, head.detect(outputs), strict=True):
                found = found.pick(self.order, self.objects)
                record = object_record(found, self.box_convention, grid.frame)
                if self.give == "objects":
                    cells = grid.to_cells(found.boxes, self.box_convention)
                    features, valid = crop(one, cells, self.crop, self.shape, self.pool)
                    record = {"feature": features.cpu().numpy().astype(dtype), **record, "valid": valid}
                records.append(record)
            return records

        return run


def bev_schema(grid: Grid, dtype: str) -> Schema:
    """A record that is one map."""
    return Schema(
        {
            "bev": Column((grid.channels, grid.height, grid.width), dtype, frame=grid.frame, doc="(C, y, x)"),
            "cell": Column((), "float32", "m", doc="side of a cell"),
            "origin": Column((2,), "float32", "m", grid.frame, doc="x, y where both indices start"),
            "frame": Column((), "string"),
        },
        format="hdf5",
    )


def bev_record(bev: np.ndarray, grid: Grid, dtype: str) -> Record:
    """The columns of `bev_schema`."""
    return {
        "bev": bev.astype(dtype),
        "cell": np.array(grid.cell, np.float32),
        "origin": np.array(grid.origin, np.float32),
        "frame": np.array(grid.frame, object),
    }

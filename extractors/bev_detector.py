"""What CenterPoint, BEVDet and MSMDFusion share: a bird's-eye map, a head on it, a feature per detected object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

import numpy as np

from extractors.base import Extractor, Weights
from extractors.boxes3d import CLASSES, footprint
from extractors.errors import InvalidValues
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
        """Objects of each map of the batch, from the raw outputs."""
        ...

    def find(self, bev: Any) -> list[Detections]:
        """`detect` of what the call gives, by the quickest way."""
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
class Detector(Extractor):
    """What the stages of a detector share; its own settings go into a class that precedes `BevDetector` or `BevHead`.

    Attributes:
        weights: an official checkpoint, or `untrained:SEED`.
        objects: how many are kept, 1 to 500 (NuScenes-QA's trainer reads 100).
        order: by `score`, or as the `detector` lists them.
    """

    weights: Weights
    objects: int = 80
    order: Literal["score", "detector"] = "score"

    device: ClassVar[str] = "gpu"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{self.name}: {name} is {getattr(self, name)!r}, expected one of {get_args(hint)}")
        if not 1 <= self.objects <= 500:
            raise ValueError(f"{self.name}: objects is {self.objects}, expected 1 to 500")

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

    @property
    def facts(self) -> dict[str, Column]:
        """Columns that tell of the key frame, one value each; records of objects repeat it for every object."""
        return {}

    def facts_of(self, prepared: Any) -> dict[str, Any]:
        """The values of `facts` for one prepared input."""
        return {}

    def found_schema(self, give: str) -> Schema:
        """Schema of `detections` or `heads`."""
        if give == "heads":
            columns = {name: Column(shape, "float32") for name, shape in self.outputs.items()}
            return Schema({**columns, **self.facts}, format="hdf5")
        return Schema({**object_columns(self.box_convention, self.grid.frame), **self.facts}, element="object")

    def found_records(self, give: str, head: Head, maps: Any) -> list[tuple[Record, Detections | None]]:
        """The head's part of each record of a batch, without `facts`; and the objects where they were looked for."""
        if give == "heads":
            outputs = head(maps)
            arrays = {name: outputs[name].float().cpu().numpy() for name in self.outputs}
            return [({name: array[i] for name, array in arrays.items()}, None) for i in range(len(maps))]
        found = [one.pick(self.order, self.objects) for one in head.find(maps)]
        return [(object_record(one, self.box_convention, self.grid.frame), one) for one in found]

    def with_facts(self, record: Record, prepared: Any, objects: int | None) -> Record:
        """The record with `facts`, repeated for so many objects, or once for None."""
        values = self.facts_of(prepared)
        shape = () if objects is None else (objects,)
        return {**record, **{name: np.full(shape, values[name], column.numpy) for name, column in self.facts.items()}}


@dataclass(frozen=True, kw_only=True)
class BevDetector(Detector):
    """Detect objects and cut each one's feature out of the bird's-eye map (NuScenes-QA, Algorithm 1).

    Attributes:
        give: what a record holds. `objects`: detections with their features. `detections`: without them. `bev`: the map
            itself. `heads`: the head's raw outputs. The last two are dense (docs/nuscenes.md says what they cost).
        crop, shape, pool: how a feature is cut, see `extractors.crop.crop`.
        dtype: of features and maps.
    """

    give: Literal["objects", "detections", "bev", "heads"] = "objects"
    crop: Literal["exact", "legacy"] = "exact"
    shape: Literal["rotated", "circumscribed"] = "rotated"
    pool: Literal["mean", "max"] = "mean"
    dtype: Literal["float16", "float32"] = "float16"

    def network(self, device: str) -> tuple[Callable[[Sequence[Any]], Any], Head]:
        """Load the weights: a function from prepared inputs to their (B, C, H, W) map, and the head."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        grid = self.grid
        if self.give == "bev":
            return bev_schema(grid, self.dtype, self.facts)
        found = self.found_schema("heads" if self.give == "heads" else "detections")
        if self.give != "objects":
            return found
        feature = Column((grid.channels,), self.dtype, doc=f"{self.pool} of the map under the box")
        valid = Column((), "bool", doc="false where the box lies off the map (`extractors.crop`)")
        return Schema({"feature": feature, **found.columns, "valid": valid}, element="object")

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        """Load the weights; on the CPU key frames go through one by one, so a batch changes no value there."""
        import torch

        from extractors.crop import crop
        from extractors.inference import inference

        body, head = self.network(device)
        grid = self.grid
        alone = torch.device(device).type == "cpu"

        def some(batch: Sequence[Any]) -> list[Record]:
            maps = body(batch).contiguous(memory_format=torch.channels_last)
            if self.give == "bev":
                records = [bev_record(one, grid, self.dtype) for one in maps.cpu().numpy()]
                return [self.with_facts(record, item, None) for record, item in zip(records, batch, strict=True)]
            records = []
            found_all = self.found_records(self.give, head, maps)
            for one, (record, found), item in zip(maps, found_all, batch, strict=True):
                if found is None:
                    records.append(self.with_facts(record, item, None))
                    continue
                if self.give == "objects":
                    cells = grid.to_cells(found.boxes, self.box_convention)
                    features, valid = crop(one, cells, self.crop, self.shape, self.pool)
                    record = {"feature": stored(features.cpu().numpy(), self.dtype), **record, "valid": valid}
                records.append(self.with_facts(record, item, len(found.scores)))
            return records

        @inference
        def run(batch: Sequence[Any]) -> list[Record]:
            return [record for part in ([[item] for item in batch] if alone else [batch]) for record in some(part)]

        return run


@dataclass(frozen=True, kw_only=True)
class BevHead(Detector):
    """Detect objects on maps that an earlier stage keeps (`give=bev`): only the head's weights are used.

    Attributes:
        give: `detections`, or the head's raw outputs, `heads`.
    """

    batch: ClassVar[int] = 4

    give: Literal["detections", "heads"] = "detections"

    def head(self, device: str) -> Head:
        """Load the head's weights."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        return self.found_schema(self.give)

    def prepare(self, key: str, *inputs: Record) -> Record:
        """Check that a kept map is what this head takes.

        Raises:
            InvalidValues: another shape, cell, place or frame, or a map that another detector's stage kept.
        """
        (record,), grid = inputs, self.grid
        if missing := [name for name in ("bev", "cell", "origin", "frame", *self.facts) if name not in record]:
            raise InvalidValues(
                f"{key}: the record fed to {self.name} has no column {missing}; feed it a stage of give=bev"
            )
        cell, origin = float(record["cell"]), tuple(np.asarray(record["origin"], float).tolist())
        found = (*record["bev"].shape, cell, *origin, str(record["frame"]))
        wanted = (grid.channels, grid.height, grid.width, grid.cell, *grid.origin, grid.frame)
        if found[:3] != wanted[:3] or found[6] != wanted[6] or not np.allclose(found[3:6], wanted[3:6], atol=1e-4):
            text = "a map {}x{}x{} of cells of {:.3g} m from ({:.4g}, {:.4g}) in the {} frame"
            raise InvalidValues(
                f"{key}: {self.name} takes {text.format(*wanted)}, the record has {text.format(*found)}"
            )
        return record

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        """Load the head; on the CPU maps go through one by one."""
        import torch

        from extractors.inference import inference

        head = self.head(device)
        alone = torch.device(device).type == "cpu"

        @inference
        def run(batch: Sequence[Record]) -> list[Record]:
            records = []
            for some in [[item] for item in batch] if alone else [batch]:
                maps = torch.from_numpy(np.stack([record["bev"] for record in some])).to(device).float()
                maps = maps.contiguous(memory_format=torch.channels_last)  # as the whole detector has them
                for (record, found), item in zip(self.found_records(self.give, head, maps), some, strict=True):
                    records.append(self.with_facts(record, item, None if found is None else len(found.scores)))
            return records

        return run

    def facts_of(self, prepared: Record) -> dict[str, Any]:
        return {name: prepared[name] for name in self.facts}


def bev_schema(grid: Grid, dtype: str, facts: Mapping[str, Column]) -> Schema:
    """A record that is one map, and facts of its key frame."""
    return Schema(
        {
            "bev": Column((grid.channels, grid.height, grid.width), dtype, frame=grid.frame, doc="(C, y, x)"),
            "cell": Column((), "float64", "m", doc="side of a cell"),
            "origin": Column((2,), "float64", "m", grid.frame, doc="x, y where both indices start"),
            "frame": Column((), "string"),
            **facts,
        },
        format="hdf5",
    )


def bev_record(bev: np.ndarray, grid: Grid, dtype: str) -> Record:
    """The columns of `bev_schema`."""
    return {
        "bev": stored(bev, dtype),
        "cell": np.array(grid.cell),
        "origin": np.array(grid.origin, np.float64),
        "frame": np.array(grid.frame, object),
    }


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Features in the dtype that is stored.

    Raises:
        InvalidValues: NaN or infinity, or numbers beyond float16.
    """
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    if not np.isfinite(result).all():
        reach = f"as large as {np.abs(values).max():.3g}" if np.isfinite(values).all() else "NaN or infinite"
        raise InvalidValues(
            f"the map is {reach}, which {dtype} can't hold; are the weights whole? dtype=float32 holds more"
        )
    return result

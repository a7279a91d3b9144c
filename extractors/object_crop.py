"""Object features from a map and boxes that earlier stages keep: another pooling re-runs this stage alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor
from extractors.bev_detector import Grid, object_columns, stored
from extractors.errors import InvalidValues
from storage.schema import Column, Record, Schema

_MAP = ("bev", "cell", "origin", "frame")
_BOXES = tuple(object_columns("mmdet3d-1.0", "lidar"))


@dataclass(frozen=True, kw_only=True)
class ObjectCrop(Extractor):
    """Cut a feature of each box out of a bird's-eye map.

    The first stage it takes keeps maps (a detector with `give=bev`), the second boxes: a detector with
    `give=detections`, a detector's head, or `groundtruth`. The result is what the detector gives with `give=objects`
    where the map is kept as float32; a float16 map is rounded before it is pooled.

    Attributes:
        channels: of the map: 512 for CenterPoint and MSMDFusion, 256 for BEVDet.
        crop, shape, pool: how a feature is cut, see `extractors.crop.crop`.
        dtype: of features.
    """

    channels: int = 512
    crop: Literal["exact", "legacy"] = "exact"
    shape: Literal["rotated", "circumscribed"] = "rotated"
    pool: Literal["mean", "max"] = "mean"
    dtype: Literal["float16", "float32"] = "float16"

    name: ClassVar[str] = "object_crop"
    takes: ClassVar[tuple[str, ...]] = ("bev", "detections")

    @property
    def schema(self) -> Schema:
        """One row per box, in the order of the boxes."""
        boxes = object_columns("mmdet3d-1.0", "lidar")
        boxes["box"] = Column((7,), "float32", "m, rad", "see `frame`", doc="as in the stage of the boxes")
        boxes["velocity"] = Column((2,), "float32", "m/s", "see `frame`")
        feature = Column((self.channels,), self.dtype, doc=f"{self.pool} of the map under the box")
        valid = Column((), "bool", doc="false where the box lies off the map (`extractors.crop`)")
        return Schema({"feature": feature, **boxes, "valid": valid}, element="object")

    def prepare(self, key: str, *inputs: Record) -> tuple[np.ndarray, np.ndarray, Record]:
        """The map, the boxes in its cells, and the columns of the boxes.

        Raises:
            InvalidValues: records of other stages, a map of another width, boxes of another frame than the map.
        """
        bev, boxes = inputs
        for record, needed, feed in ((bev, _MAP, "give=bev"), (boxes, _BOXES, "give=detections")):
            if missing := [name for name in needed if name not in record]:
                raise InvalidValues(f"{key}: a record without {', '.join(missing)}; `of` must name a stage of {feed}")
        channels, height, width = bev["bev"].shape
        if channels != self.channels:
            raise InvalidValues(f"{key}: the map has {channels} channels, set {self.name}.channels={channels}")
        frame = str(bev["frame"])
        if strange := sorted(set(boxes["frame"].tolist()) - {frame}):
            raise InvalidValues(
                f"{key}: the map is in the {frame} frame, boxes in {', '.join(strange)}: take both from one detector"
            )
        columns = {name: boxes[name] for name in _BOXES}
        conventions = set(boxes["convention"].tolist())
        if len(conventions) > 1:
            raise InvalidValues(f"{key}: boxes of several conventions: {', '.join(sorted(conventions))}")
        x, y = bev["origin"].tolist()
        grid = Grid(channels, height, width, float(bev["cell"]), (x, y), "ego" if frame == "ego" else "lidar")
        cells = grid.to_cells(boxes["box"], conventions.pop()) if conventions else np.zeros((0, 5))
        return bev["bev"], cells, columns

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        """Nothing to load."""
        import torch

        from extractors.crop import crop

        def one(bev: np.ndarray, cells: np.ndarray, columns: Record) -> Record:
            writeable = np.require(bev, requirements=["C", "W"])  # torch warns of the mapped arrays of a store
            features, valid = crop(torch.from_numpy(writeable), cells, self.crop, self.shape, self.pool)
            return {"feature": stored(features.numpy(), self.dtype), **columns, "valid": valid}

        return lambda batch: [one(*prepared) for prepared in batch]

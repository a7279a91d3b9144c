"""Object features that NuScenes-QA's authors released, kept in a store like any other stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor
from extractors.errors import InvalidValues
from extractors.inputs import ObjectFeatures
from storage.schema import Column, Record, Schema


@dataclass(frozen=True, kw_only=True)
class NuScenesQAFeatures(Extractor):
    """Take over features, boxes and labels of a file as they are, in its order.

    Attributes:
        channels: of the features; 512 in what was released.
        convention: of the boxes; the released files do not tell.
        dtype: of features.
    """

    channels: int = 512
    convention: Literal["mmdet3d-1.0", "mmdet3d-0.x", "unknown"] = "unknown"
    dtype: Literal["float16", "float32"] = "float32"

    name: ClassVar[str] = "nuscenes_qa_features"
    takes: ClassVar[tuple[str, ...]] = ("objects",)
    batch: ClassVar[int] = 64

    @property
    def schema(self) -> Schema:
        """One row per object."""
        return Schema(
            {
                "feature": Column((self.channels,), self.dtype),
                "box": Column((7,), "float32", "m, rad", "lidar", doc=f"x, y, z, sizes, yaw ({self.convention})"),
                "label": Column((), "int32", doc="in the order of its makers; -1 none"),
                "frame": Column((), "string"),
                "convention": Column((), "string", doc="`extractors.boxes3d.CONVENTIONS`, or unknown"),
            },
            element="object",
        )

    def prepare(self, key: str, *inputs: ObjectFeatures) -> Record:
        """The record.

        Raises:
            InvalidValues: features of another width, or too large for float16.
        """
        (found,) = inputs
        count, width = found.features.shape
        if count and width != self.channels:
            raise InvalidValues(f"{key}: features of {width} numbers, set {self.name}.channels={width}")
        with np.errstate(over="ignore"):
            features = found.features.reshape(count, self.channels).astype(self.dtype)
        if not np.isfinite(features).all():
            raise InvalidValues(f"{key}: features beyond float16; set {self.name}.dtype=float32")
        return {
            "feature": features,
            "box": found.boxes.astype(np.float32),
            "label": found.labels.astype(np.int32),
            "frame": np.full(count, "lidar", object),
            "convention": np.full(count, self.convention, object),
        }

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        """Nothing to load: `prepare` gives the record."""
        return list

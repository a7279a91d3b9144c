"""Annotated objects of nuScenes in place of detected ones: the upper bound that NuScenes-QA reports as GroundTruth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor, Weights
from extractors.bev_detector import object_columns
from extractors.boxes3d import CLASSES, bottom_from_centre
from extractors.errors import InvalidValues
from extractors.inputs import Annotations
from extractors.word_vectors import mean_vector, word_vectors
from storage.schema import Column, Record, Schema

STATUS = {
    "cycle.with_rider": "with rider", "cycle.without_rider": "without rider",
    "pedestrian.moving": "moving", "pedestrian.standing": "standing", "pedestrian.sitting_lying_down": "not standing",
    "vehicle.moving": "moving", "vehicle.parked": "parked", "vehicle.stopped": "stopped",
    "": "",
}  # fmt: skip
"""Attribute of nuScenes -> status as NuScenes-QA's answers have it. That one who sits or lies is `not standing` is our
reading: no other attribute can be meant."""


@dataclass(frozen=True, kw_only=True)
class GroundTruth(Extractor):
    """Describe each annotated object of the detectors' ten classes by words: its class and its status.

    A feature is the mean of the word vectors of the class (`construction vehicle`), then that of the status
    (`without rider`), zeros without one. Paper, section 5; that it is these two side by side is our reading of it.

    Attributes:
        vectors: a text file of word vectors (GloVe, word2vec), or `untrained:SEED`.
        size: numbers of a word vector.
        status: `required`; or `omit`, which leaves its half of the feature 0: info pickles do not tell attributes.
        keep: `points`, objects with at least one LiDAR or radar point inside (nuScenes' valid_flag); or `all`.
        dtype: of features.
    """

    vectors: Weights
    size: int = 300
    status: Literal["required", "omit"] = "required"
    keep: Literal["points", "all"] = "points"
    dtype: Literal["float16", "float32"] = "float32"

    name: ClassVar[str] = "groundtruth"
    takes: ClassVar[tuple[str, ...]] = ("annotations",)
    batch: ClassVar[int] = 64

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}, expected 1 or more")

    @property
    def schema(self) -> Schema:
        """One row per object, as annotated; the columns of a detector's objects and some more."""
        return Schema(
            {
                "feature": Column((2 * self.size,), self.dtype, doc="word vectors of class and status"),
                **object_columns("mmdet3d-1.0", "lidar"),
                "valid": Column((), "bool", doc="nuScenes' valid_flag: a LiDAR or radar point is inside"),
                "status": Column((), "string", doc="as in NuScenes-QA's answers, empty for none"),
                "velocity_known": Column((), "bool", doc="false: velocity is 0 for want of a neighbouring annotation"),
                "points": Column((), "int32", doc="LiDAR and radar points inside"),
                "token": Column((), "string", doc="of sample_annotation, empty where the source does not tell"),
            },
            element="object",
        )

    def prepare(self, key: str, *inputs: Annotations) -> Record:
        """All columns but the features.

        Raises:
            InvalidValues: a box that is not finite, a class or an attribute that nuScenes does not have, annotations
                of a source that does not tell attributes.
        """
        (found,) = inputs
        if unknown := sorted(set(found.names) - {*CLASSES, ""}):
            raise InvalidValues(f"{key}: objects of class {unknown[0]!r}; known: {', '.join(CLASSES)}")
        if unknown := sorted(set(found.attributes) - set(STATUS)):
            raise InvalidValues(f"{key}: attribute {unknown[0]!r}; known: {', '.join(filter(None, STATUS))}")
        if self.status == "required" and found.names and not any(found.tokens) and not any(found.attributes):
            raise InvalidValues(
                f"{key}: annotations without attributes, as info pickles have them: use the official tables, or "
                f"{self.name}.status=omit"
            )
        attributes = found.attributes if self.status == "required" else ("",) * len(found.names)
        points = found.lidar_points + found.radar_points
        rows = np.flatnonzero((np.array(found.names, object) != "") & ((points > 0) | (self.keep == "all")))
        boxes = found.boxes[rows]
        if not np.isfinite(boxes).all():
            row = rows[~np.isfinite(boxes).all(1)][0]
            raise InvalidValues(f"{key}: the box of annotation {row} ({found.tokens[row]}) is not finite")
        velocity = found.velocity[rows]
        known = np.isfinite(velocity).all(1)
        names = np.array(found.names, object)[rows]
        return {
            "box": bottom_from_centre(boxes).astype(np.float32),
            "velocity": np.where(known[:, None], velocity, 0).astype(np.float32),
            "score": np.ones(len(rows), np.float32),
            "label": np.array([CLASSES.index(name) for name in names], np.int16),
            "class_name": names,
            "frame": np.full(len(rows), "lidar", object),
            "convention": np.full(len(rows), "mmdet3d-1.0", object),
            "valid": points[rows] > 0,
            "status": np.array([STATUS[attributes[row]] for row in rows], object),
            "velocity_known": known,
            "points": points[rows].astype(np.int32),
            "token": np.array(found.tokens, object)[rows],
        }

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        """Read the vectors of the words that classes and statuses are made of."""
        texts = [_spoken(name) for name in CLASSES] + [status for status in STATUS.values() if status]
        vectors = word_vectors(self.vectors, {word for text in texts for word in text.split()}, self.size)
        table = {text: mean_vector(text, vectors) for text in texts} | {"": np.zeros(self.size, np.float32)}

        def one(record: Record) -> Record:
            pairs = zip(record["class_name"], record["status"], strict=True)
            rows = [np.concatenate([table[_spoken(name)], table[status]]) for name, status in pairs]
            return {"feature": np.array(rows, self.dtype).reshape(-1, 2 * self.size), **record}

        return lambda batch: [one(record) for record in batch]


def _spoken(name: str) -> str:
    """A class as people and NuScenes-QA write it, with blanks."""
    return name.replace("_", " ")

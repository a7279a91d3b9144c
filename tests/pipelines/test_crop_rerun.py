"""Where a map is kept, another pooling re-runs the crop and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import storage
from extractors.base import Extractor, seed_for
from extractors.bev_detector import Detections, Grid, bev_record, bev_schema, object_columns, object_record
from extractors.object_crop import ObjectCrop
from pipelines.stage import Stage
from storage.schema import Record, Schema
from tests.pipelines.fakes import Folder
from tests.pipelines.running import Runs, counts, job

GRID = Grid(6, 40, 50, 0.6, (-15.3, -12.1), "lidar")


@dataclass(frozen=True, kw_only=True)
class Maps(Extractor):
    """A map of random numbers per item."""

    name: ClassVar[str] = "maps"
    takes: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def schema(self) -> Schema:
        return bev_schema(GRID, "float32", {})

    def prepare(self, key: str, *inputs: Any) -> int:
        return seed_for(key)

    def load(self, device: str = "cpu") -> Callable[[Sequence[int]], list[Record]]:
        def one(seed: int) -> Record:
            return bev_record(np.random.RandomState(seed).standard_normal((6, 40, 50)), GRID, "float32")

        return lambda batch: [one(seed) for seed in batch]


@dataclass(frozen=True, kw_only=True)
class Boxes(Maps):
    """Random boxes per item."""

    name: ClassVar[str] = "boxes"

    @property
    def schema(self) -> Schema:
        return Schema(object_columns("mmdet3d-0.x", "lidar"), element="object")

    def load(self, device: str = "cpu") -> Callable[[Sequence[int]], list[Record]]:
        def one(seed: int) -> Record:
            boxes = np.random.RandomState(seed).uniform(0.5, 9, (20, 9)).astype(np.float32)
            found = Detections(boxes, np.ones(20, np.float32), np.arange(20) % 10)
            return object_record(found, "mmdet3d-0.x", "lidar")

        return lambda batch: [one(seed) for seed in batch]


def test_another_pooling_reruns_the_crop_alone(tmp_path: Path) -> None:
    source = Folder.make(tmp_path / "raw", {"a": "", "b": ""})
    runs = Runs(tmp_path)

    def chain(**settings: Any) -> Any:
        crop = Stage(ObjectCrop(channels=6, dtype="float32", **settings), of=("maps", "boxes"))
        return job(source, Stage(Maps()), Stage(Boxes()), crop)

    first = runs(chain())
    assert [counts(first, s) for s in ("maps", "boxes", "object_crop")] == [{"made": 2}] * 3
    mean = storage.open(runs.url)["object_crop"]["a"]["feature"]
    second = runs(chain(pool="max"))
    assert [counts(second, s) for s in ("maps", "boxes")] == [{"reused": 2}] * 2
    assert counts(second, "object_crop") == {"made": 2}
    largest = storage.open(runs.url)["object_crop"]["a"]["feature"]
    assert (largest >= mean).all()
    assert (largest > mean).any()
    assert counts(runs(chain()), "object_crop") == {"reused": 2}

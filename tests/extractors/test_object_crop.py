"""Crops of kept maps: what the whole detector gives, and records that do not belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from extractors.base import Weights
from extractors.bev_detector import BevDetector, Convention, Detections, Grid
from extractors.errors import InvalidValues
from extractors.groundtruth import GroundTruth
from extractors.inputs import Annotations
from extractors.object_crop import ObjectCrop
from storage.schema import Record


@dataclass(frozen=True, kw_only=True)
class Toy(BevDetector):
    """A detector whose map and objects are random numbers of a seed; an input is the seed."""

    name: ClassVar[str] = "toy"
    takes: ClassVar[tuple[str, ...]] = ("seed",)
    convention: Convention = "mmdet3d-1.0"
    seen: Literal["lidar", "ego"] = "lidar"

    @property
    def grid(self) -> Grid:
        return Grid(6, 40, 50, 0.6, (-15.3, -12.1), self.seen)

    @property
    def box_convention(self) -> Convention:
        return self.convention

    def network(self, device: str) -> tuple[Callable[[Sequence[int]], torch.Tensor], ToyHead]:
        def body(batch: Sequence[int]) -> torch.Tensor:
            maps = [np.random.RandomState(seed).standard_normal((6, 40, 50)) for seed in batch]
            return torch.from_numpy(np.stack(maps).astype(np.float32))

        return body, ToyHead()


class ToyHead:
    def __call__(self, bev: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def detect(self, outputs: Mapping[str, Any]) -> list[Detections]:
        raise NotImplementedError

    def find(self, bev: torch.Tensor) -> list[Detections]:
        found = []
        for one in bev:
            rng = np.random.RandomState(int(one.abs().sum()))
            boxes = np.concatenate(
                [
                    rng.uniform((-30, -30, -2), (30, 30, 0), (40, 3)),
                    rng.uniform(0.3, 9, (40, 3)),
                    rng.uniform(-3, 3, (40, 3)),
                ],
                1,
            )
            found.append(Detections(boxes.astype(np.float32), rng.rand(40).astype(np.float32), rng.randint(0, 10, 40)))
        return found


def records(give: str, convention: Convention = "mmdet3d-1.0", **settings: Any) -> Record:
    toy = Toy(weights=Weights("untrained:0"), give=give, convention=convention, **settings)
    (record,) = toy.load()([7])
    return toy.schema.check(record, give)


def cut(bev: Record, boxes: Record, **settings: Any) -> Record:
    stage = ObjectCrop(**{"channels": 6, "dtype": "float32", **settings})
    (record,) = stage.load()([stage.prepare("frame", bev, boxes)])
    return stage.schema.check(record, "object_crop")


@pytest.mark.parametrize("convention", ["mmdet3d-1.0", "mmdet3d-0.x"])
@pytest.mark.parametrize("rule", ["exact", "legacy"])
@pytest.mark.parametrize("shape", ["rotated", "circumscribed"])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_a_kept_map_and_its_boxes_give_what_the_detector_gives(
    convention: Any, rule: Any, shape: Any, pool: Any
) -> None:
    how = {"crop": rule, "shape": shape, "pool": pool, "dtype": "float32"}
    whole = records("objects", convention, **how)
    bev, boxes = (records(give, convention, dtype="float32") for give in ("bev", "detections"))
    record = cut(bev, boxes, **how)
    assert record.keys() == whole.keys()
    assert all(np.array_equal(record[name], whole[name]) for name in whole)
    assert 0 < record["valid"].sum() < len(record["valid"])


def test_maps_of_a_store_may_be_read_only_and_float16(recwarn: pytest.WarningsRecorder) -> None:
    bev, boxes = records("bev", dtype="float16"), records("detections")
    bev["bev"].flags.writeable = False
    record = cut(bev, boxes, dtype="float16")
    assert record["feature"].dtype == np.float16
    whole = records("objects", dtype="float32")["feature"]
    np.testing.assert_allclose(record["feature"], whole, rtol=2e-3, atol=2e-3)
    assert not recwarn.list


def test_annotated_boxes_may_take_the_place_of_detections() -> None:
    boxes = np.array([[1.0, 2, 3, 4.2, 1.8, 1.5, 0.7], [90, 0, 0, 4, 2, 2, 0]])
    found = Annotations(
        boxes,
        np.zeros((2, 2)),
        ("car", "bus"),
        ("", ""),
        ("vehicle.parked", ""),
        np.array([3, 1]),
        np.array([0, 0]),
        ("", ""),
    )
    words = GroundTruth(vectors=Weights("untrained:0"), size=4)
    (annotated,) = words.load()([words.prepare("frame", found)])
    record = cut(records("bev", dtype="float32"), words.schema.check(annotated, "groundtruth"))
    assert record["class_name"].tolist() == ["car", "bus"]
    assert record["valid"].tolist() == [True, False]
    assert record["feature"].shape == (2, 6)
    assert record["feature"][0].all()


def test_no_boxes_give_an_empty_record() -> None:
    boxes = {name: values[:0] for name, values in records("detections").items()}
    assert cut(records("bev"), boxes)["feature"].shape == (0, 6)


def test_boxes_and_map_of_other_frames_are_refused() -> None:
    bev = records("bev")
    with pytest.raises(InvalidValues, match="frame: the map is in the lidar frame, boxes in ego"):
        cut(bev, records("detections", seen="ego"))
    with pytest.raises(InvalidValues, match="the map is in the ego frame, boxes in lidar"):
        cut(records("bev", seen="ego"), records("detections"))
    mixed = records("detections")
    mixed["frame"][3] = "ego"
    with pytest.raises(InvalidValues, match="boxes in ego"):
        cut(bev, mixed)
    assert cut(records("bev", seen="ego"), records("detections", seen="ego"))["valid"].any()


def test_records_of_other_stages_and_maps_of_other_widths_are_refused_by_name() -> None:
    bev, boxes = records("bev"), records("detections")
    with pytest.raises(InvalidValues, match="without bev, cell, origin.*give=bev"):
        cut(boxes, boxes)
    with pytest.raises(InvalidValues, match="without box, .*give=detections"):
        cut(bev, bev)
    with pytest.raises(InvalidValues, match=r"the map has 6 channels, set object_crop.channels=6"):
        cut(bev, boxes, channels=512)
    boxes["convention"][0] = "mmdet3d-0.x"
    with pytest.raises(InvalidValues, match="several conventions"):
        cut(bev, boxes)


def test_features_beyond_float16_are_refused() -> None:
    bev = records("bev", dtype="float32")
    bev["bev"] *= 1e6
    with pytest.raises(InvalidValues, match="float16"):
        cut(bev, records("detections"), dtype="float16")

"""What all detectors share, with a detector whose map and objects are given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from extractors.base import Weights
from extractors.bev_detector import BevDetector, BevHead, Convention, Detections, Detector, Grid
from extractors.errors import InvalidValues
from storage.schema import Column

SCORES = np.array([0.2, 0.9, 0.9, 0.4], np.float32)


class GivenHead:
    """Four cars on the cells (0, 0) to (3, 3), in a map whose values are 10 y + x."""

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def __call__(self, bev: Any) -> dict[str, Any]:
        return {"sum": bev.flatten(1).sum(1, keepdim=True)}

    def detect(self, outputs: Mapping[str, Any]) -> list[Detections]:
        boxes = np.zeros((self.count, 9), np.float32)
        boxes[:, :2] = np.arange(self.count)[:, None] * 2 + 1
        boxes[:, 3:6] = 1
        labels = np.arange(self.count, dtype=np.int64)
        return [Detections(boxes, SCORES[: self.count], labels) for _ in outputs["sum"]]

    def find(self, bev: Any) -> list[Detections]:
        return self.detect(self(bev))


@dataclass(frozen=True, kw_only=True)
class _Given(Detector):
    found: int = 4

    @property
    def grid(self) -> Grid:
        return Grid(2, 6, 5, 2.0, (0.0, 0.0), "lidar")

    @property
    def box_convention(self) -> Convention:
        return "mmdet3d-1.0"

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {"sum": (1,)}

    @property
    def facts(self) -> dict[str, Column]:
        return {"number": Column((), "int16")}


@dataclass(frozen=True, kw_only=True)
class Given(_Given, BevDetector):
    name: ClassVar[str] = "given"
    takes: ClassVar[tuple[str, ...]] = ("number",)

    def network(self, device: str) -> tuple[Callable[[Sequence[Any]], Any], GivenHead]:
        y, x = torch.meshgrid(torch.arange(6.0), torch.arange(5.0), indexing="ij")
        one = torch.stack([10 * y + x, -y])

        def body(batch: Sequence[int]) -> torch.Tensor:
            return torch.stack([one * scale for scale in batch])

        return body, GivenHead(self.found)

    def facts_of(self, prepared: int) -> dict[str, Any]:
        return {"number": prepared}


@dataclass(frozen=True, kw_only=True)
class GivenHeadStage(_Given, BevHead):
    name: ClassVar[str] = "given_head"
    takes: ClassVar[tuple[str, ...]] = ("given_bev",)

    def head(self, device: str) -> GivenHead:
        return GivenHead(self.found)


def given(**settings: Any) -> Given:
    return Given(weights=Weights("untrained:0"), **settings)


def records(extractor: Given | GivenHeadStage, batch: Sequence[Any]) -> list[dict[str, np.ndarray]]:
    made = extractor.load()(batch)
    return [extractor.schema.check(record, extractor.name) for record in made]


def test_objects_have_the_feature_of_their_cell() -> None:
    one, double = records(given(), [1, 2])
    assert one["score"].tolist() == SCORES[[1, 2, 3, 0]].tolist()  # by score, equal ones as found
    np.testing.assert_array_equal(one["feature"], [[11, -1], [22, -2], [33, -3], [0, 0]])
    np.testing.assert_array_equal(double["feature"], 2 * one["feature"])
    assert one["feature"].dtype == np.float16
    assert double["number"].tolist() == [2, 2, 2, 2]
    assert one["class_name"].tolist() == ["truck", "construction_vehicle", "bus", "car"]


def test_order_and_number_of_objects() -> None:
    (listed,) = records(given(order="detector", objects=3), [1])
    assert listed["label"].tolist() == [0, 1, 2]
    (best,) = records(given(objects=1), [1])
    assert best["label"].tolist() == [1]


@pytest.mark.parametrize("give", ["objects", "detections", "bev", "heads"])
def test_every_kind_of_record_fits_its_schema(give: Any) -> None:
    extractor = given(give=give)
    one, other = records(extractor, [1, 3])
    assert extractor.schema.rows(one) == (1 if give in ("bev", "heads") else 4)
    assert np.all(other["number"] == 3)
    assert ("feature" in one) == (give == "objects")
    assert extractor.schema.format == ("hdf5" if give in ("bev", "heads") else "parquet")


def test_nothing_found_is_an_empty_record() -> None:
    (record,) = records(given(found=0), [1])
    assert {len(values) for values in record.values()} == {0}
    assert record["feature"].shape == (0, 2)


def test_a_head_stage_gives_what_the_detector_gives() -> None:
    kept = records(given(give="bev", dtype="float32"), [1, 2])
    stage = GivenHeadStage(weights=Weights("untrained:0"))
    again = records(stage, [stage.prepare("frame", record) for record in kept])
    whole = records(given(give="detections"), [1, 2])
    for one, other in zip(again, whole, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    raw = records(GivenHeadStage(weights=Weights("untrained:0"), give="heads"), kept)
    assert [record["sum"].tolist() for record in raw] == [
        record["sum"].tolist() for record in records(given(give="heads"), [1, 2])
    ]


def test_features_that_float16_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidValues, match=r"as large as 3\.3e\+05.*dtype=float32"):
        given().load()([10_000])
    (record,) = records(given(dtype="float32"), [10_000])
    assert record["feature"].max() == 330_000


def test_key_frames_go_through_one_by_one_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    network = Given.network

    def counted(self: Given, device: str) -> Any:
        body, head = network(self, device)

        def count(batch: Sequence[Any]) -> Any:
            sizes.append((len(batch), torch.is_inference_mode_enabled(), torch.backends.cudnn.allow_tf32))
            return body(batch)

        return count, head

    monkeypatch.setattr(Given, "network", counted)
    records(given(), [1, 2, 3])
    assert sizes == [(1, True, False)] * 3


def test_settings_out_of_range_are_refused_by_name() -> None:
    for settings, text in (({"objects": 0}, "objects is 0"), ({"pool": "sum"}, "pool is 'sum', expected one of")):
        with pytest.raises(ValueError, match=f"given: {text}"):
            given(**settings)

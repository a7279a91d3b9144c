"""CenterPoint's voxels, network and whole post-processing against mmdetection3d's outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extractors.base import Weights
from extractors.center_head import TASKS, Candidates, CenterHead
from extractors.centerpoint import CenterPoint
from extractors.centerpoint_network import CenterPointNetwork
from extractors.voxels import voxelize
from tests.parity.centerpoint_pass import Pass, run

SIZE, RANGE = (0.075, 0.075, 0.2), (-54, -54, -5, 54, 54, 3)
MAPS = {"reg": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": 0}


@pytest.fixture(scope="module")
def passed(golden: Any, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pass:
    """The network's pass over a reference file's key frame."""
    return run(golden, data_dir, tmp_path_factory.mktemp("weights"))


def synthetic(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Head maps drawn as the reference's `synthetic_head_maps` says."""
    rng = np.random.RandomState(recipe["seed"])
    maps = {}
    for task, names in enumerate(TASKS):
        for name, channels in MAPS.items():
            mean, scale = recipe["affine"][name]
            mean -= 0.25 * task * (name == "heatmap")
            values = mean + scale * rng.standard_normal((1, channels or len(names), 180, 180))
            maps[f"task{task}_{name}"] = torch.from_numpy(values.astype(np.float32))
    return maps


def final(head: CenterHead, decoded: list[Candidates], thresholds: np.ndarray) -> dict[str, np.ndarray]:
    """What is left of the candidates of all tasks, z of the bottom, labels over all classes."""
    parts: dict[str, list[np.ndarray]] = {"boxes": [], "scores": [], "labels": [], "cell": []}
    for task, found in enumerate(decoded):
        rows = head.suppress(task, found)
        rows = rows[found.scores[rows] > thresholds[task]]
        boxes = found.boxes[rows]
        boxes[:, 2] -= boxes[:, 5] / 2
        parts["boxes"].append(boxes)
        parts["scores"].append(found.scores[rows])
        parts["labels"].append(found.labels[rows] + sum(len(names) for names in TASKS[:task]))
        parts["cell"].append(found.cells[rows])
    return {name: np.concatenate(part) for name, part in parts.items()}


def assert_same_boxes(ours: dict[str, np.ndarray], arrays: Any, prefix: str) -> None:
    """One to one: the same label, centres within a millimetre, scores within 1e-4, the rest within 1e-3."""
    boxes, scores, labels = (arrays[f"{prefix}.{name}"] for name in ("boxes", "scores", "labels"))
    assert len(ours["boxes"]) == len(boxes)
    fits = np.linalg.norm(ours["boxes"][:, None, :3] - boxes[:, :3], axis=2) < 1e-3
    fits &= (ours["labels"][:, None] == labels) & (abs(ours["scores"][:, None] - scores) < 1e-4)
    assert (fits.sum(0) == 1).all()
    assert (fits.sum(1) == 1).all()
    partner = fits.argmax(1)
    turn = (ours["boxes"][:, 6] - boxes[partner, 6] + np.pi) % (2 * np.pi) - np.pi
    assert abs(turn).max() < 1e-3
    rest = [3, 4, 5, 7, 8]
    assert abs(ours["boxes"][:, rest] - boxes[partner][:, rest]).max() < 1e-3
    np.testing.assert_array_equal(ours["cell"], arrays[f"{prefix}.cell"][partner])


@pytest.mark.golden("centerpoint_mmdet3d")
def test_voxels_equal_the_reference(golden: Any, passed: Pass) -> None:
    """Of the points strictly inside the range, the ring replaced by a time lag of 0."""
    points = np.concatenate([passed.points[:, :4], np.zeros((len(passed.points), 1), np.float32)], 1)
    inside = ((points[:, :3] > np.array(RANGE[:3])) & (points[:, :3] < np.array(RANGE[3:]))).all(1)
    assert inside.sum() == int(golden.arrays["input.num_points_in_range"][0])
    voxels = voxelize(points[inside], SIZE, RANGE, 10, 120_000)
    coords = np.insert(voxels.coords, 0, 0, axis=1)
    golden.check({"voxel.coors": coords, "voxel.num_points": voxels.counts, "voxel.mean": voxels.mean})
    np.testing.assert_array_equal(passed.voxels.coords, voxels.coords)
    np.testing.assert_array_equal(passed.voxels.mean, voxels.mean)


@pytest.mark.golden("centerpoint_mmdet3d")
def test_sparse_encoder_equals_the_reference(golden: Any, passed: Pass) -> None:
    golden.check({tap: value for tap, value in passed.taps.items() if tap.startswith(("sparse.", "middle."))})


@pytest.mark.golden("centerpoint_mmdet3d")
def test_centerpoint_equals_the_reference(golden: Any, passed: Pass) -> None:
    head, outputs, arrays = passed.head, passed.outputs, golden.arrays
    golden.check({tap: value for tap, value in passed.taps.items() if tap.startswith(("second.", "neck.", "head."))})

    decoded = [head.decode(outputs, task)[0] for task in range(len(TASKS))]
    for task, found in enumerate(decoded):
        safe = arrays[f"decoded.{task}.safe"]
        assert safe.any()
        assert len(found.boxes) == len(safe)
        reference = {name: arrays[f"decoded.{task}.{name}"][safe] for name in ("boxes", "scores", "labels", "cell")}
        ours = {"boxes": found.boxes[safe], "scores": found.scores[safe], "labels": found.labels[safe]}
        order, theirs = (
            np.lexsort((found.cells[safe], ours["labels"])),
            np.lexsort((reference["cell"], reference["labels"])),
        )
        np.testing.assert_array_equal(found.cells[safe][order], reference["cell"][theirs])
        np.testing.assert_array_equal(ours["labels"][order], reference["labels"][theirs])
        for name in ("boxes", "scores"):
            difference = np.linalg.norm(ours[name][order] - reference[name][theirs])
            assert difference < 1e-4 * np.linalg.norm(reference[name])
    ours = final(head, decoded, arrays["final.score_threshold"])
    assert_same_boxes(ours, arrays, "final")
    thresholds = arrays["final.score_threshold"][np.array([0, 1, 1, 2, 2, 3, 4, 4, 5, 5])]
    sure = passed.found.scores > thresholds[passed.found.labels]
    quickly = {
        "boxes": passed.found.boxes[sure],
        "scores": passed.found.scores[sure],
        "labels": passed.found.labels[sure],
        "cell": ours["cell"],
    }
    assert_same_boxes(quickly, arrays, "final")


@pytest.mark.golden("centerpoint_mmdet3d")
def test_decoding_and_suppression_equal_the_reference(golden: Any) -> None:
    arrays, about = golden.arrays, json.loads(str(golden.arrays["about"]))
    outputs = synthetic(about["synthetic_head_maps"])
    head = CenterPoint(weights=Weights("untrained:0")).build_head()
    decoded = [head.decode(outputs, task)[0] for task in range(len(TASKS))]
    names = {"boxes": "boxes", "scores": "scores", "labels": "labels", "cell": "cells"}
    golden.check({
        f"syn.decoded.{task}.{name}": getattr(found, attribute)
        for task, found in enumerate(decoded)
        for name, attribute in names.items()
    })  # fmt: skip
    ours = final(head, decoded, np.zeros(len(TASKS)))
    assert_same_boxes(ours, arrays, "syn.final")
    (found,) = head.detect(outputs)
    for name in ("boxes", "scores", "labels"):
        np.testing.assert_array_equal(getattr(found, name), ours[name])


def test_parameters_and_entries_are_as_many_as_the_official_ones() -> None:
    network = CenterPointNetwork(CenterPoint(weights=Weights("untrained:0")).build_head())
    values = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    assert values == {
        "pts_middle_encoder": 2_694_352,
        "pts_backbone": 4_280_832,
        "pts_neck": 295_936,
        "pts_bbox_head": 1_667_142,
    }
    assert sum(values.values()) == 8_938_262
    state = network.state_dict()
    assert len(state) == 504
    assert sum(key.endswith("running_var") for key in state) == 72


@pytest.mark.golden("centerpoint_mmdet3d")
def test_keys_are_the_official_ones_in_their_order(golden: Any) -> None:
    network = CenterPointNetwork(CenterPoint(weights=Weights("untrained:0")).build_head())
    ours = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert ours == {key: value.shape for key, value in golden.state().items()}

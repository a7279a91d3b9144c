"""BEVDet against the outputs of its authors' code, first generation: every tap, candidates, boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extractors.base import Weights
from extractors.bevdet import BEVDet
from extractors.center_head import TASKS, Candidates
from tests.parity.bevdet_pass import Pass, run

HEADS = {"reg": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": 0}  # in the order of the synthetic maps


@pytest.fixture(scope="module")
def passed(golden: Any, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pass:
    """The network's pass over a reference file's key frame."""
    return run(golden, data_dir, tmp_path_factory.mktemp("weights"))


@pytest.mark.golden("bevdet_r50")
def test_every_tap_equals_the_reference(golden: Any, passed: Pass) -> None:
    arrays, image = golden.arrays, passed.taps["img"]
    stored = {tap.removesuffix(".shape") for tap in arrays if tap.endswith(".shape")}
    assert stored == passed.taps.keys() & stored
    golden.check({tap: passed.taps[tap] for tap in stored})
    c, row, column = arrays["img.probe_chw"].T
    golden.check({"img.probe": image[:, c, row, column]})
    mean_std = np.stack([image.mean((1, 2, 3), np.float64), image.std((1, 2, 3), dtype=np.float64)], 1)
    golden.check({"img.mean_std": mean_std})
    occupied = np.packbits((passed.taps["lift"][0] != 0).any(0))
    np.testing.assert_array_equal(occupied, arrays["lift.occupied"])


@pytest.mark.golden("bevdet_r50")
def test_candidates_and_boxes_equal_the_reference(golden: Any, passed: Pass) -> None:
    """Where scores are nearly equal, float noise decides which candidate goes; the others must be there, one to one."""
    arrays, head = golden.arrays, passed.head
    (found,) = head.detect(passed.scaled)
    stable: dict[str, list[np.ndarray]] = {name: [] for name in ("boxes", "scores", "labels")}
    for task, labels in enumerate(head.labels):
        reference = candidates(arrays, "pre_nms", task)
        (ours,) = head.decode(passed.scaled, task)
        assert len(ours.scores) == len(reference.scores)
        fits = pairs(ours.boxes, ours.scores, ours.labels, reference.boxes, reference.scores, reference.labels)
        lone = fits.sum(0) != 1
        assert (np.abs(reference.scores[lone] - reference.scores.min()) < 1e-5).all(), "only at the cut at 500"

        rows = head.suppress(task, reference)
        final = as_final(reference, rows, labels)
        kept = np.isin(arrays["labels"], labels)
        fits = pairs(*final, *(arrays[name][kept] for name in ("boxes", "scores", "labels")))
        assert len(rows) == kept.sum()
        assert (fits.sum(0) == 1).all()
        assert (fits.sum(1) == 1).all()
        rng = np.random.RandomState(task)
        for _ in range(8):
            rows = np.intersect1d(rows, head.suppress(task, shaken(reference, rng)))
        for name, values in zip(stable, as_final(reference, rows, labels), strict=True):
            stable[name].append(values)
    boxes, scores, labels = (np.concatenate(stable[name]) for name in ("boxes", "scores", "labels"))
    assert len(boxes) > 0.8 * len(arrays["boxes"])
    fits = pairs(boxes, scores, labels, found.boxes, found.scores, found.labels)
    assert (fits.sum(1) == 1).all()
    assert (fits.sum(0) <= 1).all()
    partner = fits.argmax(1)
    turn = (found.boxes[partner, 6] - boxes[:, 6] + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(turn).max() < 1e-3
    rest = [3, 4, 5, 7, 8]
    np.testing.assert_allclose(found.boxes[partner][:, rest], boxes[:, rest], rtol=1e-4, atol=1e-3)
    everything = pairs(*(arrays[n] for n in ("boxes", "scores", "labels")), found.boxes, found.scores, found.labels)
    print(f"{everything.any(1).sum()} of {len(everything)} boxes matched, {len(boxes)} of them stable")


@pytest.mark.golden("bevdet_r50")
def test_decoding_and_scale_nms_equal_the_reference(golden: Any) -> None:
    arrays = golden.arrays
    recipe = json.loads(str(arrays["about"]))["synthetic_head_maps"]
    rng, maps = np.random.RandomState(recipe["seed"]), {}
    for task, names in enumerate(TASKS):
        for name, channels in HEADS.items():
            mean, scale = recipe["affine_per_task"][task][name]
            values = mean + scale * rng.standard_normal((1, channels or len(names), 128, 128))
            maps[f"task{task}_{name}"] = torch.from_numpy(values.astype(np.float32))
    head: Any = BEVDet(weights=Weights("untrained:0")).blank().pts_bbox_head
    for task in range(len(TASKS)):
        (ours,), reference = head.decode(maps, task), candidates(arrays, "syn.pre_nms", task)
        np.testing.assert_allclose(ours.boxes, reference.boxes, rtol=1e-6)
        np.testing.assert_allclose(ours.scores, reference.scores, rtol=1e-6)
        np.testing.assert_array_equal(ours.labels, reference.labels)
    (found,) = head.detect(maps)
    reference_boxes = [arrays[f"syn.{name}"] for name in ("boxes", "scores", "labels")]
    fits = pairs(found.boxes, found.scores, found.labels, *reference_boxes)
    assert fits.shape[0] == fits.shape[1]
    assert (fits.sum(0) == 1).all()
    assert (fits.sum(1) == 1).all()
    np.testing.assert_allclose(found.boxes, reference_boxes[0][fits.argmax(1)], rtol=1e-5, atol=1e-6)


@pytest.mark.golden("bevdet_r50")
def test_keys_are_the_official_ones(golden: Any) -> None:
    ours = BEVDet(weights=Weights("untrained:0")).blank().state_dict()
    assert {key: tuple(value.shape) for key, value in ours.items()} == {k: v.shape for k, v in golden.state().items()}


def candidates(arrays: Any, prefix: str, task: int) -> Candidates:
    """The reference's candidates of a task."""
    boxes, scores, labels = (arrays[f"{prefix}.task{task}.{name}"] for name in ("bboxes", "scores", "labels"))
    return Candidates(boxes, scores, labels.astype(np.int64), np.zeros(len(boxes), np.int64))


def shaken(found: Candidates, rng: np.random.RandomState) -> Candidates:
    """Candidates with noise of the size that another order of float32 sums makes."""
    boxes = found.boxes * (1 + 1e-5 * rng.standard_normal(found.boxes.shape))
    scores = found.scores + 2e-6 * rng.standard_normal(found.scores.shape)
    return Candidates(boxes.astype(np.float32), scores.astype(np.float32), found.labels, found.cells)


def as_final(found: Candidates, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes by their bottom, scores, labels over all classes."""
    boxes = found.boxes[rows]
    boxes[:, 2] -= boxes[:, 5] / 2
    return boxes, found.scores[rows], labels[found.labels[rows]]


def pairs(boxes_a: Any, scores_a: Any, labels_a: Any, boxes_b: Any, scores_b: Any, labels_b: Any) -> np.ndarray:
    """(a, b) bool: centres within a millimetre, scores within 1e-4, the same label."""
    near = np.linalg.norm(boxes_a[:, None, :3] - boxes_b[:, :3], axis=2) < 1e-3
    return near & (labels_a[:, None] == labels_b) & (np.abs(scores_a[:, None] - scores_b) < 1e-4)

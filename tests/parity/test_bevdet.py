"""BEVDet against the outputs of its authors' code, first generation: every tap, candidates, boxes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from extractors.base import Weights
from extractors.bevdet import CAMERAS, BEVDet
from extractors.bevdet_network import HEIGHT, WIDTH, BEVDetNetwork
from extractors.center_head import TASKS, Candidates, CenterHead
from extractors.image_preprocess import named_views
from extractors.inputs import Camera, Cameras
from extractors.safe_pickle import read_pickle
from extractors.view_transform import frustum, ground_cells, place, splat

HEADS = {"reg": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": 0}  # in the order of the synthetic maps


def official(state: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The reference's state_dict: four entries are constants of the configuration, not weights by the rule."""
    d, y, x = np.meshgrid(np.arange(1.0, 60), np.linspace(0, 255, 16), np.linspace(0, 703, 44), indexing="ij")
    constants = {
        "dx": np.array([0.8, 0.8, 20.0]),
        "bx": np.array([-50.8, -50.8, 0.0]),
        "nx": np.array([128, 128, 1]),
        "frustum": np.stack([x, y, d], -1),
    }
    for name, value in constants.items():
        assert state[f"img_view_transformer.{name}"].shape == value.shape
        state[f"img_view_transformer.{name}"] = value.astype(np.int64 if name == "nx" else np.float32)
    return {key: torch.from_numpy(value) for key, value in state.items()}


@dataclass(frozen=True)
class Pass:
    """One pass of the network over the reference's key frame."""

    taps: dict[str, np.ndarray]
    head: CenterHead
    scaled: dict[str, Tensor]


def key_frame(data_dir: Path) -> Cameras:
    """The six cameras of the real key frame, calibrated as the reference had it: by `lidar2cam` alone."""
    files = sorted((data_dir / "nuscenes").glob("*.pkl"))
    if not files:
        pytest.skip(f"no info pickle in {data_dir / 'nuscenes'}")
    views = []
    for name, image in read_pickle(files[0])["data_list"][0]["images"].items():
        path = files[0].with_name(image["img_path"])
        views.append(Camera(name, path, np.array(image["cam2img"]), np.linalg.inv(np.array(image["lidar2cam"])), None))
    return Cameras(tuple(views))


def run(golden: Any, data_dir: Path, folder: Path) -> Pass:
    if unknown := golden.recipe.keys() - {"model", "salt", "mirror_images"}:
        pytest.fail(f"the recipe asks for {sorted(unknown)}, which this test doesn't know")
    checkpoint = folder / "weights.pth"
    torch.save({"state_dict": official(golden.state())}, checkpoint)
    bevdet = BEVDet(weights=Weights(str(checkpoint)))
    assert bevdet.generation == "bd1"
    network = bevdet.build().ready("cpu")

    views = named_views(key_frame(data_dir), CAMERAS, "key frame")
    images = [Image.open(view.path) for view in views]
    if golden.recipe.get("mirror_images"):
        images = [ImageOps.mirror(image) for image in images]
    pixels = torch.from_numpy(np.stack([bevdet.fit.apply(image) for image in images]))
    arrays = golden.arrays
    fit = bevdet.fit.matrix(bevdet.image_size)
    np.testing.assert_allclose(np.diag([*np.diag(fit)[:2], 1.0]), arrays["post_rots"][0], atol=1e-6)
    np.testing.assert_allclose([*fit[:2, 2], 0.0], arrays["post_trans"][0], atol=1e-4)
    np.testing.assert_allclose(np.stack([view.to_lidar[:3, :3] for view in views]), arrays["rots"], atol=1e-5)
    np.testing.assert_allclose(np.stack([view.to_lidar[:3, 3] for view in views]), arrays["trans"], atol=1e-4)
    np.testing.assert_allclose(np.stack([view.intrinsic for view in views]), arrays["intrins"], rtol=1e-6)
    calibration = [torch.from_numpy(arrays[name]) for name in ("rots", "trans", "intrins")]
    post = torch.from_numpy(arrays["post_rots"][0]), torch.from_numpy(arrays["post_trans"][0])
    points = place(frustum(HEIGHT, WIDTH), *calibration, *post)
    cells = ground_cells(points, bevdet.ground)[None]

    taps: dict[str, Tensor] = {"geom": points[None]}
    with torch.inference_mode():
        views_taps = [see(network, pixels[i : i + 1]) for i in range(len(pixels))]
        taps |= {name: torch.cat([one[name] for one in views_taps]) for name in views_taps[0]}
        depth, context = taps["depth_prob"][None], taps["context"][None]
        taps["lift"] = splat(depth, context, cells, bevdet.ground)
        assert torch.equal(taps["lift"], network.lift(pixels[None], cells))
        soft_depth, soft_context = network.img_view_transformer(taps["neck"] * 2**-5)
        taps["lift_soft"] = splat(soft_depth[None], soft_context[None], cells, bevdet.ground)
        stages = network.img_bev_encoder_backbone(taps["lift"])
        taps |= {f"bev_stage{i}": stage for i, stage in enumerate(stages, 1)}
        taps["bev_512x64x64"] = network.encode(taps["lift"])
        taps["bev"] = network.up2(taps["bev_512x64x64"])
        head: Any = network.pts_bbox_head
        taps["head.shared"] = head.shared_conv(taps["bev"])
        scaled = head(taps["bev"] * 2**-7)
        for prefix, maps in (("head", head(taps["bev"])), ("head_scaled", scaled)):
            taps |= {f"{prefix}.{name.replace('_', '.')}": value for name, value in maps.items()}
    return Pass({name: value.numpy() for name, value in taps.items()}, head, scaled)


def see(network: BEVDetNetwork, pixels: Tensor) -> dict[str, Tensor]:
    """Taps of `BEVDetNetwork.see`, caught on their way."""
    taps: dict[str, Tensor] = {}

    def keep(name: str, before: bool = False) -> Any:
        return lambda module, inputs, output: taps.__setitem__(name, inputs[0] if before else output)

    parts = (
        (network.img_backbone, keep("img", before=True)),
        (network.img_backbone, lambda module, inputs, output: taps.update(c4=output["c4"], c5=output["c5"])),
        (network.img_neck, keep("neck")),
        (network.img_view_transformer.get_submodule("depthnet"), keep("logits")),
    )
    hooks = [part.register_forward_hook(hook) for part, hook in parts]
    taps["depth_prob"], taps["context"] = network.see(pixels)
    for hook in hooks:
        hook.remove()
    return {**taps, "depth_logits": taps.pop("logits")[:, :59]}


_passes: dict[Path, Pass] = {}


@pytest.fixture
def passed(golden: Any, data_dir: Path, tmp_path: Path) -> Pass:
    """The network's pass over a reference file's input; one for all tests of the file."""
    if golden.path not in _passes:
        _passes.clear()
        _passes[golden.path] = run(golden, data_dir, tmp_path)
    return _passes[golden.path]


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

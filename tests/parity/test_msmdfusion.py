"""MSMDFusion against the outputs of its authors' code: every tap, partners of voxels, boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from extractors import modality_fusion
from extractors.boxes3d import CLASSES, bottom_from_centre, corners
from extractors.masks import Instance
from extractors.msmdfusion_inputs import CAMERAS, IMAGE_SIZE, PADDED, POINT_RANGE, RESIZED, lidar_to_image
from extractors.msmdfusion_network import MSMDFusionNetwork
from extractors.virtual_points import make_points
from tests.parity.key_frame import read_cameras, read_info, read_points
from tests.parity.msmdfusion_pass import STAGES, Pass, in_order, run, sparse_taps, statistics

LOOSE = 1e-2  # where the official result hangs on how a library treats a voxel given twice
OUTPUTS = ("center", "height", "dim", "rot", "vel", "heatmap", "query_heatmap_score")


@pytest.fixture(scope="module")
def passed(golden: Any, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pass:
    """The network's passes over a reference file's key frame."""
    return run(golden, data_dir, tmp_path_factory.mktemp("weights"))


def all_taps(golden: Any, ours: Pass, groups: tuple[str, ...]) -> dict[str, Any]:
    """Our side of every array that the reference keeps of these groups; none may be left out."""
    given = ("about", "recipe", "img.probe", "img.probe_chw", "img.mean_std", "lidar2img", "points.", "fg_", "emb.")
    wanted = {
        tap
        for tap in golden.arrays
        if tap.split(".")[0] in groups
        or ("" in groups and not tap.startswith(("exact.", "legacy.", "full.", "head", "override.", *given)))
    }
    taps: dict[str, Any] = {}
    for name, tensor in ours.sparse.items():
        if f"{name}.row" in wanted:
            taps |= sparse_taps(golden, name, tensor)
    for name, value in ours.taps.items():
        if name in wanted or f"{name}.shape" in wanted:
            taps[name] = value
        if f"{name}.stat" in wanted:
            taps[f"{name}.stat"] = statistics(np.asarray(value))
    if "" in groups:
        taps["depth_map_p2.nonzero"] = np.array([(ours.taps["depth_map_p2"] != 0).sum()])
    for group in groups:
        for stage in STAGES:
            if (tap := f"{group}.cross_gate_of_embedding.stage{stage}") in wanted:
                gate = ours.network.multimodal_middle_encoder.cross_gate_control[stage - 1]
                taps[tap] = gate(torch.from_numpy(golden.arrays[f"emb.stage{stage}"])).numpy()
    compared = set(taps) | {f"{tap}.{part}" for tap in taps for part in ("shape", "index", "value")}
    rows = {tap for tap in wanted if tap.endswith(".row")}  # which rows the reference kept
    assert not wanted - compared - rows, f"taps that were not compared: {sorted(wanted - compared - rows)}"
    return taps


@pytest.mark.golden("msmdfusion")
def test_both_branches_equal_the_reference(golden: Any, passed: Pass) -> None:
    golden.check(all_taps(golden, passed, ("",)))
    image = passed.taps["img"].numpy()
    c, row, column = golden.arrays["img.probe_chw"].T
    mean_std = np.stack([image.mean((1, 2, 3), np.float64), image.std((1, 2, 3), dtype=np.float64)], 1)
    golden.check({"img.probe": image[:, c, row, column], "img.mean_std": mean_std})


@pytest.mark.golden("msmdfusion")
@pytest.mark.parametrize("group", ["exact", "full"])
def test_the_fusion_equals_the_reference(golden: Any, passed: Pass, group: str) -> None:
    golden.check(all_taps(golden, passed, (group,)))


@pytest.mark.golden("msmdfusion")
def test_legacy_pairing_is_near_the_reference(golden: Any, passed: Pass) -> None:
    """Equal float keys are paired in the order that a sort leaves them; voxels given twice are up to the library."""
    taps = all_taps(golden, passed, ("legacy",))
    if passed.same_order:
        golden.check(taps, LOOSE)
        golden.check({"legacy.bev": passed.bev["legacy"]}, 1e-3)
    else:  # as far as legacy is from exact
        golden.check({"legacy.bev": passed.bev["legacy"]}, 0.03)
    for stage in STAGES:
        lidar, image = passed.sparse[f"encoder{stage - 1}"], passed.sparse[f"legacy.voxel2d.stage{stage}"]
        a, b = modality_fusion.pair_voxels(lidar.coords[:, 1:], image.coords[:, 1:], "legacy_float")
        counts = [len(lidar.coords) - len(a), len(image.coords) - len(b), len(a)]
        np.testing.assert_array_equal(counts, golden.arrays[f"legacy.split.stage{stage}"][:3])


def head_taps(network: MSMDFusionNetwork, bev: Tensor, name: str) -> tuple[dict[str, Any], Any]:
    """The reference's taps of the head on a map, and what it detects."""
    head, taps = network.pts_bbox_head, {}

    def decoder(module: Any, inputs: Any, output: Tensor) -> None:
        taps.update(query_feat=inputs[0], query_pos=inputs[2], decoder=output)

    hooks = [
        head.shared_conv.register_forward_hook(lambda module, x, y: taps.update(shared=y)),
        head.heatmap_head.register_forward_hook(lambda module, x, y: taps.update(heatmap_logits=y)),
        head.decoder[0].register_forward_hook(decoder),
    ]
    with torch.inference_mode():
        outputs = head(bev)
        (found,) = head.detect(outputs)
    for hook in hooks:
        hook.remove()
    taps["query_label"] = outputs.pop("query_label")
    arrays = {**taps, **{f"out.{key}": value for key, value in outputs.items()}}
    return {f"{name}.{key}": value.numpy() for key, value in arrays.items()}, found


def by_reference(taps: dict[str, Any], arrays: Any, name: str) -> dict[str, Any]:
    """Our queries in the reference's order, in which float noise may swap those of nearly equal scores."""

    def cells(position: np.ndarray, label: np.ndarray) -> list[tuple[float, ...]]:
        return [(*place, number) for place, number in zip(position[0], label[0], strict=True)]

    ours = cells(taps[f"{name}.query_pos"], taps[f"{name}.query_label"])
    order = [ours.index(one) for one in cells(arrays[f"{name}.query_pos"], arrays[f"{name}.query_label"])]
    of_queries = ("query_feat", "decoder", "query_label", *(f"out.{key}" for key in OUTPUTS))
    sorted_taps = {f"{name}.{key}": taps[f"{name}.{key}"][..., order] for key in of_queries}
    return {**taps, **sorted_taps, f"{name}.query_pos": taps[f"{name}.query_pos"][:, order]}


def matched(found: Any, arrays: Any, name: str, metres: float, score: float) -> np.ndarray:
    """(ours, reference) bool: the same label, centre and score."""
    near = np.linalg.norm(found.boxes[:, None, :3] - arrays[f"{name}.boxes"][:, :3], axis=2) < metres
    near &= found.labels[:, None] == arrays[f"{name}.labels"]
    return near & (np.abs(found.scores[:, None] - arrays[f"{name}.scores"]) < score)


@pytest.mark.golden("msmdfusion")
@pytest.mark.parametrize("name", ["head", "head_syn"])
def test_the_head_equals_the_reference(golden: Any, passed: Pass, name: str) -> None:
    """On our map, and on noise."""
    noise = np.random.RandomState(31000).standard_normal((1, 512, 180, 180)).astype(np.float32)
    bev = passed.bev["exact"] if name == "head" else torch.from_numpy(noise)
    taps, found = head_taps(passed.network, bev, name)
    arrays = golden.arrays
    taps |= {f"{tap}.stat": statistics(value) for tap, value in taps.items() if f"{tap}.stat" in arrays}
    golden.check(by_reference(taps, arrays, name))
    stored = {tap.removesuffix(".shape") for tap in arrays if tap.startswith(f"{name}.")}
    parts = (".index", ".value", *(f"{name}.{part}" for part in ("boxes", "scores", "labels")))
    assert not {tap for tap in stored - taps.keys() if not tap.endswith(parts)}

    fits = matched(found, arrays, name, 1e-3, 1e-4)
    assert fits.shape[0] == fits.shape[1]
    free, partner = set(range(len(fits))), []
    for row in fits.T:  # one to one, in the order of scores
        partner.append(min(free & set(np.flatnonzero(row))))
        free.remove(partner[-1])
    boxes, wanted, rest = found.boxes[partner], arrays[f"{name}.boxes"], [3, 4, 5, 7, 8]
    np.testing.assert_allclose(boxes[:, rest], wanted[:, rest], rtol=1e-4, atol=1e-3)
    turn = boxes[:, 6] - wanted[:, 6]
    assert np.abs((turn + np.pi) % (2 * np.pi) - np.pi).max() < 1e-3


@pytest.mark.golden("msmdfusion")
def test_the_head_on_the_legacy_map_is_near_the_reference(golden: Any, passed: Pass) -> None:
    taps, found = head_taps(passed.network, passed.bev["legacy"], "head_legacy")
    golden.check({"head_legacy.heatmap_logits": taps["head_legacy.heatmap_logits"]}, LOOSE)
    if passed.same_order:
        fits = matched(found, golden.arrays, "head_legacy", LOOSE, 1e-3)
        assert fits.any(0).mean() > 0.95


@pytest.mark.golden("msmdfusion")
def test_keys_and_counts_are_the_official_ones(golden: Any) -> None:
    network = MSMDFusionNetwork()
    state = network.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == {k: v.shape for k, v in golden.state().items()}


@pytest.mark.golden("msmdfusion")
def test_virtual_points_from_boxes_equal_the_reference(golden: Any, data_dir: Path) -> None:
    """The reference's recipe, by our generator: the same virtual points, the same real ones in another order."""
    arrays, recipe = golden.arrays, json.loads(str(golden.arrays["about"]))["foreground"]
    if golden.recipe.get("negate_x") or golden.recipe.get("mirror_images"):
        pytest.skip("the recipe draws masks around the boxes of the unchanged key frame")
    info, _ = read_info(data_dir)
    names = {number: name for name, number in info["metainfo"]["categories"].items()}
    objects = [one for one in info["data_list"][0]["instances"] if names.get(one["bbox_label_3d"]) in CLASSES]
    boxes = corners(bottom_from_centre(np.array([one["bbox_3d"] for one in objects])), "mmdet3d-1.0")
    rng = ScoreFirst(recipe["seed"])
    first = {"fg_pixels": 0, "fg_real_pixels": 0}
    for number, view in enumerate(read_cameras(data_dir).named(CAMERAS)):
        projection = lidar_to_image(view)
        instances = [
            Instance(names[one["bbox_label_3d"]], 1.0, mask)
            for one, box in zip(objects, boxes, strict=True)
            if (mask := rectangle_around(box, projection)) is not None
        ]
        made = make_points(read_points(data_dir)[:, :3], projection, instances, CLASSES, recipe["PER"], rng)
        pixels = made.pixels * np.array([RESIZED[0] / IMAGE_SIZE[0], RESIZED[1] / IMAGE_SIZE[1], 1], np.float32)
        assert (pixels[:, :2] < PADDED).all()
        low, high = np.reshape(POINT_RANGE, (2, 3))
        inside = ((made.points[:, :3] > low) & (made.points[:, :3] < high)).all(1)
        part = {}
        for name, start in first.items():
            first[name] = stop = start + int(arrays[f"{name}.count"][number])
            part[name] = slice(start, stop)
        wanted = np.column_stack([arrays["fg_pixels"], arrays["fg_points"][:, :13]])[part["fg_pixels"]]
        ours = np.column_stack([pixels, made.points[:, :13]])[inside]  # the scores are drawn otherwise
        virtual = ~made.real[inside]
        np.testing.assert_allclose(ours[virtual], wanted[virtual], rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(in_order(ours[~virtual]), in_order(wanted[~virtual]), rtol=1e-6, atol=1e-5)
        real = arrays["fg_real_pixels"][part["fg_real_pixels"]]
        np.testing.assert_array_equal(in_order(pixels[made.real]), in_order(real))


class ScoreFirst(np.random.RandomState):
    """The reference draws an instance's score right before its pixels."""

    def choice(self, *args: Any, **rest: Any) -> Any:
        self.uniform(0.3, 1)
        return super().choice(*args, **rest)


def rectangle_around(box: np.ndarray, projection: np.ndarray) -> np.ndarray | None:
    """The reference's mask of a box: the rectangle around its corners in the image."""
    projected = box @ projection[:3, :3].T + projection[:3, 3]
    if projected[:, 2].min() <= 0.5:
        return None
    uv = (projected[:, :2] / projected[:, 2:]).clip(0, IMAGE_SIZE)
    left, upper = np.floor(uv.min(0)).astype(int)
    right, lower = np.ceil(uv.max(0)).astype(int)
    if min(right - left, lower - upper) < 3:
        return None
    mask = np.zeros(IMAGE_SIZE[::-1], bool)
    mask[upper:lower, left:right] = True
    return mask

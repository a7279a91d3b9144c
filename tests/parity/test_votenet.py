"""VoteNet against the reference outputs of ScanQA's and mmdetection3d's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extractors import detection, geometry, pointcloud, votenet_namings
from extractors.point_sampling import furthest_point_sample
from extractors.pointnet2 import ball_query
from extractors.votenet import FAMILIES
from extractors.votenet_boxes import decode
from extractors.votenet_network import VoteNetwork


def _scan(data_dir: Path, golden: Any) -> np.ndarray:
    """(point, 6) float32 x y z r g b of the reference's scan."""
    golden.check_recipe("subset_seed", "negate_x")
    path = data_dir / "scannet" / "scene0000_00.bin"
    if not path.is_file():
        pytest.skip(f"no {path}")
    raw = np.fromfile(path, np.float32).reshape(-1, 6)
    if golden.recipe.get("negate_x"):
        raw[:, 0] *= -1
    return raw


def _run(golden: Any, points: np.ndarray, family: str, sampling: str) -> dict[str, torch.Tensor]:
    kind = FAMILIES[family]
    network = VoteNetwork(points.shape[1] - 3, lanes=kind.lanes, skip_origin=kind.skip_origin).eval()
    state = {key: torch.from_numpy(value) for key, value in golden.state().items()}
    votenet_namings.load(network, state, str(golden.path))
    return network(torch.from_numpy(points)[None], sampling)


def _sample(xyz: np.ndarray, count: int, **rule: Any) -> np.ndarray:
    return furthest_point_sample(torch.from_numpy(xyz)[None], count, **rule)[0][0].numpy()


@pytest.mark.golden("votenet_scanqa")
def test_scanqa_detector_equals_the_reference(golden: Any, data_dir: Path) -> None:
    raw, arrays = _scan(data_dir, golden), golden.arrays
    xyz, floor = raw[:, :3], pointcloud.floor_height(raw[:, 2])
    chosen = arrays["index"]
    points = np.concatenate(
        [xyz[chosen], pointcloud.normalise_colors(raw[chosen, 3:]), (xyz[chosen, 2] - floor)[:, None]], 1
    )
    ways = [points.astype(np.float32), points]  # the order of rounding and shifting shows in the reference's points
    for way in ways:
        way[:, :3] -= arrays.get("shift_xyz", np.zeros(3)).astype(way.dtype)
    points = min((w.astype(np.float32) for w in ways), key=lambda way: golden.error("point_clouds", way[None]))
    taps = _run(golden, points, "scanqa", "vote_fps")

    mean_sizes = arrays["mean_size_arr"]
    assert np.allclose(FAMILIES["scanqa"].mean_sizes, mean_sizes, rtol=1e-6)
    boxes = decode(taps["proposal_raw"][0].numpy(), taps["aggregated_vote_xyz"][0].numpy(), mean_sizes)
    xyz_taps = {n: t for n, t in taps.items() if n.endswith(("_xyz", "_inds"))}
    ours: dict[str, Any] = {
        **{n: t.numpy() for n, t in xyz_taps.items()},
        **{n: taps[n].mT.numpy() for n in taps if n.endswith("_features") and not n.startswith("aggregated")},
        "vote_features_unnormalised": taps["vote_features_unnormalised"].mT.numpy(),
        "aggregated_vote_features": taps["aggregated_vote_features"].numpy(),
        "fp2_features_first32seeds": taps["fp2_features"][:, :32].mT.numpy(),
        "proposal_raw": taps["proposal_raw"].mT.numpy(),
        "seed_inds": taps["sa1_inds"][:, :1024].numpy(),  # the official definition
        "floor_height": np.float64(floor),
        "point_clouds": points[None],
        "objectness_scores": boxes.objectness[None],
        "center": boxes.center[None],
        "heading_scores": boxes.heading_score[None],
        "heading_residuals_normalized": boxes.heading_residual_normalized[None],
        "heading_residuals": boxes.heading_residual_normalized[None] * np.float32(np.pi),
        "size_scores": boxes.size_scores[None],
        "size_residuals_normalized": boxes.size_residuals_normalized[None],
        "size_residuals": boxes.size_residuals_normalized[None] * mean_sizes.astype(np.float32),
        "sem_cls_scores": boxes.semantics[None],
        "bbox_corner": geometry.box_corners(np.concatenate([boxes.center, boxes.size], 1))[None],
        "bbox_mask": boxes.mask[None],
        "bbox_sems": boxes.sem_class[None],
        "obb": np.concatenate([boxes.center, boxes.size, np.zeros((len(boxes.size), 1))], 1)[None],
    }
    stored = {name.removesuffix(".shape") for name in arrays}
    errors = golden.check({tap: value for tap, value in ours.items() if tap in stored})
    given = {"recipe", "about", "index", "shift_xyz", "mean_size_arr"}
    helpers = (".index", ".value", ".stat")
    rules = ("override.", "fps_origin.", "fps_ties.", "ball_query.")
    left = {n for n in stored - given - errors.keys() if not n.endswith(helpers) and not n.startswith(rules)}
    assert not left, f"{golden.path.name}: taps that were not compared: {sorted(left)}"

    from_origin = points[:, :3] - points[4321, :3]
    small = arrays["fps_origin.small_xyz"]
    count = len(arrays["fps_origin.small_skip_inds"])
    ties = arrays["fps_ties.xyz"]
    near = ball_query(*(torch.from_numpy(a)[None] for a in (ties, arrays["ball_query.centres"])), 1.2, 8)[0]
    away = torch.full((1, arrays["ball_query.nohit_inds"].shape[1], 3), 50.0) + torch.from_numpy(ties).amax(0)
    golden.check({
        "fps_origin.skip_inds": _sample(from_origin, len(arrays["fps_origin.skip_inds"]), skip_origin=True),
        "fps_origin.noskip_inds": _sample(from_origin, len(arrays["fps_origin.noskip_inds"])),
        "fps_origin.small_skip_inds": _sample(small, count, skip_origin=True),
        "fps_origin.small_noskip_inds": _sample(small, count),
        "fps_ties.inds": _sample(ties, len(arrays["fps_ties.inds"])),
        "ball_query.inds": near.numpy(),
        "ball_query.nohit_inds": ball_query(torch.from_numpy(ties)[None], away, 1.2, 8)[0].numpy(),
    })  # fmt: skip


@pytest.mark.golden("votenet_mmdet3d")
def test_mmdet3d_detector_equals_the_reference(golden: Any, data_dir: Path) -> None:
    raw, arrays = _scan(data_dir, golden), golden.arrays
    floor = pointcloud.floor_height(raw[:, 2])
    height = raw[:, 2] - floor  # on the unaligned points, then aligned
    chosen = np.random.RandomState(golden.recipe["subset_seed"]).choice(
        len(raw), len(arrays["input.indices"]), replace=False
    )
    aligned = geometry.transform(raw[:, :3], arrays["input.axis_align_matrix"].astype(np.float64))
    points = np.concatenate([aligned, height[:, None]], 1).astype(np.float32)[chosen]
    given = arrays["input.points"]  # one rounding apart: the reference aligned in float32
    taps = {n: t[0].numpy() for n, t in _run(golden, given, "mmdet3d", "seed_fps").items()}

    mean_sizes = np.asarray(FAMILIES["mmdet3d"].mean_sizes)
    boxes = decode(taps["proposal_raw"], taps["aggregated_vote_xyz"], mean_sizes)
    raw_head = taps["proposal_raw"].T
    inds = {1: taps["sa1_inds"]}
    for n in (2, 3, 4):
        inds[n] = inds[n - 1][taps[f"sa{n}_inds"]]
    ours: dict[str, Any] = {
        "input.points": points,
        "input.indices": chosen,
        "input.floor_height": np.array([floor]),
        **{f"sa{n}.indices": inds[n] for n in inds},
        **{f"sa{n}.xyz": taps[f"sa{n}_xyz"] for n in inds},
        **{f"sa{n}.features": taps[f"sa{n}_features"].T for n in inds},
        "fp1.features": taps["fp1_features"].T,
        "fp1.indices": inds[3],
        "fp2.features": taps["fp2_features"].T,
        "fp2.indices": inds[2],
        "seed.xyz": taps["sa2_xyz"],
        "seed.indices": taps["seed_inds"],
        "vote.xyz": taps["vote_xyz"],
        "vote.offset": taps["vote_offset"].T,
        "vote.features": taps["vote_features"].T,
        "aggregated.indices": taps["aggregated_vote_inds"],
        "aggregated.xyz": taps["aggregated_vote_xyz"],
        "aggregated.features": taps["aggregated_vote_features"],
        "head.cls": np.concatenate([raw_head[:2], raw_head[79:]]),
        "head.reg": raw_head[2:79],
        "head.obj_scores": boxes.objectness,
        "head.center": boxes.center,
        "head.dir_class": boxes.heading_score,
        "head.dir_res_norm": boxes.heading_residual_normalized,
        "head.dir_res": boxes.heading_residual_normalized * np.float32(np.pi),
        "head.size_class": boxes.size_scores,
        "head.size_res_norm": boxes.size_residuals_normalized,
        "head.size_res": boxes.size_residuals_normalized * mean_sizes.astype(np.float32),
        "head.sem_scores": boxes.semantics,
        **_after_network("", boxes, given),
    }
    syn = np.concatenate([arrays["syn.head.cls"][:2], arrays["syn.head.reg"], arrays["syn.head.cls"][2:]]).T
    ours |= _after_network("syn.", decode(syn, arrays["aggregated.xyz"], mean_sizes), given)
    ours["fps_ties.indices"] = _sample(arrays["fps_ties.points"], len(arrays["fps_ties.indices"]), lanes=1024)
    errors = golden.check(ours)
    given_too = {"recipe", "about", "fps_ties.points", "syn.head.cls", "syn.head.reg", "input.axis_align_matrix"}
    stored = {n.removesuffix(".shape") for n in arrays if not n.endswith((".stat", ".index", ".value"))}
    left = {n for n in stored - given_too - errors.keys() if not n.startswith("override.")}
    assert not left, f"{golden.path.name}: taps that were not compared: {sorted(left)}"


def _after_network(prefix: str, boxes: Any, points: np.ndarray) -> dict[str, Any]:
    """Decoding and post-processing by mmdet3d's rules."""
    found = detection.detect_mmdet3d(boxes, points[:, :3])
    return {
        f"{prefix}decoded.boxes": np.concatenate([boxes.center, boxes.size, np.zeros_like(boxes.size[:, :1])], 1),
        f"{prefix}decoded.obj_prob": detection.softmax(boxes.objectness)[:, 1],
        f"{prefix}decoded.sem_prob": detection.softmax(boxes.semantics),
        f"{prefix}decoded.size_class": boxes.size_class,
        f"{prefix}decoded.sem_class": boxes.sem_class,
        f"{prefix}decoded.points_in_box": detection.points_in_boxes(points[:, :3], boxes.center, boxes.size),
        f"{prefix}final.boxes": np.concatenate([found.bottom_center, found.size, np.zeros_like(found.size[:, :1])], 1),
        f"{prefix}final.scores": found.class_scores.T.ravel(),  # the reference goes through the classes one by one
        f"{prefix}final.labels": np.repeat(np.arange(found.class_scores.shape[1]), len(found.proposal)),
        f"{prefix}final.proposal": found.proposal,
    }

"""MSMDFusion's passes over the key frame of a reference file, every tap caught."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from extractors import modality_fusion
from extractors.base import Weights
from extractors.msmdfusion import MSMDFusion
from extractors.msmdfusion_inputs import Frame, depth_canvas, read_images
from extractors.msmdfusion_network import VOXEL, MSMDFusionNetwork, normalised, voxel_tensor
from extractors.sparse_conv import SparseTensor
from tests.parity.key_frame import read_cameras, read_points

STAGES = (1, 2, 3, 4)
CPU = torch.device("cpu")


@dataclass
class Pass:
    """The network over a reference file's input, three ways: `exact`, `legacy`, `full` (image features unscaled)."""

    network: MSMDFusionNetwork
    taps: dict[str, Any] = field(default_factory=dict)
    sparse: dict[str, SparseTensor] = field(default_factory=dict)
    bev: dict[str, Tensor] = field(default_factory=dict)
    same_order: bool = False  # this machine's unstable sort leaves equal float keys as the reference's did


def frame_of(golden: Any, data_dir: Path) -> Frame:
    """The reference's input; virtual points and random embeddings are those it keeps."""
    golden.check_recipe("negate_x", "mirror_images")
    arrays = golden.arrays
    images, projections = read_images(read_cameras(data_dir), "key frame")
    if golden.recipe.get("mirror_images"):
        images = np.ascontiguousarray(images[:, :, ::-1])
    points = read_points(data_dir, golden.recipe.get("negate_x"))
    points[:, 4] = 0
    np.testing.assert_allclose(projections, arrays["lidar2img"], atol=1e-9)
    assert len(points) == arrays["points.count"]
    np.testing.assert_array_equal(points[: len(arrays["points.head"])], arrays["points.head"])
    camera, real = (np.repeat(np.arange(6), arrays[f"{name}.count"]) for name in ("fg_pixels", "fg_real_pixels"))
    return Frame(
        points=points,
        images=images,
        lidar_to_image=projections.astype(np.float32),
        depth=depth_canvas(arrays["fg_real_pixels"], real),
        pixels=arrays["fg_pixels"],
        camera=camera,
        painted=arrays["fg_points"],
        embeddings=tuple(arrays[f"emb.stage{stage}"] for stage in STAGES),
    )


def run(golden: Any, data_dir: Path, folder: Path) -> Pass:
    """One key frame, three ways; the weights come from a checkpoint that is written to `folder`."""
    checkpoint = folder / "weights.pth"
    state = {key: torch.from_numpy(value) for key, value in golden.state().items()}
    torch.save({"state_dict": state, "meta": {}}, checkpoint)
    network = MSMDFusion(weights=Weights(str(checkpoint))).build()
    frame = frame_of(golden, data_dir)
    ours = Pass(network)
    with torch.inference_mode():
        images = normalised(frame.images, CPU)
        pyramid = network.img_neck(network.img_backbone(images))
        voxels = voxel_tensor(frame.points, VOXEL, network.pts_middle_encoder.shape, CPU)
        x_lidar, stages = network.pts_middle_encoder(voxels)
        canvas = torch.from_numpy(frame.depth)[:, None]
        small = torch.nn.functional.interpolate(canvas, size=pyramid[0].shape[2:], mode="bilinear")[:, 0].numpy()
        ours.taps |= {"img": images, "x_lidar": x_lidar, "depth_map_p2": small}
        ours.taps |= {f"fpn{i}": level for i, level in enumerate(pyramid)}
        ours.sparse |= {"lidar_voxels": voxels, **{f"encoder{i}": stage for i, stage in enumerate(stages)}}
        scaled = [level * 2**-11 for level in pyramid]
        for name, levels in (("exact", scaled), ("legacy", scaled), ("full", pyramid)):
            with watched(ours, name), pytest.MonkeyPatch.context() as patch:
                network.pairing = "legacy_float" if name == "legacy" else "exact"
                if name == "legacy":
                    patch.setattr(modality_fusion, "ranked", torch.sort)
                ours.bev[name] = ours.taps[f"{name}.bev"] = network.fuse(frame, levels, x_lidar, stages)
    crc = [f"legacy.split.pairs_crc32.stage{stage}" for stage in STAGES]
    ours.same_order = all(np.array_equal(ours.taps[tap], golden.arrays[tap]) for tap in crc)
    return ours


@contextmanager
def watched(ours: Pass, name: str) -> Iterator[None]:
    """Keep what goes through the parts of the network, under the reference's names for it."""
    network, fusion = ours.network, ours.network.multimodal_middle_encoder
    hooks, scores = [], []

    def on(module: torch.nn.Module, keep: Any) -> None:
        hooks.append(module.register_forward_hook(keep))

    def tap(key: str) -> Any:
        return lambda module, inputs, output: ours.taps.__setitem__(f"{name}.{key}", output)

    for i, block in enumerate(network.conv1x1_blocks):
        on(block, tap(f"compressed{i}"))
    on(network.score_net, lambda module, inputs, output: scores.append(output))
    on(fusion, tap("x_multimodal"))
    on(network.bev_fusion, tap("bev_fusion"))
    on(
        network.pts_backbone,
        lambda module, inputs, output: ours.taps.update({f"{name}.second{i}": x for i, x in enumerate(output)}),
    )

    def voxels(module: Any, inputs: Any, output: Any) -> None:
        ours.sparse.update({f"{name}.voxel2d.stage{s}": x for s, x in zip(STAGES, inputs[1], strict=True)})

    on(fusion, voxels)
    for stage in STAGES:
        block = fusion.aggregation_blocks[f"stage_{stage}"]
        both = (f"{name}.union.stage{stage}", f"{name}.aggregated.stage{stage}")
        on(block, lambda module, x, y, keys=both: ours.sparse.update({keys[0]: x[0], keys[1]: y}))
        down = fusion.downscale_blocks[f"stage_{stage}"]
        on(down, lambda module, x, y, key=f"{name}.downscaled.stage{stage}": ours.sparse.__setitem__(key, y))
    with pytest.MonkeyPatch.context() as patch:
        pairs = spied(patch, "pair_voxels")
        partners = spied(patch, "find_partners")
        draws = spied(patch, "furthest_point_sample")
        yield
    for hook in hooks:
        hook.remove()
    ours.taps |= {f"{name}.score.stage{stage}": score for stage, score in zip(STAGES, scores, strict=True)}
    drawn_at = []
    for stage, ((first, second, _), (a, b)), ((queries, near, _), partner) in zip(STAGES, pairs, partners, strict=True):
        paired = torch.cat([first[a], second[b]], 1).numpy()
        counts = [len(first) - len(a), len(second) - len(b), len(a), (paired[:, :3] != paired[:, 3:]).any(1).sum()]
        ours.taps[f"{name}.split.stage{stage}"] = np.array(counts)
        ours.taps[f"{name}.split.pairs_crc32.stage{stage}"] = np.array([crc32(paired.astype(np.int16))])
        place = torch.cat([near, near.new_full((1, 3), -1)])[partner]
        ours.taps[f"{name}.nn.stage{stage}"] = in_order(torch.cat([queries, place], 1).numpy().astype(np.int16))
        if len(queries) > modality_fusion.REPRESENTATIVES:
            drawn_at.append(stage)
    assert len(draws) == len(drawn_at)
    ours.taps[f"{name}.fps.stages"] = np.array(drawn_at)
    for stage, ((places, *_), (drawn, _)) in zip(drawn_at, draws, strict=True):
        ours.taps[f"{name}.fps.coords.stage{stage}"] = places[0][drawn[0]].numpy().astype(np.int16)


def spied(patch: pytest.MonkeyPatch, function: str) -> list[tuple[Any, Any]]:
    """(arguments, result) of each call to a function of `modality_fusion`."""
    calls: list[tuple[Any, Any]] = []
    original = getattr(modality_fusion, function)

    def call(*args: Any, **rest: Any) -> Any:
        calls.append((args, original(*args, **rest)))
        return calls[-1][1]

    patch.setattr(modality_fusion, function, call)
    return calls


def in_order(rows: np.ndarray) -> np.ndarray:
    """Rows sorted by their columns, the first counting most."""
    return rows[np.lexsort(rows.T[::-1])]


def crc32(rows: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(in_order(rows)).tobytes())


def sparse_taps(golden: Any, name: str, x: SparseTensor) -> dict[str, Any]:
    """What the reference keeps of a sparse tensor."""
    coords, features = x.coords.numpy().astype(np.int32), x.features.numpy()
    order = np.lexsort(coords.T[::-1])
    coords, features, row = coords[order], features[order], golden.arrays[f"{name}.row"]
    return {
        f"{name}.count": np.array([len(coords), (coords[1:] == coords[:-1]).all(1).sum()]),
        f"{name}.coord_crc32": np.array([crc32(coords)]),
        f"{name}.coords": coords[row],
        f"{name}.value": features[row],
        f"{name}.stat": statistics(features),
    }


def statistics(values: np.ndarray) -> np.ndarray:
    return np.array([values.mean(dtype=np.float64), values.std(dtype=np.float64), values.min(), values.max()])

"""Voxels and the sparse encoder of CenterPoint against the reference outputs of mmdetection3d."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extractors.checkpoint import load_strict
from extractors.sparse_conv import SparseTensor
from extractors.sparse_encoder import SparseEncoder
from extractors.voxels import voxelize

KEY_FRAME = "n015-2018-07-24-11-22-45+0800__LIDAR_TOP__1532402927647951.pcd.bin"
SIZE, RANGE = (0.075, 0.075, 0.2), (-54, -54, -5, 54, 54, 3)
PREFIX = "pts_middle_encoder."


def key_frame(data_dir: Path, recipe: dict[str, Any]) -> np.ndarray:
    """(point, 5) float32 of the reference's scan: strictly inside the range, the ring replaced by a time lag of 0."""
    if unknown := recipe.keys() - {"model", "salt", "negate_x"}:
        pytest.fail(f"the recipe asks for {sorted(unknown)}, which this test doesn't know")
    path = data_dir / "nuscenes" / KEY_FRAME
    if not path.is_file():
        pytest.skip(f"no {path}")
    points = np.fromfile(path, np.float32).reshape(-1, 5)
    points[:, 4] = 0
    if recipe.get("negate_x"):
        points[:, 0] *= -1
    inside = ((points[:, :3] > np.array(RANGE[:3])) & (points[:, :3] < np.array(RANGE[3:]))).all(1)
    return points[inside]


@pytest.mark.golden("centerpoint_mmdet3d")
def test_voxels_and_sparse_encoder_equal_the_reference(golden: Any, data_dir: Path) -> None:
    points = key_frame(data_dir, golden.recipe)
    assert len(points) == int(golden.arrays["input.num_points_in_range"][0])
    voxels = voxelize(points, SIZE, RANGE, 10, 120_000)
    coords = np.concatenate([np.zeros((len(voxels.coords), 1), np.int32), voxels.coords], 1)
    golden.check({"voxel.coors": coords, "voxel.num_points": voxels.counts, "voxel.mean": voxels.mean})

    encoder = SparseEncoder().eval()
    state = {key: torch.from_numpy(value) for key, value in golden.state().items() if key.startswith(PREFIX)}
    load_strict(encoder, {key.removeprefix(PREFIX): value for key, value in state.items()}, str(golden.path))
    with torch.inference_mode():
        bev, stages = encoder(
            SparseTensor(torch.from_numpy(voxels.mean), torch.from_numpy(coords).long(), encoder.shape)
        )

    names = ["conv_input", *(f"encoder_layer{number}" for number in range(1, 5))]
    taps: dict[str, Any] = {"sparse.num_active": np.array([len(stage.coords) for stage in stages], np.int32)}
    for name, stage in zip(names, stages, strict=True):
        order = np.lexsort(stage.coords.numpy().T[::-1])
        taps[f"sparse.{name}.features"] = stage.features.numpy()[order]
        taps[f"sparse.{name}.coors"] = stage.coords.numpy()[order].astype(np.int32)
    cells = golden.arrays["middle.bev_rows.cell"]
    taps["middle.bev"] = bev.numpy()
    taps["middle.bev_active"] = bev[0].ne(0).any(0).numpy()
    taps["middle.bev_rows"] = bev[0].flatten(1).T.numpy()[cells]
    golden.check(taps)

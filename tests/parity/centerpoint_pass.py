"""CenterPoint's pass over the key frame of a reference file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from extractors.base import Weights
from extractors.center_head import CenterHead
from extractors.centerpoint import CenterPoint, VoxelScan
from extractors.centerpoint_network import sparse_batch
from extractors.detection import Detections
from extractors.inputs import LidarScan, LidarSweeps
from tests.parity.key_frame import read_points

STAGES = ("conv_input", *(f"encoder_layer{number}" for number in range(1, 5)))


@dataclass(frozen=True)
class Pass:
    """What one pass gives.

    Attributes:
        points: (point, 5) float32 of the key frame; `voxels`: as they went into the network.
        taps: values inside, by the reference's names.
        outputs: maps of the head, from which it finds objects; `found`: those it finds without making the maps.
    """

    points: np.ndarray
    voxels: VoxelScan
    taps: dict[str, np.ndarray]
    head: CenterHead
    outputs: dict[str, Tensor]
    found: Detections


def run(golden: Any, data_dir: Path, folder: Path) -> Pass:
    """One key frame without sweeps; the weights come from a checkpoint that is written to `folder`."""
    golden.check_recipe("negate_x")
    checkpoint = folder / "weights.pth"
    torch.save({"state_dict": {key: torch.from_numpy(value) for key, value in golden.state().items()}}, checkpoint)
    extractor = CenterPoint(weights=Weights(str(checkpoint)), pad_empty=False)
    network = extractor.build()
    head: Any = network.pts_bbox_head
    points = read_points(data_dir, golden.recipe.get("negate_x"))
    voxels = extractor.prepare("key frame", LidarSweeps(LidarScan(points, np.eye(4), 0.0), (), 0, np.eye(4)))
    with torch.inference_mode():
        batch = sparse_batch([(voxels.coords, voxels.mean)], extractor.voxels, "cpu")
        encoded, stages = network.pts_middle_encoder(batch)
        maps = network.pts_backbone(encoded)
        bev = network.pts_neck(maps)
        shared, outputs, (found,) = head.shared_conv(bev), head(bev), head.find(bev)

    active = np.array([len(stage.coords) for stage in stages], np.int32)
    taps = {
        "sparse.num_active": active,
        "middle.bev": encoded.numpy(),
        "middle.bev_active": encoded[0].ne(0).any(0).numpy(),
        "middle.bev_rows": rows_of(encoded, golden),
        "second.0": maps[0].numpy(),
        "second.1": maps[1].numpy(),
        "neck.bev": bev.numpy(),
        "neck.bev_rows": rows_of(bev, golden),
        "head.shared": shared.numpy(),
    }
    for name, stage in zip(STAGES, stages, strict=True):
        order = np.lexsort(stage.coords.numpy().T[::-1])
        taps[f"sparse.{name}.features"] = stage.features.numpy()[order]
        taps[f"sparse.{name}.coors"] = stage.coords.numpy()[order].astype(np.int32)
    for name, value in outputs.items():
        taps[f"head.{name.removeprefix('task').replace('_', '.')}"] = value.numpy()
    return Pass(points, voxels, taps, head, outputs, found)


def rows_of(bev: Tensor, golden: Any) -> np.ndarray:
    """(cell, channel) of a map, at the cells that the reference keeps whole."""
    return bev[0].flatten(1).T.numpy()[golden.arrays["middle.bev_rows.cell"]]

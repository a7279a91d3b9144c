"""CenterPoint's network: voxels to a bird's-eye map (mmdetection3d's `pts_*` modules), and how voxels are prepared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from extractors.center_head import CenterHead
from extractors.second import SECOND, SECONDFPN
from extractors.sparse_conv import SparseTensor, Triple
from extractors.sparse_encoder import SparseEncoder


class CenterPointNetwork(nn.Module):
    """From voxels to the map and its head.

    Args:
        head: on the map, `pts_bbox_head`.
        shape: voxels along z, y, x that the encoder takes.
    """

    def __init__(self, head: CenterHead, shape: Triple = (41, 1440, 1440)) -> None:
        super().__init__()
        self.pts_middle_encoder = SparseEncoder(5, shape)
        self.pts_backbone = SECOND()
        self.pts_neck = SECONDFPN()
        self.pts_bbox_head = head

    def forward(self, voxels: SparseTensor) -> Tensor:
        """Means of voxels -> (B, 512, H, W), the map that the head takes and objects are cut from."""
        bev, _ = self.pts_middle_encoder(voxels)
        found: Tensor = self.pts_neck(self.pts_backbone(bev.contiguous(memory_format=torch.channels_last)))
        return found


class HeadAlone(nn.Module):
    """A head under its name in the whole network, so that its keys (and seeded weights) are the same."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.pts_bbox_head = head


def sparse_batch(voxels: Sequence[tuple[np.ndarray, np.ndarray]], shape: Triple, device: str) -> SparseTensor:
    """Voxels of several key frames as one tensor.

    Args:
        voxels: (v, 3) int32 z, y, x and (v, 5) float32 means of each key frame.
        shape: voxels along z, y, x.
    """
    coords = np.concatenate([np.insert(zyx.astype(np.int64), 0, i, 1) for i, (zyx, _) in enumerate(voxels)])
    features = np.concatenate([mean for _, mean in voxels])
    return SparseTensor(
        torch.from_numpy(features).to(device), torch.from_numpy(coords).to(device), shape, batch_size=len(voxels)
    )

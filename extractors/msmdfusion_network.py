"""MSMDFusion (Jiao et al. 2023): LiDAR and painted image voxels, fused at four scales into a bird's-eye map.

Attribute names give the official keys of the configuration `MSMDFusion_nusc_voxel_LC`. Its keys `pts_middle_encoder`,
`pts_backbone` and `pts_neck` are those of CenterPoint. One frame at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.modality_fusion import IMAGE_CHANNELS, ModalityFusion, Pairing
from extractors.msmdfusion_inputs import PADDED, POINT_RANGE, RESIZED, Frame
from extractors.resnet import CHANNELS, ResNet
from extractors.second import SECOND, SECONDFPN
from extractors.sparse_conv import SparseTensor, Triple
from extractors.sparse_encoder import SparseEncoder
from extractors.transfusion_head import TransFusionHead
from extractors.voxels import voxelize

VOXEL = (0.075, 0.075, 0.2)  # metres
MAX_POINTS, MAX_VOXELS = 10, 160_000
_EPS = 1e-3  # of the BatchNorms behind the image branch and in the fusion of maps
_PAINTED = 49  # image channels of a painted point
_EMPTY_ROWS = 100  # of zeros, where a frame has no painted point
_XYZ_SCALE = (13.5, 13.5, 2.0)
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # RGB, of 0..255


class MSMDFusionNetwork(nn.Module):
    """The whole detector: `forward` gives the map, `pts_bbox_head` takes it.

    Args:
        pairing: see `modality_fusion.pair_voxels`.
    """

    def __init__(self, pairing: Pairing = "exact") -> None:
        super().__init__()
        self.pairing: Pairing = pairing
        self.pts_middle_encoder = SparseEncoder()
        self.multimodal_middle_encoder = ModalityFusion()
        self.pts_backbone = SECOND()
        self.pts_neck = SECONDFPN()
        self.pts_bbox_head = TransFusionHead()
        self.img_backbone = ResNet(norm=nn.BatchNorm2d)
        self.img_neck = ImagePyramid()
        self.conv1x1_blocks = nn.ModuleList(_conv(257, _PAINTED, kernel) for kernel in (5, 5, 3))
        self.score_net = nn.Sequential(nn.Linear(_PAINTED + 1 + 16, 1), nn.ReLU())
        self.bev_fusion = MapFusion()

    def forward(self, frame: Frame) -> Tensor:
        """The map of one frame: (1, 512, 180, 180), cells of 0.6 m from (-54, -54)."""
        device = next(self.parameters()).device
        pyramid = self.img_neck(self.img_backbone(normalised(frame.images, device)))
        points = voxel_tensor(frame.points, VOXEL, self.pts_middle_encoder.shape, device)
        return self.fuse(frame, pyramid, *self.pts_middle_encoder(points))

    def fuse(self, frame: Frame, pyramid: Sequence[Tensor], x_lidar: Tensor, stages: Sequence[SparseTensor]) -> Tensor:
        """The map, from what the image branch and the LiDAR branch give."""
        maps = self.paint_maps(pyramid, frame.depth)
        image = [
            self.image_voxels(frame, features, 2**number, stages[number].shape)
            for number, features in enumerate((maps[0], *maps))
        ]
        embeddings = [torch.from_numpy(row).to(x_lidar.device) for row in frame.embeddings]
        x_multimodal = self.multimodal_middle_encoder(stages[:4], image, embeddings, self.pairing)
        bev: Tensor = self.pts_neck(self.pts_backbone(self.bev_fusion(torch.cat([x_lidar, x_multimodal], 1))))
        return bev

    def paint_maps(self, pyramid: Sequence[Tensor], depth: np.ndarray) -> list[Tensor]:
        """Image features with the sparse depth (6, 448, 800) mixed in: (6, 49, h, w) at strides 4, 8 and 16."""
        canvas = torch.from_numpy(depth).to(pyramid[0].device)[:, None]
        return [
            block(torch.cat([level, F.interpolate(canvas, size=level.shape[2:], mode="bilinear")], 1))
            for block, level in zip(self.conv1x1_blocks, pyramid, strict=False)
        ]

    def image_voxels(self, frame: Frame, features: Tensor, downscale: int, shape: Triple) -> SparseTensor:
        """Paint the points with image features, weighted by a score, and sort them into voxels.

        Args:
            features: (6, 49, h, w).
            downscale: voxels are so many times larger than the finest.
            shape: of the LiDAR's grid at this scale.

        Returns:
            64 channels: x, y, z scaled, ten classes, mask score, seconds back, 49 of the image.
        """
        device = features.device
        if not len(frame.pixels):
            rows = np.zeros((_EMPTY_ROWS, IMAGE_CHANNELS), np.float32)  # as the official code: one voxel amid the grid
        else:
            pixels, camera = torch.from_numpy(frame.pixels).to(device), torch.from_numpy(frame.camera).to(device)
            u, v = (pixels[:, :2] * (features.shape[3] / frame.depth.shape[2])).long().unbind(1)
            seen = features[camera, :, v, u]
            projection = torch.from_numpy(frame.lidar_to_image).to(device).flatten(1)[camera]
            score = self.score_net(torch.cat([seen, pixels[:, 2:], projection], 1))
            rows = np.concatenate([frame.painted, (seen * score).float().cpu().numpy()], 1)
        voxels = voxel_tensor(rows, [side * downscale for side in VOXEL], shape, device)
        voxels.features[:, :3] /= voxels.features.new_tensor(_XYZ_SCALE)
        return voxels


def voxel_tensor(rows: np.ndarray, voxel: Sequence[float], shape: Triple, device: torch.device) -> SparseTensor:
    """Mean of the rows (n, c) float32 in each voxel, by MSMDFusion's limits and its rule of overflow."""
    found = voxelize(rows, voxel, POINT_RANGE, MAX_POINTS, MAX_VOXELS, "stop")
    coords = torch.from_numpy(np.pad(found.coords.astype(np.int64), ((0, 0), (1, 0))))
    return SparseTensor(torch.from_numpy(found.mean).to(device), coords.to(device), shape)


def normalised(images: np.ndarray, device: torch.device) -> Tensor:
    """(6, 448, 796, 3) uint8 RGB -> (6, 3, 448, 800) float32, zeros at the right."""
    pixels = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float()
    mean, std = pixels.new_tensor(_MEAN), pixels.new_tensor(_STD)
    return F.pad((pixels - mean[:, None, None]) / std[:, None, None], (0, PADDED[0] - RESIZED[0]))


class ImagePyramid(nn.Module):
    """mmdetection's FPN over c2 to c5."""

    def __init__(self) -> None:
        super().__init__()
        channels = [CHANNELS[level] for level in ("c2", "c3", "c4", "c5")]
        self.lateral_convs = nn.ModuleList(_Conv(inputs, 256, 1) for inputs in channels)
        self.fpn_convs = nn.ModuleList(_Conv(256, 256, 3) for _ in channels)

    def forward(self, levels: dict[str, Tensor]) -> list[Tensor]:
        """`c2` to `c5` -> five maps (image, 256, h, w) at strides 4 to 64."""
        inner = [lateral(levels[f"c{n}"]) for n, lateral in enumerate(self.lateral_convs, 2)]
        for fine, coarse in reversed(list(pairwise(range(len(inner))))):
            inner[fine] = inner[fine] + F.interpolate(inner[coarse], size=inner[fine].shape[2:], mode="nearest")
        pyramid = [conv(x) for conv, x in zip(self.fpn_convs, inner, strict=True)]
        return [*pyramid, pyramid[-1][:, :, ::2, ::2]]


class MapFusion(nn.Module):
    """Four views of the two maps side by side, of growing reach, and a mixture of them."""

    def __init__(self, inputs: int = 640, outputs: int = 256) -> None:
        super().__init__()
        self.conv1x1 = _conv(inputs, outputs, 1)
        self.conv3x3 = _conv(inputs, outputs, 3)
        self.dilated_conv3x3_rate6 = _conv(inputs, outputs, 3, 6)
        self.dilated_conv3x3_rate12 = _conv(inputs, outputs, 3, 12)
        self.fuse = _conv(4 * outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(1, 640, H, W) -> (1, 256, H, W)."""
        views = (self.conv1x1, self.conv3x3, self.dilated_conv3x3_rate6, self.dilated_conv3x3_rate12)
        mixture: Tensor = self.fuse(torch.cat([view(x) for view in views], 1))
        return mixture


class _Conv(nn.Module):
    """A convolution under the key `conv`."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


def _conv(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    padding = kernel // 2 * dilation
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs, eps=_EPS),
        nn.ReLU(inplace=True),
    )

"""SECOND's 2-D backbone and its feature pyramid (Yan et al. 2018): from a LiDAR encoder's map to the map of a detector.

Attribute names give the official keys (`pts_backbone.*`, `pts_neck.*`). Maps are (B, C, H, W), H = y, W = x.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_EPS = 1e-3  # of every BatchNorm here


class SECOND(nn.Module):
    """Blocks of 3x3 convolutions, BatchNorm and ReLU, each block on the map before it.

    Attributes:
        blocks: the first convolution of block i has stride `strides[i]` and is followed by `layers` more.
    """

    def __init__(
        self,
        in_channels: int = 256,
        channels: Sequence[int] = (128, 256),
        strides: Sequence[int] = (1, 2),
        layers: int = 5,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*_conv3x3(cin, cout, stride), *(part for _ in range(layers) for part in _conv3x3(cout, cout)))
            for (cin, cout), stride in zip(pairwise((in_channels, *channels)), strides, strict=True)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, in_channels, H, W) -> the map after each block: (B, 128, H, W), (B, 256, H/2, W/2) by default."""
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return maps


class SECONDFPN(nn.Module):
    """Bring each map to the first one's size and `out_channels`, and put them side by side.

    Attributes:
        deblocks: a 1x1 convolution where the size stays, else a transposed one of kernel = stride; BatchNorm; ReLU.
    """

    def __init__(
        self, channels: Sequence[int] = (128, 256), strides: Sequence[int] = (1, 2), out_channels: int = 256
    ) -> None:
        super().__init__()
        self.deblocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(cin, out_channels, 1, bias=False)
                if stride == 1
                else nn.ConvTranspose2d(cin, out_channels, stride, stride, bias=False),
                nn.BatchNorm2d(out_channels, eps=_EPS, momentum=0.01),
                nn.ReLU(inplace=True),
            )
            for cin, stride in zip(channels, strides, strict=True)
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps of SECOND -> (B, 512, H, W) by default."""
        return torch.cat([deblock(x) for deblock, x in zip(self.deblocks, maps, strict=True)], 1)


def _conv3x3(cin: int, cout: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False),
        nn.BatchNorm2d(cout, eps=_EPS, momentum=0.01),
        nn.ReLU(inplace=True),
    )

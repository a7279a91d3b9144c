"""SparseEncoder of SECOND (Yan et al. 2018) as CenterPoint and MSMDFusion use it: voxels to a bird's-eye map.

Attributes are named as mmdetection3d's, so that state_dict keys are the official ones.
"""

from __future__ import annotations

from torch import Tensor, nn

from extractors.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d, Triple

EPSILON = 1e-3  # of every BatchNorm behind a sparse convolution
Stages = tuple[SparseTensor, SparseTensor, SparseTensor, SparseTensor, SparseTensor]


class ConvNormReLU(nn.Sequential):
    """A sparse convolution, BatchNorm over its sites, ReLU."""

    def __init__(self, conv: SubMConv3d | SparseConv3d) -> None:
        super().__init__(conv, nn.BatchNorm1d(conv.weight.shape[0], eps=EPSILON), nn.ReLU())

    def forward(self, x: SparseTensor) -> SparseTensor:
        conv, norm, _ = self
        y = conv(x)
        return y.replace(norm(y.features).relu_())


class BasicBlock(nn.Module):
    """Two 3x3x3 submanifold convolutions with a shortcut (`SparseBasicBlock`)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = SubMConv3d(channels, channels)
        self.bn1 = nn.BatchNorm1d(channels, eps=EPSILON)
        self.conv2 = SubMConv3d(channels, channels)
        self.bn2 = nn.BatchNorm1d(channels, eps=EPSILON)

    def forward(self, x: SparseTensor) -> SparseTensor:
        y = self.conv1(x)
        y = self.conv2(y.replace(self.bn1(y.features).relu_()))
        return y.replace((self.bn2(y.features) + x.features).relu_())


class SparseEncoder(nn.Module):
    """Voxels to a map, eight times coarser in y and x.

    Args:
        in_channels: columns of a voxel's mean: 5 for x, y, z, intensity, time lag.
        shape: voxels along z, y, x; z is one more than the voxeliser's (41 for 40).
    """

    def __init__(self, in_channels: int = 5, shape: Triple = (41, 1440, 1440)) -> None:
        super().__init__()
        self.shape = shape
        self.conv_input = ConvNormReLU(SubMConv3d(in_channels, 16))
        layers = {}
        paddings: tuple[Triple, ...] = ((1, 1, 1), (1, 1, 1), (0, 1, 1))
        for number, (channels, padding) in enumerate(zip((16, 32, 64), paddings, strict=True), 1):
            down = ConvNormReLU(SparseConv3d(channels, 2 * channels, 3, 2, padding))
            layers[f"encoder_layer{number}"] = nn.Sequential(BasicBlock(channels), BasicBlock(channels), down)
        layers["encoder_layer4"] = nn.Sequential(BasicBlock(128), BasicBlock(128))
        self.encoder_layers = nn.ModuleDict(layers)
        self.conv_out = ConvNormReLU(SparseConv3d(128, 128, (3, 1, 1), (2, 1, 1), 0))

    def forward(self, x: SparseTensor) -> tuple[Tensor, Stages]:
        """Encode a batch.

        Args:
            x: voxel means on a grid of `shape`.

        Returns:
            (batch, 256, y, x) map, its channel being c * 2 + z; and the outputs of conv_input and of layers 1 to 4.
        """
        if x.shape != self.shape:
            raise ValueError(f"voxels on a grid of {x.shape}, this encoder takes {self.shape}")
        stages = [self.conv_input(x)]
        for layer in self.encoder_layers.values():
            stages.append(layer(stages[-1]))
        first, second, third, fourth, fifth = stages
        return self.conv_out(fifth).dense().flatten(1, 2), (first, second, third, fourth, fifth)

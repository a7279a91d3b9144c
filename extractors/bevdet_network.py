"""BEVDet's network (Huang et al. 2021) with a ResNet-50, in the naming of its official checkpoints.

Two generations: the first tree's has `img_view_transformer.depthnet` and 512 channels behind the image pyramid, the
second's `img_view_transformer.depth_net` and 256. Maps are (B, C, H, W), H = y, W = x.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.batchnorm import fold
from extractors.checkpoint import seeded_init
from extractors.errors import WeightsError
from extractors.resnet import ResNet
from extractors.view_transform import DEPTHS, Ground, frustum, splat

Name = Literal["bd1", "bd2"]

HEIGHT, WIDTH = 256, 704
"""Pixels of an image that the network sees."""
CONTEXT = 64
NECK: dict[Name, int] = {"bd1": 512, "bd2": 256}
DEPTH: dict[Name, str] = {"bd1": "depthnet", "bd2": "depth_net"}
EXPECTED: dict[Name, str] = {
    "bd1": "depthnet.weight (123, 512, 1, 1), six tasks",
    "bd2": "depth_net.weight (123, 256, 1, 1), one task of ten classes",
}

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # RGB, of 0..1


class ImageNeck(nn.Module):
    """C5, enlarged, added to C4; one 3x3 convolution. No normalisation, no activation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lateral_convs = nn.ModuleList(_named_conv(nn.Conv2d(n, channels, 1)) for n in (1024, 2048))
        self.fpn_convs = nn.ModuleList([_named_conv(nn.Conv2d(channels, channels, 3, padding=1))])

    def forward(self, c4: Tensor, c5: Tensor) -> Tensor:
        """(image, 1024, h, w), (image, 2048, h / 2, w / 2) -> (image, channels, h, w)."""
        fine, coarse = self.lateral_convs[0](c4), self.lateral_convs[1](c5)
        return cast("Tensor", self.fpn_convs[0](fine + F.interpolate(coarse, size=fine.shape[2:], mode="nearest")))


class ViewTransformer(nn.Module):
    """The layer before the lift: per image cell, logits of its depth and what it is.

    First-generation checkpoints also hold the constants `dx`, `bx`, `nx` and `frustum`; they are read to be checked.
    """

    def __init__(self, generation: Name, ground: Ground) -> None:
        super().__init__()
        self.constants = {**ground.constants(), "frustum": frustum(HEIGHT, WIDTH)} if generation == "bd1" else {}
        for name, value in self.constants.items():
            self.register_buffer(name, value.clone())
        self.add_module(DEPTH[generation], nn.Conv2d(NECK[generation], DEPTHS + CONTEXT, 1))
        self._layer = DEPTH[generation]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(image, C, h, w) -> depth (image, 59, h, w), which sums to 1 over dim 1; context (image, 64, h, w)."""
        x = self.get_submodule(self._layer)(x)
        return x[:, :DEPTHS].softmax(1), x[:, DEPTHS:]

    def reset(self) -> None:
        """Give the constants their values."""
        for name, value in self.constants.items():
            self.get_buffer(name).copy_(value)

    def check(self, where: str) -> None:
        """Compare the constants that were loaded with bevdet-r50's.

        Raises:
            WeightsError: the checkpoint was trained for another grid or image size.
        """
        for name, expected in self.constants.items():
            found = self.get_buffer(name).double()
            if not torch.allclose(found, expected.double(), atol=1e-4):
                shown = f"{found.tolist()}, expected {expected.tolist()}" if found.numel() < 4 else "another one"
                raise WeightsError(
                    f"{where}: img_view_transformer.{name} is {shown}: trained for another grid or image size than "
                    f"bevdet-r50's"
                )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; where the size changes, the shortcut is a plain 3x3 convolution with bias."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 3, stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class GroundBackbone(nn.Module):
    """Three stages of two blocks on the lifted map, each at half the size of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(BasicBlock(cin, cout, 2), BasicBlock(cout, cout, 1))
            for cin, cout in ((CONTEXT, 128), (128, 256), (256, 512))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, 64, 128, 128) -> (B, 128, 64, 64), (B, 256, 32, 32), (B, 512, 16, 16)."""
        maps = []
        for layer in self.layers:
            x = layer(x)
            maps.append(x)
        return maps


class GroundNeck(nn.Module):
    """The last stage, enlarged, beside the first; `up2` doubles the size again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *(nn.Conv2d(128 + 512, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU(inplace=True)),
            *(nn.Conv2d(512, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU(inplace=True)),
        )
        self.up2 = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            *(nn.Conv2d(512, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU(inplace=True)),
            nn.Conv2d(256, 256, 1),
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps of `GroundBackbone` -> (B, 512, 64, 64); `up2` makes (B, 256, 128, 128) of it."""
        large = F.interpolate(maps[2], size=maps[0].shape[2:], mode="bilinear", align_corners=True)
        return cast("Tensor", self.conv(torch.cat([maps[0], large], 1)))


class BEVDetNetwork(nn.Module):
    """From six images to the map that the head and the crop read.

    Args:
        generation: whose layers.
        head: behind the last map, official keys `pts_bbox_head.*`.
        ground: cells that the images are lifted into.
    """

    def __init__(self, generation: Name, head: nn.Module, ground: Ground) -> None:
        super().__init__()
        self.ground = ground
        self.img_backbone = ResNet(norm=nn.BatchNorm2d)
        self.img_neck = ImageNeck(NECK[generation])
        self.img_view_transformer = ViewTransformer(generation, ground)
        self.img_bev_encoder_backbone = GroundBackbone()
        self.img_bev_encoder_neck = GroundNeck()
        self.pts_bbox_head = head

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What each cell of some images is, and at which depth.

        Args:
            pixels: (image, 256, 704, 3) uint8 RGB.

        Returns:
            depth (image, 59, 16, 44), which sums to 1 over dim 1; context (image, 64, 16, 44).
        """
        weight = self.img_backbone.conv1.weight
        mean, std = weight.new_tensor(_MEAN), weight.new_tensor(_STD)
        x = ((pixels.to(weight.dtype) / 255 - mean) / std).movedim(3, 1)  # as it lies, that is channels_last
        levels = self.img_backbone(x)
        found: tuple[Tensor, Tensor] = self.img_view_transformer(self.img_neck(levels["c4"], levels["c5"]))
        return found

    def lift(self, pixels: Tensor, cells: Tensor) -> Tensor:
        """Images on the ground.

        On the CPU images go through one by one: their maps stay in its caches, and company changes no value.

        Args:
            pixels: (B, camera, 256, 704, 3) uint8 RGB.
            cells: (B, camera, 59, 16, 44) of `view_transform.ground_cells`.

        Returns:
            (B, 64, 128, 128).
        """
        images = pixels.flatten(0, 1)
        together = len(images) if images.is_cuda else 1
        parts = [self.see(images[i : i + together]) for i in range(0, len(images), together)]
        depth, context = (torch.cat(part) for part in zip(*parts, strict=True))
        views = pixels.shape[:2]
        return splat(depth.view(*views, *depth.shape[1:]), context.view(*views, *context.shape[1:]), cells, self.ground)

    def encode(self, lifted: Tensor) -> Tensor:
        """(B, 64, 128, 128) -> (B, 512, 64, 64), the map before `up2`."""
        return cast("Tensor", self.img_bev_encoder_neck(self.img_bev_encoder_backbone(lifted)))

    def up2(self, before: Tensor) -> Tensor:
        """(B, 512, 64, 64) -> (B, 256, 128, 128), the map that the head reads."""
        return cast("Tensor", self.img_bev_encoder_neck.up2(before))

    def ready(self, device: str) -> BEVDetNetwork:
        """Set up for inference on a device: no state_dict goes in or out any more."""
        self.eval().requires_grad_(False)
        fold(self)
        return self.to(memory_format=torch.channels_last).to(device)


def generation_of(state: Mapping[str, Tensor], where: str) -> Name:
    """Which generation a checkpoint is of, by its depth layer and its head.

    Raises:
        WeightsError: it is neither, or parts of both; the text says what was found.
    """
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    prefix = "img_view_transformer."
    depth = {key.removeprefix(prefix): shapes[key] for key in shapes if key.startswith(prefix + "depth")}
    tasks = len({key.split(".")[2] for key in shapes if key.startswith("pts_bbox_head.task_heads.")})
    names: tuple[Name, ...] = ("bd1", "bd2")
    for name in names:
        if depth.get(f"{DEPTH[name]}.weight") == (DEPTHS + CONTEXT, NECK[name], 1, 1):
            if tasks == (6 if name == "bd1" else 1):
                return name
            raise WeightsError(
                f"{where}: has the depth layer of generation {name} and a head of {tasks} tasks; expected "
                f"{' or '.join(EXPECTED.values())}"
            )
    if not depth:
        few = sorted({key.partition(".")[0] for key in shapes})[:8]
        raise WeightsError(f"{where}: is no BEVDet, no key starts with {prefix}depth; its parts are {', '.join(few)}")
    shown = ", ".join(f"{key} {shape}" for key, shape in sorted(depth.items())[:4])
    raise WeightsError(
        f"{where}: a BEVDet variant that is not read: {prefix}{shown}; expected {' or '.join(EXPECTED.values())} "
        f"(bevdet-r50; the depth-supervised, temporal and CBGS variants have other depth layers)"
    )


def untrained(network: BEVDetNetwork, seed: int) -> None:
    """Fill a network for `untrained:SEED`, so that its maps, scores and boxes have a usual size.

    The last scale of a residual block is small: sums over sixteen blocks would saturate the depths. The head's last
    layers are small too, and its heat maps start at a tenth, as in training.
    """
    seeded_init(network, seed)
    network.img_view_transformer.reset()
    for name, parameter in network.named_parameters():
        if name.startswith(("img_backbone.layer", "img_bev_encoder_backbone.")):
            if name.endswith("bn3.weight" if "img_backbone" in name else "bn2.weight"):
                nn.init.constant_(parameter, 0.2)
        elif ".task_heads." in name and name.endswith(".1.weight"):
            with torch.no_grad():
                parameter.mul_(0.05)
        elif name.endswith(".heatmap.1.bias"):
            nn.init.constant_(parameter, -2.19)


def _named_conv(conv: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(OrderedDict(conv=conv))

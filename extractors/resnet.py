"""ResNet (He et al. 2016) with a feature pyramid (Lin et al. 2017); reads torchvision's, detectron2's and Caffe2's.

Parameters have torchvision's names (`body.layer1.0.conv1.weight`, `fpn.inner_blocks.0.0.weight`); `to_torchvision`
renames what detectron2 and Detectron wrote. Normalisation is frozen: it always uses the stored statistics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.errors import WeightsError

CHANNELS = {"c2": 256, "c3": 512, "c4": 1024, "c5": 2048, "p2": 256, "p3": 256, "p4": 256, "p5": 256}
"""Channels of each level; the stride of level n is 2 ** n pixels."""

Norm = Callable[[int], nn.Module]


class FrozenBatchNorm(nn.Module):
    """Batch normalisation by stored statistics, channel by channel."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return torch.addcmul((self.bias - self.running_mean * scale)[:, None, None], x, scale[:, None, None])


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, stride_in_1x1: bool, norm: Norm) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_in_1x1 else (1, stride)
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, first, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, second, 1, bias=False), norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), norm(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 up to its last stage.

    Args:
        stride_in_1x1: the first convolution of a stage takes the stride (He's own Caffe weights, detectron2's "MSRA"),
            not its 3x3 (torchvision).
        eps: added to each stored variance.
        blocks: bottlenecks in each stage.
        norm: channels -> the normalisation, `FrozenBatchNorm` by default; `nn.BatchNorm2d` for checkpoints of detectors
            that keep its counters.
    """

    def __init__(
        self,
        stride_in_1x1: bool = False,
        eps: float = 1e-5,
        blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        norm = norm or partial(FrozenBatchNorm, eps=eps)
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64)
        inputs = 64
        for stage, count in enumerate(blocks):
            layer = []
            for block in range(count):
                stride = 2 if stage and not block else 1
                layer.append(Bottleneck(inputs, 64 << stage, stride, stride_in_1x1, norm))
                inputs = 256 << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layer))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(image, 3, height, width) -> `c2` to `c5`, (image, channels, height / stride, width / stride)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        levels = {}
        for stage in range(1, 5):
            x = levels[f"c{stage + 1}"] = getattr(self, f"layer{stage}")(x)
        return levels


class FeaturePyramid(nn.Module):
    """Top-down pyramid over `c2` to `c5`: nearest-neighbour upsampling and sums, 256 channels."""

    def __init__(self) -> None:
        super().__init__()
        inputs = [CHANNELS[f"c{n}"] for n in (2, 3, 4, 5)]
        self.inner_blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(n, 256, 1)) for n in inputs)
        self.layer_blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(256, 256, 3, padding=1)) for _ in inputs)

    def forward(self, levels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`c2` to `c5` -> `p2` to `p5`, (image, 256, height / stride, width / stride)."""
        pyramid: dict[str, Tensor] = {}
        above: Tensor | None = None
        for n in (5, 4, 3, 2):
            inner = self.inner_blocks[n - 2](levels[f"c{n}"])
            if above is not None:
                inner = inner + F.interpolate(above, size=inner.shape[-2:], mode="nearest")
            above = inner
            pyramid[f"p{n}"] = self.layer_blocks[n - 2](inner)
        return pyramid


class ResNetFPN(nn.Module):
    """ResNet-50, with a pyramid where one is asked for."""

    def __init__(self, pyramid: bool, stride_in_1x1: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.body = ResNet(stride_in_1x1, eps)
        self.fpn = FeaturePyramid() if pyramid else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(image, 3, height, width), normalised -> levels by name, see `CHANNELS`."""
        levels = self.body(x)
        return levels if self.fpn is None else levels | self.fpn(levels)


# Parts of a detector or classifier behind the backbone, which are not read.
_HEADS = re.compile(r"(rpn|roi_heads|proposal_generator|fc|pixel_mean|pixel_std|transformer)(\.|$)")
_NORM = r"(weight|bias|running_mean|running_var)"
_DETECTRON2 = [  # (detectron2's name, torchvision's)
    (re.compile(r"stem\.conv1\.weight"), r"body.conv1.weight"),
    (re.compile(rf"stem\.conv1\.norm\.{_NORM}"), r"body.bn1.\1"),
    (re.compile(r"res(\d)\.(\d+)\.conv(\d)\.weight"), r"body.layer<\1>.\2.conv\3.weight"),
    (re.compile(rf"res(\d)\.(\d+)\.conv(\d)\.norm\.{_NORM}"), r"body.layer<\1>.\2.bn\3.\4"),
    (re.compile(r"res(\d)\.(\d+)\.shortcut\.weight"), r"body.layer<\1>.\2.downsample.0.weight"),
    (re.compile(rf"res(\d)\.(\d+)\.shortcut\.norm\.{_NORM}"), r"body.layer<\1>.\2.downsample.1.\3"),
    (re.compile(r"fpn_lateral(\d)\.(weight|bias)"), r"fpn.inner_blocks.<<\1>>.0.\2"),
    (re.compile(r"fpn_output(\d)\.(weight|bias)"), r"fpn.layer_blocks.<<\1>>.0.\2"),
]
# Detectron's blobs, for Caffe2 (R-50.pkl), with detectron2's names; a trainer's momenta and other parts are not read.
_CAFFE2 = [
    (re.compile(r"conv1_w"), r"stem.conv1.weight"),
    (re.compile(r"res_conv1_bn_(s|b)"), r"stem.conv1.norm.<\1>"),
    (re.compile(r"(res\d)_(\d+)_branch(1|2a|2b|2c)_w"), r"\1.\2.<\3>.weight"),
    (re.compile(r"(res\d)_(\d+)_branch(1|2a|2b|2c)_bn_(s|b)"), r"\1.\2.<\3>.norm.<\4>"),
    (re.compile(r"fpn_inner_res(\d)_\d+_sum(?:_lateral)?_(w|b)"), r"fpn_lateral\1.<\2>"),
    (re.compile(r"fpn_res(\d)_\d+_sum_(w|b)"), r"fpn_output\1.<\2>"),
]
_CAFFE2_WORDS = {
    "s": "weight",
    "w": "weight",
    "b": "bias",
    "1": "shortcut",
    "2a": "conv1",
    "2b": "conv2",
    "2c": "conv3",
}
_CAFFE2_HEADS = re.compile(
    r"conv1_b$|(conv_rpn|rpn|fc\d+|cls_score|bbox_pred|mask|_\[mask\]|kps|conv_fcn|retnet|pred|lr$|weight_order$)"
)
_CAFFE2_EPS = 1e-5  # detectron2's: these files have scale and shift alone, which variances of 1 - eps leave as they are


def to_torchvision(state: Mapping[str, Tensor], pyramid: bool, where: str) -> dict[str, Tensor]:
    """Give a checkpoint's backbone the names of `ResNetFPN`; its heads are left out.

    Read are torchvision's classifiers (`layer1.0.conv1.weight`) and detectors (`backbone.body.layer1...`,
    `backbone.fpn.inner_blocks.0.0.weight`, or without the second 0), and detectron2's backbones
    (`backbone.bottom_up.res2.0.conv1.weight`, `backbone.fpn_lateral2.weight`; `backbone.res2...` without a pyramid),
    and Detectron's Caffe2 blobs (`res2_0_branch2a_w`, `fpn_inner_res2_2_sum_lateral_w`).

    Args:
        state: key -> tensor.
        pyramid: keep the pyramid's parameters (else they are left out).
        where: the file, for the error text.

    Raises:
        WeightsError: the naming is none of these.
    """
    if "conv1_w" in state:
        state = _from_caffe2(state)
    bare = {re.sub(r"^(backbone\.)?(bottom_up\.)?", "", key): value for key, value in state.items()}
    # A count of training steps says nothing to frozen normalisation.
    bare = {k: value for k, value in bare.items() if not (_HEADS.match(k) or k.endswith("num_batches_tracked"))}
    if any(key.startswith("stem.conv1.") for key in bare):
        named = {_from_detectron2(key): value for key, value in bare.items()}
    elif "conv1.weight" in bare:
        named = {f"body.{key}": value for key, value in bare.items()}
    elif "body.conv1.weight" in bare:
        named = {re.sub(r"^(fpn\.\w+_blocks\.\d)\.(weight|bias)$", r"\1.0.\2", key): v for key, v in bare.items()}
    else:
        raise WeightsError(
            f"{where}: no ResNet in torchvision's, detectron2's or Caffe2's naming; expected a key that ends in "
            f"'conv1.weight' or 'stem.conv1.weight', or 'conv1_w', the first keys are {sorted(state)[:5]}"
        )
    return {key: value for key, value in named.items() if pyramid or not key.startswith("fpn.")}


def _from_caffe2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """detectron2's names, and statistics that the blobs do not have; unknown keys unchanged."""
    named: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.endswith("_momentum") or _CAFFE2_HEADS.match(key):
            continue
        found = next(((m, name) for pattern, name in _CAFFE2 if (m := pattern.fullmatch(key))), None)
        name = re.sub(r"<(\w+)>", lambda m: _CAFFE2_WORDS[m[1]], found[0].expand(found[1])) if found else key
        named[name] = value
        if name.endswith("norm.weight"):
            named[name.replace("weight", "running_mean")] = torch.zeros_like(value)
            named[name.replace("weight", "running_var")] = torch.full_like(value, 1 - _CAFFE2_EPS)
    return named


def _from_detectron2(key: str) -> str:
    for pattern, name in _DETECTRON2:
        if match := pattern.fullmatch(key):
            name = match.expand(name)
            name = re.sub(r"<<(\d)>>", lambda m: str(int(m[1]) - 2), name)
            return re.sub(r"<(\d)>", lambda m: str(int(m[1]) - 1), name)
    return key

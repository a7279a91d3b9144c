"""The networks behind `image_grid`: images in, grids of features out."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.checkpoint import seeded_init
from extractors.resnet import Bottleneck, ResNet


class Pooled(nn.Module):
    """Levels of a ResNet and its pyramid, averaged onto a grid.

    Args:
        network: images -> {level: (image, channel, height, width)}.
        levels: which to give.
        grid: cells along each side.
    """

    def __init__(self, network: nn.Module, levels: tuple[str, ...], grid: int) -> None:
        super().__init__()
        self.network, self.levels, self.grid = network, levels, grid

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(image, 3, height, width) -> {level: (image, grid, grid, channel)}."""
        levels = self.network(images)
        return {n: F.adaptive_avg_pool2d(levels[n], self.grid).permute(0, 2, 3, 1) for n in self.levels}


class ClipBertCnn(nn.Module):
    """The CNN of ClipBERT: ResNet-50 with the stride in the 1x1 convolutions, then a grid encoder (ClipBERT code)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = ResNet(stride_in_1x1=True)
        self.grid_encoder = nn.Sequential(nn.Conv2d(2048, 768, 3, padding=1, bias=False), nn.MaxPool2d(2, 2), nn.ReLU())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(image, 3, 448, 448) BGR minus mean -> grid (image, 7, 7, 768), res5 (image, 14, 14, 2048)."""
        res5 = self.body(images)["c5"]
        return {"grid": self.grid_encoder(res5).permute(0, 2, 3, 1), "res5": res5.permute(0, 2, 3, 1)}


class Tokens(nn.Module):
    """The last feature map of a timm model as tokens, row by row, without class tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(image, 3, size, size) -> grid (image, token, channel)."""
        features = self.model.forward_features(images)
        if features.ndim == 3:
            return {"grid": features[:, getattr(self.model, "num_prefix_tokens", 0) :]}
        if features.shape[1] == self.model.num_features:  # channels first, else last (Swin)
            features = features.permute(0, 2, 3, 1)
        return {"grid": features.flatten(1, 2)}


def timm_model(model: str, size: int) -> Any:
    """A timm model without its classifier, for images of one size; nothing is downloaded.

    Raises:
        ValueError: timm does not know the model.
    """
    import timm

    if not timm.is_model(model):
        raise ValueError(f"timm_grid: timm has no model '{model}'; timm.list_models() names them")
    fixed = timm.get_pretrained_cfg(model)
    sized: dict[str, Any] = {"img_size": size} if fixed is not None and fixed.fixed_input_size else {}  # ViT, Swin ...
    return timm.create_model(model, pretrained=False, num_classes=0, **sized)


@functools.cache
def timm_dims(model: str, size: int) -> tuple[int, ...]:
    """(token, channel) of a timm model's grid, found without computing it."""
    with torch.device("meta"):
        network = Tokens(timm_model(model, size)).eval()
        return tuple(network(torch.empty(1, 3, size, size))["grid"].shape[1:])


def untrained_resnet(network: nn.Module, seed: int) -> None:
    """`seeded_init`, with each bottleneck's last scale small: 16 of them in a row would leave float16's range."""
    seeded_init(network, seed)
    for module in network.modules():
        if isinstance(module, Bottleneck):
            module.bn3.get_buffer("weight").fill_(0.25)


def to_timm(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Give an image encoder's parameters timm's names.

    Read are timm's own, the original PVTv2's (`block1.0.attn.q.weight`), and these within SQA3D's MCAN
    (`encoder.encoder.block1...`, next to its unused `proj` and `proj2` and the parts that answer questions).

    Args:
        state: key -> tensor.
        model: whose classifier, as timm names it, is left out.
    """
    inner = {key.removeprefix("encoder.encoder."): v for key, v in state.items() if key.startswith("encoder.encoder.")}
    named = dict(inner or state)
    if "patch_embed1.proj.weight" in named:
        named = {_from_pvt(key): v for key, v in named.items() if not re.match(r"(proj2?|head)\.", key)}
    classifier = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else classifier
    return {key: v for key, v in named.items() if not key.startswith(tuple(f"{name}." for name in names))}


def _from_pvt(key: str) -> str:
    """The original PVTv2's name of a parameter -> timm's: stages count from 0, the first patch embedding is apart."""
    key = key.replace("mlp.dwconv.dwconv.", "mlp.dwconv.")
    key = re.sub(r"^patch_embed1\.", "patch_embed.", key)
    key = re.sub(r"^patch_embed([2-9])\.", lambda m: f"stages.{int(m[1]) - 1}.downsample.", key)
    key = re.sub(r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.", key)
    return re.sub(r"^norm(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.norm.", key)

"""Batch normalisation folded into the convolution before it: the same function with one pass less over the maps."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def fold(module: nn.Module) -> int:
    """Fold every BatchNorm2d of a network that is in evaluation mode, in place; it takes no state_dict afterwards.

    Pairs are `convN` and `bnN` (or `conv` and `bn`) of one module, and neighbours in a Sequential.

    Returns:
        How many were folded.
    """
    folded = 0
    for owner in list(module.modules()):
        children = dict(owner.named_children())
        if isinstance(owner, nn.Sequential):
            pairs = list(pairwise(children))
        else:
            pairs = [(name, "bn" + name[4:]) for name in children if name.startswith("conv")]
        for conv_name, norm_name in pairs:
            conv, norm = children.get(conv_name), children.get(norm_name)
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                _fold_into(conv, norm)
                setattr(owner, norm_name, nn.Identity())
                folded += 1
    return folded


@torch.no_grad()
def _fold_into(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    shift = norm.bias.double() - norm.running_mean.double() * scale
    if conv.bias is not None:
        shift += conv.bias.double() * scale
    conv.weight.copy_(conv.weight.double() * scale[:, None, None, None])
    conv.bias = nn.Parameter(shift.to(conv.weight.dtype), requires_grad=False)

"""What `doctor --checkpoint` says of the checkpoints of `image_grid`: ClipBERT's, ResNet-50's and PVTv2-B2's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from extractors.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from extractors.checkpoint import Fit

EXPECTED = "ClipBERT's (cnn.feature.*), ResNet-50's (layer1.*, res2.*, res2_0_*) or PVTv2-B2's (block1.*)"


def inspect(state: Mapping[str, Tensor]) -> Fit | None:
    """Compare a state_dict with what the network of its names needs; None where it is none of the three.

    Keys of other parts of a model (detector, classifier, the head that answers questions) are ignored.
    """
    return _clipbert(state) or _pvt(state) or _resnet(state)


def _clipbert(state: Mapping[str, Tensor]) -> Fit | None:
    import torch

    from extractors.grid_networks import ClipBertCnn
    from extractors.image_grid import clipbert_state

    if not any(key.startswith("cnn.feature.") for key in state):
        return None
    with torch.device("meta"):
        network = ClipBertCnn()
    return _fit("clipbert_grid", "ClipBERT", state, clipbert_state(state, "this"), network)


def _resnet(state: Mapping[str, Tensor]) -> Fit | None:
    import torch

    from extractors.resnet import ResNetFPN, to_torchvision

    try:
        renamed = to_torchvision(state, True, "this")
    except WeightsError:
        return None
    pyramid = any(key.startswith("fpn.") for key in renamed)
    with torch.device("meta"):
        network = ResNetFPN(pyramid)
    caffe2, detectron2 = "conv1_w" in state, any("stem.conv1." in key for key in state)
    naming = "Caffe2" if caffe2 else "detectron2" if detectron2 else "torchvision"
    notes: tuple[str, ...] = () if pyramid else ("no pyramid in this file: of resnet_fpn's levels it has c2 to c5",)
    if naming != "torchvision":
        notes += ("set pixels=caffe, and stride_in_1x1=true where it was trained from He's own weights (MSRA)",)
    return _fit("resnet_fpn", naming, state, renamed, network, notes)


def _pvt(state: Mapping[str, Tensor]) -> Fit | None:
    import importlib.util

    import torch

    from extractors.grid_networks import timm_model, to_timm

    first = "patch_embed1.proj.weight"
    if not any(key in (first, f"encoder.encoder.{first}") for key in state) or not importlib.util.find_spec("timm"):
        return None
    with torch.device("meta"):
        network = timm_model("pvt_v2_b2", 224)
    naming = "PVTv2" if first in state else "SQA3D's MCAN"
    return _fit("timm_grid", naming, state, to_timm(state, network), network)


def _fit(
    name: str,
    naming: str,
    state: Mapping[str, Tensor],
    renamed: Mapping[str, Tensor],
    network: nn.Module,
    notes: tuple[str, ...] = (),
) -> Fit:
    """Renaming hands the tensors on as they are, so each new name is known by its tensor."""
    from extractors.checkpoint import compare

    own = {id(value): key for key, value in state.items()}
    names = {new: own.get(id(value), "") for new, value in renamed.items()}  # "": made up, as the naming has no place
    expected = {names.get(key, key): tuple(value.shape) for key, value in network.state_dict().items()}
    expected.pop("", None)
    ignored = frozenset(state.keys() - set(names.values()))
    return compare(name, naming, state, expected, ignored, notes)

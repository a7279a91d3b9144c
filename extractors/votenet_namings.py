"""The three namings of VoteNet's parameters: recognise a checkpoint, convert between them, load it.

scanqa (ScanQA, SQA3D)         votenet (facebookresearch)    mmdet3d
detection_backbone.sa1 ...     backbone_net.sa1 ...          backbone.SA_modules.0.mlps.0 ...
voting_net.conv1, .bn1         vgen.conv1, .bn1              bbox_head.vote_module.vote_conv.0.conv, .bn
voting_net.conv3               vgen.conv3                    bbox_head.vote_module.conv_out
proposal_net.proposal.{0,1}    pnet.conv1, .bn1              bbox_head.conv_pred.shared_convs.layer0.conv, .bn
proposal_net.proposal.6        pnet.conv3                    bbox_head.conv_pred.conv_cls and conv_reg

Conversion keeps the function exactly in inference: a bias in front of a BatchNorm moves into its running mean where the
naming has no place for it, and is 0 where the source had none. The output layer's channels are split in mmdet3d:
class = objectness 2 + semantics 18, regression = the 77 between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from extractors.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from extractors.checkpoint import Fit

Naming = Literal["scanqa", "votenet", "mmdet3d"]
EXPECTED = (
    "expected VoteNet's parameters under detection_backbone.* (ScanQA, SQA3D), backbone_net.* "
    "(facebookresearch/votenet) or backbone.SA_modules.* (mmdet3d)"
)

_SIGNS: dict[Naming, str] = {
    "scanqa": "detection_backbone.sa1.",
    "votenet": "backbone_net.sa1.",
    "mmdet3d": "backbone.SA_modules.0.",
}

# Modules of SQA3D's question-answering head, which a whole-model checkpoint holds beside the detector.
_QA_HEAD = (
    *(
        "lang_net",
        "lang_feat_linear",
        "s_feat_linear",
        "q_feat_linear",
        "object_feat_linear",
        "enc_list_s",
        "enc_list_q",
    ),
    *(
        "dec_list",
        "dec_list_2",
        "attflat_visual",
        "attflat_s",
        "attflat_q",
        "attflat_lstm_q",
        "object_cls",
        "answer_cls",
    ),
    *("aux_reg", "lang_cls"),
)

# Rules by pattern, for a key's beginning. facebookresearch's names are the hub: they have a place for everything.
_Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]
_FROM: dict[Naming, _Rules] = {
    "votenet": [],
    "scanqa": [
        (r"detection_backbone\.", "backbone_net."),
        (r"voting_net\.", "vgen."),
        (r"proposal_net\.vote_aggregation\.", "pnet.vote_aggregation."),
        (r"proposal_net\.proposal\.0\.", "pnet.conv1."),
        (r"proposal_net\.proposal\.1\.", "pnet.bn1."),
        (r"proposal_net\.proposal\.3\.", "pnet.conv2."),
        (r"proposal_net\.proposal\.4\.", "pnet.bn2."),
        (r"proposal_net\.proposal\.6\.", "pnet.conv3."),
    ],
    "mmdet3d": [
        (
            r"backbone\.SA_modules\.(\d)\.mlps\.0\.(layer\d\.conv|layer\d\.bn)\.",
            lambda m: f"backbone_net.sa{int(m[1]) + 1}.mlp_module.{_nest(m[2])}.",
        ),
        (
            r"backbone\.FP_modules\.(\d)\.mlps\.(layer\d\.conv|layer\d\.bn)\.",
            lambda m: f"backbone_net.fp{int(m[1]) + 1}.mlp.{_nest(m[2])}.",
        ),
        (r"bbox_head\.vote_module\.vote_conv\.([01])\.(conv|bn)\.", lambda m: f"vgen.{m[2]}{int(m[1]) + 1}."),
        (r"bbox_head\.vote_module\.conv_out\.", "vgen.conv3."),
        (
            r"bbox_head\.vote_aggregation\.mlps\.0\.(layer\d\.conv|layer\d\.bn)\.",
            lambda m: f"pnet.vote_aggregation.mlp_module.{_nest(m[1])}.",
        ),
        (r"bbox_head\.conv_pred\.shared_convs\.layer([01])\.(conv|bn)\.", lambda m: f"pnet.{m[2]}{int(m[1]) + 1}."),
        (r"bbox_head\.conv_pred\.([01])\.(conv|bn)\.", lambda m: f"pnet.{m[2]}{int(m[1]) + 1}."),  # before 0.6
        (r"bbox_head\.conv_pred\.conv_out\.", "pnet.conv3."),  # before 0.6
    ],
}
_TO: dict[Naming, _Rules] = {
    "votenet": [],
    "scanqa": [
        (r"backbone_net\.", "detection_backbone."),
        (r"vgen\.", "voting_net."),
        (r"pnet\.vote_aggregation\.", "proposal_net.vote_aggregation."),
        (r"pnet\.conv1\.", "proposal_net.proposal.0."),
        (r"pnet\.bn1\.", "proposal_net.proposal.1."),
        (r"pnet\.conv2\.", "proposal_net.proposal.3."),
        (r"pnet\.bn2\.", "proposal_net.proposal.4."),
        (r"pnet\.conv3\.", "proposal_net.proposal.6."),
    ],
    "mmdet3d": [
        (
            r"backbone_net\.sa(\d)\.mlp_module\.(layer\d\.conv|layer\d\.bn\.bn)\.",
            lambda m: f"backbone.SA_modules.{int(m[1]) - 1}.mlps.0.{_flat(m[2])}.",
        ),
        (
            r"backbone_net\.fp(\d)\.mlp\.(layer\d\.conv|layer\d\.bn\.bn)\.",
            lambda m: f"backbone.FP_modules.{int(m[1]) - 1}.mlps.{_flat(m[2])}.",
        ),
        (r"vgen\.(conv|bn)([12])\.", lambda m: f"bbox_head.vote_module.vote_conv.{int(m[2]) - 1}.{m[1]}."),
        (r"vgen\.conv3\.", "bbox_head.vote_module.conv_out."),
        (
            r"pnet\.vote_aggregation\.mlp_module\.(layer\d\.conv|layer\d\.bn\.bn)\.",
            lambda m: f"bbox_head.vote_aggregation.mlps.0.{_flat(m[1])}.",
        ),
        (r"pnet\.(conv|bn)([12])\.", lambda m: f"bbox_head.conv_pred.shared_convs.layer{int(m[2]) - 1}.{m[1]}."),
    ],
}


def _nest(layer: str) -> str:
    return f"{layer}.bn" if layer.endswith("bn") else layer


def _flat(layer: str) -> str:
    return layer.removesuffix(".bn") if layer.endswith("bn.bn") else layer


def detect(state: Mapping[str, Tensor]) -> Naming | None:
    """Whose key names these are, None where they are not VoteNet's."""
    return next((naming for naming, sign in _SIGNS.items() if any(key.startswith(sign) for key in state)), None)


def convert(state: Mapping[str, Tensor], to: Naming) -> dict[str, Tensor]:
    """The same detector under another naming.

    Args:
        state: of any of the three namings (mmdet3d's of before 0.6 too), all of the detector; keys that are not the
            detector's are left out.
        to: naming of the result; mmdet3d's is that of 0.6 and later.

    Raises:
        WeightsError: the naming is not recognised, or the detector is not complete.
    """
    naming, fit = detect(state), inspect(state)
    if naming is None or fit is None:
        raise WeightsError(f"no VoteNet: {EXPECTED}")
    _require(fit, "the state_dict", allow_unexpected=True)
    strangers = fit.ignored.union(fit.unexpected)
    return _from_hub(_to_hub({k: v for k, v in state.items() if k not in strangers}, naming), to)


def load(network: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Fill a `VoteNetwork` from a checkpoint of any naming, strictly.

    Keys of SQA3D's question-answering head are known and left out; any other key must match.

    Raises:
        WeightsError: not VoteNet, another number of input features, or keys that don't match (all are listed).
    """
    from extractors.checkpoint import load_strict

    naming, fit = detect(state), inspect(state)
    if naming is None or fit is None:
        raise WeightsError(f"{where}: no VoteNet: {EXPECTED}")
    taken, channels = _channels(_to_hub(state, naming)), _channels(network.state_dict())
    if taken != channels:
        raise WeightsError(
            f"{where}: takes {taken} features per point besides x, y, z; the settings give {channels}. "
            f"Colour is 3, normal 3, height 1: set family, use_color, use_normal and use_height as in training"
        )
    _require(fit, where)
    load_strict(network, _to_hub({k: v for k, v in state.items() if k not in fit.ignored}, naming), where)


def inspect(state: Mapping[str, Tensor]) -> Fit | None:
    """Compare a state_dict with what VoteNet needs; None where it has none of VoteNet's names."""
    import torch

    from extractors.checkpoint import compare
    from extractors.votenet_network import VoteNetwork

    naming = detect(state)
    if naming is None:
        return None
    channels = _channels(_to_hub(state, naming))
    with torch.device("meta"):
        blank = VoteNetwork(channels).state_dict()
    expected = {key: tuple(value.shape) for key, value in _from_hub(blank, naming).items()}
    if any(key.startswith("bbox_head.conv_pred.conv_out.") for key in state):  # mmdet3d before 0.6
        expected = {
            key.replace("conv_pred.shared_convs.layer", "conv_pred."): shape
            for key, shape in expected.items()
            if ".conv_cls." not in key and ".conv_reg." not in key
        }
        expected |= {
            f"bbox_head.conv_pred.conv_out.{n}": tuple(blank[f"pnet.conv3.{n}"].shape) for n in ("weight", "bias")
        }
    ignored = frozenset(k for k in state if naming == "scanqa" and k.partition(".")[0] in _QA_HEAD)
    notes = [f"{len(ignored)} keys belong to the question-answering head and are not needed here"] if ignored else []
    if any(key.startswith("lang_cls.") for key in ignored):
        notes.append("lang_cls.* is what SQA3D's code now calls aux_reg.*: rename it to load the whole model there")
    return compare("votenet", naming, state, expected, ignored, tuple(notes))


def _channels(hub: Mapping[str, Tensor]) -> int:
    """Features per point besides x, y, z, 1 where that can't be told."""
    first = hub.get(f"{_SIGNS['votenet']}mlp_module.layer0.conv.weight")
    return first.shape[1] - 3 if first is not None and first.ndim == 4 else 1


def _require(fit: Fit, where: str, allow_unexpected: bool = False) -> None:
    faults = []
    if fit.missing:
        faults.append(f"missing: {', '.join(fit.missing)}")
    if fit.unexpected and not allow_unexpected:
        faults.append(f"unexpected: {', '.join(fit.unexpected)}")
    if fit.mismatched:
        shapes = [f"{key} is {shape}, expected {expected}" for key, shape, expected in fit.mismatched]
        faults.append(f"other shapes: {', '.join(shapes)}")
    if faults:
        raise WeightsError(f"{where}: VoteNet in {fit.naming}'s naming, but {'; '.join(faults)}")


def _rename(key: str, rules: _Rules) -> str:
    for pattern, replacement in rules:
        renamed, found = re.subn("^" + pattern, replacement, key)
        if found:
            return renamed
    return key


def _to_hub(state: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
    """facebookresearch's naming; as far as it goes where keys are missing, unknown keys unchanged."""
    import torch

    hub = {_rename(key, _FROM[naming]): value for key, value in state.items()}
    if naming == "scanqa":
        for conv in ("pnet.conv1", "pnet.conv2"):
            if (weight := hub.get(f"{conv}.weight")) is not None:
                hub[f"{conv}.bias"] = weight.new_zeros(weight.shape[0])
    if naming == "mmdet3d":
        for name in ("weight", "bias"):
            cls = hub.pop(f"bbox_head.conv_pred.conv_cls.{name}", None)
            reg = hub.pop(f"bbox_head.conv_pred.conv_reg.{name}", None)
            if cls is not None and reg is not None:
                hub[f"pnet.conv3.{name}"] = torch.cat([cls[:2], reg, cls[2:]])
    return hub


def _from_hub(hub: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
    import torch

    state = dict(hub)
    if naming == "scanqa":
        for conv, mean in (("pnet.conv1", "pnet.bn1.running_mean"), ("pnet.conv2", "pnet.bn2.running_mean")):
            state[mean] = state[mean] - state.pop(f"{conv}.bias")
    if naming == "mmdet3d":
        for name in ("weight", "bias"):
            rows = state.pop(f"pnet.conv3.{name}")
            state[f"bbox_head.conv_pred.conv_cls.{name}"] = torch.cat([rows[:2], rows[79:]])
            state[f"bbox_head.conv_pred.conv_reg.{name}"] = rows[2:79].clone()
    return {_rename(key, _TO[naming]): value for key, value in state.items()}

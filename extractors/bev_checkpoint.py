"""Official checkpoints of CenterPoint, BEVDet and MSMDFusion: what a file is, and loading it strictly.

All three come from mmdetection3d or forks of it and share its names: `pts_backbone.*`, `pts_bbox_head.*` ...
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from extractors.bev_detector import Convention
from extractors.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from extractors.checkpoint import Checkpoint, Fit

Model = Literal["centerpoint", "bevdet", "msmdfusion"]

EXPECTED = (
    "CenterPoint's under pts_middle_encoder.* and pts_bbox_head.task_heads.*, BEVDet's under img_view_transformer.*, "
    "MSMDFusion's under multimodal_middle_encoder.* (all as in mmdetection3d)"
)
_FOREIGN = ("backbone_3d.", "backbone.conv_input.", "bbox_head.tasks.")
_FUSION = ("multimodal_middle_encoder.", "bev_fusion.", "conv1x1_blocks.", "score_net.")  # of MSMDFusion alone


def recognise(state: Mapping[str, Tensor]) -> Model | None:
    """Whose checkpoint this is by its names, None where they are not known."""

    def has(*prefixes: str) -> bool:
        return any(key.startswith(prefixes) for key in state)

    if has(*_FUSION, "pts_bbox_head.heatmap_head."):
        return "msmdfusion"
    if has("img_view_transformer."):
        return "bevdet"
    if has("pts_bbox_head.task_heads.") and has("pts_middle_encoder.", "pts_backbone."):
        return "centerpoint"
    return None


def load(network: nn.Module, path: Path, model: Model, convention: Convention | None = None) -> None:
    """Fill a network, or a part of one under its own name (`pts_bbox_head`), from an official checkpoint, strictly.

    Weights of sparse convolutions may be in any layout. Keys of the modules that the network has must all match; where
    it is the whole model, there are no others.

    Args:
        network: its attributes are the model's modules.
        model: whose checkpoint it has to be.
        convention: how the caller takes its boxes; where the file tells otherwise, it is refused.

    Raises:
        WeightsError: another model, a variant that is not supported, another convention, or keys that do not match.
    """
    from extractors.checkpoint import load_strict, read_checkpoint
    from extractors.sparse_conv import to_spconv2_layout

    checkpoint = read_checkpoint(path)
    state = checkpoint.state
    found = recognise(state)
    if found != model:
        what = f"this is {found}'s" if found else _unknown(state)
        raise WeightsError(f"{path}: {what}; expected {model}'s. `scenecache doctor --checkpoint FILE` tells more")
    if faults := _unsupported(state, found):
        raise WeightsError(f"{path}: {faults}")
    told = told_convention(checkpoint)
    if convention and told and told != convention:
        raise WeightsError(
            f"{path}: made by mmdetection3d {checkpoint.meta['mmdet3d_version']}, whose boxes are {told}; "
            f"the settings say {convention}"
        )
    modules = {name for name, _ in network.named_children()}
    if len(modules) == 1:  # a part: the rest of the file is for other stages
        state = {key: value for key, value in state.items() if key.partition(".")[0] in modules}
    try:
        state = to_spconv2_layout(state)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    load_strict(network, state, str(path))


def inspect(checkpoint: Checkpoint) -> Fit | None:
    """Compare a checkpoint with what its model needs; None where it is none of the three."""
    import torch

    from extractors.checkpoint import compare
    from extractors.sparse_conv import to_spconv2_layout, weight_layout

    state = checkpoint.state
    model = recognise(state)
    if model is None:
        return None
    with torch.device("meta"):
        variant, network = _blank(model, state)
        expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    notes = []
    try:
        if layout := weight_layout(state):
            notes.append(f"weights of sparse convolutions are laid out as in {layout}")
            state = to_spconv2_layout(state)
    except WeightsError as error:
        notes.append(str(error))
    if fault := _unsupported(state, model):
        notes.append(fault)
    notes += _hints(checkpoint, model)
    return compare(model, variant, state, expected, notes=tuple(notes))


def told_convention(checkpoint: Checkpoint) -> Convention | None:
    """How the file's boxes are given, by the version of mmdetection3d that it names; None where it names none."""
    version = re.match(r"(\d+)\.", str(checkpoint.meta.get("mmdet3d_version", "")))
    if version is None:
        return None
    return "mmdet3d-0.x" if int(version[1]) == 0 else "mmdet3d-1.0"


def _blank(model: Model, state: Mapping[str, Tensor]) -> tuple[str, nn.Module]:
    """Variant of the model that a file is for, and the network that it fills."""
    from extractors.base import Weights

    weights = Weights("untrained:0")
    if model == "centerpoint":
        from extractors.centerpoint import CenterPoint
        from extractors.centerpoint_network import CenterPointNetwork

        return "mmdetection3d", CenterPointNetwork(CenterPoint(weights=weights).build_head())
    if model == "bevdet":
        from extractors.bevdet import BEVDet

        generation: Literal["bd1", "bd2"] = "bd1" if "img_view_transformer.depthnet.weight" in state else "bd2"
        return generation, BEVDet(weights=weights, generation=generation).blank()
    from extractors.msmdfusion_network import MSMDFusionNetwork

    return "LiDAR and cameras", MSMDFusionNetwork()


def _unsupported(state: Mapping[str, Tensor], model: Model) -> str:
    """Why a file of a model is of no use here, "" where nothing speaks against it."""
    if any(".feature_adapt_" in key for key in state):
        return (
            "CenterPoint with the DCN head (deformable convolutions, feature_adapt_cls.* and feature_adapt_reg.*), "
            "which is not supported; take the file of the same model without 'dcn' in its name"
        )
    if any(key.startswith("pts_voxel_encoder.pfn_layers.") for key in state):
        return "CenterPoint on pillars (pts_voxel_encoder.pfn_layers.*), which is not supported; take a voxel one"
    if model == "bevdet":
        from extractors.bevdet_network import generation_of

        try:
            generation_of(state, "this")
        except WeightsError as error:
            return str(error).removeprefix("this: ")
    if model == "msmdfusion":
        absent = [name for name in _FUSION if not any(key.startswith(name) for key in state)]
        if absent:
            return (
                f"the fusion of MSMDFusion is missing ({', '.join(f'{name}*' for name in absent)}): this is the merged "
                "file that its second training stage starts from (TransFusion-L and ResNet-50), not a trained model. "
                f"Keys that it has: {_coverage(state, model)}"
            )
    return ""


def _coverage(state: Mapping[str, Tensor], model: Model) -> str:
    """How many keys of each part of the model a file has: `img_backbone 318 of 318, ...`."""
    import torch

    with torch.device("meta"):
        needed = _blank(model, state)[1].state_dict()
    parts = Counter(key.partition(".")[0] for key in needed)
    there = Counter(key.partition(".")[0] for key in needed if key in state)
    return ", ".join(f"{part} {there[part]} of {count}" for part, count in parts.items())


def _unknown(state: Mapping[str, Tensor]) -> str:
    if any(key.startswith(_FOREIGN) for key in state):
        return "these are the names of tianweiy's CenterPoint or of OpenPCDet, whose weights are not interchangeable"
    return f"of no known detector (it has {', '.join(sorted(state)[:3])} ...)"


def _hints(checkpoint: Checkpoint, model: Model) -> list[str]:
    """What file name and training settings tell that the tensors don't."""
    hints = []
    told = told_convention(checkpoint)
    if told:
        hints.append(f"made by mmdetection3d {checkpoint.meta['mmdet3d_version']}: boxes are {told}")
    elif model == "centerpoint":
        date = re.search(r"_(20\d{2})\d{4}[_-]", checkpoint.path.name)
        if date:
            likely = "mmdet3d-1.0" if int(date[1]) >= 2022 else "mmdet3d-0.x"
            hints.append(f"its name says {date[1]}: boxes are probably {likely}, set convention accordingly")
        else:
            hints.append("the file does not tell how boxes are given: mmdet3d-1.0 (2022 on) or mmdet3d-0.x")
    if model == "centerpoint":
        text = f"{checkpoint.path.name} {checkpoint.meta.get('config', '')}"
        if re.search(r"0075|0\.075", text):
            hints.append("voxels of 0.075 m, by its name or settings")
        elif re.search(r"voxel_?01|voxel_?0\.1|01voxel|\[0\.1, 0\.1, 0\.2\]", text):
            hints.append("voxels of 0.1 m, by its name or settings: set voxel=0.1")
        else:
            hints.append("voxels of 0.075 or 0.1 m can't be told from the tensors: set voxel as in training")
    return hints

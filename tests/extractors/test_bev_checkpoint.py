import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from extractors import bev_checkpoint
from extractors.base import Weights
from extractors.centerpoint import CenterPoint, CenterPointHead
from extractors.centerpoint_network import CenterPointNetwork, HeadAlone
from extractors.checkpoint import describe, read_checkpoint, seeded_init
from extractors.errors import WeightsError

UNTRAINED = CenterPoint(weights=Weights("untrained:0"))


def network(seed: int) -> CenterPointNetwork:
    made = CenterPointNetwork(UNTRAINED.build_head()).eval()
    seeded_init(made, seed)
    return made


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return dict(network(0).state_dict())


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def keys(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2) for name in names}


@pytest.mark.parametrize(
    ("layout", "order"), [("spconv 2", (0, 1, 2, 3, 4)), ("spconv 1", (1, 2, 3, 4, 0)), ("dense", (0, 4, 1, 2, 3))]
)
def test_every_layout_of_sparse_weights_loads_to_the_same(
    tmp_path: Path, state: dict[str, torch.Tensor], layout: str, order: tuple[int, ...]
) -> None:
    path = tmp_path / "centerpoint.pth"
    laid = {f"module.{key}": v.permute(order) if v.ndim == 5 else v for key, v in state.items()}
    torch.save({"meta": {"epoch": 20}, "state_dict": laid, "optimizer": {"state": {}}}, path)
    other = network(1)
    bev_checkpoint.load(other, path, "centerpoint")
    assert same(other.state_dict(), state)
    report = describe(path)
    assert (report["network"], report["loads"], report["missing"]) == ("centerpoint", True, [])
    assert sum(part["parameters"] for part in report["parts"]) == 8_938_262
    assert any(layout in note for note in report["notes"])


def test_the_head_alone_takes_its_own_keys(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save({"state_dict": state}, tmp_path / "whole.pth")
    torch.save({k: v for k, v in state.items() if "task_heads.3" not in k}, tmp_path / "cut.pth")
    head = HeadAlone(UNTRAINED.build_head())
    CenterPointHead(weights=Weights(str(tmp_path / "whole.pth"))).fill(head)
    assert all(torch.equal(value, state[key]) for key, value in head.state_dict().items())
    with pytest.raises(WeightsError, match=r"missing: pts_bbox_head\.task_heads\.3\."):
        bev_checkpoint.load(HeadAlone(UNTRAINED.build_head()), tmp_path / "cut.pth", "centerpoint")


def test_seeded_weights_of_the_head_alone_are_those_in_the_whole_network(state: dict[str, torch.Tensor]) -> None:
    head = HeadAlone(UNTRAINED.build_head())
    CenterPointHead(weights=Weights("untrained:0")).fill(head)
    assert all(torch.equal(value, state[key]) for key, value in head.state_dict().items())


@pytest.mark.parametrize("order", [(4, 0, 1, 2, 3), (3, 4, 0, 1, 2)])
def test_a_file_converted_twice_is_refused(
    tmp_path: Path, state: dict[str, torch.Tensor], order: tuple[int, ...]
) -> None:
    twice = {k: v.permute(order) if v.ndim == 5 else v for k, v in state.items()}
    torch.save(twice, tmp_path / "twice.pth")
    with pytest.raises(WeightsError, match=r"twice\.pth"):
        bev_checkpoint.load(network(1), tmp_path / "twice.pth", "centerpoint")


HEAD = "pts_bbox_head.task_heads.0."


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (keys("pts_backbone.blocks.0.0.weight", HEAD + "feature_adapt_cls.conv_adaption.weight"), "DCN head"),
        (keys("pts_voxel_encoder.pfn_layers.0.linear.weight", "pts_backbone.x", HEAD + "reg.0.conv.weight"), "pillars"),
        (keys("backbone_3d.conv_input.0.weight"), "OpenPCDet"),
        (keys("neck.blocks.0.1.weight", "bbox_head.tasks.0.hm.0.weight"), "tianweiy"),
        (keys("img_view_transformer.depthnet.weight", HEAD + "reg.0.conv.weight"), "this is bevdet's"),
        (keys("backbone_net.sa1.x"), "of no known detector"),
    ],
)
def test_files_of_other_models_and_variants_are_refused(tmp_path: Path, found: Any, text: str) -> None:
    torch.save({"state_dict": found}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=rf"other\.pth: .*{text}"):
        bev_checkpoint.load(HeadAlone(UNTRAINED.build_head()), tmp_path / "other.pth", "centerpoint")
    report = describe(tmp_path / "other.pth")
    assert not report["loads"]


def test_the_merged_file_of_msmdfusions_first_stage_is_refused(tmp_path: Path) -> None:
    merged = keys("pts_bbox_head.heatmap_head.0.conv.weight", "pts_backbone.x", "img_backbone.conv1.weight")
    torch.save({"state_dict": merged}, tmp_path / "fusion_voxel0075_R50.pth")
    with pytest.raises(WeightsError, match=r"multimodal_middle_encoder\.\*.*not a trained model"):
        bev_checkpoint.load(torch.nn.Linear(1, 1), tmp_path / "fusion_voxel0075_R50.pth", "msmdfusion")
    report = describe(tmp_path / "fusion_voxel0075_R50.pth")
    assert report["network"] == "msmdfusion"
    assert not report["loads"]
    assert any(key.startswith("bev_fusion.") for key in report["missing"])
    assert any("not a trained model" in note for note in report["notes"])


@pytest.mark.parametrize(("version", "convention"), [("0.17.2", "mmdet3d-0.x"), ("1.0.0rc4", "mmdet3d-1.0")])
def test_boxes_are_taken_as_the_file_says(
    tmp_path: Path, state: dict[str, torch.Tensor], version: str, convention: Any
) -> None:
    path = tmp_path / "centerpoint_01voxel.pth"
    torch.save(
        {"meta": {"mmdet3d_version": version, "config": "voxel_size = [0.1, 0.1, 0.2]"}, "state_dict": state}, path
    )
    bev_checkpoint.load(network(1), path, "centerpoint", convention)
    other = "mmdet3d-1.0" if convention == "mmdet3d-0.x" else "mmdet3d-0.x"
    with pytest.raises(WeightsError, match=f"boxes are {convention}; the settings say {other}"):
        bev_checkpoint.load(network(1), path, "centerpoint", other)  # type: ignore[arg-type]
    notes = " ".join(describe(path)["notes"])
    assert f"boxes are {convention}" in notes
    assert "voxels of 0.1 m" in notes


@pytest.mark.parametrize(("year", "convention"), [("2021", "mmdet3d-0.x"), ("2022", "mmdet3d-1.0")])
def test_a_files_name_hints_at_its_boxes_and_voxels(tmp_path: Path, year: str, convention: str) -> None:
    path = tmp_path / f"centerpoint_0075voxel_second_secfpn_circlenms_nus_{year}0810_011659-04cb3a3b.pth"
    torch.save(keys("pts_backbone.blocks.0.0.weight", "pts_middle_encoder.x", HEAD + "reg.0.conv.weight"), path)
    notes = " ".join(describe(path)["notes"])
    assert f"boxes are probably {convention}" in notes
    assert "voxels of 0.075 m" in notes


@pytest.mark.parametrize("entry", ["ema_state_dict", "state_dict_ema"])
def test_averaged_weights_are_preferred_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str
) -> None:
    last, average = {"a.weight": torch.zeros(2)}, {"module.a.weight": torch.ones(2), "n_averaged": torch.tensor(3)}
    torch.save({"state_dict": last, entry: average}, tmp_path / "model.pth")
    with caplog.at_level(logging.WARNING):
        checkpoint = read_checkpoint(tmp_path / "model.pth")
    assert checkpoint.state["a.weight"].tolist() == [1, 1]
    assert checkpoint.state.keys() == {"a.weight"}
    assert "averaged weights" in caplog.text
    assert any("averaged weights" in note for note in checkpoint.notes)


def test_mmengine_has_the_average_in_its_state_dict(tmp_path: Path) -> None:
    """It swaps the two when it saves."""
    average, last = {"a.weight": torch.ones(2)}, {"module.a.weight": torch.zeros(2), "steps": torch.tensor(3)}
    content = {"meta": {"mmengine_version": "0.10.7"}, "state_dict": average, "ema_state_dict": last}
    torch.save(content, tmp_path / "model.pth")
    assert read_checkpoint(tmp_path / "model.pth").state["a.weight"].tolist() == [1, 1]


def test_averaged_copies_beside_their_tensors_are_preferred(tmp_path: Path) -> None:
    content = {"a.b.weight": torch.zeros(2), "ema_a_b_weight": torch.ones(2), "a.count": torch.zeros(1)}
    torch.save({"state_dict": content}, tmp_path / "model.pth")
    checkpoint = read_checkpoint(tmp_path / "model.pth")
    assert {key: value.tolist() for key, value in checkpoint.state.items()} == {"a.b.weight": [1, 1], "a.count": [0]}
    assert "1 tensors have averaged copies" in checkpoint.notes[0]


def test_an_averaged_file_beside_the_checkpoint_is_pointed_to(tmp_path: Path) -> None:
    for name in ("bevdet.pth", "bevdet_ema.pth"):
        torch.save({"a": torch.zeros(1)}, tmp_path / name)
    assert "bevdet_ema.pth beside it" in read_checkpoint(tmp_path / "bevdet.pth").notes[0]
    assert not read_checkpoint(tmp_path / "bevdet_ema.pth").notes


@pytest.fixture
def framework() -> Iterator[type]:
    """A class of the training framework, there only while files are written."""
    names = ("mmengine", "mmengine.logging")
    for name in names:
        sys.modules[name] = ModuleType(name)

    class HistoryBuffer:
        def __init__(self, values: Any) -> None:
            self.values = values

    HistoryBuffer.__module__, HistoryBuffer.__qualname__ = "mmengine.logging", "HistoryBuffer"
    sys.modules["mmengine.logging"].HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    yield HistoryBuffer
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("old_format", [False, True])
def test_what_a_training_leaves_beside_the_tensors_is_left_out(
    tmp_path: Path, framework: Any, old_format: bool
) -> None:
    hub = {"loss": framework(np.arange(3.0)), "lr": np.float64(0.5), "kinds": np.array([1, 2])}
    content = {"state_dict": {"a": torch.ones(2)}, "message_hub": hub, "meta": {"epoch": 20}}
    torch.save(content, tmp_path / "epoch_20.pth", _use_new_zipfile_serialization=not old_format)
    for name in ("mmengine", "mmengine.logging"):
        del sys.modules[name]
    checkpoint = read_checkpoint(tmp_path / "epoch_20.pth")
    assert checkpoint.state["a"].tolist() == [1, 1]
    assert checkpoint.meta == {"epoch": 20}
    assert "mmengine" not in sys.modules

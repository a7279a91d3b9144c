"""`scenecache doctor --checkpoint FILE` on files of the detectors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from extractors.base import Weights
from extractors.centerpoint import CenterPoint
from extractors.centerpoint_network import CenterPointNetwork
from pipelines import doctor


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """CenterPoint's keys and shapes; one stored number for each tensor keeps files small."""
    with torch.device("meta"):
        blank = CenterPointNetwork(CenterPoint(weights=Weights("untrained:0")).build_head()).state_dict()
    return {key: torch.zeros((), dtype=value.dtype).expand(value.shape) for key, value in blank.items()}


def save(folder: Path, content: Any, name: str = "centerpoint_0075voxel_nus_20220810_011659.pth") -> Path:
    torch.save(content, folder / name)
    return folder / name


def test_a_whole_checkpoint_is_explained(tmp_path: Path, state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    old = {f"module.{key}": value.permute(1, 2, 3, 4, 0) if value.ndim == 5 else value for key, value in state.items()}
    path = save(tmp_path, {"meta": {"epoch": 20}, "state_dict": old, "optimizer": {}})
    assert doctor.main(path, None, as_json=False) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "wrapper: state_dict prefix: module. network: centerpoint",
        "│ pts_bbox_head │ 294 │ 1,667,142 │",
        "504 keys",
        "laid out as in spconv 1",
        "boxes are probably mmdet3d-1.0",
        "voxels of 0.075 m",
        "It loads.",
    ):
        assert part in text
    assert doctor.main(path, None, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["network"] == "centerpoint"
    assert report["loads"]


def test_what_is_missing_is_listed(tmp_path: Path, state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cut = {key: value for key, value in state.items() if "task_heads.5.vel" not in key}
    assert doctor.main(save(tmp_path, cut), None, as_json=False) == 1
    text = capsys.readouterr().out
    assert "missing: pts_bbox_head.task_heads.5.vel.1.bias" in text
    assert "It does not load." in text


def test_the_dcn_head_is_named(tmp_path: Path, state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    deformable = {**state, "pts_bbox_head.task_heads.0.feature_adapt_cls.conv_offset.weight": torch.zeros(2)}
    assert doctor.main(save(tmp_path, deformable), None, as_json=False) == 1
    assert "DCN head" in capsys.readouterr().out

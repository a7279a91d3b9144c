"""The doctor on files with the official keys and shapes: every key is known, nothing is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from extractors.checkpoint import describe


def _explained(golden: Any, folder: Path, network: str, naming: str, parameters: int) -> None:
    state = {}
    for key, value in golden.state().items():
        tensor = torch.from_numpy(value)
        # One stored number for each large tensor keeps the file small.
        state[key] = tensor if tensor.numel() < 100 else torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    torch.save({"meta": {"epoch": 20}, "state_dict": state}, folder / "official.pth")
    report = describe(folder / "official.pth")
    assert (report["network"], report["naming"]) == (network, naming)
    assert report["missing"] == report["mismatched"] == []
    assert {key["use"] for key in report["keys"]} == {"loaded"}
    assert report["loads"]
    assert sum(part["keys"] for part in report["parts"]) == len(state)
    assert sum(part["parameters"] for part in report["parts"]) == parameters
    sparse = any(value.ndim == 5 for value in state.values())
    assert ("weights of sparse convolutions are laid out as in spconv 2" in report["notes"]) == sparse


@pytest.mark.golden("votenet_scanqa")
def test_scanqas_votenet_is_explained(golden: Any, tmp_path: Path) -> None:
    _explained(golden, tmp_path, "votenet", "scanqa", 953_764)


@pytest.mark.golden("votenet_mmdet3d")
def test_mmdet3ds_votenet_is_explained(golden: Any, tmp_path: Path) -> None:
    _explained(golden, tmp_path, "votenet", "mmdet3d", 953_828)


@pytest.mark.golden("centerpoint_mmdet3d")
def test_centerpoint_is_explained(golden: Any, tmp_path: Path) -> None:
    _explained(golden, tmp_path, "centerpoint", "mmdetection3d", 8_938_262)


@pytest.mark.golden("bevdet_r50")
def test_bevdet_is_explained(golden: Any, tmp_path: Path) -> None:
    _explained(golden, tmp_path, "bevdet", "bd1", 47_975_297 + 124_617)  # and the constants that it holds


@pytest.mark.golden("msmdfusion")
def test_msmdfusion_is_explained(golden: Any, tmp_path: Path) -> None:
    _explained(golden, tmp_path, "msmdfusion", "LiDAR and cameras", 50_571_906)

"""The real key frame of nuScenes through `scenecache run nuscenes-qa`: three detectors, annotations, questions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from extractors.base import Weights
from extractors.bevdet import BEVDet
from pipelines.draw import annotated, edges_in_image
from pipelines.sources.nuscenes import NuScenes
from tests.pipelines.front_door import FrontDoor

DETECTORS = {"centerpoint": 512, "bevdet": 256, "msmdfusion": 512}
KEY = "ca9a282c9e77460f8360f564131a8af5"


@pytest.fixture
def folder(data_dir: Path, tmp_path: Path) -> Path:
    """Folder of the key frame; masks and questions to go with it are written to `tmp_path`."""
    folder = data_dir / "nuscenes"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    source = NuScenes(folder)
    boxes = annotated(source.open(KEY, "annotations"))
    (tmp_path / "masks").mkdir()
    for view in source.open(KEY, "cameras").views:  # no segmenter ran: the annotated boxes stand in for its masks
        edges = edges_in_image(boxes.boxes, view)
        seen = np.flatnonzero(np.isfinite(edges).all((1, 2, 3)))
        corners = edges[seen].reshape(len(seen), -1, 2)
        rectangles = np.concatenate([corners.min(1), corners.max(1)], axis=1).reshape(-1, 4)
        names = np.array([boxes.names[i] for i in seen], "U32")
        file = tmp_path / "masks" / view.path.with_suffix(".npz").name
        np.savez(file, names=names, scores=np.ones(len(seen)), boxes=rectangles)
    question = {"question": "How many trucks are there?", "answer": 1, "sample_token": KEY, "template_type": "count"}
    for split, questions in (("train", []), ("val", [{**question, "num_hop": 0}])):
        text = json.dumps({"questions": questions})
        (tmp_path / f"NuScenes_{split}_questions.json").write_text(text)
    return folder


@pytest.mark.parametrize("runner", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_all_detectors_run_on_the_real_key_frame(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    door = FrontDoor(tmp_path, monkeypatch)
    settings = [
        *(f"source.root={folder}", f"source.masks={tmp_path / 'masks'}", "virtual_points.extractor=virtual_points"),
        *(f"{name}.weights=untrained:0" for name in DETECTORS),
        *("groundtruth.vectors=untrained:0", "groundtruth.status=omit"),  # info pickles have no attributes
        f"nuscenes_questions.root={tmp_path}",
    ]
    code, out, err = door("run", "nuscenes-qa", *settings, "--runner", runner)
    assert code == 0, out + err
    for name, channels in DETECTORS.items():
        (record,) = door.records(name).values()
        door.records(name).schema.check(dict(record), name)
        assert 0 < len(record["score"]) <= 80
        assert record["feature"].shape == (len(record["score"]), channels)
        assert np.isfinite(record["feature"]).all()
        assert record["feature"][record["valid"]].any()
        assert not record["feature"][~record["valid"]].any()
        assert (np.diff(record["score"]) <= 0).all()
    (truth,) = door.records("groundtruth").values()
    (points,) = door.records("virtual_points").values()
    assert len(truth["box"]) > 30
    assert points["real"].sum() > 100
    assert (~points["real"]).sum() > 100
    assert len(door.records("nuscenes_questions")) == 1
    plan = door.json("plan", "nuscenes-qa", *settings)
    assert all(line["action"] == "reuse" for stage in plan["stages"] for line in stage["lines"])


@pytest.mark.slow
def test_a_changed_weight_file_runs_its_detector_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = FrontDoor(tmp_path, monkeypatch)
    state = BEVDet(weights=Weights("untrained:0")).blank().state_dict()
    stages = {
        "bevdet": {"weights": str(tmp_path / "bevdet.pth")},
        "truth": {"extractor": "groundtruth", "vectors": "untrained:0", "status": "omit"},
        "other": {"extractor": "bevdet", "weights": "untrained:1", "objects": 10},
    }
    job = door.job({"type": "nuscenes", "root": str(folder)}, stages)
    torch.save({"state_dict": state}, tmp_path / "bevdet.pth")
    code, out, err = door("run", job)
    assert code == 0, out + err
    before = {name: door.digests(name) for name in stages}

    state["pts_bbox_head.shared_conv.conv.weight"] += 0.1
    torch.save({"state_dict": state}, tmp_path / "bevdet.pth")
    assert {name: door.plan(job, name)[KEY] for name in stages} == {
        "bevdet": ("compute", "weights changed"),
        "truth": ("reuse", "unchanged"),
        "other": ("reuse", "unchanged"),
    }
    assert door("run", job)[0] == 0
    after = {name: door.digests(name) for name in stages}
    assert [name for name in stages if after[name] != before[name]] == ["bevdet"]

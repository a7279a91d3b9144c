"""BEVDet's stages through `scenecache run`, on the real key frame: a kept map, the head and the crop behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.pipelines.front_door import FrontDoor

KEY = "ca9a282c9e77460f8360f564131a8af5"


def test_objects_from_a_kept_map_are_those_of_the_detector(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_dir / "nuscenes"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    door = FrontDoor(tmp_path, monkeypatch)
    weights = {"weights": "untrained:0", "generation": "bd2"}
    job = door.job(
        {"type": "nuscenes", "root": str(folder)},
        {
            "bevdet": {**weights},
            "bevdet_bev": {"extractor": "bevdet", **weights, "give": "bev", "dtype": "float32"},
            "bevdet_head": {**weights},
            "object_crop": {"of": ["bevdet_bev", "bevdet_head"], "channels": 256},
        },
    )
    code, out, err = door("run", job)
    assert code == 0, out + err
    direct, behind = door.records("bevdet")[KEY], door.records("object_crop")[KEY]
    assert len(direct["score"]) > 20
    for column in ("box", "score", "feature"):
        ours, theirs = (record[column].astype(np.float64) for record in (behind, direct))
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
    assert behind["class_name"].tolist() == direct["class_name"].tolist()
    assert set(direct["frame"]) == {"ego"}
    assert set(direct["convention"]) == {"mmdet3d-1.0"}

    assert door.plan(job, "bevdet") == {KEY: ("reuse", "unchanged")}
    other = Path(job).read_text().replace("generation: bd2", "generation: auto", 1)
    Path(job).write_text(other)  # without a checkpoint that is the first generation
    assert door.plan(job, "bevdet") == {KEY: ("compute", "settings changed: generation bd2 -> bd1")}
    assert door.plan(job, "bevdet_bev") == {KEY: ("reuse", "unchanged")}

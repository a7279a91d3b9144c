"""The Python of the README, docs/training.md and docs/formats.md runs as it stands, over a store with its stages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # storage itself does without

import torch

from storage.schema import Column, Record, Schema
from tests.storage.small_store import fill

FLAG = Column((), "bool")
PROPOSALS = Schema({"feature": Column((128,)), "center": Column((3,)), "mask": FLAG, "nms_keep": FLAG}, "object")
GRID = Schema({"grid": Column((49, 512), "float16")})
QUESTIONS = Schema({name: Column((), "string") for name in ("scene_id", "question", "answer")})


def proposals(count: int) -> Record:
    return {
        "feature": np.random.default_rng(count).random((count, 128), np.float32),
        "center": np.zeros((count, 3), np.float32),
        "mask": np.ones(count, bool),
        "nms_keep": np.ones(count, bool),
    }


def make_store(path: Path) -> None:
    """Three scenes with 40 questions, as `scenecache demo` makes them; the last scene has no grid."""
    scenes = [f"scene{i:04}_00" for i in range(3)]
    fill(path, {key: proposals(5 + i) for i, key in enumerate(scenes)}, "votenet", PROPOSALS)
    fill(path, {key: {"grid": np.ones((49, 512), np.float16)} for key in scenes[:2]}, "bev_grid", GRID)
    asked = {
        f"{i}": {
            "scene_id": np.array(scenes[i % 3], object),
            "question": np.array("What is behind me?", object),
            "answer": np.array("bed", object),
        }
        for i in range(40)
    }
    fill(path, asked, "sqa3d_questions", QUESTIONS)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    return request.config.rootpath


def test_the_readme_reads_a_store(root: Path) -> None:
    make_store(Path("demo/store"))
    (block,) = blocks(root / "README.md")
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["tokens"].shape[2] == 128
    assert len(names["text"]) == len(names["gold"]) == 40 % 16
    assert Path("run.lock.json").is_file()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_training_guide_trains_and_resumes(root: Path) -> None:
    make_store(Path("store"))
    names: dict[str, Any] = {
        "model": torch.nn.Linear(1, 1), "time_to_save": True, "train_keys": ["0", "7"], "epochs": 1
    }  # fmt: skip
    found = blocks(root / "docs" / "training.md")
    assert len(found) == 5
    for number, block in enumerate(found):
        exec(compile(block, f"docs/training.md, block {number}", "exec"), names)
    assert Path("run7.pt").is_file()
    assert Path("run7.lock.json").is_file()
    assert names["split"].keys == ["0", "7"]
    assert names["stream"].epoch == 1  # resumed behind the batch that was saved, the only one


def test_other_tools_read_shards_as_the_page_on_formats_says(root: Path) -> None:
    pytest.importorskip("duckdb")
    make_store(Path("store"))
    (path,) = Path("store/votenet").glob("*.parquet")
    names: dict[str, Any] = {"path": path}
    found = blocks(root / "docs" / "formats.md")
    assert len(found) == 3
    right = [proposals(5 + i)["feature"] for i in range(3)]
    exec(compile(found[0], "docs/formats.md, block 0", "exec"), names)
    np.testing.assert_array_equal(names["feature"], right[0])
    exec(compile(found[1], "docs/formats.md, block 1", "exec"), names)
    assert names["files"] == {f"votenet/{path.name}"}
    exec(compile(found[2], "docs/formats.md, block 2", "exec"), names)
    np.testing.assert_array_equal(names["feature"], np.concatenate(right))

"""The jobs of the docs, in YAML and in Python, are taken as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.errors import JobError
from pipelines.job_spec import read_job
from pipelines.make_data import scannet
from tests.pipelines.rooms import Call, object_of

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = {"nuscenes.md": "nuscenes"}  # of the pages that show stages alone; scannet for the others


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if blocks(path.name, "yaml")))
def test_documented_yaml_has_no_fault_but_files_that_are_elsewhere(page: str, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        source = "" if "source:" in text else f"source: {{type: {SOURCES.get(page, 'scannet')}, root: /data}}\n"
        (tmp_path / "job.yaml").write_text(source + text)
        faults: list[str] = []
        try:
            read_job(tmp_path / "job.yaml").build()
        except JobError as error:
            faults = str(error).splitlines()[1:]
        # the folders and checkpoints of the docs are on nobody's disk
        assert [fault for fault in faults if not re.search(r": no file |: no such folder", fault)] == []


def test_documented_python_plans_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scannet.make(tmp_path / "data", seed=0, scenes=1, quick=True)
    code = "".join(blocks("jobs.md", "python"))
    assert "/data/scannet" in code
    exec(compile(code.replace("/data/scannet", "data"), "jobs.md", "exec"), {"__name__": "mine"})
    out = capsys.readouterr().out
    assert "PlanLine(stage='votenet', action='compute', reason='new', items=1" in out
    assert re.search(r"votenet: 1 made .*\nmine: .*, snapshot 1$", out.strip())


def test_weights_without_training_are_called_so_by_plan_and_store(call: Call, folder: Path) -> None:
    scannet.make(folder / "data", seed=0, scenes=1, quick=True)
    stage = "votenet: {weights: untrained:7, num_points: 2048}"
    (folder / "vote.yaml").write_text(f"source: {{type: scannet, root: data}}\nstages:\n  {stage}\n")
    assert "weights without training: votenet" in call("plan", "vote.yaml")[1]
    assert object_of(call("plan", "vote.yaml", "--json")[1])["stages"][0]["untrained"] is True
    assert call("run", "vote.yaml")[0] == 0
    assert "Weights without training: votenet (untrained:7)" in call("status")[1]
    assert object_of(call("status", "--json")[1])["stages"][0]["untrained"] == ["untrained:7"]
    out = call("plan", "vote.yaml", "votenet.weights=untrained:8")[1]
    assert "weights changed" in out

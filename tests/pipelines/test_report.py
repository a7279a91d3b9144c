"""The report shows what the store holds: two plans, pictures, counts, failures, and that weights are untrained."""

from __future__ import annotations

import re

import pytest

from pipelines import cli_jobs, report
from pipelines.make_data import scannet

JOB = """\
name: rooms
store: store
source: {type: scannet, root: data}
stages:
  scan_info: {}
  scan_objects: {}
  video: {size: 32, every: 40}
  votenet: {weights: untrained:0, num_points: 2048}
tables:
  sqa3d_questions: {root: data/sqa_task/balanced}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("report")
    scannet.make(root / "data", seed=0, scenes=1, quick=True)
    (root / "data" / "scans" / "scene0001_00").mkdir()  # a scene without files fails by name
    (root / "rooms.yaml").write_text(JOB)
    for overrides in ([], ["votenet.proposals=128"]):
        ready = cli_jobs.prepare(str(root / "rooms.yaml"), overrides)
        assert cli_jobs.run(ready, "local", None, None, 1.0) == 3
    return report.write(root / "store", root / "report.html").read_text()


def test_both_plans_stand_side_by_side(page):
    assert page.index("Before") < page.index("After")
    assert page.index("settings changed: proposals 256 -&gt; 128") > page.index("After")


def test_a_scene_has_its_frames_counts_and_questions(page):
    scene = page[page.index("<h3>scene0000_00</h3>") :]
    assert re.search(r"proposals: 128, \d+ of them called an object; annotated objects: \d+; frames kept: \d+", scene)
    assert 'src="data:image/jpeg;base64,' in scene
    assert scene.count("<dt>") >= 4


def test_failures_are_named(page):
    assert re.search(r"<td>scan_info</td><td>scene0001_00</td><td>MissingFile: ", page)


def test_untrained_weights_are_said_to_be_untrained(page):
    assert "No trained weights: votenet ran with seeded random parameters" in page


def test_nothing_is_loaded_from_elsewhere(page):
    assert not re.search(r'(?:src|href)="(?!data:)', page)

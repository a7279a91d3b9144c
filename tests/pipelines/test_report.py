"""The report shows what the store holds: two plans, pictures, counts, failures, and that weights are untrained."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    scannet.make(root / "data", seed=0, scenes=1, quick=True)
    (root / "data" / "scans" / "scene0001_00").mkdir()  # a scene without files fails by name
    (root / "rooms.yaml").write_text(JOB)
    for overrides in ([], ["votenet.proposals=128"]):
        ready = cli_jobs.prepare(str(root / "rooms.yaml"), overrides)
        assert cli_jobs.run(ready, "local", None, None, 1.0) == 3
    return root


@pytest.fixture(scope="module")
def page(root: Path) -> str:
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


def test_work_is_counted_apart_from_the_wall_clock(page):
    did = page[page.index("What each run did") : page.index("What the store holds")]
    assert did.count("seconds of work") == 2
    for table, took in re.findall(r"<table>(.*?)</table>\s*<p[^>]*>From start to end: ([\d.]+) s", did, re.DOTALL):
        *stages, total = map(float, re.findall(r'"n">(\d+\.\d)</t[dh]>', table))
        assert abs(sum(stages) - total) <= 0.05 * len(stages)
        assert total <= float(took) + 0.05


@pytest.mark.parametrize("frames", [1, 3, 6, 7, 8, 11, 12, 150])
def test_a_contact_sheet_has_no_gap(frames):
    grey = {"frame": np.full((frames, 8, 8, 3), 60, np.uint8), "frame_index": np.arange(frames) * 20}
    encoded = report._contact_sheet(grey).partition(",")[2]
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("L"))
    assert sheet.shape[1] <= 960
    assert sheet[-40:-8, -40:-8].mean() < 90  # the last place holds a frame
    rows = 1 if frames <= 6 else 2
    assert (sheet[8] < 90).any()
    assert sheet.shape[0] * (min(frames, 12) // rows) == sheet.shape[1] * rows


def votes(centers, objectness) -> dict[str, np.ndarray]:
    scores = np.array([[0.0, score] for score in objectness], np.float32)
    return {"center": np.array(centers, np.float32), "objectness": scores}


@pytest.mark.parametrize("frame", ["aligned", "scan"])
def test_proposals_centred_in_the_room_are_drawn(frame):
    turned = np.array([[0.0, -1, 0, 5], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])  # scan -> aligned
    low, high = np.array([0.0, 0, 0]), np.array([2.0, 1, 1])
    inside, outside = np.array([[1.5, 0.5, 0.5], [0.5, 0.5, 0.5]]), np.array([[0.5, 1.5, 0.5], [9.0, 9, 9]])
    centers = np.concatenate([outside, inside])
    if frame == "scan":
        centers = centers @ turned[:3, :3].T + turned[:3, 3]
    info = {"frame": np.array(frame, object), "axis_align": turned, "bbox_min": low, "bbox_max": high}
    drawn, caption = report._drawn(votes(centers, [9, 8, 1, 2]), info, untrained=False)
    assert drawn.tolist() == [3, 2]
    assert caption == "2 of 4 proposals drawn: the most object-like of the 2 centred in the room"
    many = votes(np.tile(centers[2:], (20, 1)), np.arange(40))
    drawn, caption = report._drawn(many, info, untrained=True)
    assert drawn.tolist() == list(range(39, 27, -1))
    assert caption.startswith(
        "12 of 40 proposals drawn: the most object-like of the 40 centred in the room; untrained w"
    )
    assert report._drawn(many, None, untrained=False)[1] == "12 of 40 proposals drawn: the most object-like"


def test_the_caption_of_a_picture_says_that_weights_are_untrained(root, monkeypatch):
    monkeypatch.setattr(report, "_bev", lambda *given: "data:image/jpeg;base64,")  # without rendering one
    page = report.write(root / "store", root / "captions.html").read_text()
    assert re.search(r"<figcaption>\d+ of 128 proposals drawn: [^<]*; untrained weights", page)

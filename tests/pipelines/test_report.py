"""The report shows what the store holds: two plans, pictures, counts, failures, and that weights are untrained."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extractors.bev_camera import BevCamera
from extractors.geometry import box_corners, transform
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
    centers = np.array(centers, np.float32)
    sizes = np.full_like(centers, 0.2)
    return {"center": centers, "objectness": scores, "corners": box_corners(np.concatenate([centers, sizes], 1))}


TURNED = np.array([[0.0, -1, 0, 5], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])  # scan -> aligned


def room() -> dict[str, np.ndarray]:
    """The record of a picture: grey over x -1 to 1 and y -0.5 to 0.5 of the scan frame, white around it."""
    camera = BevCamera(np.zeros(3), 1.0, 320, 180)
    image = np.full((180, 320, 3), 255, np.uint8)
    (left, top), (right, bottom) = camera.project(np.array([[-1, 0.5, 0], [1, -0.5, 0]])).astype(int)
    image[top:bottom, left:right] = 120
    png = io.BytesIO()
    Image.fromarray(image).save(png, "PNG")
    made = json.dumps({"frame": "scan", "lens_mm": 45.0, "sensor_mm": 36.0})
    return {
        "image": np.array(png.getvalue(), object), "render": np.array(made, object),
        "centre": np.zeros(3), "radius": np.array(1.0),
    }  # fmt: skip


def picture_of(data_url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2]))).convert("RGB")).astype(int)


def test_the_most_object_like_proposals_over_the_scan_are_drawn():
    inside, outside = [[0.6, 0.2, 0.1], [-0.5, -0.2, 0.3]], [[0.2, 0.9, 0.1], [9, 9, 0], [0, 0, 8]]
    info = {"axis_align": TURNED}
    aligned = transform(np.array(outside + inside), TURNED)
    image, caption = report._bev(room(), votes(aligned, [9, 8, 7, 1, 2]), info, None, [])
    assert caption == "2 of 5 proposals drawn: those centred over the scan"
    red, green, blue = np.moveaxis(picture_of(image), -1, 0)
    assert ((red > 200) & (green < 160) & (blue < 120)).any(), "orange"
    many = np.tile(aligned[3:], (20, 1))
    image, caption = report._bev(room(), votes(many, np.arange(40)), info, None, [])
    assert caption == "12 of 40 proposals drawn: the most object-like of the 40 centred over the scan"
    drawn, _ = report._drawn(votes(many, np.arange(40)), np.full((40, 2), 100.0), np.zeros((180, 320, 3), np.uint8))
    assert drawn.tolist() == list(range(39, 27, -1))


def test_boxes_stand_where_the_picture_shows_their_objects():
    box = np.array([[0.5, 0.25, 0.0, 0.4, 0.3, 0.0]])  # of the scan frame, flat on the ground
    aligned = np.concatenate([transform(box[:, :3], TURNED), box[:, [4, 3, 5]]], 1)  # a quarter turn swaps x and y
    image, caption = report._bev(room(), None, {"axis_align": TURNED}, {"box_aligned": aligned}, [])
    assert caption == ""
    red, green, blue = np.moveaxis(picture_of(image), -1, 0)
    y, x = np.nonzero((green > red + 40) & (green > blue + 10))
    grey_y, grey_x = np.nonzero((abs(red - 120) < 8) & (abs(green - 120) < 8))
    across = (x - grey_x.min()) / np.ptp(grey_x)  # 0 to 1 over x -1 to 1
    down = (y - grey_y.min()) / np.ptp(grey_y)  # 0 to 1 over y 0.5 to -0.5
    np.testing.assert_allclose([across.min(), across.max()], [0.65, 0.85], atol=0.04)
    np.testing.assert_allclose([down.min(), down.max()], [0.1, 0.4], atol=0.08)
    assert len(green) < 180, "cut to what it shows"


def test_the_caption_of_a_picture_says_that_weights_are_untrained(root, monkeypatch):
    caption = "1 of 128 proposals drawn: those centred over the scan"
    monkeypatch.setattr(report, "_bev", lambda *given: ("data:image/jpeg;base64,", caption))  # without rendering one
    page = report.write(root / "store", root / "captions.html").read_text()
    assert re.search(rf"<figcaption>{caption}; untrained weights", page)

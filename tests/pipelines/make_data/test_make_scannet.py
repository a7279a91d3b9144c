"""The synthetic dataset is in the official layout, true to its own geometry, and the same every time."""

import json

import cv2
import numpy as np
import pytest

from extractors.geometry import transform
from extractors.scan_info import ScanInfo
from extractors.scan_objects import ScanObjects
from extractors.sens import SensReader
from pipelines.errors import JobError
from pipelines.make_data.scannet import make
from pipelines.questions.sqa3d import SQA3DQuestions
from pipelines.sources.scannet import ScanNet
from tests.pipelines.make_data.made_files import digest


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    cv2.setNumThreads(1)
    out = tmp_path_factory.mktemp("scannet")
    return out, make(out, seed=5, scenes=3, quick=True)


@pytest.fixture(scope="module")
def scenes(dataset):
    source = ScanNet(dataset[0])
    return {
        key: (source.open(key, "scan"), source.open(key, "labels"), source.open(key, "clip").path)
        for key in source.keys()  # noqa: SIM118
    }


def test_the_same_seed_gives_the_same_bytes_wherever_another_gave_others(tmp_path):
    make(tmp_path / "a", seed=1, scenes=1, quick=True)
    make(tmp_path / "b", seed=2, scenes=2, quick=True)
    one, other = digest(tmp_path / "a"), digest(tmp_path / "b")
    differ = [name for name, value in one.items() if other[name] != value]
    assert any(n.endswith(".ply") for n in differ)
    assert any(n.endswith(".sens") for n in differ)
    make(tmp_path / "b", seed=1, scenes=1, quick=True)
    assert digest(tmp_path / "b") == one


def test_the_source_reads_all_of_it(dataset, scenes):
    out, summary = dataset
    assert list(scenes) == ["scene0000_00", "scene0001_00", "scene0002_00"]
    assert ScanNet(out, split="train").keys() == ["scene0000_00"]
    assert ScanNet(out, split="val").keys() == ["scene0001_00", "scene0002_00"]
    assert summary["vertices"] == sum(len(scan.xyz) for scan, _, _ in scenes.values())
    assert all(10_000 < len(scan.xyz) < 25_000 for scan, _, _ in scenes.values())
    assert summary["questions"] == {"train": 24, "val": 24, "test": 24}


def test_the_raw_frame_is_turned_and_alignment_undoes_it(scenes):
    for scan, _, _ in scenes.values():
        aligned = transform(scan.xyz, scan.axis_align)
        low, high = aligned.min(axis=0), aligned.max(axis=0)
        assert low[2] == pytest.approx(0, abs=1e-5)
        edge = (np.abs(aligned[:, :2] - low[:2]) < 1e-3) | (np.abs(aligned[:, :2] - high[:2]) < 1e-3)
        assert edge.any(axis=1).mean() > 0.15  # the walls lie along the axes
        raw_edge = np.abs(scan.xyz[:, :2] - scan.xyz[:, :2].min(axis=0)) < 1e-3
        assert raw_edge.any(axis=1).mean() < 0.01


def test_labels_fit_the_mesh_and_give_objects_inside_the_room(scenes):
    for key, (scan, labels, _) in scenes.items():
        record = ScanObjects().prepare(key, scan, labels)
        assert 8 <= len(record["label"]) <= 30
        assert {"door", "window"} <= set(record["label"])
        assert "wall" not in record["label"]
        low, high = (f(transform(scan.xyz, scan.axis_align), axis=0) for f in (np.min, np.max))
        corners = record["box_aligned"][:, :3] - record["box_aligned"][:, 3:] / 2
        assert (corners > low - 0.02).all()
        assert (record["box_aligned"][:, :3] + record["box_aligned"][:, 3:] / 2 < high + 0.02).all()
        assert (np.bincount(np.searchsorted(np.unique(labels.segment), labels.segment)) > 0).all()


def test_depth_and_pose_put_the_pictures_onto_the_mesh(scenes):
    for scan, _, path in scenes.values():
        with SensReader(path) as reader:
            assert reader.pose_valid.tolist() == [i != 40 for i in range(60)]
            k = reader.header.intrinsic_depth
            depth = reader.depth(20).astype(np.float64) / reader.header.depth_shift
            v, u = np.mgrid[0 : depth.shape[0], 0 : depth.shape[1]]
            points = np.stack([(u - k[0, 2]) / k[0, 0] * depth, (v - k[1, 2]) / k[1, 1] * depth, depth], axis=-1)
            world = transform(points[depth > 0], reader.poses[20].astype(np.float64))[::60]
            colors = cv2.imdecode(np.frombuffer(reader.jpeg(20), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
        gaps = ((world[:, None] - scan.xyz[None]) ** 2).sum(axis=-1)
        assert (depth > 0).mean() > 0.99
        assert np.sqrt(gaps.min(axis=1)).max() < 0.12  # half a cell's diagonal, and rounding
        seen = colors[::2, ::2][depth > 0][::60].astype(float)
        nearest = scan.rgb[gaps.argmin(axis=1)].astype(float)
        assert np.median(np.abs(seen - nearest)) < 25


def test_situations_lie_where_the_text_says(dataset, scenes):
    """The named object is in the direction that the annotated pose faces, by the mesh and labels alone."""
    out = dataset[0]
    parents = {key: ScanInfo().prepare(key, scan) for key, (scan, _, _) in scenes.items()}
    boxes = {key: ScanObjects().prepare(key, scan, labels) for key, (scan, labels, _) in scenes.items()}
    table = SQA3DQuestions(out)
    rows = dict(table.build({key for key, _, _ in table.items()}, parents))
    assert len(rows) == 72
    turns = {"to my left": 90, "behind me": 180, "to my right": -90, "in front of me": 0}
    checked = 0
    for row in rows.values():
        scene = boxes[str(row["scene_id"])]
        here, look = row["pose_aligned"][:2], row["facing_aligned"]

        def bearing(label, scene=scene, here=here, look=look):
            (i,) = np.flatnonzero(scene["label"] == label)
            to = scene["box_aligned"][i, :2] - here
            return np.rad2deg(np.arctan2(look[0] * to[1] - look[1] * to[0], look @ to))

        text = str(row["situation"])  # "I am facing the X, and the Y is to my left."
        ahead, beside = text.removeprefix("I am facing the ").rstrip(".").split(", and the ")
        assert abs(bearing(ahead)) < 5
        label, where = beside.split(" is ")
        assert abs((bearing(label) - turns[where] + 180) % 360 - 180) < 46
        question, answer = str(row["question"]), str(row["answer"])
        if question.startswith("Which direction should I go to reach the "):
            expected = {"forward": 0, "left": 90, "backward": 180, "right": -90}[answer]
            label = question.removeprefix("Which direction should I go to reach the ").rstrip("?")
            assert abs((bearing(label) - expected + 180) % 360 - 180) < 46
            checked += 1
        elif question.startswith("How many") and question.endswith("in this room?"):
            word = question.removeprefix("How many ").removesuffix(" are in this room?")
            count = ["zero", "one", "two", "three", "four", "five", "six"].index(answer)
            names = [n for n in scene["label"] if word in (n + "s", n + "es", n[:-1] + "ves")]
            assert len(names) == count
            checked += 1
    assert checked >= 6


def test_questions_are_balanced(dataset):
    path = dataset[0] / "sqa_task/balanced/v1_balanced_sqa_annotations_train_scannetv2.json"
    questions = path.with_name("v1_balanced_questions_train_scannetv2.json")
    answers = [a["answers"][0]["answer"] for a in json.loads(path.read_text())["annotations"]]
    texts = [q["question"] for q in json.loads(questions.read_text())["questions"]]
    first = {w: sum(t.startswith(w) for t in texts) for w in ("What", "Is", "How", "Can", "Which", "Do")}
    assert min(first.values()) >= 3
    assert abs(answers.count("yes") - answers.count("no")) <= 3


def test_no_scenes_is_refused(tmp_path):
    with pytest.raises(JobError, match="at least 1"):
        make(tmp_path, scenes=0)

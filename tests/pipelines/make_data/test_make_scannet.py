"""The synthetic dataset is in the official layout, true to its own geometry, and the same every time."""

import json
import re

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


QUARTERS = ("in front of me", "to my left", "behind me", "to my right")
WAY = "in front of me|to my left|behind me|to my right"


class Standing:
    """A row of the question table beside the objects of its scene, by mesh, labels and annotated pose alone."""

    def __init__(self, row, objects):
        self.here, self.look = row["pose_aligned"][:2], row["facing_aligned"]
        self.labels = [str(label) for label in objects["label"]]
        self.boxes = objects["box_aligned"]

    def bearing(self, i):
        """Degrees to the left of the direction of view."""
        to = self.boxes[i, :2] - self.here
        return np.rad2deg(np.arctan2(self.look[0] * to[1] - self.look[1] * to[0], self.look @ to))

    def way(self, i):
        return QUARTERS[int(np.round(self.bearing(i) / 90)) % 4]

    def distance(self, i):
        outside = np.abs(self.here - self.boxes[i, :2]) - self.boxes[i, 3:5] / 2
        return np.linalg.norm(np.maximum(outside, 0))

    def one(self, label):
        (i,) = self.all(label)
        return i

    def all(self, label):
        return [
            i for i, known in enumerate(self.labels) if label in (known, known + "s", known + "es", known[:-1] + "ves")
        ]

    def answer(self, question):
        """What the geometry says."""
        if m := re.fullmatch(rf"What is the closest thing ({WAY})\?", question):
            return self.labels[min((i for i in range(len(self.labels)) if self.way(i) == m[1]), key=self.distance)]
        if m := re.fullmatch(rf"Is there an? (.+) ({WAY})\?", question):
            return "yes" if m[2] in map(self.way, self.all(m[1])) else "no"
        if m := re.fullmatch(rf"How many (.+) are ({WAY})\?", question):
            return self.number(sum(self.way(i) == m[2] for i in self.all(m[1])))
        if m := re.fullmatch(r"How many (.+) are in this room\?", question):
            return self.number(len(self.all(m[1])))
        if m := re.fullmatch(r"Which direction should I go to reach the (.+)\?", question):
            return ("forward", "left", "backward", "right")[QUARTERS.index(self.way(self.one(m[1])))]
        if m := re.fullmatch(rf"Can I find the (.+) ({WAY})\?", question):
            return "yes" if self.way(self.one(m[1])) == m[2] else "no"
        if m := re.fullmatch(r"Do I have to turn left to face the (.+)\?", question):
            return "yes" if self.way(self.one(m[1])) == "to my left" else "no"
        m = re.fullmatch(r"Is the (.+) closer to me than the (.+)\?", question)
        return "yes" if self.distance(self.one(m[1])) < self.distance(self.one(m[2])) else "no"

    @staticmethod
    def number(count):
        return ("zero", "one", "two", "three", "four", "five", "six")[count]


def test_situations_and_answers_follow_from_mesh_labels_and_pose(dataset, scenes):
    parents = {key: ScanInfo().prepare(key, scan) for key, (scan, _, _) in scenes.items()}
    objects = {key: ScanObjects().prepare(key, scan, labels) for key, (scan, labels, _) in scenes.items()}
    table = SQA3DQuestions(dataset[0])
    rows = dict(table.build({key for key, _, _ in table.items()}, parents))
    assert len(rows) == 72
    for row in rows.values():
        standing = Standing(row, objects[str(row["scene_id"])])
        text = str(row["situation"])  # "I am facing the X, and the Y is to my left."
        ahead, beside, where = re.fullmatch(rf"I am facing the (.+), and the (.+) is ({WAY})\.", text).groups()
        assert abs(standing.bearing(standing.one(ahead))) < 5
        assert standing.way(standing.one(beside)) == where
        first, second = json.loads(str(row["alternatives"]))
        m = re.fullmatch(rf"I am looking at the (.+) with the (.+) ({WAY})\.", first)
        assert (standing.one(m[1]), standing.way(standing.one(m[2]))) == (standing.one(ahead), m[3])
        m = re.fullmatch(rf"Standing with the (.+) ({WAY}), I have the (.+) in front of me\.", second)
        assert (standing.way(standing.one(m[1])), standing.one(m[3])) == (m[2], standing.one(ahead))
        assert standing.answer(str(row["question"])) == str(row["answer"]), (text, str(row["question"]))


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

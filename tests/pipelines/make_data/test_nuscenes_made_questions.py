"""The made drive's questions have the answers that its boxes give, by another evaluation."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from pipelines.make_data.nuscenes_questions import ME, RELATIONS, STATUS, Node, ask, node, relation
from tests.pipelines.make_data.made_files import CLASSES, attributes_of
from tests.pipelines.small_nuscenes import pose


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (0, "front"), (29.999, "front"), (30.001, "front left"), (60, "front left"), (90, "front left"),
        (90.001, "back left"), (149.999, "back left"), (150.001, "back"), (180, "back"), (-179.999, "back"),
        (-150.001, "back"), (-149.999, "back right"), (-90, "back right"), (-89.999, "front right"),
        (-30.001, "front right"), (-29.999, "front"),
    ],
)  # fmt: skip
def test_relations_are_half_open_and_counter_clockwise(degrees, expected):
    angle = np.deg2rad(degrees)
    x, y = (0.0, np.sign(degrees)) if abs(degrees) == 90 else (np.cos(angle), np.sin(angle))
    one = Node("car", "parked", 5 + 3 * float(x), -2 + 3 * float(y))
    assert relation(one, Node("bus", "moving", 5, -2)) == expected
    assert relation(Node("bus", "moving", 5, -2), Node("car", "", 5, -2)) is None


def test_answers_follow_from_the_graph_by_another_evaluation():
    """Questions are parsed back and answered with loops over the nodes."""
    rng = np.random.default_rng(0)
    kinds = [("car", "vehicle.parked"), ("car", "vehicle.moving"), ("bus.rigid", "vehicle.stopped"),
             ("truck", "vehicle.moving"), ("bicycle", "cycle.with_rider"), ("trailer", "vehicle.parked")]  # fmt: skip
    seen, before = {}, Counter()
    for _ in range(25):
        picks = [kinds[i] for i in rng.integers(0, len(kinds), 7)]
        nodes = [node(f"vehicle.{kind}", state, rng.uniform(-30, 30, 3)) for kind, state in picks]
        nodes += [node("movable_object.barrier", "", rng.uniform(-30, 30, 3))]
        for question in ask(rng, nodes, before):
            answer = answered(question["question"], nodes)
            assert answer == question["answer"], question
            key = question["template_type"], question["num_hop"]
            seen[key] = seen.get(key, 0) + 1
    kinds = ("exist", "count", "object", "status", "comparison")
    assert set(seen) == {(kind, hop) for kind in kinds for hop in (0, 1)}


STATES = "moving|parked|stopped|not standing|standing|with rider|without rider"
KINDS = "car|truck|bus|trailer|construction vehicle|pedestrian|motorcycle|bicycle|traffic cone|barrier|thing"


def answered(text, nodes):
    """Answer a question from its words alone."""
    text = re.sub(r"\b(buses)\b", "bus", text.rstrip("?"))
    text = re.sub(rf"\b({KINDS})s\b", r"\1", text)
    where = "|".join(sorted(RELATIONS, key=len, reverse=True))
    plain = rf"(?:the |an? )?((?:(?:{STATES}) )?(?:{KINDS}))"

    def fitting(words, among):
        kind = re.search(rf"({KINDS})$", words)[1]
        state = words[: -len(kind)].strip()
        return [n for n in among if kind in ("thing", n.kind) and state in ("", n.status)]

    def only(words):
        """The node of a noun phrase, with or without a relation."""
        words = words.strip()
        if words == "me":
            return ME
        match = re.fullmatch(rf"{plain} that is both to the ({where}) of (.+) and the ({where}) of (.+)", words)
        if match:
            a, b = only(match[3]), only(match[5])
            found = [n for n in beside(match[1], a, match[2]) if n in beside(match[1], b, match[4])]
        elif match := re.fullmatch(rf"{plain} to the ({where}) of (.+)", words):
            found = beside(match[1], only(match[3]), match[2])
        else:
            match = re.fullmatch(plain, words)
            assert match, words
            found = fitting(match[1], nodes)
        assert len(found) == 1, words
        return found[0]

    def beside(words, to, direction):
        return [n for n in fitting(words, nodes) if n is not to and relation(n, to) == direction]

    def is_(truth):
        return "yes" if truth else "no"

    if match := re.fullmatch(rf"Are there any {plain}|Are any {plain} visible", text):
        return is_(fitting(match[1] or match[2], nodes))
    if match := re.fullmatch(
        rf"(?:Are there any|(How many|What number of)) {plain}(?: are)? to the ({where}) of (.+)", text
    ):
        found = beside(match[2], only(match[4]), match[3])
        return len(found) if match[1] else is_(found)
    if match := re.fullmatch(rf"There is {plain}; are there any {plain} to the ({where}) of it", text):
        return is_(beside(match[2], only(match[1]), match[3]))
    if match := re.fullmatch(rf"(?:How many|What number of) {plain} are there", text):
        return len(fitting(match[1], nodes))
    if match := re.fullmatch(
        rf"(Is there another|Are there any other|How many other|What number of other) {plain} "
        r"(?:that has|of|have|are in|are of) the same status as (.+)",
        text,
    ):
        one = only(match[3])
        found = [n for n in fitting(match[2], nodes) if n is not one and n.status == one.status]
        return is_(found) if match[1].startswith(("Is", "Are")) else len(found)
    if match := re.fullmatch(
        r"What is the status of (.+)|What status is (.+)|(.+) is in what status|There is (.+); what is its status", text
    ):
        return only(next(filter(None, match.groups())).replace("The ", "the ")).status
    if match := re.fullmatch(r"What is (.+)|(.+) is what|There is (.+); what is it", text):
        return only(next(filter(None, match.groups())).replace("The ", "the ")).kind
    match = re.fullmatch(
        r"Is the status of (.+) the same as (.+)|Do (.+) and (.+) have the same status"
        r"|Does (.+) have the same status as (.+)",
        text,
    )
    assert match, text
    one, other = filter(None, match.groups())
    return is_(only(one).status == only(other).status)


@pytest.mark.blender
def test_question_files_are_official_and_their_counts_hold_by_the_devkit(made, devkit):
    out, summary = made
    train, val = (
        json.loads((out / "questions" / f"NuScenes_{split}_questions.json").read_text())["questions"]
        for split in ("train", "val")
    )
    assert len(train) == summary["train questions"] == 28
    assert val == []
    words = {"yes", "no", *CLASSES, *STATUS.values(), *range(11)}
    assert {q["sample_token"] for q in train} == {s["token"] for s in devkit.sample}
    checked = 0
    for question in train:
        assert question["answer"] in words
        assert question["num_hop"] in (0, 1)
        assert 5 <= len(question["question"].split()) <= 35
        nodes = []
        sample = devkit.get("sample", question["sample_token"])
        ego = devkit.get("ego_pose", devkit.get("sample_data", sample["data"]["LIDAR_TOP"])["ego_pose_token"])
        for token in sample["anns"]:
            annotation = devkit.get("sample_annotation", token)
            place = np.linalg.inv(pose(ego)) @ [*annotation["translation"], 1]
            if annotation["num_lidar_pts"]:
                attribute = "".join(attributes_of(devkit, annotation))
                nodes.append(node(annotation["category_name"], attribute, place[:3]))
        assert answered(question["question"], [n for n in nodes if n]) == question["answer"]
        checked += 1
    assert checked == 28

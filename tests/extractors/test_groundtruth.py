"""Annotated objects as words, and word vectors from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.base import Weights, recipe
from extractors.boxes3d import CLASSES
from extractors.errors import InvalidValues, WeightsError
from extractors.groundtruth import STATUS, GroundTruth
from extractors.inputs import Annotations
from extractors.word_vectors import word_vectors
from storage.schema import Record

WORDS = sorted(
    {word for text in [*CLASSES, *STATUS.values()] for word in text.replace("_", " ").split()}
)  # fmt: skip


def glove(path: Path, size: int = 3, words: list[str] = WORDS, head: str = "") -> Weights:
    """A file in which the vector of the i-th word is i, i / 2, i / 4 ..."""
    lines = [" ".join([word, *(str(i / 2**k) for k in range(size))]) for i, word in enumerate(words)]
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return Weights(str(path))


def vector(text: str, size: int = 3) -> np.ndarray:
    places = [WORDS.index(word) for word in text.split()]
    return np.array([np.mean(places) / 2**k for k in range(size)]) if places else np.zeros(size)


def annotations(rows: list[dict[str, Any]]) -> Annotations:
    default = {
        "box": [1, 2, 3, 4, 2, 1.5, 0.5],
        "velocity": [1, -2],
        "name": "car",
        "attribute": "",
        "lidar": 5,
        "radar": 0,
    }
    rows = [{**default, "token": f"t{i}", **row} for i, row in enumerate(rows)]
    column = {name: [row[name] for row in rows] for name in [*default, "token"]}
    return Annotations(
        np.array(column["box"], np.float64).reshape(-1, 7),
        np.array(column["velocity"], np.float64).reshape(-1, 2),
        tuple(column["name"]),
        ("vehicle.car",) * len(rows),
        tuple(column["attribute"]),
        np.array(column["lidar"], np.int64),
        np.array(column["radar"], np.int64),
        tuple(column["token"]),
    )


def describe(rows: list[dict[str, Any]], weights: Weights = Weights("untrained:0"), **settings: Any) -> Record:  # noqa: B008
    stage = GroundTruth(**{"vectors": weights, "size": 3, **settings})
    (record,) = stage.load()([stage.prepare("frame", annotations(rows))])
    return stage.schema.check(record, "groundtruth")


def test_features_are_the_vectors_of_class_and_status(tmp_path: Path) -> None:
    rows = [
        ("construction_vehicle", "vehicle.parked", "construction vehicle", "parked"),
        ("bicycle", "cycle.without_rider", "bicycle", "without rider"),
        ("motorcycle", "cycle.with_rider", "motorcycle", "with rider"),
        ("pedestrian", "pedestrian.sitting_lying_down", "pedestrian", "not standing"),
        ("pedestrian", "pedestrian.standing", "pedestrian", "standing"),
        ("pedestrian", "pedestrian.moving", "pedestrian", "moving"),
        ("truck", "vehicle.stopped", "truck", "stopped"),
        ("bus", "vehicle.moving", "bus", "moving"),
        ("traffic_cone", "", "traffic cone", ""),
        ("barrier", "", "barrier", ""),
    ]
    record = describe([{"name": row[0], "attribute": row[1]} for row in rows], glove(tmp_path / "glove.txt"))
    assert record["status"].tolist() == [row[3] for row in rows]
    expected = [np.concatenate([vector(row[2]), vector(row[3])]) for row in rows]
    np.testing.assert_allclose(record["feature"], expected, rtol=1e-6)
    assert not record["feature"][8, 3:].any()
    assert [CLASSES[label] for label in record["label"]] == record["class_name"].tolist() == [row[0] for row in rows]


def test_boxes_stand_on_the_ground_and_carry_their_tags() -> None:
    record = describe([{}])
    np.testing.assert_allclose(record["box"], [[1, 2, 2.25, 4, 2, 1.5, 0.5]])
    assert (record["frame"][0], record["convention"][0], record["score"][0]) == ("lidar", "mmdet3d-1.0", 1)


def test_unknown_velocity_is_zero_and_flagged() -> None:
    record = describe([{}, {"velocity": [np.nan, np.nan]}, {"velocity": [0, 0]}])
    assert record["velocity"].tolist() == [[1, -2], [0, 0], [0, 0]]
    assert record["velocity_known"].tolist() == [True, False, True]


def test_objects_without_points_are_left_out_unless_all_are_asked_for() -> None:
    rows = [{"lidar": 0}, {"lidar": 0, "radar": 2}, {"lidar": 3}]
    few, all_of_them = describe(rows), describe(rows, keep="all")
    assert few["token"].tolist() == ["t1", "t2"]
    assert all_of_them["token"].tolist() == ["t0", "t1", "t2"]
    assert all_of_them["valid"].tolist() == [False, True, True]
    assert all_of_them["points"].tolist() == [0, 2, 3]
    recipes = [recipe(GroundTruth(vectors=Weights("untrained:0"), keep=keep)) for keep in ("points", "all")]
    assert [r["settings"]["keep"] for r in recipes] == ["points", "all"]


def test_only_the_ten_classes_are_kept_and_as_many_as_there_are() -> None:
    record = describe([{"name": ""}, *({} for _ in range(130)), {"name": "", "box": [np.nan] * 7}])
    assert record["feature"].shape == (130, 6)
    assert describe([])["feature"].shape == (0, 6)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"name": "tram"}, "frame: objects of class 'tram'"),
        ({"attribute": "vehicle.flying"}, "frame: attribute 'vehicle.flying'"),
        ({"box": [0, 0, np.nan, 1, 1, 1, 0]}, r"annotation 1 \(t1\) is not finite"),
    ],
)
def test_annotations_that_nuscenes_does_not_have_are_refused_by_name(row: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValues, match=text):
        describe([{}, row])


def test_a_source_that_does_not_tell_attributes_is_refused_unless_status_is_omitted() -> None:
    rows = [{"token": ""}, {"token": ""}]
    with pytest.raises(InvalidValues, match="groundtruth.status=omit"):
        describe(rows)
    record = describe(rows, status="omit")
    assert record["status"].tolist() == ["", ""]
    assert not record["feature"][:, 3:].any()
    assert not describe([{"attribute": "vehicle.parked"}], status="omit")["feature"][:, 3:].any()


def test_a_file_is_read_only_as_far_as_needed(tmp_path: Path) -> None:
    weights = glove(tmp_path / "vectors.txt", words=[*WORDS, "zebra"])
    with (tmp_path / "vectors.txt").open("ab") as file:
        file.write(b"car not a number\n\xff\xfe\n")
    found = word_vectors(weights, WORDS, 3)
    assert sorted(found) == WORDS
    assert found["car"].tolist() == vector("car").tolist()


def test_word2vec_text_has_a_first_line_of_counts(tmp_path: Path) -> None:
    weights = glove(tmp_path / "vectors.txt", head=f"{len(WORDS)} 3\n")
    np.testing.assert_array_equal(word_vectors(weights, ["car"], 3)["car"], vector("car"))


def test_tokens_with_blanks_and_other_scripts_are_passed_over(tmp_path: Path) -> None:
    weights = glove(tmp_path / "vectors.txt", head="dog 1 2 3\n. . . 1 2 3\nat name@x 1 2 3\né 1 2 3\n")
    assert sorted(word_vectors(weights, WORDS, 3)) == WORDS


@pytest.mark.parametrize(
    ("text", "size", "problem"),
    [
        ("car 1 2 3\n", 3, "no vector for bus; give a larger file"),
        ("car 1 2 3\nbus 1 2 3\n", 4, "vectors of 3 numbers, 4 expected; set the stage's size=3"),
        ("dog 1 2 3\ncar 1 2\nbus 1 2 3\n", 3, "vectors of 2 numbers"),
        ("dog 1 2 3\ncar 1 x 3\nbus 1 2 3\n", 3, "line 2 is not a word and numbers"),
        ("dog 1 2 3\ncar 1 nan 3\nbus 1 2 3\n", 3, "line 2: the vector of car is not finite"),
        ("", 3, "no vector for bus, car"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, text: str, size: int, problem: str) -> None:
    (tmp_path / "vectors.txt").write_text(text)
    with pytest.raises(WeightsError, match=problem):
        word_vectors(Weights(str(tmp_path / "vectors.txt")), ["car", "bus"], size)
    with pytest.raises(WeightsError, match="no file"):
        word_vectors(Weights(str(tmp_path / "none.txt")), ["car"], size)


def test_made_up_vectors_depend_on_seed_and_word_alone_and_say_so() -> None:
    some, more = (word_vectors(Weights("untrained:1"), words, 300) for words in (["car"], ["bus", "car"]))
    assert np.array_equal(some["car"], more["car"])
    assert not np.array_equal(more["bus"], more["car"])
    assert not np.array_equal(some["car"], word_vectors(Weights("untrained:2"), ["car"], 300)["car"])
    assert np.linalg.norm(some["car"]) == pytest.approx(1, abs=0.2)
    assert recipe(GroundTruth(vectors=Weights("untrained:1")))["weights"] == {"vectors": "untrained:1"}


def test_a_file_counts_by_content(tmp_path: Path) -> None:
    names = [recipe(GroundTruth(vectors=glove(tmp_path / name)))["weights"]["vectors"] for name in ("a.txt", "b.txt")]
    assert names[0] == names[1]
    other = recipe(GroundTruth(vectors=glove(tmp_path / "c.txt", size=4)))["weights"]["vectors"]
    assert other != names[0]
    assert other.startswith("sha256:")


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        GroundTruth(vectors=Weights("untrained:0"), size=0)

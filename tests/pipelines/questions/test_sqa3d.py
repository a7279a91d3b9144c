"""SQA3D as a table: join, poses, types, vocabulary, and files that are not as they should be."""

import json
from collections import Counter

import numpy as np
import pytest

from extractors.errors import InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from pipelines.questions.answers import Vocabulary
from pipelines.questions.sqa3d import SQA3DQuestions
from pipelines.questions.sqa3d_situations import SQA3DSituations
from pipelines.questions.sqa3d_text import mcan_tokens, question_type, scanqa_tokens

HALF = float(np.sqrt(0.5))
QUARTER = np.array([[0, -1, 0, 100], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])


def scan_info(*, axis_align=QUARTER, frame="scan"):
    return {
        "bbox_center": np.array([10.0, 20, 1.5]),
        "axis_align": np.eye(4) if axis_align is None else axis_align,
        "has_axis_align": np.array(axis_align is not None),
        "frame": np.array(frame, object),
    }


def question(number, scene="scene0000_00", text="What is to my left?", situation="I am here.", **more):
    return {"question_id": number, "scene_id": scene, "question": text, "situation": situation,
            "alternative_situation": ["Here I am."], **more}  # fmt: skip


def annotation(number, answer="table", scene="scene0000_00", **more):
    return {
        "question_id": number, "scene_id": scene,
        "answers": [{"answer": answer, "answer_confidence": "yes", "answer_id": 1}],
        "rotation": {"_w": HALF, "_z": HALF, "_y": 0, "_x": 0}, "position": {"z": 0, "y": 2, "x": 1}, **more,
    }  # fmt: skip


def save(folder, questions, annotations=None, split="train"):
    folder.mkdir(parents=True, exist_ok=True)
    annotations = (
        [annotation(q["question_id"], scene=q["scene_id"]) for q in questions] if annotations is None else annotations
    )
    (folder / f"v1_balanced_questions_{split}_scannetv2.json").write_text(json.dumps({"questions": questions}))
    (folder / f"v1_balanced_sqa_annotations_{split}_scannetv2.json").write_text(
        json.dumps({"annotations": annotations})
    )
    return folder


def build(table, parents=None, keys=None):
    parents = {"scene0000_00": scan_info()} if parents is None else parents
    keys = {key for key, _, _ in table.items()} if keys is None else keys
    return {key: table.schema.check(record, key) for key, record in table.build(keys, parents)}


def test_a_question_is_joined_with_its_annotation_and_its_scan(tmp_path):
    questions = [question(220602000002), question(220602000001, text="Is it dark?")]
    save(tmp_path, questions, [annotation(220602000001, "no"), annotation(220602000002)])
    records = build(SQA3DQuestions(tmp_path))
    assert sorted(records) == ["220602000001", "220602000002"]
    row = records["220602000002"]
    assert (str(row["answer"]), str(row["split"]), str(row["note"])) == ("table", "train", "")
    assert json.loads(str(row["alternatives"])) == ["Here I am."]
    assert row["question_id"].dtype == np.int64
    assert str(records["220602000001"]["answer"]) == "no"


def test_poses_are_given_in_all_frames_and_read_by_key(tmp_path):
    row = build(SQA3DQuestions(save(tmp_path, [question(1)])))["1"]
    np.testing.assert_allclose(row["position"], [1, 2, 0])
    np.testing.assert_allclose(row["rotation"], [0, 0, HALF, HALF])
    np.testing.assert_allclose(row["pose_scan"], [11, 22, 1.5, 0, 0, HALF, HALF])
    np.testing.assert_allclose(row["pose_aligned"], [78, 11, 1.5, 0, 0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(row["facing_scan"], [0, -1], atol=1e-12)
    np.testing.assert_allclose(row["facing_aligned"], [1, 0], atol=1e-12)
    assert (str(row["pose_missing"]), bool(row["alignment_known"])) == ("", True)


@pytest.mark.parametrize(
    ("parents", "reason", "aligned"),
    [({}, "no scan_info record", False),
     ({"scene0000_00": scan_info(frame="aligned", axis_align=None)}, "aligned frame only", False),
     ({"scene0000_00": scan_info(axis_align=None)}, "", True)],
)  # fmt: skip
def test_a_pose_that_cannot_be_known_is_null_with_a_reason(tmp_path, parents, reason, aligned):
    row = build(SQA3DQuestions(save(tmp_path, [question(1)])), parents)["1"]
    assert reason in str(row["pose_missing"])
    assert np.isfinite(row["pose_aligned"]).all() == aligned
    assert np.isfinite(row["pose_scan"]).all() == aligned
    assert not row["alignment_known"]
    np.testing.assert_allclose(row["facing_scan"], [0, -1], atol=1e-12)  # needs no mesh


def test_a_rotation_without_direction_is_null_with_a_reason(tmp_path):
    broken = annotation(1, rotation={"_x": 0, "_y": 0, "_z": 0, "_w": 0})
    row = build(SQA3DQuestions(save(tmp_path, [question(1)], [broken])))["1"]
    assert "no direction" in str(row["pose_missing"])
    assert np.isnan(row["facing_scan"]).all()


def test_a_question_without_annotation_stays_without_answer(tmp_path):
    row = build(SQA3DQuestions(save(tmp_path, [question(1)], [annotation(2)])))["1"]
    assert (str(row["answer"]), str(row["note"]), bool(row["has_annotation"])) == ("", "no annotation", False)
    assert np.isnan(row["pose_scan"]).all()
    assert row["answer_id_dict"] == -1
    assert row["answer_weight"] == 0


def test_an_id_that_occurs_twice_is_one_row_and_says_so(tmp_path):
    questions = [question(1), question(1, text="Is it?"), question(2), question(2)]
    save(tmp_path, questions, [annotation(1), annotation(2), annotation(2)])
    records = build(SQA3DQuestions(tmp_path))
    assert str(records["1"]["question"]) == "What is to my left?"
    assert str(records["1"]["note"]) == "2 questions with this id, which differ: the first counts"
    assert str(records["2"]["note"]) == (
        "2 questions with this id: the first counts; 2 annotations with this id: the first counts"
    )


def test_an_annotation_of_another_scene_is_not_taken(tmp_path):
    row = build(SQA3DQuestions(save(tmp_path, [question(1)], [annotation(1, scene="scene0001_00")])))["1"]
    assert str(row["note"]) == "its annotation is of scene0001_00: left out"
    assert not row["has_annotation"]


def test_questions_with_equal_texts_share_a_group(tmp_path):
    questions = [question(9), question(4), question(5, scene="scene0001_00"), question(6, text="Is it?")]
    records = build(SQA3DQuestions(save(tmp_path, questions)))
    assert {k: int(r["dup_group"]) for k, r in records.items()} == {"9": 4, "4": 4, "5": 5, "6": 6}


def test_only_the_rows_asked_for_are_made_and_count_the_whole_vocabulary(tmp_path):
    save(tmp_path, [question(i) for i in range(6)], [annotation(i, a) for i, a in enumerate("aabbbc")])
    save(tmp_path, [question(7)], [annotation(7, "d")], split="test")
    records = build(SQA3DQuestions(tmp_path), keys={"0", "7"})
    assert sorted(records) == ["0", "7"]
    assert records["0"]["answer_id_dict"] == 1  # b is more frequent
    assert records["0"]["answer_id_scanqa"] == 0
    assert records["0"]["answer_weight"] == np.float32(0.6)
    assert str(records["7"]["split"]) == "test"


def test_rare_answers_are_out_of_a_built_vocabulary(tmp_path):
    save(tmp_path, [question(i) for i in range(3)], [annotation(i, a) for i, a in enumerate("aab")])
    records = build(SQA3DQuestions(tmp_path, min_count=2))
    assert [bool(records[k]["answer_oov"]) for k in "012"] == [False, False, True]
    assert records["2"]["answer_id_dict"] == -1


def test_official_vocabularies_number_answers_each_in_its_own_way(tmp_path):
    save(tmp_path, [question(1), question(2)], [annotation(1, "TV"), annotation(2, "sofa")])
    (tmp_path / "answer_dict.json").write_text(json.dumps([{"yes": 0, "TV": 1}, {"0": "yes", "1": "TV"}]))
    (tmp_path / "answer_counter.json").write_text(json.dumps(["yes"] * 5 + ["sofa"] * 3 + ["TV"]))
    table = SQA3DQuestions(
        tmp_path, answer_dict=tmp_path / "answer_dict.json", answer_counter=tmp_path / "answer_counter.json"
    )
    records = build(table)
    assert (records["1"]["answer_id_dict"], records["1"]["answer_id_scanqa"]) == (1, 0)
    assert (records["2"]["answer_id_dict"], records["2"]["answer_id_scanqa"]) == (-1, 1)
    assert bool(records["2"]["answer_oov"])
    assert [records[k]["answer_weight"] for k in "12"] == [np.float32(0.3), np.float32(0.9)]


@pytest.mark.parametrize("text", ['["a"]', '[{"a": 0, "b": 0}]', "{}x"])
def test_a_damaged_vocabulary_is_refused(tmp_path, text):
    (tmp_path / "answer_dict.json").write_text(text)
    with pytest.raises(UnsupportedFile, match="answer_dict"):
        Vocabulary.make({}, tmp_path / "answer_dict.json", None, 1)


def test_what_decides_a_row_changes_its_digest_and_no_other(tmp_path):
    def digests(questions, answers):
        save(tmp_path, questions, [annotation(q["question_id"], a) for q, a in zip(questions, answers, strict=True)])
        return {key: digest for key, digest, _ in SQA3DQuestions(tmp_path).items()}

    rows = [question(1), question(2, text="Is it?")]
    before = digests(rows, "ab")
    assert digests(rows, "ab") == before
    after = digests([rows[0], question(2, text="Is it so?")], "ab")
    assert after["1"] == before["1"]
    assert after["2"] != before["2"]
    vocabulary = digests(rows, "ac")  # the classes of all answers may move
    assert vocabulary["1"] != before["1"]


def test_items_and_records_agree_on_keys_and_parents(tmp_path):
    save(tmp_path, [question(1), question(2, scene="scene0001_00")])
    table = SQA3DQuestions(tmp_path)
    assert {(key, parent) for key, _, parent in table.items()} == {("1", "scene0000_00"), ("2", "scene0001_00")}
    assert {(key, str(r["scene_id"])) for key, r in build(table).items()} == {
        ("1", "scene0000_00"),
        ("2", "scene0001_00"),
    }


def test_the_folders_of_the_release_are_found(tmp_path):
    save(tmp_path / "sqa_task" / "balanced", [question(1)])
    assert [key for key, _, _ in SQA3DQuestions(tmp_path).items()] == ["1"]
    with pytest.raises(MissingFile, match="v1_balanced_questions_val"):
        list(SQA3DQuestions(tmp_path, splits=("val",)).items())


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [('{"questions": [{"question_id": 1', TruncatedFile, "download it again"),
     ("[]", InvalidValues, "no list 'questions'"),
     ('{"questions": [{"question_id": 1, "scene_id": "s", "situation": "x"}]}', InvalidValues,
      r"questions\[0\] has no 'question'"),
     ('{"questions": [{"question_id": "1"}]}', InvalidValues, "no 'question_id' of type int")],
)  # fmt: skip
def test_a_damaged_file_is_named_with_its_entry(tmp_path, text, error, says):
    (tmp_path / "v1_balanced_questions_val_scannetv2.json").write_text(text)
    with pytest.raises(error, match=says):
        list(SQA3DQuestions(tmp_path).items())


def test_situations_of_the_localization_task_are_placed(tmp_path):
    entries = [
        {k: v for k, v in {**question(0), **annotation(0)}.items() if k not in ("question", "question_id", "answers")},
    ]
    entries.append({**entries[0], "scene_id": "scene0001_00"})
    (tmp_path / "loc.json").write_text(json.dumps({"annotations": entries}))
    table = SQA3DSituations(tmp_path / "loc.json")
    assert [(key, parent) for key, _, parent in table.items()] == [
        ("scene0000_00/00000", "scene0000_00"), ("scene0001_00/00001", "scene0001_00"),
    ]  # fmt: skip
    records = build(table)
    np.testing.assert_allclose(records["scene0000_00/00000"]["pose_aligned"][:3], [78, 11, 1.5])
    assert "no scan_info" in str(records["scene0001_00/00001"]["pose_missing"])


@pytest.mark.parametrize(
    ("text", "a", "b", "c"),
    [("What is it?", "what", "what", "what"), ("What's that?", "what", "others", "what"), ("Is it?", "is", "is", "is"),
     ("which one", "which", "which", "which"), ("Can't I?", "others", "others", "can"),
     ("", "others", "others", "others"),
     ("Am I, here?", "others", "others", "others"), ("How, then?", "how", "others", "how")],
)  # fmt: skip
def test_question_types_by_three_rules(text, a, b, c):
    assert [question_type(text, rule) for rule in "abc"] == [a, b, c]


def test_tokens_are_those_of_each_branch():
    text = "I am at the chair, near a brown-ish door. What's up?"
    assert scanqa_tokens(text) == [
        "I", "am", "at", "the", "chair,", "near", "a", "brown-ish", "door", ".", "What's", "up", "?",
    ]  # fmt: skip
    assert mcan_tokens(text) == [
        "i", "am", "at", "the", "chair", "near", "a", "brown", "ish", "door", "what", "s", "up",
    ]  # fmt: skip


def test_the_real_test_split_gives_its_published_counts(data_dir):
    table = SQA3DQuestions(data_dir / "sqa3d")
    rows = list(table.items())
    assert len(rows) == len({key for key, _, _ in rows}) == 3519
    assert len({parent for _, _, parent in rows}) == 67
    records = build(table, {"scene0050_00": scan_info()})
    assert len(records) == 3519
    types = {rule: Counter(str(r[f"type_{rule}"]) for r in records.values()) for rule in "abc"}
    names = ("what", "is", "how", "can", "which", "others")
    assert [types["a"][n] for n in names] == [1147, 652, 465, 338, 351, 566]
    assert [types["b"][n] for n in names] == [1144, 652, 465, 338, 351, 569]
    assert [types["c"][n] for n in names] == [1147, 652, 465, 338, 351, 566]
    assert Counter(len(json.loads(str(r["alternatives"]))) for r in records.values()) == {2: 3474, 1: 25, 0: 20}
    assert len({(str(r["scene_id"]), str(r["situation"])) for r in records.values()}) == 719
    poses = {(str(r["scene_id"]), *r["position"], *r["rotation"]) for r in records.values()}
    assert len(poses) == 719
    texts = {
        (str(r["scene_id"]), text)
        for r in records.values() for text in [str(r["situation"]), *json.loads(str(r["alternatives"]))]
    }  # fmt: skip
    assert len(texts) == 2143
    groups = Counter(int(r["dup_group"]) for r in records.values())
    assert len(groups) == 3516
    assert str(records["220602002937"]["answer"]) == "backward"
    assert records["220602002937"]["dup_group"] == records["220602028420"]["dup_group"]
    assert all(r["position"][2] == 0 for r in records.values())
    placed = [r for r in records.values() if str(r["scene_id"]) == "scene0050_00"]
    assert all(np.isfinite(r["pose_aligned"]).all() for r in placed)
    assert len(placed) == sum(parent == "scene0050_00" for _, _, parent in rows) > 0
    assert all(np.isfinite(r["facing_scan"]).all() for r in records.values())

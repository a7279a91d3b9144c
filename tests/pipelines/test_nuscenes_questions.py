"""NuScenes-QA's questions as a table: keys, answers, tokens, and files that are not as they should be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage
from extractors.errors import InputError, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from pipelines.questions.nuscenes import ANSWERS, TYPES, Coverage, NuScenesQuestions, question_tokens
from storage.schema import Record
from tests.pipelines.running import Runs, counts, job


def question(sample: str = "s1", **change: Any) -> dict[str, Any]:
    return {"sample_token": sample, "question": "Are there any cars?", "answer": "yes", "template_type": "exist",
            "num_hop": 0, **change}  # fmt: skip


def save(folder: Path, questions: list[dict[str, Any]], split: str = "val") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"NuScenes_{split}_questions.json").write_text(json.dumps({"info": {}, "questions": questions}))
    return folder


def build(table: NuScenesQuestions, keys: set[str] | None = None) -> dict[str, Record]:
    keys = {key for key, _, _ in table.items()} if keys is None else keys
    return {key: table.schema.check(record, key) for key, record in table.build(keys, {})}


def test_every_question_has_a_key_of_its_own_also_where_texts_repeat(tmp_path: Path) -> None:
    save(tmp_path, [question("s1"), question("s2"), question("s1"), question("s1", answer="no")])
    save(tmp_path, [question("s1"), question("s3")], "train")
    table = NuScenesQuestions(tmp_path)
    items = list(table.items())
    assert [key for key, _, _ in items] == [
        *("train/s1/000", "train/s3/000", "val/s1/000", "val/s2/000", "val/s1/001", "val/s1/002")
    ]
    assert [parent for _, _, parent in items] == ["s1", "s3", "s1", "s2", "s1", "s1"]
    assert len({digest for _, digest, _ in items}) == 6
    records = build(table)
    assert sorted(records) == sorted(key for key, _, _ in items)
    in_file = sorted((r for k, r in records.items() if k.startswith("val")), key=lambda r: int(r["place"]))
    assert [str(r["answer"]) for r in in_file] == ["yes", "yes", "yes", "no"]
    assert [str(r["sample_token"]) for r in in_file] == ["s1", "s2", "s1", "s1"]


def test_answers_are_text_and_numbered_by_the_official_classes(tmp_path: Path) -> None:
    save(tmp_path, [question(answer=3, template_type="count"), question(answer="3"), question(answer="traffic cone"),
                    question(answer="zebra"), question(answer=11)])  # fmt: skip
    found = [(str(r["answer"]), int(r["answer_id"])) for _, r in sorted(build(NuScenesQuestions(tmp_path)).items())]
    assert found == [("3", 3), ("3", 3), ("traffic cone", 25), ("zebra", -1), ("11", -1)]


def test_the_official_classes_are_thirty_and_one_to_one() -> None:
    vocabulary = NuScenesQuestions(Path()).vocabulary()
    assert len(ANSWERS) == len(set(ANSWERS)) == len(vocabulary) == 30
    assert sorted(vocabulary.values()) == list(range(30))
    some = {"0": 0, "10": 10, "no": 11, "yes": 12, "barrier": 13, "construction vehicle": 17, "moving": 19,
            "not standing": 20, "standing": 23, "truck": 27, "with rider": 28, "without rider": 29}  # fmt: skip
    assert {answer: vocabulary[answer] for answer in some} == some


def test_a_file_of_classes_is_read_and_must_be_one_to_one(tmp_path: Path) -> None:
    save(tmp_path, [question()])
    path = tmp_path / "answer_dict.json"
    table = NuScenesQuestions(tmp_path, answer_dict=path)
    path.write_text(json.dumps([{"yes": 0, "no": 1}, {"0": "yes", "1": "no"}]))
    assert int(build(table)["val/s1/000"]["answer_id"]) == 0
    before = [digest for _, digest, _ in table.items()]
    path.write_text(json.dumps([{"yes": 1, "no": 0}, {"1": "yes", "0": "no"}]))
    assert before != [digest for _, digest, _ in table.items()]
    for wrong in (
        [{"yes": 0, "no": 0}, {"0": "yes"}], [{"yes": 0, "no": 2}, {"0": "yes", "2": "no"}], {"yes": 0},
        [{"yes": 0, "no": 1}, {"0": "no", "1": "yes"}], [{"yes": 0, "no": 1}, {"0": "yes"}],
        [{"yes": "0"}, {"0": "yes"}],
    ):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(UnsupportedFile, match=r"answer_dict\.json"):
            table.vocabulary()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Are there any moving cars?", "are there any moving cars"),
        ("What's the half-open truck/bus; is it (parked)?", "whats the half open truck bus is it parked"),
        ('How "many": 3, #4!', "how many 3 4"),
        ("", ""),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_official_code(text: str, tokens: str) -> None:
    assert question_tokens(text) == tokens.split()


def test_rows_carry_tokens_type_and_hops(tmp_path: Path) -> None:
    words = " ".join(f"w{i}" for i in range(40))
    save(tmp_path, [question(num_hop=1, template_type="comparison", question=words, extra=[1])])
    (row,) = build(NuScenesQuestions(tmp_path)).values()
    assert (str(row["template_type"]), int(row["num_hop"]), int(row["length"])) == ("comparison", 1, 30)
    assert str(row["tokens"]) == words
    assert (str(row["question"]), str(row["split"])) == (words, "val")


def test_only_the_rows_asked_for_are_made(tmp_path: Path) -> None:
    save(tmp_path, [question(f"s{i}") for i in range(5)])
    assert set(build(NuScenesQuestions(tmp_path), {"val/s3/000", "val/nothing/000"})) == {"val/s3/000"}


def test_unknown_types_and_answers_are_kept_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, [question(template_type="riddle"), question(answer="zebra"), question()])
    with caplog.at_level(logging.WARNING, "pipelines.questions.nuscenes"):
        records = build(NuScenesQuestions(tmp_path))
    assert len(records) == 3
    assert [r.getMessage().split(": ", 1)[1] for r in caplog.records] == [
        "types that are not known: riddle",
        "answers that are not known: zebra",
    ]
    caplog.clear()
    save(tmp_path, [question(template_type=kind) for kind in TYPES])
    build(NuScenesQuestions(tmp_path))
    assert not caplog.records


def test_key_frames_with_and_without_questions_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, [question("s1"), question("s1"), question("s2")], "train")
    save(tmp_path, [question("s3"), question("elsewhere")])
    (tmp_path / "sample.json").write_text(json.dumps([{"token": f"s{i}"} for i in range(1, 8)]))
    table = NuScenesQuestions(tmp_path, samples=tmp_path / "sample.json")
    assert table.coverage() == {
        "train": Coverage(3, 2),
        "val": Coverage(2, 2),
        "": Coverage(5, 4, without=4, unknown=1),
    }
    with caplog.at_level(logging.WARNING, "pipelines.questions.nuscenes"):
        build(table)
    (said,) = caplog.records
    assert said.getMessage().endswith(
        "5 questions about 3 key frames; 4 key frames without questions, questions about 1 others"
    )
    assert NuScenesQuestions(tmp_path).coverage()[""] == Coverage(5, 4)


def test_the_files_may_be_in_a_folder_below(tmp_path: Path) -> None:
    save(tmp_path / "questions", [question()])
    assert list(build(NuScenesQuestions(tmp_path))) == ["val/s1/000"]


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ("", InputError, "empty"),
        ('{"questions": [{"sample_tok', TruncatedFile, "NuScenes_val_questions.json"),
        ("not json", UnsupportedFile, "NuScenes_val_questions.json"),
        ("[]", InvalidValues, "no list 'questions'"),
        ('{"questions": {}}', InvalidValues, "no list 'questions'"),
        ('{"questions": [3]}', InvalidValues, r"questions\[0\]"),
        (json.dumps({"questions": [question(), question(answer=None)]}), InvalidValues, r"\[1\] has no 'answer'"),
        (json.dumps({"questions": [question(answer=1.5)]}), InvalidValues, "of type str or int"),
        (json.dumps({"questions": [question(num_hop="1")]}), InvalidValues, "'num_hop' of type int"),
        (json.dumps({"questions": [question(num_hop=-1)]}), InvalidValues, "has num_hop -1"),
        (json.dumps({"questions": [question(sample_token=5)]}), InvalidValues, "'sample_token' of type str"),
    ],
)  # fmt: skip
def test_malformed_files_are_refused_by_name(tmp_path: Path, content: str, error: type, text: str) -> None:
    (tmp_path / "NuScenes_val_questions.json").write_text(content)
    with pytest.raises(error, match=text):
        list(NuScenesQuestions(tmp_path).items())


def test_no_files_are_said_with_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="NuScenes_train_questions.json or NuScenes_val_questions.json, here or in"):
        list(NuScenesQuestions(tmp_path).items())


def test_a_run_makes_the_table_and_a_changed_question_alone_again(tmp_path: Path) -> None:
    save(tmp_path / "q", [question(f"s{i}") for i in range(6)])
    runs = Runs(tmp_path)
    table = NuScenesQuestions(tmp_path / "q")
    assert counts(runs(job(None, tables=(table,))), "nuscenes_questions") == {"made": 6}
    assert counts(runs(job(None, tables=(table,))), "nuscenes_questions") == {"reused": 6}
    save(tmp_path / "q", [question(f"s{i}", answer="no" if i == 2 else "yes") for i in range(6)])
    assert counts(runs(job(None, tables=(table,))), "nuscenes_questions") == {"made": 1, "reused": 5}
    records = storage.open(runs.url)["nuscenes_questions"]
    assert str(records["val/s2/000"]["answer"]) == "no"
    assert records["val/s2/000"]["answer_id"].dtype == np.int16

"""SQA3D's questions as a table, joined with the scans they are about (Apache Beam).

One row per question, keyed by question_id: texts do not identify anything. Some situations occur in several scenes,
some questions twice, with other answers.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from extractors.errors import MissingFile
from pipelines.questions.answers import Vocabulary
from pipelines.questions.beam import quiet, runner
from pipelines.questions.sqa3d_situations import (
    POSE_COLUMNS,
    checked_entries,
    place,
    scan_frames,
    to_record,
    written_pose,
)
from pipelines.questions.sqa3d_text import mcan_tokens, question_type, scanqa_tokens
from storage.schema import Column, Record, Schema

_log = logging.getLogger(__name__)

MAX_TOKENS = 100
_FOLDERS = ("", "balanced", "sqa_task/balanced", "assets/data/sqa_task/balanced")
_QUESTIONS, _ANNOTATIONS = "questions", "sqa_annotations"  # as in the names of the files
_NEEDED = {
    _QUESTIONS: {"question_id": int, "scene_id": str, "situation": str, "question": str},
    _ANNOTATIONS: {"question_id": int, "scene_id": str, "answers": list, "position": dict, "rotation": dict},
}
_Entry = dict[str, Any]


@dataclass(frozen=True)
class SQA3DQuestions:
    """Questions, situations, answers and poses of SQA3D.

    Attributes:
        root: the folder with `v1_balanced_questions_SPLIT_scannetv2.json` and `v1_balanced_sqa_annotations_...`, or
            one above it (`sqa_task/balanced`).
        splits: which splits; one without files is left out.
        answer_dict: official `answer_dict.json`; None numbers the answers of these splits by falling frequency.
        answer_counter: official `answer_counter.json`; None counts the answers of these splits.
        min_count: without `answer_dict`, answers that are rarer are out of vocabulary.
    """

    root: Path
    splits: tuple[str, ...] = ("train", "val", "test")
    answer_dict: Path | None = None
    answer_counter: Path | None = None
    min_count: int = 1

    name: ClassVar[str] = "sqa3d_questions"
    version: ClassVar[int] = 1
    of: ClassVar[str] = "scan_info"

    @property
    def schema(self) -> Schema:
        """One row per question."""
        return Schema({
            "question_id": Column((), "int64"),
            "scene_id": Column((), "string"),
            "split": Column((), "string", doc="train, val or test"),
            "situation": Column((), "string"),
            "alternatives": Column((), "string", doc="JSON list of other texts; no official model uses them"),
            "question": Column((), "string"),
            "answer": Column((), "string", doc="first answer; empty without annotation"),
            "answers": Column((), "string", doc="JSON list"),
            "has_annotation": Column((), "bool"),
            **POSE_COLUMNS,
            "type_a": Column((), "string", doc="question type, MCAN's rule"),
            "type_b": Column((), "string", doc="question type, ClipBERT's rule"),
            "type_c": Column((), "string", doc="question type, prefix rule of 3D-VisTA"),
            "answer_id_dict": Column((), "int16", doc="class under answer_dict (MCAN, ClipBERT); -1 out of vocabulary"),
            "answer_id_scanqa": Column((), "int16", doc="class under sorted answer_counter (ScanQA); -1 if not in it"),
            "answer_oov": Column((), "bool", doc="the answer is not in answer_dict"),
            "answer_weight": Column((), "float32", doc="ScanQA's target of the gold class, by answer frequency"),
            "situation_tokens": Column((), "string", doc="ScanQA branch, separated by blanks"),
            "question_tokens": Column((), "string", doc="ScanQA branch, separated by blanks"),
            "situation_length": Column((), "int16", doc=f"number of tokens, at most {MAX_TOKENS}"),
            "question_length": Column((), "int16", doc=f"number of tokens, at most {MAX_TOKENS}"),
            "mcan_tokens": Column((), "string", doc="situation and question, MCAN branch"),
            "mcan_length": Column((), "int16", doc=f"number of tokens, at most {MAX_TOKENS}"),
            "dup_group": Column((), "int64", doc="smallest question_id with the same scene, situation and question"),
            "note": Column((), "string", doc="what is unusual about the row"),
        })  # fmt: skip

    def items(self) -> Iterator[tuple[str, bytes, str]]:
        """(question_id, digest of all that decides its row besides the scan, scene_id) of every question.

        Raises:
            InputError: a file is missing, damaged, or has an entry without the fields it must have.
        """
        rows = self._rows()
        vocabulary = self._vocabulary(_count(rows)).digest()
        groups: dict[tuple[str, str, str], int] = {}
        for row in sorted(rows, key=lambda r: r["question_id"]):
            groups.setdefault(_text(row), row["question_id"])
        for row in rows:
            content = json.dumps([row, groups[_text(row)]], sort_keys=True)
            digest = hashlib.sha256(content.encode() + vocabulary).digest()
            yield str(row["question_id"]), digest, row["scene_id"]

    def vocabulary(self) -> Vocabulary:
        """The answer classes of this table: read from the files given, else built from the annotations."""
        return self._vocabulary(_count(self._rows()))

    def build(self, keys: set[str], parents: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        """Records of the questions asked for, by a Beam pipeline over all of them.

        Args:
            keys: question ids.
            parents: records of `scan_info` by scene; the poses of a scene that lacks one are null.
        """
        with quiet():
            import apache_beam as beam
            from apache_beam.transforms import combiners

        scenes = sorted({row["scene_id"] for row in self._rows() if str(row["question_id"]) in keys})
        scans = [(scene, scan_frames(parents[scene])) for scene in scenes if scene in parents]
        with tempfile.TemporaryDirectory(prefix="scenecache-") as folder:
            with beam.Pipeline(runner=runner()) as pipeline:
                questions, annotations = (
                    pipeline
                    | f"files of {kind}" >> beam.Create(self._files(kind))
                    | f"read {kind}" >> beam.FlatMap(_read)
                    for kind in (_QUESTIONS, _ANNOTATIONS)
                )
                rows = (
                    {_QUESTIONS: questions, _ANNOTATIONS: annotations}
                    | "by question_id" >> beam.CoGroupByKey()
                    | "join" >> beam.FlatMap(_join)
                )
                vocabulary = (
                    rows
                    | "answers" >> beam.FlatMap(lambda r: r[1]["answers"][:1])
                    | "count answers" >> combiners.Count.PerElement()
                    | "all counts" >> combiners.ToDict()
                    | "number answers" >> beam.Map(self._vocabulary)
                )
                groups = (
                    rows
                    | "by text" >> beam.Map(lambda r: (_text(r[1]), r[0]))
                    | "same text" >> beam.GroupByKey()
                    | "smallest id" >> beam.FlatMap(_smallest_id)
                )
                by_scene = (
                    {"row": rows, "dup_group": groups}
                    | "with text group" >> beam.CoGroupByKey()
                    | "asked for" >> beam.Filter(lambda r: str(r[0]) in keys)
                    | "by scene_id" >> beam.Map(lambda r: _with_group(r[1]))
                )
                _ = (
                    {"rows": by_scene, "scan": pipeline | "scans" >> beam.Create(scans)}
                    | "with scan" >> beam.CoGroupByKey()
                    | "place" >> beam.FlatMap(_place)
                    | "encode" >> beam.Map(_encode, beam.pvalue.AsSingleton(vocabulary))
                    | "as text" >> beam.Map(json.dumps)
                    | "write" >> beam.io.WriteToText(f"{folder}/rows")
                )
            schema = self.schema
            for path in sorted(Path(folder).glob("rows*")):
                with path.open() as file:
                    for row in map(json.loads, file):
                        yield str(row["question_id"]), to_record(row, schema)

    def _vocabulary(self, counts: Mapping[str, int]) -> Vocabulary:
        return Vocabulary.make(counts, self.answer_dict, self.answer_counter, self.min_count)

    def _files(self, kind: str) -> list[tuple[str, int, str, str]]:
        """(kind, place of the split, split, path) of the files of one kind that are there."""
        places = [self.root / folder for folder in _FOLDERS]
        names = [f"v1_balanced_{kind}_{split}_scannetv2.json" for split in self.splits]
        found = [next((str(p / name) for p in places if (p / name).is_file()), "") for name in names]
        if kind == _QUESTIONS and not any(found):
            raise MissingFile(f"{self.root}: no {' or '.join(names)}, here or in {', '.join(_FOLDERS[1:])}")
        return [(kind, i, split, path) for i, (split, path) in enumerate(zip(self.splits, found, strict=True)) if path]

    def _rows(self) -> list[dict[str, Any]]:
        """Questions joined with their annotations, as the pipeline joins them."""
        both: dict[int, dict[str, list[_Entry]]] = {}
        for kind in (_QUESTIONS, _ANNOTATIONS):
            for number, entry in (pair for file in self._files(kind) for pair in _read(file)):
                both.setdefault(number, {_QUESTIONS: [], _ANNOTATIONS: []})[kind].append(entry)
        if orphans := [number for number, entries in both.items() if not entries[_QUESTIONS]]:
            _log.warning("%s: %d annotations have no question (%d ...)", self.root, len(orphans), min(orphans))
        return [row for joined in both.items() for _, row in _join(joined)]


def _read(file: tuple[str, int, str, str]) -> Iterator[tuple[int, _Entry]]:
    """(question_id, entry with its split and place) of one file."""
    kind, rank, split, path = file
    for index, entry in enumerate(checked_entries(Path(path), kind.removeprefix("sqa_"), _NEEDED[kind])):
        yield entry["question_id"], {**entry, "split": split, "place": [rank, index]}


def _first(entries: Iterable[_Entry]) -> _Entry:
    return min(entries, key=lambda entry: entry["place"])


def _text(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["scene_id"], row["situation"], row["question"]


def _answers(annotation: _Entry) -> list[str]:
    return [str(a["answer"]) for a in annotation["answers"]]


def _count(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(row["answer"] for row in rows if row["answers"])


def _join(joined: tuple[int, Mapping[str, Iterable[_Entry]]]) -> list[tuple[int, dict[str, Any]]]:
    """One row of a question and its annotation; the first entry counts where there are several."""
    number, both = joined
    questions, annotations = list(both[_QUESTIONS]), list(both[_ANNOTATIONS])
    if not questions:
        return []  # an annotation alone
    question, annotation = _first(questions), _first(annotations) if annotations else None
    notes = [
        f"{len(entries)} {kind} with this id{', which differ' if len({_content(e) for e in entries}) > 1 else ''}: "
        "the first counts"
        for kind, entries in (("questions", questions), ("annotations", annotations))
        if len(entries) > 1
    ]
    if annotation is None:
        notes.append("no annotation")
    elif annotation["scene_id"] != question["scene_id"]:
        notes.append(f"its annotation is of {annotation['scene_id']}: left out")
        annotation = None
    answers = _answers(annotation) if annotation else []
    position, rotation = written_pose(annotation) if annotation else (None, None)
    row = {
        "question_id": number,
        **{name: question[name] for name in ("scene_id", "split", "situation", "question")},
        "alternatives": question.get("alternative_situation") or [],
        "answer": answers[0] if answers else "",
        "answers": answers,
        "has_annotation": annotation is not None,
        "position": position,
        "rotation": rotation,
        "note": "; ".join(notes),
    }
    return [(number, row)]


def _content(entry: _Entry) -> str:
    return json.dumps({k: v for k, v in entry.items() if k not in ("split", "place")}, sort_keys=True)


def _smallest_id(group: tuple[tuple[str, str, str], Iterable[int]]) -> list[tuple[int, int]]:
    numbers = list(group[1])
    return [(number, min(numbers)) for number in numbers]


def _with_group(both: Mapping[str, Iterable[Any]]) -> tuple[str, dict[str, Any]]:
    (row,), (group,) = both["row"], both["dup_group"]
    return row["scene_id"], {**row, "dup_group": group}


def _place(scene: tuple[str, Mapping[str, Iterable[Any]]]) -> Iterator[dict[str, Any]]:
    scan = next(iter(scene[1]["scan"]), None)
    for row in scene[1]["rows"]:
        yield {**row, **place(row["position"], row["rotation"], scan)}


def _encode(row: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Add types, tokens and answer classes."""
    situation, question = scanqa_tokens(row["situation"]), scanqa_tokens(row["question"])
    both = mcan_tokens(f"{row['situation']} {row['question']}")
    return {
        **row,
        **{f"type_{rule}": question_type(row["question"], rule) for rule in "abc"},
        "answer_id_dict": vocabulary.dict_ids.get(row["answer"], -1),
        "answer_id_scanqa": vocabulary.scanqa_ids.get(row["answer"], -1),
        "answer_oov": row["answer"] not in vocabulary.dict_ids,
        "answer_weight": vocabulary.weight(row["answer"]),
        "situation_tokens": " ".join(situation),
        "question_tokens": " ".join(question),
        "situation_length": min(len(situation), MAX_TOKENS),
        "question_length": min(len(question), MAX_TOKENS),
        "mcan_tokens": " ".join(both),
        "mcan_length": min(len(both), MAX_TOKENS),
    }

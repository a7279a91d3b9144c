"""NuScenes-QA's questions as a table (Apache Beam).

The files give questions no id. A row's key is split, sample token and the question's place among those of that sample,
`val/SAMPLE_TOKEN/007`; its place in the file is a column, since the official evaluation goes in that order.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from extractors.errors import InvalidValues, MissingFile, UnsupportedFile
from pipelines.questions.beam import quiet, runner
from pipelines.sources.json_file import read_json
from storage.schema import Column, Record, Schema

_log = logging.getLogger(__name__)

ANSWERS = (
    *map(str, range(11)), "no", "yes", "barrier", "bicycle", "bus", "car", "construction vehicle", "motorcycle",
    "moving", "not standing", "parked", "pedestrian", "standing", "stopped", "traffic cone", "trailer", "truck",
    "with rider", "without rider",
)  # fmt: skip
"""The answer classes in the order of the official `answer_dict.json`."""
TYPES = ("exist", "count", "object", "status", "comparison")
MAX_TOKENS = 30
_NEEDED: dict[str, type | tuple[type, ...]] = {
    "question": str,
    "answer": (str, int),
    "sample_token": str,
    "template_type": str,
    "num_hop": int,
}


@dataclass(frozen=True)
class Coverage:
    """How questions are spread over key frames.

    Attributes:
        questions: how many.
        samples: key frames that have some.
        without: key frames of the dataset's table that have none; None of a single split, or without a table.
        unknown: those of `samples` that the dataset's table lacks; None likewise.
    """

    questions: int
    samples: int
    without: int | None = None
    unknown: int | None = None


@dataclass(frozen=True)
class NuScenesQuestions:
    """Questions and answers of NuScenes-QA.

    Attributes:
        root: the folder with `NuScenes_SPLIT_questions.json`, or one above it (`questions`).
        splits: which splits; one without a file is left out.
        answer_dict: official `answer_dict.json`, a numbering of the answers and its inverse; None takes `ANSWERS`.
        samples: `sample.json` of the dataset, to say how many key frames have no question; it changes no row.
    """

    root: Path
    splits: tuple[str, ...] = ("train", "val")
    answer_dict: Path | None = None
    samples: Path | None = None

    name: ClassVar[str] = "nuscenes_questions"
    version: ClassVar[int] = 1
    of: ClassVar[str] = ""

    @property
    def schema(self) -> Schema:
        """One row per question."""
        return Schema({
            "sample_token": Column((), "string"),
            "split": Column((), "string", doc="train or val"),
            "place": Column((), "int32", doc="in the split's file, from 0: the order of the official evaluation"),
            "question": Column((), "string"),
            "answer": Column((), "string", doc="as text, for counts too"),
            "answer_id": Column((), "int16", doc="answer class; -1 out of vocabulary"),
            "template_type": Column((), "string", doc=", ".join(TYPES)),
            "num_hop": Column((), "int8"),
            "tokens": Column((), "string", doc="words as the official code looks them up, separated by blanks"),
            "length": Column((), "int16", doc=f"number of tokens, at most {MAX_TOKENS}"),
        })  # fmt: skip

    def items(self) -> Iterator[tuple[str, bytes, str]]:
        """(key, digest of all that decides its row, sample token) of every question.

        Raises:
            InputError: a file is missing, damaged, or has an entry without the fields it must have.
        """
        numbering = json.dumps(sorted(self.vocabulary().items())).encode()
        for file in self._files():
            for row in _read(file):
                content = json.dumps(row, sort_keys=True).encode()
                yield row["key"], hashlib.sha256(content + numbering).digest(), row["sample_token"]

    def vocabulary(self) -> dict[str, int]:
        """Answer -> class, of the file given or of `ANSWERS`."""
        return _read_dict(self.answer_dict) if self.answer_dict else {a: i for i, a in enumerate(ANSWERS)}

    def coverage(self) -> dict[str, Coverage]:
        """How the questions of each split, and of all (``), are spread over key frames."""
        counts = {split: Counter(row["sample_token"] for row in _read((split, path))) for split, path in self._files()}
        counts[""] = sum(counts.values(), Counter())
        known = _sample_tokens(self.samples) if self.samples else None
        return {
            split: Coverage(found.total(), len(found))
            if known is None or split
            else Coverage(found.total(), len(found), len(known - found.keys()), len(found.keys() - known))
            for split, found in counts.items()
        }

    def build(self, keys: set[str], parents: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        """Records of the questions asked for, by a Beam pipeline over all of them.

        Types and answers that are not known, and key frames without questions, are said in the log.
        """
        with quiet():
            import apache_beam as beam

        schema = self.schema
        types, strangers = Counter[str](), Counter[str]()
        with tempfile.TemporaryDirectory(prefix="scenecache-") as folder:
            with beam.Pipeline(runner=runner()) as pipeline:
                _ = (
                    pipeline
                    | "files" >> beam.Create(self._files())
                    | "read" >> beam.FlatMap(_read)
                    | "asked for" >> beam.Filter(lambda row: row["key"] in keys)
                    | "encode" >> beam.Map(_encode, self.vocabulary())
                    | "as text" >> beam.Map(json.dumps)
                    | "write" >> beam.io.WriteToText(f"{folder}/rows")
                )
            for path in sorted(Path(folder).glob("rows*")):
                with path.open() as file:
                    for row in map(json.loads, file):
                        types[row["template_type"]] += 1
                        strangers[row["answer"]] += row["answer_id"] < 0
                        yield row["key"], _record(row, schema)
        for what, found in (("types", types.keys() - set(TYPES)), ("answers", set(+strangers))):
            if found:
                _log.warning("%s: %s that are not known: %s", self.root, what, ", ".join(sorted(found)[:10]))
        whole = self.coverage()[""]
        if whole.without is not None:
            _log.warning(
                "%s: %d questions about %d key frames; %d key frames without questions, questions about %d others",
                *(self.root, whole.questions, whole.samples - (whole.unknown or 0), whole.without, whole.unknown),
            )

    def _files(self) -> list[tuple[str, str]]:
        """(split, path) of the files that are there."""
        names = {split: f"NuScenes_{split}_questions.json" for split in self.splits}
        found = {
            split: next((p for p in (self.root / name, self.root / "questions" / name) if p.is_file()), None)
            for split, name in names.items()
        }
        if not any(found.values()):
            raise MissingFile(f"{self.root}: no {' or '.join(names.values())}, here or in questions; get NuScenes-QA's")
        return [(split, str(path)) for split, path in found.items() if path]


def question_tokens(text: str) -> list[str]:
    """Words as the official code looks them up: lower case, without punctuation."""
    return re.sub(r"[.,'!?\"()*#:;]", "", text.lower()).replace("-", " ").replace("/", " ").split()


def _read(file: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of one file: its fields, the answer as text, key and place.

    Raises:
        InputError: the file is damaged, or an entry lacks a field or has one of another type; names it.
    """
    split, path = file
    data = read_json(Path(path), "get NuScenes-QA's questions")
    entries = data.get("questions") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise InvalidValues(f"{path}: no list 'questions'; expected a file of NuScenes-QA")
    seen = Counter[str]()
    for place, entry in enumerate(entries):
        for name, kind in _NEEDED.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                wanted = "str or int" if isinstance(kind, tuple) else kind.__name__
                raise InvalidValues(f"{path}: questions[{place}] has no '{name}' of type {wanted}; mend the file")
        if not 0 <= entry["num_hop"] < 128:
            raise InvalidValues(f"{path}: questions[{place}] has num_hop {entry['num_hop']}; mend the file")
        sample = entry["sample_token"]
        key = f"{split}/{sample}/{seen[sample]:03d}"
        seen[sample] += 1
        fields = {name: entry[name] for name in _NEEDED}
        yield {**fields, "answer": str(entry["answer"]), "key": key, "split": split, "place": place}


def _encode(row: dict[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Add answer class and tokens."""
    tokens = question_tokens(row["question"])
    return {
        **row,
        "answer_id": vocabulary.get(row["answer"], -1),
        "tokens": " ".join(tokens),
        "length": min(len(tokens), MAX_TOKENS),
    }


def _record(row: Mapping[str, Any], schema: Schema) -> Record:
    return {
        name: np.array(row[name], object if column.dtype == "string" else column.dtype)
        for name, column in schema.columns.items()
    }


def _read_dict(path: Path) -> dict[str, int]:
    """The official numbering, which must be one: classes 0 to n - 1, one answer each, and its inverse the same."""
    data = read_json(path, "leave answer_dict out to take the official classes")
    if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, dict) for part in data)):
        raise UnsupportedFile(f"{path}: expected [answer -> class, class -> answer]")
    ids, answers = data
    if not all(type(i) is int for i in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise UnsupportedFile(f"{path}: the classes are not 0 to {len(ids) - 1}, one for each answer")
    if {answer: str(i) for answer, i in ids.items()} != {answer: i for i, answer in answers.items()}:
        raise UnsupportedFile(f"{path}: its second part is not the inverse of the first")
    return ids


def _sample_tokens(path: Path) -> set[str]:
    data = read_json(path, "give the dataset's sample.json, or leave samples out")
    if not isinstance(data, list) or not all(isinstance(one, dict) and "token" in one for one in data):
        raise UnsupportedFile(f"{path}: expected a list of records with a token, as nuScenes' sample.json")
    return {one["token"] for one in data}

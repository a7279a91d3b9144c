"""Answer classes: the official vocabulary files, or one built from the annotations."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from extractors.errors import UnsupportedFile
from pipelines.sources.json_file import read_json

_WEIGHTS = {0: 0.0, 1: 0.3, 2: 0.6, 3: 0.9}


@dataclass(frozen=True)
class Vocabulary:
    """Two numberings of the answers, which differ: a checkpoint fits only its own.

    Attributes:
        dict_ids: answer -> class of `answer_dict.json` (MCAN and ClipBERT).
        scanqa_ids: answer -> class of the ScanQA branch: place among the distinct answers of `answer_counter.json`,
            sorted.
        counts: answer -> how many questions of the whole dataset have it.
    """

    dict_ids: Mapping[str, int]
    scanqa_ids: Mapping[str, int]
    counts: Mapping[str, int]

    @classmethod
    def make(
        cls, counts: Mapping[str, int], answer_dict: Path | None, answer_counter: Path | None, min_count: int
    ) -> Vocabulary:
        """Read the official files that are given, and build what is not.

        Args:
            counts: answer -> questions that have it, over the splits at hand.
            answer_dict: `[answer -> class, class -> answer]`; None numbers the answers that occur at least
                `min_count` times by falling count, equal counts by name.
            answer_counter: a list with one answer per question of the dataset; None takes `counts`.
            min_count: see above.
        """
        total = Counter(_read_counter(answer_counter)) if answer_counter else Counter(counts)
        if answer_dict:
            dict_ids = _read_dict(answer_dict)
        else:
            frequent = sorted((a for a, n in total.items() if n >= min_count), key=lambda a: (-total[a], a))
            dict_ids = {answer: i for i, answer in enumerate(frequent)}
        return cls(dict_ids, {answer: i for i, answer in enumerate(sorted(total))}, dict(total))

    def weight(self, answer: str) -> float:
        """ScanQA's training target of the gold class: 0.3, 0.6, 0.9, 1 for 1, 2, 3, more questions with the answer."""
        return _WEIGHTS.get(self.counts.get(answer, 0), 1.0)

    def digest(self) -> bytes:
        """sha256 of all of it."""
        parts = [sorted(part.items()) for part in (self.dict_ids, self.scanqa_ids, self.counts)]
        return hashlib.sha256(json.dumps(parts).encode()).digest()


def _read_dict(path: Path) -> dict[str, int]:
    data = read_json(path, "leave answer_dict out to build one")
    ids = data[0] if isinstance(data, list) and data else data
    if not isinstance(ids, dict) or not all(isinstance(i, int) for i in ids.values()):
        raise UnsupportedFile(f"{path}: expected [answer -> class, class -> answer]")
    if len(set(ids.values())) < len(ids):
        raise UnsupportedFile(f"{path}: several answers have one class")
    return ids


def _read_counter(path: Path) -> list[str]:
    data = read_json(path, "leave answer_counter out to count the answers at hand")
    if not isinstance(data, list) or not all(isinstance(a, str) for a in data):
        raise UnsupportedFile(f"{path}: expected a list with one answer per question")
    return data

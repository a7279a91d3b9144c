"""Word vectors from a text file of GloVe or word2vec, or made up from a seed; only the words asked for are kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from extractors.base import Weights, seed_for
from extractors.errors import WeightsError


def word_vectors(weights: Weights, words: Iterable[str], size: int) -> dict[str, np.ndarray]:
    """Vectors of these words.

    Args:
        weights: a file with `word number ... number` on each line, as GloVe's (word2vec's text format has a first line
            with two counts, which is passed over); it is read only as far as needed. Or `untrained:SEED`.
        words: as they are spelt in the file.
        size: numbers of a vector.

    Returns:
        word -> (size,) float32.

    Raises:
        WeightsError: a word is not in the file, or the file is of another kind or width.
    """
    wanted = set(words)
    if weights.seed is not None:
        return {word: _made_up(word, weights.seed, size) for word in wanted}
    found = _read(weights.path, wanted, size)
    if missing := sorted(wanted - set(found)):
        raise WeightsError(f"{weights.path}: no vector for {', '.join(missing)}; give a larger file of word vectors")
    return found


def mean_vector(text: str, vectors: dict[str, np.ndarray]) -> np.ndarray:
    """Mean of the vectors of a text's words."""
    return np.mean([vectors[word] for word in text.split()], axis=0, dtype=np.float32)


def _made_up(word: str, seed: int, size: int) -> np.ndarray:
    rng = np.random.RandomState(seed_for(word, seed))
    return (rng.standard_normal(size) / np.sqrt(size)).astype(np.float32)


def _read(path: Path, wanted: set[str], size: int) -> dict[str, np.ndarray]:
    """The first vector of each word that is there."""
    left, found = {word.encode() for word in wanted}, dict[str, np.ndarray]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not left:
                break
            if number == 1:
                head = line.split()
                if len(head) == 2 and head[0].isdigit() and head[1].isdigit():
                    continue
                _check(path, len(head) - 1, size)
            word, _, numbers = line.partition(b" ")
            if word not in left:
                continue
            left.discard(word)
            try:
                vector = np.array(numbers.split(), np.float32)
            except ValueError:
                raise WeightsError(f"{path}: line {number} is not a word and numbers; is this a text file?") from None
            _check(path, len(vector), size)
            if not np.isfinite(vector).all():
                raise WeightsError(f"{path}: line {number}: the vector of {word.decode()} is not finite")
            found[word.decode()] = vector
    return found


def _check(path: Path, numbers: int, size: int) -> None:
    if numbers != size:
        raise WeightsError(f"{path}: vectors of {numbers} numbers, {size} expected; set the stage's size={numbers}")

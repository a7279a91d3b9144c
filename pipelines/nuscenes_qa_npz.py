"""`scenecache export --format nuscenes-qa`: the `.npz` files that NuScenes-QA's released trainer reads.

One file per key frame, SAMPLE_TOKEN.npz, with one pickled array `results` of dicts: `feats` (512,) float32, `box` (7,)
float32, `label` int, in the order of the record. The trainer reads the first 100 of them and fills up with zeros.
`pipelines.sources.nuscenes_qa_npz` reads such files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from pipelines.errors import JobError
from storage.schema import Record, Schema

READ = 100  # objects of a key frame that the released trainer reads
WIDTH = 512  # numbers of a feature that it takes
_NEEDED = {"feature", "box", "label"}


def check(keys: Iterable[str], schema: Schema, width: int | None) -> None:
    """Refuse what the trainer would read wrongly.

    Args:
        keys: item keys.
        schema: of the stage.
        width: numbers of an exported feature, where the user has chosen: longer than the stage's, zeros fill it up.

    Raises:
        JobError: a key that is no sample token, a stage without objects' features, or a width nobody asked for.
    """
    if missing := sorted(_NEEDED - set(schema.columns)):
        raise JobError(
            f"format nuscenes-qa needs a stage of objects with feature, box and label; this one has no "
            f"{', '.join(missing)}"
        )
    if strange := next((key for key in keys if not re.fullmatch(r"[A-Za-z0-9_-]+", key)), None):
        raise JobError(f"format nuscenes-qa names files by sample token; {strange!r} would not be read as one")
    (own,) = schema.columns["feature"].dims
    assert own is not None
    if width is None and own != WIDTH:
        fill = f"--width {WIDTH} fills them up with zeros, " if own < WIDTH else ""
        raise JobError(
            f"features of {own} numbers, the released trainer reads {WIDTH}: {fill}--width {own} writes them as they "
            "are, for a trainer that is told so"
        )
    if width is not None and width < own:
        raise JobError(f"--width {width}: the features have {own} numbers, none are dropped")


def write(path: Path, record: Record, schema: Schema, width: int | None = None) -> None:
    """Write one key frame; an empty record gives an empty `results`."""
    features = record["feature"].astype(np.float32)
    features = np.pad(features, ((0, 0), (0, (width or features.shape[1]) - features.shape[1])))
    results = np.empty(len(features), object)
    for i, (feature, box, label) in enumerate(zip(features, record["box"], record["label"], strict=True)):
        results[i] = {"feats": feature, "box": box[:7].astype(np.float32), "label": int(label)}
    np.savez(path, results=results)


def note(counts: Mapping[str, int]) -> str:
    """What the trainer will do with the objects of so many key frames: for people; may be empty."""
    empty, longer = sum(n == 0 for n in counts.values()), sum(n > READ for n in counts.values())
    texts = [f"{empty} without objects"] if empty else []
    texts += [f"{longer} with more than the {READ} objects that the trainer reads"] if longer else []
    return ", ".join(texts)

"""Instance masks of a camera image, as a segmenter of the user's choice leaves them.

One `.npz` file for each image, named as the image, made by `numpy.savez_compressed` of

    names   (n,) text       class of each instance, as in `boxes3d.CLASSES` (spaces do as well as underscores)
    scores  (n,) floats     0 to 1
    masks   (n, h, w) bool  or
    boxes   (n, 4) floats   left, upper, right, lower in pixels: the whole rectangle is the mask

Instances of other classes are left out. Where masks overlap the first counts.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from extractors.boxes3d import CLASSES
from extractors.errors import InvalidValues, MissingFile, UnsupportedFile


@dataclass(frozen=True)
class Instance:
    """One object in one image.

    Attributes:
        name: its class, one of `CLASSES`.
        score: 0 to 1.
        mask: (h, w) bool, at least one pixel.
    """

    name: str
    score: float
    mask: np.ndarray


def read_masks(path: Path, size: tuple[int, int]) -> list[Instance]:
    """Read the instances of one image; those without a pixel are left out.

    Args:
        path: see above.
        size: (width, height) of the image.

    Raises:
        MissingFile: no such file.
        UnsupportedFile: not such a file.
        InvalidValues: arrays that do not go together, or masks of another size.
    """
    if not path.is_file():
        raise MissingFile(f"{path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise UnsupportedFile(f"{path}: not a .npz of plain arrays: {error}") from error
    kinds = [kind for kind in ("masks", "boxes") if kind in arrays]
    if len(kinds) != 1 or not {"names", "scores"} <= arrays.keys():
        raise UnsupportedFile(f"{path}: has {sorted(arrays)}, expected names, scores, and either masks or boxes")
    shapes, names, scores = arrays[kinds[0]], arrays["names"], arrays["scores"]
    if not names.size:  # an empty array need not be of text
        names = names.astype(str)
    if names.dtype.kind not in "US" or scores.dtype.kind not in "fiu" or shapes.dtype.kind not in "bfiu":
        raise UnsupportedFile(
            f"{path}: names of {names.dtype}, scores of {scores.dtype}, {kinds[0]} of {shapes.dtype}; "
            "expected text and numbers"
        )
    wanted = (size[1], size[0]) if kinds == ["masks"] else (4,)
    if names.ndim != 1 or scores.shape != names.shape or shapes.shape != (len(names), *wanted):
        raise InvalidValues(
            f"{path}: names {names.shape}, scores {scores.shape}, {kinds[0]} {shapes.shape}; expected (n,), (n,), "
            f"(n, {', '.join(map(str, wanted))})"
        )
    if not (np.isfinite(scores).all() and np.isfinite(shapes).all()):
        raise InvalidValues(f"{path}: NaN or infinity in scores or {kinds[0]}")
    if ((scores < 0) | (scores > 1)).any():
        raise InvalidValues(f"{path}: scores of {scores.min():g} to {scores.max():g}, expected 0 to 1")
    if kinds == ["boxes"] and (shapes[:, 2:] < shapes[:, :2]).any():
        raise InvalidValues(f"{path}: a box ends before it begins; expected left, upper, right, lower")
    found = []
    for name, score, shape in zip(np.char.replace(names.astype(str), " ", "_"), scores, shapes, strict=True):
        mask = shape.astype(bool) if kinds == ["masks"] else _rectangle(shape, size)
        if name in CLASSES and mask.any():
            found.append(Instance(str(name), float(score), mask))
    return found


def _rectangle(box: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(h, w) bool of the pixels that a box touches."""
    left, upper = np.floor(box[:2].clip(0, size)).astype(int)
    right, lower = np.ceil(box[2:].clip(0, size)).astype(int)
    mask = np.zeros(size[::-1], bool)
    mask[upper:lower, left:right] = True
    return mask

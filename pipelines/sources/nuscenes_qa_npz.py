"""Object features as NuScenes-QA released them: one `.npz` per key frame, named by its sample token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from extractors.errors import InvalidValues, MissingFile, UnsupportedFile
from extractors.inputs import ObjectFeatures
from extractors.safe_pickle import read_pickled_npz


@dataclass(frozen=True)
class NuScenesQANpz:
    """A folder of released features, `features/CenterPoint`; the item key is the sample token.

    A file holds one pickled array `results` of dicts with `feats`, `box` and `label`. A pickle that refers to anything
    but numpy arrays and plain values is refused, not run.

    Attributes:
        root: the folder.
    """

    root: Path

    name: ClassVar[str] = "nuscenes_qa_npz"
    kinds: ClassVar[tuple[str, ...]] = ("objects",)

    def keys(self) -> list[str]:
        """Sample tokens, sorted.

        Raises:
            MissingFile: no such folder, or no `.npz` in it.
        """
        return sorted(self._paths)

    def files(self, key: str, kind: str) -> list[Path]:
        """The one file of an item."""
        if kind not in self.kinds:
            raise ValueError(f"source {self.name} has no {kind!r}; it offers objects")
        return [self._paths[key]] if key in self._paths else []

    def facts(self, key: str, kind: str) -> bytes:
        """Nothing: all is in the files."""
        return b""

    def open(self, key: str, kind: str) -> ObjectFeatures:
        """Read one file; see `Source.open`."""
        paths = self.files(key, kind)
        if not paths:
            raise MissingFile(f"{self.root}: no {key}.npz")
        return _objects(read_pickled_npz(paths[0], "results"), paths[0])

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """Sample token (the name up to its first dot, as the released trainer has it) -> file."""
        if not self.root.is_dir():
            raise MissingFile(f"{self.root}: no such folder")
        paths: dict[str, Path] = {}
        for path in sorted(self.root.glob("*.npz")):
            token = path.name.split(".", 1)[0]
            if not token:
                continue  # a hidden file
            if token in paths:
                raise UnsupportedFile(f"{path}: another file has the sample token {token!r} too; keep one of them")
            paths[token] = path
        if not paths:
            raise MissingFile(f"{self.root}: no .npz in it; give the folder of one backbone, features/CenterPoint")
        return paths


def _objects(results: np.ndarray, path: Path) -> ObjectFeatures:
    if results.size == 0:  # the width is not known: there is no object that has one
        return ObjectFeatures(np.zeros((0, 0), np.float32), np.zeros((0, 7), np.float32), np.zeros(0, np.int64))
    if results.ndim != 1 or not results.dtype.hasobject:
        raise UnsupportedFile(f"{path}: results is {results.dtype} of shape {results.shape}, expected a list of dicts")
    features: list[np.ndarray] = []
    boxes, labels = [], []
    for index, entry in enumerate(results):
        if not isinstance(entry, Mapping) or not {"feats", "box"} <= entry.keys():
            raise UnsupportedFile(f"{path}: results[{index}] is no dict with feats and box")
        feature, box = _numbers(entry["feats"]), _numbers(entry["box"])
        if feature.ndim != 1 or not len(feature) or (features and feature.shape != features[0].shape):
            raise UnsupportedFile(f"{path}: feats of results[{index}] have shape {feature.shape}, unlike the first's")
        if box.ndim != 1 or len(box) < 7:
            raise UnsupportedFile(f"{path}: box of results[{index}] has shape {box.shape}, expected 7 numbers or more")
        label = _numbers(entry.get("label", -1))
        if label.size != 1:
            raise UnsupportedFile(f"{path}: label of results[{index}] is {entry['label']!r:.60}, expected an integer")
        features.append(feature)
        boxes.append(box[:7])
        labels.append(int(label.reshape(())))
    found = ObjectFeatures(np.stack(features), np.stack(boxes), np.array(labels, np.int64))
    if not (np.isfinite(found.features).all() and np.isfinite(found.boxes).all()):
        raise InvalidValues(f"{path}: NaN or infinity among features or boxes")
    return found


def _numbers(value: Any) -> np.ndarray:
    """An array of numbers; of anything else an array without any."""
    array = np.asarray(value)
    return array if array.dtype.kind in "fiu" else np.zeros((0, 0))

"""A small deterministic extractor: no weights, no network, any input. For tests, docs and trying out a job."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from extractors.base import Extractor, seed_for
from storage.schema import Column, Record, Schema


@dataclass(frozen=True, kw_only=True)
class Fake(Extractor):
    """Draw features from the item's key and the content of its input.

    Gives, per object:
        feature  (object, width) float16
        index    (object,) int32, 0, 1, 2 ...

    Attributes:
        objects: number of objects; every item has that many.
        width: values in a feature.
        scale: standard deviation of the features.
    """

    name: ClassVar[str] = "fake"
    takes: ClassVar[tuple[str, ...]] = ("scan",)

    objects: int = 8
    width: int = 16
    scale: float = 1.0

    @property
    def schema(self) -> Schema:
        feature = Column((self.width,), "float16", doc="seeded noise")
        return Schema({"feature": feature, "index": Column((), "int32", doc="position in the record")}, "object")

    def prepare(self, key: str, *inputs: Any) -> int:
        """A seed from the key and the content of the inputs."""
        return seed_for(key, *(_content(value) for value in inputs))

    def load(self, device: str = "cpu") -> Callable[[Sequence[int]], list[Record]]:
        return lambda seeds: [self._record(seed) for seed in seeds]

    def _record(self, seed: int) -> Record:
        noise = np.random.default_rng(seed).standard_normal((self.objects, self.width), np.float32)
        return {"feature": (self.scale * noise).astype(np.float16), "index": np.arange(self.objects, dtype=np.int32)}


def _content(value: Any) -> str:
    """Digest of an input or a record: of its arrays, or of its representation where it has none."""
    digest = hashlib.sha256()
    named = value if isinstance(value, dict) else getattr(value, "__dict__", {"value": value})
    for name, part in sorted(named.items()):
        data = np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()

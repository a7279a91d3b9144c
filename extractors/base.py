"""The shape of an extractor: a frozen dataclass whose fields are its settings."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from extractors.errors import WeightsError
from storage.schema import Record, Schema

_NO_SETTINGS = {"name", "version", "takes", "device", "batch", "deadline_s", "memory_gb", "recycle_after"}
_NO_SETTINGS |= {"extractor", "of", "workers", "gpus"}  # keys of a stage in a job


@dataclass(frozen=True)
class Weights:
    """Where a network's parameters come from.

    Attributes:
        source: path or URL of a checkpoint, or `untrained:SEED` for seeded random parameters.
    """

    source: str

    @property
    def seed(self) -> int | None:
        """The seed of `untrained:SEED`, None for a checkpoint."""
        match = re.fullmatch(r"untrained:(\d+)", self.source)
        return int(match[1]) if match else None

    @property
    def path(self) -> Path:
        """Path of the checkpoint file; of one at a URL, that of its copy (`extractors.fetch`).

        Raises:
            WeightsError: there is no such file, or it can't be fetched.
        """
        if "://" in self.source:
            from extractors.fetch import fetched

            return fetched(self.source)
        path = Path(self.source).expanduser()
        if not path.is_file():
            raise WeightsError(
                f"no file {self.source}: give one that is there, or 'untrained:0' to run without training"
            )
        return path

    def identity(self, digest: Callable[[Path], bytes] | None = None) -> str:
        """`untrained:SEED`, or `sha256:` and the hex digest of the file's content.

        Args:
            digest: gives the sha256 of a file, from memory where it can; by default the file is read.
        """
        if self.seed is not None:
            return self.source
        return "sha256:" + (digest or _sha256)(self.path).hex()


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Turn the inputs of one item into one record.

    A subclass is a frozen dataclass. Every field is a setting and counts in the recipe, so what
    must not change values (batch size, device, paths of tools) is never a field.

    Class attributes:
        name: default stage name, lower case with underscores.
        version: raise it when output values change.
        takes: what `prepare` receives, in order: kinds of input that a source offers
            (`scan`, `clip`) or names of stages.
        device: `gpu` where `load`'s callable profits from one, else `cpu`.
        batch: items per call that suit the network (a default; runners may pass fewer or more).
        deadline_s, memory_gb, recycle_after: where set, the extractor runs in a child process that
            is killed over these limits and replaced after so many items (native code that can
            hang or leak).
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]]
    device: ClassVar[str] = "cpu"
    batch: ClassVar[int] = 1
    deadline_s: ClassVar[float | None] = None
    memory_gb: ClassVar[float | None] = None
    recycle_after: ClassVar[int | None] = None

    @property
    def schema(self) -> Schema:
        """Columns of the records, which may depend on the settings."""
        raise NotImplementedError(f"{type(self).__name__} has no schema: see extractors/fake.py")

    def prepare(self, key: str, *inputs: Any) -> Any:
        """Do the part that needs no weights (CPU, per item, seeded from the key).

        Args:
            key: item key, the only source of randomness (`seed_for`).
            inputs: one value per entry of `takes`: a typed input (`extractors.inputs`) or an
                earlier stage's record.

        Raises:
            InputError: the item's data can't be used.
        """
        return inputs[0] if len(inputs) == 1 else inputs

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        """Load weights and tools, once per worker; heavy imports go here.

        Args:
            device: torch device name.

        Returns:
            A callable from a list of prepared inputs, of several items, to their records in
            order. What it gives for an item does not depend on the others in the list.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load: see extractors/fake.py")


def recipe(extractor: Extractor, digest: Callable[[Path], bytes] | None = None) -> dict[str, Any]:
    """All that decides the output besides the item, as plain JSON types.

    Args:
        digest: as in `Weights.identity`.
    """
    settings: dict[str, Any] = {}
    weights: dict[str, str] = {}
    for f in fields(extractor):
        value = getattr(extractor, f.name)
        if isinstance(value, Weights):
            weights[f.name] = value.identity(digest)
        else:
            settings[f.name] = _plain(value, "float" in str(f.type))
    return {"extractor": extractor.name, "version": extractor.version, "settings": settings, "weights": weights}


def _plain(value: Any, real: bool) -> Any:
    """A setting as JSON has it; a whole number in a field of floats is the float that YAML makes of it."""
    if isinstance(value, tuple | list):
        return [_plain(one, real) for one in value]
    return float(value) if real and type(value) is int else value


def check(extractor: Extractor) -> None:
    """Refuse an extractor that could not run, or with a setting that its recipe could not hold.

    Raises:
        ValueError: says what is missing, and where it goes.
    """
    cls = type(extractor)
    takes = getattr(extractor, "takes", None)
    names = [f.name for f in fields(extractor)]
    faults = []
    if not isinstance(getattr(extractor, "name", None), str):
        faults.append("it has no name: ClassVar[str]")
    if not (isinstance(takes, tuple) and takes and all(isinstance(entry, str) for entry in takes)):
        faults.append(f"takes is {takes!r}, expected a tuple of texts such as ('scan',)")
    own = [name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)]
    if lost := [name for name in own if name not in names]:
        faults.append(f"{', '.join(lost)} would not count: put @dataclass(frozen=True, kw_only=True) above the class")
    if taken := sorted(_NO_SETTINGS.intersection(names)):
        faults.append(f"{', '.join(taken)} can be no setting: it says how a stage runs; make it a ClassVar")
    faults += [
        f"{name} = {value!r} is no setting: expected numbers that are finite, text, None, tuples, lists and dicts of "
        f"these; a file whose content counts is a Weights"
        for name in names
        if not _is_plain(value := getattr(extractor, name))
    ]
    if faults:
        raise ValueError(f"extractor {cls.__module__}.{cls.__qualname__}: {'; '.join(faults)}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str) or isinstance(value, Weights)


def seed_for(key: str, *salt: int | str) -> int:
    """A 32-bit seed that depends on the item's key (and salt) alone."""
    text = "\0".join([key, *map(str, salt)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

"""Small extractors, a source and a table that do what a test asks of them: count, wait, fail, hang, leak, crash."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from extractors.base import Extractor, Weights, seed_for
from extractors.errors import InvalidValues, MissingFile, MissingPackage, WeightsError
from storage.schema import Column, Record, Schema


@dataclass(frozen=True)
class Folder:
    """Items are the files of a folder; an item's input is the file's text."""

    root: Path
    name: ClassVar[str] = "folder"
    kinds: ClassVar[tuple[str, ...]] = ("text",)

    def keys(self) -> list[str]:
        return sorted(path.stem for path in self.root.glob("*.txt"))

    def files(self, key: str, kind: str) -> list[Path]:
        return [self.root / f"{key}.txt"]

    def facts(self, key: str, kind: str) -> bytes:
        return b""

    def open(self, key: str, kind: str) -> str:
        path = self.root / f"{key}.txt"
        if not path.exists():
            raise MissingFile(f"{path}: not there")
        return path.read_text()

    @classmethod
    def make(cls, root: Path, texts: Mapping[str, str]) -> Folder:
        root.mkdir(parents=True, exist_ok=True)
        for key, text in texts.items():
            (root / f"{key}.txt").write_text(text)
        return cls(root)


@dataclass(frozen=True)
class Listed(Folder):
    """Items by name, whether their files are there or not."""

    names: tuple[str, ...] = ()

    def keys(self) -> list[str]:
        return sorted(self.names)


@dataclass(frozen=True, kw_only=True)
class Numbers(Extractor):
    """Seeded numbers of an item; its text may ask for trouble (`bad`, `die`, `slow:S`, `gate:FILE` ...)."""

    name: ClassVar[str] = "numbers"
    takes: ClassVar[tuple[str, ...]] = ("text",)
    rows: int = 3
    scale: float = 1.0

    @property
    def schema(self) -> Schema:
        return Schema({"value": Column((4,)), "order": Column((), "int32")}, element="object")

    def prepare(self, key: str, *inputs: Any) -> Any:
        text = inputs[0]
        if text == "bad":
            raise InvalidValues(f"{key}.txt: bad values")
        if text == "bug":
            return 1 / 0
        return key, text

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        return lambda batch: [self.one(key, text) for key, text in batch]

    def one(self, key: str, text: str) -> Record:
        match text.partition(":"):
            case ("die", _, _):
                os._exit(3)
            case ("die once", _, flag):
                if not Path(flag).exists():
                    Path(flag).touch()
                    os._exit(3)
            case ("slow", _, seconds):
                time.sleep(float(seconds))
            case ("gate", _, path):  # says that it is here, and waits for the file
                Path(f"{path}.reached").touch()
                while not Path(path).exists():
                    time.sleep(0.01)
            case ("meet", _, path):  # waits for an extractor with another number of rows
                Path(f"{path}.{self.rows}").touch()
                until = time.monotonic() + 200
                while len(list(Path(path).parent.glob(f"{Path(path).name}.*"))) < 2:
                    if time.monotonic() > until:
                        raise TimeoutError("nobody came")
                    time.sleep(0.01)
            case ("stale", _, _):
                raise OSError(116, "Stale file handle", "scan.ply")
            case ("quit", _, _):
                sys.exit("no licence")
            case ("no record", _, _):
                return None  # type: ignore[return-value]
            case ("ragged", _, _):
                return {"value": [[1.0], [1.0, 2.0]], "order": np.arange(2, dtype=np.int32)}  # type: ignore[dict-item]
            case ("gradient", _, _):
                import torch

                return {"value": torch.zeros(2, 4, requires_grad=True), "order": np.arange(2, dtype=np.int32)}  # type: ignore[dict-item]
        rows = 0 if text == "none" else self.rows
        value = self.scale * np.random.default_rng(seed_for(key, len(text))).random((rows, 4), np.float32)
        return {"value": value[:, :3] if text == "shape" else value, "order": np.arange(rows, dtype=np.int32)}


@dataclass(frozen=True, kw_only=True)
class Sums(Extractor):
    """One row per object of `numbers`; rounding makes it equal for nearly equal inputs."""

    name: ClassVar[str] = "sums"
    takes: ClassVar[tuple[str, ...]] = ("numbers",)
    decimals: int = 3

    @property
    def schema(self) -> Schema:
        return Schema({"sum": Column(())}, element="object")

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        return lambda batch: [{"sum": np.round(r["value"].sum(1), self.decimals).astype(np.float32)} for r in batch]


@dataclass(frozen=True, kw_only=True)
class Both(Extractor):
    """Reads two earlier stages and the source."""

    name: ClassVar[str] = "both"
    takes: ClassVar[tuple[str, ...]] = ("sums", "text", "numbers")

    @property
    def schema(self) -> Schema:
        return Schema({"total": Column(()), "length": Column((), "int64")})

    def prepare(self, key: str, *inputs: Any) -> Any:
        return inputs

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        return lambda batch: [
            {"total": np.float32(s["sum"].sum() + n["value"].sum()), "length": np.int64(len(t))} for s, t, n in batch
        ]


@dataclass(frozen=True, kw_only=True)
class OnGpu(Numbers):
    """`numbers` for a GPU: prepared apart. Preparing `open:FILE` makes the file."""

    name: ClassVar[str] = "numbers"
    device: ClassVar[str] = "gpu"
    batch: ClassVar[int] = 4

    def prepare(self, key: str, *inputs: Any) -> Any:
        if inputs[0].startswith("open:"):
            Path(inputs[0].removeprefix("open:")).touch()
        return super().prepare(key, *inputs)


@dataclass(frozen=True, kw_only=True)
class Noted(Numbers):
    """Notes each load, and the size of each batch, in a file: `PROCESS load`, `PROCESS 4`."""

    notes: str

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        self._note("load")
        run = super().load(device)
        return lambda batch: self._note(str(len(batch))) or run(batch)  # type: ignore[func-returns-value]

    def _note(self, text: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{os.getpid()} {text}\n")


@dataclass(frozen=True, kw_only=True)
class Hosted(Numbers):
    """`numbers` in a helper process; texts `hang` and `leak` ask for what it is there for."""

    deadline_s: ClassVar[float | None] = 8.0  # far more than any item takes on a busy machine
    memory_gb: ClassVar[float | None] = 0.25  # little to fill: new memory can be slow to come by
    recycle_after: ClassVar[int | None] = 5

    def one(self, key: str, text: str) -> Record:
        if text == "hang":
            time.sleep(1000)
        if text == "leak":
            kept = []
            while True:
                kept.append(np.ones(8 << 20, np.uint8))
                time.sleep(0.01)  # slowly enough to be caught near the cap
        return super().one(key, text)


@dataclass(frozen=True, kw_only=True)
class NoWeights(Numbers):
    """Can't load."""

    package: bool = False

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        if self.package:
            raise MissingPackage("numbers need 'nothing': pip install nothing")
        raise WeightsError("votes.pt: no key 'conv.weight'")


@dataclass(frozen=True, kw_only=True)
class Weighted(Numbers):
    """Scaled by a number in a file."""

    weights: Weights

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        scaled = Numbers(scale=float(self.weights.path.read_text()))  # half a file is no number
        return lambda batch: [scaled.one(key, text) for key, text in batch]


@dataclass(frozen=True, kw_only=True)
class HostedWeighted(Weighted):
    """The same in a helper process."""

    deadline_s: ClassVar[float | None] = 30.0


@dataclass(frozen=True, kw_only=True)
class Quits(Numbers):
    """Can't load, and takes that for a reason to end the process."""

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        sys.exit("no licence")


@dataclass(frozen=True, kw_only=True)
class HostedQuits(Quits):
    """The same in a helper process."""

    deadline_s: ClassVar[float | None] = 30.0


@dataclass(frozen=True, kw_only=True)
class NoList(Numbers):
    """Gives something else than a list of records, one per item."""

    gives: str = "nothing"

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        run = super().load(device)
        give = {
            "nothing": lambda batch: None,
            "a generator": lambda batch: (one for one in run(batch)),
            "few": lambda batch: [],
        }
        return give[self.gives]  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class NoSchema(Numbers):
    """Its settings give no schema, as an unknown model would."""

    @property
    def schema(self) -> Schema:
        raise ValueError("numbers: no model 'nosuch'")


@dataclass(frozen=True)
class Questions:
    """Two questions per item, each with the number of objects of `numbers`, -1 where it has none."""

    keys: tuple[str, ...]
    drop: str = ""
    name: ClassVar[str] = "questions"
    version: ClassVar[int] = 1
    of: ClassVar[str] = "numbers"

    @property
    def schema(self) -> Schema:
        return Schema({"objects": Column((), "int64"), "parent": Column((), "string")})

    def items(self) -> Iterable[tuple[str, bytes, str]]:
        for key in self.keys:
            for n in range(2):
                yield f"{key}-{n}", n.to_bytes(16, "little"), key

    def build(self, keys: set[str], parents: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        for key in sorted(keys):
            parent = key.rsplit("-", 1)[0]
            if key != self.drop:
                count = len(parents[parent]["order"]) if parent in parents else -1
                yield key, {"objects": np.int64(count), "parent": np.array(parent, object)}

"""Stage, Source and Job: what runs over what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from extractors.base import Extractor
from extractors.base import check as check_extractor
from storage.files import check_stage
from storage.schema import Record, Schema


class Source(Protocol):
    """A dataset on disk. A frozen dataclass: it travels to workers.

    Attributes:
        name: short name, `scannet`.
        kinds: the kinds of input it offers (`scan`, `clip`, `labels`).
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]

    def keys(self) -> list[str]:
        """Item keys, sorted, unique."""
        ...

    def files(self, key: str, kind: str) -> list[Path]:
        """The files that `open` reads, in a fixed order; one that is absent may be listed.

        A source that can tell what an unknown key is instead raises an InputError that says so.
        """
        ...

    def facts(self, key: str, kind: str) -> bytes:
        """What `open` takes from tables that items share (poses, boxes), the same bytes for the same content.

        Empty where all is in the item's files. An item with neither files nor facts does not offer the kind.
        """
        ...

    def open(self, key: str, kind: str) -> Any:
        """Read one input (`extractors.inputs`), or raise an InputError that names the file."""
        ...


class Table(Protocol):
    """A bulk table made in one go (questions); its rows are the items of its own stage.

    A frozen dataclass whose fields are its settings, as for an Extractor.

    Attributes:
        of: name of the stage whose records it joins by parent key, "" for none.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    of: ClassVar[str]

    @property
    def schema(self) -> Schema: ...

    def items(self) -> Iterable[tuple[str, bytes, str]]:
        """(item key, digest of the row's raw content, parent key) of every row."""
        ...

    def build(self, keys: set[str], parents: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        """Records of the rows asked for; `parents` lacks the parents that have no record."""
        ...


@dataclass(frozen=True)
class Stage:
    """An extractor over the items of a source or the records of earlier stages.

    Attributes:
        extractor: what runs.
        name: name in the store, the extractor's own by default.
        of: what feeds each entry of the extractor's `takes`: kinds of the source or names of
            earlier stages; `takes` itself by default.
        batch, workers, gpus: how it runs, never what comes out.
    """

    extractor: Extractor
    name: str = ""
    of: tuple[str, ...] = ()
    batch: int | None = None
    workers: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        check_extractor(self.extractor)
        object.__setattr__(self, "name", check_stage(self.name or self.extractor.name))
        object.__setattr__(self, "of", self.of or self.extractor.takes)
        object.__setattr__(self, "batch", self.batch or self.extractor.batch)
        if len(self.of) != len(self.extractor.takes):
            raise ValueError(
                f"stage {self.name}: {self.extractor.name} takes {self.extractor.takes}, 'of' gives {self.of}"
            )


@dataclass(frozen=True)
class Job:
    """Stages in order over one source, and the tables that go with them.

    Attributes:
        name: job name.
        source: the dataset; None for a job of tables alone.
        stages: in an order in which each stage comes after those that feed it.
        tables: question tables.
    """

    name: str
    source: Source | None
    stages: tuple[Stage, ...]
    tables: tuple[Table, ...] = ()

    def upstream(self, stage: Stage) -> tuple[str, ...]:
        """Names of the earlier stages among `stage.of`, in order."""
        names = {s.name for s in self.stages}
        return tuple(n for n in stage.of if n in names)

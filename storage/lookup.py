"""Records together with those of their parents: questions with the objects of their scene."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from storage.errors import RecordMissing, SchemaError
from storage.join import StoreMapping
from storage.reader import Records
from storage.schema import Record


class Lookup(StoreMapping[dict[str, Record | None]]):
    """A join by a column instead of by key. It maps a child's key to {stage: record}, as `Join` does.

        questions = cache["sqa3d_questions"].select("question", "answer", "scene_id")
        pairs = Lookup(questions, "scene_id", cache["votenet"], cache["bev_grid"])
        pairs["220602000000"]["votenet"]["feature"]

    Attributes:
        records: the children, then the parents.
    """

    def __init__(
        self, children: Records, by: str, *parents: Records, missing: Literal["drop", "raise", "mask"] = "drop"
    ) -> None:
        """
        Args:
            children: records without an element axis, one per question.
            by: their column with the parent's key.
            parents: stages that are keyed by it.
            missing: what to do about children one of whose parents has no record: leave them out,
                raise, or give None for the parent that is absent.

        Raises:
            SchemaError: the column is not one value per child.
            RecordMissing: with `raise`, naming one of the children.
        """
        if missing not in ("drop", "raise", "mask"):
            raise ValueError(f"missing={missing!r}: use 'drop', 'raise' or 'mask'")
        for records in (children, *parents):
            if not hasattr(records, "stage"):
                raise TypeError(
                    f"a lookup is of the records of stages, such as cache['votenet'], not of {records!r:.80}"
                )
        self.records = (children, *parents)
        if len({r.stage for r in self.records}) != len(self.records) or not parents:
            raise ValueError(f"a lookup needs different stages, got {[r.stage for r in self.records]}")
        keyed = children.select(by)
        if keyed.schema.element or keyed.schema.columns[by].dims:
            raise SchemaError(f"{children.stage}: '{by}' is not one value per record, so it can't name its parent")
        self.missing = missing
        self._parent = {key: str(keyed[key][by].item()) for key in keyed}
        if missing != "mask":
            lacking = [key for key, parent in self._parent.items() if not all(parent in r for r in parents)]
            if lacking and missing == "raise":
                raise RecordMissing(
                    f"{len(lacking)} of {len(self._parent)} {children.stage} have no record of their parent in all of "
                    f"{', '.join(r.stage for r in parents)}: {lacking[0]!r} of {self._parent[lacking[0]]!r} for one"
                )
            for key in lacking:
                del self._parent[key]

    def __repr__(self) -> str:
        stages = ", ".join(repr(records.stage) for records in self.records)
        return f"Lookup({stages}, missing={self.missing!r}: {len(self)} keys)"

    def parent(self, key: str) -> str:
        """Key of a child's parent."""
        try:
            return self._parent[key]
        except KeyError:
            self.records[0].row(key)  # raises for a key that never was
            raise RecordMissing(f"{key!r} is left out: it has no record, or its parent has none") from None

    def shards(self, keys: Sequence[str]) -> np.ndarray:
        """(key,) number of the shard that holds the first parent's record, -1 where there is none."""
        return self.records[1].shards([self._parent[key] for key in keys])

    def __getitem__(self, key: str) -> dict[str, Record | None]:
        parent = self.parent(key)
        child, *parents = self.records
        found: dict[str, Record | None] = {child.stage: child[key]}
        for records in parents:
            found[records.stage] = records[parent] if self.missing != "mask" or parent in records else None
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._parent

    def __iter__(self) -> Iterator[str]:
        return iter(self._parent)

    def __len__(self) -> int:
        return len(self._parent)

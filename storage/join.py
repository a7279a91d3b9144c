"""Several stages' records by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from storage.errors import RecordMissing, near
from storage.schema import Record

if TYPE_CHECKING:
    from storage.reader import Records

_COMPLETED = 10_000  # keys that the tab key offers, at most: a shell compares them one by one

_Value = TypeVar("_Value", covariant=True)


class StoreMapping(Mapping[str, _Value]):
    """A mapping whose values lie in a store. It equals itself alone: comparing values would read them all."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _ipython_key_completions_(self) -> list[str]:
        return list(self) if len(self) <= _COMPLETED else []


class Join(StoreMapping[dict[str, Record | None]]):
    """Several stages' records by key: `join[key]["votenet"]["feature"]`."""

    def __init__(self, records: Sequence[Records], missing: str = "drop") -> None:
        if missing not in ("drop", "raise", "mask"):
            raise ValueError(f"missing={missing!r}: use 'drop', 'raise' or 'mask'")
        for r in records:
            if not hasattr(r, "stage"):
                raise TypeError(f"a join is of the records of stages, such as cache['votenet'], not of {r!r:.80}")
        if len({r.stage for r in records}) != len(records) or not records:
            raise ValueError(f"join needs different stages, got {[r.stage for r in records]}")
        self._records, self.missing = tuple(records), missing
        everywhere = set(records[0]).intersection(*records[1:])
        anywhere = set(records[0]).union(*records[1:])
        if missing == "raise" and everywhere != anywhere:
            gaps = [f"{r.stage} lacks {len(gap)}, {min(gap)!r} for one" for r in records if (gap := anywhere - set(r))]
            raise RecordMissing(
                f"{len(anywhere - everywhere)} of {len(anywhere)} keys are not in all stages: {'; '.join(gaps)}"
            )
        self._keys = dict.fromkeys(sorted(anywhere if missing == "mask" else everywhere))

    def __reduce__(self) -> tuple[Any, ...]:
        return Join, (self._records, self.missing)

    def __repr__(self) -> str:
        return f"Join({', '.join(map(repr, self.stages))}, missing={self.missing!r}: {len(self)} keys)"

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(r.stage for r in self._records)

    @property
    def records(self) -> tuple[Records, ...]:
        """What is joined, in order."""
        return self._records

    def shards(self, keys: Sequence[str]) -> np.ndarray:
        """(key,) number of the shard that holds the first stage's record, -1 where it has none."""
        return self._records[0].shards(keys)

    def __getitem__(self, key: str) -> dict[str, Record | None]:
        if key not in self._keys:
            raise RecordMissing(
                f"no record for {key!r} in the join of {', '.join(self.stages)}{near(key, list(self._keys))}"
            )
        return {r.stage: r[key] if self.missing != "mask" or key in r else None for r in self._records}

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

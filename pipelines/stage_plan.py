"""The plan of one stage: a table of items with actions and reasons, and what is decided while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow as pa

from extractors.base import recipe as extractor_recipe
from pipelines.columns import DIGEST, TEXT, codes
from pipelines.inputs import digest_file
from pipelines.stage import Stage, Table
from storage.fingerprint import fingerprint
from storage.manifest import Row

ACTIONS = ("reuse", "compute", "maybe", "skip")
UPSTREAM_FAILED = "UpstreamFailed"  # error class of a row that hides a record whose upstream has failed since

NO_PARENT = b"no parent record"  # stands in a table's fingerprint where the parent has no record
STORED = {  # the manifest's columns that say which record stands, and their types here
    "status": TEXT,
    "shard": TEXT,
    "first_row": pa.int64(),
    "rows": pa.int64(),
    "bytes": pa.int64(),
    "shard_bytes": pa.int64(),
    "digest": DIGEST,
    "mapped": pa.bool_(),
    "error_class": TEXT,
    "error_text": TEXT,
    "attempts": pa.int32(),
    "seconds": pa.float64(),
}
SOUND, MISSING, CORRUPT = 0, 1, 2  # what a shard's size says of the records in it
READ = ("item", "fingerprint", "inputs", "recipe", *STORED)


@dataclass(frozen=True)
class Options:
    """What a user asks for beyond the job; empty sets mean no limit.

    Attributes:
        retry_failed: compute what failed before although nothing changed.
        force: names of stages to compute whatever the manifest says.
        stages: only these stages and those that feed them.
        items: only these items (for a table: also the rows of these parents).
    """

    retry_failed: bool = False
    force: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    items: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """What to do with one item, decided while the run goes on.

    Attributes:
        action: reuse, compute or skip.
        reason: as in the printed plan.
        fingerprint: 16 bytes that the new row carries; b"" where an upstream failed.
        commit: a row to commit now, nothing being computed: an earlier record that stands again, or a `failed` row in
            place of a record that would be stale; else None.
        row: the manifest row of the record that stands (reuse), for the stages downstream; else None.
        attempts: how often it was tried before under this fingerprint.
    """

    action: str
    reason: str
    fingerprint: bytes = b""
    commit: Row | None = None
    row: Row | None = None
    attempts: int = 0


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows of the past that may stand once an upstream has run, by item, the newest of an item first.

    Attributes:
        rows: manifest rows, some of which are candidates.
        index, row: of each candidate, the row of the plan's table and the row of `rows`.
        newest: no newer row of its item exists.
        fault: SOUND, MISSING or CORRUPT.
    """

    rows: pa.Table
    index: np.ndarray
    row: np.ndarray
    newest: np.ndarray
    fault: np.ndarray


@dataclass(frozen=True)
class PlanLine:
    """Items of one stage with the same action and reason.

    Attributes:
        items: how many.
        bytes: size of their records; estimated from past ones for compute and maybe, None where there are none.
        seconds: work of one worker, estimated from past runs; 0 for reuse and skip, None where there are none.
    """

    stage: str
    action: str
    reason: str
    items: int
    bytes: int | None
    seconds: float | None


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The plan of one stage.

    Attributes:
        stage: the stage or table.
        recipe, recipe_id: all that decides its output besides the item.
        feeds: names of the earlier stages whose records it reads, in the order of `stage.of`.
        table: one row per item, columns
            item          string
            parent        string: key of the upstream record that a table's row joins; null for stages, where it is
                          the item's own, and for rows without a parent
            action        dictionary of string: reuse, compute, maybe, skip
            reason        dictionary of string
            fingerprint   binary(16); null where an upstream runs or failed: if it runs, ask `decide`
            inputs        binary(16): digest of the raw inputs alone
            tries         int32: how often it was tried before under this fingerprint
            visible       bool: readers of the store see a record of the item now
            and of the record that stands, null where action is not reuse, the manifest's columns status, shard,
            first_row, rows, bytes, shard_bytes, digest, mapped, error_class, error_text, attempts, seconds
        again: manifest rows to commit before anything runs (`Manifest.commit_table`): records of an earlier run that
            stand again, remembered failures, and `failed` rows in place of records that would be stale.
        kept: records in the store of items that the source does not have (any more, or in this job); 0 in a plan of
            chosen items. They stay, and readers see them.
        recipe_lost: records of this recipe are in the store, but its file is gone or damaged: a run writes it again.
        mean_bytes, mean_seconds: of past records, None without any.
    """

    stage: Stage | Table
    recipe: dict[str, Any]
    recipe_id: str
    feeds: tuple[str, ...]
    table: pa.Table
    again: pa.Table
    kept: int = 0
    recipe_lost: bool = False
    mean_bytes: float | None = None
    mean_seconds: float | None = None
    forced: bool = False
    retry_failed: bool = False
    _parts: np.ndarray | None = field(default=None, repr=False)  # (item, entry of `of`, 16) digests, zero where unknown
    _candidates: Candidates | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Name of the stage in the store."""
        return self.stage.name

    def decide(self, index: int, digests: Mapping[str, bytes | None]) -> Decision:
        """Finish the plan of an item whose upstream records are known now (early cut-off).

        Args:
            index: row of `table`, with a null fingerprint and action `maybe` or `compute`.
            digests: upstream stage -> digest of the record it gave, None where it failed or has none.
        """
        if self._parts is None or self._candidates is None:
            raise ValueError(f"{self.name}: no item of this plan waits for an upstream")
        failed = [name for name in self.feeds if digests[name] is None]
        if failed and isinstance(self.stage, Stage):
            hide = self._failed_row(index, failed[0]) if self.table["visible"][index].as_py() else None
            return Decision("skip", "upstream failed", commit=hide)
        now = fingerprint(
            self.recipe_id,
            [
                (digests[entry] or NO_PARENT) if entry in self.feeds else self._parts[index, i].tobytes()
                for i, entry in enumerate(entries(self.stage))
            ],
        )
        reason = self.table["reason"][index].as_py()
        if self.forced:
            return Decision("compute", "forced", now)
        past = self._candidates
        for at in range(*np.searchsorted(past.index, [index, index + 1])):
            if past.rows["fingerprint"][int(past.row[at])].as_py() != now:
                continue
            if past.fault[at] != SOUND:
                if past.newest[at]:
                    reason = "missing shard" if past.fault[at] == MISSING else "corrupt"
                break
            row = self._row(past.rows, int(past.row[at]))
            commit = None if past.newest[at] else row
            if row.status != "failed":
                return Decision("reuse", "earlier run" if commit else "unchanged", now, commit, row)
            if not self.retry_failed:
                return Decision("skip", "failed before", now, commit)
            return Decision("compute", "failed before", now, attempts=row.attempts)
        return Decision("compute", reason, now)

    def row(self, index: int) -> Row:
        """The manifest row of the record that stands at `index` of `table` (action reuse)."""
        return self._row(self.table, index)

    def lines(self) -> list[PlanLine]:
        """The table counted by action and reason, in a fixed order."""
        reasons = self.table["reason"].combine_chunks().dictionary.to_pylist()
        group = len(reasons) * codes(self.table["action"]).astype(np.int64) + codes(self.table["reason"])
        counts = np.bincount(group)
        stored = np.bincount(group, self.table["bytes"].fill_null(0).to_numpy(), len(counts))
        lines = []
        for at in np.flatnonzero(counts).tolist():
            action, reason, items = ACTIONS[at // len(reasons)], reasons[at % len(reasons)], int(counts[at])
            size: int | None = int(stored[at])
            seconds: float | None = 0.0
            if action in ("compute", "maybe"):
                size = None if self.mean_bytes is None else round(self.mean_bytes * items)
                seconds = None if self.mean_seconds is None else self.mean_seconds * items
            lines.append(PlanLine(self.name, action, reason, items, size, seconds))
        return sorted(lines, key=lambda line: (ACTIONS.index(line.action), -line.items, line.reason))

    def _row(self, table: pa.Table, index: int) -> Row:
        values = {name: table[name][index].as_py() for name in ("item", "fingerprint", "inputs", *STORED)}
        return Row(stage=self.name, recipe=self.recipe_id, **values)

    def _failed_row(self, index: int, upstream: str) -> Row:
        return Row(
            stage=self.name, item=self.table["item"][index].as_py(), fingerprint=bytes(16),
            inputs=self.table["inputs"][index].as_py(), recipe=self.recipe_id, status="failed",
            error_class=UPSTREAM_FAILED, error_text=f"{upstream} has no record of this item any more",
        )  # fmt: skip


def entries(stage: Stage | Table) -> tuple[str, ...]:
    """What enters a fingerprint, in order: `of` for a stage, the row and its parent for a table."""
    return stage.of if isinstance(stage, Stage) else ("row", stage.of) if stage.of else ("row",)


def recipe_of(stage: Stage | Table) -> dict[str, Any]:
    """The recipe of a stage or table, without the paths among a table's fields: the digests of its rows count."""
    if isinstance(stage, Stage):
        return extractor_recipe(stage.extractor, digest_file)
    hints = get_type_hints(type(stage))
    kept = [f.name for f in fields(stage) if Path not in (hints[f.name], *get_args(hints[f.name]))]  # type: ignore[arg-type]
    values = {name: getattr(stage, name) for name in kept}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {"extractor": stage.name, "version": stage.version, "settings": settings, "weights": {}}

"""Decide, for each stage and item, whether its record is reused or computed, and why.

`plan` is a pure function of the job, the digests of its inputs and the manifest, vectorised over items and made
one stage at a time. `StagePlan.decide` finishes it for items whose upstream runs, once that record's digest is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipelines.stage import Stage, Table
from storage.manifest import Row

ACTIONS = ("reuse", "compute", "maybe", "skip")


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
        fingerprint: 16 bytes that the new row carries; b"" for skip because an upstream failed.
        commit: a row to commit now without computing anything (an earlier run's record that stands again, or
            `failed` under `UpstreamFailed` in place of a record that would be stale), else None.
        digest: digest of the record that stands (reuse), for the stages downstream; else None.
    """

    action: str
    reason: str
    fingerprint: bytes = b""
    commit: Row | None = None
    digest: bytes | None = None


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage.

    Attributes:
        stage: the stage or table.
        recipe, recipe_id: all that decides its output besides the item.
        feeds: names of the earlier stages whose records it reads, in the order of `stage.of`.
        table: one row per item, columns
            item          string
            action        dictionary of string: reuse, compute, maybe, skip
            reason        dictionary of string
            fingerprint   binary(16); null where an upstream runs: ask `decide`
            inputs        binary(16), digest of the raw inputs alone
            parent        string, key of the upstream record that a table's row joins; null for stages (the key is
                          the item) and for rows without a parent
            attempts      int32, how often it was tried under this fingerprint
            and of the record that stands (reuse; null otherwise)
            status, shard, first_row, rows, bytes, shard_bytes, digest, mapped
        again: manifest rows to commit before anything runs (`Manifest.commit_table`): records of an earlier run that
            stand again, and `failed` rows in place of records that would be stale.
    """

    stage: Stage | Table
    recipe: dict[str, Any]
    recipe_id: str
    feeds: tuple[str, ...]
    table: pa.Table
    again: pa.Table

    @property
    def name(self) -> str:
        """Name of the stage in the store."""
        return self.stage.name

    def decide(self, index: int, digests: Mapping[str, bytes | None]) -> Decision:
        """Finish the plan of row `index`, whose upstream records are known now.

        Args:
            index: row of `table` with a null fingerprint (action `maybe` or `compute`).
            digests: upstream stage -> digest of its record; None where it failed or has no record.
        """
        raise NotImplementedError

    def row(self, index: int) -> Row:
        """The manifest row of the record that stands (reuse): where a downstream worker reads it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """The plans of a job's stages, in the job's order."""

    job: str
    stages: tuple[StagePlan, ...]
    options: Options = field(default_factory=Options)

    def __getitem__(self, name: str) -> StagePlan:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

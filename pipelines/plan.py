"""Decide, for each stage and item, whether its record is reused or computed, and why.

`plan` is a pure function of the job, the digests of its inputs and the manifest, vectorised over items and made
one stage at a time. `StagePlan.decide` finishes it for an item whose upstream runs, once that record's digest is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.columns import as_bytes, codes, find
from pipelines.errors import JobError
from pipelines.inputs import Digests, combined
from pipelines.judge import History, Work, judge
from pipelines.stage import Job, Stage, Table
from pipelines.stage_plan import ACTIONS, NO_PARENT, Decision, Options, PlanLine, StagePlan, entries, recipe_of

__all__ = ["ACTIONS", "Decision", "Options", "Plan", "PlanLine", "StagePlan", "plan", "recipe_of"]


@dataclass(frozen=True)
class Plan:
    """The plans of a job's stages, in the job's order: a stage comes after those that feed it."""

    job: str
    stages: tuple[StagePlan, ...]
    options: Options

    def __getitem__(self, name: str) -> StagePlan:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r} in the plan of {self.job}: {', '.join(s.name for s in self.stages)}")

    def lines(self) -> list[PlanLine]:
        """All stages, counted by action and reason."""
        return [line for stage in self.stages for line in stage.lines()]

    @property
    def idle(self) -> bool:
        """True where nothing is computed and nothing written."""
        return all(
            len(s.again) == 0 and not s.recipe_lost and {line.action for line in s.lines()} <= {"reuse", "skip"}
            for s in self.stages
        )


def plan(
    job: Job,
    digests: Digests,
    manifest: History,
    options: Options = Options(),  # noqa: B008 - frozen
) -> Plan:
    """Plan every stage of a job.

    Args:
        job: stages and tables.
        digests: keys of the source and the digest of each input.
        manifest: what is stored; each stage's folder is listed once for the sizes of its shards.
        options: limits and wishes of the user.

    Raises:
        JobError: an option names a stage or item that there is not, or the stages do not fit together.
    """
    wanted = _wanted(job, options)
    items = options.items.union(  # a row that is asked for needs its parent
        parent
        for stage in wanted
        if not isinstance(stage, Stage) and options.items
        for key, _, parent in stage.items()
        if key in options.items
    )
    done: dict[str, StagePlan] = {}
    for stage in wanted:
        if isinstance(stage, Stage):
            work = _stage_work(stage, digests, done, items)
        else:
            work = _table_work(stage, done, options)
        done[stage.name] = judge(stage, work, manifest, options)
    plans = tuple(done.values())
    if unknown := options.items.difference(*(p.table["item"].to_pylist() for p in plans)) if options.items else ():
        if source := job.source:
            for key in sorted(unknown):
                source.files(key, source.kinds[0])  # a source that knows what else a key names says so
        known = [key for p in plans for key in p.table["item"].to_pylist()] or digests.items.to_pylist()
        near = sorted({match for key in unknown for match in difflib.get_close_matches(key, known, 3)})
        some = (
            f"did you mean {' or '.join(near)}?" if near else f"there are {len(known)}, such as {', '.join(known[:1])}"
        )
        raise JobError(f"job {job.name} has no item {', '.join(map(repr, sorted(unknown)))}; {some}")
    return Plan(job.name, plans, options)


def _wanted(job: Job, options: Options) -> list[Stage | Table]:
    """The stages asked for and all that feed them, in order."""
    every: list[Stage | Table] = [*job.stages, *job.tables]
    names = [stage.name for stage in every]
    if unknown := sorted((options.stages | options.force) - set(names)):
        raise JobError(f"job {job.name} has no stage {', '.join(unknown)}; it has {', '.join(names)}")
    if len(set(names)) < len(names):
        raise JobError(f"job {job.name}: two stages have the same name among {', '.join(names)}; give one another name")
    if not options.stages:
        return every
    wanted = set(options.stages)
    for stage in reversed(every):
        if stage.name in wanted:
            wanted.update(set(entries(stage)) & set(names))
    return [stage for stage in every if stage.name in wanted]


def _stage_work(stage: Stage, digests: Digests, done: Mapping[str, StagePlan], wanted: frozenset[str]) -> Work:
    feeds = tuple(entry for entry in stage.of if entry in done)
    kinds = [entry for entry in stage.of if entry not in done]
    items = digests.items if kinds else done[feeds[0]].table["item"].combine_chunks()
    there = np.ones(len(items), bool)
    for kind in kinds:
        if kind not in digests.kinds:
            offered = ", ".join(digests.kinds) or "nothing"
            raise JobError(
                f"stage {stage.name} takes '{kind}': neither the source ({offered}) nor an earlier stage gives it"
            )
        there &= digests.kinds[kind].is_valid().to_numpy(zero_copy_only=False)
    if wanted and kinds:
        there &= pc.is_in(items, pa.array(sorted(wanted), pa.string())).to_numpy(zero_copy_only=False)
    places = {name: find(items, done[name].table["item"]) for name in feeds}
    for place in places.values():
        there &= place >= 0
    keep = np.flatnonzero(there)
    whole = len(keep) == len(items)
    items = items if whole else items.take(pa.array(keep))
    parts = np.zeros((len(items), len(stage.of), 16), np.uint8)
    known, failed = np.ones(len(items), bool), np.zeros(len(items), bool)
    for i, entry in enumerate(stage.of):
        if entry in places:
            place = places[entry][keep]
            digest, final, lost = _outcome(done[entry])
            parts[:, i] = digest[place]
            known &= final[place]
            failed |= lost[place]
        else:
            parts[:, i] = as_bytes(digests.kinds[entry] if whole else digests.kinds[entry].take(pa.array(keep)))
    raw = [i for i, entry in enumerate(stage.of) if entry not in places]
    parents = pa.nulls(len(items), pa.string())
    return Work(items, parents, feeds, parts, combined(parts[:, raw]), known & ~failed, failed)


def _table_work(table: Table, done: Mapping[str, StagePlan], options: Options) -> Work:
    feeds = (table.of,) if table.of else ()
    if table.of and table.of not in done:
        raise JobError(f"table {table.name} joins the records of '{table.of}', which is no stage of this job")
    rows = [row for row in table.items() if not options.items or not options.items.isdisjoint((row[0], row[2]))]
    items = pa.array([key for key, _, _ in rows], pa.string())
    if len(pc.unique(items)) < len(items):
        twice = pc.value_counts(items).filter(pc.greater(pc.value_counts(items).field("counts"), 1))
        raise JobError(f"table {table.name}: key {twice.field('values')[0].as_py()!r} is given to several rows")
    parents = pa.array([parent or None for _, _, parent in rows], pa.string())
    parts = np.zeros((len(rows), 1 + len(feeds), 16), np.uint8)
    own = b"".join([row_digest(digest) for _, digest, _ in rows])
    parts[:, 0] = np.frombuffer(own, np.uint8).reshape(-1, 16)
    known = np.ones(len(rows), bool)
    if feeds:
        place = find(parents, done[table.of].table["item"])
        digest, final, lost = _outcome(done[table.of])
        parts[:, 1] = np.frombuffer(NO_PARENT, np.uint8)
        joined = np.flatnonzero(place >= 0)
        joined = joined[~lost[place[joined]]]
        parts[joined, 1] = digest[place[joined]]
        known[joined] = final[place[joined]]
    return Work(items, parents, feeds, parts, parts[:, 0].copy(), known, np.zeros(len(rows), bool))


def row_digest(digest: bytes) -> bytes:
    """What a table says of a row's content, in the 16 bytes of a plan's column `inputs`."""
    return digest[:16].ljust(16, b"\0")


def _outcome(plan: StagePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row of a planned stage: digest (16,) of the record that stands; it is final; it has failed."""
    action = codes(plan.table["action"])
    return as_bytes(plan.table["digest"]), action == ACTIONS.index("reuse"), action == ACTIONS.index("skip")

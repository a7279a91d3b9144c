"""The vectorised plan agrees with a slow one in plain Python that follows the rules item by item, over random pasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extractors.base import Extractor, Weights
from pipelines.inputs import Digests
from pipelines.plan import Options, plan, recipe_of
from pipelines.stage import Job, Stage
from storage.fingerprint import fingerprint, recipe_id
from storage.manifest import Row
from storage.schema import Column, Record, Schema
from tests.pipelines.history import MemoryHistory

ITEMS = ["a", "b", "c"]


@dataclass(frozen=True, kw_only=True)
class Points(Extractor):
    name: ClassVar[str] = "points"
    takes: ClassVar[tuple[str, ...]] = ("scan",)
    size: int = 1
    weights: Weights


@dataclass(frozen=True, kw_only=True)
class Grid(Extractor):
    name: ClassVar[str] = "grid"
    takes: ClassVar[tuple[str, ...]] = ("points", "clip")
    size: int = 1


@dataclass(frozen=True)
class Questions:
    size: int = 1
    rows: InitVar[tuple[tuple[str, bytes, str], ...]] = ()
    name: ClassVar[str] = "questions"
    version: ClassVar[int] = 1
    of: ClassVar[str] = "grid"
    schema: ClassVar[Schema] = Schema({"x": Column()})

    def __post_init__(self, rows: tuple[tuple[str, bytes, str], ...]) -> None:
        object.__setattr__(self, "_rows", rows)  # content, not a setting

    def items(self) -> Iterable[tuple[str, bytes, str]]:
        return self._rows  # type: ignore[attr-defined]

    def build(self, keys: set[str], parents: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        yield from ()


def digest(value: int) -> bytes:
    return bytes([value]) * 16


@dataclass
class Slow:
    """The rules of the plan, one item at a time."""

    history: MemoryHistory
    options: Options

    def decide(
        self, stage: Any, item: str, entries: list[bytes | None | str], raw: bytes, joins: bool = False
    ) -> tuple[str, str, bytes | None]:
        """(action, reason, digest of the record that stands). An entry is a digest, `runs` or `failed`."""
        recipe = recipe_of(stage)
        rid = recipe_id(recipe)
        rows = self.history.of(stage.name, item)
        if "failed" in entries:
            return "skip", "upstream failed", None
        if stage.name in self.options.force:
            return "compute", "forced", None
        if not rows:
            return "compute", "new", None
        if "runs" in entries:
            hopeful = False
            seen = set()
            for row in rows:
                if row.recipe == rid and row.inputs == raw and row.fingerprint not in seen:
                    seen.add(row.fingerprint)
                    failed_again = row.status == "failed" and self.options.retry_failed
                    hopeful |= not self.fault(row) and not failed_again
            reason = self.difference(rows[0], recipe, raw, joins)
            if rows[0].recipe == rid and rows[0].inputs == raw:
                reason = self.fault(rows[0]) or reason
            return ("maybe" if hopeful else "compute"), reason, None
        now = fingerprint(rid, entries)  # type: ignore[arg-type]
        same = [row for row in rows if row.fingerprint == now]
        if not same:
            return "compute", self.difference(rows[0], recipe, raw, joins), None
        row = same[0]
        if row.status == "failed":
            return ("compute" if self.options.retry_failed else "skip"), "failed before", None
        if fault := self.fault(row):
            return "compute", fault if row is rows[0] else self.difference(rows[0], recipe, raw, joins), None
        return "reuse", "unchanged" if row is rows[0] else "earlier run", row.digest

    def fault(self, row: Row) -> str:
        if row.status == "corrupt":
            return "corrupt"
        if row.status == "failed" or not row.shard:
            return ""
        size = self.history.sizes.get(row.shard)
        return "missing shard" if size is None else "corrupt" if size != row.shard_bytes else ""

    def difference(self, row: Row, recipe: dict[str, Any], raw: bytes, joins: bool) -> str:
        old = self.history.recipes[row.recipe]
        parts = []
        if (a := old["settings"]["size"]) != (b := recipe["settings"]["size"]):
            parts.append(f"settings changed: size {a} -> {b}")
        if old["weights"] != recipe["weights"]:
            parts.append("weights changed")
        if row.inputs != raw:
            parts.append("input changed")
        return "; ".join(parts) or ("upstream changed" if joins else "input changed")


sizes = st.integers(1, 2)
weights = st.sampled_from([Weights("untrained:0"), Weights("untrained:1")])
digests = st.integers(1, 2).map(digest)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, Digests]:
    scans = [draw(digests) for _ in ITEMS]
    clips = [draw(st.one_of(digests, st.none())) if draw(st.booleans()) else digest(1) for _ in ITEMS]
    rows = tuple(
        (f"q{i}", draw(digests), draw(st.sampled_from([*ITEMS, "z", ""]))) for i in range(draw(st.integers(0, 3)))
    )
    stages = (Stage(Points(size=draw(sizes), weights=draw(weights))), Stage(Grid(size=draw(sizes))))
    inputs = {"scan": pa.array(scans, pa.binary(16)), "clip": pa.array(clips, pa.binary(16))}
    return Job("job", None, stages, (Questions(draw(sizes), rows),)), Digests(pa.array(ITEMS), inputs)


@st.composite
def pasts(draw: st.DrawFn) -> MemoryHistory:
    """Rows that earlier jobs of the same kind could have left, in any order."""
    history = MemoryHistory(sizes={f"{stage}/{i}": 10 for stage in ("points", "grid", "questions") for i in (1, 2)})
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(["points", "grid", "questions"]))
        stage: Any = {
            "points": lambda: Stage(Points(size=draw(sizes), weights=draw(weights))),
            "grid": lambda: Stage(Grid(size=draw(sizes))),
            "questions": lambda: Questions(draw(sizes)),
        }[kind]()
        rid = history.save_recipe(recipe_of(stage))
        scan, up = (
            draw(digests),
            draw(st.one_of(digests, st.just(b"no parent record")) if kind == "questions" else digests),
        )
        entries = {"points": [scan], "grid": [up, scan], "questions": [scan, up]}[kind]
        status = draw(st.sampled_from(["ok", "ok", "ok", "empty", "failed", "corrupt"]))
        shard = "" if status in ("failed", "empty") else f"{kind}/{draw(st.integers(1, 3))}"  # 3 does not exist
        item = draw(st.sampled_from([f"q{i}" for i in range(3)] if kind == "questions" else ITEMS))
        history.committed.append(
            Row(
                kind, item, fingerprint(rid, entries), scan, rid, status, shard=shard,
                shard_bytes=draw(st.sampled_from([10, 10, 10, 11])), rows=1,
                digest=draw(digests) if status in ("ok", "empty", "corrupt") else b"",
                attempts=draw(st.integers(1, 3)),
            )
        )  # fmt: skip
    return history


options = st.builds(
    Options, retry_failed=st.booleans(), force=st.sets(st.sampled_from(["points", "grid"]), max_size=1).map(frozenset)
)


def slow_plan(job: Job, given_digests: Digests, history: MemoryHistory, wishes: Options) -> dict[tuple[str, str], Any]:
    slow = Slow(history, wishes)
    found: dict[tuple[str, str], Any] = {}

    def outcome(stage: str, item: str) -> Any:
        action, _, record = found[stage, item]
        return {"reuse": record, "compute": "runs", "maybe": "runs", "skip": "failed"}[action]

    scans, clips = (given_digests.kinds[kind].to_pylist() for kind in ("scan", "clip"))
    for item, scan in zip(ITEMS, scans, strict=True):
        found["points", item] = slow.decide(job.stages[0], item, [scan], scan)
    for item, clip in zip(ITEMS, clips, strict=True):
        if clip is not None:
            found["grid", item] = slow.decide(job.stages[1], item, [outcome("points", item), clip], clip, True)
    for key, row, parent in job.tables[0].items():
        up = outcome("grid", parent) if ("grid", parent) in found else b"no parent record"
        entry = b"no parent record" if up == "failed" else up
        found["questions", key] = slow.decide(job.tables[0], key, [row, entry], row, True)
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs(), pasts(), options)
def test_plan_agrees_with_the_rules_item_by_item(
    made: tuple[Job, Digests], history: MemoryHistory, wishes: Options
) -> None:
    job, given_digests = made
    expected = slow_plan(job, given_digests, history, wishes)
    found = {}
    for stage in plan(job, given_digests, history, wishes).stages:
        for row in stage.table.to_pylist():
            found[stage.name, row["item"]] = (row["action"], row["reason"], row["digest"])
    assert found == expected


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs(), pasts(), options, st.data())
def test_deciding_later_gives_what_a_plan_made_later_would_say(
    made: tuple[Job, Digests], history: MemoryHistory, wishes: Options, data: st.DataObject
) -> None:
    """Play the run of `points`: its items get records; what `decide` says of `grid` is what a new plan says of it."""
    job, given_digests = made
    first = plan(job, given_digests, history, wishes)
    later = replace_history(history)
    outcomes: dict[str, bytes | None] = {}
    for row in first["points"].table.to_pylist():
        if row["action"] == "compute":
            record = data.draw(st.one_of(digests, st.none()), label=f"points {row['item']}")
            outcomes[row["item"]] = record
            later.save_recipe(first["points"].recipe)
            later.committed.append(
                Row(
                    "points", row["item"], row["fingerprint"], row["inputs"], first["points"].recipe_id,
                    "ok" if record else "failed", "points/1" if record else "", shard_bytes=10, digest=record or b"",
                )
            )  # fmt: skip
    again = replace(wishes, force=wishes.force - {"points"}, retry_failed=False)
    second = plan(job, given_digests, later, again)
    expected = {row["item"]: row for row in second["grid"].table.to_pylist()}
    if wishes.retry_failed:
        return  # the second plan would have to retry grid alone
    for index, row in enumerate(first["grid"].table.to_pylist()):
        if row["fingerprint"] is None and row["action"] in ("compute", "maybe"):
            decision = first["grid"].decide(index, {"points": outcomes[row["item"]]})
            want = expected[row["item"]]
            assert decision.action == want["action"]
            assert decision.fingerprint == (want["fingerprint"] or b"")
            assert (decision.row.digest if decision.row else None) == want["digest"]
            if decision.action != "compute":
                assert decision.reason == want["reason"]
            committed = {r["item"] for r in second["grid"].again.to_pylist()}
            assert (decision.commit is not None) == (row["item"] in committed)


def replace_history(history: MemoryHistory) -> MemoryHistory:
    return MemoryHistory(list(history.committed), dict(history.sizes), dict(history.recipes))

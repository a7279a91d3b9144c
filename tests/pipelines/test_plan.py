"""What a plan says about changed settings, inputs, versions and weights, lost shards, failures and earlier runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from extractors.base import Extractor, Weights
from pipelines.errors import JobError
from pipelines.inputs import Digests
from pipelines.judge import recipe_change
from pipelines.plan import Options, Plan, StagePlan, plan
from pipelines.stage import Job, Stage
from storage.fingerprint import fingerprint
from storage.manifest import Row
from tests.pipelines.history import MemoryHistory


@dataclass(frozen=True, kw_only=True)
class Points(Extractor):
    name: ClassVar[str] = "points"
    takes: ClassVar[tuple[str, ...]] = ("scan",)
    proposals: int = 256
    color: str = "exact"
    weights: Weights = field(default_factory=lambda: Weights("untrained:0"))


@dataclass(frozen=True, kw_only=True)
class NewerPoints(Points):
    version: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class Grid(Extractor):
    name: ClassVar[str] = "grid"
    takes: ClassVar[tuple[str, ...]] = ("points",)


def given_digests(**scans: int) -> Digests:
    values = [bytes([value]) * 16 for value in scans.values()]
    return Digests(pa.array(list(scans), pa.string()), {"scan": pa.array(values, pa.binary(16))})


class World:
    """A job, its inputs and a history to which runs are played."""

    def __init__(self, *stages: Extractor, **scans: int) -> None:
        self.history = MemoryHistory()
        self.digests = given_digests(**(scans or {"a": 1, "b": 2}))
        self.use(*(stages or (Points(), Grid())))

    def use(self, *stages: Extractor) -> None:
        self.job = Job("job", None, tuple(Stage(extractor) for extractor in stages))

    def plan(self, **options: Any) -> Plan:
        sets = {k: frozenset(v) if isinstance(v, tuple) else v for k, v in options.items()}
        return plan(self.job, self.digests, self.history, Options(**sets))

    def says(self, stage: str, **options: Any) -> dict[str, tuple[str, str]]:
        table = self.plan(**options)[stage].table
        return {row["item"]: (row["action"], row["reason"]) for row in table.to_pylist()}

    def run(self, result: Callable[[str, str], bytes | None] | None = None, **options: Any) -> None:
        """Play a run: `result(stage, item)` is the digest of the record, None for a failure."""
        made = self.plan(**options)
        outcomes: dict[tuple[str, str], bytes | None] = {}
        for stage in made.stages:
            self.history.save_recipe(stage.recipe)
            for row in stage.again.to_pylist():
                self.commit(Row(**row))
            for index, row in enumerate(stage.table.to_pylist()):
                key = (stage.name, row["item"])
                outcomes[key] = row["digest"] if row["action"] == "reuse" else None
                if row["action"] not in ("compute", "maybe"):
                    continue
                print_, tries = row["fingerprint"], row["tries"]
                if print_ is None:
                    decision = stage.decide(index, {name: outcomes[name, row["item"]] for name in stage.feeds})
                    if decision.commit:
                        self.commit(decision.commit)
                    if decision.action != "compute":
                        outcomes[key] = decision.row.digest if decision.row else None
                        continue
                    print_, tries = decision.fingerprint, decision.attempts
                outcomes[key] = result(*key) if result else print_
                self.record(stage, row, print_, tries, outcomes[key])

    def record(self, stage: StagePlan, row: dict[str, Any], print_: bytes, tries: int, digest: bytes | None) -> None:
        shard = f"{stage.name}/{len(self.history.committed)}.parquet" if digest else ""
        made = Row(
            stage.name, row["item"], print_, row["inputs"], stage.recipe_id, "ok" if digest else "failed", shard,
            rows=1, bytes=100, shard_bytes=10, digest=digest or b"", attempts=tries + 1, seconds=2.0,
            error_class="" if digest else "InputError",
        )  # fmt: skip
        self.commit(made)
        if shard:
            self.history.sizes[shard] = 10

    def commit(self, row: Row) -> None:
        self.history.committed.append(row)


def test_everything_is_new_in_an_empty_store() -> None:
    world = World()
    assert world.says("points") == {"a": ("compute", "new"), "b": ("compute", "new")}
    assert world.says("grid") == {"a": ("compute", "new"), "b": ("compute", "new")}


def test_what_was_run_is_reused() -> None:
    world = World()
    world.run()
    assert {*world.says("points").values(), *world.says("grid").values()} == {("reuse", "unchanged")}
    assert world.plan().idle


def test_a_changed_setting_is_named_with_both_values() -> None:
    world = World()
    world.run()
    world.use(Points(proposals=128), Grid())
    assert world.says("points")["a"] == ("compute", "settings changed: proposals 256 -> 128")


def test_several_changes_are_all_named() -> None:
    world = World()
    world.run()
    world.use(NewerPoints(proposals=128, color="legacy", weights=Weights("untrained:1")), Grid())
    world.digests = given_digests(a=7, b=2)
    changed = "settings changed: proposals 256 -> 128, color exact -> legacy; weights changed; version changed"
    assert world.says("points")["a"] == ("compute", f"{changed}; input changed")
    assert world.says("points")["b"] == ("compute", changed)


def test_changed_weights_are_named() -> None:
    world = World()
    world.run()
    world.use(Points(weights=Weights("untrained:1")), Grid())
    assert world.says("points")["a"] == ("compute", "weights changed")


def test_a_changed_weight_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"one")
    world = World(Points(weights=Weights(str(weights))))
    world.run()
    weights.touch()
    assert world.says("points")["a"] == ("reuse", "unchanged")
    weights.write_bytes(b"two")
    assert world.says("points")["a"] == ("compute", "weights changed")


def test_a_raised_version_is_named() -> None:
    world = World()
    world.run()
    world.use(NewerPoints(), Grid())
    assert world.says("points")["a"] == ("compute", "version changed")


def test_only_the_item_whose_input_changed_is_computed() -> None:
    world = World()
    world.run()
    world.digests = given_digests(a=1, b=9, c=3)
    assert world.says("points") == {
        "a": ("reuse", "unchanged"),
        "b": ("compute", "input changed"),
        "c": ("compute", "new"),
    }
    assert world.says("grid") == {
        "a": ("reuse", "unchanged"),
        "b": ("maybe", "upstream changed"),
        "c": ("compute", "new"),
    }


def test_equal_content_from_an_upstream_that_ran_again_is_reused_downstream() -> None:
    world = World()
    world.run(lambda stage, item: b"=" * 16)
    world.use(Points(proposals=128), Grid())
    before = len(world.history.of("grid", "a"))
    world.run(lambda stage, item: b"=" * 16)
    assert len(world.history.of("grid", "a")) == before
    assert world.plan().idle


def test_other_content_from_upstream_is_computed_downstream() -> None:
    world = World()
    world.run(lambda stage, item: b"=" * 16)
    world.use(Points(proposals=128), Grid())
    made = world.plan()
    decision = made["grid"].decide(0, {"points": b"!" * 16})
    assert (decision.action, decision.reason) == ("compute", "upstream changed")
    assert decision.fingerprint == fingerprint(made["grid"].recipe_id, [b"!" * 16])


def test_a_failure_is_remembered_until_asked_otherwise() -> None:
    world = World()
    world.run(lambda stage, item: None if (stage, item) == ("points", "a") else b"x" * 16)
    assert world.says("points")["a"] == ("skip", "failed before")
    assert world.says("grid")["a"] == ("skip", "upstream failed")
    assert world.says("points", retry_failed=True)["a"] == ("compute", "failed before")
    assert world.plan(retry_failed=True)["points"].table["tries"].to_pylist() == [1, 0]
    world.run(lambda stage, item: None, retry_failed=True)
    assert world.history.of("points", "a")[0].attempts == 2


def test_a_failure_is_forgotten_when_its_input_changes() -> None:
    world = World()
    world.run(lambda stage, item: None)
    world.digests = given_digests(a=5, b=2)
    assert world.says("points") == {"a": ("compute", "input changed"), "b": ("skip", "failed before")}


def test_a_record_whose_upstream_fails_now_is_hidden_and_comes_back_with_it() -> None:
    world = World()
    world.run()
    world.digests = given_digests(a=9, b=2)
    world.run(lambda stage, item: None)
    hidden = world.history.of("grid", "a")[0]
    assert (hidden.status, hidden.error_class) == ("failed", "UpstreamFailed")
    assert world.history.of("grid", "b")[0].status == "ok"
    assert world.plan().idle, "hidden once, not again at every run"
    world.digests = given_digests(a=1, b=2)
    assert world.says("grid")["a"] == ("reuse", "earlier run")
    world.run()
    assert world.history.of("grid", "a")[0].status == "ok"


def test_going_back_to_earlier_settings_commits_the_earlier_rows_and_computes_nothing() -> None:
    world = World()
    world.run()
    first = world.history.of("points", "a")[0]
    world.use(Points(proposals=128), Grid())
    world.run()
    world.use(Points(), Grid())
    made = world.plan()
    assert world.says("points")["a"] == ("reuse", "earlier run")
    assert made["points"].again.num_rows == 2
    assert made["points"].row(0) == replace(first, run="")
    world.run()
    assert world.plan().idle


def test_an_earlier_record_whose_shard_is_gone_is_computed_for_the_changed_setting() -> None:
    world = World()
    world.run()
    first = world.history.of("points", "a")[0]
    world.use(Points(proposals=128), Grid())
    world.run()
    world.use(Points(), Grid())
    del world.history.sizes[first.shard]
    assert world.says("points")["a"] == ("compute", "settings changed: proposals 128 -> 256")


def test_a_lost_shard_is_missing_and_a_shortened_one_corrupt() -> None:
    world = World()
    world.run()
    lost, cut = world.history.of("points", "a")[0].shard, world.history.of("points", "b")[0].shard
    del world.history.sizes[lost]
    world.history.sizes[cut] -= 1
    assert world.says("points") == {"a": ("compute", "missing shard"), "b": ("compute", "corrupt")}
    assert world.says("grid")["a"] == ("maybe", "upstream changed")


def test_a_record_that_verify_marked_is_corrupt() -> None:
    world = World()
    world.run()
    world.commit(replace(world.history.of("points", "a")[0], status="corrupt"))
    assert world.says("points")["a"] == ("compute", "corrupt")


def test_a_forced_stage_is_computed_and_what_follows_may_be_reused() -> None:
    world = World()
    world.run()
    assert set(world.says("points", force=("points",)).values()) == {("compute", "forced")}
    assert set(world.says("grid", force=("points",)).values()) == {("maybe", "upstream changed")}


def test_only_the_stages_asked_for_and_their_feeders_are_planned() -> None:
    assert [stage.name for stage in World().plan(stages=("points",)).stages] == ["points"]
    assert [stage.name for stage in World().plan(stages=("grid",)).stages] == ["points", "grid"]


def test_only_the_items_asked_for_are_planned() -> None:
    assert list(World().says("grid", items=("b",))) == ["b"]


def test_unknown_stages_and_items_are_refused_with_what_there_is() -> None:
    with pytest.raises(JobError, match=r"no stage grud; it has points, grid"):
        World().plan(force=("grud",))
    with pytest.raises(JobError, match=r"no item 'scene1'; did you mean scene12\?"):
        World(scene12=1).plan(items=("scene1",))


def test_an_input_that_nothing_gives_is_refused() -> None:
    world = World(Grid())
    with pytest.raises(JobError, match="stage grid takes 'points'"):
        world.plan()


def test_items_without_a_kind_of_input_are_no_items_of_its_stage() -> None:
    world = World(Points())
    scans = pa.array([b"1" * 16, None], pa.binary(16))
    world.digests = Digests(pa.array(["a", "b"]), {"scan": scans})
    assert list(world.says("points")) == ["a"]


def test_lines_count_items_and_estimate_from_past_runs() -> None:
    world = World()
    world.run()
    world.digests = given_digests(a=1, b=9)
    lines = {(n.stage, n.action): n for n in world.plan().lines()}
    assert (lines["points", "reuse"].items, lines["points", "reuse"].bytes) == (1, 100)
    computed = lines["points", "compute"]
    assert (computed.items, computed.bytes, computed.seconds) == (1, 100, 2.0)


def test_nothing_is_estimated_without_a_past() -> None:
    line = World().plan().lines()[0]
    assert (line.bytes, line.seconds) == (None, None)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ({"a": 1}, {"a": True}, "settings changed: a 1 -> true"),
        ({"a": 1}, {"a": 1, "b": None}, "settings changed: b (none) -> null"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "settings changed: a [1, 2] -> [1, 3]"),
        ({"a": "x" * 99}, {"a": "y"}, f"settings changed: a {'x' * 37}... -> y"),
    ],
)
def test_setting_differences_are_readable(old: dict[str, Any], new: dict[str, Any], text: str) -> None:
    recipes = [{"extractor": "e", "version": 1, "settings": settings, "weights": {}} for settings in (old, new)]
    assert recipe_change(*recipes) == text


def test_a_recipe_of_a_record_that_no_job_made_is_another_recipe() -> None:
    new = {"extractor": "e", "version": 1, "settings": {"a": 1}, "weights": {}}
    assert recipe_change({"made": "by hand"}, new) == (
        "settings changed: extractor (none) -> e, a (none) -> 1; version changed"
    )


def test_weights_that_were_none_are_weights_that_changed_and_no_setting() -> None:
    old = {"extractor": "e", "version": 1, "settings": {"a": 1, "more": None}, "weights": {}}
    new = {"extractor": "e", "version": 1, "settings": {"a": 1}, "weights": {"more": "sha256:0"}}
    assert recipe_change(old, new) == recipe_change(new, old) == "weights changed"


def test_an_upstream_that_gives_an_earlier_content_brings_the_earlier_record_back() -> None:
    world = World()
    contents = {256: b"1" * 16, 128: b"2" * 16, 64: b"1" * 16}
    for proposals, content in contents.items():
        world.use(Points(proposals=proposals), Grid())
        if proposals == 64:
            decision = world.plan()["grid"].decide(0, {"points": content})
            assert (decision.action, decision.reason) == ("reuse", "earlier run")
            assert decision.commit == decision.row == world.history.of("grid", "a")[1]
        world.run(lambda stage, item, content=content: content if stage == "points" else b"grid of " + content[:8])
    assert world.history.of("grid", "a")[0].digest == b"grid of " + b"1" * 8
    assert world.plan().idle


def test_going_back_to_settings_that_failed_shows_the_failure_again() -> None:
    world = World()
    world.run(lambda stage, item: None)
    world.use(Points(proposals=128), Grid())
    world.run()
    world.use(Points(), Grid())
    assert world.says("points")["a"] == ("skip", "failed before")
    world.run()
    assert [world.history.of(stage, "a")[0].status for stage in ("points", "grid")] == ["failed", "failed"]
    assert world.plan().idle

"""A run carries out its plan: what it computes, commits, cuts off, and how it ends."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from extractors.base import Weights
from pipelines.execute import execute
from pipelines.runners.local import LocalRunner
from pipelines.stage import Stage
from pipelines.summary import StageResult, Summary
from tests.pipelines.fakes import (
    Both,
    Folder,
    Hosted,
    HostedQuits,
    HostedWeighted,
    Listed,
    NoList,
    NoSchema,
    NoWeights,
    Numbers,
    Questions,
    Quits,
    Sums,
    Weighted,
)
from tests.pipelines.running import Runs, counts, job


@pytest.fixture
def texts() -> dict[str, str]:
    return {f"item {i:02d}": "x" * i for i in range(12)}


@pytest.fixture
def source(tmp_path, texts) -> Folder:
    return Folder.make(tmp_path / "raw", texts)


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def test_first_run_makes_every_record_and_the_second_none(runs, source):
    chain = job(source, Stage(Numbers()), Stage(Sums()), Stage(Both()))
    first = runs(chain)
    assert [counts(first, s) for s in ("numbers", "sums", "both")] == [{"made": 12}] * 3
    assert first.exit_code == 0
    assert set(runs.digests("both")) == set(source.keys())
    second = runs(chain)
    assert [counts(second, s) for s in ("numbers", "sums", "both")] == [{"reused": 12}] * 3
    assert second.snapshot == first.snapshot


def test_records_are_what_the_extractor_gives(runs, source, texts):
    from storage.reader import open as open_store

    runs(job(source, Stage(Numbers()), Stage(Sums())))
    cache = open_store(runs.url)
    for item, text in texts.items():
        expected = Numbers().one(item, text)
        np.testing.assert_array_equal(cache["numbers"][item]["value"], expected["value"])
        np.testing.assert_array_equal(cache["sums"][item]["sum"], np.round(expected["value"].sum(1), 3))


def test_changed_setting_is_recomputed_with_what_hangs_on_it(runs, source):
    runs(job(source, Stage(Numbers()), Stage(Sums())))
    summary = runs(job(source, Stage(Numbers(scale=2.0)), Stage(Sums())))
    assert counts(summary, "numbers") == {"made": 12}
    assert counts(summary, "sums") == {"made": 12}


def test_equal_upstream_content_cuts_the_run_off(runs, source):
    chain = (Stage(Sums()), Stage(Both()))
    runs(job(source, Stage(Numbers()), *chain))
    summary = runs(job(source, Stage(Numbers(scale=1.0 + 1e-7)), *chain), force=frozenset({"sums"}))
    assert counts(summary, "sums") == {"made": 12}
    forced = runs(job(source, Stage(Numbers(scale=1.0 + 1e-7)), *chain), force=frozenset({"numbers", "sums"}))
    assert counts(forced, "both") == {"reused": 12}


def test_going_back_to_an_earlier_setting_computes_nothing(runs, source):
    chain = lambda scale: job(source, Stage(Numbers(scale=scale)), Stage(Sums()))  # noqa: E731
    runs(chain(1.0))
    before = runs.digests("sums")
    runs(chain(2.0))
    back = runs(chain(1.0))
    assert [counts(back, s) for s in ("numbers", "sums")] == [{"reused": 12}] * 2
    assert runs.digests("sums") == before


def test_changed_file_alone_is_recomputed(runs, source):
    chain = job(source, Stage(Numbers()), Stage(Sums()))
    runs(chain)
    (source.root / "item 03.txt").write_text("other")
    summary = runs(chain)
    assert counts(summary, "numbers") == {"made": 1, "reused": 11}
    assert counts(summary, "sums") == {"made": 1, "reused": 11}


@pytest.mark.parametrize(
    ("text", "error", "cause"),
    [
        ("bad", "InvalidValues", "item 03.txt: bad values"),
        ("bug", "ZeroDivisionError", r"division by zero (fakes.py, line"),
        ("shape", "SchemaError", "'value' has shape (3, 3)"),
        ("no record", "SchemaError", "NoneType in place of a record"),
        ("ragged", "SchemaError", "'value' is a list that gives no array"),
        (
            "gradient",
            "SchemaError",
            "'value' is a Tensor that gives no array: Can't call numpy()",
        ),
        ("quit", "RuntimeError", "sys.exit('no licence') (fakes.py, line"),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_bad_item_is_recorded_and_the_rest_goes_on(runs, source, text, error, cause, batch):
    (source.root / "item 03.txt").write_text(text)
    chain = job(source, Stage(Numbers(), batch=batch), Stage(Sums()))
    summary = runs(chain)
    assert counts(summary, "numbers") == {"made": 11, "failed": 1}
    assert counts(summary, "sums") == {"made": 11, "skipped": 1}
    assert summary.exit_code == 3
    row = runs.rows("numbers")["item 03"]
    assert (row["status"], row["error_class"], row["attempts"]) == ("failed", error, 1)
    assert cause in row["error_text"]
    assert "\n" not in row["error_text"]
    assert error in runs.said.getvalue()


def test_failure_is_remembered_until_it_is_retried_or_mended(runs, source):
    path = source.root / "item 03.txt"
    path.write_text("bad")
    chain = job(source, Stage(Numbers()), Stage(Sums()))
    runs(chain)
    again = runs(chain)
    assert counts(again, "numbers") == {"reused": 11, "skipped": 1}
    assert again.exit_code == 3
    retried = runs(chain, retry_failed=True)
    assert counts(retried, "numbers") == {"reused": 11, "failed": 1}
    assert runs.rows("numbers")["item 03"]["attempts"] == 2
    path.write_text("good")
    mended = runs(chain)
    assert counts(mended, "sums") == {"reused": 11, "made": 1}
    assert mended.exit_code == 0


def test_record_whose_upstream_fails_now_is_no_longer_shown(runs, source):
    chain = job(source, Stage(Numbers()), Stage(Sums()))
    runs(chain)
    (source.root / "item 03.txt").write_text("bad")
    runs(chain)
    assert "item 03" not in runs.digests("numbers")
    assert "item 03" not in runs.digests("sums")


def test_damaged_record_that_a_stage_reads_is_made_again_by_the_next_run_with_what_reads_it(runs, source):
    runs(job(source, Stage(Numbers())))
    before = runs.digests("numbers")
    for shard in (Path(runs.url) / "numbers").iterdir():
        shard.write_bytes(bytes(shard.stat().st_size))
    chain = job(source, Stage(Numbers()), Stage(Sums()))
    assert counts(runs(chain), "sums") == {"failed": 12}
    assert {row["status"] for row in runs.rows("numbers").values()} == {"corrupt"}
    assert {row["error_class"] for row in runs.rows("sums").values()} == {"CorruptShard"}
    summary = runs(chain)
    assert [counts(summary, name) for name in ("numbers", "sums")] == [{"made": 12}] * 2
    assert runs.digests("numbers") == before


def test_item_without_elements_has_an_empty_record_that_downstream_reads(runs, source):
    (source.root / "item 03.txt").write_text("none")
    summary = runs(job(source, Stage(Numbers()), Stage(Sums())))
    assert counts(summary, "sums") == {"made": 12}
    assert runs.rows("numbers")["item 03"]["status"] == "empty"
    assert runs.rows("sums")["item 03"]["status"] == "empty"


def test_missing_file_fails_by_name_and_is_computed_when_it_appears(runs, source, tmp_path):
    listed = source.keys()
    ghost = replace(source)
    object.__setattr__(ghost, "keys", lambda: sorted([*listed, "ghost"]))
    chain = job(ghost, Stage(Numbers()))
    assert counts(runs(chain), "numbers") == {"made": 12, "failed": 1}
    assert runs.rows("numbers")["ghost"]["error_class"] == "MissingFile"
    (source.root / "ghost.txt").write_text("here")
    assert counts(runs(chain), "numbers") == {"reused": 12, "made": 1}


def test_files_that_were_gone_while_the_run_lasted_are_tried_again_when_they_are_back(runs, source, tmp_path):
    chain = job(source, Stage(Numbers()))
    planned = runs.plan(chain)
    source.root.rename(tmp_path / "gone")
    source.root.mkdir()
    summary = execute(chain, planned, runs.url, LocalRunner(), stream=io.StringIO())
    assert counts(summary, "numbers") == {"failed": 12}
    source.root.rmdir()
    (tmp_path / "gone").rename(source.root)
    assert counts(runs(chain), "numbers") == {"made": 12}


def test_record_of_a_file_that_changed_while_the_run_lasted_never_stands_for_the_one_that_was_planned(runs, source):
    chain = job(source, Stage(Numbers()), Stage(Sums()), Stage(Both()))
    planned, path = runs.plan(chain), source.root / "item 03.txt"
    before = path.read_text()
    path.write_text("other")
    said = io.StringIO()
    assert counts(execute(chain, planned, runs.url, LocalRunner(), stream=said), "numbers") == {"made": 12}
    assert "numbers item 03: input changed while the run went on; the next run makes it again" in said.getvalue()
    other = runs.digests("numbers")["item 03"]
    path.write_text(before)
    again = runs(chain)
    assert [counts(again, s) for s in ("numbers", "sums", "both")] == [{"reused": 11, "made": 1}] * 3
    assert runs.digests("numbers")["item 03"] != other
    path.write_text("other")
    runs(chain)
    assert runs.digests("numbers")["item 03"] == other


def test_file_that_a_worker_alone_could_not_reach_is_tried_again_and_one_that_is_missing_is_not(runs, source):
    (source.root / "item 03.txt").write_text("stale")
    lists = Listed(source.root, ("item 03", "item 04", "never there"))
    chain = job(lists, Stage(Numbers()))
    assert counts(runs(chain), "numbers") == {"made": 1, "failed": 2}
    assert runs.rows("numbers")["item 03"]["error_text"].startswith("[Errno 116] Stale file handle")
    summary = runs(chain)
    assert counts(summary, "numbers") == {"reused": 1, "failed": 1, "skipped": 1}
    assert summary.stages[0].errors == {"OSError": 1}


def test_many_failures_stop_the_run_and_the_text_says_how_to_go_on(runs, tmp_path):
    source = Folder.make(tmp_path / "many", {f"{i:03d}": "bad" if i >= 20 else "good" for i in range(200)})
    chain = job(source, Stage(Numbers()))
    summary = runs(chain)
    assert summary.exit_code == 1
    assert "of the last 50 items of numbers failed" in summary.error
    assert "--retry-failed" in summary.error
    assert "--max-failure-rate" in summary.error
    assert len(runs.digests("numbers")) == 20
    assert len(runs.rows("numbers")) < 100
    summary = runs(chain, max_failure_rate=1.0)
    assert summary.exit_code == 3
    assert len(runs.rows("numbers")) == 200


def test_wrong_weights_stop_the_stage_and_name_its_items(runs, source):
    chain = job(source, Stage(NoWeights()), Stage(Sums()), Stage(Numbers(), name="others"))
    summary = runs(chain)
    assert counts(summary, "numbers") == {"failed": 12}
    assert counts(summary, "sums") == {"skipped": 12}
    assert counts(summary, "others") == {"made": 12}
    assert summary.exit_code == 3
    assert "numbers stopped: WeightsError: votes.pt: no key 'conv.weight'" in runs.said.getvalue()
    assert {row["error_class"] for row in runs.rows("numbers").values()} == {"WeightsError"}


@pytest.mark.parametrize(
    ("extractor", "replaced"), [(Weighted, "3.0"), (HostedWeighted, "3.0"), (Weighted, "half a file")]
)
def test_weights_that_were_replaced_since_the_plan_stop_the_stage_and_count_as_new_ones_next_time(
    runs, source, tmp_path, extractor, replaced
):
    path = tmp_path / "latest.txt"
    path.write_text("2.0")
    chain = job(source, Stage(extractor(weights=Weights(str(path)))))
    planned = runs.plan(chain)
    path.write_text(replaced)
    summary = execute(chain, planned, runs.url, LocalRunner(), stream=io.StringIO())
    assert counts(summary, "numbers") == {"left": 12}
    assert summary.stages[0].stopped.startswith(f"WeightsChanged: weights: {path} was replaced while the run went on")
    assert summary.exit_code == 1
    path.write_text("3.0")
    assert counts(runs(chain), "numbers") == {"made": 12}
    made = runs.digests("numbers")
    path.write_text("2.0")
    assert counts(runs(chain), "numbers") == {"made": 12}
    path.write_text("3.0")
    assert counts(runs(chain), "numbers") == {"reused": 12}
    assert runs.digests("numbers") == made


def test_records_hidden_by_wrong_weights_stand_again_at_once_with_the_old_ones(runs, source):
    runs(job(source, Stage(Numbers())))
    before = runs.digests("numbers")
    runs(job(source, Stage(NoWeights())))
    assert runs.digests("numbers") == {}
    assert counts(runs(job(source, Stage(Numbers()))), "numbers") == {"reused": 12}
    assert runs.digests("numbers") == before


def test_missing_package_stops_the_stage_and_is_not_held_against_its_items(runs, source):
    summary = runs(job(source, Stage(NoWeights(package=True)), Stage(Sums()), Stage(Numbers(), name="others")))
    assert counts(summary, "numbers") == {"left": 12}
    assert counts(summary, "sums") == {"left": 12}
    assert counts(summary, "others") == {"made": 12}
    assert summary.exit_code == 1
    assert "pip install nothing" in summary.text()
    assert runs.rows("numbers") == {}


def test_stage_without_a_schema_stops_with_what_reads_it_and_others_run(runs, source):
    stages = (Stage(NoSchema()), Stage(Sums()), Stage(Numbers(), name="others"))
    summary = runs(job(source, *stages))
    assert [counts(summary, name) for name in ("numbers", "sums")] == [{"left": 12}] * 2
    assert counts(summary, "others") == {"made": 12}
    assert summary.exit_code == 1
    assert "stopped: ValueError: numbers: no model 'nosuch'" in summary.text()
    assert runs.rows("numbers") == {}


@pytest.mark.parametrize("gives", ["nothing", "a generator", "few"])
def test_network_that_gives_no_list_of_records_fails_its_items_by_name(runs, source, gives):
    summary = runs(job(source, Stage(NoList(gives=gives), batch=4)))
    assert counts(summary, "numbers") == {"failed": 12}
    row = runs.rows("numbers")["item 03"]
    assert row["error_class"] == "SchemaError"
    assert row["error_text"].startswith("numbers: ")
    assert "expected a list" in row["error_text"]


@pytest.mark.parametrize("extractor", [Quits(), HostedQuits()])
def test_load_that_ends_the_process_stops_its_stage_alone_and_says_where(runs, source, extractor):
    summary = runs(job(source, Stage(extractor), Stage(Numbers(), name="others")))
    assert [counts(summary, name) for name in ("numbers", "others")] == [{"left": 12}, {"made": 12}]
    assert "stopped: RuntimeError: sys.exit('no licence') (fakes.py, line" in summary.text()


def test_extractor_of_the_program_itself_is_told_that_a_helper_cannot_import_it(runs, source):
    mine = type("Mine", (Hosted,), {"__module__": "__main__"})
    summary = runs(job(source, Stage(mine())))
    assert summary.exit_code == 1
    assert "Mine is defined in the program that was started" in summary.text()


def test_run_that_never_committed_anything_names_no_snapshot(runs, source):
    text = runs(job(source, Stage(NoSchema()))).text()
    assert "no snapshot" in text
    assert "-1" not in text


@pytest.mark.parametrize(("package", "became"), [(True, {"left": 12}), (False, {"failed": 12})])
def test_items_that_come_to_a_stopped_stage_one_after_the_other_do_not_wake_it(
    runs, source, monkeypatch, package, became
):
    monkeypatch.setattr("pipelines.execute.COMMIT_S", 0.0)
    monkeypatch.setattr("pipelines.worker.FLUSH_S", 0.0)
    monkeypatch.setattr("pipelines.runners.local._QUEUE", 2)
    summary = runs(job(source, Stage(Numbers()), Stage(NoWeights(package=package), "last", of=("numbers",))))
    assert counts(summary, "numbers") == {"made": 12}
    assert counts(summary, "last") == became


def test_table_joins_what_was_just_computed_and_what_has_no_record(runs, source):
    (source.root / "item 03.txt").write_text("bad")
    chain = job(source, Stage(Numbers()), tables=(Questions(tuple(source.keys())),))
    summary = runs(chain)
    assert counts(summary, "questions") == {"made": 24}
    assert counts(runs(chain), "questions") == {"reused": 24}
    (source.root / "item 04.txt").write_text("none")
    assert counts(runs(chain), "questions") == {"reused": 22, "made": 2}


def test_row_of_a_table_that_changed_since_the_plan_is_made_again(runs, source):
    table, salt = Questions(tuple(source.keys())), [b""]
    items = [(key, digest, parent) for key, digest, parent in table.items()]
    now = lambda: [(k, salt[0] + d if k == "item 03-1" else d, parent) for k, d, parent in items]  # noqa: E731
    object.__setattr__(table, "items", now)
    chain = job(source, Stage(Numbers()), tables=(table,))
    planned = runs.plan(chain)
    salt[0] = b"other"
    execute(chain, planned, runs.url, LocalRunner(), stream=io.StringIO())
    salt[0] = b""
    assert counts(runs(chain), "questions") == {"reused": 23, "made": 1}


def test_row_that_a_table_does_not_give_is_a_failure(runs, source):
    summary = runs(job(source, Stage(Numbers()), tables=(Questions(tuple(source.keys()), drop="item 03-1"),)))
    assert counts(summary, "questions") == {"made": 23, "failed": 1}
    assert runs.rows("questions")["item 03-1"]["error_class"] == "NoRow"


def test_limits_hit_in_a_helper_process_are_recorded_and_the_rest_goes_on(runs, tmp_path):
    flag = tmp_path / "flag"
    texts = {
        "a": "x", "b": "bug", "c": "die", "d": f"die once:{flag}", "e": "leak", "f": "bad", "g": "hang",
    }  # fmt: skip
    source = Folder.make(tmp_path / "hosted", texts)
    summary = runs(job(source, Stage(Hosted(), batch=3)))
    rows = runs.rows("numbers")
    assert {item: row["error_class"] for item, row in rows.items()} == {
        "a": "", "b": "ZeroDivisionError", "c": "ChildDied", "d": "", "e": "MemoryCapExceeded", "f": "InvalidValues",
        "g": "DeadlineExceeded",
    }  # fmt: skip
    assert rows["c"]["attempts"] == 2
    assert rows["g"]["attempts"] == 1
    assert summary.exit_code == 3


def test_helper_process_gives_the_same_records(runs, source, tmp_path):
    runs(job(source, Stage(Numbers())))
    hosted = Runs(tmp_path / "hosted")
    hosted(job(source, Stage(Hosted(), batch=4)))
    assert hosted.digests("numbers") == runs.digests("numbers")


@pytest.mark.parametrize("batch", [2, 4, 5, 100])
def test_batch_size_does_not_change_records(runs, source, tmp_path, batch):
    runs(job(source, Stage(Numbers()), Stage(Sums())))
    other = Runs(tmp_path / "other")
    other(job(source, Stage(Numbers(), batch=batch), Stage(Sums(), batch=batch)))
    assert other.digests("numbers") == runs.digests("numbers")
    assert other.digests("sums") == runs.digests("sums")


def test_only_some_items_and_stages_are_run_when_asked(runs, source):
    chain = job(source, Stage(Numbers()), Stage(Sums()))
    runs(chain, items=frozenset({"item 03", "item 05"}))
    assert set(runs.rows("sums")) == {"item 03", "item 05"}
    runs(chain, stages=frozenset({"numbers"}))
    assert len(runs.rows("numbers")) == 12
    assert len(runs.rows("sums")) == 2


def test_progress_and_summary_count_every_item(runs, source):
    (source.root / "item 03.txt").write_text("bad")
    summary = runs(job(source, Stage(Numbers())))
    assert "numbers: 11 done, 1 failed, 0 left" in runs.said.getvalue()
    assert "numbers: 11 made, 1 failed" in summary.text()
    assert "1 x InvalidValues, such as item 03: item 03.txt: bad values" in summary.text()


def test_summary_counts_the_errors_that_it_gives_no_example_of():
    errors = Counter({f"Error{i}": 9 - i for i in range(7)})
    result = StageResult("numbers", failed=42, errors=errors, examples=dict.fromkeys(errors, "item: text"))
    text = Summary("job", "run", [result], 1.0, 0).text()
    assert "5 x Error4, such as item: text\n    7 x others" in text


def test_cause_that_stopped_a_stage_is_said_once(runs, source):
    summary = runs(job(source, Stage(NoWeights())))
    assert runs.said.getvalue().count("no key 'conv.weight'") == summary.text().count("no key 'conv.weight'") == 1
    assert "12 x WeightsError" in summary.text()


def test_odd_item_keys_go_through_every_part(runs, tmp_path):
    keys = ["with space", "unicode ü 東", "dots..", "x" * 200, "percent %20", "quote'\""]
    source = Folder.make(tmp_path / "odd", dict.fromkeys(keys, "x"))
    summary = runs(job(source, Stage(Numbers()), Stage(Sums())))
    assert counts(summary, "sums") == {"made": len(keys)}
    assert set(runs.digests("sums")) == set(keys)


def test_full_disk_ends_the_run_with_a_clear_text_and_loses_nothing(runs, source, monkeypatch):
    from storage.errors import StoreUnwritable
    from storage.writer import ShardWriter

    start = ShardWriter.start

    def full(writer):
        if writer.stage == "sums":
            raise StoreUnwritable("/store: no space left on device")
        return start(writer)

    chain = job(source, Stage(Numbers()), Stage(Sums()))
    monkeypatch.setattr(ShardWriter, "start", full)
    summary = runs(chain)
    assert summary.exit_code == 1
    assert "no space left" in summary.text()
    assert len(runs.digests("numbers")) == 12
    assert runs.rows("sums") == {}
    monkeypatch.undo()
    assert counts(runs(chain), "sums") == {"made": 12}

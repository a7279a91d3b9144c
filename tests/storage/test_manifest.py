"""The manifest: which row counts, whoever else writes, and what stays when it is compacted."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storage.delta_log
import storage.manifest
from storage import Manifest, Row, StoreNotFound, StoreUnwritable
from tests.storage.small_store import fill, forked, make_at_once, objects, row


def newest(manifest: Manifest, column: str, stage: str = "objects") -> dict[str, Any]:
    table = manifest.latest(stage, ["item", column])
    return dict(zip(table["item"].to_pylist(), table[column].to_pylist(), strict=True))


def before_the_next_transaction(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Let something happen between the reading of the table and the commit."""
    real = storage.manifest.transact

    def transact(*args: Any, **keywords: Any) -> None:
        monkeypatch.setattr(storage.manifest, "transact", real)
        action()
        real(*args, **keywords)

    monkeypatch.setattr(storage.manifest, "transact", transact)


def test_rows_of_four_processes_that_make_stores_at_once_are_all_there(tmp_path: Path) -> None:
    stores = [tmp_path / str(i) for i in range(6)]
    make_at_once([str(store) for store in stores], processes=4, commits=3)
    for manifest in map(Manifest, stores):
        assert manifest.rows("objects").num_rows == 24
        assert newest(manifest, "attempts") == {f"process {i}": 3 for i in range(4)} | {"shared": 1}
        for i in range(4):
            attempts = manifest.rows("objects", ["item", "attempts"]).filter(pa.compute.field("item") == f"process {i}")
            assert attempts["attempts"].to_pylist() == [3, 2, 1]
        assert Manifest(manifest.folder.url, 0).id == manifest.id


def test_a_later_commit_counts_even_if_its_clock_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(tmp_path)
    for attempt, seconds in enumerate([2_000_000_000, 1_000_000_000, 1_500_000_000], 1):
        monkeypatch.setattr(storage.manifest.time, "time_ns", lambda now=seconds * 10**9: now)
        manifest.commit([row("a", attempts=attempt)])
    assert newest(manifest, "attempts") == {"a": 3}
    found = manifest.find("objects", "a")
    assert found is not None
    assert found.attempts == 3


def test_of_two_writers_that_did_not_know_of_each_other_the_later_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Manifest(tmp_path).commit([row("other")])
    before_the_next_transaction(monkeypatch, lambda: Manifest(tmp_path).commit([row("a", run="later")]))
    manifest = Manifest(tmp_path)
    manifest.commit([row("a", run="earlier")])
    table = manifest.rows("objects", ["item", "run", "base_version"]).filter(pa.compute.field("item") == "a")
    assert table["run"].to_pylist() == ["later", "earlier"]
    assert len(set(table["base_version"].to_pylist())) == 1


def test_of_one_commit_the_last_row_of_an_item_counts(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    manifest.commit([row("b", attempts=1), row("a", attempts=1), row("a", attempts=2), row("b", attempts=3)])
    assert newest(manifest, "attempts") == {"a": 2, "b": 3}


def test_a_row_comes_back_with_every_field(tmp_path: Path) -> None:
    whole = Row(
        "objects", "a/b ü", bytes(range(16)), b"\0" * 16, "0" * 32, "failed", "objects/x.parquet", 7, 8, b"\xff" * 16,
        9, 10, True, "ValueError", "no\nmesh", 3, 1.5, "run 1",
    )  # fmt: skip
    manifest = Manifest(tmp_path)
    manifest.commit([whole])
    assert manifest.find("objects", "a/b ü") == whole
    assert [Row(**values) for values in manifest.latest("objects").to_pylist()] == [whole]
    assert [Row(**values) for values in manifest.latest("objects", encoded=True).to_pylist()] == [whole]


def test_compaction_keeps_all_rows_their_order_and_older_snapshots(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    for attempt in range(12):
        rows = [row(f"item {(attempt * 5 + i) % 8}", attempts=attempt, seconds=i) for i in range(4)]
        manifest.commit([*rows, row("x", "other", attempts=attempt)] if attempt < 3 else rows)
    columns = ["item", "attempts", "seconds", "time", "base_version"]
    before = {name: getattr(manifest, name)("objects", columns) for name in ("rows", "latest")}
    old = manifest.snapshot
    manifest.compact()
    assert manifest.snapshot > old
    assert len(manifest._of_stage("objects")) == 1
    assert len(manifest._of_stage("other")) == 3  # few files are left alone
    for reader in (manifest, Manifest(tmp_path), Manifest(tmp_path, old)):
        assert reader.rows("objects", columns).equals(before["rows"])
        assert reader.latest("objects", columns).equals(before["latest"])
    assert len(Manifest(tmp_path, old)._of_stage("objects")) == 12
    manifest.commit([row("item 3", attempts=99)])
    assert newest(manifest, "attempts")["item 3"] == 99
    again = manifest.snapshot
    manifest.compact()
    assert manifest.snapshot == again


@pytest.mark.parametrize("meanwhile", ["commit", "compact"])
def test_a_compaction_that_meets_another_writer_neither_loses_nor_doubles_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    manifest = Manifest(tmp_path)
    for attempt in range(10):
        manifest.commit([row("a", attempts=attempt)])
    other = Manifest(tmp_path)
    before_the_next_transaction(
        monkeypatch, lambda: other.commit([row("b")]) if meanwhile == "commit" else other.compact()
    )
    manifest.compact()
    items = Manifest(tmp_path).rows("objects", ["item"])["item"].to_pylist()
    assert items == ["a"] * 10 + ["b"] * (meanwhile == "commit")
    assert newest(Manifest(tmp_path), "attempts")["a"] == 9


def test_one_key_is_found_in_the_files_that_may_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(tmp_path)
    for part in "abcdef":
        manifest.commit([row(f"{part}{i:03}", run=part) for i in range(20)])
    manifest.commit([row("c007", run="again")])
    read: list[str] = []
    real = pq.read_table
    monkeypatch.setattr(storage.manifest.pq, "read_table", lambda path, **k: read.append(path) or real(path, **k))
    found = manifest.find("objects", "c007")
    assert found is not None
    assert found.run == "again"
    assert len(read) == 2
    assert manifest.find("objects", "z") is None
    assert manifest.find("no such stage", "c007") is None
    assert len(read) == 2


ITEMS = st.one_of(
    st.sampled_from(
        ["a", "b", "ä", "a/../b", " ", "'\"", "%2F", "\U0001f600", "\U00020000", "\uffff", "x" * 300, "x" * 64]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=4),
    st.text("x\U0010ffff", min_size=62, max_size=70),
)


@settings(max_examples=25, deadline=None)
@given(commits=st.lists(st.lists(st.tuples(ITEMS, st.sampled_from("uv")), min_size=1), min_size=1, max_size=5))
def test_find_latest_and_rows_say_what_a_dictionary_would(commits: list[list[tuple[str, str]]]) -> None:
    with tempfile.TemporaryDirectory() as store:
        manifest = Manifest(store)
        expected: dict[tuple[str, str], list[int]] = {}
        number = 0
        for commit in commits:
            rows = []
            for item, stage in commit:
                number += 1
                rows.append(row(item, stage, attempts=number))
                expected.setdefault((stage, item), []).insert(0, number)
            manifest.commit(rows)
        for stage in "uv":
            mine = sorted(item for s, item in expected if s == stage)
            assert newest(manifest, "attempts", stage) == {item: expected[stage, item][0] for item in mine}
            assert manifest.latest(stage, ["item"])["item"].to_pylist() == mine
            rows_of_stage = manifest.rows(stage, ["attempts"])["attempts"].to_pylist()
            assert rows_of_stage == [n for item in mine for n in expected[stage, item]]
            for item in mine:
                found = manifest.find(stage, item)
                assert found is not None, item
                assert found.attempts == expected[stage, item][0]


def test_a_table_of_rows_is_committed_whole_with_defaults_filled_in(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    same = {"fingerprint": b"f" * 16, "inputs": b"i" * 16, "recipe": "0" * 32, "status": "ok"}
    table = pa.table(
        {"stage": ["u", "v", "u"], "item": ["b", "c", "a"]} | {name: [value] * 3 for name, value in same.items()}
    )
    manifest.commit_table(table)
    assert manifest.snapshot == 1  # made at 0, one commit for both stages
    assert manifest.stages() == ["u", "v"]
    assert manifest.find("u", "a") == row("a", "u")
    assert manifest.latest("u", ["item"])["item"].to_pylist() == ["a", "b"]


def test_a_snapshot_stays_until_refreshed(tmp_path: Path) -> None:
    Manifest(tmp_path).commit([row("a")])
    reader = Manifest(tmp_path)
    snapshot = reader.snapshot
    Manifest(tmp_path).commit([row("b")])
    assert list(newest(reader, "status")) == ["a"]
    reader.refresh()
    assert list(newest(reader, "status")) == ["a", "b"]
    assert list(newest(Manifest(tmp_path, snapshot), "status")) == ["a"]
    with pytest.raises(StoreNotFound, match=r"can't open snapshot 77: the newest is \d$"):
        Manifest(tmp_path, 77)


@pytest.mark.parametrize("snapshot", ["0", 1.0, True, b"0"])
def test_a_snapshot_that_is_no_whole_number_is_refused_by_its_value(tmp_path: Path, snapshot: Any) -> None:
    Manifest(tmp_path).commit([row("a")])
    with pytest.raises(TypeError, match=f"snapshot is {snapshot!r}, expected a whole number"):
        storage.open(tmp_path, snapshot=snapshot)
    assert Manifest(tmp_path, np.int64(1)).snapshot == 1  # type: ignore[arg-type]


def test_a_log_that_may_not_be_read_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str, version: int | None) -> None:
        raise OSError(
            "Kernel error -> LocalFileSystem\n  \x1b[31m->\x1b[0m 0.json\n  Permission denied (os error 13)\n"
        )

    monkeypatch.setattr("storage.delta_log.open_table", refused)
    with pytest.raises(StoreNotFound, match=r"can't open the newest snapshot: .*0\.json Permission denied"):
        Manifest(tmp_path)


def test_a_store_without_a_manifest_is_empty_and_nothing_is_made_by_looking(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "store")
    assert manifest.snapshot == storage.delta_log.EMPTY
    assert manifest.stages() == []
    assert manifest.latest("objects").num_rows == 0
    assert manifest.find("objects", "a") is None
    assert manifest.commit([]) == storage.delta_log.EMPTY
    assert not (tmp_path / "store").exists()
    with pytest.raises(StoreNotFound, match="so no snapshot 3"):
        Manifest(tmp_path / "store", 3)


@pytest.mark.parametrize("item", ["", "\0", "a\0b", "\ud800"])
def test_items_that_cannot_be_stored_are_refused(item: str) -> None:
    with pytest.raises(ValueError, match="item key"):
        row(item)


@pytest.mark.parametrize("stage", ["", "..", "a/b", "manifest", ".tmp", "ä", "x" * 101])
def test_stage_names_that_cannot_be_folders_are_refused(stage: str) -> None:
    with pytest.raises(ValueError, match="stage name"):
        row("a", stage)


def test_other_statuses_and_columns_are_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use ok, empty, failed or corrupt"):
        row("a", status="fine")
    Manifest(tmp_path).commit([row("a")])
    with pytest.raises(ValueError, match=r"unknown columns \['shrad'\]; choose from"):
        Manifest(tmp_path).latest("objects", ["shrad"])


def test_a_recipe_is_kept_in_full_as_readable_json(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    recipe = {"extractor": "votenet", "settings": {"größe": 1.5, "objects": [1, 2]}, "weights": None}
    name = manifest.save_recipe(recipe)
    assert manifest.save_recipe(dict(reversed(recipe.items()))) == name
    assert manifest.recipe(name) == recipe
    assert json.loads((tmp_path / "recipes" / f"{name}.json").read_text("utf8")) == recipe
    with pytest.raises(StoreNotFound, match="no recipe 1234"):
        manifest.recipe("1234")


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b'{"extractor": "vot', b"[1]", b"{}", b'{"extractor": "other"}', b'"\\ud800"']
)
def test_a_damaged_recipe_is_told_apart_from_a_whole_one_and_written_again(tmp_path: Path, content: bytes) -> None:
    manifest = Manifest(tmp_path)
    recipe = {"extractor": "votenet", "settings": {"objects": [1, 2.5]}}
    name = manifest.save_recipe(recipe)
    (tmp_path / "recipes" / f"{name}.json").write_bytes(content)
    with pytest.raises(StoreNotFound, match=f"recipe {name} in .* is damaged"):
        manifest.recipe(name)
    assert manifest.save_recipe(recipe) == name
    assert manifest.recipe(name) == recipe


def test_a_failed_commit_shows_nothing_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(tmp_path)
    manifest.commit([row("a")])
    snapshot = manifest.snapshot

    def full() -> None:
        raise OSError(28, "No space left on device")

    before_the_next_transaction(monkeypatch, full)
    with pytest.raises(StoreUnwritable, match="No space left on device.*GB free.*run again"):
        manifest.commit([row("b")])
    assert Manifest(tmp_path).snapshot == snapshot
    assert list(newest(Manifest(tmp_path), "status")) == ["a"]
    manifest.commit([row("b")])
    assert Manifest(tmp_path).rows("objects", ["item"])["item"].to_pylist() == ["a", "b"]


def test_a_forked_process_reads_and_is_told_that_it_cannot_commit(tmp_path: Path) -> None:
    fill(tmp_path, {"a": objects(3)})
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    process = fork.Process(target=forked, args=(str(tmp_path), answers))
    process.start()
    keys, total, refusal = answers.get()
    process.join()
    assert keys == ["a"]
    assert total == objects(3)["box"].sum().item()
    assert "start those that commit with 'spawn'" in refusal
    assert Manifest(tmp_path).rows("objects").num_rows == 1


def test_a_file_url_is_the_same_store(tmp_path: Path) -> None:
    Manifest(f"file://{tmp_path}").commit([row("a")])
    assert newest(Manifest(tmp_path), "status") == {"a": "ok"}


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_lost_file_of_the_manifest_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, {"a": objects(2)})
    before = Manifest(tmp_path).snapshot
    folder = tmp_path / "manifest" / "stage=objects"
    older = set(folder.iterdir())
    fill(tmp_path, {"b": objects(2)})
    (newest_file,) = set(folder.iterdir()) - older
    newest_file.unlink() if damage == "gone" else newest_file.write_bytes(b"PAR1")
    with pytest.raises(StoreNotFound, match=rf"snapshot {before + 1} needs manifest/.*{newest_file.name}, .*{damage}"):
        Manifest(tmp_path).rows("objects")
    assert Manifest(tmp_path, before).rows("objects")["item"].to_pylist() == ["a"]

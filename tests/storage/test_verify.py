"""Damage is found and marked; only what nobody reads is removed."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import storage
from storage import CacheError, CorruptShard, Manifest, RecordMissing, Schema, StoreNotFound, StoreUnwritable
from storage.verify import gc, verify
from tests.storage.small_store import OBJECTS, assert_same, fill, objects, row

DAY = 86400

OLD, NEW = f"{'0' * 32}.parquet", f"{'1' * 32}.parquet"  # shards that no row names


@pytest.fixture(params=["parquet", "hdf5"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Records a, b, c in one shard (b without objects) and d in another, written 60 days ago."""
    schema = Schema(OBJECTS.columns, "object", request.param)
    recipe = Manifest(tmp_path).save_recipe({"extractor": "objects"})
    with days_ago(tmp_path, 60):
        fill(tmp_path, {"a": objects(30), "b": objects(0), "c": objects(20, seed=2)}, schema=schema, recipe=recipe)
        fill(tmp_path, {"d": objects(4, seed=3)}, schema=schema, recipe=recipe)
    for path in tmp_path.rglob("*.*"):
        aged(path, 60)
    return tmp_path


def shard(store: Path, item: str) -> Path:
    found = Manifest(store).find("objects", item)
    assert found is not None
    return store / found.shard


def flip(path: Path, values: np.ndarray) -> None:
    """Flip one bit of a file, where it holds the values."""
    data = bytearray(path.read_bytes())
    data[data.index(values.tobytes()) + 3] ^= 0x10
    path.write_bytes(data)


def aged(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


@contextmanager
def days_ago(store: Path, days: float) -> Iterator[None]:
    """Let commits happen some days ago, by what their rows, the log's entries and its files say."""
    before = log(store)
    now = time.time_ns
    time.time_ns = lambda: now() - int(days * DAY * 1e9)
    try:
        yield
    finally:
        time.time_ns = now
    for path in sorted(log(store) - before):
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for action in (action for entry in entries for action in entry.values()):
            for key in {"timestamp", "modificationTime", "deletionTimestamp", "createdTime"} & action.keys():
                action[key] -= int(days * DAY * 1000)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        aged(path, days)


def log(store: Path) -> set[Path]:
    return set((store / "manifest" / "_delta_log").glob("*.json"))


def test_a_whole_store_has_no_faults(store: Path) -> None:
    for deep in (False, True):
        report = verify(store, deep=deep)
        assert (report.records, report.faults, report.recipes, report.orphans, report.marked) == (4, (), (), {}, 0)
        assert report.bytes == sum(r.bytes for i in "abcd" if (r := Manifest(store).find("objects", i)))


def test_a_deleted_shard_is_found_and_all_its_records_marked(store: Path) -> None:
    name = shard(store, "a").relative_to(store).as_posix()
    (store / name).unlink()
    report = verify(store)
    assert [(f.stage, f.item, f.shard) for f in report.faults] == [("objects", item, name) for item in "abc"]
    assert {f.problem for f in report.faults} == {"its shard is missing"}
    assert report.marked == 3
    records = storage.open(store)["objects"]
    assert list(records) == ["d"]
    assert_same(records["d"], objects(4, seed=3))
    with pytest.raises(RecordMissing, match="'a', it is marked corrupt: CorruptShard: its shard is missing"):
        records["a"]
    marked = records.row("a")
    assert (marked.status, marked.error_class) == ("corrupt", CorruptShard.__name__)
    assert verify(store).faults == ()  # what is marked is known


def test_a_truncated_shard_is_found(store: Path) -> None:
    path = shard(store, "d")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    report = verify(store)
    assert [(f.item, f.problem) for f in report.faults] == [("d", f"its shard has {size - 1} bytes instead of {size}")]
    assert list(storage.open(store)["objects"]) == ["a", "b", "c"]


def test_one_flipped_bit_is_found_by_a_deep_look_and_costs_that_record_alone(store: Path) -> None:
    flip(shard(store, "c"), objects(20, seed=2)["feature"][7])
    assert verify(store).faults == ()
    report = verify(store, deep=True)
    assert [(f.item, f.problem) for f in report.faults] == [("c", "its content is not what was written")]
    records = storage.open(store)["objects"]
    assert list(records) == ["a", "b", "d"]
    assert_same(records["a"], objects(30))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("format", ["parquet", "hdf5"])
def test_no_damage_anywhere_in_a_file_is_missed_or_ends_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, compress: bool
) -> None:
    """Where a damaged byte changes no record (padding, statistics) there is no fault, else it is the right one."""
    for name in ("_GROUP_BYTES", "_COMPRESSED_GROUP_BYTES"):
        monkeypatch.setattr(storage.parquet, name, 500)  # a group for each record
    schema = Schema(OBJECTS.columns, "object", format, compress)  # type: ignore[arg-type]
    given = {"a": objects(5), "b": objects(3, seed=1)}
    fill(tmp_path, given, schema=schema)
    path = shard(tmp_path, "a")
    whole = path.read_bytes()
    found = 0
    for position in np.random.default_rng(0).integers(0, len(whole), 60).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        aged(path, position)  # another time of change, so that no open shard is taken for this one
        bad = {fault.item for fault in verify(tmp_path, deep=True, mark=False).faults}
        found += bool(bad)
        records = storage.open(tmp_path)["objects"]
        for item in given.keys() - bad:
            assert_same(records[item], given[item])
    assert found > 10


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ETIMEDOUT, errno.EIO])
def test_what_keeps_this_process_from_a_shard_is_no_fault_of_the_shard(
    store: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    for format in ("parquet", "hdf5"):
        monkeypatch.setattr(f"storage.{format}.map_file", refused)
    before = Manifest(store).snapshot
    if code == errno.EIO:  # a disk that does not give the bytes back is one
        assert verify(store, deep=True).marked
    else:
        with pytest.raises(OSError, match=os.strerror(code)) as raised:
            verify(store, deep=True)
        assert not isinstance(raised.value, CacheError)
        assert Manifest(store).snapshot == before


def test_without_mark_nothing_changes(store: Path) -> None:
    shard(store, "d").unlink()
    snapshot = Manifest(store).snapshot
    report = verify(store, mark=False)
    assert (len(report.faults), report.marked, Manifest(store).snapshot) == (1, 0, snapshot)


def test_where_marks_cannot_be_written_it_is_said_how_to_see_the_damage(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(store, "d").unlink()

    def refuse(*_: object) -> None:
        raise StoreUnwritable("can't write: read-only")

    monkeypatch.setattr(Manifest, "commit", refuse)
    with pytest.raises(StoreUnwritable, match="1 damaged records can't be marked: can't write: read-only.*--no-mark"):
        verify(store)
    assert [fault.item for fault in verify(store, mark=False).faults] == ["d"]


def test_a_record_that_was_made_again_meanwhile_is_not_marked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(store, "d").unlink()
    mark = storage.verify._mark

    def made_again(manifest: Manifest, faults: object) -> int:
        fill(store, {"d": objects(6, seed=9)})
        return mark(manifest, faults)  # type: ignore[arg-type]

    monkeypatch.setattr(storage.verify, "_mark", made_again)
    assert verify(store).marked == 0
    assert_same(storage.open(store)["objects"]["d"], objects(6, seed=9))


def test_a_snapshot_that_somebody_reads_is_checked_by_itself(store: Path) -> None:
    pinned = storage.open(store).snapshot
    old = shard(store, "d")
    fill(store, {"d": objects(6, seed=9)})
    flip(old, objects(4, seed=3)["feature"][1])
    flip(shard(store, "c"), objects(20, seed=2)["feature"][7])
    (store / "objects" / OLD).write_bytes(b"123")
    newest = Manifest(store).snapshot
    assert [f.item for f in verify(store, deep=True, mark=False).faults] == ["c"]
    report = verify(store, deep=True, snapshot=pinned)
    assert (report.snapshot, sorted(f.item for f in report.faults), report.records) == (pinned, ["c", "d"], 4)
    assert list(report.orphans) == [f"objects/{OLD}"]  # the newest snapshot's shards are none
    assert (report.marked, Manifest(store).snapshot) == (1, newest + 1)  # what newer records replace is not marked
    assert list(storage.open(store)["objects"]) == ["a", "b", "d"]
    old.unlink()
    report = verify(store, snapshot=pinned)
    assert [(f.item, f.problem) for f in report.faults] == [("d", "its shard is missing")]
    assert report.marked == 0
    with pytest.raises(StoreNotFound, match="snapshot 77"):
        verify(store, snapshot=77)


@pytest.mark.parametrize("content", [None, b'{"extractor": "obj'])
def test_a_recipe_that_is_gone_or_damaged_is_named_and_costs_no_record(store: Path, content: bytes | None) -> None:
    (path,) = (store / "recipes").iterdir()
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    report = verify(store, deep=True)
    assert (report.faults, report.marked) == ((), 0)
    assert [(lost.stage, lost.recipe, lost.records) for lost in report.recipes] == [("objects", path.stem, 4)]
    assert ("no recipe" if content is None else "is damaged") in report.recipes[0].problem
    assert_same(storage.open(store)["objects"]["d"], objects(4, seed=3))
    path.write_bytes(whole)
    assert verify(store, deep=True).recipes == ()


def test_a_corrupt_record_can_be_made_again(store: Path) -> None:
    flip(shard(store, "d"), objects(4, seed=3)["box"][1])
    verify(store, deep=True)
    schema = Schema(OBJECTS.columns, "object", "hdf5" if shard(store, "d").suffix == ".h5" else "parquet")
    fill(store, {"d": objects(4, seed=3)}, schema=schema)  # the same content, so the same file name
    assert verify(store, deep=True).faults == ()
    assert_same(storage.open(store)["objects"]["d"], objects(4, seed=3))


def test_what_is_no_shard_is_left_alone_though_it_lies_in_the_store(store: Path) -> None:
    own = [store / "scans" / "scene.ply", store / "objects" / "notes.txt", store / "photos" / "0001.jpg"]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        aged(path, 400)
    assert verify(store).orphans == {}
    assert gc(store, orphan_days=0).removed == {}
    assert all(path.read_bytes() == b"mine" for path in own)


def test_files_that_no_row_names_are_listed_and_never_adopted(store: Path) -> None:
    (store / "objects" / OLD).write_bytes(b"12345")
    (store / "old_stage").mkdir()
    (store / "old_stage" / f"{'b' * 32}.h5").write_bytes(b"1")
    assert verify(store).orphans == {f"objects/{OLD}": 5, f"old_stage/{'b' * 32}.h5": 1}
    assert list(storage.open(store)["objects"]) == list("abcd")


def test_gc_removes_orphans_that_are_a_day_old(store: Path) -> None:
    for name, days in {OLD: 1.1, NEW: 0.9}.items():
        (store / "objects" / name).write_bytes(b"123")
        aged(store / "objects" / name, days)
    expected = {f"objects/{OLD}": 3}
    report = gc(store, dry_run=True)
    assert (report.removed, report.dry_run, report.kept) == (expected, True, 3)
    assert all((store / name).exists() for name in expected)
    report = gc(store)
    assert (report.removed, report.dry_run) == (expected, False)
    assert not any((store / name).exists() for name in expected)
    assert (store / "objects" / NEW).exists()
    assert verify(store, deep=True).faults == ()


@pytest.mark.parametrize(("days", "kept"), [(6.9, True), (7.1, False)])
def test_gc_keeps_for_seven_days_what_was_replaced(store: Path, days: float, kept: bool) -> None:
    old = shard(store, "d")
    snapshot = storage.open(store).snapshot
    with days_ago(store, days):
        fill(store, {"d": objects(6, seed=9)})
    removed = [] if kept else [old.relative_to(store).as_posix()]
    assert list(gc(store, dry_run=True).removed) == removed
    assert old.exists()
    for _ in range(2):
        assert list(gc(store).removed) == removed
        removed = []
        assert old.exists() == kept
    if kept:
        assert_same(storage.open(store, snapshot=snapshot)["objects"]["d"], objects(4, seed=3))
    assert verify(store, deep=True).faults == ()
    assert_same(storage.open(store)["objects"]["d"], objects(6, seed=9))


def test_gc_keeps_what_was_current_for_a_while_within_the_days_to_keep(store: Path) -> None:
    first = shard(store, "d")
    with days_ago(store, 3):
        fill(store, {"d": objects(5, seed=8)})
    second = shard(store, "d")
    with days_ago(store, 2.9):
        fill(store, {"d": objects(6, seed=9)})
    for path in (second, shard(store, "d")):
        aged(path, 2.9)
    assert gc(store).removed == {}
    assert list(gc(store, keep_days=2.95).removed) == [first.relative_to(store).as_posix()]
    assert list(gc(store, keep_days=2).removed) == [second.relative_to(store).as_posix()]


def test_gc_keeps_what_a_lock_names_until_the_lock_is_removed(store: Path, tmp_path: Path) -> None:
    old = shard(store, "d")
    cache = storage.open(store)
    within, beside = Path(cache.lock()), Path(cache.lock(tmp_path / "checkpoints" / "best.json"))
    with days_ago(store, 30):
        fill(store, {"d": objects(6, seed=9)})
        Manifest(store).compact(files=1)
    for path in store.rglob("*.parquet"):
        aged(path, 30)
    assert gc(store).removed == {}
    assert_same(storage.open(lock=beside)["objects"]["d"], objects(4, seed=3))
    for lock in (store / "locks").iterdir():
        lock.unlink()
    assert not within.exists()
    assert gc(store, locks=[beside]).removed == {}
    assert_same(storage.open(lock=beside)["objects"]["d"], objects(4, seed=3))
    assert list(gc(store).removed) == [old.relative_to(store).as_posix()]
    assert_same(storage.open(store)["objects"]["d"], objects(6, seed=9))


def test_gc_keeps_shards_that_still_hold_one_record_in_use(store: Path) -> None:
    shared = shard(store, "a")
    with days_ago(store, 30):
        fill(store, {"a": objects(1), "b": objects(2)})
    aged(shared, 30)
    assert gc(store).removed == {}
    assert_same(storage.open(store)["objects"]["c"], objects(20, seed=2))


def test_gc_removes_manifest_files_that_compaction_replaced(store: Path) -> None:
    with days_ago(store, 30):
        for i in range(10):
            Manifest(store).commit([row(f"x{i}", status="failed")])
        Manifest(store).compact()
    files = len(list((store / "manifest" / "stage=objects").iterdir()))
    assert gc(store, keep_days=31).manifest_files == ()
    for path in (store / "manifest" / "stage=objects").iterdir():
        aged(path, 30)
    dry = gc(store, dry_run=True)
    assert len(dry.manifest_files) == files - 1
    assert len(list((store / "manifest" / "stage=objects").iterdir())) == files
    assert len(gc(store).manifest_files) == files - 1
    assert len(list((store / "manifest" / "stage=objects").iterdir())) == 1
    assert list(storage.open(store)["objects"]) == list("abcd")
    assert verify(store, deep=True).faults == ()


def test_a_lock_of_another_store_or_of_a_lost_snapshot_stops_gc_before_it_removes(store: Path, tmp_path: Path) -> None:
    (store / "objects" / OLD).write_bytes(b"123")
    aged(store / "objects" / OLD, 30)
    fill(tmp_path / "other", {"a": objects(1)})
    foreign = storage.open(tmp_path / "other").lock(tmp_path / "foreign.json")
    with pytest.raises(StoreNotFound, match="is of another store"):
        gc(store, locks=[foreign])
    lost = Path(storage.open(store).lock())
    lost.write_text(lost.read_text().replace('"snapshot": 2', '"snapshot": 77'))
    with pytest.raises(StoreNotFound, match="77"):
        gc(store)
    assert (store / "objects" / OLD).exists()


def test_a_folder_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"1")
    aged(tmp_path / "photos" / "cat.jpg", 400)
    for check in (verify, gc):
        with pytest.raises(StoreNotFound, match="it has no manifest"):
            check(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["photos", "photos/cat.jpg"]


def test_a_file_that_cannot_be_removed_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store / "objects" / OLD
    path.write_bytes(b"123")
    aged(path, 30)

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StoreUnwritable, match=OLD):
        gc(store)


def test_times_of_commits_can_be_asked_for(store: Path) -> None:
    manifest = Manifest(store)
    assert manifest.snapshot_at(datetime.now(UTC) + timedelta(minutes=1)) == manifest.snapshot
    assert manifest.snapshot_at(datetime.now(UTC) - timedelta(days=100)) == 0


@pytest.mark.parametrize("folder", ["objects", "recipes", "runs", "locks", "manifest", "manifest/stage=objects"])
def test_gc_removes_what_killed_writers_left_in_any_folder(store: Path, folder: str) -> None:
    (store / folder).mkdir(exist_ok=True)
    old, new = (store / folder / f".tmp-{process}-0123456789abcdef" for process in (17, 4711))
    for path, days in ((old, 1.1), (new, 0.9)):
        path.write_bytes(b"123")
        aged(path, days)
    expected = {f"{folder}/{old.name}": 3}
    assert gc(store, dry_run=True).removed == expected
    assert old.exists()
    report = gc(store)
    assert (report.removed, report.kept) == (expected, 2)
    assert not old.exists()
    assert new.exists()
    assert verify(store, deep=True).faults == ()


def test_of_a_store_without_a_commit_gc_removes_old_temporary_files_alone(tmp_path: Path) -> None:
    names = ["video/.tmp-17-0123456789abcdef", "video/.tmp-18-0123456789abcdef", f"video/{OLD}", "recipes/ab.json"]
    for name, days in zip(names, (400, 0.5, 400, 400), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"123")
        aged(tmp_path / name, days)
    assert gc(tmp_path, dry_run=True).removed == {names[0]: 3}
    assert (tmp_path / names[0]).exists()
    report = gc(tmp_path)
    assert (report.removed, report.kept) == ({names[0]: 3}, 1)
    assert [name for name in names if (tmp_path / name).exists()] == names[1:]
    assert gc(tmp_path).removed == {}
    with pytest.raises(StoreNotFound, match="it has no manifest"):
        verify(tmp_path)


@pytest.mark.parametrize("where", ["given", "in the store"])
def test_a_lock_file_that_is_none_stops_gc_before_it_removes(store: Path, tmp_path: Path, where: str) -> None:
    orphan = store / "objects" / OLD
    orphan.write_bytes(b"123")
    aged(orphan, 30)
    (store / "locks").mkdir()
    path = tmp_path / "odd.txt" if where == "given" else store / "locks" / "odd.json"
    path.write_text("{}")
    with pytest.raises(StoreNotFound, match="odd.* is no lock file"):
        gc(store, locks=[path] if where == "given" else [])
    with pytest.raises(StoreNotFound, match="can't read the lock file /nope: No such file"):
        gc(store, locks=["/nope"])
    assert orphan.exists()

"""Lock files: a snapshot that training reads again and `gc` keeps."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

import storage
from storage import StoreNotFound, StoreUnwritable
from tests.storage.small_store import assert_same, fill, objects


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fill(tmp_path / "store", {f"scene{i:04}": objects(i % 5, seed=i) for i in range(5)})
    return tmp_path / "store"


def test_a_lock_file_reads_the_snapshot_it_names(store: Path, tmp_path: Path) -> None:
    cache = storage.open(store)
    path = cache.lock(tmp_path / "checkpoints" / "best.lock.json")
    within = Path(cache.lock())
    named = json.loads(Path(path).read_text())
    assert (named["url"], named["snapshot"], named["stages"]) == (str(store), cache.snapshot, ["objects"])
    fill(store, {"scene0003": objects(9, seed=99)})
    for lock in (path, within):
        locked = storage.open(lock=lock)
        assert locked.snapshot == cache.snapshot
        assert_same(locked["objects"]["scene0003"], objects(3, seed=3))
    assert {p.parent for p in (store / "locks").iterdir()} == {within.parent}
    assert len(list((store / "locks").iterdir())) == 2


def test_locks_of_two_runs_with_copies_of_one_name_are_two(store: Path, tmp_path: Path) -> None:
    for run in ("a", "b"):
        storage.open(store).lock(tmp_path / run / "run.lock.json")
    assert len(list((store / "locks").iterdir())) == 2


def test_where_the_store_cannot_be_written_a_lock_is_its_copy_with_a_warning(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def read_only(old: str, new: str) -> None:
        if "/locks/" in str(new):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        replace(old, new)

    monkeypatch.setattr(os, "replace", read_only)
    with pytest.warns(UserWarning, match="Read-only file system.*gc --lock .*run.lock.json"):
        copy = storage.open(store).lock(tmp_path / "run.lock.json")
    assert storage.open(lock=copy)["objects"].keys() == storage.open(store)["objects"].keys()
    with pytest.raises(StoreUnwritable):
        storage.open(store).lock()


def test_a_lock_of_another_store_is_refused(store: Path, tmp_path: Path) -> None:
    path = storage.open(store).lock(tmp_path / "lock.json")
    for _ in range(5):
        fill(tmp_path / "other", {"a": objects(1)})
    with pytest.raises(StoreNotFound, match="lock.json is of another store"):
        storage.open(tmp_path / "other", lock=path)


def test_a_snapshot_beside_a_lock_must_be_the_one_it_names(store: Path, tmp_path: Path) -> None:
    cache = storage.open(store)
    path = cache.lock(tmp_path / "run.lock.json")
    assert storage.open(store, snapshot=cache.snapshot, lock=path).snapshot == cache.snapshot
    with pytest.raises(ValueError, match=f"snapshot=2, but .*run.lock.json names snapshot {cache.snapshot}"):
        storage.open(store, snapshot=2, lock=path)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "3", "", "{", "\xff", '{"url": "x", "snapshot": "2", "manifest": "m"}', '{"url": "x", "snapshot": 2}'],
)
def test_what_is_no_lock_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text, encoding="latin1")
    with pytest.raises(StoreNotFound, match=r"odd\.json is no lock file"):
        storage.open(lock=tmp_path / "odd.json")


def test_a_lock_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(StoreNotFound, match=f"can't read the lock file {re.escape(str(path))}: "):
            storage.open(lock=path)

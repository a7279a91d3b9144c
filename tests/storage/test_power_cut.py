"""A store whose newest files never reached the disk is read and written on, with nothing done by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deltalake import DeltaTable

import storage
from storage.errors import StoreNotFound
from storage.manifest import Manifest
from storage.schema import Column, Schema
from storage.verify import verify
from storage.writer import ShardWriter
from tests.storage.small_store import row

SCHEMA = Schema({"value": Column((2,))})


def add(url: Path, item: str) -> None:
    writer = ShardWriter(url, "numbers", SCHEMA)
    writer.add(row(item, "numbers"), {"value": np.array([len(item), 1], np.float32)})
    Manifest(url).commit(writer.flush())
    writer.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for item in ("a", "bb", "ccc"):
        add(tmp_path / "store", item)
    return tmp_path / "store"


def entries(store: Path) -> list[Path]:
    return sorted((store / "manifest/_delta_log").glob("*.json"))


def check(store: Path, items: set[str]) -> None:
    cache = storage.open(store)
    assert set(cache["numbers"]) == items
    add(store, "dddd")
    assert set(storage.open(store)["numbers"]) == items | {"dddd"}
    assert verify(store, deep=True).faults == ()


@pytest.mark.parametrize("left", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data))])
def test_a_newest_commit_that_was_cut_off_never_happened(store: Path, left: Callable[[bytes], bytes]) -> None:
    newest = entries(store)[-1]
    newest.write_bytes(left(newest.read_bytes()))
    check(store, {"a", "bb"})


@pytest.mark.parametrize("left", [b"", b'{"protocol":'])
def test_a_store_cut_off_at_its_first_commit_is_an_empty_one(tmp_path: Path, left: bytes) -> None:
    store = tmp_path / "store"
    Manifest(store)._create()
    entries(store)[-1].write_bytes(left)
    assert Manifest(store).snapshot == -1
    add(store, "a")
    check(store, {"a"})


@pytest.mark.parametrize("left", [lambda data: b"", lambda data: data[: len(data) // 2], None])
def test_a_checkpoint_that_was_cut_off_is_done_without(store: Path, left: Callable[[bytes], bytes] | None) -> None:
    DeltaTable(store / "manifest").create_checkpoint()
    (checkpoint,) = (store / "manifest/_delta_log").glob("*.checkpoint.parquet")
    if left:
        checkpoint.write_bytes(left(checkpoint.read_bytes()))
    else:
        checkpoint.unlink()
    check(store, {"a", "bb", "ccc"})


@pytest.mark.parametrize(("place", "change"), [(1, lambda data: b"{"), (-1, lambda data: data.replace(b'"', b"'", 3))])
def test_an_older_entry_or_one_with_flipped_bits_is_never_taken_for_one_that_was_cut_off(
    store: Path, place: int, change: Callable[[bytes], bytes]
) -> None:
    entry = entries(store)[place]
    entry.write_bytes(change(entry.read_bytes()))
    before = {path: path.read_bytes() for path in (store / "manifest").rglob("*") if path.is_file()}
    with pytest.raises(StoreNotFound, match="can't open the newest snapshot"):
        Manifest(store)
    assert {path: path.read_bytes() for path in (store / "manifest").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["per%20cent", "back\\slash", "new\nline", "latin\udce9"])
def test_a_path_that_deltalake_would_take_for_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreNotFound, match="the path of a store can't hold"):
        Manifest(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["with space", "Zoë ☃", "50%", "hash#q?x", "[b]*", "quo'te\"", "file:x"])
def test_any_other_path_holds_a_store(tmp_path: Path, name: str) -> None:
    add(tmp_path / name, "a")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    check(tmp_path / name, {"a"})

"""Digests of inputs follow contents, and the stat cache never gives an old one."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pipelines import inputs
from pipelines.columns import as_bytes
from pipelines.errors import JobError
from pipelines.inputs import Digests, StatCache, combined, digest_file, digest_inputs, digest_items


@dataclass(frozen=True)
class Files:
    """A source of one kind: item -> its files."""

    paths: dict[str, list[Path]] = field(default_factory=dict)
    name: ClassVar[str] = "files"
    kinds: ClassVar[tuple[str, ...]] = ("scan",)

    def keys(self) -> list[str]:
        return sorted(self.paths)

    def files(self, key: str, kind: str) -> list[Path]:
        return self.paths[key]

    def facts(self, key: str, kind: str) -> bytes:
        return b""

    def open(self, key: str, kind: str) -> Any:
        raise NotImplementedError


def write(path: Path, text: str, age_s: float = 60.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> StatCache:
    return StatCache(tmp_path / "cache" / "files.sqlite")


def digest(cache: StatCache, *paths: Path) -> bytes | None:
    found: Digests = digest_inputs(Files({"a": list(paths)}), ["scan"], cache)
    value: bytes | None = found.kinds["scan"][0].as_py()
    return value


def files_read(cache: StatCache, *paths: Path) -> int:
    read = 0

    def count(done: int, files: int, size: int, total: int) -> None:
        nonlocal read
        read = done

    digest_inputs(Files({"a": list(paths)}), ["scan"], cache, count)
    return read


def test_the_digest_follows_the_content_and_not_the_path(tmp_path: Path, cache: StatCache) -> None:
    one, same, other = (write(tmp_path / name, text) for name, text in (("1", "x"), ("2/y", "x"), ("3", "z")))
    assert digest(cache, one) == digest(cache, same) != digest(cache, other)


def test_the_digest_of_one_item_is_that_of_the_plan(tmp_path: Path, cache: StatCache) -> None:
    @dataclass(frozen=True)
    class Two(Files):
        kinds: ClassVar[tuple[str, ...]] = ("scan", "clip")

        def facts(self, key: str, kind: str) -> bytes:
            return b"pose" if kind == "clip" else b""

    source = Two({"a": [write(tmp_path / "1", "x"), tmp_path / "absent"], "b": [write(tmp_path / "2", "y")]})
    for kinds in (["scan"], ["clip"], ["scan", "clip"], ["clip", "scan"]):
        digests = digest_inputs(source, ["scan", "clip"], cache)
        parts = np.stack([as_bytes(digests.kinds[kind]) for kind in kinds], 1)
        for row, key in zip(combined(parts), source.keys(), strict=True):
            assert digest_items(source, [key], kinds, cache)[0].tobytes() == row.tobytes()


def test_order_and_borders_of_files_count(tmp_path: Path, cache: StatCache) -> None:
    a, b, ab, nothing = (write(tmp_path / name, name.strip("0")) for name in ("a", "b", "ab", "0"))
    found = {digest(cache, *paths) for paths in ((a, b), (b, a), (ab,), (ab, nothing), (nothing, ab), (a,))}
    assert len(found) == 6


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, cache: StatCache) -> None:
    path = write(tmp_path / "a", "x")
    first = digest(cache, path)
    assert files_read(cache, path) == 0
    assert digest(cache, path) == first


def test_a_changed_file_is_read_again(tmp_path: Path, cache: StatCache) -> None:
    path = write(tmp_path / "a", "x", age_s=60)
    first = digest(cache, path)
    write(path, "y", age_s=30)
    assert digest(cache, path) != first


def test_another_file_of_equal_size_and_time_is_read_again(tmp_path: Path, cache: StatCache) -> None:
    path, other = write(tmp_path / "a", "x"), write(tmp_path / "b", "y")
    first = digest(cache, path)
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)
    assert digest(cache, path) != first


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path, cache: StatCache) -> None:
    path = write(tmp_path / "a", "x", age_s=-3600)  # so that it does not settle while this runs
    first = digest(cache, path)
    stat = path.stat()
    path.write_text("y")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as within one tick of the clock
    assert digest(cache, path) != first


def test_a_missing_file_has_a_digest_of_its_own_until_it_appears(tmp_path: Path, cache: StatCache) -> None:
    path = tmp_path / "a"
    missing = digest(cache, path)
    assert missing is not None
    assert missing == digest(cache, tmp_path / "b")
    write(path, "")
    assert digest(cache, path) != missing


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, cache: StatCache) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    assert digest(cache, tmp_path / "pipe") != digest(cache, tmp_path / "missing")


def test_a_folder_counts_by_names_and_contents(tmp_path: Path, cache: StatCache) -> None:
    for name in ("1/a.jpg", "2/a.jpg", "3/b.jpg"):
        write(tmp_path / name, "x")
    write(tmp_path / "4/a.jpg", "y")
    one, same, renamed, other = (digest(cache, tmp_path / str(n)) for n in (1, 2, 3, 4))
    assert one == same
    assert len({one, renamed, other}) == 3
    write(tmp_path / "1/.hidden", "z")
    assert digest(cache, tmp_path / "1") == one
    write(tmp_path / "1/b.jpg", "z")
    assert digest(cache, tmp_path / "1") != one


def test_an_item_without_files_does_not_offer_the_kind(cache: StatCache) -> None:
    assert digest(cache) is None


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 100])
def test_a_damaged_cache_is_replaced(tmp_path: Path, cache: StatCache, damage: bytes) -> None:
    path = write(tmp_path / "a", "x")
    first = digest(cache, path)
    for file in cache.path.parent.iterdir():
        file.unlink()
    cache.path.write_bytes(damage)
    assert digest(cache, path) == first
    assert digest(cache, path) == first
    assert files_read(cache, path) == 0


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    write(tmp_path / "file", "in the way")
    path = write(tmp_path / "a", "x")
    cache = StatCache(tmp_path / "file" / "files.sqlite")
    assert digest(cache, path) is not None
    assert files_read(cache, path) == 1


def test_the_cache_lies_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert StatCache().path == tmp_path / "scenecache" / "files.sqlite"


def _digest_all(cache: Path, paths: list[str]) -> int:
    return len(StatCache(cache).digest(paths))


def test_several_processes_share_the_cache(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / "in" / str(i), str(i))) for i in range(300)]
    cache = tmp_path / "cache" / "files.sqlite"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(_digest_all, [(cache, paths)] * 6) == [300] * 6
    with sqlite3.connect(cache) as db:
        assert db.execute("SELECT count(*) FROM file").fetchone() == (300,)


def test_item_keys_of_any_kind_are_taken(tmp_path: Path, cache: StatCache) -> None:
    path = write(tmp_path / "a", "x")
    keys = ["a b", "a/b", "..", "Küche", "x" * 300]
    assert digest_inputs(Files({key: [path] for key in keys}), ["scan"], cache).items.to_pylist() == sorted(keys)


def test_a_key_that_is_no_text_is_refused_by_name(tmp_path: Path, cache: StatCache) -> None:
    with pytest.raises(JobError, match="rename the file"):
        digest_inputs(Files({os.fsdecode(b"a\xff"): []}), ["scan"], cache)


def test_unchanged_weights_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights, expected = write(tmp_path / "w.pth", "numbers"), hashlib.sha256(b"numbers").digest()
    assert digest_file(weights) == expected
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "_hash_file", lambda path: pytest.fail("read again"))
        assert digest_file(weights) == expected
    write(weights, "others", age_s=50)
    assert digest_file(weights) == hashlib.sha256(b"others").digest()
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "none")

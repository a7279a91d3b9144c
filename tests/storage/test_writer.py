"""Writing: in an order that a kill or a full disk at any instant leaves whole."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from gc import collect as collect_garbage
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage
from storage import Column, Manifest, Schema, SchemaError, ShardWriter, StoreUnwritable, files, parquet, read_record
from storage.files import unwritable
from storage.verify import gc, verify
from tests.storage import small_store
from tests.storage.small_store import OBJECTS, assert_same, fill, objects, row, temporary_files

ODD_KEYS = ["a b", "a/b", "../../etc/passwd", "/abs", "..", "ü \U0001f600", "x" * 300, "%2F", "'\";--", "a\nb", "NUL"]


def writer_with(store: Path, count: int, format: str = "parquet") -> ShardWriter:
    """A writer with `count` records of about 40 kB pending."""
    writer = ShardWriter(store, "objects", Schema(OBJECTS.columns, "object", format))  # type: ignore[arg-type]
    for i in range(count):
        writer.add(row(f"item {i}"), objects(250, seed=i))
    return writer


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """What a full disk looks like to a writer: no file grows beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_the_shard_is_safe_on_disk_before_the_manifest_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Manifest(tmp_path).commit([row("before")])
    events: list[tuple[str, str]] = []
    fsync, rename, transact = os.fsync, os.replace, storage.manifest.transact

    def name(path: str) -> str:
        relative = os.path.relpath(path, tmp_path)
        return re.sub(r"\.tmp-[0-9a-f-]+", "TEMPORARY", re.sub(r"[0-9a-f]{32}", "NAME", relative))

    def logged_fsync(fd: int) -> None:
        events.append(("fsync", name(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def logged_rename(old: str, new: str) -> None:
        events.append(("rename", name(new)))
        rename(old, new)

    def logged_transact(*args: Any, **keywords: Any) -> None:
        events.append(("commit", "manifest"))
        transact(*args, **keywords)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_rename)
    monkeypatch.setattr(storage.manifest, "transact", logged_transact)
    fill(tmp_path, {"a": objects(3)})
    monkeypatch.undo()
    assert [event for event, _ in itertools.groupby(events)] == [
        ("fsync", "."),  # the new folder of the stage
        ("fsync", "objects/TEMPORARY"),
        ("rename", "objects/NAME.parquet"),
        ("fsync", "objects"),
        ("fsync", "manifest/stage=objects/TEMPORARY"),
        ("rename", "manifest/stage=objects/NAME.parquet"),
        ("fsync", "manifest/stage=objects"),
        ("commit", "manifest"),
        ("fsync", "manifest/_delta_log/00000000000000000001.json"),  # another process may have left it unsynced
        ("fsync", "manifest/_delta_log/00000000000000000002.json"),
        ("fsync", "manifest/_delta_log"),
    ]


@pytest.mark.parametrize("instant", ["killed_before_commit", "killed_before_rename"])
def test_a_killed_writer_shows_nothing_and_a_second_run_makes_up_for_it(tmp_path: Path, instant: str) -> None:
    fill(tmp_path, {"a": objects(2)})
    process = multiprocessing.get_context("spawn").Process(target=getattr(small_store, instant), args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    cache = storage.open(tmp_path)
    assert list(cache["objects"]) == ["a"]
    report = verify(tmp_path, deep=True)
    assert (report.faults, len(report.orphans)) == ((), instant == "killed_before_commit")
    assert len(temporary_files(tmp_path)) == (instant == "killed_before_rename")

    rows = fill(tmp_path, {"b": objects(3, seed=1)})
    assert list(storage.open(tmp_path)["objects"]) == ["a", "b"]
    assert_same(storage.open(tmp_path)["objects"]["b"], objects(3, seed=1))
    if instant == "killed_before_commit":  # the same content went to the same name
        assert rows["b"].shard in report.orphans
        assert verify(tmp_path).orphans == {}
    else:
        (left,) = temporary_files(tmp_path)
        os.utime(left, (0, 0))
        assert list(gc(tmp_path).removed) == [str(left.relative_to(tmp_path))]
        assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("size", [0, 100, 5_000, 100_000])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("format", ["parquet", "hdf5"])
def test_wherever_in_a_file_the_disk_is_full_the_process_lives_on(
    tmp_path: Path, format: str, compress: bool, size: int
) -> None:
    writer = ShardWriter(tmp_path, "objects", Schema(OBJECTS.columns, "object", format, compress))  # type: ignore[arg-type]
    for i in range(5):
        writer.add(row(f"{i}"), objects(250, seed=i))
    with files_up_to(size), pytest.raises(StoreUnwritable):
        writer.flush()
    collect_garbage()  # HDF5 crashes here if it was told
    assert temporary_files(tmp_path) == []
    for written in writer.flush():
        assert_same(read_record(tmp_path, written), objects(250, seed=int(written.item)))


@pytest.mark.parametrize("format", ["parquet", "hdf5"])
def test_a_full_disk_is_named_leaves_no_temporary_file_and_loses_nothing(tmp_path: Path, format: str) -> None:
    fill(tmp_path, {"before": objects(2)}, stage="other")
    writer = writer_with(tmp_path, 5, format)
    pending = writer.pending
    with files_up_to(100_000), pytest.raises(StoreUnwritable) as raised:
        writer.flush()
    assert str(tmp_path / "objects") in str(raised.value)
    assert re.search(r"\d GB free at .*Make room.*what was committed before is kept", str(raised.value))
    assert temporary_files(tmp_path) == []
    assert list((tmp_path / "objects").iterdir()) == []
    assert storage.open(tmp_path).stages == ["other"]
    assert writer.pending == pending

    rows = writer.flush()
    Manifest(tmp_path).commit(rows)
    assert [r.item for r in rows] == [f"item {i}" for i in range(5)]
    for i in range(5):
        assert_same(storage.open(tmp_path)["objects"][f"item {i}"], objects(250, seed=i))


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_whatever_the_disk_says_is_passed_on_and_the_temporary_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    writer = writer_with(tmp_path, 1)

    def fail(*args: object) -> None:
        raise OSError(error, os.strerror(error))

    (tmp_path / "objects").mkdir()
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreUnwritable, match=re.escape(os.strerror(error))):
        writer.flush()
    monkeypatch.undo()
    assert list((tmp_path / "objects").iterdir()) == []
    assert len(writer.flush()) == 1


def test_of_a_batch_that_fills_the_disk_half_way_all_records_stay_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_BYTES", 100_000)  # two records a shard
    writer = writer_with(tmp_path, 5)
    replaced: list[object] = []
    rename = os.replace

    def second_fails(*args: Any) -> None:
        replaced.append(args)
        if len(replaced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(*args)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(StoreUnwritable):
        writer.flush()
    rows = writer.flush()
    assert [r.item for r in rows] == [f"item {i}" for i in range(5)]
    assert len({r.shard for r in rows}) == len(list((tmp_path / "objects").iterdir())) == 3
    assert writer.flush() == []


def test_a_store_under_a_file_is_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnwritable, match="file"):
        writer_with(tmp_path / "file" / "store", 1).flush()


def test_keys_never_appear_in_paths_and_read_back(tmp_path: Path) -> None:
    store = tmp_path / "a" / "store"
    records = {key: objects(i % 3, seed=i) for i, key in enumerate(ODD_KEYS)}
    fill(store, records)
    cache = storage.open(store)["objects"]
    assert list(cache) == sorted(ODD_KEYS)
    for key, record in records.items():
        assert_same(cache[key], record)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    shards = {name for name in names if name.startswith("a/store/objects/")}
    assert len(shards) == 1
    assert all(re.fullmatch(r"a/store/objects/[0-9a-f]{32}\.parquet", name) for name in shards)
    assert all(name.startswith("a/store/manifest/") for name in names - shards)


def test_rows_say_where_each_record_lies_and_what_it_is(tmp_path: Path) -> None:
    given = {"a": objects(3), "none": objects(0), "b": objects(2, seed=1)}
    writer = ShardWriter(tmp_path, "objects", OBJECTS)
    for item, record in given.items():
        writer.add(row(item, attempts=2, seconds=0.5, run="r"), record)
    rows = writer.flush()
    assert [(r.item, r.status, r.first_row, r.rows) for r in rows] == [
        ("a", "ok", 0, 3), ("none", "empty", 3, 0), ("b", "ok", 3, 2),
    ]  # fmt: skip
    assert len({r.shard for r in rows}) == 1
    assert {r.shard_bytes for r in rows} == {(tmp_path / rows[0].shard).stat().st_size}
    assert rows[0].bytes == 3 * (64 * 2 + 7 * 4) + len("object 0 of 0") * 3
    assert {(r.attempts, r.seconds, r.run, r.mapped) for r in rows} == {(2, 0.5, "r", True)}
    assert len({r.digest for r in rows}) == 3
    assert not Manifest(tmp_path).stages()  # nothing is committed by the writer


def test_a_shard_that_has_its_size_is_written_while_the_next_is_filled(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "objects", OBJECTS, target_bytes=80_000)
    sizes = []
    for i in range(5):
        writer.add(row(f"{i}"), objects(250, seed=i))
        sizes.append(writer.pending)
    assert sizes == [sizes[0], 2 * sizes[0], sizes[0], 2 * sizes[0], sizes[0]]
    rows = []
    while len(rows) < 4:  # each row once, when its shard is there
        rows += writer.written()
        time.sleep(0.001)
    assert [r.item for r in rows] == ["0", "1", "2", "3"]
    assert len({r.shard for r in rows}) == 2
    assert [r.item for r in writer.flush()] == ["4"]
    assert (writer.pending, writer.flush(), writer.written()) == (0, [], [])
    for r in rows:
        assert_same(read_record(tmp_path, r), objects(250, seed=int(r.item)))


def test_a_shard_that_could_not_be_written_is_told_at_the_next_call_and_stays_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path, "objects", OBJECTS, target_bytes=80_000)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        for i in range(3):
            writer.add(row(f"{i}"), objects(250, seed=i))
        writer.add(row("3"), objects(250, seed=3))
        with pytest.raises(StoreUnwritable, match=os.strerror(errno.ENOSPC)):
            writer.add(row("not taken"), objects(250))
    writer.add(row("4"), objects(250, seed=4))
    rows = writer.flush()
    assert [r.item for r in rows] == ["0", "1", "2", "3", "4"]
    for r in rows:
        assert_same(read_record(tmp_path, r), objects(250, seed=int(r.item)))


def test_how_long_the_oldest_record_waits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(storage.writer.time, "monotonic", lambda: now[0])
    writer = ShardWriter(tmp_path, "objects", OBJECTS)
    assert writer.waiting_s == 0
    for i in range(2):
        writer.add(row(f"{i}"), objects(2))
        now[0] += 5
    assert writer.waiting_s == 10
    writer.start()
    assert writer.waiting_s == 0
    assert len(writer.flush()) == 2


def test_a_record_too_large_for_a_parquet_page_is_sent_to_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_BYTES", 1000)
    writer = ShardWriter(tmp_path, "objects", OBJECTS)
    with pytest.raises(SchemaError, match="objects 'a'.*use format='hdf5'"):
        writer.add(row("a"), objects(100))
    assert writer.flush() == []


def test_a_row_of_another_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the row is of stage other"):
        ShardWriter(tmp_path, "objects", OBJECTS).add(row("a", "other"), objects(1))


def test_a_view_of_a_larger_array_or_another_byte_order_is_stored_by_its_values(tmp_path: Path) -> None:
    schema = Schema({"x": Column((3,), "float32"), "y": Column((), "int64")}, "object")
    large = np.arange(60, dtype=np.float32).reshape(10, 6)
    record = {"x": large[::2, 1:4], "y": np.arange(5, dtype=np.int64)[::-1]}
    rows = fill(tmp_path, {"a": record}, schema=schema)
    assert_same(storage.open(tmp_path)["objects"]["a"], {name: np.array(v) for name, v in record.items()})
    assert read_record(tmp_path, replace(rows["a"], first_row=1, rows=2))["y"].tolist() == [3, 2]


def test_a_store_under_an_fsspec_url_gets_whole_shards_and_no_temporary_files() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    url = "memory://scenecache-writer"
    writer = ShardWriter(url, "objects", OBJECTS)
    writer.add(row("a/b"), objects(3))
    rows = writer.flush()
    assert [name.rsplit("/", 2)[-2:] for name in fs.find("/scenecache-writer")] == [rows[0].shard.split("/")]
    assert_same(read_record(url, rows[0]), objects(3))


def test_an_error_of_the_disk_while_a_shard_is_being_written_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a failed write-back once; whoever asks next is told that all is well."""
    told: list[str] = []
    sync = files.sync

    def once(path: str | os.PathLike[str]) -> None:
        if files.TEMPORARY in str(path) and not told:
            told.append(str(path))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    def slow(*args: Any) -> bool:
        written = parquet_write(*args)
        while not told:  # until the file was synced beside the writing
            time.sleep(0.001)
        return written

    parquet_write = parquet.write
    monkeypatch.setattr(parquet, "write", slow)
    monkeypatch.setattr(files, "sync", once)
    writer = writer_with(tmp_path, 1)
    with pytest.raises(StoreUnwritable, match=os.strerror(errno.EIO)):
        writer.flush()
    assert temporary_files(tmp_path) == []
    assert len(writer.flush()) == 1


def test_an_error_of_the_disk_is_one_plain_line() -> None:
    with pytest.raises(StoreUnwritable) as raised, unwritable("/store/manifest"):
        raise OSError("\x1b[31mGeneric error\x1b[0m:\n   \x1b[1;38;5;4mno space\x1b[m  left\n")
    assert str(raised.value).startswith("can't write /store/manifest: Generic error: no space left (")


def test_where_a_temporary_file_cannot_be_removed_the_first_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_with(tmp_path, 1)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_only(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(os, "unlink", read_only)
    with pytest.raises(StoreUnwritable, match=os.strerror(errno.ENOSPC)):
        writer.flush()

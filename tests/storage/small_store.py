"""Small stores to test with, and what other processes do to them (they import this module by name)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import storage
from storage import Column, Manifest, Record, Row, Schema, ShardWriter

OBJECTS = Schema(
    {
        "feature": Column((64,), "float16"),
        "box": Column((7,), "float32", unit="m", frame="scan"),
        "name": Column((), "string"),
    },
    element="object",
)


def objects(count: int, seed: int = 0) -> Record:
    """A record of `OBJECTS`."""
    rng = np.random.default_rng(seed)
    return {
        "feature": rng.random((count, 64)).astype(np.float16),
        "box": rng.random((count, 7), np.float32),
        "name": np.array([f"object {i} of {seed}" for i in range(count)], object),
    }


def row(item: str, stage: str = "objects", **changes: Any) -> Row:
    """A row as a worker has it before the record is written."""
    given = {"fingerprint": b"f" * 16, "inputs": b"i" * 16, "recipe": "0" * 32, "status": "ok"} | changes
    return Row(stage, item, **given)


def fill(
    url: Any, records: dict[str, Record], stage: str = "objects", schema: Schema = OBJECTS, **changes: Any
) -> dict[str, Row]:
    """Write records as one shard and commit them; their rows by item."""
    writer = ShardWriter(url, stage, schema)
    for item, record in records.items():
        writer.add(row(item, stage, **changes), record)
    rows = writer.flush()
    Manifest(url).commit(rows)
    return {row.item: row for row in rows}


def assert_same(found: Record, expected: Record) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def temporary_files(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.name.startswith(".tmp-")]


def commit_again_and_again(urls: list[str], together: Any, process: int, commits: int) -> None:
    """Commit one item of this process's own and one that all share, several times to each of several stores.

    Args:
        together: a barrier: all processes make a store at the same time.
    """
    for url in urls:
        together.wait()
        for attempt in range(1, commits + 1):
            Manifest(url).commit([row(f"process {process}", attempts=attempt), row("shared", run=f"{process}")])


def make_at_once(urls: list[str], processes: int, commits: int) -> None:
    """`commit_again_and_again` in several processes; all end well."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(processes, timeout=120)
    started = [
        spawn.Process(target=commit_again_and_again, args=(urls, together, i, commits)) for i in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * processes


def killed_before_commit(url: str) -> None:
    """Write a shard, then die."""
    writer = ShardWriter(url, "objects", OBJECTS)
    writer.add(row("b"), objects(3, seed=1))
    writer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before_rename(url: str) -> None:
    """Die with a shard written but not published."""

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = die  # type: ignore[assignment]
    killed_before_commit(url)


def digests_of(records: Any, answers: Any) -> None:
    """Put {key: (sum of boxes, names)} of the records on a queue."""
    answers.put({key: (float(r["box"].sum()), r["name"].tolist()) for key, r in records.items()})


def forked(url: str, answers: Any) -> None:
    """What a forked process can do with a store: open and read it; committing it refuses."""
    cache = storage.open(url)
    try:
        Manifest(url).commit([row("x")])
        refusal = ""
    except Exception as error:
        refusal = str(error)
    answers.put((sorted(cache["objects"]), cache["objects"]["a"]["box"].sum().item(), refusal))

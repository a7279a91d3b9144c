"""How fast records become a committed store, against a raw write of the same bytes; both end on the disk (fsync).

`ours_vs_raw` is bytes per second of the writer (checks, digests, shards that are proven mappable, one commit a shard)
over those of the bytes written to one file. Records are as a detector gives them: 80 objects with 512 half-precision
features, a box, a score and a label.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import numpy as np

from storage import Column, Manifest, Record, Row, Schema, ShardWriter

OBJECTS, WIDTH = 80, 512
SCHEMA = Schema(
    {
        "feature": Column((WIDTH,), "float16"),
        "box": Column((7,), "float32", unit="m", frame="scan"),
        "score": Column((), "float32"),
        "label": Column((), "int32"),
    },
    element="object",
)


def records(count: int) -> list[Record]:
    """Distinct records in memory."""
    rng = np.random.default_rng(0)
    feature = rng.random((64, OBJECTS, WIDTH), np.float32).astype(np.float16)
    return [
        {
            "feature": feature[i % 64] + np.float16(i // 64),
            "box": rng.random((OBJECTS, 7), np.float32),
            "score": rng.random(OBJECTS, np.float32),
            "label": rng.integers(0, 18, OBJECTS, np.int32),
        }
        for i in range(count)
    ]


def write_raw(folder: Path, data: list[Record]) -> None:
    """All arrays into one file, many of them a call."""
    buffers = [array for record in data for array in record.values()]
    fd = os.open(folder / "raw.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for i in range(0, len(buffers), 256):
            part = buffers[i : i + 256]
            if os.writev(fd, part) != sum(array.nbytes for array in part):
                raise OSError(f"short write to {folder}: is the disk full?")
        os.fsync(fd)
    finally:
        os.close(fd)


def write_store(folder: Path, data: list[Record]) -> None:
    """As a run does it: every shard is committed (there by the driver) while the next one is made."""
    manifest, writer = Manifest(folder / "store"), ShardWriter(folder / "store", "objects", SCHEMA)
    with ThreadPoolExecutor(1) as driver:
        commits = []
        for i, record in enumerate(data):
            writer.add(Row("objects", f"scene{i:06d}", b"f" * 16, b"i" * 16, "0" * 32, "ok"), record)
            if rows := writer.written():
                commits.append(driver.submit(manifest.commit, rows))
        commits.append(driver.submit(manifest.commit, writer.flush()))
        for commit in commits:
            commit.result()


def main() -> None:
    where = ("--folder", {"help": "where to write, on the disk that is to be measured (default: the temporary folder)"})
    options = harness.options(__doc__, where)
    data = records(3_000 if options.quick else 12_000)
    size = sum(array.nbytes for record in data for array in record.values())
    print(f"{len(data)} records, {size / 1e9:.2f} GB", file=sys.stderr)

    def timed(write) -> float:  # type: ignore[no-untyped-def]
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            start = time.perf_counter()
            write(Path(folder), data)
            return time.perf_counter() - start

    seconds = harness.compare(
        {"raw": lambda: timed(write_raw), "ours": lambda: timed(write_store)}, repeats=3 if options.quick else 5
    )
    free = shutil.disk_usage(options.folder or tempfile.gettempdir()).free
    harness.emit(
        "write",
        {"ours_vs_raw": seconds["raw"] / seconds["ours"]},
        {
            "gigabytes": size / 1e9,
            "records": len(data),
            "raw_mb_per_s": size / 1e6 / seconds["raw"],
            "ours_mb_per_s": size / 1e6 / seconds["ours"],
            "free_gb": free / 1e9,
        },
    )


if __name__ == "__main__":
    main()

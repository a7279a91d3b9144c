"""How long is planning 1,000,000 items x 4 stages, in how much memory, and opening a store of that size?

The store holds a record of every item in each stage, and a tenth of them in an older version too. The plan is made in
a fresh process from the manifest on disk; digests of the inputs are given, as the stat cache gives them. Mixed work:
`points` has a changed setting (all computed), `grid` hangs on it (all undecided), `frames` has a tenth of its inputs
changed, `frame_grid` hangs on it. `unchanged_seconds` is the same plan with nothing to do.

Keys: seconds, peak_gib, growth_10x (time from a tenth of the items to all of them), open_seconds (open the store and
read the first record by key).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness
import numpy as np
import pyarrow as pa

import storage
from extractors.base import Extractor
from pipelines.inputs import Digests, StatCache
from pipelines.plan import plan, recipe_of
from pipelines.stage import Job, Stage
from storage.fingerprint import fingerprints
from storage.manifest import Manifest, Row
from storage.schema import Column, Schema
from storage.writer import ShardWriter

SHARD_ITEMS = 2000


@dataclass(frozen=True, kw_only=True)
class Points(Extractor):
    name: ClassVar[str] = "points"
    takes: ClassVar[tuple[str, ...]] = ("scan",)
    proposals: int = 256


@dataclass(frozen=True, kw_only=True)
class Grid(Extractor):
    name: ClassVar[str] = "grid"
    takes: ClassVar[tuple[str, ...]] = ("points",)


@dataclass(frozen=True, kw_only=True)
class Frames(Extractor):
    name: ClassVar[str] = "frames"
    takes: ClassVar[tuple[str, ...]] = ("clip",)


def job(proposals: int) -> Job:
    """A chain points -> grid, and another frames -> frame_grid."""
    stages = (Stage(Points(proposals=proposals)), Stage(Grid()), Stage(Frames()))
    return Job("benchmark", None, (*stages, Stage(Grid(), "frame_grid", ("frames",))))


def digests(items: int, changed: int = 0) -> Digests:
    """Keys and digests of `items` inputs; every tenth clip differs with `changed`."""
    draw = np.random.default_rng(0)
    scan, clip = (draw.integers(0, 256, (items, 16), np.uint8) for _ in range(2))
    clip[::10, 0] ^= np.uint8(changed)
    kinds = {name: pa.array(list(map(bytes, value)), pa.binary(16)) for name, value in (("scan", scan), ("clip", clip))}
    return Digests(pa.array([f"scene{i:07d}_00" for i in range(items)]), kinds)


def build(url: str, items: int) -> None:
    """A store as runs leave it, without the payload: shards are small files of the size that the manifest says."""
    manifest, given = Manifest(url), digests(items)
    draw = np.random.default_rng(1)
    first_key = given.items[0].as_py()
    outputs: dict[str, np.ndarray] = {}
    for stage in job(256).stages:
        recipe = manifest.save_recipe(recipe_of(stage))
        source = {"points": "scan", "frames": "clip"}.get(stage.name, "")
        if source:
            entering = np.stack([np.frombuffer(b"".join(given.kinds[source].to_pylist()), np.uint8).reshape(-1, 16)], 1)
            raw = entering[:, 0]
        else:
            entering, raw = outputs[stage.of[0]][:, None], np.zeros((items, 16), np.uint8)
        prints = fingerprints(recipe, entering)
        outputs[stage.name] = made = draw.integers(0, 256, (items, 16), np.uint8)
        folder = Path(url) / stage.name
        folder.mkdir(parents=True)
        names = [f"{stage.name}/{i:032x}.parquet" for i in range(-(-items // SHARD_ITEMS))]
        for name in names:
            (Path(url) / name).write_bytes(b"shard")
        shard_of = np.arange(items) // SHARD_ITEMS
        for version in (prints[:, ::-1], prints):  # an older version of a tenth, then the present one of all
            chosen = np.arange(0, items, 10) if version is not prints else np.arange(items)
            table = {
                "stage": [stage.name] * len(chosen),
                "item": given.items.take(pa.array(chosen)),
                "fingerprint": list(map(bytes, version[chosen])),
                "inputs": list(map(bytes, raw[chosen])),
                "recipe": [recipe] * len(chosen),
                "status": ["ok"] * len(chosen),
                "shard": np.array(names)[shard_of[chosen]],
                "first_row": chosen % SHARD_ITEMS * 80,
                "rows": np.full(len(chosen), 80),
                "bytes": np.full(len(chosen), 87_360),
                "shard_bytes": np.full(len(chosen), 5),
                "digest": list(map(bytes, made[chosen])),
                "seconds": np.full(len(chosen), 0.05),
            }
            manifest.commit_table(pa.table(table))
        if stage.name == "points":  # one real record, to be read first
            writer = ShardWriter(url, "points", Schema({"feature": Column((128,), "float16")}, "object"))
            row = Row("points", first_key, bytes(prints[0]), bytes(raw[0]), recipe, "ok")
            writer.add(row, {"feature": np.ones((80, 128), np.float16)})
            manifest.commit(writer.flush())
    manifest.compact(files=1)  # as a run does at its end, after thousands of commits


def measure(url: str, items: int, task: str) -> dict[str, Any]:
    """Run in a process of its own: seconds and peak memory of one plan, or of the first record read."""
    if task == "open":
        key = f"scene{0:07d}_00"
        start = time.perf_counter()
        record = storage.open(url)["points"][key]
        seconds = time.perf_counter() - start
        assert record["feature"].shape == (80, 128)
        return {"seconds": seconds}
    given = digests(items, changed=1 if task == "mixed" else 0)
    start = time.perf_counter()
    made = plan(job(128 if task == "mixed" else 256), given, Manifest(url))
    lines = made.lines()
    seconds = time.perf_counter() - start
    peak = peak_gib()
    counts = {f"{n.stage} {n.action}: {n.reason}": n.items for n in lines}
    return {"seconds": seconds, "peak_gib": peak, "lines": counts}


def peak_gib() -> float:
    """Most memory that this process has held (`ru_maxrss` would count that of the process that started it)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 2**20


def apart(*argv: str) -> dict[str, Any]:
    """`measure` in a new process."""
    done = subprocess.run([sys.executable, __file__, "--task", *argv], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def expected(items: int) -> dict[str, int]:
    """What the mixed plan must say: a benchmark of a wrong plan is worth nothing."""
    tenth = len(range(0, items, 10))
    return {
        "points compute: settings changed: proposals 256 -> 128": items,
        "grid maybe: upstream changed": items,
        "frames reuse: unchanged": items - tenth,
        "frames compute: input changed": tenth,
        "frame_grid reuse: unchanged": items - tenth,
        "frame_grid maybe: upstream changed": tenth,
    }


def stat_cache(files: int) -> float:
    """Files per second that the stat cache knows again."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{i}.bin") for i in range(files)]
        for path in paths:
            Path(path).write_bytes(path.encode())
            os.utime(path, (1e9, 1e9))  # settled long ago
        cache = StatCache(Path(folder) / "cache" / "files.sqlite")
        first = cache.digest(paths)
        start = time.perf_counter()
        again = cache.digest(paths)
        seconds = time.perf_counter() - start
    assert again == first
    return files / seconds


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.options(__doc__, ("--task", {"nargs": 3, "metavar": ("NAME", "URL", "ITEMS")}), argv=argv)  # type: ignore[arg-type]
    if options.task:
        task, url, items = options.task
        print(json.dumps(measure(url, int(items), task)))
        return
    large = 100_000 if options.quick else 1_000_000
    small, repeats = large // 10, 3
    with tempfile.TemporaryDirectory(prefix="scenecache-plan-") as folder:
        urls = {size: f"{folder}/{size}" for size in (small, large)}
        for size, url in urls.items():
            build(url, size)
        runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for _ in range(repeats):
            for task, size in (("mixed", small), ("mixed", large), ("unchanged", large), ("open", large)):
                runs.setdefault((task, size), []).append(apart(task, urls[size], str(size)))
    seconds = {key: statistics.median(run["seconds"] for run in taken) for key, taken in runs.items()}
    mixed = runs["mixed", large]
    assert mixed[0]["lines"] == expected(large), mixed[0]["lines"]
    harness.emit(
        "plan",
        ratios={
            "seconds": seconds["mixed", large],
            "peak_gib": max(run["peak_gib"] for run in mixed),
            "growth_10x": seconds["mixed", large] / seconds["mixed", small],
            "open_seconds": seconds["open", large],
        },
        figures={
            "items": large,
            "stages": 4,
            "repeats": repeats,
            "unchanged_seconds": seconds["unchanged", large],
            "small_seconds": seconds["mixed", small],
            "stat_cache_files_per_s": stat_cache(2_000 if options.quick else 20_000),
        },
    )


if __name__ == "__main__":
    main()

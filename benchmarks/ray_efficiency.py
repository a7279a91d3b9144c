"""How much of the cores a run on Ray keeps busy with the stages' own work.

Items that each burn 50 ms of CPU time go through `execute` and the Ray runner, from the plan to the last commit,
after `ray.init`. `ours_vs_ideal` = (sum of the items' CPU seconds / cores) / wall seconds.

A machine that others use at the same time lengthens the wall: `machine_share` says what part of the cores this
benchmark could have had, by the same loop in plain processes, before and after; it is reported, not divided out.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness
import numpy as np

from extractors.base import Extractor
from storage.schema import Column, Record, Schema

ITEM_S = 0.05


def burn(seconds: float) -> float:
    """Use up CPU time of this thread; returns how much it was."""
    start = time.thread_time()
    while (used := time.thread_time() - start) < seconds:
        for _ in range(2000):
            pass
    return used


@dataclass(frozen=True, kw_only=True)
class Burn(Extractor):
    """50 ms of work per item; the record says how long it was."""

    name: ClassVar[str] = "burn"
    takes: ClassVar[tuple[str, ...]] = ("nothing",)

    @property
    def schema(self) -> Schema:
        return Schema({"cpu_s": Column((), "float64", unit="s"), "feature": Column((256,))}, element="object")

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        return lambda batch: [
            {"cpu_s": np.array([burn(ITEM_S)]), "feature": np.zeros((1, 256), np.float32)} for _ in batch
        ]


@dataclass(frozen=True)
class Counter:
    """Items without files."""

    items: int
    name: ClassVar[str] = "counter"
    kinds: ClassVar[tuple[str, ...]] = ("nothing",)

    def keys(self) -> list[str]:
        return [f"{i:06d}" for i in range(self.items)]

    def files(self, key: str, kind: str) -> list[Path]:
        return [Path(__file__)]

    def facts(self, key: str, kind: str) -> bytes:
        return b""

    def open(self, key: str, kind: str) -> None:
        return None


@contextmanager
def store() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="scenecache-bench-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine_share(cores: int, seconds: float = 2.0) -> float:
    """CPU seconds that busy loops in as many processes as cores get, over what they would get alone."""
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(burn, [0.01] * cores, chunksize=1)
        start = time.perf_counter()
        used = sum(pool.map(burn, [seconds] * cores, chunksize=1))
        return used / cores / (time.perf_counter() - start)


def main() -> None:
    options = harness.options(__doc__, ("--repeats", {"type": int, "default": 3}))
    import ray

    from pipelines.execute import execute
    from pipelines.inputs import StatCache, digest_inputs
    from pipelines.plan import plan
    from pipelines.runners.ray import RayRunner, start_ray
    from pipelines.stage import Job, Stage
    from storage.manifest import Manifest
    from storage.reader import open as open_store

    cores = harness.machine()["cores"]
    items = 200 if options.quick else 1000
    job = Job("burn", Counter(items), (Stage(Burn()),))
    shares = [machine_share(cores)]
    temp = tempfile.mkdtemp(prefix="scr-")
    start_ray(cores, object_store_memory=200 << 20, _temp_dir=temp)
    walls, ratios = [], []
    try:
        for _ in range(1 if options.quick else options.repeats):
            with store() as url:
                digests = digest_inputs(job.source, ("nothing",), StatCache(Path(url) / "digests"))
                start = time.perf_counter()
                ready = plan(job, digests, Manifest(url))
                summary = execute(job, ready, url, RayRunner(cores))
                walls.append(time.perf_counter() - start)
                records = open_store(url)["burn"]
                assert summary.exit_code == 0
                assert len(records) == items
                ratios.append(sum(float(r["cpu_s"][0]) for r in records.values()) / cores / walls[-1])
    finally:
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)
    shares.append(machine_share(cores))
    middle = sorted(range(len(ratios)), key=ratios.__getitem__)[len(ratios) // 2]
    harness.emit(
        "ray_efficiency",
        {"ours_vs_ideal": ratios[middle]},
        {"items": items, "item_s": ITEM_S, "wall_s": walls[middle], "all": ratios, "machine_share": shares},
    )


if __name__ == "__main__":
    main()

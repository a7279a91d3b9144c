"""The three detectors of NuScenes-QA on the CPU: key frames per minute, the share of each part, memory.

Each detector runs in a process of its own, on one thread and on all of the machine's, over key frames with ten sweeps
(two with `--quick`): made-up ones of a street's size, or nuScenes' own with `--root`. A key frame counts from its files
to its objects' features. Memory is the process's peak, weights and imports included. `benchmarks/nuscenes_index.py` has
the tables, `benchmarks/gpu.py` the GPU.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
from gpu import DETECTORS, PARTS, Clock, Detector, key_frames, spent

from extractors.base import Weights
from extractors.inference import inference


def measure(name: str, threads: int, count: int, sweeps: int, root: str | None) -> dict[str, Any]:
    """One detector in this process: seconds of a key frame, the share of each part, peak memory."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        frames = list(key_frames(count, root, sweeps, Path(folder)))
        extractor = DETECTORS[name](weights=Weights("untrained:0"))
        run = extractor.load("cpu")
        seconds = []
        for i, frame in enumerate([frames[0], *frames]):  # the first warms up
            start = time.perf_counter()
            (record,) = run([extractor.prepare(f"key frame {i}", *(frame[kind] for kind in extractor.takes))])
            seconds.append(time.perf_counter() - start)
            assert len(record["score"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        del run
        parts = shares(name, frames)
    median = sorted(seconds[1:])[count // 2]
    return {"seconds": median, "key_frames_per_min": 60 / median, "peak_gib": peak, "share": parts}


@inference
def shares(name: str, frames: list[dict[str, Any]]) -> dict[str, float]:
    """Each part's share of the time, in a pass of its own."""
    detector, clock = Detector(name, "untrained:0", "cpu", frames), Clock("cpu")
    prepared = detector.prepared
    with clock.inside(detector.module, PARTS[name]):
        for one in prepared:
            detector.prepared = [one]
            detector.once(1, "float32", clock)
    parts = {**spent(clock, name), "preparation": detector.prepare_s * len(frames)}
    total = sum(parts.values())
    return {part: round(one / total, 4) for part, one in parts.items()}


def main() -> None:
    options = harness.options(
        __doc__,
        ("--root", {"help": "a folder of nuScenes, for its key frames in place of made-up ones"}),
        ("--only", {"help": "DETECTOR:THREADS, in this process (the benchmark calls itself)"}),
    )
    count = 1 if options.quick else 5
    if options.only:
        name, threads = options.only.split(":")
        print(json.dumps(measure(name, int(threads), count, 2 if options.quick else 10, options.root)))
        return
    every = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {"key_frames": options.root or "made up"}
    for name in DETECTORS:
        for threads in [every] if options.quick else sorted({1, every}):
            words = ["--only", f"{name}:{threads}", *(["--quick"] if options.quick else [])]
            words += ["--root", options.root] if options.root else []
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            figures[f"{name}, {threads} threads"] = found
            print(f"{name}, {threads} threads: {found}", file=sys.stderr)
    harness.emit("nuscenes", {}, figures)


if __name__ == "__main__":
    main()

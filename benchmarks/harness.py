"""What every benchmark shares: the same options, fair timing, one JSON line at the end.

options = harness.options(__doc__)                  # --quick, and what the benchmark adds
medians = harness.compare({"ours": f, "peer": g}, repeats=7)
harness.emit("read", ratios={"ours_vs_peer": medians["peer"] / medians["ours"]}, figures={...})
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

# `python benchmarks/NAME.py` puts only this folder on the path; without an install the packages are one level up.
if (_root := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(1, _root)


def options(doc: str | None, *extra: tuple[str, dict[str, Any]], argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        doc: the benchmark's docstring, shown by --help.
        extra: further options as (flag, keyword arguments of `add_argument`).
        argv: arguments in place of `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under 60 seconds; figures are rougher")
    for flag, keywords in extra:
        parser.add_argument(flag, **keywords)
    return parser.parse_args(argv)


def compare(
    functions: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1, progress: bool = True
) -> dict[str, float]:
    """Median seconds of each function, all in the same run.

    Rounds are interleaved (every function once per round) and each round starts with another
    function, so that drift of the machine and the state one leaves behind hit all of them alike.

    Args:
        functions: name -> callable without arguments. One that returns a float has timed itself
            (its set-up does not count); of any other the whole call is timed.
        repeats: timed rounds.
        warmup: rounds before them that do not count (page cache, lazy imports).
        progress: print a line per function to stderr at the end: median, lowest and highest.
    """
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warmup, repeats):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            start = time.perf_counter()
            own = functions[name]()
            took = own if isinstance(own, float) else time.perf_counter() - start
            if round_ >= 0:
                seconds[name].append(took)
    if progress:
        for name, taken in seconds.items():
            line = " .. ".join(map(_seconds, (min(taken), statistics.median(taken), max(taken))))
            print(f"  {name:<24} {line}   (low .. median .. high of {repeats})", file=sys.stderr)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def shares(
    run: Callable[[], Any], repeats: int, operations: Iterable[tuple[Any, str, str]], outer: Collection[str] = ()
) -> dict[str, float]:
    """Share of processor time per operation, and the `rest`; for one thread.

    Args:
        run: what is measured.
        operations: owner, attribute and name: calls of that attribute count under that name. What an operation calls
            counts for it alone.
        outer: names of those that count without the operations which they call.
    """
    seconds: dict[str, float] = defaultdict(float)
    running: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if running and running[-1] not in outer:
                return function(*args, **kwargs)
            running.append(name)
            start = time.process_time()
            result = function(*args, **kwargs)
            took = time.process_time() - start
            running.pop()
            seconds[name] += took
            if running:
                seconds[running[-1]] -= took
            return result

        return call

    with ExitStack() as stack:
        for owner, attribute, name in operations:
            stack.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        start = time.process_time()
        for _ in range(repeats):
            run()
        total = time.process_time() - start
    named = {name: spent / total for name, spent in seconds.items()}
    return named | {"rest": 1 - sum(named.values())}


def versions(*packages: str) -> dict[str, str]:
    """Installed version of each distribution, `missing` where there is none."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def machine() -> dict[str, Any]:
    """Facts without which the figures mean little."""
    cpu, memory = platform.processor() or platform.machine(), 0
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions("numpy", "pyarrow", "torch"),
    }


def emit(name: str, ratios: Mapping[str, float], figures: Mapping[str, Any]) -> None:
    """Print the result as one line of JSON, which must be the last line of stdout.

    Args:
        name: the benchmark, as its file is called.
        ratios: what has a goal; larger is better unless its name says a unit.
        figures: everything else worth keeping (times, sizes, versions of peers, what was missing).
    """
    sys.stderr.flush()
    result = {"name": name, "ratios": _rounded(ratios), "figures": _rounded(figures), "machine": machine()}
    print(json.dumps(result, allow_nan=False), flush=True)


def _seconds(value: float) -> str:
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if value * s >= 1 or u == "us")
    return f"{value * scale:.3g} {unit}"


def _rounded(value: Any) -> Any:
    """Four significant digits, plain JSON types."""
    if isinstance(value, Mapping):
        return {str(k): _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    return float(f"{value:.4g}") if isinstance(value, float) else value

"""`scenecache doctor`: what works on this machine, tried out, and how to mend what does not.

Everything that can hang or crash (drivers, Blender, decoders, Ray) is tried in a process of its own with a deadline.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

_STYLES = {"ok": "green", "note": "cyan", "missing": "yellow", "broken": "red"}
_EXTRAS = {  # extra -> distributions that show whether it is installed
    "core": ("numpy", "pyarrow", "h5py", "deltalake", "fsspec"),
    "cli": ("typer", "rich", "pydantic", "pyyaml", "jinja2"),
    "extract": ("torch", "torchvision", "timm", "decord", "av", "opencv-python-headless", "plyfile", "pillow"),
    "render": ("bpy",),
    "ray": ("ray",),
    "beam": ("apache-beam",),
}
_CLIP = """
import av, numpy as np, sys
with av.open(sys.argv[1], 'w') as file:
    stream = file.add_stream("libx264", rate=10); stream.width = stream.height = 64; stream.pix_fmt = 'yuv420p'
    for i in range(20):
        frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 12 * i, np.uint8), format='rgb24')
        file.mux(stream.encode(frame))
    file.mux(stream.encode(None))
"""
_DECODE = """
import sys
from pathlib import Path
import numpy as np
from extractors.decode import open_video
frames = open_video(Path(sys.argv[1]), sys.argv[2]).frames(np.array([0, 19]))
means = [float(frame.mean()) for frame in frames]
assert abs(means[0]) < 8 and abs(means[1] - 228) < 8, f'wrong frames: {means}'
"""
_BLENDER = "import bpy; print(bpy.app.version_string)"
_GL = "from extractors.bev_render import gl_works; print(gl_works())"
_CUDA = """
import torch
if torch.cuda.is_available():
    x = torch.ones(256, 256, device='cuda'); assert float((x @ x)[0, 0]) == 256
    p = torch.cuda.get_device_properties(0)
    print(f'{torch.cuda.device_count()} x {p.name}, {p.total_memory / 2**30:.0f} GiB')
"""
_RAY = """
import os
from pipelines.runners.ray_session import start_ray
start_ray(1, None)
import ray
assert ray.get(ray.remote(lambda: 6 * 7).remote()) == 42
ray.shutdown()
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried.

    Attributes:
        state: ok; note (works, but read this); missing (optional and absent); broken (there and does not work).
        hint: what to do about it, "" where there is nothing to do.
    """

    name: str
    state: Literal["ok", "note", "missing", "broken"]
    text: str
    hint: str = ""


def main(checkpoint: Path | None, store: str | None, as_json: bool) -> int:
    """Examine this machine, or a checkpoint; returns the exit code (1 where something is broken)."""
    if checkpoint:
        return _checkpoint(checkpoint, as_json)
    findings = []
    for finding in examine(store or "store"):
        findings.append(finding)
        if not as_json:
            _print(finding)
    broken = any(finding.state == "broken" for finding in findings)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings], "works": not broken}))
    return 1 if broken else 0


def examine(store: str) -> Iterator[Finding]:
    """Try everything, one after the other."""
    yield _python()
    for extra, names in _EXTRAS.items():
        yield _packages(extra, names)
    yield _machine()
    yield from _disk(store)
    yield _tried("GPU", _CUDA, 120, lambda out: Finding("GPU", "ok", out) if out else _no_gpu(), needs="torch")
    yield _tried("Blender", _BLENDER, 120, lambda out: Finding("Blender", "ok", f"bpy {out}"), needs="bpy")
    yield _tried("Blender GL", _GL, 120, _gl, needs="bpy")
    yield from _decoders()
    yield _tried("Ray", _RAY, 120, lambda out: Finding("Ray", "ok", "starts here and runs a task"), needs="ray")


def _python() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info[:2] != (3, 11):
        return Finding("Python", "note", version, "bpy comes for 3.11 alone: python3.11 -m venv .venv")
    return Finding("Python", "ok", version)


def _packages(extra: str, names: tuple[str, ...]) -> Finding:
    versions = {name: _version(name) for name in names}
    absent = [name for name, version in versions.items() if not version]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not absent:
        return Finding(extra, "ok", text)
    state: Literal["broken", "missing"] = "broken" if extra == "core" else "missing"
    wanted = "scenecache" if extra == "core" else f"scenecache[{extra}]"
    return Finding(
        extra, state, f"no {', '.join(absent)}", f"pip install '{wanted}', or in a clone pip install -e '.[{extra}]'"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Finding("machine", "ok", f"{cores} cores, {memory:.0f} GiB memory")


def _disk(store: str) -> Iterator[Finding]:
    places = {"disk of the store": store, "temporary files": tempfile.gettempdir(), "shared memory": "/dev/shm"}
    for name, place in places.items():
        if "://" in place:
            yield Finding(name, "note", f"{place} is remote; it is not looked at")
            continue
        path = Path(place).absolute()
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free / 2**30
        text = f"{free:.1f} GiB free in {path}"
        if not os.access(path, os.W_OK):
            yield Finding(name, "broken", f"{path} is not writable", "give another folder, or mend its permissions")
        elif free < 1:
            hint = "scenecache gc removes old records" if name == "disk of the store" else "free some space there"
            yield Finding(name, "note", text, hint)
        else:
            yield Finding(name, "ok", text)


def _no_gpu() -> Finding:
    return Finding(
        "GPU", "note", "none that torch can use: networks run on the CPU", "install a driver, or mind the time"
    )


def _gl(out: str) -> Finding:
    if out == "True":
        return Finding("Blender GL", "ok", "Workbench draws (the quick flat look)")
    hint = "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri libgbm1"
    return Finding("Blender GL", "note", "no GL: the flat look is rendered by Cycles at one sample, slower", hint)


def _decoders() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="scenecache-doctor-") as folder:
        clip = str(Path(folder) / "clip.mp4")
        made = _tried("clip", _CLIP, 60, lambda out: Finding("clip", "ok", ""), clip, needs="av")
        if made.state != "ok":
            yield Finding("decoder pyav", made.state, made.text, made.hint)
            return
        for name, package in (("pyav", "av"), ("decord", "decord"), ("torchcodec", "torchcodec")):
            title = f"decoder {name}"
            text = f"{_version(package)}, decodes the right frames"
            judge = functools.partial(_fine, title, text)
            found = _tried(title, _DECODE, 60, judge, clip, name, needs=package)
            if name == "torchcodec" and found.state == "broken":  # refuses what it is not sure of, and is optional
                found = Finding(
                    title, "note", found.text, "optional; needs the FFmpeg libraries (apt-get install ffmpeg)"
                )
            yield found


def _fine(name: str, text: str, output: str) -> Finding:
    return Finding(name, "ok", text)


def _tried(
    name: str, code: str, deadline_s: float, judge: Callable[[str], Finding], *argv: str, needs: str = ""
) -> Finding:
    """Run code in a child process and judge its last line of output."""
    if needs and not _version(needs):
        return Finding(name, "missing", f"{needs} is not installed", _extra_of(needs))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", code, *argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"no answer within {deadline_s:.0f} s")
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        cause = lines[-1] if lines else "no output"
        ended = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return Finding(
            name, "broken", f"{cause} ({ended})", f"try it alone: {sys.executable} -c {code.strip()!r}"[:200]
        )
    lines = done.stdout.strip().splitlines()
    return judge(lines[-1] if lines else "")


def _extra_of(package: str) -> str:
    for extra, names in _EXTRAS.items():
        if package in names:
            return f"pip install 'scenecache[{extra}]'"
    return f"pip install {package}"


def _print(finding: Finding) -> None:
    from rich.console import Console
    from rich.markup import escape

    line = f"[{_STYLES[finding.state]}]{finding.state:<8}[/] {finding.name:<18} {escape(finding.text)}"
    console = Console(soft_wrap=True, highlight=False)
    console.print(line)
    if finding.hint and finding.state != "ok":
        console.print(f"{'':<28}-> {escape(finding.hint)}", style="dim")


def _checkpoint(path: Path, as_json: bool) -> int:
    """Print what a checkpoint holds."""
    from extractors.checkpoint import describe

    report: dict[str, Any] = describe(path)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return 0 if report["loads"] else 1
    from pipelines.cli_store import print_table
    from pipelines.plan_view import size

    print(f"{path}: {size(report['bytes'])}, sha256 {report['sha256']}")
    for name in ("wrapper", "prefix", "network", "naming"):
        print(f"{name}: {report[name] or 'none'}")
    parts = [(part["part"], f"{part['keys']:,}", f"{part['parameters']:,}") for part in report["parts"]]
    total = ("all", f"{len(report['keys']):,}", f"{sum(part['parameters'] for part in report['parts']):,}")
    print_table("parts", ("part", "keys", "parameters"), [*parts, total])
    rows = [(k["key"], str(tuple(k["shape"])), k["dtype"], k["use"]) for k in report["keys"]]
    print_table(f"{len(rows)} keys", ("key", "shape", "dtype", "use"), rows)
    for key in report["missing"]:
        print(f"missing: {key}")
    for fault in report["mismatched"]:
        print(f"wrong shape: {fault['key']} is {tuple(fault['shape'])}, expected {tuple(fault['expected'])}")
    for note in report["notes"]:
        print(f"note: {note}")
    print("It loads." if report["loads"] else "It does not load.")
    return 0 if report["loads"] else 1

"""How long opening nuScenes takes: our index of its tables against nuscenes-devkit, on tables of trainval's size.

Writes synthetic tables (850 scenes, 34,149 samples, 2,631,083 sample_data and ego_pose, 1,166,187 annotations: 3 GB of
JSON) into a temporary folder, then opens them, each time in a process of its own: with an empty cache (builds the
index), with the index there, and with the devkit, which has no cache. `--quick` takes a tenth of the scenes. The devkit
runs at the same size where memory allows (it takes four times the tables' text), else it is left out.

Goals: build under 30 s, warm under 1 s. Ratio: `devkit_vs_build`, devkit's seconds by ours with an empty cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import harness
import numpy as np

SCENES, SAMPLES, DATA, ANNOTATIONS, INSTANCES = 850, 34_149, 2_631_083, 1_166_187, 64_386
CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
RADARS = ("RADAR_FRONT", "RADAR_FRONT_LEFT", "RADAR_FRONT_RIGHT", "RADAR_BACK_LEFT", "RADAR_BACK_RIGHT")
CHANNELS = ("LIDAR_TOP", *CAMERAS, *RADARS)
LIDAR_SCANS, CAMERA_IMAGES = 390, 240  # of a scene of 19.5 s; the rest are the radars'

_PEAK = """
import json, sys, time
def peak():  # not ru_maxrss, which begins at what the parent process had
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) / 2**20
"""
_OPEN = """
start = time.perf_counter()
from pathlib import Path
from pipelines.sources.nuscenes import NuScenes
loaded = time.perf_counter()
source = NuScenes(Path(sys.argv[1]))
keys = source.keys()
facts = [source.facts(keys[len(keys) // 2], kind) for kind in source.kinds]
opened = time.perf_counter()
for key in keys[:1000]:
    for kind in ("lidar", "cameras", "annotations"):
        source.files(key, kind), source.facts(key, kind)
listed = time.perf_counter()
used = time.process_time()
listed_us = (listed - opened) / min(len(keys), 1000) * 1e6
print(json.dumps({"seconds": opened - loaded, "keys": len(keys), "listed_us": listed_us, "imports": loaded - start,
                  "cpu": used, "gib": peak()}))
"""
_DEVKIT = """
from nuscenes.nuscenes import NuScenes
start = time.perf_counter()
nusc = NuScenes("v1.0-trainval", sys.argv[1], verbose=False)
print(json.dumps({"seconds": time.perf_counter() - start, "keys": len(nusc.sample), "gib": peak()}))
"""


def main() -> None:
    options = harness.options(__doc__, ("--no-devkit", {"action": "store_true", "help": "leave the devkit out"}))
    share = 10 if options.quick else 1
    with tempfile.TemporaryDirectory(prefix="nuscenes-index-") as folder:
        root = Path(folder)
        start = time.perf_counter()
        counts = write_tables(root, share)
        text = sum(path.stat().st_size for path in root.glob("*/*.json")) / 2**30
        print(f"  wrote {text:.2f} GiB of tables in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        time.sleep(2.5)  # tables that changed a moment ago count by content too, so the index would be built twice
        environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache"), "PYTHONPATH": str(Path.cwd())}
        build = run(_OPEN, root, environment)
        warm = [run(_OPEN, root, environment) for _ in range(5)]
        index = sum(path.stat().st_size for path in (root / "cache").rglob("*.arrow")) / 2**30
        devkit = None
        if (
            not options.no_devkit
            and available_gib() > 6 * text
            and "missing" not in harness.versions("nuscenes-devkit").values()
        ):
            devkit = run(_DEVKIT, root, environment)
    figures: dict[str, Any] = {
        **counts,
        "tables_gib": text,
        "build_s": build["seconds"],
        "build_cpu_s": build["cpu"],
        "build_peak_gib": build["gib"],
        "warm_s": float(np.median([one["seconds"] for one in warm])),
        "warm_peak_gib": max(one["gib"] for one in warm),
        "imports_s": float(np.median([one["imports"] for one in warm])),
        "files_and_facts_us_per_sample": float(np.median([one["listed_us"] for one in warm])),
        "index_gib": index,
        "devkit_s": devkit and devkit["seconds"],
        "devkit_peak_gib": devkit and devkit["gib"],
    }
    ratios = {}
    if devkit:
        assert devkit["keys"] == build["keys"]
        ratios = {
            "devkit_vs_build": devkit["seconds"] / build["seconds"],
            "devkit_vs_warm": devkit["seconds"] / figures["warm_s"],
            "devkit_vs_build_memory": devkit["gib"] / build["gib"],
        }
    harness.emit("nuscenes_index", ratios, figures)


def run(code: str, root: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run code in a process of its own; what it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK + code, str(root)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def available_gib() -> float:
    """Memory that is free for use."""
    if not Path("/proc/meminfo").exists():
        return 0.0
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


def write_tables(root: Path, share: int) -> dict[str, int]:
    """Tables laid out as the official ones, `1 / share` of trainval."""
    folder = root / "v1.0-trainval"
    folder.mkdir(parents=True)
    scenes, samples, data = SCENES // share, SAMPLES // share, DATA // share
    annotations, instances = ANNOTATIONS // share, INSTANCES // share
    small: dict[str, list[dict[str, Any]]] = {
        "sensor": [
            {"token": token("sensor", i), "channel": name, "modality": name.partition("_")[0].lower()}
            for i, name in enumerate(CHANNELS)
        ],
        "category": [{"token": token("category", 0), "name": "vehicle.car", "description": ""}],
        "attribute": [{"token": token("attribute", 0), "name": "vehicle.moving", "description": ""}],
        "visibility": [{"token": "4", "level": "v80-100", "description": ""}],
        "log": [{"token": token("log", 0), "logfile": "", "vehicle": "", "date_captured": "", "location": "x"}],
        "map": [{"token": token("map", 0), "log_tokens": [token("log", 0)], "category": "x", "filename": "map.png"}],
        "calibrated_sensor": [
            {"token": token("calibration", s * 12 + i), "sensor_token": token("sensor", i),
             "translation": [1.7220063, 0.0047563, 1.4949124],
             "rotation": [0.5077241, -0.4973392, 0.4983752, -0.4964832],
             "camera_intrinsic": [[1266.4, 0.0, 816.2], [0.0, 1266.4, 491.5], [0.0, 0.0, 1.0]] if 0 < i < 7 else []}
            for s in range(scenes) for i in range(12)
        ],
        "instance": [
            {"token": token("instance", i), "category_token": token("category", 0), "nbr_annotations": 18,
             "first_annotation_token": token("box", i), "last_annotation_token": token("box", i + instances)}
            for i in range(instances)
        ],
        "scene": [
            {"token": token("scene", s), "log_token": token("log", 0), "nbr_samples": 40, "name": f"scene-{s + 1:04d}",
             "description": "Parked cars", "first_sample_token": "", "last_sample_token": ""} for s in range(scenes)
        ],
        "sample": [
            {"token": token("sample", i), "timestamp": 1_532_402_927_647_951 + 500_000 * i, "prev": "", "next": "",
             "scene_token": token("scene", min(i // (SAMPLES // SCENES), scenes - 1))} for i in range(samples)
        ],
    }  # fmt: skip
    for name, records in small.items():
        (folder / f"{name}.json").write_text(json.dumps(records, indent=0))
    write_list(folder / "sample_data.json", sample_data(scenes, samples, data))
    write_list(folder / "ego_pose.json", ego_poses(data))
    write_list(folder / "sample_annotation.json", boxes(samples, instances, annotations))
    write_png(root / "map.png")
    return {"scenes": scenes, "samples": samples, "sample_data": data, "annotations": annotations}


def sample_data(scenes: int, samples: int, count: int) -> Iterator[str]:
    """Records scene by scene; the radars of the last scene fill up the number."""
    number, first_sample = 0, 0
    for scene in range(scenes):
        last_scene = scene == scenes - 1
        key_frames = samples - first_sample if last_scene else SAMPLES // SCENES
        per_radar = (count // scenes - LIDAR_SCANS - 6 * CAMERA_IMAGES) // len(RADARS)
        for i, channel in enumerate(CHANNELS):
            scans = LIDAR_SCANS if i == 0 else CAMERA_IMAGES if i < 7 else per_radar
            if last_scene:
                scans = max(scans, key_frames)
                if i == len(CHANNELS) - 1:
                    scans = count - number
            step = scans / key_frames
            keys = {int(k * step): k for k in range(key_frames)}
            suffix = "pcd.bin" if i == 0 else "jpg" if i < 7 else "pcd"
            for k in range(scans):
                time_us = 1_532_402_927_647_951 + int((first_sample + k / step) * 500_000)
                is_key = k in keys
                sample = token("sample", first_sample + min(int(k / step), key_frames - 1))
                name = (
                    f"{'samples' if is_key else 'sweeps'}/{channel}/n015-2018-07-24-11-22-45+0800__{channel}__{time_us}"
                )
                yield (
                    f'"token": "{token("data", number)}",\n"sample_token": "{sample}",\n'
                    f'"ego_pose_token": "{token("data", number)}",\n'
                    f'"calibrated_sensor_token": "{token("calibration", scene * 12 + i)}",\n"timestamp": {time_us},\n'
                    f'"fileformat": "{suffix[:3]}",\n"is_key_frame": {"true" if is_key else "false"},\n'
                    f'"height": {900 if 0 < i < 7 else 0},\n"width": {1600 if 0 < i < 7 else 0},\n'
                    f'"filename": "{name}__{channel}__{time_us}.{suffix}",\n'
                    f'"prev": "{token("data", number - 1) if k else ""}",\n'
                    f'"next": "{token("data", number + 1) if k + 1 < scans else ""}"'
                )
                number += 1
        first_sample += key_frames
    assert number == count, (number, count)


def ego_poses(count: int) -> Iterator[str]:
    for number in range(count):
        yield (
            f'"token": "{token("data", number)}",\n"timestamp": {1_532_402_927_647_951 + number},\n'
            '"rotation": [\n0.5720320396729045,\n-0.0016977771610471074,\n0.011798001930183783,\n'
            "-0.8201446642457809\n],\n"
            f'"translation": [\n{411.3039349319818 + 1e-4 * number:.13f},\n1180.8903791765097,\n0.0\n]'
        )


def boxes(samples: int, instances: int, count: int) -> Iterator[str]:
    for number in range(count):
        yield (
            f'"token": "{token("box", number)}",\n"sample_token": "{token("sample", number * samples // count)}",\n'
            f'"instance_token": "{token("instance", number % instances)}",\n"visibility_token": "4",\n'
            f'"attribute_tokens": [\n"{token("attribute", 0)}"\n],\n'
            f'"translation": [\n{373.214 + 1e-3 * (number % 90000):.3f},\n1130.48,\n0.8\n],\n'
            '"size": [\n0.621,\n0.669,\n1.642\n],\n"rotation": [\n0.9831098797903927,\n0.0,\n0.0,\n'
            "-0.18301629506281616\n],\n"
            f'"prev": "{token("box", number - instances) if number >= instances else ""}",\n'
            f'"next": "{token("box", number + instances) if number + instances < count else ""}",\n'
            f'"num_lidar_pts": {number % 50},\n"num_radar_pts": 0'
        )


def token(table: str, number: int) -> str:
    """32 hexadecimal digits that look random enough."""
    return f"{number * 2654435761 % 2**32:08x}{len(table):02x}{ord(table[0]):02x}{number:020x}"


def write_list(path: Path, records: Iterator[str]) -> None:
    with path.open("w", buffering=1 << 20) as file:
        _write_list(file, records)


def _write_list(file: TextIO, records: Iterator[str]) -> None:
    separator = "[\n{\n"
    for record in records:
        file.write(separator)
        file.write(record)
        separator = "\n},\n{\n"
    file.write("\n}\n]")


def write_png(path: Path) -> None:
    """The devkit insists on a map's file."""
    from PIL import Image

    Image.new("L", (8, 8)).save(path)


if __name__ == "__main__":
    main()

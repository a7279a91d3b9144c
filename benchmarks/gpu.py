"""The three detectors on a GPU: key frames per second by batch size, in float32 and bfloat16, and each part's time.

bfloat16 is autocast around what makes the map, which no stage does; head and boxes are float32 in both. What it would
cost shows as drift, the relative error of object features (and of the map) against float32, cut from both maps under
the same boxes, those that float32 finds. Weights are `untrained:0`; with trained ones (`--weights bevdet=FILE`) the
drift is theirs.

Without `--root` key frames are made up: ten sweeps of a street's size (two with `--quick`), noise in six images,
painted points. Parts are timed in passes of their own, since waiting for the GPU between parts takes time too; with
`--quick` in the only pass. `--device cpu --quick` tries the script.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import numpy as np
import torch

from extractors import msmdfusion_inputs
from extractors.base import Weights
from extractors.bev_detector import BevDetector
from extractors.bevdet import BEVDet
from extractors.boxes3d import CLASSES
from extractors.centerpoint import CenterPoint
from extractors.crop import crop
from extractors.inference import inference
from extractors.inputs import Camera, Cameras, LidarScan, LidarSweeps
from extractors.msmdfusion import MSMDFusion

DETECTORS: dict[str, type[Any]] = {"centerpoint": CenterPoint, "bevdet": BEVDet, "msmdfusion": MSMDFusion}
PARTS = {  # what is timed by itself: name -> submodule
    "centerpoint": {"sparse encoder": "pts_middle_encoder", "SECOND": "pts_backbone", "pyramid": "pts_neck"},
    "bevdet": {
        "ResNet-50": "img_backbone",
        "image pyramid": "img_neck",
        "depth": "img_view_transformer",
        "ground backbone": "img_bev_encoder_backbone",
        "ground neck": "img_bev_encoder_neck",
        "up2": "img_bev_encoder_neck.up2",
    },
    "msmdfusion": {
        "ResNet-50": "img_backbone",
        "image pyramid": "img_neck",
        "sparse encoder": "pts_middle_encoder",
        "fusion": "multimodal_middle_encoder",
        "map fusion": "bev_fusion",
        "SECOND": "pts_backbone",
        "pyramid": "pts_neck",
    },
}
DTYPES = ("float32", "bfloat16")


# -------------------------------------------------------------------------------------------------------- key frames


def sweep(rng: np.random.RandomState, lag: float) -> LidarScan:
    """32 rings on level ground between walls 12 to 45 m away."""
    elevation, azimuth = np.meshgrid(np.radians(np.linspace(-30, 10, 32)), np.linspace(-np.pi, np.pi, 1084))
    walls = 28 + 16 * np.sin(3 * azimuth + rng.uniform(0, 6))
    ground = np.where(elevation < -0.01, 1.84 / np.sin(np.maximum(-elevation, 0.01)), np.inf)
    distance = np.minimum(walls / np.cos(elevation), ground) + rng.normal(0, 0.02, azimuth.shape)
    across = distance * np.cos(elevation)
    xyz = [across * np.cos(azimuth), across * np.sin(azimuth), distance * np.sin(elevation)]
    ring = np.broadcast_to(np.arange(32.0), azimuth.shape)
    points = np.stack([*xyz, rng.uniform(0, 255, azimuth.shape), ring], -1).reshape(-1, 5)
    moved = np.eye(4)
    moved[1, 3] = -8 * lag  # the car drives ahead at 8 m/s
    return LidarScan(points.astype(np.float32), moved, lag)


def cameras(folder: Path, rng: np.random.RandomState) -> Cameras:
    """Six level cameras around the car, with blurred noise for images."""
    from PIL import Image

    views = []
    yaws = {"FRONT": 90, "FRONT_LEFT": 145, "BACK_LEFT": 200, "BACK": 270, "BACK_RIGHT": 340, "FRONT_RIGHT": 35}
    for name, degrees in yaws.items():
        path = folder / f"{rng.randint(1 << 30)}_{name}.jpg"
        Image.fromarray(rng.randint(0, 256, (45, 80, 3), np.uint8)).resize((1600, 900)).save(path, quality=90)
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        pose = np.array([[s, 0, c, c], [-c, 0, s, s], [0, -1, 0, -0.3], [0, 0, 0, 1]])
        views.append(Camera(f"CAM_{name}", path, np.array([[1260.0, 0, 800], [0, 1260, 450], [0, 0, 1]]), pose, pose))
    return Cameras(tuple(views))


def painted(views: Cameras, sweeps: int, rng: np.random.RandomState, each: int = 150) -> dict[str, np.ndarray]:
    """A record of virtual points: so many pixels in each camera and sweep, at 4 to 50 m."""
    names = msmdfusion_inputs.CAMERAS
    camera, number = (grid.repeat(each) for grid in np.indices((len(names), sweeps)).reshape(2, -1))
    pixel = rng.uniform([0, 300], [1599, 800], (len(camera), 2))
    depth = rng.uniform(4, 50, len(camera))
    rays = np.stack([(pixel[:, 0] - 800) / 1260, (pixel[:, 1] - 450) / 1260, np.ones(len(camera))], 1) * depth[:, None]
    poses = np.stack([view.to_lidar for view in views.named(names)])[camera]
    xyz = np.einsum("pij,pj->pi", poses[:, :3, :3], rays) + poses[:, :3, 3]
    paint = np.concatenate([np.eye(len(CLASSES))[rng.randint(0, 10, len(camera))], rng.rand(len(camera), 1)], 1)
    return {
        "pixel": pixel.astype(np.float32),
        "depth": depth.astype(np.float32),
        "xyz": xyz.astype(np.float32),
        "paint": paint.astype(np.float32),
        "camera": camera.astype(np.uint8),
        "sweep": number.astype(np.uint8),
        "real": rng.rand(len(camera)) < 0.3,
    }


def key_frames(count: int, root: str | None, sweeps: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Inputs of so many key frames by kind, of nuScenes' (over again where there are fewer) or made up."""
    source: Any = None
    if root:
        from pipelines.sources.nuscenes import NuScenes

        source = NuScenes(Path(root))
    keys = source.keys()[:count] if source else range(count)
    for i in range(count):
        rng = np.random.RandomState(i)
        if source:
            lidar, views = (source.open(keys[i % len(keys)], kind) for kind in ("lidar", "cameras"))
        else:
            lidar = LidarSweeps(sweep(rng, 0), tuple(sweep(rng, 0.05 * n) for n in range(1, 1 + sweeps)), 0, np.eye(4))
            views = cameras(folder, rng)
        yield {"lidar": lidar, "cameras": views, "virtual_points": painted(views, 1 + len(lidar.before), rng)}


# ------------------------------------------------------------------------------------------------------------ timing


class Clock:
    """Seconds by part; waits for the GPU at both ends of each."""

    def __init__(self, device: str) -> None:
        cuda = device.startswith("cuda")
        self.wait: Callable[[], Any] = functools.partial(torch.cuda.synchronize, device) if cuda else lambda: None
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.wait()
        start = time.perf_counter()
        yield
        self.wait()
        self.seconds[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def inside(self, network: torch.nn.Module, parts: dict[str, str]) -> Iterator[None]:
        """Time submodules too."""
        hooks, running = [], []
        for name, path in parts.items():

            def before(*_: Any, name: str = name) -> None:
                running.append(self.part(name))
                running[-1].__enter__()

            def after(*_: Any) -> None:
                running.pop().__exit__(None, None, None)

            module = network.get_submodule(path)
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Detector:
    """One detector with its prepared key frames."""

    def __init__(self, name: str, weights: str, device: str, frames: Sequence[dict[str, Any]]) -> None:
        self.name, self.device = name, device
        self.extractor: BevDetector = DETECTORS[name](weights=Weights(weights))
        start = time.perf_counter()
        self.prepared = [
            self.extractor.prepare(f"key frame {i}", *(frame[kind] for kind in self.extractor.takes))
            for i, frame in enumerate(frames)
        ]
        self.prepare_s = (time.perf_counter() - start) / len(frames)
        self.module = self.extractor.build()  # type: ignore[attr-defined]
        with mock.patch.object(type(self.extractor), "build", return_value=self.module):
            self.body, self.head = self.extractor.network(device)

    @inference
    def once(self, count: int, dtype: str, clock: Clock) -> tuple[torch.Tensor, list[Any]]:
        """One batch from prepared inputs to object features; the maps and what was found."""
        with clock.part("all"):
            with clock.part("map"), self.cast(dtype):
                maps = self.body(self.prepared[:count]).float()
            with clock.part("head"):
                found = [one.pick("score", self.extractor.objects) for one in self.head.find(maps)]
            with clock.part("crop"):
                self.features(maps, found)
        return maps, found

    def cast(self, dtype: str) -> contextlib.AbstractContextManager[Any]:
        if dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, getattr(torch, dtype))

    def features(self, maps: torch.Tensor, found: Sequence[Any]) -> torch.Tensor:
        """(object, C) of all key frames."""
        grid, convention = self.extractor.grid, self.extractor.box_convention
        return torch.cat([
            crop(one, grid.to_cells(boxes.boxes, convention))[0] for one, boxes in zip(maps, found, strict=True)
        ])  # fmt: skip

    def drift(self, exact: torch.Tensor, found: Sequence[Any], maps: torch.Tensor) -> dict[str, float]:
        """Relative errors of maps, and of features under the boxes found in exact ones."""
        objects, others = self.features(exact, found), self.features(maps, found)
        errors = (others - objects).norm(dim=1) / objects.norm(dim=1).clamp_min(1e-12)
        return {
            "map": float((maps - exact).norm() / exact.norm()),
            "feature_median": float(errors.median()),
            "feature_largest": float(errors.max()),
            "objects": len(errors),
        }


def spent(clock: Clock, name: str) -> dict[str, float]:
    """Seconds of each part of a detector after `once`, its submodules timed too; they add up to the whole."""
    inner = {part: clock.seconds[part] for part in PARTS[name]}
    rest = clock.seconds["map"] - sum(inner.values())
    return {**inner, "rest of the map": rest, "head": clock.seconds["head"], "crop": clock.seconds["crop"]}


def measure(detector: Detector, dtype: str, batches: Sequence[int], repeats: int) -> dict[str, Any]:
    """Speed by batch size, `failed` where the dtype or the memory does not do; parts and outputs at the last one."""
    by_batch: dict[str, Any] = {}
    figures: dict[str, Any] = {"batch": by_batch}
    cuda = detector.device.startswith("cuda")
    for count in batches:
        try:
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(detector.device)
            times = []
            for number in range(-1, repeats):  # the first warms up
                clock = Clock(detector.device)
                with clock.inside(detector.module, PARTS[detector.name]) if repeats == 0 else contextlib.nullcontext():
                    figures["outputs"] = detector.once(count, dtype, clock)
                times += [clock.seconds["all"]] * (number >= 0 or repeats == 0)
            if repeats:
                clock = Clock(detector.device)
                with clock.inside(detector.module, PARTS[detector.name]):
                    detector.once(count, dtype, clock)
        except (RuntimeError, TypeError, ValueError) as error:  # out of memory is a RuntimeError
            figures["failed"] = f"batch {count}: {str(error).splitlines()[0][:200]}"
            break
        by_batch[str(count)] = {"key_frames_per_s": count / float(np.median(times))}
        if cuda:
            by_batch[str(count)]["peak_gib"] = torch.cuda.max_memory_allocated(detector.device) / 2**30
        parts = spent(clock, detector.name)
        by_batch[str(count)]["parts_ms_per_key_frame"] = {part: 1e3 * taken / count for part, taken in parts.items()}
    return figures


def main() -> None:
    options = harness.options(
        __doc__,
        ("--device", {"default": "cuda", "help": "cuda, cuda:1 ..., or cpu"}),
        ("--detectors", {"default": ",".join(DETECTORS), "help": "some of them, with commas"}),
        ("--batches", {"default": "", "help": "batch sizes, with commas; 1,2,4,8 by default, 1 with --quick"}),
        ("--weights", {"action": "append", "default": [], "help": "DETECTOR=FILE in place of untrained:0"}),
        ("--root", {"help": "a folder of nuScenes, for its key frames in place of made-up ones"}),
    )
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        harness.emit("gpu", ratios={}, figures={"skipped": "no CUDA device here; --device cpu tries the script"})
        return
    names = options.detectors.split(",")
    weights = dict(one.partition("=")[::2] for one in options.weights)
    if strange := (set(names) | set(weights)) - set(DETECTORS):
        sys.exit(f"no detector {', '.join(sorted(strange))}; there are {', '.join(DETECTORS)}")
    batches = [int(size) for size in (options.batches or ("1" if options.quick else "1,2,4,8")).split(",")]
    figures: dict[str, Any] = {"device": options.device, "key_frames": options.root or "made up"}
    if options.device.startswith("cuda"):
        figures["gpu"] = torch.cuda.get_device_name(options.device)
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        frames = list(key_frames(max(batches), options.root, 2 if options.quick else 10, Path(folder)))
        for name in names:
            detector = Detector(name, weights.get(name, "untrained:0"), options.device, frames)
            found = {dtype: measure(detector, dtype, batches, 0 if options.quick else 7) for dtype in DTYPES}
            exact, rounded = (found[dtype].pop("outputs", None) for dtype in DTYPES)
            if exact and rounded:
                count = min(len(exact[1]), len(rounded[1]))
                found["bfloat16"]["drift"] = detector.drift(exact[0][:count], exact[1][:count], rounded[0][:count])
            figures[name] = {"prepare_s_per_key_frame": detector.prepare_s, **found}
            best = [max((b["key_frames_per_s"] for b in found[d]["batch"].values()), default=None) for d in DTYPES]
            if None not in best:
                ratios[f"{name}_bfloat16_vs_float32"] = best[1] / best[0]
            print(f"{name}: {figures[name]}", file=sys.stderr)
    harness.emit("gpu", ratios, figures)


if __name__ == "__main__":
    main()

"""How fast bird's-eye images are made, in one Blender that stays alive and in a new one per scan.

    python benchmarks/bev.py [--quick]
    python benchmarks/bev.py --samples 8,16,32 [--scans room,rough]   # likeness to 64 samples (docs/bev.md)

`ours_vs_script` compares scans per minute in look `flat` at 1920 x 1080 with a new Blender process per scan, as SQA3D's
script has it: same program, meshes, settings and outputs (PNG, 224 x 224 image, camera), so nothing but the reuse of
the process differs. Ours carries its share of the start, 1 in `BevRender.SCANS_PER_BLENDER`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import harness
import numpy as np

from extractors.bev_render import BevRender, input_image
from extractors.inputs import Scan


def room(seed: int, spacing_m: float, rough_m: float, rough_rgb: float) -> Scan:
    """A room with furniture, as a grid of vertices with noise like a scan's.

    Args:
        spacing_m: between vertices; ScanNet's meshes have 0.02 to 0.05.
        rough_m, rough_rgb: standard deviations of the vertices along the surface's normal, and of the colours (0..255).
    """
    rng = np.random.default_rng(seed)
    points: list[np.ndarray] = []
    colors: list[np.ndarray] = []
    faces: list[np.ndarray] = []

    def patch(corner: list[float], u: list[float], v: list[float], color: np.ndarray) -> None:
        o, a, b = np.array(corner), np.array(u), np.array(v)
        rows = max(int(np.linalg.norm(a) / spacing_m), 2)
        columns = max(int(np.linalg.norm(b) / spacing_m), 2)
        s, t = np.meshgrid(np.linspace(0, 1, rows + 1), np.linspace(0, 1, columns + 1), indexing="ij")
        bumps = rng.normal(0, rough_m, s.shape) * ((s > 0) & (s < 1) & (t > 0) & (t < 1))  # borders stay closed
        normal = np.cross(a, b) / np.linalg.norm(np.cross(a, b))
        xyz = (o + s[..., None] * a + t[..., None] * b + bumps[..., None] * normal).reshape(-1, 3)
        index = np.arange(xyz.shape[0]).reshape(s.shape) + sum(map(len, points))
        p, q, r, w = index[:-1, :-1].ravel(), index[1:, :-1].ravel(), index[1:, 1:].ravel(), index[:-1, 1:].ravel()
        faces.append(np.concatenate([np.stack([p, q, r], 1), np.stack([p, r, w], 1)]))
        points.append(xyz)
        waves = 25 * np.sin(3 * xyz[:, :1] + 2 * xyz[:, 1:2] + np.array([0, 2, 4]))
        colors.append(np.clip(color + waves + rng.normal(0, rough_rgb, (len(xyz), 1)), 0, 255))

    x, y, z = rng.uniform(5, 7), rng.uniform(4, 5), 2.6
    wall = np.array([190, 182, 160])
    patch([0, 0, 0], [x, 0, 0], [0, y, 0], np.array([140, 108, 76]))
    patch([0, 0, 0], [0, 0, z], [x, 0, 0], wall)
    patch([0, y, 0], [x, 0, 0], [0, 0, z], wall)
    patch([0, 0, 0], [0, y, 0], [0, 0, z], wall)
    patch([x, 0, 0], [0, 0, z], [0, y, 0], wall)
    for _ in range(9):
        w, d, h = rng.uniform(0.4, 1.4, 3)
        i, j = rng.uniform(0.1, x - w - 0.1), rng.uniform(0.1, y - d - 0.1)
        color = rng.uniform(40, 220, 3)
        patch([i, j, h], [w, 0, 0], [0, d, 0], color)
        patch([i, j, 0], [w, 0, 0], [0, 0, h], color)
        patch([i, j + d, 0], [0, 0, h], [w, 0, 0], color)
        patch([i, j, 0], [0, 0, h], [0, d, 0], color)
        patch([i + w, j, 0], [0, d, 0], [0, 0, h], color)
    return Scan(
        np.concatenate(points).astype(np.float32),
        np.concatenate(colors).astype(np.uint8),
        np.concatenate(faces).astype(np.int32),
    )


SCANS = {
    "room": lambda seed: room(seed, spacing_m=0.15, rough_m=0.0, rough_rgb=0.0),
    "rough": lambda seed: room(seed, spacing_m=0.04, rough_m=0.004, rough_rgb=6.0),
}


def likeness(names: list[str], counts: list[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean absolute difference of the 224 x 224 image to the one of 64 samples, same seed, and seconds of each."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        scan, reference = SCANS[name](0), None
        for samples in [64, *counts]:
            extractor = BevRender(samples=samples)
            prepared, render = extractor.prepare(name, scan), extractor.load()
            start = time.perf_counter()
            image = input_image(render([prepared])[0]["image"].item())
            took = time.perf_counter() - start
            reference = image if reference is None else reference
            difference = float(np.abs(image - reference).mean())
            table.setdefault(name, {})[str(samples)] = {"difference": difference, "seconds": took}
            print(f"  {name} {samples:3d} samples: {difference:.2e}, {took:.1f} s", file=sys.stderr, flush=True)
    return table


def speed(quick: bool) -> None:
    """Scans per minute, one Blender kept against one per scan."""
    scans = [SCANS["rough"](seed) for seed in range(2 if quick else 4)]
    figures: dict[str, object] = {"vertices": len(scans[0].xyz), "faces": len(scans[0].faces)}
    ratios = {}
    engine = BevRender(look="flat").engine
    for name in dict.fromkeys([engine, "cycles"]):
        if quick and name != engine:
            continue
        extractor = BevRender(look="flat", engine=name)
        prepared = [extractor.prepare(str(i), scan) for i, scan in enumerate(scans)]
        kept = extractor.load()

        def ours(kept: Callable = kept, prepared: list = prepared) -> float:
            start = time.perf_counter()
            kept(prepared)
            return (time.perf_counter() - start) / len(prepared)

        def script(extractor: BevRender = extractor, prepared: list = prepared) -> float:
            start = time.perf_counter()
            for one in prepared:
                extractor.load()([one])
            return (time.perf_counter() - start) / len(prepared)

        seconds = harness.compare({f"{name}, kept": ours, f"{name}, per scan": script}, repeats=3 if quick else 5)
        warm, fresh = seconds.values()
        mine = warm + max(fresh - warm, 0.0) / BevRender.SCANS_PER_BLENDER
        if name == engine:
            ratios["ours_vs_script"] = fresh / mine
        figures[f"flat_{name}"] = {"ours_per_minute": 60 / mine, "script_per_minute": 60 / fresh, "ratio": fresh / mine}
    size = {"width": 480, "height": 270} if quick else {}
    official = BevRender(**size)
    start = time.perf_counter()
    official.load()([official.prepare("official", scans[0])])
    figures["official"] = {
        "seconds": time.perf_counter() - start,
        "samples": official.samples,
        "size": f"{official.width}x{official.height}",
    }
    figures |= harness.versions("bpy")
    harness.emit("bev", ratios, figures)


def main() -> None:
    options = harness.options(
        __doc__,
        ("--samples", {"help": "compare these sample counts with 64, as 8,16,32 (minutes)"}),
        ("--scans", {"default": "room,rough", "help": "meshes for --samples"}),
    )
    if options.samples:
        counts = [int(count) for count in options.samples.split(",")]
        harness.emit("bev", {}, {"likeness_to_64_samples": likeness(options.scans.split(","), counts)})
        return
    speed(options.quick)


if __name__ == "__main__":
    main()

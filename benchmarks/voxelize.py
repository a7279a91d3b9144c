"""Hard voxelisation of ten LiDAR sweeps against the fastest others that follow the exact rule, on one thread.

The peers: the loop over points that defines the rule, compiled by numba, with a dense grid of 332 MB that is kept
between calls or with a hash table; and spconv's `Point2VoxelCPU3d`. All give the same voxels in the same order with
the same counts (checked). `ours_vs_best` is against the fastest of them. A worker's allocator keeps the memory that its
networks freed, so that voxelising touches no fresh pages: the benchmark frees 30 MiB first, for all alike;
`fresh_heap_s` is ours without that.

Points: a real key frame (--data) or rings of a made-up scan, seen from nine earlier places too.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np

from extractors.voxels import Voxels, grid_shape, voxelize

SIZE, RANGE = (0.075, 0.075, 0.2), (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)
MAX_POINTS, MAX_VOXELS = 10, 120_000


def ten_sweeps(folder: Path, scans: int = 10) -> tuple[np.ndarray, str]:
    """(point, 5) float32 x, y, z, intensity, time lag, and where they come from."""
    rng = np.random.RandomState(0)
    found = sorted((folder / "nuscenes").glob("*LIDAR_TOP*.bin"))
    if found:
        scan = np.fromfile(found[0], np.float32).reshape(-1, 5)
    else:
        turn, tilt = np.meshgrid(np.linspace(-np.pi, np.pi, 1085), np.radians(np.linspace(-30, 10, 32)), indexing="ij")
        reach = np.minimum(1.8 / np.maximum(-np.sin(tilt), 1e-3), rng.uniform(5, 60, (1085, 1)))  # ground or a wall
        xyz = np.stack([np.cos(tilt) * np.cos(turn), np.cos(tilt) * np.sin(turn), np.sin(tilt)], -1) * reach[..., None]
        scan = np.concatenate([xyz.reshape(-1, 3), rng.uniform(0, 255, (reach.size, 2))], 1).astype(np.float32)
    sweeps = []
    for lag in range(scans):
        sweep = scan[(np.abs(scan[:, :2]) >= 1).any(1)] if lag else scan.copy()
        angle = 0.005 * lag
        turn_by = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]], np.float32)
        sweep[:, :2] = sweep[:, :2] @ turn_by.T - [0, 0.35 * lag]
        sweep[:, :3] += rng.randn(len(sweep), 3) * (0.02 if lag else 0)
        sweep[:, 4] = 0.05 * lag
        sweeps.append(sweep)
    return np.concatenate(sweeps), "a real key frame" if found else "made up"


def ours(points: np.ndarray) -> Voxels:
    return voxelize(points, SIZE, RANGE, MAX_POINTS, MAX_VOXELS)


def numba_peers(points: np.ndarray) -> dict[str, Callable[[], Voxels]]:
    import numba

    low, size, shape = np.array(RANGE[:3], np.float32), np.array(SIZE, np.float32), grid_shape(SIZE, RANGE)

    @numba.njit(inline="always")
    def cell_of(point, low, size, shape):  # type: ignore[no-untyped-def]
        x = np.floor((point[0] - low[0]) / size[0])
        y = np.floor((point[1] - low[1]) / size[1])
        z = np.floor((point[2] - low[2]) / size[2])
        if not (x >= 0 and x < shape[2] and y >= 0 and y < shape[1] and z >= 0 and z < shape[0]):
            return -1
        return (int(z) * shape[1] + int(y)) * shape[2] + int(x)

    @numba.njit
    def finish(opened, total, counts, shape):  # type: ignore[no-untyped-def]
        coords = np.empty((len(opened), 3), np.int32)
        for v in range(len(opened)):
            rest = opened[v] // shape[2]
            coords[v, 0], coords[v, 1] = rest // shape[1], rest % shape[1]
            coords[v, 2] = opened[v] - rest * shape[2]
            for column in range(total.shape[1]):
                total[v, column] /= counts[v]
        return coords, total, counts

    @numba.njit
    def dense(points, low, size, shape, grid, max_points, max_voxels):  # type: ignore[no-untyped-def]
        opened = np.empty(max_voxels, np.int64)
        total = np.zeros((max_voxels, points.shape[1]), np.float32)
        counts = np.zeros(max_voxels, np.int32)
        voxels = 0
        for i in range(len(points)):
            cell = cell_of(points[i], low, size, shape)
            if cell < 0:
                continue
            v = grid[cell]
            if v < 0:
                if voxels == max_voxels:
                    continue
                v = voxels
                grid[cell] = v
                opened[v] = cell
                voxels += 1
            if counts[v] < max_points:
                counts[v] += 1
                for column in range(points.shape[1]):
                    total[v, column] += points[i, column]
        for v in range(voxels):
            grid[opened[v]] = -1
        return finish(opened[:voxels], total[:voxels], counts[:voxels], shape)

    @numba.njit
    def hashed(points, low, size, shape, max_points, max_voxels):  # type: ignore[no-untyped-def]
        bits = 19
        keys, values = np.full(1 << bits, -1, np.int32), np.empty(1 << bits, np.int32)
        opened = np.empty(max_voxels, np.int64)
        total = np.zeros((max_voxels, points.shape[1]), np.float32)
        counts = np.zeros(max_voxels, np.int32)
        voxels = 0
        for i in range(len(points)):
            cell = cell_of(points[i], low, size, shape)
            if cell < 0:
                continue
            slot = ((cell * 2654435769) & 0xFFFFFFFF) >> (32 - bits)
            while keys[slot] != -1 and keys[slot] != cell:
                slot = (slot + 1) & ((1 << bits) - 1)
            if keys[slot] == -1:
                if voxels == max_voxels:
                    continue
                v = voxels
                keys[slot], values[slot] = cell, v
                opened[v] = cell
                voxels += 1
            else:
                v = values[slot]
            if counts[v] < max_points:
                counts[v] += 1
                for column in range(points.shape[1]):
                    total[v, column] += points[i, column]
        return finish(opened[:voxels], total[:voxels], counts[:voxels], shape)

    grid = np.full(int(np.prod(shape)), -1, np.int32)
    rest = (MAX_POINTS, MAX_VOXELS)
    return {
        "numba, dense grid": lambda: Voxels(*dense(points, low, size, shape, grid, *rest)),
        "numba, hash table": lambda: Voxels(*hashed(points, low, size, shape, *rest)),
    }


def spconv_peer(points: np.ndarray) -> dict[str, Callable[[], Voxels]]:
    from cumm import tensorview
    from spconv.utils import Point2VoxelCPU3d

    make = Point2VoxelCPU3d(
        vsize_xyz=list(SIZE),
        coors_range_xyz=list(RANGE),
        num_point_features=points.shape[1],
        max_num_voxels=MAX_VOXELS,
        max_num_points_per_voxel=MAX_POINTS,
    )
    rows = tensorview.from_numpy(points)

    def run() -> Voxels:
        kept, coords, counts = (part.numpy() for part in make.point_to_voxel(rows))
        return Voxels(coords, kept.sum(1) / counts[:, None], counts)

    return {"spconv": run}


def fresh_heap(points: np.ndarray) -> float:
    """Median seconds of ours in a process that has freed nothing large."""
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        ours(points)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def main() -> None:
    options = harness.options(
        __doc__,
        ("--data", {"type": Path, "default": Path("../shared/data"), "help": "folder with nuscenes/*LIDAR_TOP*.bin"}),
        ("--fresh-heap", {"action": "store_true", "help": "print ours alone, in seconds, and end"}),
    )
    points, source = ten_sweeps(options.data)
    if options.fresh_heap:
        print(fresh_heap(points))
        return
    alone = subprocess.run([sys.executable, __file__, "--fresh-heap", "--data", str(options.data)], capture_output=True)
    np.ones(30 << 20, np.uint8)

    peers: dict[str, Callable[[], Voxels]] = {}
    missing = []
    for name, build in {"numba": numba_peers, "spconv": spconv_peer}.items():
        try:
            peers |= build(points)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    expected = ours(points)
    for name, peer in peers.items():
        theirs = peer()
        assert np.array_equal(theirs.coords, expected.coords), f"{name}: other voxels"
        assert np.array_equal(theirs.counts, expected.counts), f"{name}: other counts"
        assert np.allclose(theirs.mean, expected.mean, rtol=1e-5, atol=1e-5), f"{name}: other means"

    medians = harness.compare({"ours": lambda: ours(points), **peers}, repeats=9 if options.quick else 31)
    best = min(peers, key=lambda name: medians[name], default=None)
    harness.emit(
        "voxelize",
        ratios={"ours_vs_best": medians[best] / medians["ours"]} if best else {},
        figures={
            "seconds": medians,
            "best": best,
            "fresh_heap_s": float(alone.stdout),
            "points": len(points),
            "points_from": source,
            "voxels": len(expected.coords),
            "full_voxels": float((expected.counts == MAX_POINTS).mean()),
            "missing": missing,
            **harness.versions("numba", "spconv"),
        },
    )


if __name__ == "__main__":
    main()

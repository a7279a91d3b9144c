import numpy as np
import pytest
import torch

from extractors import point_sampling
from extractors.point_sampling import furthest_point_sample

torch.set_num_threads(1)


def kernel_fps(xyz: np.ndarray, count: int, lanes: int, skip_origin: bool) -> np.ndarray:
    """The CUDA kernel thread by thread: strided lanes with a strict >, then the pairwise reduction."""
    n = len(xyz)
    block = min(lanes, 1 << (n.bit_length() - 1))
    near = ((xyz[:, 0] * xyz[:, 0] + xyz[:, 1] * xyz[:, 1]) + xyz[:, 2] * xyz[:, 2]).astype(np.float64) <= 1e-3
    distance = np.full(n, 1e10, np.float32)
    picked = [0]
    for _ in range(count - 1):
        dx, dy, dz = (xyz - xyz[picked[-1]]).T
        squared = (dx * dx + dy * dy) + dz * dz
        best, best_index = np.full(block, -1.0), np.zeros(block, int)
        for k in range(n):
            if skip_origin and near[k]:
                continue
            distance[k] = min(distance[k], squared[k])
            if distance[k] > best[k % block]:
                best[k % block], best_index[k % block] = distance[k], k
        half = block // 2
        while half:
            for lane in range(half):
                if best[lane + half] > best[lane]:
                    best[lane], best_index[lane] = best[lane + half], best_index[lane + half]
            half //= 2
        picked.append(int(best_index[0]))
    return np.array(picked)


def dense(xyz: np.ndarray, count: int, lanes: int, skip_origin: bool) -> np.ndarray:
    return furthest_point_sample(torch.from_numpy(xyz)[None], count, lanes=lanes, skip_origin=skip_origin)[0][0].numpy()


def pruned(xyz: np.ndarray, count: int, lanes: int, skip_origin: bool, few: int = 256) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_sampling, "_DENSE", 0)
        patch.setattr(point_sampling, "_FEW", few)
        return dense(xyz, count, lanes, skip_origin)


def pruned_with_many_candidates(xyz: np.ndarray, count: int, lanes: int, skip_origin: bool) -> np.ndarray:
    return pruned(xyz, count, lanes, skip_origin, few=0)


def accelerator(xyz: np.ndarray, count: int, lanes: int, skip_origin: bool) -> np.ndarray:
    """The code path of a GPU, here on the CPU."""
    order = point_sampling._tie_order(len(xyz), lanes)
    picked, _ = point_sampling._sample_dense_torch(torch.from_numpy(xyz[order])[None], count, skip_origin)
    return order[picked[0].numpy()]


def clouds() -> dict[str, tuple[np.ndarray, int]]:
    rng = np.random.RandomState(0)
    grid = np.stack(np.meshgrid(*[np.arange(9)] * 3), -1).reshape(-1, 3)
    return {
        "random": (rng.randn(700, 3), 120),
        "around the origin": (rng.randn(600, 3) * 0.04, 500),
        "regular grid": (rng.permutation(grid), 150),
        "grid with duplicates": (rng.permutation(np.concatenate([grid, grid]))[:1300], 900),
        "one point many times": (np.ones((300, 3)), 20),
        "all at the origin": (np.zeros((40, 3)), 12),
        "a line": (np.arange(200)[:, None] * [1.0, 0, 0], 60),
        "fewer points than picks": (rng.randn(10, 3), 30),
        "a single point": (np.array([[1.0, 2, 3]]), 4),
        "three points": (rng.randn(3, 3), 3),
        "far from the origin": (rng.randn(500, 3) + 3000, 100),
    }


@pytest.mark.parametrize("skip_origin", [True, False])
@pytest.mark.parametrize("lanes", [512, 1024])
@pytest.mark.parametrize("cloud", clouds())
def test_sampling_picks_what_the_kernel_picks(cloud: str, lanes: int, skip_origin: bool) -> None:
    xyz, count = clouds()[cloud]
    xyz = xyz.astype(np.float32)
    expected = kernel_fps(xyz, count, lanes, skip_origin).tolist()
    for way in (dense, pruned, pruned_with_many_candidates, accelerator):
        assert way(xyz, count, lanes, skip_origin).tolist() == expected, way.__name__


def test_pruned_sampling_of_a_large_cloud_equals_the_plain_rule() -> None:
    rng = np.random.RandomState(1)
    for xyz in (rng.randn(9000, 3), rng.randint(0, 12, (9000, 3))):  # without and with ties
        points = xyz.astype(np.float32)
        assert pruned(points, 600, 512, True).tolist() == accelerator(points, 600, 512, True).tolist()


@pytest.mark.parametrize("device_path", [False, True])
def test_picks_without_rivals_are_in_the_order_that_sampling_gives(device_path: bool) -> None:
    xyz = np.random.RandomState(2).randn(1, 6000, 3).astype(np.float32)
    xyz[0, 0] = 0  # near the origin: picked first all the same
    if device_path:
        order = point_sampling._tie_order(6000, 512)
        picked, sole = point_sampling._sample_dense_torch(torch.from_numpy(xyz[:, order]), 300, True)
        picked = torch.from_numpy(order)[picked]
    else:
        picked, sole = furthest_point_sample(torch.from_numpy(xyz), 300, skip_origin=True)
    assert sole == 300
    again, _ = furthest_point_sample(torch.from_numpy(xyz[0, picked[0]][None]), 200, skip_origin=True)
    assert again[0].tolist() == list(range(200))


@pytest.mark.parametrize("device_path", [False, True])
def test_a_tie_ends_the_picks_without_rivals(device_path: bool) -> None:
    grid = np.stack(np.meshgrid(*[np.arange(18)] * 3), -1).reshape(-1, 3).astype(np.float32) + 5
    if device_path:
        order = point_sampling._tie_order(len(grid), 512)
        _, sole = point_sampling._sample_dense_torch(torch.from_numpy(grid[order])[None], 50, False)
    else:
        _, sole = furthest_point_sample(torch.from_numpy(grid)[None], 50)
    assert sole == 2  # the corner opposite to the first has no rival, after it three corners tie


def test_scans_of_a_batch_are_sampled_each_by_itself() -> None:
    xyz = torch.from_numpy(np.random.RandomState(3).randn(3, 5000, 3).astype(np.float32))
    together, _ = furthest_point_sample(xyz, 50)
    for scan, picked in zip(xyz, together, strict=True):
        assert furthest_point_sample(scan[None], 50)[0][0].tolist() == picked.tolist()

import numpy as np
import pytest
import torch
from torch import nn

from extractors import pointnet2
from extractors.pointnet2 import FeaturePropagation, SetAbstraction, ball_query, three_interpolate, three_nn

torch.set_num_threads(1)


def kernel_ball_query(xyz: np.ndarray, centres: np.ndarray, radius: float, limit: int) -> tuple[np.ndarray, np.ndarray]:
    r2 = np.float32(radius) * np.float32(radius)
    neighbours, hits = np.zeros((len(centres), limit), int), np.zeros(len(centres), int)
    for i, centre in enumerate(centres):
        dx, dy, dz = (centre - xyz).T
        found = np.flatnonzero((dx * dx + dy * dy) + dz * dz < r2)[:limit]
        if len(found):
            neighbours[i] = found[0]
            neighbours[i, : len(found)] = found
        hits[i] = len(found)
    return neighbours, hits


WAYS = {  # constants of pointnet2 that make ball_query go one way
    "by cells": {"_CROWDED": 0},
    "by cells in many chunks": {"_CROWDED": 0, "_CANDIDATES": 50},
    "in order": {"_CROWDED": 1 << 40},
    "in order by blocks": {"_CROWDED": 1 << 40, "_BLOCK": 7},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(pointnet2, name, value)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("scale", [0.05, 1, 20, 1000])
def test_ball_query_finds_what_the_kernel_finds(scale: float) -> None:
    rng = np.random.RandomState(0)
    xyz = (rng.randn(3, 300, 3) * scale).astype(np.float32)
    centres = np.concatenate([xyz[:, :40], (rng.randn(3, 20, 3) * 2 * scale).astype(np.float32)], 1)
    centres[:, -1] = [1e6, -1e6, 3]  # far outside
    neighbours, hits = ball_query(torch.from_numpy(xyz), torch.from_numpy(centres), 0.6, 16)
    for b in range(3):
        expected = kernel_ball_query(xyz[b], centres[b], 0.6, 16)
        assert (neighbours[b].numpy() == expected[0]).all()
        assert (hits[b].numpy() == expected[1]).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offset", [0, 500, -7])
def test_ball_query_excludes_points_at_exactly_the_radius(offset: float) -> None:
    grid = np.stack(np.meshgrid(*[np.arange(6)] * 3), -1).reshape(-1, 3).astype(np.float32) * 0.25 + offset
    for radius in (0.25, 0.5, 0.75):
        ours = ball_query(torch.from_numpy(grid)[None], torch.from_numpy(grid)[None], radius, 64)
        expected = kernel_ball_query(grid, grid, radius, 64)
        assert (ours[0][0].numpy() == expected[0]).all()
        assert (ours[1][0].numpy() == expected[1]).all()


@pytest.mark.usefixtures("way")
def test_ball_query_handles_flat_and_single_point_clouds() -> None:
    flat = np.random.RandomState(0).rand(200, 3).astype(np.float32) * [1, 1, 0]
    for xyz in (flat.astype(np.float32), np.ones((1, 3), np.float32), np.ones((50, 3), np.float32)):
        ours = ball_query(torch.from_numpy(xyz)[None], torch.from_numpy(xyz)[None], 0.2, 8)
        assert (ours[0][0].numpy() == kernel_ball_query(xyz, xyz, 0.2, 8)[0]).all()


def test_nearest_neighbours_come_in_order_and_ties_go_to_the_lower_index() -> None:
    known = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [5, 0, 0], [0, 0, 0.5]]])
    distance, index = three_nn(torch.zeros(1, 1, 3), known)
    assert index.tolist() == [[[4, 0, 1]]]
    assert distance.tolist() == [[[0.5, 1, 1]]]
    features = torch.tensor([[[1.0], [2], [3], [4], [5]]])
    weights = np.array([1 / (0.5 + 1e-8), 1, 1])
    expected = (weights * [5, 1, 2]).sum() / weights.sum()
    assert three_interpolate(features, distance, index).item() == pytest.approx(expected, rel=1e-6)


def randomise(module: nn.Module) -> None:
    torch.manual_seed(0)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight)
            nn.init.normal_(m.bias)
            nn.init.normal_(m.running_mean)
            nn.init.uniform_(m.running_var, 0.5, 2)


def plain_mlp(module: nn.Module, grouped: torch.Tensor) -> torch.Tensor:
    for layer in module.children():
        grouped = layer.bn.bn(layer.conv(grouped)).relu()
    return grouped


@pytest.mark.parametrize("batch", [1, 3])
def test_set_abstraction_equals_convolution_over_whole_groups(batch: int) -> None:
    layer = SetAbstraction(30, 0.5, 8, (4, 16, 12, 20)).eval()
    randomise(layer)
    xyz, features = torch.rand(batch, 200, 3), torch.randn(batch, 200, 4)
    centres = xyz[:, :30].clone()
    centres[:, -1] = 9  # a centre without neighbours groups point 0
    neighbours, _ = ball_query(xyz, centres, 0.5, 8)
    scan = torch.arange(batch)[:, None, None]
    offset = (xyz[scan, neighbours] - centres[:, :, None]) / 0.5
    grouped = torch.cat([offset, features[scan, neighbours]], 3).permute(0, 3, 1, 2)
    with torch.inference_mode():
        expected = plain_mlp(layer.mlp_module, grouped).amax(3).mT
        ours = layer(xyz, features, centres)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_feature_propagation_equals_convolution_over_interpolated_features() -> None:
    layer = FeaturePropagation(7 + 5, 16, 10).eval()
    randomise(layer)
    unknown, known = torch.rand(2, 50, 3), torch.rand(2, 20, 3)
    skip, features = torch.randn(2, 50, 5), torch.randn(2, 20, 7)
    distance = torch.cdist(unknown, known)
    nearest, index = distance.topk(3, largest=False)
    weight = 1 / (nearest + 1e-8)
    weight /= weight.sum(2, keepdim=True)
    interpolated = (features[torch.arange(2)[:, None, None], index] * weight[..., None]).sum(2)
    with torch.inference_mode():
        rows = torch.cat([interpolated, skip], 2).mT[..., None]
        expected = plain_mlp(layer.mlp, rows)[..., 0].mT
        ours = layer(unknown, known, skip, features)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

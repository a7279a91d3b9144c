"""SparseEncoder: official keys, shapes, batches and odd inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv3d

from extractors.checkpoint import load_strict, seeded_init
from extractors.errors import WeightsError
from extractors.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d, to_spconv2_layout
from extractors.sparse_encoder import BasicBlock, SparseEncoder
from extractors.voxels import voxelize

SMALL = (41, 48, 64)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def encoder() -> SparseEncoder:
    encoder = SparseEncoder(shape=SMALL)
    seeded_init(encoder, 0)
    return encoder.eval()


def voxels(seed: int, count: int, batch: int = 1) -> SparseTensor:
    rng = np.random.RandomState(seed)
    cells = np.unique(rng.randint(0, batch * int(np.prod(SMALL)), count))
    coords = np.stack(np.unravel_index(cells, (batch, *SMALL)), 1).astype(np.int64).reshape(-1, 4)
    features = rng.randn(len(cells), 5).astype(np.float32)
    return SparseTensor(torch.from_numpy(features), torch.from_numpy(coords), SMALL, batch)


def test_parameters_and_entries_are_the_official_ones(encoder: SparseEncoder) -> None:
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 2_694_352
    state = encoder.state_dict()
    assert len(state) == 21 + 21 * 5, "21 convolutions, each with a BatchNorm"
    assert state["conv_input.0.weight"].shape == (16, 3, 3, 3, 5)
    assert state["encoder_layers.encoder_layer2.1.conv2.weight"].shape == (32, 3, 3, 3, 32)
    assert state["encoder_layers.encoder_layer3.2.0.weight"].shape == (128, 3, 3, 3, 64)
    assert state["encoder_layers.encoder_layer3.2.1.running_var"].shape == (128,)
    assert state["conv_out.0.weight"].shape == (128, 3, 1, 1, 128)


def test_grids_shrink_as_the_official_ones(encoder: SparseEncoder) -> None:
    shapes = [SparseEncoder().shape]
    for layer in encoder.encoder_layers.values():
        for module in layer.modules():
            if isinstance(module, SparseConv3d):
                one = SparseTensor(torch.ones(1, module.weight.shape[-1]), torch.zeros(1, 4).long(), shapes[-1])
                shapes.append(module(one).shape)
    assert shapes == [(41, 1440, 1440), (21, 720, 720), (11, 360, 360), (5, 180, 180)]


def dense_encoder(encoder: SparseEncoder, x: SparseTensor) -> Tensor:
    """The same network with dense convolutions: zeros again outside the sites after every BatchNorm."""

    def convolve(conv: SubMConv3d | SparseConv3d, norm: nn.BatchNorm1d, grid: Tensor, mask: Tensor) -> Tensor:
        weight = conv.weight.permute(0, 4, 1, 2, 3)
        if isinstance(conv, SubMConv3d):
            grid = conv3d(grid, weight, padding=1)
        else:
            grid = conv3d(grid, weight, stride=conv.stride, padding=conv.padding)
        moments = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return nn.functional.batch_norm(grid, *moments, eps=1e-3) * mask

    mask = x.replace(torch.ones(len(x.coords), 1)).dense()
    grid = convolve(encoder.conv_input[0], encoder.conv_input[1], x.dense(), mask).relu()
    for part in [*[part for layer in encoder.encoder_layers.values() for part in layer], encoder.conv_out]:
        if isinstance(part, BasicBlock):
            inner = convolve(part.conv1, part.bn1, grid, mask).relu()
            grid = (convolve(part.conv2, part.bn2, inner, mask) + grid).relu()
        else:
            conv = part[0]
            ones = torch.ones(1, 1, *conv.kernel)
            mask = (conv3d(mask, ones, stride=conv.stride, padding=conv.padding) > 0).float()
            grid = convolve(conv, part[1], grid, mask).relu()
    return grid.flatten(1, 2)


def test_equals_the_dense_network_masked_after_every_norm(encoder: SparseEncoder) -> None:
    x = voxels(0, 900, batch=2)
    bev, _ = encoder(x)
    expected = dense_encoder(encoder, x)
    assert bev.shape == (2, 256, 6, 8)
    assert float((bev - expected).norm()) <= 1e-5 * float(expected.norm())


def test_a_site_lights_its_row_y_and_column_x_and_channel_c_times_2_plus_z(encoder: SparseEncoder) -> None:
    x = SparseTensor(torch.ones(1, 5), torch.tensor([[0, 39, 8 * 4, 8 * 7]]), SMALL)  # high up: z = 1 of the map
    bev, _ = encoder(x)
    lit = bev[0].ne(0)
    assert lit.any(0).nonzero().tolist() == [[4, 7]]
    assert lit[1::2].any()
    assert not lit[0::2].any()


@pytest.mark.parametrize("count", [0, 1])
def test_no_voxel_and_one_voxel(encoder: SparseEncoder, count: int) -> None:
    x = voxels(1, count)
    bev, stages = encoder(x)
    assert bev.shape == (1, 256, 6, 8)
    assert torch.isfinite(bev).all()
    assert bool(bev.any()) == bool(count)
    assert [stage.features.shape[1] for stage in stages] == [16, 32, 64, 128, 128]


def test_the_company_in_a_batch_changes_no_map(encoder: SparseEncoder) -> None:
    parts = [voxels(2, 800), voxels(3, 0), voxels(4, 5000)]
    coords = torch.cat([part.coords + torch.tensor([b, 0, 0, 0]) for b, part in enumerate(parts)])
    together, _ = encoder(SparseTensor(torch.cat([part.features for part in parts]), coords, SMALL, 3))
    for b, part in enumerate(parts):
        alone = encoder(part)[0][0]
        assert float((together[b] - alone).norm()) <= 1e-5 * float(alone.norm())


def test_twice_gives_the_same_bytes(encoder: SparseEncoder) -> None:
    one, two = (encoder(voxels(5, 3000))[0] for _ in range(2))
    assert torch.equal(one, two)


def test_another_grid_is_refused(encoder: SparseEncoder) -> None:
    with pytest.raises(ValueError, match="this encoder takes"):
        encoder(SparseTensor(torch.ones(1, 5), torch.zeros(1, 4).long(), (41, 8, 8)))


def test_a_file_converted_twice_is_refused(encoder: SparseEncoder) -> None:
    twice = {k: v.permute(4, 0, 1, 2, 3) if v.ndim == 5 else v for k, v in encoder.state_dict().items()}
    with pytest.raises(WeightsError, match="conv_input.0.weight is"):
        load_strict(SparseEncoder(shape=SMALL), to_spconv2_layout(twice), "file.pth")


def test_spconv_1_weights_give_the_same_map(encoder: SparseEncoder) -> None:
    first = {k: v.permute(1, 2, 3, 4, 0).contiguous() if v.ndim == 5 else v for k, v in encoder.state_dict().items()}
    other = SparseEncoder(shape=SMALL).eval()
    load_strict(other, to_spconv2_layout(first), "file.pth")
    x = voxels(6, 700)
    assert torch.equal(other(x)[0], encoder(x)[0])


@pytest.mark.parametrize("points", [0, 1, 2_000_000])
def test_from_points_to_a_map(points: int) -> None:
    cloud = (np.random.RandomState(0).uniform(-60, 60, (points, 5)) * [0.04, 0.04, 0.1, 1, 1]).astype(np.float32)
    found = voxelize(cloud, (0.075, 0.075, 0.2), (-2.4, -1.8, -5, 2.4, 1.8, 3), 10, 20_000)
    coords = torch.from_numpy(np.insert(found.coords, 0, 0, 1)).long()
    encoder = SparseEncoder(shape=SMALL).eval()
    seeded_init(encoder, 0)
    bev, _ = encoder(SparseTensor(torch.from_numpy(found.mean), coords, SMALL))
    assert bev.shape == (1, 256, 6, 8)
    assert torch.isfinite(bev).all()

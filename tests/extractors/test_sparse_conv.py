"""Sparse convolution against dense convolution, masked to the sites that the definition names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv3d

from extractors import sparse_conv
from extractors.errors import WeightsError
from extractors.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d, sparse_add, to_spconv2_layout, weight_layout

GRID = (9, 16, 16)
DOWNS = [
    (3, 2, 1),
    (3, 2, (0, 1, 1)),
    ((3, 1, 1), (2, 1, 1), 0),
    (2, 2, 0),
    (3, 1, 1),
    ((1, 3, 5), (1, 3, 2), (0, 2, 4)),
    (2, 3, 0),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def sites(seed: int, count: int, channels: int, batch: int = 1, shape: tuple[int, int, int] = GRID) -> SparseTensor:
    rng = np.random.RandomState(seed)
    cells = rng.permutation(batch * int(np.prod(shape)))[:count]
    coords = np.stack(np.unravel_index(cells, (batch, *shape)), 1).astype(np.int64).reshape(-1, 4)
    features = torch.from_numpy(rng.randn(len(cells), channels).astype(np.float32))
    return SparseTensor(features, torch.from_numpy(coords), shape, batch)


def fill(conv: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
    return conv.eval()


def dense_weight(conv: SubMConv3d | SparseConv3d) -> Tensor:
    return conv.weight.permute(0, 4, 1, 2, 3)


def occupied(x: SparseTensor) -> Tensor:
    """(batch, 1, z, y, x) one where there is a site."""
    return x.replace(torch.ones(len(x.coords), 1)).dense()


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 300, 9 * 16 * 16 * 2])
@pytest.mark.parametrize("kernel", [3, 1, (1, 3, 5)])
def test_submanifold_is_the_dense_convolution_at_the_sites(count: int, kernel: int | tuple[int, int, int]) -> None:
    x = sites(0, count, 5, batch=2)
    conv = fill(SubMConv3d(5, 7, kernel))
    y = conv(x)
    padding = tuple(size // 2 for size in conv.kernel)
    assert torch.equal(y.coords, x.coords)
    assert_near(y.dense(), conv3d(x.dense(), dense_weight(conv), padding=padding) * occupied(x))


@pytest.mark.parametrize("count", [0, 1, 300, 9 * 16 * 16 * 2])
@pytest.mark.parametrize("rule", DOWNS)
def test_strided_is_the_dense_convolution_where_the_kernel_reaches(count: int, rule: tuple) -> None:
    x = sites(1, count, 5, batch=2)
    conv = fill(SparseConv3d(5, 7, *rule))
    y = conv(x)
    assert_near(y.dense(), conv3d(x.dense(), dense_weight(conv), stride=conv.stride, padding=conv.padding))
    ones = torch.ones(1, 1, *conv.kernel)
    reached = conv3d(occupied(x), ones, stride=conv.stride, padding=conv.padding) > 0
    assert torch.equal(y.coords, reached[:, 0].nonzero()), "sites, sorted by batch, z, y, x"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(0, 120),
    st.integers(1, 3),
    st.tuples(*[st.integers(1, 6)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.integers(0, 2)] * 3),
)
def test_any_kernel_stride_and_padding(seed: int, count: int, batch: int, shape, kernel, stride, padding) -> None:
    x = sites(seed, count, 2, batch, shape)
    conv = fill(SparseConv3d(2, 3, kernel, stride, padding))
    if any(n + 2 * p < k for n, k, p in zip(shape, kernel, padding, strict=True)):
        with pytest.raises(ValueError, match="too small"):
            conv(x)
        return
    with torch.inference_mode():
        assert_near(conv(x).dense(), conv3d(x.dense(), dense_weight(conv), stride=stride, padding=padding))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sites(2, 1000, 8, batch=2)
    layers = [fill(SubMConv3d(8, 8)), fill(SparseConv3d(8, 8, 3, 2, 1))]
    whole = [layer(x).features for layer in layers]
    for block in (1, 7, 1000, 1001):
        monkeypatch.setattr(sparse_conv, "_BLOCK", block)
        fresh = SparseTensor(x.features, x.coords, x.shape, 2)
        for layer, expected in zip(layers, whole, strict=True):
            assert_near(layer(fresh).features, expected)


def test_neighbours_do_not_wrap_around_borders() -> None:
    corners = torch.tensor([[b, z, y, x] for b, z, y, x in product((0, 1), (0, 8), (0, 15), (0, 15))])
    x = SparseTensor(torch.ones(16, 1), corners, GRID, 2)
    conv = SubMConv3d(1, 1)
    conv.weight.fill_(1)
    assert torch.equal(conv(x).features, torch.ones(16, 1))


def test_the_order_of_sites_changes_their_order_alone() -> None:
    x = sites(3, 400, 6)
    shuffle = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    other = SparseTensor(x.features[shuffle], x.coords[shuffle], GRID, 1)
    submanifold, strided = fill(SubMConv3d(6, 6)), fill(SparseConv3d(6, 6, 3, 2, 1))
    assert_near(submanifold(other).features, submanifold(x).features[shuffle])
    assert torch.equal(strided(other).coords, strided(x).coords)
    assert_near(strided(other).features, strided(x).features)


def test_a_batch_gives_what_its_grids_give_alone() -> None:
    parts = [sites(seed, count, 6) for seed, count in ((4, 500), (5, 0), (6, 90))]
    coords = torch.cat([part.coords + torch.tensor([b, 0, 0, 0]) for b, part in enumerate(parts)])
    batch = SparseTensor(torch.cat([part.features for part in parts]), coords, GRID, 3)
    submanifold, strided = fill(SubMConv3d(6, 16)), fill(SparseConv3d(16, 8, 3, 2, 1))
    together = strided(submanifold(batch)).dense()
    for b, part in enumerate(parts):
        alone = strided(submanifold(part)).dense()[0]
        assert float((together[b] - alone).norm()) <= 1e-5 * float(alone.norm())


def test_layers_with_the_same_sites_share_an_index_map(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sites(7, 200, 4)
    first, second = fill(SubMConv3d(4, 4), 1), fill(SubMConv3d(4, 4), 2)
    separately = second(SparseTensor(first(x).features, x.coords, GRID)).features
    y = first(SparseTensor(x.features, x.coords, GRID))
    monkeypatch.setattr(sparse_conv, "_submanifold_map", None)
    assert torch.equal(second(y).features, separately)


def test_dense_has_zeros_elsewhere() -> None:
    x = SparseTensor(torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 2, 0, 3]]), (3, 4, 5), 2)
    grid = x.dense()
    assert grid.shape == (2, 2, 3, 4, 5)
    assert grid[1, :, 2, 0, 3].tolist() == [1, 2]
    assert grid.count_nonzero() == 2


@pytest.mark.parametrize(("left", "right"), [(300, 200), (0, 200), (0, 0), (300, 0)])
def test_sparse_add_is_the_sum_over_the_union(left: int, right: int) -> None:
    a, b = sites(8, left, 4, 2), sites(9, right, 4, 2)
    total = sparse_add(a, b)
    assert torch.equal(total.dense(), a.dense() + b.dense())
    assert torch.equal(total.coords, ((occupied(a) + occupied(b)) > 0)[:, 0].nonzero())
    with pytest.raises(ValueError, match="grids differ"):
        sparse_add(a, sites(9, 3, 4, 1))


def _state(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights that spconv 2 would hold, and the same in another layout."""
    layers = {"input.weight": SubMConv3d(5, 16), "down.weight": SparseConv3d(16, 16, (3, 1, 1), (2, 1, 1))}
    ours = {key: fill(layer, number).weight.data for number, (key, layer) in enumerate(layers.items())}
    ours["norm.weight"] = torch.ones(16)
    order = {"spconv 2": (0, 1, 2, 3, 4), "spconv 1": (1, 2, 3, 4, 0), "dense": (0, 4, 1, 2, 3)}[layout]
    return ours, {key: value.permute(order).contiguous() if value.ndim == 5 else value for key, value in ours.items()}


@pytest.mark.parametrize("layout", ["spconv 2", "spconv 1", "dense"])
def test_every_layout_is_recognised_and_computes_the_dense_convolution(layout: str) -> None:
    ours, theirs = _state(layout)
    assert weight_layout(theirs) == layout
    converted = to_spconv2_layout(theirs)
    assert all(torch.equal(converted[key], ours[key]) for key in ours)
    conv = SubMConv3d(5, 16)
    conv.weight.copy_(converted["input.weight"])
    x = sites(10, 500, 5)
    written_out = {"spconv 2": (0, 4, 1, 2, 3), "spconv 1": (4, 3, 0, 1, 2), "dense": (0, 1, 2, 3, 4)}[layout]
    expected = conv3d(x.dense(), theirs["input.weight"].permute(written_out), padding=1) * occupied(x)
    assert_near(conv(x).dense(), expected)


def test_layouts_that_cannot_be_told_are_refused() -> None:
    assert weight_layout({"norm.weight": torch.ones(3)}) is None
    with pytest.raises(WeightsError, match="expected"):
        weight_layout({"conv.weight": torch.ones(16, 5, 5, 5, 16)})
    with pytest.raises(WeightsError, match="different layouts"):
        weight_layout({"a": torch.ones(16, 3, 3, 3, 16), "b": torch.ones(3, 3, 3, 16, 16)})


def test_even_submanifold_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        SubMConv3d(4, 4, (3, 2, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_cpu() -> None:
    x = sites(11, 2000, 16, batch=2)
    layers = [fill(SubMConv3d(16, 32)), fill(SparseConv3d(16, 32, 3, 2, 1))]
    on_gpu = SparseTensor(x.features.cuda(), x.coords.cuda(), GRID, 2)
    for layer in layers:
        expected = layer(x)
        ours = layer.cuda()(on_gpu)
        assert torch.equal(ours.coords.cpu(), expected.coords)
        assert_near(ours.features.cpu(), expected.features)

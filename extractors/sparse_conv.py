"""Sparse 3-D convolution (Graham et al. 2018) in plain PyTorch: gather, multiply, add, on CPU and GPU.

A site is a voxel that holds a feature; all others are zero. A submanifold convolution gives values at the sites it
was given; a strided one at every place that its kernel reaches from a site. Both are ordinary cross-correlations.

Weights have spconv 2's shape (out, kz, ky, kx, in). Inference only: run under `torch.no_grad` or `inference_mode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from extractors import spconv_backend
from extractors.errors import WeightsError

Triple = tuple[int, int, int]
Layout = Literal["spconv 2", "spconv 1", "dense"]

_TO_SPCONV_2: dict[Layout, tuple[int, ...]] = {
    "spconv 2": (0, 1, 2, 3, 4),
    "spconv 1": (4, 0, 1, 2, 3),
    "dense": (0, 2, 3, 4, 1),
}
_BLOCK = 4096  # output rows at once on the CPU
_KERNEL_AXIS: dict[Layout, int] = {"spconv 2": 1, "spconv 1": 0, "dense": 2}


@dataclass(frozen=True)
class SparseTensor:
    """Features at some voxels of a batch of grids.

    Attributes:
        features: (site, channel) float.
        coords: (site, 4) int64: batch, z, y, x; no site twice, any order.
        shape: voxels along z, y, x.
        batch_size: grids in the batch, some may have no site.
        maps: index maps found so far, shared by all tensors with these sites.
    """

    features: Tensor
    coords: Tensor
    shape: Triple
    batch_size: int = 1
    maps: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def replace(self, features: Tensor) -> SparseTensor:
        """Other features at the same sites."""
        return SparseTensor(features, self.coords, self.shape, self.batch_size, self.maps)

    def dense(self) -> Tensor:
        """(batch, channel, z, y, x), zeros where there is no site."""
        channels = self.features.shape[1]
        grid = self.features.new_zeros(self.batch_size, channels, prod(self.shape))
        grid[self.coords[:, 0], :, _flat(self.coords[:, 1:], self.shape)] = self.features
        return grid.view(self.batch_size, channels, *self.shape)


@dataclass(frozen=True)
class IndexMap:
    """Which input rows a convolution multiplies with which place of its kernel, and which output rows get the products.

    A pair is (input row, kernel place, output row). Pairs are sorted by block of output rows, kernel place and output
    row: what is gathered and multiplied for one block stays in the processor's cache.

    Attributes:
        coords, shape: the output's sites and grid.
        inputs: (pair,) int32 input row.
        block: output rows in a block (fewer in the last).
        bounds: for each block, where the pairs of each kernel place start, and where the last ones end.
        order: (pair,) int32 numbers of the pairs within their block, sorted by output row.
        starts: (output row,) int32: where each row's part starts in its block's part of `order`.
        maps: index maps of the output's sites.
    """

    coords: Tensor
    shape: Triple
    inputs: Tensor
    block: int
    bounds: list[list[int]]
    order: Tensor
    starts: Tensor
    maps: dict[Any, Any]


class _SparseConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel: int | Triple) -> None:
        super().__init__()
        self.kernel = _triple(kernel)
        self.weight = nn.Parameter(torch.empty(out_channels, *self.kernel, in_channels))

    def _apply_map(self, x: SparseTensor, found: IndexMap) -> SparseTensor:
        features = _gather_multiply_add(x.features, self.weight, found)
        return SparseTensor(features, found.coords, found.shape, x.batch_size, found.maps)


class SubMConv3d(_SparseConv):
    """Submanifold convolution: the output has the input's sites, in the same order.

    Args:
        kernel: odd.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int | Triple = 3) -> None:
        super().__init__(in_channels, out_channels, kernel)
        if any(size % 2 == 0 for size in self.kernel):
            raise ValueError(f"kernel {self.kernel} of a submanifold convolution has to be odd")

    def forward(self, x: SparseTensor) -> SparseTensor:
        if spconv_backend.usable(x.features):
            return spconv_backend.convolve(self, x)
        key = ("submanifold", self.kernel)
        if key not in x.maps:
            x.maps[key] = _submanifold_map(x, self.kernel)
        return self._apply_map(x, x.maps[key])


class SparseConv3d(_SparseConv):
    """Convolution that gives a value wherever the kernel reaches from a site; rows are sorted by batch, z, y, x."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Triple,
        stride: int | Triple = 1,
        padding: int | Triple = 0,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.stride, self.padding = _triple(stride), _triple(padding)

    def forward(self, x: SparseTensor) -> SparseTensor:
        if spconv_backend.usable(x.features):
            return spconv_backend.convolve(self, x)
        key = ("strided", self.kernel, self.stride, self.padding)
        if key not in x.maps:
            x.maps[key] = _strided_map(x, self.kernel, self.stride, self.padding)
        return self._apply_map(x, x.maps[key])


def sparse_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """Sum of two tensors of one grid: sites of either, sorted by batch, z, y, x."""
    if (a.shape, a.batch_size) != (b.shape, b.batch_size):
        raise ValueError(f"grids differ: {a.batch_size} x {a.shape} and {b.batch_size} x {b.shape}")
    coords = torch.cat([a.coords, b.coords])
    keys, row = torch.unique(_flat(coords, (a.batch_size, *a.shape)), return_inverse=True)
    features = a.features.new_zeros(len(keys), a.features.shape[1])
    features[row[: len(a.coords)]] = a.features
    features[row[len(a.coords) :]] += b.features  # no row twice within one tensor
    return SparseTensor(features, _unflat(keys, (a.batch_size, *a.shape)), a.shape, a.batch_size)


def weight_layout(state: Mapping[str, Tensor]) -> Layout | None:
    """How a state_dict's 5-D weights are laid out, None where it has none.

    Kernel sizes are taken to be 1 or 3, channel counts to be neither, as in all networks here.

    Raises:
        WeightsError: weights fit no layout, or not all the same one.
    """
    found: dict[Layout, str] = {}
    for key, weight in state.items():
        if weight.ndim != 5:
            continue
        fits = [name for name, axis in _KERNEL_AXIS.items() if all(s in (1, 3) for s in weight.shape[axis : axis + 3])]
        if len(fits) != 1:
            raise WeightsError(
                f"{key} has shape {tuple(weight.shape)}; expected (out, kz, ky, kx, in) of spconv 2, "
                f"(kz, ky, kx, in, out) of spconv 1 or (out, in, kz, ky, kx), with kernel sizes of 1 or 3"
            )
        found.setdefault(fits[0], key)
    if len(found) > 1:
        examples = ", ".join(f"{key} as in {name}" for name, key in found.items())
        raise WeightsError(f"weights of different layouts in one file ({examples}); was it converted in part?")
    return next(iter(found), None)


def to_spconv2_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict with its 5-D weights as (out, kz, ky, kx, in), whatever layout they came in.

    A file that was converted twice is told from a dense one by its first layer alone, whose shape then fits no network:
    load strictly afterwards.

    Raises:
        WeightsError: see `weight_layout`.
    """
    layout = weight_layout(state)
    if layout is None:
        return dict(state)
    order = _TO_SPCONV_2[layout]
    return {key: value.permute(order).contiguous() if value.ndim == 5 else value for key, value in state.items()}


def _triple(size: int | Triple) -> Triple:
    return (size, size, size) if isinstance(size, int) else size


def _flat(coords: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Row-major position in a grid of that shape."""
    flat = coords[:, 0]
    for axis in range(1, len(shape)):
        flat = flat * shape[axis] + coords[:, axis]
    return flat


def _unflat(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    coords = torch.empty(len(flat), len(shape), dtype=torch.int64, device=flat.device)
    for axis in reversed(range(1, len(shape))):
        coords[:, axis] = flat % shape[axis]
        flat = flat // shape[axis]
    coords[:, 0] = flat
    return coords


def _submanifold_map(x: SparseTensor, kernel: Triple) -> IndexMap:
    """Neighbours along x are neighbours in sorted order, so one search finds a whole row of the kernel.

    Only the second half of the kernel is searched: where j is i's neighbour on one side, i is j's on the other.
    """
    reach = [size // 2 for size in kernel]
    padded = [size + 2 * r for size, r in zip(x.shape, reach, strict=True)]  # no neighbour wraps around a border
    keys, rows = _flat(x.coords + x.coords.new_tensor([0, *reach]), (x.batch_size, *padded)).sort()
    fence = torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])
    rows = rows.int()
    centre = prod(kernel) // 2
    found = [(rows, centre, rows)]
    for dz, dy in product(range(reach[0] + 1), range(-reach[1], reach[1] + 1)):
        if (dz, dy) < (0, 0):
            continue
        first = -reach[2] if (dz, dy) > (0, 0) else 1
        wanted = keys + ((dz * padded[1] + dy) * padded[2] + first)
        if (dz, dy) > (0, 0):
            position = torch.searchsorted(keys, wanted, out_int32=True)
        else:
            position = torch.arange(1, len(keys) + 1, dtype=torch.int32, device=keys.device)
        for dx in range(first, reach[2] + 1):
            hit = fence.index_select(0, position) == wanted
            here = hit.nonzero()[:, 0]
            row, neighbour = rows.index_select(0, here), rows.index_select(0, position.index_select(0, here))
            place = (dz * kernel[1] + dy) * kernel[2] + dx
            found += [(neighbour, centre + place, row), (row, centre - place, neighbour)]
            position += hit
            wanted += 1
    inputs, places, outputs = zip(*found, strict=True)
    sizes = rows.new_tensor([len(row) for row in inputs])
    by_pair = rows.new_tensor(places).repeat_interleave(sizes)
    return _index_map(torch.cat(inputs), by_pair, torch.cat(outputs), prod(kernel), x.coords, x.shape, x.maps)


def _strided_map(x: SparseTensor, kernel: Triple, stride: Triple, padding: Triple) -> IndexMap:
    """An input site at i reaches output site o through kernel place k where i = o * stride - padding + k."""
    shape = _output_shape(x.shape, kernel, stride, padding)
    axes = []
    for axis in range(3):
        reached = x.coords[:, 1 + axis].int() + padding[axis]
        nearest, first = reached // stride[axis], reached % stride[axis]
        ways = []
        for back in range(-(-kernel[axis] // stride[axis])):
            site, place = nearest - back, first + back * stride[axis]
            ways.append((site, place, (site >= 0) & (site < shape[axis]) & (place < kernel[axis])))
        axes.append(ways)
    grids = x.coords[:, 0] * prod(shape)
    found = []
    for along_z, along_y, along_x in product(*axes):
        row = (along_z[2] & along_y[2] & along_x[2]).nonzero()[:, 0]
        site, place = (
            (along_z[i] * size[1] + along_y[i]) * size[2] + along_x[i] for i, size in enumerate((shape, kernel))
        )
        found.append((row.int(), place.index_select(0, row), (grids + site).index_select(0, row)))
    inputs, places, outputs = (torch.cat(part) for part in zip(*found, strict=True))
    keys, outputs = torch.unique(outputs, return_inverse=True)
    return _index_map(inputs, places, outputs.int(), prod(kernel), _unflat(keys, (x.batch_size, *shape)), shape, {})


def _output_shape(shape: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Triple:
    z, y, x = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, kernel, stride, padding, strict=True))
    if min(z, y, x) < 1:
        raise ValueError(f"a grid of {shape} is too small for kernel {kernel}, stride {stride}, padding {padding}")
    return z, y, x


def _index_map(
    inputs: Tensor,
    places: Tensor,
    outputs: Tensor,
    volume: int,
    coords: Tensor,
    shape: Triple,
    maps: dict[Any, Any],
) -> IndexMap:
    """From pairs in any order, all int32."""
    rows = len(coords)
    block = _BLOCK if coords.device.type == "cpu" else max(rows, 1)
    blocks = -(-rows // block)
    group = outputs // block * volume + places
    sort = (group * block + outputs % block).argsort()
    sizes = torch.bincount(group, minlength=blocks * volume).view(blocks, volume)
    ends = sizes.flatten().cumsum(0).view(blocks, volume)
    bounds = torch.cat([(ends - sizes), ends[:, -1:]], 1)
    row = outputs.index_select(0, sort)
    order = row.sort(stable=True).indices.int()
    order -= bounds[:, 0].int().repeat_interleave(sizes.sum(1))
    per_row = torch.bincount(row, minlength=rows)
    starts = per_row.cumsum(0) - per_row
    starts -= starts[::block].repeat_interleave(block)[:rows]
    return IndexMap(coords, shape, inputs.index_select(0, sort), block, bounds.tolist(), order, starts.int(), maps)


def _gather_multiply_add(features: Tensor, weight: Tensor, found: IndexMap) -> Tensor:
    """(output row, channel): for each block of rows, products of all its pairs, then their sums by row."""
    kernel = weight.flatten(1, 3).permute(1, 2, 0).contiguous()  # (place, in, out)
    output = features.new_zeros(len(found.coords), len(weight))
    if not len(found.inputs):
        return output
    gathered = features.new_empty(max(b - a for bound in found.bounds for a, b in pairwise(bound)), features.shape[1])
    products = features.new_empty(max(bound[-1] - bound[0] for bound in found.bounds), len(weight))
    for number, bound in enumerate(found.bounds):
        begin, end = bound[0], bound[-1]
        for place, (a, b) in enumerate(pairwise(bound)):
            if a < b:
                rows = torch.index_select(features, 0, found.inputs[a:b], out=gathered[: b - a])
                torch.mm(rows, kernel[place], out=products[a - begin : b - begin])
        block = slice(number * found.block, (number + 1) * found.block)
        output[block] = embedding_bag(found.order[begin:end], products, found.starts[block], mode="sum")
    return output

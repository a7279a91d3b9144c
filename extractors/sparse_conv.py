"""Sparse 3-D convolution (Graham et al. 2018) in plain PyTorch: gather, multiply, add, on CPU and GPU.

A site is a voxel that holds a feature; all others are zero. A submanifold convolution gives values at the sites it
was given; a strided one at every place that its kernel reaches from a site. Both are ordinary cross-correlations.

Weights have spconv 2's shape (out, kz, ky, kx, in). Inference only: run under `torch.no_grad` or `inference_mode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from extractors.errors import WeightsError

Triple = tuple[int, int, int]
Layout = Literal["spconv 2", "spconv 1", "dense"]

_TO_SPCONV_2: dict[Layout, tuple[int, ...]] = {
    "spconv 2": (0, 1, 2, 3, 4),
    "spconv 1": (4, 0, 1, 2, 3),
    "dense": (0, 2, 3, 4, 1),
}
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
    maps: dict[Any, IndexMap] = field(default_factory=dict, repr=False, compare=False)

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
    """Which input rows a convolution multiplies with which part of its kernel, and which output rows get the products.

    A pair is (input row, kernel place, output row). Pairs are grouped by kernel place, and by output row within.

    Attributes:
        coords, shape: the output's sites and grid.
        inputs: (pair,) input row of each pair.
        bounds: first pair of each kernel place, then the number of pairs.
        order: (pair,) the pairs grouped by output row.
        starts: (output row,) where each one's group starts in `order`.
        maps: index maps of the output's sites.
    """

    coords: Tensor
    shape: Triple
    inputs: Tensor
    bounds: list[int]
    order: Tensor
    starts: Tensor
    maps: dict[Any, IndexMap]


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
    """Sites along x are neighbours in sorted order, so one search finds a whole row of the kernel.

    Of a site given twice, neighbours see the first row, and each row its own centre.
    """
    reach = [size // 2 for size in kernel]
    padded = [size + 2 * r for size, r in zip(x.shape, reach, strict=True)]  # no neighbour wraps around a border
    keys = _flat(x.coords + x.coords.new_tensor([0, *reach]), (x.batch_size, *padded))
    keys, rows = keys.sort(stable=True)
    sites = len(keys)
    fence = torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])
    neighbour = keys.new_full((prod(kernel), sites), -1)
    place = 0
    for dz, dy in product(range(-reach[0], reach[0] + 1), range(-reach[1], reach[1] + 1)):
        wanted = keys + ((dz * padded[1] + dy) * padded[2] - reach[2])
        position = torch.searchsorted(keys, wanted)
        for _ in range(kernel[2]):
            hit = fence[position] == wanted
            neighbour[place, rows] = torch.where(hit, rows[position.clamp(max=max(sites - 1, 0))], -1)
            position += hit
            wanted = wanted + 1
            place += 1
    neighbour[place // 2] = torch.arange(sites, device=keys.device)
    return _grouped(neighbour, x.coords, x.shape, x.maps)


def _strided_map(x: SparseTensor, kernel: Triple, stride: Triple, padding: Triple) -> IndexMap:
    """An input site at i reaches output site o through kernel place k where i = o * stride - padding + k."""
    shape = _output_shape(x.shape, kernel, stride, padding)
    reached = x.coords[:, 1:] + x.coords.new_tensor(padding)
    steps = x.coords.new_tensor(stride)
    nearest, first = reached // steps, reached % steps
    outputs, places, inputs = [], [], []
    for back in product(*(range((k + s - 1) // s) for k, s in zip(kernel, stride, strict=True))):
        shift = x.coords.new_tensor(back)
        site, place = nearest - shift, first + shift * steps
        inside = (site >= 0) & (site < x.coords.new_tensor(shape)) & (place < x.coords.new_tensor(kernel))
        row = inside.all(1).nonzero()[:, 0]
        outputs.append(_flat(torch.cat([x.coords[row, :1], site[row]], 1), (x.batch_size, *shape)))
        places.append(_flat(place[row], kernel))
        inputs.append(row)
    keys, row = torch.unique(torch.cat(outputs), return_inverse=True)
    neighbour = keys.new_full((prod(kernel), len(keys)), -1)
    neighbour[torch.cat(places), row] = torch.cat(inputs)
    return _grouped(neighbour, _unflat(keys, (x.batch_size, *shape)), shape, {})


def _output_shape(shape: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Triple:
    z, y, x = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, kernel, stride, padding, strict=True))
    return z, y, x


def _grouped(neighbour: Tensor, coords: Tensor, shape: Triple, maps: dict[Any, IndexMap]) -> IndexMap:
    """From (kernel place, output row) -> input row, -1 for none."""
    present = neighbour >= 0
    pair = present.flatten().cumsum(0).view(present.shape) - 1
    per_row = present.sum(0)
    bounds = [0, *present.sum(1).cumsum(0).tolist()]
    starts = per_row.cumsum(0) - per_row
    return IndexMap(coords, shape, neighbour[present], bounds, pair.mT[present.mT], starts, maps)


def _gather_multiply_add(features: Tensor, weight: Tensor, found: IndexMap) -> Tensor:
    out_channels, in_channels = weight.shape[0], weight.shape[-1]
    places = weight.reshape(out_channels, -1, in_channels).permute(1, 2, 0)
    gathered = features.index_select(0, found.inputs)
    products = features.new_empty(len(gathered), out_channels)
    for place, (start, end) in enumerate(zip(found.bounds, found.bounds[1:], strict=False)):
        if end > start:
            torch.mm(gathered[start:end], places[place], out=products[start:end])
    if not len(products):
        return features.new_zeros(len(found.coords), out_channels)
    return nn.functional.embedding_bag(found.order, products, found.starts, mode="sum")

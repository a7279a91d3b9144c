"""PointNet++ (Qi et al. 2017) in plain PyTorch: grouping, interpolation and the two layers made of them.

The index rules are those of the CUDA kernels that VoteNet and mmcv ship, ties included, so that official
checkpoints see the neighbourhoods they were trained on. Squared distances are `(dx*dx + dy*dy) + dz*dz` in float32
without fused multiply-add. Features are channels-last (batch, point, channel) throughout; metres, any frame.

Inference only: BatchNorm always uses its running statistics and is folded into the linear maps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

_CANDIDATES = 1 << 22  # pairs that ball_query tests at once: bounds its memory to about 300 MB
_BLOCK = 512  # points that it tests at once where it goes through all of them
_CROWDED = 12  # it does where the cells around a centre hold more than a twelfth of them
_ROWS = 8192  # rows of a shared MLP at once on CPU: keeps its activations in cache


# ---------------------------------------------------------------- grouping


def ball_query(xyz: Tensor, centres: Tensor, radius: float, limit: int) -> tuple[Tensor, Tensor]:
    """The first `limit` points, by ascending index, nearer to each centre than `radius`.

    A hit is d² < r², strictly, both in float32 (mmcv also accepts d² = 0, which is the same for radius > 0). Missing
    neighbours repeat the first hit; a centre without a hit gets index 0 throughout, as in the kernels.

    Points are sorted into cells of the radius's size and only the 27 cells around a centre are tested, unless these
    hold a large part of the points anyway.

    Args:
        xyz: (batch, point, 3) float32, finite.
        centres: (batch, centre, 3) float32, finite.
        radius: metres, above 0.
        limit: neighbours per centre.

    Returns:
        (batch, centre, limit) int64 indices, and (batch, centre) int64 how many of them are hits.
    """
    batch, points, _ = xyz.shape
    per_scan = centres.shape[1]
    r2 = float(np.float32(radius) * np.float32(radius))
    order, starts, ends = cells_around(xyz, centres, radius)
    tests = (ends - starts).sum(1)
    if int(tests.sum()) * _CROWDED > len(tests) * points:
        found = [_scan_in_order(*scan, r2, limit) for scan in zip(xyz, centres, strict=True)]
        neighbours, hits = (torch.stack(parts) for parts in zip(*found, strict=True))
    else:
        flat = _scan_cells(xyz.reshape(-1, 3), centres.reshape(-1, 3), r2, limit, order, starts, ends)
        neighbours, hits = flat[0].view(batch, per_scan, limit) % points, flat[1].view(batch, per_scan)
    padding = torch.arange(limit, device=xyz.device) >= hits[..., None]
    return torch.where(padding, neighbours[..., :1], neighbours), hits


def _scan_in_order(xyz: Tensor, centres: Tensor, r2: float, limit: int) -> tuple[Tensor, Tensor]:
    """Test all points by ascending index until each centre has enough: for crowds, where that is soon.

    Returns:
        (centre, limit) int64 hits, zeros behind them, and (centre,) int64 how many.
    """
    neighbours = torch.zeros(len(centres), limit, dtype=torch.int64, device=xyz.device)
    hits = torch.zeros(len(centres), dtype=torch.int64, device=xyz.device)
    unfilled = torch.arange(len(centres), device=xyz.device)
    for begin in range(0, len(xyz), _BLOCK):
        x, y, z = (xyz[begin : begin + _BLOCK] - centres[unfilled, None]).square_().unbind(-1)
        hit = (x + y).add_(z) < r2
        place = hits[unfilled, None] + hit.cumsum(1) - 1
        row, column = (hit & (place < limit)).nonzero(as_tuple=True)
        neighbours[unfilled[row], place[row, column]] = column + begin
        hits[unfilled] = (place[:, -1] + 1).clamp(max=limit)
        unfilled = unfilled[hits[unfilled] < limit]
        if len(unfilled) == 0:
            break
    return neighbours, hits


def _scan_cells(
    xyz: Tensor, centres: Tensor, r2: float, limit: int, order: Tensor, starts: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Test the points of the cells around each centre (see `cells_around`); all scans of a batch in one row of points.

    Returns:
        As `_scan_in_order`.
    """
    points = len(xyz)
    neighbours = torch.zeros(len(centres), limit, dtype=torch.int64, device=xyz.device)
    hits = torch.zeros(len(centres), dtype=torch.int64, device=xyz.device)
    chunk_of = (ends - starts).sum(1).cumsum(0).div(_CANDIDATES, rounding_mode="floor")
    for size, begin in _runs(chunk_of):
        s, e = starts[begin : begin + size], ends[begin : begin + size]
        position, cell = expand_ranges(s.reshape(-1), (e - s).reshape(-1))
        candidate, row = order[position], cell.div_(s.shape[1], rounding_mode="floor")
        difference = xyz.index_select(0, candidate).sub_(centres.index_select(0, row + begin))
        x, y, z = difference.square_().unbind(1)
        hit = ((x + y).add_(z) < r2).nonzero().squeeze(1)
        by_index = (row[hit] * points + candidate[hit]).sort().values  # ascending index within each centre
        row = by_index.div(points, rounding_mode="floor")
        found = torch.bincount(row, minlength=size)
        place = torch.arange(len(row), device=xyz.device) - (found.cumsum(0) - found)[row]
        keep = (place < limit).nonzero().squeeze(1)
        neighbours[begin + row[keep], place[keep]] = by_index[keep] - row[keep] * points
        hits[begin : begin + size] = found.clamp(max=limit)
    return neighbours, hits


def cells_around(xyz: Tensor, centres: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sort points into cells; give for each centre 9 runs (start, end) of that order, 3 cells along z each.

    Returns:
        order (batch * point,), and start and end (batch * centre, 9), all int64.
    """
    batch = len(xyz)
    exact = xyz.double()
    low = exact.amin((0, 1))
    extent = float((exact.amax((0, 1)) - low).max())
    size = max(radius * 1.0001, extent / (1 << 18))  # a little over the radius; keys stay below 2^63
    of_points = torch.floor((exact - low) / size).long() + 2
    cells = of_points.amax((0, 1)) + 3
    of_centres = torch.floor((centres.double() - low) / size)
    of_centres = torch.minimum(of_centres.clamp(min=-1).long() + 2, cells - 2).clamp(min=1)

    def keys(index: Tensor) -> Tensor:
        scan = torch.arange(batch, device=xyz.device)[:, None]
        return ((scan * cells[0] + index[..., 0]) * cells[1] + index[..., 1]) * cells[2] + index[..., 2]

    sorted_keys, order = keys(of_points).reshape(-1).sort()
    steps = torch.tensor([-1, 0, 1], device=xyz.device)
    columns = ((steps[:, None] * cells[1] + steps) * cells[2]).reshape(-1)
    middle = keys(of_centres).reshape(-1, 1) + columns
    return order, torch.searchsorted(sorted_keys, middle - 1), torch.searchsorted(sorted_keys, middle + 2)


def _runs(values: Tensor) -> list[tuple[int, int]]:
    """(length, start) of each run of equal neighbours."""
    lengths = torch.unique_consecutive(values, return_counts=True)[1].tolist()
    return list(zip(lengths, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))


def expand_ranges(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the ranges start .. start + length; also the number of the range each entry is from."""
    run = torch.repeat_interleave(lengths)
    before = lengths.cumsum(0) - lengths
    return torch.arange(len(run), device=starts.device) + (starts - before)[run], run


def three_nn(unknown: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The three known points nearest to each unknown one, nearest first; the lower index first where they tie.

    Args:
        unknown: (batch, n, 3) float32.
        known: (batch, m, 3) float32, m >= 3.

    Returns:
        distance (batch, n, 3) float32, metres (not squared), and index (batch, n, 3) int64.
    """
    x, y, z = (unknown[:, :, None] - known[:, None]).unbind(-1)
    squared = (x * x + y * y) + z * z
    distances, indices = [], []
    for _ in range(3):  # topk promises no order among equals, min does
        nearest, index = squared.min(2, keepdim=True)
        squared = squared.scatter(2, index, torch.inf)
        distances.append(nearest)
        indices.append(index)
    return torch.cat(distances, 2).sqrt(), torch.cat(indices, 2)


def three_interpolate(features: Tensor, distance: Tensor, index: Tensor) -> Tensor:
    """Average the features of three neighbours, weighted by 1 / (distance + 1e-8).

    Args:
        features: (batch, m, channel).
        distance, index: (batch, n, 3), from `three_nn`.

    Returns:
        (batch, n, channel).
    """
    weight = 1 / (distance + 1e-8)
    weight = weight / weight.sum(2, keepdim=True)
    scan = torch.arange(len(features), device=features.device)[:, None, None]
    return (features[scan, index] * weight[..., None]).sum(2)


# ---------------------------------------------------------------- layers


class BatchNorm(nn.Module):
    """BatchNorm under the key `bn`, as the official modules nest it."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)


class ConvBatchNorm(nn.Module):
    """1x1 convolution without bias and BatchNorm: keys `conv.weight`, `bn.bn.*`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn = BatchNorm(outputs)

    def folded(self) -> tuple[Tensor, Tensor]:
        """One linear map: weight (outputs, inputs) and bias (outputs,)."""
        return fold(self.conv, self.bn.bn)


def fold(conv: nn.Conv1d | nn.Conv2d, bn: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """A 1x1 convolution and the BatchNorm behind it (running statistics) as weight (out, in) and bias (out,)."""
    assert bn.running_mean is not None
    assert bn.running_var is not None
    scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
    shift = -bn.running_mean if conv.bias is None else conv.bias - bn.running_mean
    return conv.weight.flatten(1) * scale[:, None], shift * scale + bn.bias


class SharedMLP(nn.Sequential):
    """1x1 convolutions with BatchNorm and ReLU: keys `layer0`, `layer1` ..."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(pairwise(channels)):
            self.add_module(f"layer{i}", ConvBatchNorm(inputs, outputs))

    def folded(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each layer."""
        return [layer.folded() for layer in self.children() if isinstance(layer, ConvBatchNorm)]

    def forward(self, rows: Tensor) -> Tensor:
        """(row, inputs) -> (row, outputs), ReLU behind every layer."""
        for weight, bias in self.folded():
            rows = torch.addmm(bias, rows, weight.T).relu_()
        return rows


class SetAbstraction(nn.Module):
    """Sample centres, group their neighbours, and pool a shared MLP over each group.

    A group is [(neighbour - centre) / radius, features]. The first layer is linear in both, so its feature part is
    computed once per point rather than once per neighbour; neighbours that only repeat the first hit are left out,
    which a maximum doesn't notice.

    Args:
        count: centres.
        radius: metres.
        limit: neighbours per centre.
        channels: of the MLP, its first entry without the three coordinates.
    """

    def __init__(self, count: int, radius: float, limit: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.count, self.radius, self.limit = count, radius, limit
        self.mlp_module = SharedMLP(channels[0] + 3, *channels[1:])

    def forward(self, xyz: Tensor, features: Tensor, centres: Tensor) -> Tensor:
        """Features of the centres.

        Args:
            xyz: (batch, point, 3) metres.
            features: (batch, point, channel).
            centres: (batch, count, 3) metres.

        Returns:
            (batch, count, last of channels).
        """
        batch, points, _ = xyz.shape
        neighbours, hits = ball_query(xyz, centres, self.radius, self.limit)
        neighbours = (neighbours + torch.arange(batch, device=xyz.device)[:, None, None] * points).flatten(0, 1)
        flat_xyz, flat_centres = xyz.reshape(-1, 3), centres.reshape(-1, 3)
        (weight, bias), *inner = self.mlp_module.folded()
        per_point = torch.addmm(bias, features.reshape(batch * points, -1), weight[:, 3:].T)
        to_first = weight[:, :3].T.contiguous()
        pooled = features.new_empty(len(flat_centres), inner[-1][0].shape[0])
        for centre, width in self._groups(hits.reshape(-1)):
            index = neighbours[centre, :width].reshape(-1)
            offset = flat_xyz.index_select(0, index).view(-1, width, 3).sub_(flat_centres[centre, None])
            rows = per_point.index_select(0, index).addmm_(offset.div_(self.radius).view(-1, 3), to_first)
            for layer_weight, layer_bias in inner:
                rows = torch.addmm(layer_bias, rows.relu_(), layer_weight.T)
            pooled[centre] = rows.view(len(centre), width, -1).amax(1).relu_()  # ReLU and maximum commute
        return pooled.view(batch, -1, pooled.shape[1])

    def _groups(self, hits: Tensor) -> list[tuple[Tensor, int]]:
        """Centres with about as many hits together, and that many: (centre indices, neighbours to use)."""
        if hits.device.type != "cpu":
            return [(torch.arange(len(hits), device=hits.device), self.limit)]
        order = hits.argsort(descending=True, stable=True)
        widths = hits[order].clamp(min=1).tolist()
        groups, begin = [], 0
        while begin < len(widths):
            end = min(begin + max(_ROWS // widths[begin], 1), len(widths))
            groups.append((order[begin:end], widths[begin]))
            begin = end
        return groups


class FeaturePropagation(nn.Module):
    """Carry features from few points to many by interpolation, then a shared MLP over [interpolated, skip]."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        self.mlp = SharedMLP(*channels)

    def forward(self, unknown: Tensor, known: Tensor, skip: Tensor, features: Tensor) -> Tensor:
        """unknown (batch, n, 3), known (batch, m, 3), skip (batch, n, c), features (batch, m, d) -> (batch, n, out)."""
        interpolated = three_interpolate(features, *three_nn(unknown, known))
        rows = torch.cat([interpolated, skip], 2)
        return self.mlp(rows.flatten(0, 1)).view(*rows.shape[:2], -1)

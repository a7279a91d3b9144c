"""CenterPoint's sparse encoder against the same network in spconv, on one CPU thread each, and where our time goes.

spconv's CPU build is wrong with more than one thread; with one the maps agree (checked, 1e-5). Inputs: a real key frame
(--data; else made up) and ten sweeps made from it, at the voxel cap. Both start from voxels and build their index maps
anew each time. `all_threads_s` is ours on all cores: it only means something where no other program wants them.

Shares are of processor time on one thread: `index maps` finds neighbours, `gather` copies input rows, `multiply` is
matrix multiplication, `add` sums products per site, `rest` is normalisation, ReLU, shortcuts and the dense map.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # spconv's own loops obey nothing else

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor, nn
from voxelize import MAX_POINTS, MAX_VOXELS, RANGE, SIZE, ten_sweeps

from extractors import sparse_conv
from extractors.checkpoint import seeded_init
from extractors.sparse_conv import SparseTensor
from extractors.sparse_encoder import SparseEncoder
from extractors.voxels import voxelize

OPERATIONS = (
    (sparse_conv, "_submanifold_map", "index maps"), (sparse_conv, "_strided_map", "index maps"),
    (torch, "index_select", "gather"), (torch, "mm", "multiply"), (sparse_conv, "embedding_bag", "add"),
)  # fmt: skip


def spconv_encoder(state: dict[str, Tensor], shape: tuple[int, int, int]) -> Callable[[Tensor, Tensor], Tensor]:
    """(voxel, 5) features and (voxel, 4) int32 coordinates to the map, by spconv's layers under the same weights."""
    import spconv.pytorch as spconv

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            for number in (1, 2):
                self.add_module(f"conv{number}", spconv.SubMConv3d(channels, channels, 3, padding=1, bias=False))
                self.add_module(f"bn{number}", nn.BatchNorm1d(channels, eps=1e-3))

        def forward(self, x: Any) -> Any:
            y = self.conv1(x)
            y = self.conv2(y.replace_feature(self.bn1(y.features).relu_()))
            return y.replace_feature((self.bn2(y.features) + x.features).relu_())

    def down(cin: int, cout: int, *rule: Any) -> nn.Module:
        conv = spconv.SparseConv3d(cin, cout, *rule, bias=False)
        return spconv.SparseSequential(conv, nn.BatchNorm1d(cout, eps=1e-3), nn.ReLU())

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = spconv.SubMConv3d(5, 16, 3, padding=1, bias=False, indice_key="subm1")
            self.conv_input = spconv.SparseSequential(first, nn.BatchNorm1d(16, eps=1e-3), nn.ReLU())
            rules = ((16, 1), (32, 1), (64, (0, 1, 1)))
            layers = [nn.Sequential(Block(c), Block(c), down(c, 2 * c, 3, 2, padding)) for c, padding in rules]
            layers.append(nn.Sequential(Block(128), Block(128)))
            self.encoder_layers = nn.ModuleDict({f"encoder_layer{i}": layer for i, layer in enumerate(layers, 1)})
            self.conv_out = down(128, 128, (3, 1, 1), (2, 1, 1), 0)

        def forward(self, features: Tensor, coords: Tensor) -> Tensor:
            x = self.conv_input(spconv.SparseConvTensor(features, coords, list(shape), 1))
            for layer in self.encoder_layers.values():
                x = layer(x)
            return self.conv_out(x).dense().flatten(1, 2)

    encoder = Encoder().eval()
    encoder.load_state_dict(state)
    return encoder


def operations(stages: tuple[SparseTensor, ...]) -> float:
    """Floating-point operations of all convolutions but the first, in 1e9."""
    layers = [layer for layer in SparseEncoder().modules() if isinstance(layer, sparse_conv._SparseConv)][1:]
    total = 0
    for layer in layers:
        out_channels, in_channels = layer.weight.shape[0], layer.weight.shape[-1]
        stage = next(s for s in stages if s.features.shape[1] == in_channels)
        kind = "submanifold" if isinstance(layer, sparse_conv.SubMConv3d) else "strided"
        pairs = next(len(m.inputs) for key, m in stage.maps.items() if key[:2] == (kind, layer.kernel))
        total += 2 * pairs * in_channels * out_channels
    return total / 1e9


@torch.inference_mode()
def main() -> None:
    options = harness.options(
        __doc__,
        ("--data", {"type": Path, "default": Path("../shared/data"), "help": "folder with nuscenes/*LIDAR_TOP*.bin"}),
    )
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(1)
    encoder = SparseEncoder().eval()
    seeded_init(encoder, 0)
    missing = []
    peer = None
    try:
        peer = spconv_encoder(encoder.state_dict(), encoder.shape)
    except ImportError as error:
        missing.append(f"spconv: {error}")

    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for name, scans in {"key frame": 1, "ten sweeps": 10}.items():
        points, source = ten_sweeps(options.data, scans)
        voxels = voxelize(points, SIZE, RANGE, MAX_POINTS, MAX_VOXELS)
        features = torch.from_numpy(voxels.mean)
        coords = torch.from_numpy(np.insert(voxels.coords, 0, 0, 1))

        def ours(features: Tensor = features, coords: Tensor = coords) -> tuple[Tensor, tuple[SparseTensor, ...]]:
            return encoder(SparseTensor(features, coords.long(), encoder.shape))

        contenders: dict[str, Callable[[], Any]] = {"ours": ours}
        bev, stages = ours()
        if peer is not None:
            theirs = peer(features, coords)
            difference = float((bev - theirs).norm() / theirs.norm())
            assert difference < 1e-5, f"{name}: maps differ by {difference:.1e}"
            contenders["spconv"] = partial(peer, features, coords)
        repeats = 3 if options.quick else 7
        medians = harness.compare(contenders, repeats)
        if peer is not None:
            ratios["ours_vs_spconv" if scans == 1 else "ours_vs_spconv_ten_sweeps"] = (
                medians["spconv"] / medians["ours"]
            )
        parts = harness.shares(ours, 2, OPERATIONS)
        work = operations(stages)
        figures[name] = {
            "seconds": medians,
            "shares": parts,
            "gflop": work,
            "multiply_gflop_per_s": work / (parts["multiply"] * medians["ours"]),
            "points": len(points),
            "points_from": source,
            "sites": [len(stage.coords) for stage in stages],
        }
        if scans == 1:  # the larger input tells nothing more, and takes minutes where other programs hold the cores
            torch.set_num_threads(threads)
            figures[name]["all_threads_s"] = harness.compare({"ours, all threads": ours}, 1)["ours, all threads"]
            torch.set_num_threads(1)
    harness.emit("sparse", ratios, {**figures, "missing": missing, **harness.versions("spconv")})


if __name__ == "__main__":
    main()

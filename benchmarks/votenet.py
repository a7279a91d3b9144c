"""VoteNet on the CPU: scans per second, and where the time of a forward pass goes.

The peer is the same network written plainly in PyTorch: every pick of the sampling goes over all points, the ball query
over all pairs, and the shared MLPs are convolutions over whole padded groups. Both see the same points and weights, on
one thread; `all_threads_scans_per_s` is ours on as many as PyTorch takes by default.
Shares are of processor time on one thread: `matrix` is matrix multiplication, the rest by operation.
"""

from __future__ import annotations

from unittest import mock

import harness
import numpy as np
import torch
from torch import Tensor

from extractors import pointnet2, votenet_network
from extractors.checkpoint import seeded_init
from extractors.pointnet2 import SetAbstraction
from extractors.votenet_network import VoteNetwork

OPERATIONS = (
    (votenet_network, "furthest_point_sample", "sampling"), (pointnet2, "ball_query", "ball query"),
    (pointnet2, "three_nn", "three nearest"), (pointnet2, "three_interpolate", "interpolation"),
    (SetAbstraction, "forward", "gather and pool"), (torch, "addmm", "matrix"), (Tensor, "addmm_", "matrix"),
)  # fmt: skip


def room(points: int, seed: int = 0) -> Tensor:
    """(1, point, 7): surfaces of a 6 x 7 m room without ceiling and 20 boxes, evenly covered; colours at random."""
    rng = np.random.RandomState(seed)
    boxes = [(np.zeros(3), np.array([6, 7, 2.6]))]
    for _ in range(20):
        size = rng.uniform(0.4, 1.8, 3) * [1, 1, 0.6]
        boxes.append((np.append(rng.uniform([0, 0], [6, 7] - size[:2]), 0), size))
    faces = [(low, size, axis, side) for low, size in boxes for axis in range(3) for side in (0, 1)]
    del faces[5]  # the ceiling
    areas = np.array([np.prod(np.delete(size, axis)) for _, size, axis, _ in faces])
    surface = []
    for low, size, axis, side in (faces[i] for i in rng.choice(len(faces), points, p=areas / areas.sum())):
        point = rng.rand(3)
        point[axis] = side
        surface.append(low + point * size)
    xyz = np.array(surface) + rng.randn(points, 3) * 0.005
    values = np.concatenate([xyz, rng.uniform(-0.4, 0.6, (points, 3)), xyz[:, 2:]], 1)
    return torch.from_numpy(values.astype(np.float32))[None]


def plain_sample(xyz: Tensor, count: int, *, lanes: int = 512, skip_origin: bool = False) -> tuple[Tensor, int]:
    """Sampling without pruning, and without the tie rule and the near-origin rule."""
    distance = torch.full(xyz.shape[:2], 1e10)
    picked = torch.zeros(len(xyz), count, dtype=torch.int64)
    for k in range(1, count):
        last = xyz.gather(1, picked[:, k - 1, None, None].expand(-1, -1, 3))
        distance = torch.minimum(distance, (xyz - last).square().sum(2))
        picked[:, k] = distance.argmax(1)
    return picked, 0


def plain_layer(self: SetAbstraction, xyz: Tensor, features: Tensor, centres: Tensor) -> Tensor:
    """A set abstraction by all pairs and convolutions over padded groups; one scan."""
    points = xyz.shape[1]
    index = []
    for some in centres[0].split(128):
        near = (some[:, None] - xyz[0]).square().sum(2) < self.radius**2
        first = torch.where(near, torch.arange(points), points).topk(self.limit, largest=False).values
        index.append(torch.where(first == points, first[:, :1].remainder(points), first))
    group = torch.cat(index)
    offset = (xyz[0][group] - centres[0][:, None]) / self.radius
    rows = torch.cat([offset, features[0][group]], 2).permute(2, 0, 1)[None]
    for layer in self.mlp_module.children():
        rows = layer.bn.bn(layer.conv(rows)).relu()
    return rows.amax(3).mT


def plain(network: VoteNetwork, points: Tensor) -> Tensor:
    with (
        mock.patch.object(votenet_network, "furthest_point_sample", plain_sample),
        mock.patch.object(SetAbstraction, "forward", plain_layer),
    ):
        return network(points, "vote_fps")["proposal_raw"]


def main() -> None:
    options = harness.options(__doc__, ("--scan", {"help": "a float32 x y z r g b file in place of the made-up room"}))
    points = room(40_000)
    if options.scan:
        raw = np.fromfile(options.scan, np.float32).reshape(-1, 6)
        chosen = np.random.RandomState(0).choice(len(raw), 40_000, replace=len(raw) < 40_000)
        columns = [raw[chosen, :3], (raw[chosen, 3:] - [109.8, 97.2, 83.8]) / 256, raw[chosen, 2:3]]
        points = torch.from_numpy(np.concatenate(columns, 1).astype(np.float32))[None]
    network = VoteNetwork(4).eval()
    seeded_init(network, 0)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    difference = (plain(network, points) - network(points, "vote_fps")["proposal_raw"]).norm()
    medians = harness.compare(
        {"ours": lambda: network(points, "vote_fps"), "plain": lambda: plain(network, points)},
        repeats=3 if options.quick else 9,
    )
    repeats = 5 if options.quick else 20
    parts = harness.shares(lambda: network(points, "vote_fps"), repeats, OPERATIONS, outer=("gather and pool",))
    torch.set_num_threads(threads)
    parallel = harness.compare({"all threads": lambda: network(points, "vote_fps")}, repeats=9)["all threads"]
    others = {name: share for name, share in parts.items() if name != "matrix"}
    harness.emit(
        "votenet",
        ratios={"ours_vs_plain": medians["plain"] / medians["ours"]},
        figures={
            "scans_per_s": 1 / medians["ours"],
            "plain_scans_per_s": 1 / medians["plain"],
            "all_threads_scans_per_s": 1 / parallel,
            "all_threads": threads,
            "points": points.shape[1],
            "shares": parts,
            "sampling_and_grouping": parts["sampling"] + parts["ball query"],
            "largest_besides_matrix": max(others, key=lambda name: others[name]),
            "largest_besides_matrix_share": max(others.values()),
            "relative_difference": difference / network(points, "vote_fps")["proposal_raw"].norm(),
        },
    )


if __name__ == "__main__":
    main()

"""MSMDFusion's multi-modality encoder (Jiao et al. 2023): LiDAR voxels and painted image voxels, fused at four scales.

At each scale the voxels of both kinds are split into those that only LiDAR has, only the images have, and both have;
each group is gated or convolved its own way, and their union goes through a residual block. One frame at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.point_sampling import furthest_point_sample
from extractors.pointnet2 import ball_query, cells_around, expand_ranges
from extractors.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d, Triple, sparse_add
from extractors.sparse_encoder import BasicBlock, ConvNormReLU

Pairing = Literal["exact", "legacy_float"]

IMAGE_CHANNELS = 64
REPRESENTATIVES = 2048  # more lonely image voxels than this are searched by clusters
_LANES = 1024  # of mmcv's furthest point sampling, which decides ties
_CANDIDATES = 1 << 20  # voxels compared at once


@dataclass(frozen=True)
class Stage:
    """One scale.

    Attributes:
        channels: of a LiDAR voxel.
        out: channels that it hands down.
        kernel, stride, padding: of the convolution that does.
        reach: how far the LiDAR voxel may be whose gate an image voxel takes; voxels of this scale.
        radius, cluster: how far and how many voxels a representative stands for.
    """

    channels: int
    out: int
    kernel: Triple
    stride: Triple
    padding: Triple
    reach: float
    radius: float
    cluster: int


STAGES = (
    Stage(16, 96, (3, 3, 3), (2, 2, 2), (1, 1, 1), 13.3, 6, 200),
    Stage(32, 128, (3, 3, 3), (2, 2, 2), (1, 1, 1), 6.6, 3, 100),
    Stage(64, 192, (3, 3, 3), (2, 2, 2), (0, 1, 1), 3.3, 2, 50),
    Stage(128, 192, (3, 1, 1), (2, 1, 1), (0, 0, 0), 1.6, 1, 25),
)


class ModalityFusion(nn.Module):
    """The encoder; attribute names give the official keys (`multimodal_middle_encoder.*`).

    The official checkpoints hold two groups of blocks that nothing calls, `grouped_sp_conv_blocks_2D` and `_mix`.
    """

    def __init__(self) -> None:
        super().__init__()
        mixed = [stage.channels + IMAGE_CHANNELS for stage in STAGES]
        self.grouped_sp_conv_blocks_3D = _by_stage(ConvNormReLU(SubMConv3d(s.channels, s.channels)) for s in STAGES)
        self.grouped_sp_conv_blocks_2D = _by_stage(
            ConvNormReLU(SubMConv3d(IMAGE_CHANNELS, IMAGE_CHANNELS)) for _ in STAGES
        )
        self.grouped_sp_conv_blocks_mix = _by_stage(BasicBlock(channels) for channels in mixed)
        self.gate_control = nn.ModuleList(_gate(stage.channels) for stage in STAGES)
        self.cross_gate_control = nn.ModuleList(_gate(stage.channels) for stage in STAGES)
        self.aggregation_blocks = _by_stage(BasicBlock(channels) for channels in mixed)
        self.downscale_blocks = _by_stage(
            ConvNormReLU(SparseConv3d(channels, stage.out, stage.kernel, stage.stride, stage.padding))
            for channels, stage in zip(mixed, STAGES, strict=True)
        )

    def forward(
        self,
        lidar: Sequence[SparseTensor],
        image: Sequence[SparseTensor],
        embeddings: Sequence[Tensor],
        pairing: Pairing = "exact",
    ) -> Tensor:
        """Fuse the voxels of one frame.

        Args:
            lidar: the first four outputs of the LiDAR encoder.
            image: voxels of painted points on the same grids, 64 channels, at least one each.
            embeddings: (1, channels) for each scale: stands for the LiDAR voxel of image voxels that have none near.
            pairing: see `pair_voxels`.

        Returns:
            (1, 384, y, x) map; channel c * 2 + z.
        """
        below: SparseTensor | None = None
        for number, (stage, down) in enumerate(zip(STAGES, self.downscale_blocks.values(), strict=True)):
            union = self._unite(number, stage, lidar[number], image[number], embeddings[number], pairing)
            fused = _sum_of_repeats(self.aggregation_blocks[f"stage_{number + 1}"](union))
            below = down(fused if below is None else sparse_add(fused, below))
        assert below is not None
        return below.dense().flatten(1, 2)

    def _unite(
        self, number: int, stage: Stage, lidar: SparseTensor, image: SparseTensor, embedding: Tensor, pairing: Pairing
    ) -> SparseTensor:
        of_lidar, of_image = pair_voxels(lidar.coords[:, 1:], image.coords[:, 1:], pairing)
        lonely_lidar, lonely_image = _others(lidar, of_lidar), _others(image, of_image)

        beneath = lidar.features[of_lidar]
        gated = image.features[of_image] * self.gate_control[number](beneath)
        both = torch.cat([beneath, gated], 1)

        only_lidar = self.grouped_sp_conv_blocks_3D[f"stage_{number + 1}"](
            SparseTensor(lidar.features[lonely_lidar], lidar.coords[lonely_lidar], lidar.shape)
        )
        partner = find_partners(image.coords[lonely_image, 1:], lidar.coords[:, 1:], stage)
        near = torch.cat([lidar.features, embedding])[partner]  # -1, none, is the embedding
        only_image = image.features[lonely_image] * self.cross_gate_control[number](near)

        features = [
            F.pad(only_lidar.features, (0, IMAGE_CHANNELS)),
            F.pad(only_image, (stage.channels, 0)),
            both,
        ]
        # Where the two differ (legacy pairs), the image's voxel says where the pair is.
        coords = [only_lidar.coords, image.coords[lonely_image], image.coords[of_image]]
        for group in (only_image, both):
            if not len(group):  # the official code then puts zeros into the grid's first voxel
                features.append(both.new_zeros(1, stage.channels + IMAGE_CHANNELS))
                coords.append(image.coords.new_zeros(1, 4))
        return SparseTensor(torch.cat(features), torch.cat(coords), lidar.shape)


def pair_voxels(first: Tensor, second: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Rows of voxels that two sets share.

    `legacy_float` compares z * 1e6 + y * 1e3 + x in float32, as the official code does. That is no key: at the finest
    scale x and y go to 1439, and above 2^24 the last bits are lost, so that some voxels of other places are paired.

    Args:
        first, second: (n, 3) and (m, 3) int64 z, y, x; no voxel twice within one.

    Returns:
        Rows of `first` and of `second`; the i-th of equal keys meets the i-th of the other side's.
    """
    keys, rows = ranked(_keys(first, pairing))
    other_keys, other_rows = ranked(_keys(second, pairing))
    rank = torch.arange(len(other_keys), device=other_keys.device) - torch.searchsorted(other_keys, other_keys)
    partner = torch.searchsorted(keys, other_keys) + rank
    fence = torch.cat([keys, keys.new_full((1,), -1)])  # no key is negative
    hit = fence[partner.clamp(max=len(keys))] == other_keys
    return rows[partner[hit]], other_rows[hit]


def ranked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys sorted, and their rows; equal keys by row (the official sort leaves them in an order of the machine's)."""
    found = keys.sort(stable=True)
    return found.values, found.indices


def find_partners(queries: Tensor, voxels: Tensor, stage: Stage) -> Tensor:
    """The LiDAR voxel near each image voxel.

    Up to 2048 image voxels take their nearest. Of more, 2048 are drawn by furthest point sampling to stand for their
    clusters: the first `cluster` image voxels, by row, within `radius`. Where clusters overlap, the later drawn one
    with a partner counts.

    Args:
        queries, voxels: (n, 3) and (m, 3) int64 z, y, x.

    Returns:
        (n,) int64 rows of `voxels`, -1 for none within reach.
    """
    if len(queries) <= REPRESENTATIVES:
        return nearest(queries, voxels, stage.reach)
    places = queries.float()[None]
    drawn = furthest_point_sample(places, REPRESENTATIVES, lanes=_LANES)[0][0]
    partner = nearest(queries[drawn], voxels, stage.reach)
    drawn, partner = drawn[partner >= 0], partner[partner >= 0]
    if not len(drawn):
        return queries.new_full((len(queries),), -1)
    members, _ = ball_query(places, places[:, drawn], stage.radius, stage.cluster)
    owner = queries.new_full((len(queries),), -1)
    number = torch.arange(len(drawn), device=queries.device).repeat_interleave(stage.cluster)
    owner.scatter_reduce_(0, members.flatten(), number, "amax")
    return torch.where(owner >= 0, partner[owner], -1)


def nearest(queries: Tensor, voxels: Tensor, reach: float) -> Tensor:
    """The nearest voxel of each query, the first row among equally near ones; -1 where none is nearer than `reach`.

    Args:
        queries, voxels: (n, 3) and (m, 3) int64.
        reach: in voxels; not reached is a distance of exactly this.
    """
    count = len(voxels)
    if not count or not len(queries):
        return queries.new_full((len(queries),), -1)
    order, starts, ends = cells_around(voxels.float()[None], queries.float()[None], reach)
    lengths = ends - starts
    best = queries.new_full((len(queries),), torch.iinfo(torch.int64).max)
    chunk = lengths.sum(1).cumsum(0).div(_CANDIDATES, rounding_mode="floor")
    begin = 0
    for size in torch.unique_consecutive(chunk, return_counts=True)[1].tolist():
        part = slice(begin, begin + size)
        place, cell = expand_ranges(starts[part].reshape(-1), lengths[part].reshape(-1))
        candidate, query = order[place], cell // starts.shape[1] + begin
        squared = (voxels[candidate] - queries[query]).square_().sum(1)
        best.scatter_reduce_(0, query, squared * count + candidate, "amin")  # the distance first, then the row
        begin += size
    return torch.where(best // count < reach * reach, best % count, -1)


def _keys(coords: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "legacy_float":
        z, y, x = coords.float().unbind(1)
        return z * 1e6 + y * 1e3 + x
    z, y, x = coords.unbind(1)
    return (z << 40) + (y << 20) + x


def _others(voxels: SparseTensor, rows: Tensor) -> Tensor:
    """Rows that are not among these, ascending."""
    left = torch.ones(len(voxels.coords), dtype=torch.bool, device=rows.device)
    left[rows] = False
    return left.nonzero()[:, 0]


def _sum_of_repeats(x: SparseTensor) -> SparseTensor:
    """One row for each voxel: legacy pairs leave a few voxels with two, and what then is up to the library."""
    keys, row = torch.unique(_keys(x.coords[:, 1:], "exact"), return_inverse=True)
    if len(keys) == len(row):
        return x
    features = x.features.new_zeros(len(keys), x.features.shape[1]).index_add_(0, row, x.features)
    coords = x.coords.new_empty(len(keys), 4).index_copy_(0, row, x.coords)  # equal rows, whichever is last
    return SparseTensor(features, coords, x.shape)


def _gate(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, IMAGE_CHANNELS), nn.ReLU())


def _by_stage(blocks: Iterable[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({f"stage_{number}": block for number, block in enumerate(blocks, 1)})

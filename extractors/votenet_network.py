"""VoteNet (Qi et al. 2019, sections 4 and 5) as ScanQA, SQA3D, facebookresearch and mmdet3d train it on ScanNet.

One network; the official checkpoints name its parameters in three ways (`extractors.votenet_namings`). The key names
here are those of facebookresearch/votenet.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from extractors.point_sampling import furthest_point_sample
from extractors.pointnet2 import FeaturePropagation, SetAbstraction, fold
from extractors.votenet_boxes import HEAD_CHANNELS

SEEDS = 1024
Sampling = Literal["vote_fps", "seed_fps"]


class Backbone(nn.Module):
    """PointNet++ with four set abstractions and two feature propagations.

    Args:
        channels: features per point besides x, y, z.
        lanes, skip_origin: of `furthest_point_sample`.
    """

    def __init__(self, channels: int, lanes: int, skip_origin: bool) -> None:
        super().__init__()
        self.lanes, self.skip_origin = lanes, skip_origin
        self.sa1 = SetAbstraction(2048, 0.2, 64, (channels, 64, 64, 128))
        self.sa2 = SetAbstraction(SEEDS, 0.4, 32, (128, 128, 128, 256))
        self.sa3 = SetAbstraction(512, 0.8, 16, (256, 128, 128, 256))
        self.sa4 = SetAbstraction(256, 1.2, 16, (256, 128, 128, 256))
        self.fp1 = FeaturePropagation(512, 256, 256)
        self.fp2 = FeaturePropagation(512, 256, 256)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        """points (batch, point, 3 + channels) -> taps `sa{1-4}_{inds,xyz,features}`, `fp{1,2}_features`.

        `inds` index the layer's own input; features are (batch, point, channel).
        """
        taps: dict[str, Tensor] = {}
        xyz, features = points[..., :3].contiguous(), points[..., 3:]
        ordered = 0  # so many points are in the order in which sampling would pick them
        for name, layer in (("sa1", self.sa1), ("sa2", self.sa2), ("sa3", self.sa3), ("sa4", self.sa4)):
            if layer.count <= ordered:
                inds = torch.arange(layer.count, device=xyz.device).expand(len(xyz), -1)
            else:
                inds, ordered = furthest_point_sample(xyz, layer.count, lanes=self.lanes, skip_origin=self.skip_origin)
            centres = pick(xyz, inds)
            features = layer(xyz, features, centres)
            xyz = centres
            taps |= {f"{name}_inds": inds, f"{name}_xyz": xyz, f"{name}_features": features}
        fp1 = self.fp1(taps["sa3_xyz"], taps["sa4_xyz"], taps["sa3_features"], taps["sa4_features"])
        fp2 = self.fp2(taps["sa2_xyz"], taps["sa3_xyz"], taps["sa2_features"], fp1)
        return taps | {"fp1_features": fp1, "fp2_features": fp2}


class Voting(nn.Module):
    """Each seed votes for the centre of its object."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(256, 256, 1), nn.BatchNorm1d(256)
        self.conv2, self.bn2 = nn.Conv1d(256, 256, 1), nn.BatchNorm1d(256)
        self.conv3 = nn.Conv1d(256, 3 + 256, 1)

    def forward(self, seed_xyz: Tensor, seed_features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, seed, 3), (batch, seed, 256) -> offset (batch, seed, 3), vote xyz, unnormalised vote features."""
        rows = seed_features.flatten(0, 1)
        for conv, bn in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
            weight, bias = fold(conv, bn)
            rows = torch.addmm(bias, rows, weight.T).relu_()
        assert self.conv3.bias is not None
        rows = torch.addmm(self.conv3.bias, rows, self.conv3.weight.flatten(1).T).view(*seed_xyz.shape[:2], -1)
        offset = rows[..., :3]
        return offset, seed_xyz + offset, seed_features + rows[..., 3:]


class Proposal(nn.Module):
    """Cluster the votes and predict one box per cluster."""

    def __init__(self, proposals: int) -> None:
        super().__init__()
        self.vote_aggregation = SetAbstraction(proposals, 0.3, 16, (256, 128, 128, 128))
        self.conv1, self.bn1 = nn.Conv1d(128, 128, 1), nn.BatchNorm1d(128)
        self.conv2, self.bn2 = nn.Conv1d(128, 128, 1), nn.BatchNorm1d(128)
        self.conv3 = nn.Conv1d(128, HEAD_CHANNELS, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Object tokens (batch, proposal, 128) -> head channels (batch, proposal, 97)."""
        rows = features.flatten(0, 1)
        for conv, bn in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
            weight, bias = fold(conv, bn)
            rows = torch.addmm(bias, rows, weight.T).relu_()
        assert self.conv3.bias is not None
        return torch.addmm(self.conv3.bias, rows, self.conv3.weight.flatten(1).T).view(*features.shape[:2], -1)


class VoteNetwork(nn.Module):
    """The whole detector, in inference.

    Args:
        channels: features per point besides x, y, z (ScanQA with colour and height: 4).
        proposals: boxes per scan.
        lanes: 512 for the sampling kernel of VoteNet and ScanQA, 1024 for mmcv's.
        skip_origin: leave out points near the origin, as the former kernel does.
    """

    def __init__(self, channels: int, proposals: int = 256, *, lanes: int = 512, skip_origin: bool = True) -> None:
        super().__init__()
        self.backbone_net = Backbone(channels, lanes, skip_origin)
        self.vgen = Voting()
        self.pnet = Proposal(proposals)

    @torch.inference_mode()
    def forward(self, points: Tensor, sampling: Sampling) -> dict[str, Tensor]:
        """Detect.

        Args:
            points: (batch, point, 3 + channels) float32; xyz in metres, z up.
            sampling: choose proposals by furthest point sampling on the votes (ScanQA; VoteNet and mmdet3d in
                training) or on the seeds (VoteNet and mmdet3d in evaluation).

        Returns:
            The backbone's taps, and
            seed_inds (batch, 1024) into the points,
            vote_offset, vote_xyz (batch, 1024, 3) metres,
            vote_features_unnormalised, vote_features (batch, 1024, 256),
            aggregated_vote_inds (batch, proposal) into the seeds, aggregated_vote_xyz (batch, proposal, 3) metres,
            aggregated_vote_features (batch, proposal, 128), the object tokens,
            proposal_raw (batch, proposal, 97), see `votenet_boxes.decode`.
        """
        taps = self.backbone_net(points)
        seed_xyz = taps["sa2_xyz"]
        offset, vote_xyz, unnormalised = self.vgen(seed_xyz, taps["fp2_features"])
        votes = unnormalised / unnormalised.norm(dim=2, keepdim=True)
        backbone, aggregation = self.backbone_net, self.pnet.vote_aggregation
        sampled, _ = furthest_point_sample(
            vote_xyz if sampling == "vote_fps" else seed_xyz,
            aggregation.count,
            lanes=backbone.lanes,
            skip_origin=backbone.skip_origin,
        )
        centres = pick(vote_xyz, sampled)
        tokens = aggregation(vote_xyz, votes, centres)
        return taps | {
            "seed_inds": taps["sa1_inds"].gather(1, taps["sa2_inds"]),
            "vote_offset": offset,
            "vote_xyz": vote_xyz,
            "vote_features_unnormalised": unnormalised,
            "vote_features": votes,
            "aggregated_vote_inds": sampled,
            "aggregated_vote_xyz": centres,
            "aggregated_vote_features": tokens,
            "proposal_raw": self.pnet(tokens),
        }


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows (batch, n, c) at index (batch, m) -> (batch, m, c)."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))

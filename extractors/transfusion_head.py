"""TransFusion's head (Bai et al. 2022) in its LiDAR-only form: 200 queries from a heatmap, one decoder layer, no NMS.

Attribute names give the official keys (`pts_bbox_head.*`). Maps are (B, C, H, W), H = y, W = x.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extractors.bev_detector import Detections
from extractors.boxes3d import CLASSES

_POINT_LIKE = ("pedestrian", "traffic_cone")  # every cell may be a peak of these
_LIMITS = ((-61.2, -61.2, -10.0), (61.2, 61.2, 10.0))  # metres; x, y, z of the bottom, inclusive
BRANCHES = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": len(CLASSES)}


def raw_outputs(queries: int = 200) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the head's raw outputs for one map."""
    branches = {name: (channels, queries) for name, channels in BRANCHES.items()}
    return {**branches, "query_heatmap_score": (len(CLASSES), queries), "query_label": (queries,)}


class TransFusionHead(nn.Module):
    """The head and its decoding.

    Args:
        in_channels: of the map.
        channels: of a query.
        queries: how many cells of the heatmap become queries.
        cell: side of a cell, metres.
        origin: (x, y) metres of the map's corner.
    """

    def __init__(
        self,
        in_channels: int = 512,
        channels: int = 128,
        queries: int = 200,
        cell: float = 0.6,
        origin: tuple[float, float] = (-54.0, -54.0),
    ) -> None:
        super().__init__()
        self.queries, self.cell, self.origin = queries, cell, origin
        self.shared_conv = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.heatmap_head = nn.Sequential(
            _ConvNorm(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
            nn.Conv2d(channels, len(CLASSES), 3, padding=1),
        )
        self.class_encoding = nn.Conv1d(len(CLASSES), channels, 1)
        self.decoder = nn.ModuleList([DecoderLayer(channels)])
        self.prediction_heads = nn.ModuleList([_Branches(channels)])

    def forward(self, bev: Tensor) -> dict[str, Tensor]:
        """Raw outputs of maps.

        Args:
            bev: (B, in_channels, H, W).

        Returns:
            For each query: center (B, 2, Q) x, y in cells; height (B, 1, Q) of the box's centre, metres; dim (B, 3, Q)
            logarithms of the sizes; rot (B, 2, Q) sine, cosine; vel (B, 2, Q) m/s; heatmap (B, 10, Q) logits;
            query_heatmap_score (B, 10, Q) at the query's cell; query_label (B, Q) int64 its class there.
        """
        features = self.shared_conv(bev)
        heatmap = local_peaks(self.heatmap_head(features).sigmoid())
        width = features.shape[3]
        features = features.flatten(2)
        cells = features.shape[2]
        # A stable sort: of equal scores the lower class wins, then the lower cell.
        ranked = heatmap.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, : self.queries]
        label, place = ranked // cells, ranked % cells
        one_hot = F.one_hot(label, len(CLASSES)).mT.to(features.dtype)
        query = features.gather(2, place[:, None].expand(-1, features.shape[1], -1)) + self.class_encoding(one_hot)
        every = torch.arange(cells, device=bev.device)
        positions = torch.stack([every % width, every // width], 1).to(features.dtype)[None] + 0.5  # x, y
        query_position = positions[0][place]

        decoded = self.decoder[0](query, features, query_position, positions)
        outputs: dict[str, Tensor] = self.prediction_heads[0](decoded)
        outputs["center"] = outputs["center"] + query_position.mT
        scores = heatmap.flatten(2).gather(2, place[:, None].expand(-1, len(CLASSES), -1))
        return {**outputs, "query_heatmap_score": scores, "query_label": label}

    def find(self, bev: Tensor) -> list[Detections]:
        """`detect` of `forward`'s outputs."""
        return self.detect(self(bev))

    def detect(self, outputs: Mapping[str, Tensor]) -> list[Detections]:
        """Boxes of the convention mmdet3d-0.x, in the order of the queries: by falling heatmap score.

        Nothing is suppressed and no score is too low; boxes beyond 61.2 m, or 10 m above or below, are left out.

        Args:
            outputs: see `forward`; the labels may have any number type.
        """
        label = outputs["query_label"].long()
        one_hot = F.one_hot(label, len(CLASSES)).mT
        score, found = (outputs["heatmap"].sigmoid() * outputs["query_heatmap_score"] * one_hot).max(1)
        center, height, sizes = outputs["center"], outputs["height"], outputs["dim"].exp()
        corner = center.new_tensor(self.origin)[:, None]
        boxes = torch.cat(
            [
                center * self.cell + corner,
                height - sizes[:, 2:] * 0.5,
                sizes,
                torch.atan2(outputs["rot"][:, :1], outputs["rot"][:, 1:]),
                outputs["vel"],
            ],
            1,
        ).mT
        low, high = boxes.new_tensor(_LIMITS)
        inside = ((boxes[..., :3] >= low) & (boxes[..., :3] <= high)).all(2)
        return [
            Detections(boxes[i, keep].cpu().numpy(), score[i, keep].cpu().numpy(), found[i, keep].cpu().numpy())
            for i, keep in enumerate(inside)
        ]


def local_peaks(heatmap: Tensor) -> Tensor:
    """Scores where they are the largest of their 3x3 neighbourhood, zero elsewhere and along the border.

    Pedestrians and traffic cones are left as they are.

    Args:
        heatmap: (B, 10, H, W) scores, 0 to 1.
    """
    largest = F.pad(F.max_pool2d(heatmap, 3, 1), (1, 1, 1, 1))
    point_like = [CLASSES.index(name) for name in _POINT_LIKE]
    largest[:, point_like] = heatmap[:, point_like]
    return heatmap * (heatmap == largest)


class DecoderLayer(nn.Module):
    """A transformer decoder layer whose positions are added to queries, keys and values alike; norms come last."""

    def __init__(self, channels: int, heads: int = 8, hidden: int = 256) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.self_posembed, self.cross_posembed = _PositionEmbedding(channels), _PositionEmbedding(channels)

    def forward(self, query: Tensor, key: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        """query (B, C, Q), key (B, C, K), positions (B, Q, 2) and (B or 1, K, 2) in cells -> (B, C, Q)."""
        x = query.mT
        position = self.self_posembed(query_position)
        memory = key.mT + self.cross_posembed(key_position)
        placed = x + position
        x = self.norm1(x + self.self_attn(placed, placed, placed, need_weights=False)[0])
        x = self.norm2(x + self.multihead_attn(x + position, memory, memory, need_weights=False)[0])
        x = self.norm3(x + self.linear2(F.relu(self.linear1(x))))
        return x.mT


class _PositionEmbedding(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            nn.Conv1d(2, channels, 1), nn.BatchNorm1d(channels), nn.ReLU(), nn.Conv1d(channels, channels, 1)
        )

    def forward(self, position: Tensor) -> Tensor:
        """(B, n, 2) -> (B, n, C)."""
        embedding: Tensor = self.position_embedding_head(position.mT).mT
        return embedding


class _ConvNorm(nn.Module):
    """Convolution, BatchNorm and ReLU under the keys `conv` and `bn`."""

    def __init__(self, conv: nn.Module, bn: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = conv, bn

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class _Branches(nn.ModuleDict):
    """What is predicted for each query, by name."""

    def __init__(self, channels: int, hidden: int = 64) -> None:
        super().__init__({
            name: nn.Sequential(
                _ConvNorm(nn.Conv1d(channels, hidden, 1, bias=False), nn.BatchNorm1d(hidden)),
                nn.Conv1d(hidden, outputs, 1),
            )
            for name, outputs in BRANCHES.items()
        })  # fmt: skip

    def forward(self, query: Tensor) -> dict[str, Tensor]:
        return {name: branch(query) for name, branch in self.items()}

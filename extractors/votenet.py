"""VoteNet (Qi et al. 2019) on ScanNet scans: 256 object proposals, each with the feature that SQA3D's models read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from extractors import pointcloud
from extractors.base import Extractor, Weights, seed_for
from extractors.errors import InvalidValues, NoColors, NoFaces
from extractors.geometry import box_corners, transform
from extractors.inputs import Scan
from extractors.votenet_boxes import CLASSES, Boxes, decode
from storage.schema import Column, Record, Schema

Name = Literal["scanqa", "votenet", "mmdet3d"]
Sampling = Literal["vote_fps", "seed_fps"]


@dataclass(frozen=True)
class Family:
    """What differs between the official implementations.

    Attributes:
        color: whether points carry colour.
        sampling: how proposals are chosen in evaluation.
        lanes, skip_origin: of the sampling kernel, see `point_sampling.furthest_point_sample`.
        height_first: the height is taken before the axis alignment.
        mean_sizes: (18, 3) metres, by class: a box is the mean of its size class and a residual.
        classes: names of the semantic classes.
    """

    color: bool
    sampling: Sampling
    lanes: int
    skip_origin: bool
    height_first: bool
    mean_sizes: tuple[tuple[float, float, float], ...]
    classes: tuple[str, ...]


_CLASSES = (
    *("cabinet", "bed", "chair", "sofa", "table", "door", "window", "bookshelf", "picture", "counter", "desk"),
    *("curtain", "refrigerator", "shower curtain", "toilet", "sink", "bathtub"),
)
_SCANNET_MEANS = (  # scannet_means.npz of VoteNet
    (0.76966727, 0.8116021, 0.92573744),
    (1.876858, 1.8425595, 1.1931566),
    (0.61328, 0.6148609, 0.7182701),
    (1.3955007, 1.5121545, 0.83443564),
    (0.97949594, 1.0675149, 0.6329687),
    (0.531663, 0.5955577, 1.7500148),
    (0.9624706, 0.72462326, 1.1481868),
    (0.83221924, 1.0490936, 1.6875663),
    (0.21132214, 0.4206159, 0.5372846),
    (1.4440073, 1.8970833, 0.26985747),
    (1.0294262, 1.4040797, 0.87554324),
    (1.3766412, 0.65521795, 1.6813129),
    (0.6650819, 0.71111923, 1.298853),
    (0.41999173, 0.37906948, 1.7513971),
    (0.59359556, 0.5912492, 0.73919016),
    (0.50867593, 0.50656086, 0.30136237),
    (1.1511526, 1.0546296, 0.49706793),
    (0.47535285, 0.49249494, 0.5802117),
)
_REFERENCE_MEANS = (  # scannet_reference_means.npz of ScanRefer, ScanQA and SQA3D
    (0.7750491, 0.9489773, 0.9654206),
    (1.8690326, 1.8321471, 1.1922299),
    (0.6121478, 0.6192873, 0.7048085),
    (1.441139, 1.6045203, 0.83652294),
    (1.0478072, 1.2016419, 0.63457006),
    (0.5610123, 0.60847217, 1.719504),
    (1.078949, 0.82034, 1.169212),
    (0.8417109, 1.3504795, 1.6898925),
    (0.23051737, 0.476405, 0.56569254),
    (1.454849, 1.9711989, 0.2864328),
    (1.0785803, 1.5370511, 0.8650191),
    (1.4311965, 0.76923114, 1.6498268),
    (0.62969196, 0.7087129, 1.3143358),
    (0.43925035, 0.41569594, 1.7000275),
    (0.5850446, 0.5787844, 0.7202961),
    (0.5115869, 0.5096067, 0.3128736),
    (1.1732076, 1.0598714, 0.5181253),
    (0.43294385, 0.5193351, 0.48437455),
)
FAMILIES: dict[Name, Family] = {
    "scanqa": Family(True, "vote_fps", 512, True, False, _REFERENCE_MEANS, (*_CLASSES, "others")),
    "votenet": Family(False, "seed_fps", 512, True, False, _SCANNET_MEANS, (*_CLASSES, "garbagebin")),
    "mmdet3d": Family(False, "seed_fps", 1024, False, True, _SCANNET_MEANS, (*_CLASSES, "garbagebin")),
}


@dataclass(frozen=True)
class Points:
    """A scan as the network takes it.

    Attributes:
        points: (num_points, 3 + features) float32: x y z in metres, then the family's columns.
        vertex: (num_points,) int32, the scan's vertex that each point is.
        aligned: whether the dataset gave an axis alignment.
    """

    points: np.ndarray
    vertex: np.ndarray
    aligned: bool


@dataclass(frozen=True, kw_only=True)
class VoteNet(Extractor):
    """Propose objects in an indoor scan.

    Always gives `proposals` objects; `mask` says which the network believes in. The schema documents the columns.

    Attributes:
        weights: an official checkpoint of any family (the naming is recognised), or `untrained:SEED`.
        family: whose rules hold: scanqa (ScanQA, SQA3D), votenet (facebookresearch) or mmdet3d.
        proposals: objects per scan, 1 to 1024.
        num_points: points the network sees; drawn with repetition where the scan has fewer.
        max_points: vertices kept first, from which heights are measured (ScanNet preprocessing: 50,000); 0 keeps all.
        frame: `aligned` applies the axis alignment (identity where the dataset gives none, then `axis_aligned` is
            false), `scan` leaves the mesh as it is.
        use_color, use_normal, use_height: feature columns; None as the family does (no normals, height, and colour for
            scanqa).
        sampling: how proposals are chosen; None as the family does in evaluation.
        fps_skip_origin: leave out points within 3 cm of the origin in sampling; None as the family's kernel does.
        height_percentile: percentile of z that counts as floor (all families: 0.99, not 99).
        color_mode: `exact`, or `legacy_saturated` for checkpoints that SQA3D's loader trained on constant colours.
        normal_mode: `exact`, or `legacy`: ScanQA's, which keep one face per corner and are not turned with the scan.
            ScanQA's arrays have no faces: what they store is legacy, and `exact` turns it with the scan.
        mean_sizes: (18, 3) metres in place of the family's.
        feature_dtype: float32 or float16, of the stored feature.
    """

    name: ClassVar[str] = "votenet"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("scan",)
    device: ClassVar[str] = "gpu"
    batch: ClassVar[int] = 8

    weights: Weights
    family: Name = "scanqa"
    proposals: int = 256
    num_points: int = 40_000
    max_points: int = 50_000
    frame: Literal["aligned", "scan"] = "aligned"
    use_color: bool | None = None
    use_normal: bool = False
    use_height: bool = True
    sampling: Sampling | None = None
    fps_skip_origin: bool | None = None
    height_percentile: float = 0.99
    color_mode: Literal["exact", "legacy_saturated"] = "exact"
    normal_mode: Literal["exact", "legacy"] = "exact"
    mean_sizes: tuple[tuple[float, float, float], ...] | None = None
    feature_dtype: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        choices = {
            "family": get_args(Name),
            "frame": ("aligned", "scan"),
            "sampling": (None, *get_args(Sampling)),
            "color_mode": ("exact", "legacy_saturated"),
            "normal_mode": ("exact", "legacy"),
            "feature_dtype": ("float32", "float16"),
        }
        for setting, allowed in choices.items():
            if getattr(self, setting) not in allowed:
                raise ValueError(f"votenet: {setting} is {getattr(self, setting)!r}, expected one of {allowed}")
        if not 1 <= self.proposals <= 1024:
            raise ValueError(f"votenet: proposals is {self.proposals}, expected 1 to 1024, the number of votes")
        if not 2048 <= self.num_points <= 1 << 24:
            raise ValueError(
                f"votenet: num_points is {self.num_points}, expected 2048, what the first layer samples, to {1 << 24}"
            )
        if self.max_points < 0:
            raise ValueError(f"votenet: max_points is {self.max_points}, expected 0 (all) or more")
        if self.mean_sizes is not None and np.shape(self.mean_sizes) != (CLASSES, 3):
            raise ValueError(f"votenet: mean_sizes has shape {np.shape(self.mean_sizes)}, expected ({CLASSES}, 3)")

    @property
    def colored(self) -> bool:
        """Whether points carry colour."""
        return FAMILIES[self.family].color if self.use_color is None else self.use_color

    @property
    def schema(self) -> Schema:
        def metres(*dims: int, doc: str) -> Column:
            return Column(dims, unit="m", frame=self.frame, doc=doc)

        return Schema(
            {
                "feature": Column((128,), self.feature_dtype, doc="object token: the pooled vote cluster"),
                "center": metres(3, doc="middle of the box"),
                "size": metres(3, doc="of the likeliest size class; not clamped, may be negative"),
                "heading": Column((), unit="rad", frame=self.frame, doc="about +z; always 0 on ScanNet"),
                "corners": metres(8, 3, doc="upper face (+,+) (+,-) (-,-) (-,+) in x, y; then the lower"),
                "objectness": Column((2,), doc="logits: background, object"),
                "sem_scores": Column((CLASSES,), doc="logits of the semantic classes, in the family's order"),
                "size_class": Column((), "uint8", doc="likeliest size class"),
                "mask": Column((), "bool", doc="more object than background"),
                "nms_keep": Column((), "bool", doc="kept by the family's post-processing for detection metrics"),
                "vote": metres(3, doc="centre of the vote cluster"),
                "seed_index": Column((), "int32", doc="vertex of the scan that the proposal's central vote came from"),
                "axis_aligned": Column((), "bool", doc="the dataset gave an axis alignment for this scan"),
            },
            element="object",
        )

    def prepare(self, key: str, *inputs: Scan) -> Points:
        """Draw the points of a scan, seeded from its key.

        Vertices that are not finite are left out.

        Raises:
            EmptyInput: no vertices.
            InvalidValues: fewer than 10 usable vertices, or coordinates beyond 10 km.
            NoColors: colours are needed and there are none.
            NoFaces: normals are needed and there are neither faces nor stored normals.
            InvalidValues: exact normals are needed, the points are aligned, and their alignment is not known.
        """
        (scan,) = inputs
        if self.colored and self.color_mode == "exact" and scan.rgb is None:
            raise NoColors(f"{key}: the scan has no colours; votenet.use_color=false needs a checkpoint without colour")
        if self.use_normal and scan.normals is None and not len(scan.faces):
            raise NoFaces(f"{key}: the scan has neither faces nor normals; votenet.use_normal=false does without")
        rng = np.random.RandomState(seed_for(key, "votenet"))  # its stream is frozen by numpy's guarantee
        vertices = pointcloud.usable(scan.xyz, key)
        if 0 < self.max_points < len(vertices):
            vertices = pointcloud.draw(rng, vertices, self.max_points)

        turn = self._turn(scan)
        xyz = scan.xyz[vertices]
        moved = xyz if turn is None else transform(xyz, turn)
        z = xyz[:, 2] if FAMILIES[self.family].height_first else moved[:, 2]
        height = z.astype(np.float64) - pointcloud.floor_height(z, self.height_percentile)

        place = pointcloud.draw(rng, np.arange(len(vertices)), self.num_points)
        vertex = vertices[place]
        columns = [moved[place]]
        if self.colored:
            rgb = scan.rgb[vertex] if scan.rgb is not None else np.zeros((len(vertex), 3))
            columns.append(pointcloud.normalise_colors(rgb, self.color_mode))
        if self.use_normal:
            columns.append(self._normals(key, scan, vertex))
        if self.use_height:
            columns.append(height[place][:, None])
        points = np.concatenate(columns, 1).astype(np.float32)
        return Points(points, vertex.astype(np.int32), scan.axis_align is not None or scan.frame == "aligned")

    def load(self, device: str = "cpu") -> Callable[[Sequence[Points]], list[Record]]:
        """Build the network and fill it; on the CPU scans go through one by one, so a batch changes no value there.

        Raises:
            WeightsError: the checkpoint is not VoteNet's, or not for these settings.
        """
        import torch

        from extractors import votenet_namings
        from extractors.checkpoint import read_state, seeded_init
        from extractors.inference import inference
        from extractors.votenet_network import VoteNetwork

        family = FAMILIES[self.family]
        skip = family.skip_origin if self.fps_skip_origin is None else self.fps_skip_origin
        channels = 3 * self.colored + 3 * self.use_normal + self.use_height
        network = VoteNetwork(channels, self.proposals, lanes=family.lanes, skip_origin=skip).eval()
        if self.weights.seed is not None:
            seeded_init(network, self.weights.seed)
        else:
            votenet_namings.load(network, read_state(self.weights.path), self.weights.source)
        network.to(device)
        sampling = self.sampling or family.sampling
        mean_sizes = np.array(self.mean_sizes or family.mean_sizes)
        together = 1 if torch.device(device).type == "cpu" else self.batch

        @inference
        def run(batch: Sequence[Points]) -> list[Record]:
            records = []
            for start in range(0, len(batch), together):
                scans = batch[start : start + together]
                points = torch.from_numpy(np.stack([scan.points for scan in scans])).to(device)
                taps = network(points, sampling)
                seeds = taps["seed_inds"].gather(1, taps["aggregated_vote_inds"])
                outputs = (taps["proposal_raw"], taps["aggregated_vote_xyz"], taps["aggregated_vote_features"], seeds)
                for scan, raw, votes, tokens, seed in zip(scans, *(t.cpu().numpy() for t in outputs), strict=True):
                    if not (np.isfinite(raw).all() and np.isfinite(tokens).all()):
                        raise InvalidValues("the network gave NaN or infinity for this scan; are the weights whole?")
                    boxes = decode(raw, votes, mean_sizes)
                    records.append(self._record(scan, boxes, votes, tokens, seed))
            return records

        return run

    def _turn(self, scan: Scan) -> np.ndarray | None:
        """(4, 4) from the scan's own frame to the frame asked for, None where nothing is to be done."""
        if scan.axis_align is None or scan.frame == self.frame:
            return None
        return scan.axis_align if self.frame == "aligned" else np.linalg.inv(scan.axis_align)

    def _normals(self, key: str, scan: Scan, vertex: np.ndarray) -> np.ndarray:
        """Unit normals of some vertices, (len(vertex), 3), in the frame asked for; legacy ones stay as they are."""
        if scan.normals is None or (self.normal_mode == "legacy" and len(scan.faces)):
            normals, turn = pointcloud.vertex_normals(scan.xyz, scan.faces, self.normal_mode), self._turn(scan)
        elif self.normal_mode == "exact" and scan.frame == "aligned" and scan.axis_align is None:
            raise InvalidValues(
                f"{key}: the points are aligned, their normals are not, and the alignment is not known: put the scan's "
                "folder with its .txt beside them, or set votenet.normal_mode=legacy, which leaves normals as they are"
            )
        else:  # stored ones are in the raw frame
            normals, turn = scan.normals, scan.axis_align if self.frame == "aligned" else None
        chosen: np.ndarray = normals[vertex]
        return chosen if turn is None or self.normal_mode == "legacy" else chosen @ turn[:3, :3].T

    def _record(self, scan: Points, boxes: Boxes, votes: np.ndarray, tokens: np.ndarray, seed: np.ndarray) -> Record:
        from extractors.detection import detect_mmdet3d, detect_votenet

        detect = detect_mmdet3d if self.family == "mmdet3d" else detect_votenet
        keep = np.zeros(self.proposals, bool)
        keep[detect(boxes, scan.points[:, :3]).proposal] = True
        return {
            "feature": tokens.astype(self.feature_dtype),
            "center": boxes.center,
            "size": boxes.size,
            "heading": np.zeros(self.proposals, np.float32),
            "corners": box_corners(np.concatenate([boxes.center, boxes.size], 1)),
            "objectness": boxes.objectness,
            "sem_scores": boxes.semantics,
            "size_class": boxes.size_class.astype(np.uint8),
            "mask": boxes.mask,
            "nms_keep": keep,
            "vote": votes,
            "seed_index": scan.vertex[seed],
            "axis_aligned": np.full(self.proposals, scan.aligned),
        }

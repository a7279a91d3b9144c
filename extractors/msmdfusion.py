"""MSMDFusion (Jiao et al. 2023) on nuScenes' LiDAR and cameras: objects, and a feature of each.

`MSMDFusion` goes from sweeps, images and virtual points to objects. To change cropping without another pass, keep its
map (`give=bev`), and put `MSMDFusionHead` and `object_crop` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from extractors.base import seed_for
from extractors.bev_detector import BevDetector, BevHead, Convention, Detector, Grid
from extractors.errors import EmptyInput
from extractors.inputs import Cameras, LidarSweeps
from extractors.msmdfusion_inputs import POINT_RANGE, Frame, foreground, read_images
from storage.schema import Column

if TYPE_CHECKING:
    from torch import nn

    from extractors.msmdfusion_network import MSMDFusionNetwork
    from extractors.transfusion_head import TransFusionHead


@dataclass(frozen=True, kw_only=True)
class _MSMDFusion(Detector):
    """What both stages of MSMDFusion share."""

    @property
    def grid(self) -> Grid:
        return Grid(512, 180, 180, 0.6, (-54.0, -54.0), "lidar")

    @property
    def box_convention(self) -> Convention:
        return "mmdet3d-0.x"

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        from extractors.transfusion_head import raw_outputs

        return raw_outputs()

    @property
    def facts(self) -> dict[str, Column]:
        return {
            "sweeps": Column((), "int16", doc="earlier LiDAR sweeps among the points"),
            "painted_points": Column((), "int32", doc="virtual and real points that took image features"),
            "painted_sweeps": Column((), "int16", doc="sweeps, the key frame among them, that these come from"),
        }

    def fill(self, network: nn.Module) -> None:
        """Fill the whole network or its head alone with the weights."""
        from extractors.bev_checkpoint import load
        from extractors.checkpoint import seeded_init

        if self.weights.seed is not None:
            seeded_init(network, self.weights.seed)
        else:
            load(network, self.weights.path, "msmdfusion")


@dataclass(frozen=True, kw_only=True)
class MSMDFusion(_MSMDFusion, BevDetector):
    """Find objects in a key frame's LiDAR points, sweeps and six images.

    Takes   LidarSweeps, Cameras, and a record of `virtual_points_files` (or `virtual_points`).

    Attributes:
        sweeps: how many earlier sweeps at most, of points and of virtual points (the checkpoint was trained with 10).
        pairing: how LiDAR and image voxels are matched: `exact`, or `legacy_float` as the official code does, which
            pairs some voxels of different places (`modality_fusion.pair_voxels`).
        embedding: what stands for a LiDAR voxel where an image voxel has none near: `seeded` by the item's key, where
            the official code draws anew at every call, or `constant`, 0.5 throughout.
    """

    name: ClassVar[str] = "msmdfusion"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("lidar", "cameras", "virtual_points")

    sweeps: int = 10
    pairing: Literal["exact", "legacy_float"] = "exact"
    embedding: Literal["seeded", "constant"] = "seeded"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sweeps < 0:
            raise ValueError(f"{self.name}: sweeps is {self.sweeps}, expected 0 or more")

    def prepare(self, key: str, *inputs: Any) -> Frame:
        """Bring sweeps and virtual points into the key frame, read and resize the images.

        Raises:
            MissingFile, DecodeError ...: an image is not there or damaged (`image_preprocess.open_rgb`).
            InvalidValues: a calibration that no camera has, or virtual points that do not fit images or sweeps.
            EmptyInput: no LiDAR point within the range.
        """
        from extractors.sweeps import aggregate

        lidar: LidarSweeps = inputs[0]
        cameras: Cameras = inputs[1]
        virtual: Mapping[str, np.ndarray] = inputs[2]
        points = aggregate(lidar, self.sweeps, remove_close=0, pad_empty=False)
        low, high = np.reshape(POINT_RANGE, (2, 3))
        if not ((points[:, :3] >= low) & (points[:, :3] < high)).all(1).any():
            raise EmptyInput(f"{key}: none of {len(points)} LiDAR points lies within {high[0]:g} m; is the file whole?")
        images, projections = read_images(cameras, key)
        pixels, camera, painted, depth = foreground(virtual, lidar, self.sweeps, key)
        return Frame(
            points=points,
            images=images,
            lidar_to_image=projections.astype(np.float32),
            depth=depth,
            pixels=pixels,
            camera=camera,
            painted=painted,
            embeddings=self.embeddings(key),
            sweeps=min(len(lidar.before), self.sweeps),
        )

    def embeddings(self, key: str) -> tuple[np.ndarray, ...]:
        """One row for each scale, uniform in [0, 1) or 0.5."""
        rng = np.random.RandomState(seed_for(key, "embedding"))  # its stream is frozen by numpy's guarantee
        rows = [rng.uniform(size=(1, channels)).astype(np.float32) for channels in (16, 32, 64, 128)]
        return tuple(rows if self.embedding == "seeded" else [np.full_like(row, 0.5) for row in rows])

    def build(self) -> MSMDFusionNetwork:
        """The network with its weights, ready for inference on the CPU."""
        from extractors.batchnorm import fold
        from extractors.msmdfusion_network import MSMDFusionNetwork

        network = MSMDFusionNetwork(self.pairing).eval().requires_grad_(False)
        self.fill(network)
        fold(network)
        return network

    def network(self, device: str) -> tuple[Callable[[Sequence[Frame]], Any], TransFusionHead]:
        import torch

        network = self.build().to(device)

        def body(batch: Sequence[Frame]) -> Any:
            return torch.cat([network(frame) for frame in batch])

        return body, network.pts_bbox_head

    def facts_of(self, prepared: Frame) -> dict[str, Any]:
        return {
            "sweeps": prepared.sweeps,
            "painted_points": len(prepared.pixels),
            "painted_sweeps": len(np.unique(prepared.painted[:, 14])),
        }


@dataclass(frozen=True, kw_only=True)
class MSMDFusionHead(_MSMDFusion, BevHead):
    """MSMDFusion's head on maps that an `msmdfusion` stage of give=bev keeps."""

    name: ClassVar[str] = "msmdfusion_head"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("msmdfusion_bev",)

    def head(self, device: str) -> TransFusionHead:
        from extractors.batchnorm import fold
        from extractors.centerpoint_network import HeadAlone
        from extractors.transfusion_head import TransFusionHead

        head = TransFusionHead().eval().requires_grad_(False)
        self.fill(HeadAlone(head))
        fold(head)
        return head.to(device)

"""CenterPoint (Yin et al. 2021) on nuScenes' LiDAR, as in mmdetection3d: objects, and a feature of each.

`CenterPoint` goes from sweeps to objects. To change cropping or suppression without another pass, keep its map
(`give=bev`), and put `CenterPointHead` and `object_crop` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from extractors.base import seed_for
from extractors.bev_detector import BevDetector, BevHead, Convention, Detector, Grid
from extractors.errors import EmptyInput, InvalidValues
from extractors.inputs import LidarSweeps
from storage.schema import Column

if TYPE_CHECKING:
    from torch import nn

    from extractors.center_head import CenterHead
    from extractors.centerpoint_network import CenterPointNetwork

_REACH = {0.075: 54.0, 0.1: 51.2}  # voxel in metres -> the range along x and y is that far either way
_HEIGHT, _LOWEST, _HIGHEST = 0.2, -5.0, 3.0
_STRIDE = 8  # voxels along a cell of the map
_SQUARED_DISTANCE = (4.0, 12.0, 10.0, 1.0, 0.85, 0.175)  # by task


@dataclass(frozen=True)
class VoxelScan:
    """A key frame as the network takes it.

    Attributes:
        coords: (v, 3) int32 z, y, x.
        mean: (v, 5) float32: x, y, z in metres, intensity 0..255, seconds before the key frame.
        sweeps: earlier sweeps among the points.
    """

    coords: np.ndarray
    mean: np.ndarray
    sweeps: int


@dataclass(frozen=True, kw_only=True)
class _CenterPoint(Detector):
    """Settings of all stages of CenterPoint.

    Attributes:
        voxel: its side in metres, 0.075 (map of 180 x 180 cells of 0.6 m) or 0.1 (128 x 128 of 0.8 m), as in training.
        convention: how the checkpoint gives boxes; `mmdet3d-0.x` for one of before 2022.
        nms: `circle` or `rotate`, either goes with any checkpoint.
        score_threshold: candidates score above it.
    """

    voxel: float = 0.075
    convention: Convention = "mmdet3d-1.0"
    nms: Literal["circle", "rotate"] = "circle"
    score_threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.voxel not in _REACH:
            raise ValueError(
                f"{self.name}: voxel is {self.voxel}, checkpoints are for {' and '.join(map(str, _REACH))}"
            )

    @property
    def grid(self) -> Grid:
        reach, cells = _REACH[self.voxel], self.voxels[1] // _STRIDE
        return Grid(512, cells, cells, _STRIDE * self.voxel, (-reach, -reach), "lidar")

    @property
    def voxels(self) -> tuple[int, int, int]:
        """Voxels along z, y, x that the encoder takes."""
        side = round(2 * _REACH[self.voxel] / self.voxel)
        return round((_HIGHEST - _LOWEST) / _HEIGHT) + 1, side, side

    @property
    def box_convention(self) -> Convention:
        return self.convention

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        from extractors.center_head import output_shapes

        return output_shapes(self.grid)

    @property
    def facts(self) -> dict[str, Column]:
        return {"sweeps": Column((), "int16", doc="earlier LiDAR sweeps among the points; boxes are worse with few")}

    def build_head(self) -> CenterHead:
        """The head, without its weights."""
        from extractors.center_head import CenterHead, Suppression

        rules = [Suppression(self.nms, squared_distance=distance) for distance in _SQUARED_DISTANCE]
        return CenterHead(self.grid, self.convention, rules, score_threshold=self.score_threshold)

    def fill(self, network: nn.Module) -> None:
        """Fill the whole network or a `HeadAlone` with the weights."""
        from extractors.bev_checkpoint import load
        from extractors.checkpoint import seeded_init

        if self.weights.seed is not None:
            seeded_init(network, self.weights.seed)
        else:
            load(network, self.weights.path, "centerpoint", self.convention)


@dataclass(frozen=True, kw_only=True)
class CenterPoint(_CenterPoint, BevDetector):
    """Find objects in a key frame's LiDAR points and those of the sweeps before it.

    Attributes:
        sweeps: how many earlier sweeps at most (the checkpoints were trained with 9).
        min_sweeps: a key frame with fewer is refused; 0 takes the first of a scene too, which has none.
        sweep_choice: where there are more: the `nearest`, or `random` ones as in mmdetection3d (seeded by the key).
        pad_empty: a key frame without any gets `sweeps` copies of itself instead.
        remove_close: points of a sweep with |x| and |y| under so many metres are the car itself; 0 keeps them.
        max_points, max_voxels: points kept in a voxel, voxels kept in a key frame.
    """

    name: ClassVar[str] = "centerpoint"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("lidar",)
    batch: ClassVar[int] = 4

    sweeps: int = 9
    min_sweeps: int = 0
    sweep_choice: Literal["nearest", "random"] = "nearest"
    pad_empty: bool = True
    remove_close: float = 1.0
    max_points: int = 10
    max_voxels: int = 120_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_sweeps <= self.sweeps:
            raise ValueError(
                f"{self.name}: min_sweeps {self.min_sweeps} and sweeps {self.sweeps}, expected 0 <= min <= sweeps"
            )
        if self.max_points < 1 or self.max_voxels < 1:
            raise ValueError(
                f"{self.name}: max_points {self.max_points}, max_voxels {self.max_voxels}, expected 1 or more"
            )

    def prepare(self, key: str, *inputs: LidarSweeps) -> VoxelScan:
        """Bring the sweeps into the key frame and sort the points into voxels.

        Points that are not finite are left out.

        Raises:
            InvalidValues: rows of a file are not x, y, z, intensity, ring; or fewer sweeps than `min_sweeps`.
            EmptyInput: no point within the range.
        """
        from extractors.sweeps import aggregate
        from extractors.voxels import voxelize

        (lidar,) = inputs
        for scan in (lidar.key, *lidar.before):
            if scan.points.ndim != 2 or scan.points.shape[1] != 5:
                shape = scan.points.shape
                raise InvalidValues(f"{key}: points of shape {shape}, expected (point, 5): x, y, z, intensity, ring")
        used = min(len(lidar.before), self.sweeps)
        if used < self.min_sweeps:
            absent = f", {lidar.missing} are not on the disk" if lidar.missing else ""
            raise InvalidValues(f"{key}: {used} sweeps before the key frame{absent}; min_sweeps is {self.min_sweeps}")
        points = aggregate(
            lidar, self.sweeps, self.remove_close, self.pad_empty, self.sweep_choice, seed_for(key, "sweeps")
        )
        reach = _REACH[self.voxel]
        low, high = (-reach, -reach, _LOWEST), (reach, reach, _HIGHEST)
        xyz = points[:, :3]
        inside = ((xyz > np.array(low, np.float32)) & (xyz < np.array(high, np.float32))).all(1)
        size = (self.voxel, self.voxel, _HEIGHT)
        voxels = voxelize(points[inside], size, (*low, *high), self.max_points, self.max_voxels)
        if not len(voxels.coords):
            raise EmptyInput(f"{key}: none of {len(points)} LiDAR points lies within {reach:g} m; is the file whole?")
        return VoxelScan(voxels.coords, voxels.mean, used)

    def build(self) -> CenterPointNetwork:
        """The network on the CPU as it runs: filled, every BatchNorm2d behind a convolution folded into it."""
        import torch

        from extractors.batchnorm import fold
        from extractors.centerpoint_network import CenterPointNetwork

        network = CenterPointNetwork(self.build_head(), self.voxels).eval().requires_grad_(False)
        self.fill(network)
        fold(network)
        for part in (network.pts_backbone, network.pts_neck, network.pts_bbox_head):
            part.to(memory_format=torch.channels_last)  # quicker on both CPU and GPU
        return network

    def network(self, device: str) -> tuple[Callable[[Sequence[VoxelScan]], Any], CenterHead]:
        from extractors.centerpoint_network import sparse_batch

        network = self.build().to(device)

        def body(batch: Sequence[VoxelScan]) -> Any:
            return network(sparse_batch([(scan.coords, scan.mean) for scan in batch], self.voxels, device))

        return body, network.pts_bbox_head

    def facts_of(self, prepared: VoxelScan) -> dict[str, Any]:
        return {"sweeps": prepared.sweeps}


@dataclass(frozen=True, kw_only=True)
class CenterPointHead(_CenterPoint, BevHead):
    """CenterPoint's head on maps that a `centerpoint` stage of give=bev keeps."""

    name: ClassVar[str] = "centerpoint_head"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("centerpoint_bev",)

    def head(self, device: str) -> CenterHead:
        import torch

        from extractors.batchnorm import fold
        from extractors.centerpoint_network import HeadAlone

        head = self.build_head().eval().requires_grad_(False)
        self.fill(HeadAlone(head))
        fold(head)
        return head.to(memory_format=torch.channels_last).to(device)

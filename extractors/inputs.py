"""What sources hand to extractors: plain arrays with shapes, units and frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Scan:
    """One indoor scan: a triangle mesh or a bare point cloud.

    Attributes:
        xyz: (vertex, 3) float32, metres, z up, in `frame`.
        rgb: (vertex, 3) uint8, or None where the file has no colours.
        faces: (face, 3) int32 vertex indices; (0, 3) for a point cloud.
        axis_align: (4, 4) float64, raw scan frame -> axis-aligned frame, None where the dataset
            gives none (ScanNet test scans).
        frame: frame of `xyz`: `scan` (raw) or `aligned` (axis_align already applied).
        normals: (vertex, 3) float32 where the file stores them, else None; in the raw scan frame, whatever `frame` says
            (ScanQA's aligned arrays move the points alone).
    """

    xyz: np.ndarray
    rgb: np.ndarray | None
    faces: np.ndarray
    axis_align: np.ndarray | None = None
    frame: Literal["scan", "aligned"] = "scan"
    normals: np.ndarray | None = None


@dataclass(frozen=True)
class Clip:
    """A sequence of colour images, still encoded.

    Attributes:
        path: a `.sens` file, a folder of JPEGs, or a video file.
        kind: which of the three it is.
    """

    path: Path
    kind: Literal["sens", "folder", "video"]


@dataclass(frozen=True)
class ObjectGroup:
    """One annotated object of a mesh.

    Attributes:
        object_id: id within the scan, from 0.
        label: raw category, as the annotator typed it.
        segments: (segment,) int64 ids of the mesh segments that make it up.
    """

    object_id: int
    label: str
    segments: np.ndarray


@dataclass(frozen=True)
class Labels:
    """Instance annotation of one mesh, as in its files.

    Attributes:
        segment: (vertex,) int64 segment id of every vertex.
        groups: the objects in the order of the file; an object may be listed twice.
        nyu40: raw category -> nyu40 id (0..40) of the dataset's label table.
    """

    segment: np.ndarray
    groups: tuple[ObjectGroup, ...]
    nyu40: Mapping[str, int]


@dataclass(frozen=True)
class LidarScan:
    """One sweep of the LiDAR.

    Attributes:
        points: (point, 5) float32: x, y, z in metres in the sensor's own frame at its own time (nuScenes LIDAR_TOP: x
            right, y forward, z up), intensity 0..255, ring 0..31.
        to_key: (4, 4) float64, the sensor frame at its time -> the sensor frame at the key frame's time.
        lag: seconds from this sweep to the key frame, 0 or more.
    """

    points: np.ndarray
    to_key: np.ndarray
    lag: float


@dataclass(frozen=True)
class LidarSweeps:
    """A key frame's LiDAR and the sweeps before it.

    Attributes:
        key: the key frame's own sweep; `to_key` is the identity.
        before: earlier sweeps, nearest first.
        missing: sweeps that the tables name and the disk lacks.
        to_ego: (4, 4) float64, the key frame's sensor frame -> ego frame (x forward, y left, z up, metres) at its time.
    """

    key: LidarScan
    before: tuple[LidarScan, ...]
    missing: int
    to_ego: np.ndarray


@dataclass(frozen=True)
class Camera:
    """One camera image, still encoded, and where it was taken.

    Attributes:
        name: `CAM_FRONT` ...
        path: the image file.
        intrinsic: (3, 3) float64, pixels.
        to_lidar: (4, 4) float64, camera frame (x right, y down, z forward) at the image's time -> LIDAR_TOP frame at
            the key frame's time, through both ego poses.
        to_ego: (4, 4) float64, camera frame at the image's time -> ego frame at the key frame's time; None where the
            source does not tell.
    """

    name: str
    path: Path
    intrinsic: np.ndarray
    to_lidar: np.ndarray
    to_ego: np.ndarray | None


@dataclass(frozen=True)
class Cameras:
    """The cameras of a key frame, in the order of `names`; extractors pick by name."""

    views: tuple[Camera, ...]

    def named(self, names: Sequence[str]) -> tuple[Camera, ...]:
        """The cameras of these names, in this order; KeyError names the one that is not there."""
        found = {view.name: view for view in self.views}
        return tuple(found[name] for name in names)


@dataclass(frozen=True)
class Annotations:
    """Annotated objects of a key frame.

    Attributes:
        boxes: (object, 7) float64: x, y, z of the box's centre, length, width, height in metres, yaw in radians
            (counter-clockwise from +x), in the LIDAR_TOP frame of the key frame.
        velocity: (object, 2) float64 metres per second in that frame, NaN where unknown.
        names: classes as detectors name them (`extractors.boxes3d.CLASSES`); `` for a category that they ignore.
        categories: categories as annotated, `vehicle.car`; `` where the source does not tell.
        attributes: `vehicle.moving` ..., `` for none or unknown.
        lidar_points, radar_points: (object,) int64, points inside the box.
        tokens: annotation tokens, `` where the source does not tell.
    """

    boxes: np.ndarray
    velocity: np.ndarray
    names: tuple[str, ...]
    categories: tuple[str, ...]
    attributes: tuple[str, ...]
    lidar_points: np.ndarray
    radar_points: np.ndarray
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Foreground:
    """Virtual points of MSMDFusion for a key frame's LiDAR and its sweeps, still encoded.

    Attributes:
        files: the `.pcd.bin.pkl.npy` file (a pickle) of each scan of `LidarSweeps`: the key frame's, then one per entry
            of `before`; None where a sweep has none.
        absent: where those that are None were looked for.
    """

    files: tuple[Path | None, ...]
    absent: tuple[Path, ...]


@dataclass(frozen=True)
class MaskFiles:
    """Instance masks of a key frame's images, still encoded.

    Attributes:
        files: camera name -> its file (`extractors.masks`); a camera without one is not there.
    """

    files: Mapping[str, Path]


@dataclass(frozen=True)
class ObjectFeatures:
    """Objects of a key frame with features that others made, as NuScenes-QA's `.npz` files have them.

    Attributes:
        features: (object, C) floats.
        boxes: (object, 7) floats: x, y, z, three sizes, yaw, in the maker's convention.
        labels: (object,) int64, in the maker's order of classes; -1 where the file gives none.
    """

    features: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray

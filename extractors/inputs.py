"""What sources hand to extractors: plain arrays with shapes, units and frames."""

from __future__ import annotations

from collections.abc import Mapping
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
        normals: (vertex, 3) float32 where the file stores them, else None.
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

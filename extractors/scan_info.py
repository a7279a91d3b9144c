"""Facts of a scan that others need to place things in it: alignment, bounding box, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from extractors.base import Extractor
from extractors.errors import EmptyInput, InvalidValues
from extractors.geometry import transform
from extractors.inputs import Scan
from storage.schema import Column, Record, Schema


def axis_alignment(scan: Scan) -> np.ndarray:
    """(4, 4) float64 from the scan's own frame to the aligned one; identity where the dataset gives none."""
    if scan.frame == "aligned" or scan.axis_align is None:
        return np.eye(4)
    return scan.axis_align


@dataclass(frozen=True, kw_only=True)
class ScanInfo(Extractor):
    """Axis alignment, bounding box and counts of a mesh or point cloud.

    The box is that of the raw scan frame: points that come aligned are turned back where the alignment is known;
    where it is not, `frame` says `aligned` and the box is in that frame. Vertices that are not finite are counted and
    left out of the box.
    """

    name: ClassVar[str] = "scan_info"
    takes: ClassVar[tuple[str, ...]] = ("scan",)

    @property
    def schema(self) -> Schema:
        """One row per scan."""
        frame = "see column frame"
        return Schema({
            "axis_align": Column((4, 4), "float64", "m", doc="raw scan frame -> aligned frame; identity if unknown"),
            "has_axis_align": Column((), "bool", doc="the dataset gives an alignment"),
            "frame": Column((), "string", doc="frame of the box: scan (raw) or aligned"),
            "bbox_min": Column((3,), "float64", "m", frame),
            "bbox_max": Column((3,), "float64", "m", frame),
            "bbox_center": Column((3,), "float64", "m", frame, doc="(max + min) / 2, origin of SQA3D positions"),
            "vertices": Column((), "int64"),
            "faces": Column((), "int64"),
            "invalid_vertices": Column((), "int64", doc="vertices that are NaN or infinite"),
            "has_color": Column((), "bool"),
        })  # fmt: skip

    def prepare(self, key: str, *inputs: Scan) -> Record:
        """Measure one scan.

        Raises:
            EmptyInput: no vertices.
            InvalidValues: no vertex is finite.
        """
        (scan,) = inputs
        if not len(scan.xyz):
            raise EmptyInput(f"{key}: no vertices")
        finite = np.isfinite(scan.xyz).all(axis=1)
        if not finite.any():
            raise InvalidValues(f"{key}: none of the {len(scan.xyz)} vertices is finite")
        xyz, frame = scan.xyz[finite].astype(np.float64), scan.frame
        if frame == "aligned" and scan.axis_align is not None:
            xyz, frame = transform(xyz, np.linalg.inv(scan.axis_align)), "scan"
        low, high = xyz.min(axis=0), xyz.max(axis=0)
        return {
            "axis_align": np.eye(4) if scan.axis_align is None else np.asarray(scan.axis_align, np.float64),
            "has_axis_align": np.array(scan.axis_align is not None),
            "frame": np.array(frame, object),
            "bbox_min": low, "bbox_max": high, "bbox_center": (low + high) / 2,
            "vertices": np.array(len(scan.xyz), np.int64),
            "faces": np.array(len(scan.faces), np.int64),
            "invalid_vertices": np.array(len(scan.xyz) - finite.sum(), np.int64),
            "has_color": np.array(scan.rgb is not None),
        }  # fmt: skip

    def load(self, device: str = "cpu") -> Callable[[Sequence[Record]], list[Record]]:
        """Nothing to load: `prepare` gives the record."""
        return list

"""Ground-truth objects of an annotated mesh: boxes, labels, classes (ScanQA's pre-processing of ScanNet)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor
from extractors.errors import EmptyInput, InvalidValues
from extractors.geometry import transform
from extractors.inputs import Labels, ObjectGroup, Scan
from extractors.scan_info import axis_alignment
from storage.schema import Column, Record, Schema

_log = logging.getLogger(__name__)

CLASS_NAMES = (
    "cabinet", "bed", "chair", "sofa", "table", "door", "window", "bookshelf", "picture", "counter", "desk", "curtain",
    "refrigerator", "shower curtain", "toilet", "sink", "bathtub", "others",
)  # fmt: skip
_CLASS_NYU40 = (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 24, 28, 33, 34, 36)
_GARBAGE_BIN = 39  # class 17 of the VoteNet lineage
_DROPPED = {0, 1, 2, 22}  # unannotated, wall, floor, ceiling


def nyu40_to_class(nyu40: int, lineage: Literal["scanqa", "votenet"]) -> int:
    """Class 0..17 of a nyu40 id.

    The lineages differ in class 17: ScanRefer, ScanQA and SQA3D put every other kept object there; VoteNet and
    mmdetection3d only nyu40 39, and drop the rest.

    Returns:
        The class, or -1 for what the lineage drops.
    """
    if nyu40 in _CLASS_NYU40:
        return _CLASS_NYU40.index(nyu40)
    if lineage == "votenet":
        return 17 if nyu40 == _GARBAGE_BIN else -1
    return 17 if 3 <= nyu40 <= 40 and nyu40 not in _DROPPED else -1


@dataclass(frozen=True, kw_only=True)
class ScanObjects(Extractor):
    """Boxes of the annotated objects of a `_vh_clean_2` mesh.

    Attributes:
        rules: `exact`: walls, floors, ceilings and unknown labels are left out; a group that is listed twice counts
            once. `legacy`, as ScanQA's code does: they stay where the scan has no more than one object, and of a
            group that is listed twice the later one counts.
    """

    rules: Literal["exact", "legacy"] = "exact"

    name: ClassVar[str] = "scan_objects"
    takes: ClassVar[tuple[str, ...]] = ("scan", "labels")

    @property
    def schema(self) -> Schema:
        """One row per object, in the order of object ids."""
        return Schema(
            {
                "object_id": Column((), "int32", doc="id within the scan, from 0"),
                "label": Column((), "string", doc="raw category"),
                "nyu40": Column((), "int16", doc="nyu40 id, 0 where there is none"),
                "class_scanqa": Column((), "int8", doc="0..17, ScanRefer/ScanQA/SQA3D lineage; -1 none"),
                "class_votenet": Column((), "int8", doc="0..17, VoteNet/mmdetection3d lineage; -1 none"),
                "box_scan": Column((6,), "float64", "m", "scan", doc="centre and size, around all its vertices"),
                "box_aligned": Column((6,), "float64", "m", "aligned", doc="the same along the aligned axes"),
                "vertices": Column((), "int32", doc="mesh vertices of the object"),
                "copies": Column((), "int16", doc="how often the annotation lists the object"),
            },
            element="object",
            compress=True,
        )

    def prepare(self, key: str, *inputs: Any) -> Record:
        """Find the objects of one scan.

        Raises:
            InvalidValues: the annotation belongs to another mesh, names a label that the table does not have, or
                gives one object id to different objects.
            EmptyInput: no vertices.
        """
        scan: Scan = inputs[0]
        labels: Labels = inputs[1]
        if scan.frame != "scan":
            raise InvalidValues(f"{key}: points are {scan.frame}, objects need the raw mesh (layout scans)")
        if not len(scan.xyz):
            raise EmptyInput(f"{key}: no vertices")
        _check_same_mesh(key, scan, labels)
        if self.rules == "exact":
            groups, copies = _without_copies(key, labels.groups)
        else:
            groups, copies = list({g.object_id: g for g in labels.groups}.values()), {}
        owner = _owners(labels.segment, groups)
        nyu40 = {g.object_id: _nyu40(key, g, labels) for g in groups}

        unfiltered = self.rules == "legacy" and len(groups) <= 1
        by_id = {g.object_id: g for g in groups}
        keep = [
            i for i in sorted(by_id)
            if unfiltered or (3 <= nyu40[i] <= 40 and nyu40[i] not in _DROPPED and (owner == i).any())
        ]  # fmt: skip
        finite = np.isfinite(scan.xyz).all(axis=1)
        aligned = transform(scan.xyz.astype(np.float64), axis_alignment(scan))
        mine = [(owner == i) & finite for i in keep]
        return {
            "object_id": np.array(keep, np.int32),
            "label": np.array([by_id[i].label for i in keep], object),
            "nyu40": np.array([nyu40[i] for i in keep], np.int16),
            "class_scanqa": np.array([nyu40_to_class(nyu40[i], "scanqa") for i in keep], np.int8),
            "class_votenet": np.array([nyu40_to_class(nyu40[i], "votenet") for i in keep], np.int8),
            "box_scan": np.array([_box(scan.xyz[m].astype(np.float64)) for m in mine]).reshape(-1, 6),
            "box_aligned": np.array([_box(aligned[m]) for m in mine]).reshape(-1, 6),
            "vertices": np.array([m.sum() for m in mine], np.int32),
            "copies": np.array([copies.get(i, 1) for i in keep], np.int16),
        }

    def load(self, device: str = "cpu") -> Callable[[Sequence[Record]], list[Record]]:
        """Nothing to load: `prepare` gives the record."""
        return list


def _check_same_mesh(key: str, scan: Scan, labels: Labels) -> None:
    if len(labels.segment) != len(scan.xyz):
        raise InvalidValues(
            f"{key}: segments of {len(labels.segment)} vertices, the mesh has {len(scan.xyz)}; "
            "use _vh_clean_2.ply with _vh_clean_2.0.010000.segs.json"
        )
    known = set(np.unique(labels.segment).tolist())
    for group in labels.groups:
        if unknown := sorted(set(group.segments.tolist()) - known):
            raise InvalidValues(
                f"{key}: object {group.object_id} ({group.label}) has {len(unknown)} segments that the mesh lacks "
                f"({unknown[0]} ...); use {key}.aggregation.json, not the one of the hi-res mesh (_vh_clean)"
            )


def _without_copies(key: str, groups: Sequence[ObjectGroup]) -> tuple[list[ObjectGroup], dict[int, int]]:
    """Groups without the later copies (same label and segments), and how often each kept one was listed."""
    kept: dict[tuple[str, frozenset[int]], ObjectGroup] = {}
    copies: dict[int, int] = {}
    for group in groups:
        first = kept.setdefault((group.label, frozenset(group.segments.tolist())), group)
        copies[first.object_id] = copies.get(first.object_id, 0) + 1
    if len(kept) < len(groups):
        _log.warning("%s: %d of %d annotated groups are copies of others", key, len(groups) - len(kept), len(groups))
    ids = [g.object_id for g in kept.values()]
    if clash := sorted({i for i in ids if ids.count(i) > 1}):
        raise InvalidValues(f"{key}: object id {clash[0]} stands for several different objects")
    return list(kept.values()), copies


def _owners(segment: np.ndarray, groups: Sequence[ObjectGroup]) -> np.ndarray:
    """(vertex,) object id, -1 for none; of objects that share a segment the later one has it."""
    names, index = np.unique(segment, return_inverse=True)
    of_segment = np.full(len(names), -1, np.int64)
    for group in groups:
        of_segment[np.searchsorted(names, group.segments)] = group.object_id
    return of_segment[index]


def _nyu40(key: str, group: ObjectGroup, labels: Labels) -> int:
    if group.label not in labels.nyu40:
        raise InvalidValues(
            f"{key}: label {group.label!r} of object {group.object_id} is not in the label table; "
            "use the scannetv2-labels.combined.tsv of this release, or add the row"
        )
    nyu40 = labels.nyu40[group.label]
    return nyu40 if 0 <= nyu40 <= 40 else 0


def _box(xyz: np.ndarray) -> np.ndarray:
    if not len(xyz):
        return np.zeros(6)
    low, high = xyz.min(axis=0), xyz.max(axis=0)
    return np.concatenate([(low + high) / 2, high - low])

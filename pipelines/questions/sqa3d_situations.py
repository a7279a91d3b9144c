"""Situations of SQA3D: their poses in the frames of the scan, and the localization task as a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from extractors.errors import InvalidValues
from extractors.geometry import SituationPose, quaternion_to_matrix, situation_pose
from pipelines.sources.json_file import read_json
from storage.schema import Column, Record, Schema

POSE_COLUMNS = {
    "position": Column((3,), "float64", "m", "scan, origin at bbox_center", nullable=True, doc="as annotated"),
    "rotation": Column((4,), "float64", "quaternion xyzw", "scan", nullable=True, doc="as annotated; zero faces -x"),
    "pose_scan": Column((7,), "float64", "m, quaternion xyzw", "scan", nullable=True),
    "pose_aligned": Column((7,), "float64", "m, quaternion xyzw", "aligned", nullable=True),
    "facing_scan": Column((2,), "float64", "", "scan", nullable=True, doc="unit vector"),
    "facing_aligned": Column((2,), "float64", "", "aligned", nullable=True, doc="unit vector"),
    "pose_missing": Column((), "string", doc="why a pose is null; empty where none is"),
    "alignment_known": Column((), "bool", doc="False: the dataset gives none, pose_aligned takes the identity"),
}


def scan_frames(record: Record) -> dict[str, Any]:
    """What placing needs of a `scan_info` record, as plain values."""
    return {
        "center": record["bbox_center"].tolist(),
        "axis_align": record["axis_align"].tolist() if record["has_axis_align"] else None,
        "frame": str(record["frame"]),
    }


def place(position: list[float] | None, xyzw: list[float] | None, scan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The pose columns of one situation, null (None) where they can't be known.

    Args:
        position, xyzw: as annotated; None without annotation.
        scan: `scan_frames` of its scene, None where the scene has no record.
    """
    row: dict[str, Any] = dict.fromkeys(POSE_COLUMNS)
    row |= {"position": position, "rotation": xyzw, "alignment_known": bool(scan and scan["axis_align"])}
    if position is None or xyzw is None:
        return row | {"pose_missing": "no annotation"}
    try:
        if not np.isfinite(position).all():
            raise InvalidValues(f"position {position} is not finite")
        row["facing_scan"] = SituationPose(np.zeros(3), quaternion_to_matrix(np.array(xyzw))).facing.tolist()
    except InvalidValues as error:
        return row | {"pose_missing": str(error)}
    if scan is None:
        return row | {"pose_missing": "no scan_info record of the scene: mesh absent or failed"}
    if scan["frame"] != "scan":
        return row | {"pose_missing": "points are given in the aligned frame only, without the alignment"}
    pose = situation_pose(np.array(position), np.array(xyzw), np.array(scan["center"]))
    aligned = pose.aligned(np.eye(4) if scan["axis_align"] is None else np.array(scan["axis_align"]))
    return row | {
        "pose_scan": [*pose.position.tolist(), *pose.quaternion.tolist()],
        "pose_aligned": [*aligned.position.tolist(), *aligned.quaternion.tolist()],
        "facing_aligned": aligned.facing.tolist(),
        "pose_missing": "",
    }


def written_pose(entry: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Position and quaternion (xyzw) of an annotation, read by key: files and documents order them differently."""
    position, rotation = entry["position"], entry["rotation"]
    return [float(position[k]) for k in "xyz"], [float(rotation[f"_{k}"]) for k in "xyzw"]


def to_record(row: Mapping[str, Any], schema: Schema) -> Record:
    """Plain values as arrays: None becomes NaN, a list in a text column JSON."""
    record: Record = {}
    for name, column in schema.columns.items():
        value = row[name]
        if column.dtype == "string":
            record[name] = np.array(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), object)
        else:
            missing = np.full([size or 0 for size in column.dims], np.nan)
            record[name] = np.array(missing if value is None else value, column.dtype)
    return record


def checked_entries(path: Path, kind: str, needed: Mapping[str, type]) -> list[dict[str, Any]]:
    """The list `kind` of one of SQA3D's JSON files, whose entries have all they need.

    Raises:
        InputError: the file is missing, damaged, or an entry lacks a field or has one of another type; names it.
    """
    data = read_json(path, "download SQA3D's sqa_task.zip")
    entries = data.get(kind) if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise InvalidValues(f"{path}: no list '{kind}'; expected a file of SQA3D's sqa_task")
    for index, entry in enumerate(entries):
        for name, type_ in needed.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(name), type_):
                raise InvalidValues(f"{path}: {kind}[{index}] has no '{name}' of type {type_.__name__}; mend the file")
        try:
            if "rotation" in needed:
                written_pose(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValues(f"{path}: {kind}[{index}] has no pose x, y, z, _x, _y, _z, _w: {error!r}") from error
    return entries


@dataclass(frozen=True)
class SQA3DSituations:
    """Situations alone, as the localization task gives them: text and pose, no question.

    The key is the scene and the place in the file, `scene0000_00/00012`.

    Attributes:
        path: a localization JSON: `annotations[]` of scene_id, situation, alternative_situation, position, rotation.
    """

    path: Path

    name: ClassVar[str] = "sqa3d_situations"
    version: ClassVar[int] = 1
    of: ClassVar[str] = "scan_info"

    @property
    def schema(self) -> Schema:
        """One row per situation."""
        texts = {
            "scene_id": Column((), "string"),
            "situation": Column((), "string"),
            "alternatives": Column((), "string", doc="JSON list of other texts"),
        }
        return Schema({**texts, **POSE_COLUMNS})

    def items(self) -> Iterator[tuple[str, bytes, str]]:
        """(key, digest of the entry, scene_id) of every situation."""
        for key, entry in self._read():
            yield key, hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).digest(), entry["scene_id"]

    def build(self, keys: set[str], parents: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        """Records of the situations asked for."""
        for key, entry in self._read():
            if key in keys:
                scene = entry["scene_id"]
                row = place(*written_pose(entry), scan_frames(parents[scene]) if scene in parents else None)
                row |= {"scene_id": scene, "situation": entry["situation"]}
                row["alternatives"] = entry.get("alternative_situation") or []
                yield key, to_record(row, self.schema)

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        needed = {"scene_id": str, "situation": str, "position": dict, "rotation": dict}
        for index, entry in enumerate(checked_entries(self.path, "annotations", needed)):
            yield f"{entry['scene_id']}/{index:05d}", entry

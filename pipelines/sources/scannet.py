"""ScanNet v2 as downloaded, or as ScanQA or mmdetection3d prepared it (docs/scannet.md draws the folders)."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.errors import InputError, InvalidValues, MissingFile, UnsupportedFile
from extractors.inputs import Clip, Labels, ObjectGroup, Scan
from extractors.safe_pickle import read_pickle
from pipelines.inputs import SETTLED_NS
from pipelines.sources.json_file import read_json
from pipelines.sources.ply import read_ply
from pipelines.sources.points import read_points

Layout = Literal["scans", "scanqa", "mmdet3d"]

_TSV = "scannetv2-labels.combined.tsv"


@dataclass(frozen=True)
class ScanNet:
    """Scans of ScanNet v2; the item key is the scene id, `scene0000_00`.

    Offers `scan` (mesh or points and axis alignment), `clip` (the `.sens` recording) and `labels` (segments, objects
    and label table).

    Attributes:
        root: the folder that holds `scans/` (and `scans_test/`), or the scene folders themselves; for the other
            layouts the one that holds `scannet_data/` or `points/`, or the `.bin` files themselves.
        split: `all`, or `train`, `val`, `test` of the list files `scannetv2_SPLIT.txt`, or a path of such a list.
            Scenes of the list that are not on disk are left out.
        scenes: only these; one that is not on disk fails by name. Empty for all of the split.
        layout: where scans are read from; `auto` takes the first of scans, scanqa, mmdet3d that is there.
    """

    root: Path
    split: str = "all"
    scenes: tuple[str, ...] = ()
    layout: Literal["auto", "scans", "scanqa", "mmdet3d"] = "auto"

    name: ClassVar[str] = "scannet"
    kinds: ClassVar[tuple[str, ...]] = ("scan", "clip", "labels")

    def keys(self) -> list[str]:
        """Scene ids, sorted.

        Raises:
            MissingFile: no such folder, no scenes in it, or no list of that split.
        """
        wanted = set(self.scenes) or self._found[1]
        if self.split != "all":
            listed = self._listed()
            wanted = wanted & listed
            if not wanted:
                raise MissingFile(f"{self.root}: none of the {len(listed)} scenes of split {self.split} is there")
        return sorted(wanted)

    def files(self, key: str, kind: str) -> list[Path]:
        """The files that make up one input."""
        folder = self._folder(key)
        if kind == "clip":
            return [folder / f"{key}.sens"] if folder else []
        if kind == "labels":
            if folder is None or self._layout != "scans":
                return []
            mesh = f"{key}_vh_clean_2"
            return [folder / f"{mesh}.0.010000.segs.json", folder / f"{key}.aggregation.json", self._tsv(folder)]
        if kind != "scan":
            raise ValueError(f"source scannet has no {kind!r}; it offers {', '.join(self.kinds)}")
        match self._layout:
            case "scans":
                folder = folder or self.root / key
                return [folder / f"{key}_vh_clean_2.ply", folder / f"{key}.txt"]
            case "scanqa":
                info = [folder / f"{key}.txt"] if folder else []
                aligned = self.root / "scannet_data" / f"{key}_aligned_vert.npy"
                return [aligned if aligned.exists() else aligned.with_name(f"{key}_vert.npy"), *info]
            case "mmdet3d":
                return [self._points / f"{key}.bin", *self._infos]

    def facts(self, key: str, kind: str) -> bytes:
        """Nothing: all is in the files."""
        return b""

    def open(self, key: str, kind: str) -> Scan | Clip | Labels:
        """Read one input of a scene; see `Source.open`."""
        paths = self.files(key, kind)
        if not paths:
            raise MissingFile(f"{self.root}: no {kind} of {key}: it needs the folder scans/{key} of the download")
        if kind == "clip":
            if not paths[0].is_file():
                raise MissingFile(f"{paths[0]}: no such file; download the .sens or leave out the stages on clips")
            return Clip(paths[0], "sens")
        if kind == "labels":
            return read_labels(*paths)
        if paths[0].suffix == ".bin":
            return read_points(
                paths[0], next((a for p in paths[1:] if (a := _alignments(p).get(key)) is not None), None)
            )
        axis_align = read_axis_alignment(paths[1]) if len(paths) > 1 and paths[1].is_file() else None
        if paths[0].suffix == ".npy":
            return read_points(paths[0], axis_align, "aligned" if paths[0].stem.endswith("aligned_vert") else "scan")
        return read_ply(paths[0], axis_align)

    @property
    def _layout(self) -> Layout:
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[Layout, set[str]]:
        """The layout in use and the scenes that it has."""
        if not self.root.is_dir():
            raise MissingFile(f"{self.root}: no such folder; source.root is the folder that holds ScanNet's scans/")
        folders = (p for base in self._bases for p in base.iterdir() if p.is_dir())
        scenes: dict[Layout, set[str]] = {
            "scans": {p.name for p in folders if re.fullmatch(r"scene.*_\d+", p.name)},
            "scanqa": {re.sub(r"(_aligned)?_vert$", "", p.stem) for p in self.root.glob("scannet_data/*_vert.npy")},
            "mmdet3d": {p.stem for p in self._points.glob("*.bin")},
        }
        wanted: Sequence[Layout] = list(scenes) if self.layout == "auto" else [self.layout]
        layout = next((name for name in wanted if scenes[name]), None)
        if layout is None:
            raise MissingFile(
                f"{self.root}: no scans of layout {self.layout}; expected scans/SCENE/SCENE_vh_clean_2.ply, "
                "scannet_data/SCENE_aligned_vert.npy or points/SCENE.bin"
            )
        return layout, scenes[layout]

    @property
    def _bases(self) -> list[Path]:
        return [p for p in (self.root / "scans", self.root / "scans_test", self.root) if p.is_dir()]

    @property
    def _points(self) -> Path:
        return self.root / "points" if (self.root / "points").is_dir() else self.root

    @cached_property
    def _infos(self) -> list[Path]:
        return sorted(self.root.glob("scannet_infos*.pkl"))

    def _folder(self, key: str) -> Path | None:
        return next((base / key for base in self._bases if (base / key).is_dir()), None)

    def _tsv(self, folder: Path) -> Path:
        places = [self.root / _TSV, self.root / "meta_data" / _TSV, folder.parent / _TSV]
        return next((p for p in places if p.is_file()), places[0])

    def _listed(self) -> set[str]:
        name = f"scannetv2_{self.split}.txt"
        places = [Path(self.split), self.root / name, self.root / "meta_data" / name, self.root.parent / name]
        path = next((p for p in places if p.is_file()), None)
        if path is None:
            if Path(self.split).name != self.split or self.split.endswith(".txt"):
                raise MissingFile(f"{self.split}: no such list; give train, val, test, or a file of scene names")
            raise MissingFile(f"no list of split {self.split!r}: put {name} into {self.root}, or give a list's path")
        return set(path.read_text().split())


def read_axis_alignment(path: Path) -> np.ndarray | None:
    """Read `<scene>.txt`.

    Returns:
        (4, 4) float64 raw scan frame -> axis-aligned frame, metres; None where the file gives none (test scans).

    Raises:
        InvalidValues: not 16 finite numbers.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    entries = dict(re.split(r"\s*=\s*", line.strip(), maxsplit=1) for line in text.splitlines() if "=" in line)
    if "axisAlignment" not in entries:
        return None
    return _rigid(entries["axisAlignment"].split(), f"{path}: axisAlignment")


def read_labels(segments: Path, aggregation: Path, label_table: Path) -> Labels:
    """Read the annotation of a `_vh_clean_2` mesh.

    Args:
        segments: `<scene>_vh_clean_2.0.010000.segs.json`.
        aggregation: `<scene>.aggregation.json` (not `_vh_clean.aggregation.json`, which belongs to the hi-res mesh).
        label_table: `scannetv2-labels.combined.tsv`.

    Raises:
        MissingFile, EmptyInput, TruncatedFile, UnsupportedFile: of the file that is named.
    """
    hint = "download the annotation or leave out the stages on labels"
    try:
        segment = np.array(read_json(segments, hint)["segIndices"], np.int64)
        groups = tuple(
            ObjectGroup(int(g["objectId"]), str(g["label"]), np.array(g["segments"], np.int64))
            for g in read_json(aggregation, hint)["segGroups"]
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnsupportedFile(f"{segments} or {aggregation}: not ScanNet's segs and aggregation: {error!r}") from error
    if not label_table.is_file():
        raise MissingFile(f"{label_table}: no such file; put ScanNet's {_TSV} into the root folder")
    return Labels(segment, groups, _read_nyu40(label_table, _version(label_table)))


def _version(path: Path) -> tuple[int, ...]:
    """Another one when the file was written again, its times set back or not: workers outlive such changes.

    Of a file that changed a moment ago it is another one each time: the clock's grain could hide one more change.
    """
    status = path.stat()
    if time.time_ns() - status.st_ctime_ns < SETTLED_NS:
        return (time.monotonic_ns(),)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(4)
def _read_nyu40(path: Path, _version: tuple[int, ...]) -> dict[str, int]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file, delimiter="\t")
            if not {"raw_category", "nyu40id"} <= set(rows.fieldnames or ()):
                raise UnsupportedFile(f"{path}: no columns raw_category and nyu40id; it has {rows.fieldnames}")
            return {row["raw_category"]: int(row["nyu40id"]) for row in rows if row["nyu40id"]}
    except InputError:
        raise
    except (ValueError, csv.Error) as error:
        raise UnsupportedFile(f"{path}: not ScanNet's label table: {error}; get it again") from error


def _alignments(infos: Path) -> dict[str, np.ndarray]:
    return _read_alignments(infos, _version(infos))


@lru_cache(4)
def _read_alignments(infos: Path, _version: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Axis alignments of an info pickle of mmdetection3d, of its format before or since 1.1."""
    data = read_pickle(infos)
    try:
        if isinstance(data, dict):
            entries = [(e["lidar_points"]["lidar_path"], e.get("axis_align_matrix")) for e in data["data_list"]]
        else:
            entries = [(e["point_cloud"]["lidar_idx"], (e.get("annos") or {}).get("axis_align_matrix")) for e in data]
        names = [Path(name).stem for name, _ in entries]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UnsupportedFile(f"{infos}: not mmdetection3d's infos of ScanNet: {error!r}") from error
    where = f"{infos}: axis_align_matrix of"
    return {key: _rigid(m, f"{where} {key}") for key, (_, m) in zip(names, entries, strict=True) if m is not None}


def _rigid(values: Any, where: str) -> np.ndarray:
    try:
        matrix = np.array(values, np.float64).reshape(4, 4)
    except (ValueError, TypeError) as error:
        raise InvalidValues(f"{where}: expected 16 numbers: {error}") from error
    if not np.isfinite(matrix).all():
        raise InvalidValues(f"{where}: has values that are not finite")
    rotation = matrix[:3, :3]
    if np.abs(rotation @ rotation.T - np.eye(3)).max() > 0.01 or np.abs(matrix[3] - (0, 0, 0, 1)).max() > 0.01:
        raise InvalidValues(f"{where}: is no rotation and shift: {matrix.round(3).tolist()}")
    return matrix

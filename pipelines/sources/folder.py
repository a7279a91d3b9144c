"""Loose files: every mesh, point cloud, recording, video and folder of JPEGs under one folder."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from extractors.errors import MissingFile
from extractors.inputs import Clip, Scan
from pipelines.sources.ply import read_ply
from pipelines.sources.points import read_points

_SCANS = {".ply", ".npy", ".bin"}
_VIDEOS = {".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv", ".flv", ".3gp", ".ogv"}
_JPEGS = {".jpg", ".jpeg"}


@dataclass(frozen=True)
class Folder:
    """Files of any layout; the item key is the path below `root` without its suffix.

    `a/b.ply` and `a/b.mp4` are the scan and the clip of one item `a/b`. Where two files would be the same input of one
    item (`b.mp4` and `b.mov`), both keep their suffix in their keys. A folder with JPEGs directly in it is one clip;
    its key is the folder's path, for `root` itself the folder's name.

    Attributes:
        root: the folder; links to folders are not followed.
        match: a pattern of paths below `root`, `*.mp4` or `kitchen/*`; others are left out.
    """

    root: Path
    match: str = "*"

    name: ClassVar[str] = "folder"
    kinds: ClassVar[tuple[str, ...]] = ("scan", "clip")

    def keys(self) -> list[str]:
        """Item keys, sorted.

        Raises:
            MissingFile: no such folder, or nothing in it that is read.
        """
        if not self._inputs:
            known = ", ".join(sorted(_SCANS | _VIDEOS | {".sens"} | _JPEGS))
            raise MissingFile(f"{self.root}: no file matches {self.match!r} among {known}")
        return sorted({key for key, _ in self._inputs})

    def files(self, key: str, kind: str) -> list[Path]:
        """The one file (or folder of JPEGs) of an input; none where the item does not offer it."""
        if kind not in self.kinds:
            raise ValueError(f"source folder has no {kind!r}; it offers {', '.join(self.kinds)}")
        path = self._inputs.get((key, kind))
        return [self.root / path] if path else []

    def facts(self, key: str, kind: str) -> bytes:
        """Nothing: all is in the files."""
        return b""

    def open(self, key: str, kind: str) -> Scan | Clip:
        """Read one input; see `Source.open`."""
        paths = self.files(key, kind)
        if not paths:
            raise MissingFile(f"{self.root}: item {key!r} has no {kind}")
        path = paths[0]
        if kind == "scan":
            return read_ply(path) if path.suffix.lower() == ".ply" else read_points(path)
        form: Literal["sens", "folder", "video"] = (
            "sens" if path.suffix.lower() == ".sens" and not path.is_dir() else "folder" if path.is_dir() else "video"
        )
        return Clip(path, form)

    @cached_property
    def _inputs(self) -> dict[tuple[str, str], str]:
        """(key, kind) -> path below root."""
        if not self.root.is_dir():
            raise MissingFile(f"{self.root}: no such folder")
        found: list[tuple[str, str, str]] = []  # kind, key without suffix, path
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
            base = os.path.relpath(folder, self.root)
            if any(os.path.splitext(n)[1].lower() in _JPEGS for n in names):
                found.append(("clip", self.root.resolve().name if base == "." else base, base))
            for name in names:
                path = os.path.normpath(os.path.join(base, name))
                stem, suffix = os.path.splitext(path)
                if name.startswith(".") or not fnmatch(path, self.match):
                    continue
                if suffix.lower() in _SCANS:
                    found.append(("scan", stem, path))
                elif suffix.lower() in _VIDEOS or suffix.lower() == ".sens":
                    found.append(("clip", stem, path))
        found = [f for f in found if f[2] == "." or fnmatch(f[2], self.match)]
        taken = Counter((kind, key) for kind, key, _ in found)
        return {(key if taken[kind, key] == 1 or key == path else path, kind): path for kind, key, path in found}

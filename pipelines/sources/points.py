"""Bare point clouds: `.npy` arrays of ScanQA, `.bin` files of mmdetection3d, `.pcd.bin` scans of nuScenes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from extractors.errors import EmptyInput, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from extractors.inputs import Scan

_BIN_COLUMNS = 6  # x y z r g b
_LIDAR_COLUMNS = 5  # x y z intensity ring


def read_points(
    path: str | Path, axis_align: np.ndarray | None = None, frame: Literal["scan", "aligned"] = "scan"
) -> Scan:
    """Read a point cloud without faces.

    Args:
        path: `.npy`: an array (point, 3 | 6 | 9) of x y z, colour 0..255 and normal; `.bin`: float32 x y z r g b.
        axis_align: (4, 4) raw scan frame -> axis-aligned frame, handed on.
        frame: frame of the file's coordinates.

    Raises:
        MissingFile, EmptyInput: no such file, no points.
        TruncatedFile: a `.bin` file that ends within a point, a `.npy` file shorter than it says.
        UnsupportedFile: another shape, or no numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFile(f"{path}: no such file; make the dataset's point files or leave the scene out")
    if not path.stat().st_size:
        raise EmptyInput(f"{path}: zero bytes; make it again")
    table = _read_npy(path) if path.suffix.lower() == ".npy" else _read_bin(path)
    if not len(table):
        raise EmptyInput(f"{path}: no points")
    colors = table[:, 3:6] if table.shape[1] >= 6 else None
    return Scan(
        xyz=np.ascontiguousarray(table[:, :3], np.float32),
        rgb=None if colors is None else np.clip(np.rint(np.nan_to_num(colors)), 0, 255).astype(np.uint8),
        faces=np.empty((0, 3), np.int32),
        axis_align=axis_align,
        frame=frame,
        normals=np.ascontiguousarray(table[:, 6:9], np.float32) if table.shape[1] == 9 else None,
    )


def read_lidar(path: Path) -> np.ndarray:
    """Read a LIDAR_TOP file, `.pcd.bin`.

    Returns:
        (point, 5) float32: x right, y forward, z up in metres, intensity 0..255, ring 0..31.

    Raises:
        EmptyInput: zero bytes.
        TruncatedFile: no whole number of points of 20 bytes.
        UnsupportedFile: points of another number of columns.
        InvalidValues: NaN or infinite values.
    """
    size = path.stat().st_size
    if not size:
        raise EmptyInput(f"{path}: zero bytes, no points; get the file again")
    if size % (4 * _LIDAR_COLUMNS):
        raise TruncatedFile(
            f"{path}: {size} bytes are no whole number of points of 20 bytes (float32 x, y, z, intensity, ring); "
            "get the file again"
        )
    points = np.fromfile(path, "<f4").reshape(-1, _LIDAR_COLUMNS)
    if not np.isfinite(points).all():
        bad = int((~np.isfinite(points)).any(1).sum())
        raise InvalidValues(
            f"{path}: {bad} of {len(points)} points have values that are not finite; get the file again"
        )
    if (points[:, 4] % 1).any():
        raise UnsupportedFile(
            f"{path}: the fifth value of a point is no ring number, such as {points[points[:, 4] % 1 > 0, 4][0]:g}; "
            "expected float32 x, y, z, intensity, ring"
        )
    return points


def _read_npy(path: Path) -> np.ndarray:
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        kind = TruncatedFile if "mmap length" in str(error) else UnsupportedFile
        raise kind(f"{path}: cannot be read as an array of numbers: {error}") from error
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.shape[1] not in (3, 6, 9):
        raise UnsupportedFile(f"{path}: shape {getattr(table, 'shape', None)}, expected (point, 3 | 6 | 9)")
    if table.dtype.kind not in "fiu":
        raise UnsupportedFile(f"{path}: dtype {table.dtype}, expected numbers")
    return table


def _read_bin(path: Path) -> np.ndarray:
    size, row = path.stat().st_size, 4 * _BIN_COLUMNS
    if size % row:
        raise TruncatedFile(f"{path}: {size} bytes are no whole number of points of {row} bytes (float32 x y z r g b)")
    return np.fromfile(path, "<f4").reshape(-1, _BIN_COLUMNS)

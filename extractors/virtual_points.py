"""Virtual points (Yin et al. 2021; MSMDFusion's kind, Jiao et al. 2023): depth for pixels of objects without an echo.

`VirtualPointsFiles` reads the files that MSMDFusion's authors published; `VirtualPoints` makes such points of instance
masks. Both give the same columns. A detector sees other features with masks of another segmenter; which of the two
stages ran, and with which settings, is in the recipe that the manifest keeps for the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor, seed_for
from extractors.boxes3d import CLASSES
from extractors.errors import InputError, InvalidValues, MissingFile, UnsupportedFile
from extractors.image_preprocess import named_views
from extractors.inputs import Cameras, Foreground, LidarSweeps, MaskFiles
from extractors.masks import Instance, read_masks
from extractors.msmdfusion_inputs import CAMERAS, IMAGE_SIZE, lidar_to_image
from extractors.safe_pickle import read_pickled_npy
from storage.schema import Column, Record, Schema

SCHEMA = Schema(
    {
        "pixel": Column((2,), "float32", "px", doc="u, v in the camera's image of 1600 x 900"),
        "depth": Column((), "float32", "m", doc="along the camera's axis"),
        "xyz": Column((3,), "float32", "m", "lidar", doc="in the LIDAR_TOP frame of its own sweep"),
        "paint": Column((11,), "float32", doc="one-hot of ten classes, in the order of the file or stage; mask score"),
        "camera": Column((), "uint8", doc="index into " + ", ".join(CAMERAS)),
        "sweep": Column((), "uint8", doc="0 for the key frame, else the how manieth sweep before it"),
        "real": Column((), "bool", doc="an echo of the LiDAR; else its depth is that of echoes near by"),
    },
    element="point",
)
"""Rows come by camera, then sweep, virtual before real ones: the order that decides which points a full voxel keeps."""

_NUIMAGES = (
    "car", "truck", "trailer", "bus", "construction_vehicle",
    "bicycle", "motorcycle", "pedestrian", "traffic_cone", "barrier",
)  # fmt: skip
_LISTS = ("virtual_pixel_indices", "virtual_points", "real_pixel_indices", "real_points")
_NEIGHBOURS = 6  # echoes that lend a virtual point their depths


@dataclass(frozen=True)
class CameraPoints:
    """Virtual points of one sweep in one camera, then the real ones.

    Attributes:
        pixels: (n, 3) float32 u, v in pixels of 1600 x 900, depth in metres.
        points: (n, 14) float32 x, y, z in metres (LIDAR_TOP of the sweep), one-hot of ten classes, mask score.
        real: (n,) bool.
    """

    pixels: np.ndarray
    points: np.ndarray
    real: np.ndarray


@dataclass(frozen=True, kw_only=True)
class VirtualPointsFiles(Extractor):
    """Read the published `<LiDAR file>.pkl.npy` of a key frame and of the sweeps before it.

    Takes   Foreground.
    Gives   the columns of `SCHEMA`; no row where the files list no point.
    """

    name: ClassVar[str] = "virtual_points_files"
    takes: ClassVar[tuple[str, ...]] = ("foreground",)

    @property
    def schema(self) -> Schema:
        return SCHEMA

    def prepare(self, key: str, *inputs: Foreground) -> Record:
        """Read the files; a sweep may have none, the key frame not.

        Raises:
            MissingFile: the key frame has no file.
            UnsupportedFile, InvalidValues, EmptyInput: a file is not of this kind.
        """
        (found,) = inputs
        if found.files[0] is None:
            present = sum(file is not None for file in found.files)
            where = found.absent[0] if found.absent else "its folder"
            raise MissingFile(
                f"{key}: no virtual points at {where} ({present} of {len(found.files)} files of its sweeps are there); "
                f"download them, or make them from masks with the stage virtual_points"
            )
        try:
            parts = [
                (camera, sweep, points)
                for sweep, path in enumerate(found.files)
                if path is not None
                for camera, points in enumerate(read_foreground(path))
            ]
        except InputError as error:
            raise type(error)(f"{key}: {error}") from error
        return _record(sorted(parts, key=lambda part: part[:2]))

    def load(self, device: str = "cpu") -> Callable[[Sequence[Record]], list[Record]]:
        return list


@dataclass(frozen=True, kw_only=True)
class VirtualPoints(Extractor):
    """Make virtual points from a key frame's instance masks (or boxes in its images), as MSMDFusion's generator does.

    An echo within a mask is a real point of it, of the first one where masks overlap. In each mask pixels are drawn,
    and each takes the depths of the six nearest echoes of the same mask. Sweeps get none: they have no masks.

    Takes   LidarSweeps, Cameras, MaskFiles.
    Gives   the columns of `SCHEMA`; no row where no mask holds an echo.

    Attributes:
        per_mask: pixels drawn in each mask, seeded by the item's key.
        one_hot: order of the classes: `nuimages`, that of the segmenter behind the published files as far as is known,
            or `detector`, that of `boxes3d.CLASSES`.
        min_score: masks below it are left out.
    """

    name: ClassVar[str] = "virtual_points"
    takes: ClassVar[tuple[str, ...]] = ("lidar", "cameras", "masks")

    per_mask: int = 50
    one_hot: Literal["nuimages", "detector"] = "nuimages"
    min_score: float = 0.0

    def __post_init__(self) -> None:
        if self.per_mask < 1:
            raise ValueError(f"{self.name}: per_mask is {self.per_mask}, expected 1 or more")
        if self.one_hot not in ("nuimages", "detector"):
            raise ValueError(f"{self.name}: one_hot is {self.one_hot!r}, expected nuimages or detector")

    @property
    def schema(self) -> Schema:
        return SCHEMA

    def prepare(self, key: str, *inputs: Any) -> Record:
        """Read the masks and make the points.

        Raises:
            MissingFile: a camera, or the masks of one, are not there.
            InvalidValues, UnsupportedFile: masks of another size or kind, or a calibration that no camera has.
        """
        lidar: LidarSweeps = inputs[0]
        cameras: Cameras = inputs[1]
        masks: MaskFiles = inputs[2]
        rng = np.random.RandomState(seed_for(key, self.name))  # its stream is frozen by numpy's guarantee
        order = _NUIMAGES if self.one_hot == "nuimages" else CLASSES
        parts = []
        for camera, view in enumerate(named_views(cameras, CAMERAS, key)):
            if view.name not in masks.files:
                raise MissingFile(
                    f"{key}: no masks of {view.name}; source.masks is their folder, and an image in which nothing was "
                    f"found has a file with n = 0"
                )
            try:
                found = read_masks(masks.files[view.name], IMAGE_SIZE)
            except InputError as error:
                raise type(error)(f"{key} {view.name}: {error}") from error
            instances = [one for one in found if one.score >= self.min_score]
            echoes = lidar.key.points[:, :3]
            parts.append((camera, 0, make_points(echoes, lidar_to_image(view), instances, order, self.per_mask, rng)))
        return _record(parts)

    def load(self, device: str = "cpu") -> Callable[[Sequence[Record]], list[Record]]:
        return list


def read_foreground(path: Path) -> list[CameraPoints]:
    """The points of one published file, by camera.

    Points of three columns get class and score from the last eleven columns of their pixels, as older files have it.

    Raises:
        MissingFile, EmptyInput: no such file, or nothing in it.
        UnsupportedFile: not a pickled dict of four lists of six arrays.
        InvalidValues: arrays whose shapes do not go together, NaN or infinity.
    """
    content = read_pickled_npy(path)
    if not isinstance(content, Mapping) or not set(_LISTS) <= content.keys():
        raise UnsupportedFile(f"{path}: expected a dict with {', '.join(_LISTS)}")
    if strange := [name for name in _LISTS if not isinstance(content[name], list | tuple | np.ndarray)]:
        raise UnsupportedFile(
            f"{path}: {strange[0]} is a {type(content[strange[0]]).__name__}, expected a list of arrays"
        )
    lists = [list(content[name]) for name in _LISTS]
    if all(not cameras for cameras in lists):  # a sweep in which nothing was found
        return []
    if any(len(cameras) != len(CAMERAS) for cameras in lists):
        raise UnsupportedFile(f"{path}: {', '.join(_LISTS)} have {[len(c) for c in lists]} cameras, expected 6 each")
    found = []
    for camera, (pixels, points, real_pixels, real_points) in enumerate(zip(*lists, strict=True)):
        where = f"{path}: {CAMERAS[camera]}"
        parts = [_checked(pixels, points, where), _checked(real_pixels, real_points, where)]
        pixels, points = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        found.append(CameraPoints(pixels, points, np.arange(len(pixels)) >= len(parts[0][0])))
    return found


def make_points(
    xyz: np.ndarray,
    projection: np.ndarray,
    instances: Sequence[Instance],
    order: Sequence[str],
    per_mask: int,
    rng: np.random.RandomState,
) -> CameraPoints:
    """Real and virtual points of one camera.

    Args:
        xyz: (echo, 3) float32 metres.
        projection: (4, 4) float64, the frame of `xyz` -> (u d, v d, d, 1) in pixels.
        instances: masks in the order of their right to an echo.
        order: classes in the order of the one-hot code.
        per_mask: pixels drawn in each mask that holds an echo; of smaller masks the first drawn one is repeated.
    """
    projected = xyz.astype(np.float64) @ projection[:3, :3].T + projection[:3, 3]
    depth = projected[:, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        uv = projected[:, :2] / depth[:, None]
        seen = np.flatnonzero((depth > 0) & (uv > 0).all(1) & (uv < IMAGE_SIZE).all(1))
    pixel, depth = np.floor(uv[seen]).astype(np.int64), depth[seen]
    owner = np.full(len(seen), -1)
    for number, instance in reversed(list(enumerate(instances))):  # the first comes last and so stays
        owner[instance.mask[pixel[:, 1], pixel[:, 0]]] = number
    paint = np.zeros((len(instances) + 1, 11))
    for number, instance in enumerate(instances):
        paint[number, order.index(instance.name)], paint[number, 10] = 1, instance.score

    unproject = np.linalg.inv(projection)
    pixels, points = [np.empty((0, 3))], [np.empty((0, 14))]
    for number, instance in enumerate(instances):
        echoes = np.flatnonzero(owner == number)
        if not len(echoes):
            continue
        inside = np.flatnonzero(instance.mask)
        drawn = inside[rng.choice(len(inside), min(per_mask, len(inside)), replace=False)]
        drawn = np.append(drawn, np.repeat(drawn[:1], per_mask - len(drawn)))
        place = np.stack([drawn % IMAGE_SIZE[0], drawn // IMAGE_SIZE[0]], 1)
        squared = ((place[:, None] - pixel[echoes]) ** 2).sum(2)
        lenders = echoes[np.argsort(squared, axis=1, kind="stable")[:, :_NEIGHBOURS]]
        made = np.column_stack([np.repeat(place, lenders.shape[1], axis=0), depth[lenders].ravel()])
        pixels.append(made)
        rays = np.column_stack([made[:, :2] * made[:, 2:], made[:, 2]])
        lifted = rays @ unproject[:3, :3].T + unproject[:3, 3]
        points.append(np.column_stack([lifted, np.broadcast_to(paint[number], (len(made), 11))]))
    virtual = sum(map(len, pixels))
    hit = np.flatnonzero(owner >= 0)
    pixels.append(np.column_stack([pixel[hit], depth[hit]]))
    points.append(np.column_stack([xyz[seen[hit]], paint[owner[hit]]]))
    rows = np.concatenate(pixels).astype(np.float32)
    return CameraPoints(rows, np.concatenate(points).astype(np.float32), np.arange(len(rows)) >= virtual)


def _checked(pixels: Any, points: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3) and (n, 14) float32 of one camera's arrays."""
    try:
        pixels, points = np.asarray(pixels, np.float32), np.asarray(points, np.float32)
    except (TypeError, ValueError) as error:
        raise UnsupportedFile(f"{where}: no arrays of numbers: {error}") from error
    if not pixels.size and not points.size:
        return np.empty((0, 3), np.float32), np.empty((0, 14), np.float32)
    if points.ndim == 2 and points.shape[1] == 3 and pixels.ndim == 2 and pixels.shape[1] >= 14:
        points = np.concatenate([points, pixels[:, -11:]], 1) if len(points) == len(pixels) else points
    if pixels.ndim != 2 or pixels.shape[1] < 3 or points.shape != (len(pixels), 14):
        raise InvalidValues(
            f"{where}: pixels {pixels.shape} and points {points.shape}, expected (n, 3) u, v, depth and (n, 14) "
            f"x, y, z, one-hot of ten classes, score"
        )
    pixels = pixels[:, :3]
    if not (np.isfinite(pixels).all() and np.isfinite(points).all()):
        raise InvalidValues(f"{where}: NaN or infinity among the virtual points")
    return pixels, points


def _record(parts: Iterable[tuple[int, int, CameraPoints]]) -> Record:
    """Rows of (camera, sweep, points), in this order."""
    parts = list(parts)
    counts = [len(part.pixels) for *_, part in parts]
    pixels = np.concatenate([np.empty((0, 3), np.float32), *(part.pixels for *_, part in parts)])
    points = np.concatenate([np.empty((0, 14), np.float32), *(part.points for *_, part in parts)])
    return {
        "pixel": pixels[:, :2],
        "depth": pixels[:, 2],
        "xyz": points[:, :3],
        "paint": points[:, 3:],
        "camera": np.repeat(np.array([camera for camera, *_ in parts], np.uint8), counts),
        "sweep": np.repeat(np.array([sweep for _, sweep, _ in parts], np.uint8), counts),
        "real": np.concatenate([np.empty(0, bool), *(part.real for *_, part in parts)]),
    }

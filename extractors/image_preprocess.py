"""Camera images as the detectors take them: read with every fault named, then resized and cropped by Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from extractors.errors import (
    DecodeError,
    EmptyInput,
    InputError,
    InvalidValues,
    MissingFile,
    TruncatedFile,
    UnsupportedFile,
)
from extractors.inputs import Camera, Cameras

if TYPE_CHECKING:
    from PIL.Image import Image

Filter = Literal["bicubic", "legacy_nearest"]


@dataclass(frozen=True)
class Fit:
    """Resize a whole image, then cut a window out of it.

    Attributes:
        resize: (width, height) of the whole image, resized.
        crop: (left, upper, right, lower) in pixels of the resized image.
        filter: `bicubic`, Pillow's own choice since version 7; `legacy_nearest`, its choice before.
    """

    resize: tuple[int, int]
    crop: tuple[int, int, int, int]
    filter: Filter = "bicubic"

    def apply(self, image: Image) -> np.ndarray:
        """RGB image -> (height, width, 3) uint8 of the window."""
        from PIL import Image

        resample = Image.Resampling.BICUBIC if self.filter == "bicubic" else Image.Resampling.NEAREST
        return np.asarray(image.resize(self.resize, resample).crop(self.crop))

    def matrix(self, size: tuple[int, int]) -> np.ndarray:
        """(3, 3) float64: homogeneous pixels of an image of this (width, height) -> pixels of the window."""
        left, upper, _, _ = self.crop
        across, down = self.resize[0] / size[0], self.resize[1] / size[1]
        return np.array([[across, 0, -left], [0, down, -upper], [0, 0, 1]], np.float64)


def named_views(cameras: Cameras, names: Sequence[str], key: str) -> tuple[Camera, ...]:
    """The cameras of these names, in this order, with calibrations that can be one of a camera.

    Raises:
        MissingFile: a camera is not there.
        InvalidValues: an intrinsic matrix or a pose that no camera has: NaN, no focal length, a mirroring or skew.
    """
    present = {view.name for view in cameras.views}
    if missing := [name for name in names if name not in present]:
        raise MissingFile(f"{key}: no {', '.join(missing)}; all of {', '.join(names)} are needed")
    views = cameras.named(names)
    for view in views:
        where = f"{key} {view.name}"
        k = np.asarray(view.intrinsic)
        if k.shape != (3, 3) or not np.isfinite(k).all() or k[0, 0] <= 0 or k[1, 1] <= 0 or (k[2] != (0, 0, 1)).any():
            raise InvalidValues(f"{where}: intrinsic {k.tolist()}, expected [[fx, s, cx], [0, fy, cy], [0, 0, 1]]")
        for name, pose in (("to_lidar", view.to_lidar), ("to_ego", view.to_ego)):
            if pose is not None:
                _check_pose(np.asarray(pose), f"{where}: {name}")
    return views


def open_rgb(path: Path, size: tuple[int, int], where: str) -> Image:
    """Read and decode an image; a grey one has the same value in each colour.

    Args:
        path: an image file that Pillow reads.
        size: (width, height) that its calibration is for.
        where: item and camera, for the error text.

    Raises:
        MissingFile, EmptyInput, TruncatedFile, DecodeError: there is no such file, or no whole image in it.
        UnsupportedFile: neither RGB nor grey with 8 bits.
        InvalidValues: an image of another size: its calibration does not fit it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        data = path.read_bytes()
    except OSError as error:
        raise MissingFile(f"{where}: no file {path} ({error.strerror})") from None
    if not data:
        raise EmptyInput(f"{where}: {path} has no bytes; is the download complete?")
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.size != size:
                raise InvalidValues(
                    f"{where}: {path} has {image.width} x {image.height} pixels, expected {size[0]} x {size[1]}, for "
                    f"which it is calibrated; set image_size where all images have another size"
                )
            if image.mode not in ("RGB", "L"):
                raise UnsupportedFile(f"{where}: {path} has pixels of mode {image.mode}, expected 8-bit RGB or grey")
            pixels = image.convert("RGB")
            whole = image.format != "JPEG" or _whole_jpeg(data)
    except UnidentifiedImageError:
        raise DecodeError(f"{where}: {path} is no image that Pillow knows") from None
    except InputError:
        raise
    except Exception as error:  # decoders raise whatever they meet in damaged data
        kind = TruncatedFile if "truncated" in str(error).lower() else DecodeError
        raise kind(f"{where}: can't decode {path}: {error}; is the download complete?") from error
    if not whole:
        raise DecodeError(f"{where}: {path} is a damaged JPEG: part of its data does not decode; fetch it again")
    return pixels


def _whole_jpeg(data: bytes) -> bool:
    """Whether a JPEG's data decode without a fault, by FFmpeg (4 ms for 1600 x 900).

    Pillow does not tell: libjpeg only warns of bytes that are wrong or left out, and fills up what is missing. A few
    wrong bytes after which both fall into step again stay unnoticed.
    """
    import av

    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"err_detect": "explode"}
    try:
        decoder.decode(av.Packet(data))
        decoder.decode(None)
    except av.error.InvalidDataError:
        return False
    except av.error.FFmpegError:  # a kind of JPEG that it doesn't read
        return True
    return True


def _check_pose(pose: np.ndarray, where: str) -> None:
    if pose.shape != (4, 4) or not np.isfinite(pose).all() or (pose[3] != (0, 0, 0, 1)).any():
        raise InvalidValues(f"{where} is {pose.tolist()}, expected a finite 4 x 4 matrix with last row 0 0 0 1")
    turn = pose[:3, :3]
    if np.abs(turn @ turn.T - np.eye(3)).max() > 1e-3:
        raise InvalidValues(f"{where} is no rigid motion: its rotation part has rows that are not orthonormal")
    if np.linalg.det(turn) < 0:
        raise InvalidValues(f"{where} mirrors: its rotation part has determinant -1, expected +1; is an axis flipped?")

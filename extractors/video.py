"""Down-sample clips: from `.sens` files, folders of JPEGs or video files to small RGB frames.

Follows the SQA3D code: every 20th frame from the first on, resized to 224 x 224 with OpenCV's bilinear rule
(no antialias, aspect ratio not kept). The official files then went through a lossy 20 fps mp4; the records here hold
the frames before that, and `write_mp4` makes such a file of them.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor
from extractors.decode import open_video
from extractors.decode_probe import index
from extractors.errors import DecodeError, EmptyInput, ExtractError, InvalidValues, MissingFile, UnsupportedFile
from extractors.inputs import Clip
from extractors.sens import SensReader
from storage.schema import Column, Record, Schema

_SOI, _SOS, _EOI = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # JPEG markers: start, start of scan, end


@dataclass(frozen=True, kw_only=True)
class Video(Extractor):
    """Keep some frames of a clip.

    Takes   Clip: a `.sens` file, a folder of JPEGs (in the order of the numbers in their names) or a video file.
    Gives   frame       (frame, size, size, 3) uint8, RGB; with `size=None` the encoded image at its own size:
                        the JPEG as it is in the clip, PNG for video files and turned frames
            frame_index (frame,) int32, number in the clip, in the order of presentation
            time_s      (frame,) float64, presentation time in the clip's own timeline, NaN for a folder
            pose        (frame, 4, 4) float32, camera -> scan frame, metres, camera x right, y down, z forward;
                        NaN where there is none
            pose_valid  (frame,) bool
            rotation    (frame,) int16, degrees that the stored image was turned counter-clockwise
            decoder     (frame,) string, what decoded and resized, with versions

    Attributes:
        every: keep frames 0, every, 2 * every ...; None with `rate_hz`.
        rate_hz: keep the frame nearest in time to each tick of this rate, counted from the first frame; one may
            come twice.
        size: side of the square frames, pixels, or None to keep each at its own size.
        max_frames: keep the first so many, None for all.
        decoder: for video files: `pyav`, `decord`, `torchcodec` or `auto` (see `extractors.decode.open_video`).
        stream: stream of a video file, None for FFmpeg's best.
        rotate_upright: turn all frames of a `.sens` clip by the multiple of 90 degrees that best brings the scan's
            z axis up in the image, judged over its valid poses. (Video files are always shown as their display
            matrix says, JPEGs as their EXIF orientation does.)
    """

    name: ClassVar[str] = "video"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("clip",)
    deadline_s: ClassVar[float | None] = 600.0
    memory_gb: ClassVar[float | None] = 4.0
    recycle_after: ClassVar[int | None] = 200

    every: int | None = 20
    rate_hz: float | None = None
    size: int | None = 224
    max_frames: int | None = None
    decoder: Literal["pyav", "decord", "torchcodec", "auto"] = "pyav"
    stream: int | None = None
    rotate_upright: bool = False

    def __post_init__(self) -> None:
        if (self.every is None) == (self.rate_hz is None):
            raise ValueError("video: give either 'every' (frames) or 'rate_hz' (with every: null), not both")
        for name in ("every", "rate_hz", "size", "max_frames"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"video: '{name}' is {value}, expected more than 0")
        if self.decoder not in ("pyav", "decord", "torchcodec", "auto"):
            raise ValueError(f"video: decoder '{self.decoder}', expected pyav, decord, torchcodec or auto")

    @property
    def schema(self) -> Schema:
        frame = (
            Column((self.size, self.size, 3), "uint8", doc="RGB")
            if self.size
            else Column((), "bytes", doc="RGB image, JPEG or PNG")
        )
        columns = {
            "frame": frame,
            "frame_index": Column((), "int32", doc="number in the clip, in the order of presentation"),
            "time_s": Column((), "float64", unit="s", nullable=True, doc="presentation time in the clip's timeline"),
            "pose": Column((4, 4), "float32", unit="m", frame="scan", nullable=True, doc="camera -> scan frame"),
            "pose_valid": Column((), "bool", doc="False: tracking was lost, or the clip has no poses"),
            "rotation": Column((), "int16", unit="deg", doc="the stored image was turned counter-clockwise by this"),
            "decoder": Column((), "string", doc="decoder and resizer with versions"),
        }
        return Schema(columns, element="frame", format="hdf5")

    def prepare(self, key: str, *inputs: Any) -> Record:
        """Decode and resize one clip.

        Raises:
            InputError: MissingFile, EmptyInput, TruncatedFile, UnsupportedFile, DecodeError or InvalidValues; a damaged
                clip is an error, never fewer frames.
        """
        clip: Clip = inputs[0]
        reader = {"sens": _read_sens, "folder": _read_folder, "video": _read_video}[clip.kind]
        return reader(self, clip.path)

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        return list  # `prepare` has done it all

    def choose(self, times_s: np.ndarray, path: Path) -> np.ndarray:
        """Numbers of the frames to keep.

        Args:
            times_s: (frame,) float64, seconds, ascending; NaN where unknown.
            path: for error texts.

        Returns:
            (kept,) int64, ascending; repeats where `rate_hz` is above the clip's own rate.

        Raises:
            InvalidValues: `rate_hz` needs times, and these do not ascend.
        """
        if self.every is not None:
            kept = np.arange(len(times_s))[:: self.every]  # arange itself takes no step beyond 64 bits
        else:
            assert self.rate_hz is not None
            if len(times_s) > 1 and not (np.diff(times_s) > 0).all():
                raise InvalidValues(f"{path}: frames have no ascending times; use 'every' in place of 'rate_hz'")
            ticks = times_s[0] + np.arange(int((times_s[-1] - times_s[0]) * self.rate_hz + 1e-6) + 1) / self.rate_hz
            after = np.clip(np.searchsorted(times_s, ticks), 1, max(len(times_s) - 1, 1))
            after = np.minimum(after, len(times_s) - 1)
            before = np.maximum(after - 1, 0)
            kept = np.where(ticks - times_s[before] <= times_s[after] - ticks, before, after)
        return kept[: self.max_frames]


def _read_video(video: Video, path: Path) -> Record:
    decoder = open_video(path, video.decoder, video.stream)
    times_s = decoder.index.times_s
    kept = video.choose(times_s, path)
    unique, place = np.unique(kept, return_inverse=True)
    images = [_finish(video, rgb) for rgb in decoder.frames(unique)]
    return _record(video, [images[i] for i in place], kept, times_s[kept], decoder.rotation, decoder.name)


def _read_sens(video: Video, path: Path) -> Record:
    with SensReader(path) as reader:
        times_s = reader.times_us[:, 0] / 1e6
        kept = video.choose(times_s, path)
        turns = upright_turns(reader.poses[reader.pose_valid]) if video.rotate_upright else 0
        images = [_finish_jpeg(video, reader.jpeg(int(i)), f"{path}: colour of frame {i}", turns) for i in kept]
        valid = reader.pose_valid[kept]
        poses = np.where(valid[:, None, None], reader.poses[kept], np.float32(np.nan))
    return _record(video, images, kept, times_s[kept], 90 * turns, "", poses, valid)


def _read_folder(video: Video, path: Path) -> Record:
    if not path.is_dir():
        raise MissingFile(f"{path}: no such folder")
    files = jpegs(path)
    if not files:
        raise EmptyInput(f"{path}: no *.jpg or *.jpeg in this folder")
    if video.rate_hz is not None:
        raise UnsupportedFile(f"{path}: a folder of JPEGs has no times; use 'every' in place of 'rate_hz'")
    kept = video.choose(np.arange(len(files)), path)
    images = [_finish_jpeg(video, files[i].read_bytes(), str(files[i])) for i in kept]
    return _record(video, images, kept, np.full(len(kept), np.nan), 0, "")


def jpegs(folder: Path) -> list[Path]:
    """The JPEGs of a folder in the order of the numbers in their names.

    Equals the order of names where numbers are padded with zeros (`frame-000020.color.jpg`, ScanNet's exporter), and
    the order of frames where they are not (`frame-20.color.jpg`, SQA3D's down-sampled folders).
    """

    def order(file: Path) -> tuple[list[str | int], str]:
        parts = re.split(r"([0-9]+)", file.name)  # text, digits, text ...
        return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.name

    shown = (f for f in folder.iterdir() if not f.name.startswith("."))  # `._1.jpg` is what macOS leaves beside 1.jpg
    return sorted((f for f in shown if f.suffix.lower() in (".jpg", ".jpeg") and f.is_file()), key=order)


def upright_turns(poses: np.ndarray) -> int:
    """Quarter turns counter-clockwise that bring up what is up in the scan.

    Args:
        poses: (n, 4, 4) camera -> world, world z up, camera x right and y down in the image.

    Returns:
        0 to 3: the turn after which the mean direction of world z in the image is nearest to upwards; 0 without poses.
    """
    right, down = poses[:, 2, 0].sum(), poses[:, 2, 1].sum()  # world z along the image axes: row 2 of the rotation
    return int(np.argmax([-down, right, down, -right]))


def _finish(video: Video, rgb: np.ndarray) -> Any:
    """The stored form of an upright (height, width, 3) uint8 RGB image."""
    import cv2

    if video.size is None:
        return cv2.imencode(".png", rgb[..., ::-1])[1].tobytes()
    return cv2.resize(rgb, (video.size, video.size), interpolation=cv2.INTER_LINEAR)


def _finish_jpeg(video: Video, blob: bytes, where: str, turns: int = 0) -> Any:
    """The stored form of a JPEG; `turns` quarter turns counter-clockwise go on top of its EXIF orientation."""
    import cv2

    whole = blob.find(_EOI, blob.rfind(_SOS)) > 0  # neither marker occurs within a scan's data
    bgr = cv2.imdecode(np.frombuffer(blob, np.uint8), cv2.IMREAD_COLOR) if blob.startswith(_SOI) and whole else None
    if bgr is None:
        fault = "no JPEG" if not blob.startswith(_SOI) else "damaged" if whole else "cut off"
        raise DecodeError(f"{where}: image of {len(blob)} bytes is {fault}; get the file again")
    if video.size is None and not turns:
        return blob
    return _finish(video, np.rot90(bgr[..., ::-1], turns))


def _record(
    video: Video,
    images: list[Any],
    kept: np.ndarray,
    times_s: np.ndarray,
    rotation: int,
    decoder: str,
    poses: np.ndarray | None = None,
    valid: np.ndarray | None = None,
) -> Record:
    import cv2

    n = len(kept)
    frames = np.empty(n, object)
    frames[:] = images
    return {
        "frame": frames if video.size is None else np.stack(images),
        "frame_index": kept.astype(np.int32),
        "time_s": times_s.astype(np.float64),
        "pose": np.full((n, 4, 4), np.nan, np.float32) if poses is None else poses.astype(np.float32),
        "pose_valid": np.zeros(n, bool) if valid is None else valid,
        "rotation": np.full(n, rotation, np.int16),
        "decoder": np.full(n, f"{decoder + ', ' if decoder else ''}opencv {cv2.__version__}", object),
    }


def write_mp4(record: Record, path: Path, fps: float = 20.0) -> None:
    """Write a record's frames as SQA3D's videos are: MPEG-4 part 2 (`mp4v`, lossy), 20 frames per second.

    Args:
        record: of the `video` stage, with square frames (not `size=None`).
        path: file to write, `.mp4`; it appears when it is complete.

    Raises:
        InvalidValues: the record's frames are encoded images.
        ExtractError: OpenCV can't encode mp4v here, or wrote another number of frames.
    """
    import cv2

    frames = record["frame"]
    if frames.dtype != np.uint8:
        raise InvalidValues(f"{path}: frames of this record are encoded images; extract them with a 'size'")
    size = (frames.shape[2], frames.shape[1])
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".write_mp4-") as folder:
        part = Path(folder) / "part.mp4"
        writer = cv2.VideoWriter(str(part), cv2.VideoWriter.fourcc(*"mp4v"), fps, size)
        if not writer.isOpened():
            raise ExtractError(f"{path}: OpenCV can't write mp4v at {size[0]}x{size[1]} here; see `scenecache doctor`")
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV takes BGR
        writer.release()
        if (written := len(index(part))) != len(frames):
            raise ExtractError(f"{path}: {written} of {len(frames)} frames were written; is the disk full?")
        os.replace(part, path)

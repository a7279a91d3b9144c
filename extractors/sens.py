"""ScanNet's `.sens` files: one RGB-D recording with poses (layout: ScanNet SensReader, version 4).

Little endian: header, then per frame pose, times, two byte counts and two blobs, then IMU samples (not read).
The index is made by seeking from one 96-byte frame head to the next, so memory does not grow with the images, and a
frame that is not asked for is never read. Colour blobs are handed out as stored: never re-encoded.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from extractors.errors import DecodeError, EmptyInput, MissingFile, TruncatedFile, UnsupportedFile

VERSION = 4
COLOR_CODECS = {-1: "unknown", 0: "raw", 1: "png", 2: "jpeg"}
DEPTH_CODECS = {-1: "unknown", 0: "raw", 1: "zlib", 2: "occi"}
_LONGEST_NAME = 4096  # a sensor name beyond this means that these are not sens bytes
_LARGEST_SIDE = 1 << 15
_FIXED = struct.Struct("<64fiiIIIIfQ")  # four 4x4 matrices, codecs, sizes, depth shift, frames
_FRAME = np.dtype([("pose", "<f4", (4, 4)), ("times", "<u8", 2), ("sizes", "<u8", 2)])


@dataclass(frozen=True)
class SensHeader:
    """What a `.sens` file says before its frames.

    Attributes:
        sensor: name of the sensor.
        intrinsic_color, intrinsic_depth: (4, 4) float32, pixels at the sizes below. After a resize scale row 0 by the
            ratio of widths and row 1 by the ratio of heights.
        extrinsic_color, extrinsic_depth: (4, 4) float32; identity in ScanNet, whose poses hold for both cameras.
        color_codec: `jpeg` (all of ScanNet), `png`, `raw` or `unknown`.
        depth_codec: `zlib` (all of ScanNet), `raw`, `occi` or `unknown`.
        color_size, depth_size: (width, height), pixels.
        depth_shift: metres = stored value / depth_shift.
        frames: number of frames.
    """

    sensor: str
    intrinsic_color: np.ndarray
    extrinsic_color: np.ndarray
    intrinsic_depth: np.ndarray
    extrinsic_depth: np.ndarray
    color_codec: str
    depth_codec: str
    color_size: tuple[int, int]
    depth_size: tuple[int, int]
    depth_shift: float
    frames: int


@dataclass(frozen=True)
class SensFrame:
    """One frame to write.

    Attributes:
        color: encoded image, in the header's colour codec.
        depth: (height, width) uint16, in units of 1 / depth_shift metres.
        pose: (4, 4) camera -> world, metres; all -inf where tracking was lost.
        time_us: time of both images, microseconds.
    """

    color: bytes
    depth: np.ndarray
    pose: np.ndarray
    time_us: int


class SensReader:
    """Random access to the frames of a `.sens` file. A context manager; safe to share between threads.

    Attributes:
        header: see `SensHeader`.
        poses: (frame, 4, 4) float32, camera -> scan frame, metres; camera x right, y down, z forward.
        pose_valid: (frame,) bool, False where tracking was lost (-inf or NaN in the file).
        times_us: (frame, 2) uint64, colour and depth times, microseconds.

    Raises:
        MissingFile, EmptyInput: no such file, no bytes or no frames.
        UnsupportedFile: another version, or not a `.sens` file at all.
        TruncatedFile: the file ends before its last frame does; names the frame and the offset.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise MissingFile(f"{self.path}: no such file; download the scan's .sens or leave out the stages on clips")
        self._fd = os.open(self.path, os.O_RDONLY)
        try:
            self._size = os.fstat(self._fd).st_size
            if not self._size:
                raise EmptyInput(f"{self.path}: zero bytes; download it again")
            self.header, start = self._read_header()
            self._read_index(start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SensReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def __len__(self) -> int:
        return self.header.frames

    def color(self, frame: int) -> bytes:
        """The colour blob as stored.

        Raises:
            TruncatedFile: the file became shorter since it was opened.
        """
        return self._read(int(self._offsets[self._at(frame)]), int(self._sizes[frame, 0]), f"colour of frame {frame}")

    def jpeg(self, frame: int) -> bytes:
        """The JPEG bytes of one colour image, as stored.

        Raises:
            UnsupportedFile: the colour images are not JPEG.
            DecodeError: the blob does not start as a JPEG does.
        """
        if self.header.color_codec != "jpeg":
            raise UnsupportedFile(f"{self.path}: colour codec is {self.header.color_codec}, only jpeg is read")
        blob = self.color(frame)
        if not blob.startswith(b"\xff\xd8"):
            raise DecodeError(
                f"{self.path}: colour of frame {frame} ({len(blob)} bytes at {self._offsets[frame]}) is no JPEG"
            )
        return blob

    def depth(self, frame: int) -> np.ndarray:
        """Depth image of one frame.

        Returns:
            (height, width) uint16; metres = value / header.depth_shift, 0 where nothing was measured.

        Raises:
            UnsupportedFile: a codec other than zlib and raw.
            DecodeError: damaged data, or not width x height values.
        """
        width, height = self.header.depth_size
        codec, expected = self.header.depth_codec, width * height * 2
        if codec not in ("zlib", "raw"):
            raise UnsupportedFile(f"{self.path}: depth codec is {codec}, only zlib and raw are read")
        at = int(self._offsets[self._at(frame)] + self._sizes[frame, 0])
        blob = self._read(at, int(self._sizes[frame, 1]), f"depth of frame {frame}")
        if codec == "zlib":
            stream = zlib.decompressobj()
            try:  # one byte more than expected: a larger image shows, and a bomb does not unfold
                blob = stream.decompress(blob, expected + 1)
            except zlib.error as error:
                raise DecodeError(f"{self.path}: depth of frame {frame} at byte {at}: {error}") from error
            if len(blob) == expected and not stream.eof:
                raise DecodeError(f"{self.path}: depth of frame {frame} at byte {at} ends within its checksum")
        if len(blob) != expected:
            raise DecodeError(
                f"{self.path}: depth of frame {frame} at byte {at} has {len(blob)} bytes, "
                f"{width} x {height} uint16 need {expected}"
            )
        return np.frombuffer(blob, "<u2").reshape(height, width)

    def _at(self, frame: int) -> int:
        if not 0 <= frame < len(self):
            raise IndexError(f"{self.path}: frame {frame} of {len(self)}")
        return frame

    def _read(self, at: int, count: int, what: str) -> bytes:
        if at + count > self._size:  # checked before reading: a damaged count may ask for any amount of memory
            raise TruncatedFile(
                f"{self.path}: {what} at byte {at} needs {count} bytes, the file has {max(self._size - at, 0)} left; "
                "download it again"
            )
        blob = os.pread(self._fd, count, at)
        if len(blob) != count:
            raise TruncatedFile(f"{self.path}: {what} at byte {at} needs {count} bytes, {len(blob)} could be read")
        return blob

    def _read_header(self) -> tuple[SensHeader, int]:
        (version,) = struct.unpack("<I", self._read(0, 4, "version"))
        if version != VERSION:
            kind = f"version {version}" if version < 100 else "not a .sens file (no version number at its start)"
            raise UnsupportedFile(
                f"{self.path}: {kind}, only version {VERSION} is read; convert it with ScanNet's SensReader"
            )
        (name_length,) = struct.unpack("<Q", self._read(4, 8, "header"))
        if name_length > _LONGEST_NAME:
            raise UnsupportedFile(f"{self.path}: not a .sens file (sensor name of {name_length} bytes)")
        name = self._read(12, name_length, "sensor name").decode("utf-8", "replace")
        at = 12 + name_length
        *matrices, color, depth, cw, ch, dw, dh, shift, frames = _FIXED.unpack(self._read(at, _FIXED.size, "header"))
        m = np.array(matrices, np.float32).reshape(4, 4, 4)
        if color not in COLOR_CODECS or depth not in DEPTH_CODECS or max(cw, ch, dw, dh) > _LARGEST_SIDE:
            raise UnsupportedFile(
                f"{self.path}: not a .sens file (codecs {color}, {depth}; images {cw}x{ch}, {dw}x{dh})"
            )
        if not frames:
            raise EmptyInput(f"{self.path}: no frames")
        header = SensHeader(
            name, m[0], m[1], m[2], m[3], COLOR_CODECS[color], DEPTH_CODECS[depth], (cw, ch), (dw, dh), shift, frames
        )
        return header, at + _FIXED.size

    def _read_index(self, at: int) -> None:
        heads, offsets = bytearray(), []  # grow with what the file holds, not with what it claims
        for frame in range(self.header.frames):
            head = self._read(at, _FRAME.itemsize, f"frame {frame} of {self.header.frames}")
            color, depth = struct.unpack_from("<QQ", head, 80)
            offsets.append(at + len(head))
            at += len(head) + color + depth
            if at > self._size:
                raise TruncatedFile(
                    f"{self.path}: frame {frame} of {self.header.frames} at byte {offsets[-1]} needs {color} + {depth} "
                    f"bytes, the file has {self._size - offsets[-1]} left; download it again"
                )
            heads += head
        table = np.frombuffer(bytes(heads), _FRAME)
        self.poses = table["pose"].astype(np.float32)
        self.pose_valid = np.isfinite(self.poses).all(axis=(1, 2))
        self.times_us = table["times"].astype(np.uint64)
        self._sizes = table["sizes"].astype(np.int64)
        self._offsets = np.array(offsets, np.int64)


def write_sens(path: str | Path, header: SensHeader, frames: Iterable[SensFrame]) -> None:
    """Write a `.sens` file with zlib or raw depth; `header.frames` is ignored and counted instead."""
    codes = {name: code for code, name in COLOR_CODECS.items()}, {name: code for code, name in DEPTH_CODECS.items()}
    matrices = (header.intrinsic_color, header.extrinsic_color, header.intrinsic_depth, header.extrinsic_depth)
    name = header.sensor.encode()
    count = 0
    with Path(path).open("wb") as file:
        file.write(struct.pack("<IQ", VERSION, len(name)) + name)
        fixed = [
            *np.concatenate([np.asarray(m, np.float32).ravel() for m in matrices]).tolist(),
            codes[0][header.color_codec], codes[1][header.depth_codec],
            *header.color_size, *header.depth_size, header.depth_shift,
        ]  # fmt: skip
        file.write(_FIXED.pack(*fixed, 0))
        counted_at = file.tell() - 8
        for frame in frames:
            depth = np.ascontiguousarray(frame.depth, "<u2").tobytes()
            if header.depth_codec == "zlib":
                depth = zlib.compress(depth, 6)
            head = np.zeros((), _FRAME)
            head["pose"], head["times"], head["sizes"] = frame.pose, frame.time_us, (len(frame.color), len(depth))
            file.write(head.tobytes() + frame.color + depth)
            count += 1
        file.write(struct.pack("<Q", 0))  # no IMU samples
        file.seek(counted_at)
        file.write(struct.pack("<Q", count))

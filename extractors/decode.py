"""Decoders of video files behind one interface: frames by number in presentation order, upright, RGB.

`pyav` (FFmpeg, in order) is right on every file and notices damage. `decord` and `torchcodec` are used as they are,
and their answer is checked against the file's presentation times. No decoder is trusted to count frames by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from extractors.decode_probe import VideoIndex, index
from extractors.errors import DecodeError, MissingPackage, UnsupportedFile

_BATCH = 16  # frames that decord and torchcodec hold at full size


class Decoder(Protocol):
    """An opened video file.

    Attributes:
        name: the decoder and its version.
        index: presentation times, stored size, codec.
        rotation: degrees that frames were turned counter-clockwise to stand upright (0, 90, 180, 270), as the
            file's display matrix says.
    """

    name: str
    index: VideoIndex

    @property
    def rotation(self) -> int: ...

    def frames(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Decode frames.

        Args:
            indices: (n,) ascending, unique: 0 is the frame shown first.

        Yields:
            (height, width, 3) uint8 RGB, upright, one for each index, in order.

        Raises:
            DecodeError: damaged data, or the decoder gave another frame than the one asked for.
        """
        ...


def open_video(path: Path, decoder: str = "pyav", stream: int | None = None) -> Decoder:
    """Open a video file.

    Args:
        path: the file.
        decoder: `pyav`; `decord`, which refuses files that it is known to decode wrongly; `auto`, decord where a
            probe shows that it gives the same values as PyAV, else PyAV; `torchcodec` in its exact mode.
        stream: index of the stream among all streams of the file; None for FFmpeg's best video stream.

    Raises:
        InputError: see `decode_probe.index`; UnsupportedFile where decord is asked for and is not right.
        MissingPackage: the decoder is not installed.
    """
    table = index(path, stream)
    if decoder == "pyav":
        return PyAV(table)
    if decoder == "torchcodec":
        return TorchCodec(table)
    if decoder not in ("decord", "auto"):
        raise ValueError(f"decoder '{decoder}': expected pyav, decord, torchcodec or auto")
    try:
        return Decord(table)
    except UnsupportedFile:
        if decoder == "decord":
            raise
        return PyAV(table)


def threads() -> int:
    """Threads for one decoder: OMP_NUM_THREADS where set (Ray sets it to a worker's CPUs), else up to 2."""
    with suppress(KeyError, ValueError):
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return min(2, len(os.sched_getaffinity(0)))


class PyAV:
    """FFmpeg through PyAV: in decoding order, leaving out groups of pictures that hold no frame asked for."""

    def __init__(self, table: VideoIndex) -> None:
        import av

        version = ".".join(map(str, av.library_versions["libavcodec"]))
        self.name = f"pyav {av.__version__} (libavcodec {version})"
        self.index = table
        self._rotation: int | None = None

    @property
    def rotation(self) -> int:
        if self._rotation is None:
            next(self.frames(np.array([0])))
        assert self._rotation is not None
        return self._rotation

    def frames(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        import av

        table = self.index
        number = {int(table.pts[i]): int(i) for i in indices}
        missing = dict(number)
        try:
            for pts, frame in self._decode(indices):
                if frame.is_corrupt:
                    near = next(iter(missing), 0) if pts is None else pts
                    raise self._error(near, "is damaged, and so may be those that follow")
                if missing.pop(pts, None) is not None:
                    yield self._upright(frame)
        except av.error.FFmpegError as error:
            at = f"after frame {max(number.values())}" if not missing else f"before frame {min(missing.values())}"
            raise DecodeError(
                f"{table.path}: {table.codec} data can't be decoded {at} of {len(table)} ({error.strerror}); "
                "get the file again"
            ) from error
        if missing:
            raise self._error(next(iter(missing)), "did not come out of the decoder")

    def _decode(self, indices: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """(presentation time as in `index.pts` or None, FFmpeg frame) of what has to be decoded for these frames."""
        import av

        table = self.index
        if table.held is not None:
            stream, held = table.held
            packets = iter(held)
        else:
            container: Any = av.open(str(table.path))
            stream = container.streams[table.stream]
            packets = (packet for packet in container.demux(stream) if packet.size)
        codec = stream.codec_context
        if not codec.is_open:
            # One more than cores, as FFmpeg's own choice: one thread hands frames over while the others decode.
            codec.thread_count = threads() + 1 if threads() > 1 else 1
            codec.thread_type = "AUTO" if threads() > 1 else "NONE"
        at = count = 0
        for first, last in table.runs(indices):
            if codec.is_open:
                codec.flush_buffers()
            while at < last:
                packet = next(packets, None)
                if packet is None:
                    raise DecodeError(f"{table.path}: became shorter while it was read")
                at += 1
                if at <= first:
                    continue
                for frame in codec.decode(packet):
                    yield (count if table.counted else frame.pts), frame
                    count += 1
            for frame in codec.decode(None):
                yield (count if table.counted else frame.pts), frame
                count += 1

    def _upright(self, frame: Any) -> np.ndarray:
        rgb = frame.to_ndarray(format="rgb24", threads=1)
        if frame.rotation % 90:
            raise UnsupportedFile(f"{self.index.path}: is to be shown turned by {frame.rotation} degrees")
        self._rotation = frame.rotation % 360
        return np.rot90(rgb, self._rotation // 90)

    def _error(self, pts: int, what: str) -> DecodeError:
        at = int(np.searchsorted(self.index.pts, pts))
        seconds = f"{self.index.times_s[at]:.3f} s" if at < len(self.index) else "the end"
        return DecodeError(
            f"{self.index.path}: frame {at} of {len(self.index)} (at {seconds}) {what}; get the file again"
        )


class Decord:
    """decord 0.6.0, on files where it is right: not on what `why_not_decord` lists, nor where frame 0 differs."""

    def __init__(self, table: VideoIndex) -> None:
        try:
            import decord
        except ImportError as error:
            raise MissingPackage("decoder 'decord' needs decord: pip install decord==0.6.0") from error

        self.name = f"decord {decord.__version__}"
        self.index = table
        if why := table.why_not_decord():
            raise UnsupportedFile(f"{table.path}: decord does not decode {why} right; use decoder=pyav")
        reference = PyAV(table)
        first = next(reference.frames(np.array([0])))
        self.rotation = reference.rotation
        try:
            self._reader = decord.VideoReader(str(table.path), num_threads=threads())
            self._shift_s = table.times_s[0] - self._reader.get_frame_timestamp(0)[0]  # decord starts some files at 0
            same = len(self._reader) == len(table) and np.array_equal(self._reader[0].asnumpy(), first)
        except decord.DECORDError as error:
            raise UnsupportedFile(f"{table.path}: decord does not open it; use decoder=pyav") from error
        if not same:
            raise UnsupportedFile(f"{table.path}: decord gives other frames than FFmpeg; use decoder=pyav")

    def frames(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        import decord

        for chunk in _chunks(indices):
            try:
                images = self._reader.get_batch(chunk.tolist()).asnumpy()
                starts = self._reader.get_frame_timestamp(chunk.tolist())[:, 0]
            except decord.DECORDError as error:
                raise DecodeError(f"{self.index.path}: decord: {str(error).splitlines()[0]}") from error
            check_times(self.index, chunk, starts + self._shift_s)
            yield from images


class TorchCodec:
    """torchcodec in its exact seek mode; needs FFmpeg's shared libraries on the machine."""

    def __init__(self, table: VideoIndex) -> None:
        try:
            import torchcodec
            from torchcodec.decoders import VideoDecoder
        except (ImportError, RuntimeError) as error:  # RuntimeError: installed, but no FFmpeg libraries
            cause = str(error).strip().splitlines()[0]
            raise MissingPackage(
                f"decoder 'torchcodec' needs torchcodec and FFmpeg's libraries ({cause}): pip install torchcodec, "
                "apt install ffmpeg; or use decoder=pyav"
            ) from error

        self.name = f"torchcodec {torchcodec.__version__}"
        self.index = table
        self.rotation = PyAV(table).rotation
        try:
            self._decoder = VideoDecoder(
                str(table.path),
                stream_index=table.stream,
                dimension_order="NHWC",
                seek_mode="exact",
                num_ffmpeg_threads=threads(),
            )
        except (RuntimeError, ValueError) as error:  # containers without seeking, among others
            cause = str(error).splitlines()[0]
            raise UnsupportedFile(f"{table.path}: torchcodec can't open it ({cause}); use decoder=pyav") from error

    def frames(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        for chunk in _chunks(indices):
            try:
                batch = self._decoder.get_frames_at(chunk.tolist())
            except (RuntimeError, IndexError) as error:
                cause = str(error).splitlines()[0]
                raise DecodeError(f"{self.index.path}: torchcodec: {cause}; use decoder=pyav") from error
            check_times(self.index, chunk, batch.pts_seconds.numpy())
            yield from batch.data.numpy()


def check_times(table: VideoIndex, indices: np.ndarray, times_s: np.ndarray) -> None:
    """Check that a decoder gave the frames asked for.

    Args:
        table: the file.
        indices: (n,) frames asked for.
        times_s: (n,) presentation times that the decoder states.

    Raises:
        DecodeError: a time is off by half a millisecond or more from the frame's.
    """
    off = np.flatnonzero(np.abs(times_s - table.times_s[indices]) >= 5e-4)
    if len(off):
        k = off[0]
        raise DecodeError(
            f"{table.path}: frame {indices[k]} is shown at {table.times_s[indices[k]]:.4f} s, the decoder gave the one "
            f"at {times_s[k]:.4f} s; use decoder=pyav"
        )


def _chunks(indices: np.ndarray) -> Iterator[np.ndarray]:
    return (indices[i : i + _BATCH] for i in range(0, len(indices), _BATCH))

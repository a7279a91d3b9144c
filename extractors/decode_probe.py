"""What a video file holds, found without decoding it: its frames in presentation order, and whether it is whole.

One pass over the compressed packets gives the presentation time of every frame, so a decoder can be told which
frames to produce and its answer can be checked against the times. Containers state their own length (ISO boxes,
RIFF, EBML); a file that ends before is refused here, because decoders give back fewer frames without a word.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from extractors.errors import DecodeError, EmptyInput, MissingFile, TruncatedFile, UnsupportedFile

_HOLD_BYTES = 64 << 20  # packets of a stream up to this size are kept, those of a larger one are read again to decode
_INDEXED = ("mov", "matroska")  # containers that give each packet its presentation time, and key frames truly
_LISTS = ("concat", "hls", "dash", "imf", "sdp")  # formats whose frames are in other files
_ISO_BOXES = {b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"pnot", b"uuid", b"sidx"}
# Matroska: clusters and block groups; then what may stand in a segment, a cluster and a block group.
_EBML_PARENTS = {bytes.fromhex(kind) for kind in ("1f43b675", "a0")}
_EBML_LEAVES = {
    bytes.fromhex(kind)
    for kind in (
        *("114d9b74", "1549a966", "1654ae6b", "1c53bb6b", "1941a469", "1043a770", "1254c367", "ec", "bf"),
        *("e7", "a3", "a7", "ab", "af", "5854"),
        *("a1", "a2", "a4", "9b", "fb", "fd", "fa", "75a1", "75a2", "8e", "c8"),
    )
}
_EBML_UNKNOWN = (1 << 56) - 1  # size of an element that was written live


class Packet(NamedTuple):
    """One compressed frame, in decoding order.

    Attributes:
        pts: presentation time, units of the stream's time base; None for one that is never shown.
        restart: a decoder that starts here gives the same frames from here on as one that came from the beginning.
    """

    pts: int | None
    restart: bool


@dataclass(frozen=True)
class VideoIndex:
    """The frames of one video stream in presentation order.

    Attributes:
        path: the file.
        stream: index of the stream, counted over all streams of the file.
        container, codec, pix_fmt: FFmpeg's names.
        width, height: as stored, before rotation, pixels.
        pts: (frame,) int64, ascending, units of the stream's time base; the frame's number where `counted`.
        times_s: (frame,) float64, presentation times in the file's own timeline (it need not start at 0).
        counted: the packets carry no usable times, so a frame is known by the order in which it comes out.
        edited: an edit list cuts frames away.
        open_gop: some frames are shown before the key frame that they are stored behind.
        packets: all packets, in decoding order.
        held: FFmpeg's opened stream and its packets in the same order; None where these are too many to keep.
    """

    path: Path
    stream: int
    container: str
    codec: str
    pix_fmt: str
    width: int
    height: int
    pts: np.ndarray
    times_s: np.ndarray
    counted: bool
    edited: bool
    open_gop: bool
    packets: tuple[Packet, ...] = field(repr=False)
    held: tuple[Any, tuple[Any, ...]] | None = field(repr=False)

    def __len__(self) -> int:
        return len(self.pts)

    def runs(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """Stretches [first, last) of packets that a decoder needs to give these frames, in order."""
        if self.counted:
            return [(0, len(self.packets))]
        wanted = set(self.pts[indices].tolist())
        runs: list[tuple[int, int]] = []
        start = 0
        for at, packet in enumerate(self.packets):
            if packet.restart:
                start = at
            if packet.pts in wanted:
                if runs and runs[-1][1] >= start:
                    runs[-1] = (runs[-1][0], at + 1)
                else:
                    runs.append((start, at + 1))
        return runs

    def why_not_decord(self) -> str:
        """Why decord 0.6.0 would give other frames (each was seen to), empty where it gives the same as PyAV."""
        if not self.container.startswith(_INDEXED):
            return f"container {self.container}"
        if self.counted or self.codec in ("av1", "vp8", "mpeg4"):
            return f"codec {self.codec}"
        if self.edited:
            return "an edit list"
        if self.open_gop:
            return "an open group of pictures"
        if self.pix_fmt != "yuv420p" or self.width % 2 or self.height % 2:
            return f"{self.pix_fmt} of {self.width}x{self.height}, which it converts to RGB in another way"
        return ""


def index(path: Path, stream: int | None = None) -> VideoIndex:
    """Read the frame table of a video file.

    Presentation starts at the first key frame: what is shown before it can't be decoded (recordings of broadcasts).

    Args:
        path: the file.
        stream: index of the stream, counted over all streams of the file; None for FFmpeg's best video stream.

    Raises:
        MissingFile, EmptyInput: no such file; zero bytes, or no frame.
        TruncatedFile: the file ends before its own header says it should.
        UnsupportedFile: not a video, no video stream, or no such stream.
        DecodeError: the container is damaged.
    """
    import av

    known = check_whole(path)
    try:
        container = av.open(str(path))  # stays open while packets are held
        if container.format.name.startswith(_LISTS):
            raise UnsupportedFile(f"{path}: a list of other files ({container.format.name}); give those instead")
        return _read_index(path, container, _choose_stream(path, container, stream))
    except av.error.FFmpegError as error:
        if known:
            raise DecodeError(f"{path}: damaged container ({error.strerror}); get the file again") from error
        raise UnsupportedFile(f"{path}: not a video that FFmpeg can read ({error.strerror})") from error


def check_whole(path: Path) -> bool:
    """Compare a file's size with what its container says.

    Returns:
        True where the container is one of those that state their length (MP4, QuickTime, AVI, Matroska, WebM).

    Raises:
        MissingFile, EmptyInput, UnsupportedFile, TruncatedFile: see `index`.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise MissingFile(f"{path}: no such file") from error
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedFile(f"{path}: not a regular file")
    if not status.st_size:
        raise EmptyInput(f"{path}: zero bytes; get the file again")
    with path.open("rb") as file:
        magic = file.read(12)
        if magic[4:8] in _ISO_BOXES:
            _check_iso(path, file, status.st_size)
        elif magic[:4] == b"RIFF" and magic[8:] == b"AVI ":
            _check_end(path, 8 + int.from_bytes(magic[4:8], "little"), status.st_size)
        elif magic[:4] == b"\x1aE\xdf\xa3":
            _check_ebml(path, file, status.st_size)
        else:
            return False
    return True


def _check_end(path: Path, end: int, size: int) -> None:
    if end > size:
        raise TruncatedFile(f"{path}: ends at byte {size}, its header says {end}; get the file again")


def _check_iso(path: Path, file: BinaryIO, size: int) -> None:
    """Walk the top-level boxes of an MP4 or QuickTime file: length, kind, content."""
    at, kinds = 0, set()
    while at + 8 <= size:
        file.seek(at)
        head = file.read(16)
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        elif length == 0:  # to the end of the file
            length = size - at
        if kind in _ISO_BOXES:
            _check_end(path, at + length, size)
        if length < 8 or at + length > size:
            if b"moof" in kinds:  # fragments are found through the boxes before them
                raise DecodeError(f"{path}: damaged container at byte {at}; get the file again")
            break  # no box: bytes behind the last one
        kinds.add(kind)
        at += length
    if b"moov" not in kinds:
        raise TruncatedFile(f"{path}: has no index (moov); the recording or download was cut off, get the file again")


def _check_ebml(path: Path, file: BinaryIO, size: int) -> None:
    """Walk the elements of a Matroska or WebM file: FFmpeg skips over damaged ones, and over the frames in them."""
    file.seek(4)
    header = _ebml_size(file)
    file.seek(header, os.SEEK_CUR)
    if file.read(4) != b"\x18S\x80g":
        raise DecodeError(f"{path}: damaged container, no segment follows its header; get the file again")
    segment = _ebml_size(file)
    end = size if segment == _EBML_UNKNOWN else file.tell() + segment
    _check_end(path, end, size)
    while (at := file.tell()) < end:
        first = file.read(1)
        kind = first + file.read(max(8 - first[0].bit_length(), 0))
        if kind not in _EBML_PARENTS and kind not in _EBML_LEAVES:
            raise DecodeError(f"{path}: damaged container at byte {at}; get the file again")
        length = _ebml_size(file)
        if kind in _EBML_LEAVES:
            file.seek(length, os.SEEK_CUR)
            _check_end(path, file.tell(), size)


def _ebml_size(file: BinaryIO) -> int:
    """An EBML integer: the zero bits that lead its first byte say how many bytes follow."""
    first = int.from_bytes(file.read(1), "big")
    more = 8 - first.bit_length()
    return (first & ~(0x80 >> more)) << 8 * more | int.from_bytes(file.read(more), "big")


def _choose_stream(path: Path, container: Any, stream: int | None) -> Any:
    from av.stream import Disposition

    kinds = [s.type for s in container.streams]
    if stream is not None:
        if not 0 <= stream < len(kinds) or kinds[stream] != "video":
            raise UnsupportedFile(f"{path}: stream {stream} is no video; the streams are {kinds}")
        chosen = container.streams[stream]
    else:
        chosen = container.streams.best("video")
        if chosen is None or Disposition.attached_pic in chosen.disposition:  # a cover picture
            raise UnsupportedFile(f"{path}: has no video stream; the streams are {kinds}")
    if chosen.codec_context is None:
        raise UnsupportedFile(f"{path}: this build of FFmpeg has no decoder for stream {chosen.index}")
    return chosen


def _read_index(path: Path, container: Any, stream: Any) -> VideoIndex:
    codec, name = stream.codec_context, container.format.name
    restarts = _restart_rule(codec)
    indexed = name.startswith(_INDEXED)
    packets: list[Packet] = []
    held: list[Any] | None = []
    size = 0
    counted = edited = open_gop = False
    start: int | None = None  # presentation time of the first key frame
    key: int | None = None  # and of the latest
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.is_corrupt:
            raise DecodeError(f"{path}: damaged container near packet {len(packets)}; get the file again")
        pts = packet.pts
        hidden = codec.name == "vp8" and not memoryview(packet)[0] & 0x10  # an alternate reference, never shown
        if packet.is_keyframe:
            key = pts
            start = pts if start is None else start
        open_gop |= pts is not None and key is not None and pts < key
        counted |= pts is None and not hidden
        edited |= packet.is_discard
        shown = pts is not None and start is not None and pts >= start and not (hidden or packet.is_discard)
        restart = not packets or (indexed and packet.is_keyframe and restarts(memoryview(packet)))
        packets.append(Packet(pts if shown else None, restart))
        size += packet.size
        if held is not None:
            held.append(packet)
            if size > _HOLD_BYTES:
                held = None
    indexed_frames = len(stream.index_entries) if name == "avi" else 0  # FFmpeg skips over damaged chunks
    if len(packets) < indexed_frames:
        raise DecodeError(f"{path}: damaged container, {len(packets)} of {indexed_frames} frames; get the file again")
    pts_shown = np.sort(np.array([p.pts for p in packets if p.pts is not None], np.int64))
    counted |= len(np.unique(pts_shown)) < len(pts_shown)
    if counted:
        times_s = _decode_times(path, stream.index)
        pts_shown = np.arange(len(times_s))
    else:
        times_s = pts_shown * float(stream.time_base)
    if not len(times_s):
        raise EmptyInput(f"{path}: stream {stream.index} has no frame that can be shown")
    return VideoIndex(
        path, stream.index, name, codec.codec.canonical_name, codec.pix_fmt or "", codec.width, codec.height,
        pts_shown, times_s, counted, edited, open_gop, tuple(packets), None if held is None else (stream, tuple(held)),
    )  # fmt: skip


def _restart_rule(codec: Any) -> Callable[[memoryview], bool]:
    """For the key packets of one stream: does nothing behind it refer to a frame before it?"""
    extradata = codec.extradata or b""
    if codec.codec.intra_only or codec.codec.canonical_name in ("vp8", "vp9", "av1"):
        return lambda data: True
    if codec.name == "h264" and len(extradata) > 4 and extradata[0] == 1:  # an IDR slice among its units
        return lambda data: any(head & 0x1F == 5 for head in _nal_heads(data, (extradata[4] & 3) + 1))
    if codec.name == "hevc" and len(extradata) > 21 and extradata[0] == 1:
        return lambda data: any(head >> 1 & 0x3F in (19, 20) for head in _nal_heads(data, (extradata[21] & 3) + 1))
    return lambda data: False


def _nal_heads(data: memoryview, length: int) -> Iterator[int]:
    """First byte of each unit of an H.264 or HEVC packet, each led by its size in `length` bytes."""
    at = 0
    while at + length < len(data):
        yield data[at + length]
        at += length + int.from_bytes(data[at : at + length], "big")


def _decode_times(path: Path, stream: int) -> np.ndarray:
    """Times of all frames by decoding them: for streams whose packets do not tell (B-frames in AVI, bare H.264)."""
    import av

    with av.open(str(path)) as container:
        video: Any = container.streams[stream]
        rate = float(video.average_rate or video.guessed_rate or 25)
        times = [frame.time for frame in container.decode(video)]
    if any(t is None for t in times) or (np.diff(np.array(times, np.float64)) <= 0).any():
        return np.arange(len(times)) / rate
    return np.array(times, np.float64)

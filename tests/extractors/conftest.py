"""Small video files made on the spot: every frame shows its own number, so a test can tell which one it got."""

import multiprocessing
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BITS = 8  # of a frame's number, shown as black and white columns


def numbered_frame(number: int, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8 RGB: columns spell the number, the lower third tells colours and up from down."""
    image = np.zeros((height, width, 3), np.uint8)
    for bit in range(BITS):
        image[:, bit * width // BITS : (bit + 1) * width // BITS] = 220 if number >> bit & 1 else 30
    image[2 * height // 3 :] = (200, 40, 90)
    return image


@pytest.fixture(scope="session")
def read_number() -> Callable[[np.ndarray], int]:
    """Function from an upright `numbered_frame` of any size to the number that it shows."""

    def read(image: np.ndarray) -> int:
        height, width = image.shape[:2]
        row = image[height // 3, :, 1]
        return sum(1 << bit for bit in range(BITS) if row[int((bit + 0.5) * width / BITS)] > 128)

    return read


def write_video(
    path: Path,
    frames: int = 60,
    codec: str = "libx264",
    size: tuple[int, int] = (128, 96),
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
    rotation: int | None = None,
    container: dict[str, str] | None = None,
    audio_s: float = 0,
    shift: int = 0,
) -> None:
    """Write a video of numbered frames; `times` are presentation times in ticks of 1/600 s."""
    import av

    width, height = size
    with av.open(str(path), "w", options=container or {}) as output:
        video = output.add_stream(codec, rate=30, options={"crf": "12", **(options or {})})
        video.width, video.height, video.pix_fmt = width, height, pix_fmt
        video.codec_context.time_base = Fraction(1, 600)
        if rotation is not None:
            video.set_display_rotation(rotation)
        sound = output.add_stream("aac", rate=16000) if audio_s else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, width, height), format="rgb24")
            frame.pts = times[number] if times is not None else 20 * number
            frame.time_base = Fraction(1, 600)
            for packet in video.encode(frame):
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                output.mux(packet)
        for packet in video.encode(None):
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            output.mux(packet)
        if sound is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 16000
            for block in range(int(audio_s * 16000 / 1024)):
                silence.pts = block * 1024
                output.mux(sound.encode(silence))
            output.mux(sound.encode(None))


@pytest.fixture(scope="session")
def make_video(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that writes a video of numbered frames.

    make(name, frames=60, codec="libx264", ...) -> path; as `write_video` has it.
    """
    folder = tmp_path_factory.mktemp("videos")

    def make(name: str, **how: Any) -> Path:
        path = folder / name
        # libvpx: decord's, once loaded, stands in the way of PyAV's. SVT-AV1: run by root, it makes the process that
        # encodes a real-time one, with all that this starts later: on few cores nothing else gets its turn then.
        if how.get("codec", "").startswith(("libvpx", "libsvtav1")):
            process = multiprocessing.get_context("spawn").Process(target=write_video, args=(path,), kwargs=how)
            process.start()
            process.join()
            assert process.exitcode == 0
        else:
            write_video(path, **how)
        return path

    return make

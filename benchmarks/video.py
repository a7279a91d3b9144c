"""Video: one in 20 frames of a clip, 224 x 224, against decord and PyAV used directly in one process.

Ours is the stage as the runner uses it: helper process with deadline and memory cap, the frame table, the checks, and
the record's way back; without the write to HDF5. The peers only decode and resize: decord with its own resizer, PyAV
in order with threads, keeping every 20th. The real clips are used where they are (`--data`), else made ones.
`ours_vs_best` is the peers' better time over ours, clip by clip, and of those the lowest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import cv2
import decord
import harness
import numpy as np

from extractors.decode import TorchCodec, open_video
from extractors.decode_probe import index
from extractors.errors import MissingPackage
from extractors.inputs import Clip
from extractors.video import Video
from pipelines.extraction import HostedExtraction

EVERY, SIZE = 20, 224


def by_decord(path: Path, threads: int) -> np.ndarray:
    """decord's batch by number, resized while it decodes."""
    reader = decord.VideoReader(str(path), width=SIZE, height=SIZE, num_threads=threads)
    return reader.get_batch(range(0, len(reader), EVERY)).asnumpy()


def by_pyav(path: Path) -> np.ndarray:
    """FFmpeg in order on all cores, frames counted."""
    frames = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            if number % EVERY == 0:
                frames.append(cv2.resize(frame.to_ndarray(format="rgb24"), (SIZE, SIZE)))
    return np.stack(frames)


def by_torchcodec(path: Path) -> np.ndarray:
    """torchcodec's batch by number in its exact mode."""
    table = index(path)
    kept = np.arange(0, len(table), EVERY)
    return np.stack([cv2.resize(frame, (SIZE, SIZE)) for frame in TorchCodec(table).frames(kept)])


def make_clips(folder: Path, quick: bool) -> list[Path]:
    """H.264 with B-frames: a moving pattern with noise."""
    random = np.random.default_rng(0)
    path = folder / "made.mp4"
    noise = random.integers(0, 40, (720, 1280, 3), dtype=np.uint8)
    y, x = np.mgrid[:720, :1280]
    with av.open(str(path), "w") as output:
        video = output.add_stream("libx264", rate=30, options={"crf": "23", "preset": "veryfast", "g": "60"})
        video.width, video.height, video.pix_fmt = 1280, 720, "yuv420p"
        for number in range(120 if quick else 300):
            image = np.stack([(x + 5 * number) // 4, (y + 3 * number) // 3, (x + y) // 8], 2).astype(np.uint8) // 2
            output.mux(video.encode(av.VideoFrame.from_ndarray(image + np.roll(noise, number, 1), format="rgb24")))
        output.mux(video.encode(None))
    return [path]


def main() -> None:
    options = harness.options(__doc__, ("--data", {"default": "../shared/data", "help": "folder with videos/v_*.mp4"}))
    ratios, figures = [], {"torchcodec": "not installed"}
    hosted = HostedExtraction(Video(every=EVERY, size=SIZE))

    def ours(path: Path) -> np.ndarray:
        (outcome,) = hosted.run([hosted.prepare(path.name, (Clip(path, "video"),))])
        assert isinstance(outcome.result, dict), outcome.result
        return outcome.result["frame"]

    with tempfile.TemporaryDirectory() as folder:
        real = sorted((Path(__file__).resolve().parents[1] / options.data / "videos").glob("v_*.mp4"))
        made = make_clips(Path(folder), options.quick)
        for path in real + made:
            functions: dict[str, Callable[[], Any]] = {
                "ours": lambda path=path: ours(path),
                "decord": lambda path=path: by_decord(path, 0),
                "decord_1_thread": lambda path=path: by_decord(path, 1),
                "pyav": lambda path=path: by_pyav(path),
                "ours_in_process": lambda path=path: Video(every=EVERY, size=SIZE).prepare("", Clip(path, "video")),
            }
            try:
                open_video(path, "torchcodec")
                functions["torchcodec"] = lambda path=path: by_torchcodec(path)
                figures["torchcodec"] = harness.versions("torchcodec")["torchcodec"]
            except MissingPackage:
                pass
            assert np.array_equal(ours(path), by_pyav(path))
            seconds = harness.compare(functions, repeats=9 if options.quick else 25, warmup=2)
            ratio = min(seconds["decord"], seconds["decord_1_thread"], seconds["pyav"]) / seconds["ours"]
            table = index(path)
            if path in real or not real:
                ratios.append(ratio)
            figures[path.name] = {
                "size": f"{table.width}x{table.height}",
                "frames": len(table),
                "ours_vs_best": ratio,
                **{f"{name}_ms": value * 1e3 for name, value in seconds.items()},
            }
    hosted.close()
    figures |= harness.versions("av", "decord", "opencv-python-headless")
    harness.emit("video", {"ours_vs_best": min(ratios)}, figures)


if __name__ == "__main__":
    main()

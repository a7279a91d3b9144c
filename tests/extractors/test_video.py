"""Clips of every kind to small frames: which frames, which values, which poses, which errors."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from extractors.base import recipe
from extractors.child import Child
from extractors.errors import (
    DeadlineExceeded,
    DecodeError,
    EmptyInput,
    ExtractError,
    InvalidValues,
    TruncatedFile,
    UnsupportedFile,
)
from extractors.inputs import Clip
from extractors.sens import SensFrame, SensHeader, write_sens
from extractors.video import Video, jpegs, upright_turns, write_mp4
from storage.schema import Record

Make = Callable[..., Path]
Read = Callable[[np.ndarray], int]


def extract(video: Video, path: Path, kind: str) -> Record:
    records = video.load()([video.prepare("clip", Clip(path, kind))])  # type: ignore[arg-type]
    return video.schema.check(records[0], "test")


def picture(number: int, width: int = 64, height: int = 48) -> np.ndarray:
    """(height, width, 3) uint8 RGB, another one for each number."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x * 3 + number * 5) % 256, (y * 4) % 256, np.full_like(x, number * 7 % 256)], 2).astype(np.uint8)


def jpeg(number: int, **size: int) -> bytes:
    return cv2.imencode(".jpg", picture(number, **size)[..., ::-1])[1].tobytes()


def pose(up: str) -> np.ndarray:
    """Camera -> world that looks along world y and has world z along `up` in the image."""
    columns = {
        "up": [[1, 0, 0], [0, 0, -1], [0, 1, 0]],  # camera x, y (down), z in the world
        "right": [[0, 0, 1], [1, 0, 0], [0, 1, 0]],
        "down": [[-1, 0, 0], [0, 0, 1], [0, 1, 0]],
        "left": [[0, 0, -1], [-1, 0, 0], [0, 1, 0]],
    }[up]
    full = np.eye(4, dtype=np.float32)
    full[:3, :3] = np.array(columns).T
    return full


@pytest.fixture
def sens(tmp_path: Path) -> Path:
    """45 frames of 33 ms; tracking was lost in frame 20."""
    eye = np.eye(4, dtype=np.float32)
    header = SensHeader("test", eye, eye, eye, eye, "jpeg", "zlib", (64, 48), (8, 6), 1000.0, 0)
    depth = np.zeros((6, 8), np.uint16)
    lost = np.full((4, 4), -np.inf, np.float32)
    frames = [
        SensFrame(jpeg(n), depth, lost if n == 20 else pose("right") + np.float32(0), 1_000_000 + 33_000 * n)
        for n in range(45)
    ]
    write_sens(tmp_path / "scene.sens", header, frames)
    return tmp_path / "scene.sens"


def official(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, (224, 224))  # bilinear without antialias


def test_sens_gives_the_first_of_every_20_frames_with_poses(sens: Path) -> None:
    record = extract(Video(), sens, "sens")
    assert record["frame_index"].tolist() == [0, 20, 40]
    np.testing.assert_allclose(record["time_s"], [1.0, 1.66, 2.32])
    assert record["pose_valid"].tolist() == [True, False, True]
    np.testing.assert_array_equal(record["pose"][0], pose("right"))
    assert np.isnan(record["pose"][1]).all()
    for frame, number in zip(record["frame"], (0, 20, 40), strict=True):
        decoded = cv2.imdecode(np.frombuffer(jpeg(number), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
        np.testing.assert_array_equal(frame, official(decoded))
    assert record["rotation"].tolist() == [0, 0, 0]
    assert record["decoder"][0] == f"opencv {cv2.__version__}"


def test_frames_of_a_sens_that_are_not_kept_are_not_decoded(sens: Path) -> None:
    whole = extract(Video(), sens, "sens")
    data = sens.read_bytes()
    assert data.count(jpeg(7)) == 1
    sens.write_bytes(data.replace(jpeg(7), bytes(len(jpeg(7)))))
    np.testing.assert_array_equal(extract(Video(), sens, "sens")["frame"], whole["frame"])
    with pytest.raises(DecodeError, match="frame 7"):
        extract(Video(every=7), sens, "sens")


@pytest.mark.parametrize(("up", "turns"), [("up", 0), ("right", 1), ("down", 2), ("left", 3)])
def test_upright_turn_brings_world_z_up(up: str, turns: int) -> None:
    poses = np.stack([pose(up), pose(up), pose("up")])
    assert upright_turns(poses) == turns
    image = np.zeros((3, 3), int)
    image[{"up": (0, 1), "right": (1, 2), "down": (2, 1), "left": (1, 0)}[up]] = 1
    assert np.rot90(image, turns)[0, 1] == 1


def test_sens_is_turned_only_when_asked_for(sens: Path) -> None:
    plain, turned = extract(Video(), sens, "sens"), extract(Video(rotate_upright=True), sens, "sens")
    assert turned["rotation"].tolist() == [90, 90, 90]
    decoded = cv2.imdecode(np.frombuffer(jpeg(40), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    np.testing.assert_array_equal(turned["frame"][2], official(np.ascontiguousarray(np.rot90(decoded))))
    np.testing.assert_array_equal(plain["pose"], turned["pose"])


def test_without_a_size_images_are_kept_as_they_are(sens: Path, make_video: Make, read_number: Read) -> None:
    record = extract(Video(size=None), sens, "sens")
    assert record["frame"][1] == jpeg(20)
    record = extract(Video(size=None), make_video("h264.mp4"), "video")
    image = cv2.imdecode(np.frombuffer(record["frame"][1], np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert image.shape == (96, 128, 3)
    assert read_number(image) == 20


def test_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for number in range(0, 240, 20):
        (tmp_path / f"frame-{number}.color.jpg").write_bytes(jpeg(number % 36))
    (tmp_path / "frame-0.depth.pgm").write_bytes(b"P5")
    assert [f.name for f in jpegs(tmp_path)][:3] == ["frame-0.color.jpg", "frame-20.color.jpg", "frame-40.color.jpg"]
    record = extract(Video(every=5), tmp_path, "folder")
    assert record["frame_index"].tolist() == [0, 5, 10]
    decoded = cv2.imdecode(np.frombuffer(jpeg(100 % 36), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    np.testing.assert_array_equal(record["frame"][1], official(decoded))
    assert np.isnan(record["time_s"]).all()
    assert not record["pose_valid"].any()


def test_hidden_files_of_a_folder_are_no_frames(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
        (tmp_path / f"._{number}.jpg").write_bytes(b"\0\5\x16\7, of macOS")
    assert extract(Video(every=1), tmp_path, "folder")["frame_index"].tolist() == [0, 1, 2]


def test_zero_padded_folder_is_in_the_order_of_its_names(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"frame-{number:06d}.color.jpg").write_bytes(b"")
    assert jpegs(tmp_path) == sorted(tmp_path.iterdir())


def test_video_file_gives_the_first_of_every_20_frames(make_video: Make, read_number: Read) -> None:
    record = extract(Video(), make_video("h264.mp4"), "video")
    assert [read_number(frame) for frame in record["frame"]] == [0, 20, 40]
    assert record["frame_index"].tolist() == [0, 20, 40]
    np.testing.assert_allclose(record["time_s"], [0, 2 / 3, 4 / 3], atol=1e-3)
    assert record["decoder"][0].startswith("pyav ")
    assert len(extract(Video(max_frames=2), make_video("h264.mp4"), "video")["frame"]) == 2


def test_frames_of_a_variable_rate_are_found_by_number_and_by_time(make_video: Make, read_number: Read) -> None:
    times = np.cumsum([10 + 7 * n % 50 for n in range(60)])  # ticks of 1/600 s
    path = make_video("vfr.mp4", times=times.tolist())
    record = extract(Video(every=7), path, "video")
    assert [read_number(frame) for frame in record["frame"]] == list(range(0, 60, 7))
    record = extract(Video(every=None, rate_hz=24.0), path, "video")
    shown = [read_number(frame) for frame in record["frame"]]
    ticks = times[0] + np.arange(len(shown)) * 25
    nearest = np.abs(times[:, None] - ticks).min(0)
    np.testing.assert_array_equal(np.abs(times[shown] - ticks), nearest)
    assert ticks[-1] <= times[-1] < ticks[-1] + 25
    assert len(set(shown)) < len(shown)  # where the file is slower than 24 Hz a frame comes twice


def test_choice_by_time_of_a_single_frame() -> None:
    assert Video(every=None, rate_hz=2.0).choose(np.array([3.5]), Path("x")).tolist() == [0]


def test_a_step_beyond_the_clip_keeps_its_first_frame() -> None:
    assert Video(every=10**20).choose(np.arange(5.0), Path("x")).tolist() == [0]


def test_rotated_odd_sized_and_ten_bit_files_give_frames(make_video: Make, read_number: Read) -> None:
    turned = extract(Video(), make_video("r90.mp4", rotation=90), "video")
    assert turned["rotation"].tolist() == [90, 90, 90]
    assert read_number(np.rot90(turned["frame"][1], -1)) == 20
    for path in (
        make_video("odd.mp4", size=(129, 97), pix_fmt="yuv444p"),
        make_video("ten.mp4", pix_fmt="yuv420p10le"),
    ):
        assert [read_number(f) for f in extract(Video(), path, "video")["frame"]] == [0, 20, 40]


def test_damaged_clips_are_errors_that_name_them(sens: Path, make_video: Make, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(EmptyInput, match="none"):
        extract(Video(), tmp_path / "none", "folder")
    cut = tmp_path / "cut.sens"
    cut.write_bytes(sens.read_bytes()[:-2000])
    with pytest.raises(TruncatedFile, match=r"cut\.sens"):
        extract(Video(), cut, "sens")
    for name, blob, fault in (
        ("cut", jpeg(3)[:-300], "cut off"),
        ("foreign", b"GIF89a" * 50, "no JPEG"),
        ("empty", b"", "no JPEG"),
        ("damaged", jpeg(3)[:20] + bytes(400) + jpeg(3)[-500:], "damaged|cut off"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "frame-0.jpg").write_bytes(blob)
        with pytest.raises(DecodeError, match=rf"frame-0\.jpg.*({fault})"):
            extract(Video(), folder, "folder")
    with pytest.raises(UnsupportedFile, match="no times"):
        extract(Video(every=None, rate_hz=1.0), tmp_path / "cut", "folder")
    with pytest.raises(InvalidValues, match="no ascending times"):
        Video(every=None, rate_hz=1.0).choose(np.zeros(3), Path("x"))


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings, text in (
        ({"every": 0}, "'every' is 0"),
        ({"rate_hz": 2.0}, "not both"),
        ({"every": None}, "either 'every'"),
        ({"decoder": "vlc"}, "decoder 'vlc', expected pyav"),
    ):
        with pytest.raises(ValueError, match=text):
            Video(**settings)


def test_the_recipe_names_the_decoder_and_nothing_of_the_machine() -> None:
    settings = recipe(Video(decoder="auto"))["settings"]
    assert settings["decoder"] == "auto"
    assert set(settings) == {"every", "rate_hz", "size", "max_frames", "decoder", "stream", "rotate_upright"}


def test_threads_change_no_value(make_video: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video("b_frames.mp4", options={"bf": "3", "g": "16"})
    frames = []
    for count in ("1", "2", "4"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        frames.append(extract(Video(every=3), path, "video")["frame"])
    np.testing.assert_array_equal(frames[0], frames[1])
    np.testing.assert_array_equal(frames[0], frames[2])


def test_official_mp4_plays_the_frames_at_20_hz(sens: Path, tmp_path: Path) -> None:
    record = extract(Video(every=2), sens, "sens")
    write_mp4(record, tmp_path / "scene.mp4")
    again = extract(Video(every=1), tmp_path / "scene.mp4", "video")
    assert len(again["frame"]) == 23
    np.testing.assert_allclose(np.diff(again["time_s"]), 0.05, atol=1e-6)
    error = np.abs(again["frame"].astype(int) - record["frame"]).mean()
    assert 0 < error < 12  # lossy, and neither its colours nor its order are swapped
    assert np.abs(again["frame"][..., ::-1].astype(int) - record["frame"]).mean() > 2 * error
    assert list(tmp_path.glob(".write_mp4*")) == []
    with pytest.raises(InvalidValues, match="encoded images"):
        write_mp4(extract(Video(size=None), sens, "sens"), tmp_path / "other.mp4")


def test_a_decoder_that_hangs_is_killed_and_named(tmp_path: Path) -> None:
    """The runner's own host, with a decoder that never comes back."""
    program = tmp_path / "hangs.py"
    program.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        "import extractors.video as video\n"
        "video.open_video = lambda *arguments: time.sleep(600)\n"
        "from extractors.child import serve\n"
        "from pipelines.host import answer\n"
        "serve(answer)\n"
    )
    import sys

    setup = {"extractor": Video(), "device": "cpu", "weights": {}}
    with (
        Child([sys.executable, str(program)], name="video", deadline_s=1.0, setup=setup) as child,
        pytest.raises(DeadlineExceeded, match="video helper: no answer within 1 s, killed"),
    ):
        child.call({"items": [("clip", (Clip(tmp_path / "x.mp4", "video"),))]})
    assert Video.deadline_s
    assert Video.memory_gb
    assert Video.recycle_after


def test_missing_encoder_is_an_error(sens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        fourcc = staticmethod(lambda *letters: 0)

        def __init__(self, *arguments: object) -> None: ...

        def isOpened(self) -> bool:
            return False

    monkeypatch.setattr(cv2, "VideoWriter", Closed)
    with pytest.raises(ExtractError, match="can't write mp4v at 224x224"):
        write_mp4(extract(Video(), sens, "sens"), tmp_path / "scene.mp4")
    assert not (tmp_path / "scene.mp4").exists()


def test_the_extractor_travels_to_workers() -> None:
    video = Video(every=5)
    assert pickle.loads(pickle.dumps(video)) == video
    assert pickle.loads(pickle.dumps(video.schema)).columns == video.schema.columns
    assert replace(video, every=20) == Video()


def test_real_clips_give_valid_records(data_dir: Path) -> None:
    for path in sorted((data_dir / "videos").glob("v_*.mp4")):
        record = extract(Video(), path, "video")
        assert len(record["frame"]) in (18, 21)
        assert record["frame"].std() > 10
        assert (np.diff(record["time_s"]) > 0).all()


def test_every_real_sample_gives_frames(data_dir: Path) -> None:
    for path in sorted((data_dir / "videos").glob("*.m*")):
        if path.suffix in (".mp4", ".mov"):
            record = extract(Video(), path, "video")
            assert len(record["frame"]) >= 1, path

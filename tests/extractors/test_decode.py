"""Which frame comes out: numbered frames through every kind of file, and damaged files refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from extractors.decode import check_times, open_video, threads
from extractors.decode_probe import index
from extractors.errors import DecodeError, EmptyInput, InputError, MissingFile, TruncatedFile, UnsupportedFile
from tests.sound import write_sound

Make = Callable[..., Path]

B_FRAMES = {"bf": "3", "g": "16"}
OPEN_GOP = {"x264-params": "open-gop=1:keyint=16:min-keyint=16:bframes=3:scenecut=0:b-adapt=0"}
EDIT_LIST = {"shift": 260, "container": {"avoid_negative_ts": "disabled"}}  # the first 13 frames are cut away
X265 = "keyint=16:bframes=3:log-level=none:open-gop="

FILES = {
    "h264.mp4": {},
    "b_frames.mp4": {"options": B_FRAMES},
    "open_gop.mp4": {"options": OPEN_GOP},
    "hevc_open.mp4": {"codec": "libx265", "options": {"x265-params": X265 + "1"}},
    "hevc.mkv": {"codec": "libx265", "options": {"x265-params": X265 + "0"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8", "g": "16", "b": "400k"}},
    "vp8_hidden_frames.webm": {
        "codec": "libvpx",
        "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "30", "b": "400k"},
    },
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "asp.avi": {"codec": "mpeg4", "options": {"bf": "2", "q": "2"}},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p", "options": {"q": "2"}},
    "ffv1.mkv": {"codec": "ffv1"},
    "stream.ts": {"options": B_FRAMES},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
    "bare.h264": {"options": B_FRAMES},
    "ten_bit.mp4": {"pix_fmt": "yuv420p10le"},
    "odd_size.mp4": {"size": (129, 97), "pix_fmt": "yuv444p"},
    "one_frame.mp4": {"frames": 1},
    "longer_audio.mp4": {"audio_s": 4.0},
    "variable_rate.mp4": {"times": [20 * n + 9 * (n % 3) for n in range(60)]},
}
REFUSED_BY_TORCHCODEC = {"asp.avi", "stream.ts", "bare.h264"}


def numbers(frames: object, read_number: Callable[[np.ndarray], int]) -> list[int]:
    return [read_number(frame) for frame in frames]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FILES)
def test_frame_k_is_the_kth_shown(name: str, make_video: Make, read_number: Callable[[np.ndarray], int]) -> None:
    video = open_video(make_video(name, **FILES[name]))
    count = FILES[name].get("frames", 60)
    assert len(video.index) == count
    assert numbers(video.frames(np.arange(count)), read_number) == list(range(count))
    some = np.arange(0, count, 7)
    assert numbers(video.frames(some), read_number) == some.tolist()


@pytest.mark.parametrize("name", FILES)
def test_torchcodec_gives_the_right_frame_or_an_error(
    name: str, make_video: Make, read_number: Callable[[np.ndarray], int]
) -> None:
    pytest.importorskip("torchcodec", reason="torchcodec is not installed", exc_type=(ImportError, RuntimeError))
    video = make_video(name, **FILES[name])
    some = np.arange(0, FILES[name].get("frames", 60), 7)
    try:
        assert numbers(open_video(video, "torchcodec").frames(some), read_number) == some.tolist()
    except (UnsupportedFile, DecodeError) as error:
        assert "pyav" in str(error)
        assert name in REFUSED_BY_TORCHCODEC


@pytest.mark.parametrize("name", FILES)
def test_skipped_groups_change_no_value(name: str, make_video: Make) -> None:
    video = open_video(make_video(name, **FILES[name]))
    every = list(video.frames(np.arange(len(video.index))))
    some = np.arange(0, len(video.index), 20)
    for at, frame in zip(some, video.frames(some), strict=True):
        np.testing.assert_array_equal(frame, every[at])


@pytest.mark.parametrize("name", FILES)
def test_auto_gives_the_values_of_pyav(name: str, make_video: Make) -> None:
    pytest.importorskip("decord")
    path = make_video(name, **FILES[name])
    some = np.arange(0, len(index(path)), 7)
    for a, b in zip(open_video(path, "auto").frames(some), open_video(path).frames(some), strict=True):
        np.testing.assert_array_equal(a, b)


def test_auto_uses_decord_where_it_is_right(make_video: Make) -> None:
    pytest.importorskip("decord")
    assert open_video(make_video("b_frames.mp4", options=B_FRAMES), "auto").name.startswith("decord 0.6.0")


def test_groups_without_a_kept_frame_are_not_decoded(make_video: Make) -> None:
    table = index(make_video("groups.mp4", options={"bf": "0", "x264-params": "keyint=10:min-keyint=10:scenecut=0"}))
    assert table.runs(np.array([0, 35])) == [(0, 1), (30, 36)]
    open_group = index(make_video("open_gop.mp4", options=OPEN_GOP))
    assert [first for first, _ in open_group.runs(np.array([0, 35]))] == [0]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("open_gop.mp4", {"options": OPEN_GOP}, "open group of pictures"),
        ("edit_list.mp4", EDIT_LIST, "edit list"),
        ("stream.ts", {"options": B_FRAMES}, "container mpegts"),
        ("asp.mp4", {"codec": "mpeg4", "options": {"bf": "2", "q": "2"}}, "codec mpeg4"),
        ("av1.mp4", {"codec": "libsvtav1", "options": {"preset": "12"}}, "codec av1"),
        ("ten_bit.mp4", {"pix_fmt": "yuv420p10le"}, "yuv420p10le"),
    ],
)
def test_decord_refuses_what_it_gets_wrong(name: str, settings: dict, reason: str, make_video: Make) -> None:
    pytest.importorskip("decord")
    with pytest.raises(UnsupportedFile, match=reason):
        open_video(make_video(name, **settings), "decord")


def test_edit_list_starts_at_its_first_shown_frame(make_video: Make, read_number: Callable[[np.ndarray], int]) -> None:
    video = open_video(make_video("edit_list.mp4", **EDIT_LIST))
    assert len(video.index) == 47
    assert video.index.times_s[0] == 0
    assert numbers(video.frames(np.array([0, 20, 40])), read_number) == [13, 33, 53]


@pytest.mark.parametrize("decoder", ["pyav", "decord"])
@pytest.mark.parametrize("turn", [90, 180, 270])
def test_rotated_file_comes_out_upright(
    turn: int, decoder: str, make_video: Make, read_number: Callable[[np.ndarray], int]
) -> None:
    pytest.importorskip(decoder if decoder == "decord" else "av")
    video = open_video(make_video(f"turned_{turn}.mp4", rotation=turn), decoder)
    frame = list(video.frames(np.array([0, 5])))[1]
    assert video.rotation == turn
    assert frame.shape == ((128, 96, 3) if turn % 180 else (96, 128, 3))
    assert read_number(np.rot90(frame, -turn // 90)) == 5  # as it was drawn, before the file said to turn it


def test_colours_follow_the_file_tags(make_video: Make) -> None:
    for name in ("h264.mp4", "ten_bit.mp4", "vp9.webm"):
        frame = next(open_video(make_video(name, **FILES[name])).frames(np.array([0])))
        np.testing.assert_allclose(frame[-8, frame.shape[1] // 2], (200, 40, 90), atol=8)


def test_truncated_files_are_refused(make_video: Make, tmp_path: Path) -> None:
    for name in ("h264.mp4", "vp9.webm", "asp.avi", "fragments.mp4"):
        data = make_video(name, **FILES[name]).read_bytes()
        cut = tmp_path / name
        cut.write_bytes(data[: len(data) * 6 // 10])
        with pytest.raises(TruncatedFile, match=r"ends at byte|no index"):
            open_video(cut)


def test_truncated_file_with_its_index_first_is_refused(make_video: Make, tmp_path: Path) -> None:
    data = make_video("index_first.mp4", container={"movflags": "faststart"}).read_bytes()
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(data[:-10])
    with pytest.raises(TruncatedFile, match=f"ends at byte {len(data) - 10}, its header says {len(data)}"):
        open_video(cut)


def test_missing_empty_foreign_and_audio_files_are_refused_by_name(make_video: Make, tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="nothing"):
        open_video(tmp_path / "nothing.mp4")
    with pytest.raises(UnsupportedFile, match="not a regular file"):
        open_video(tmp_path)
    empty, garbage, audio = tmp_path / "empty.mp4", tmp_path / "garbage.mp4", tmp_path / "audio.mp4"
    empty.touch()
    with pytest.raises(EmptyInput, match="zero bytes"):
        open_video(empty)
    garbage.write_bytes(np.random.default_rng(0).bytes(20_000))
    with pytest.raises(UnsupportedFile, match="not a video"):
        open_video(garbage)
    write_sound(audio)
    with pytest.raises(UnsupportedFile, match="no video stream"):
        open_video(audio)
    with pytest.raises(UnsupportedFile, match="stream 1 is no video"):
        open_video(make_video("longer_audio.mp4", audio_s=4.0), stream=1)


@pytest.mark.parametrize("text", ["ffconcat version 1.0\nfile h264.mp4\n", "#EXTM3U\n#EXTINF:1,\nh264.mp4\n"])
def test_a_list_of_other_files_is_no_video(text: str, make_video: Make) -> None:
    path = make_video("h264.mp4").with_name("list.mp4")
    path.write_text(text)
    with pytest.raises(UnsupportedFile, match=r"list\.mp4"):
        index(path)


@pytest.mark.parametrize("name", ["h264.mp4", "open_gop.mp4", "b_frames.mp4", "hevc_open.mp4", "asp.avi"])
def test_damage_in_the_middle_gives_right_frames_or_an_error(name: str, make_video: Make, tmp_path: Path) -> None:
    good = open_video(make_video(name, **FILES[name]))
    some = np.arange(0, 60, 5)
    right = list(good.frames(some))
    data = good.index.path.read_bytes()
    errors = 0
    for seed in range(6):
        random = np.random.default_rng(seed)
        at = int(len(data) * random.uniform(0.3, 0.5))
        bad = tmp_path / name
        bad.write_bytes(data[:at] + random.bytes(64) + data[at + 64 :])
        try:
            frames = list(open_video(bad).frames(some))
        except InputError:
            errors += 1
        else:
            for frame, expected in zip(frames, right, strict=True):
                np.testing.assert_array_equal(frame, expected)
    assert errors


def test_frames_lost_to_a_damaged_matroska_container_are_noticed(make_video: Make, tmp_path: Path) -> None:
    data = bytearray(make_video("vp9.webm", **FILES["vp9.webm"]).read_bytes())
    second = data.index(b"\x1f\x43\xb6\x75", len(data) // 10) if data.count(b"\x1f\x43\xb6\x75") > 1 else 0
    at = data.index(b"\xa3", second or data.index(b"\x1f\x43\xb6\x75") + 10)  # the first block in a cluster
    data[at : at + 2] = b"\x81\x00"
    bad = tmp_path / "bad.webm"
    bad.write_bytes(data)
    with pytest.raises(DecodeError, match="damaged container at byte"):
        index(bad)


def test_a_decoder_that_gives_another_frame_is_caught(make_video: Make) -> None:
    table = index(make_video("h264.mp4"))
    check_times(table, np.array([0, 3]), table.times_s[[0, 3]])
    with pytest.raises(DecodeError, match=r"frame 3 is shown at 0\.1000 s, the decoder gave the one at 0\.1333 s"):
        check_times(table, np.array([0, 3]), table.times_s[[0, 4]])


def test_long_streams_are_read_again_instead_of_kept(
    make_video: Make, monkeypatch: pytest.MonkeyPatch, read_number: Callable[[np.ndarray], int]
) -> None:
    monkeypatch.setattr("extractors.decode_probe._HOLD_BYTES", 1000)
    video = open_video(make_video("b_frames.mp4", options=B_FRAMES))
    assert video.index.held is None
    assert numbers(video.frames(np.array([0, 20, 40])), read_number) == [0, 20, 40]


def test_a_video_can_be_read_again_from_any_state(make_video: Make, read_number: Callable[[np.ndarray], int]) -> None:
    video = open_video(make_video("b_frames.mp4", options=B_FRAMES))
    begun = video.frames(np.arange(60))
    assert [read_number(next(begun)) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert numbers(video.frames(np.array([2, 50])), read_number) == [2, 50]
    assert numbers(video.frames(np.array([0, 20])), read_number) == [0, 20]


def test_threads_follow_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= threads() <= 2


def test_real_file_agrees_with_its_published_frame_times(data_dir: Path) -> None:
    times = json.loads((data_dir / "videos/nasa_13013.mp4.stream3.all_frames_info.json").read_text())
    table = index(data_dir / "videos/nasa_13013.mp4")
    assert table.stream == 3
    np.testing.assert_allclose(table.times_s, [float(frame["pts_time"]) for frame in times], atol=1e-6)
    assert len(index(data_dir / "videos/nasa_13013.mp4", stream=0)) == 325


def test_four_orientations_of_a_real_clip_look_alike(data_dir: Path) -> None:
    turns = {name: open_video(data_dir / f"videos/video_{name}.mov") for name in (0, 90, 180, 270)}
    shapes = {name: next(video.frames(np.array([0]))).shape for name, video in turns.items()}
    assert [turns[name].rotation for name in (0, 90, 180, 270)] == [0, 270, 180, 90]
    assert shapes == {0: (320, 568, 3), 90: (568, 320, 3), 180: (320, 568, 3), 270: (568, 320, 3)}


def test_real_clips_are_the_same_through_decord(data_dir: Path) -> None:
    pytest.importorskip("decord")
    for path in sorted((data_dir / "videos").glob("v_*.mp4")):
        decord, pyav = open_video(path, "decord"), open_video(path)
        some = np.arange(0, len(pyav.index), 20)
        for a, b in zip(decord.frames(some), pyav.frames(some), strict=True):
            np.testing.assert_array_equal(a, b)

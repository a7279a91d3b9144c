"""The `.sens` reader: what was written comes back, and damage is named."""

import dataclasses
import struct
import tracemalloc

import cv2
import numpy as np
import pytest

from extractors.errors import DecodeError, EmptyInput, MissingFile, TruncatedFile, UnsupportedFile
from extractors.sens import SensFrame, SensHeader, SensReader, write_sens

FRAMES = 7
HEADER = SensHeader(
    sensor="StructureSensor",
    intrinsic_color=np.diag([1170.0, 1171.0, 1, 1]).astype(np.float32),
    extrinsic_color=np.eye(4, dtype=np.float32),
    intrinsic_depth=np.diag([577.0, 578.0, 1, 1]).astype(np.float32),
    extrinsic_depth=np.eye(4, dtype=np.float32),
    color_codec="jpeg",
    depth_codec="zlib",
    color_size=(32, 24),
    depth_size=(16, 12),
    depth_shift=1000.0,
    frames=FRAMES,
)


def make_frames(count=FRAMES):
    rng = np.random.default_rng(0)
    for i in range(count):
        image = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        pose = np.eye(4, dtype=np.float32)
        pose[:3, 3] = i, 2 * i, 1.5
        if i == 3:
            pose[:] = -np.inf
        depth = rng.integers(0, 5000, (12, 16), dtype=np.uint16)
        yield SensFrame(cv2.imencode(".jpg", image)[1].tobytes(), depth, pose, 33_333 * i)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "scene0000_00.sens"
    write_sens(path, HEADER, make_frames())
    return path


def test_everything_written_comes_back(path):
    frames = list(make_frames())
    with SensReader(path) as reader:
        for field in dataclasses.fields(SensHeader):
            np.testing.assert_array_equal(getattr(reader.header, field.name), getattr(HEADER, field.name))
        assert len(reader) == FRAMES
        for i in reversed(range(FRAMES)):
            assert reader.jpeg(i) == frames[i].color
            np.testing.assert_array_equal(reader.depth(i), frames[i].depth)
            np.testing.assert_array_equal(reader.poses[i], frames[i].pose)
        assert reader.depth(0).dtype == np.uint16
        assert reader.times_us[:, 0].tolist() == [33_333 * i for i in range(FRAMES)]


def test_lost_tracking_is_marked_and_the_frame_stays(path):
    with SensReader(path) as reader:
        assert reader.pose_valid.tolist() == [True, True, True, False, True, True, True]
        assert cv2.imdecode(np.frombuffer(reader.jpeg(3), np.uint8), cv2.IMREAD_COLOR).shape == (24, 32, 3)


def test_the_layout_is_that_of_the_official_reader(path):
    data = path.read_bytes()
    assert struct.unpack_from("<IQ", data) == (4, 15)
    assert data[12:27] == b"StructureSensor"
    assert struct.unpack_from("<f", data, 27)[0] == 1170.0
    at = 27 + 256
    assert struct.unpack_from("<iiIIIIfQ", data, at) == (2, 1, 32, 24, 16, 12, 1000.0, FRAMES)
    color_bytes = struct.unpack_from("<Q", data, at + 36 + 80)[0]
    assert data[at + 36 + 96 :][:2] == b"\xff\xd8"
    assert color_bytes == len(next(iter(make_frames())).color)


def test_raw_depth_is_read(tmp_path):
    write_sens(tmp_path / "a.sens", dataclasses.replace(HEADER, depth_codec="raw"), make_frames())
    with SensReader(tmp_path / "a.sens") as reader:
        np.testing.assert_array_equal(reader.depth(1), list(make_frames())[1].depth)


@pytest.mark.parametrize("cut", [2, 8, 20, 150, 300, 340, 1000, -60, -9])
def test_a_truncated_file_is_named_with_its_place(path, cut):
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(TruncatedFile, match=r"scene0000_00.sens: .* at byte \d+ needs"):
        SensReader(path)


def test_truncation_names_the_first_frame_that_is_cut(path):
    path.write_bytes(path.read_bytes()[:-20])  # 8 bytes of trailer, the rest is of the last frame
    with pytest.raises(TruncatedFile, match=f"frame {FRAMES - 1} of {FRAMES}"):
        SensReader(path)


def test_a_missing_imu_trailer_does_no_harm(path):
    path.write_bytes(path.read_bytes()[:-8])
    with SensReader(path) as reader:
        assert len(reader) == FRAMES


def test_another_version_is_not_read(path):
    path.write_bytes(struct.pack("<I", 3) + path.read_bytes()[4:])
    with pytest.raises(UnsupportedFile, match="version 3, only version 4"):
        SensReader(path)


@pytest.mark.parametrize(
    "data",
    [b"\x89PNG\r\n\x1a\n" + bytes(5000), b"ply\nformat ascii 1.0\n" * 200, struct.pack("<IQ", 4, 1 << 40) + bytes(5000),
     struct.pack("<IQ", 4, 3) + b"\x01" * 5000],
)  # fmt: skip
def test_foreign_bytes_are_not_read(tmp_path, data):
    (tmp_path / "a.sens").write_bytes(data)
    with pytest.raises(UnsupportedFile, match=r"not a \.sens file"):
        SensReader(tmp_path / "a.sens")


def test_missing_empty_and_frameless_files_have_their_own_errors(tmp_path):
    with pytest.raises(MissingFile):
        SensReader(tmp_path / "no.sens")
    (tmp_path / "empty.sens").touch()
    with pytest.raises(EmptyInput, match="zero bytes"):
        SensReader(tmp_path / "empty.sens")
    write_sens(tmp_path / "none.sens", HEADER, [])
    with pytest.raises(EmptyInput, match="no frames"):
        SensReader(tmp_path / "none.sens")


def test_a_count_of_frames_beyond_the_file_costs_no_memory(path):
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 27 + 256 + 28, 1 << 60)
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(TruncatedFile, match=f"of {1 << 60}"):
        SensReader(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_damaged_blobs_are_decode_errors(path):
    with SensReader(path) as reader:
        at = int(reader._offsets[2])
        size = int(reader._sizes[2, 0])
    data = bytearray(path.read_bytes())
    data[at : at + 2] = b"xx"
    data[at + size : at + size + 4] = b"xxxx"
    path.write_bytes(data)
    with SensReader(path) as reader:
        with pytest.raises(DecodeError, match="frame 2"):
            reader.jpeg(2)
        with pytest.raises(DecodeError, match="frame 2"):
            reader.depth(2)
        reader.jpeg(1)


def test_a_depth_image_of_another_size_is_refused(tmp_path):
    write_sens(tmp_path / "a.sens", dataclasses.replace(HEADER, depth_size=(16, 13)), make_frames())
    with SensReader(tmp_path / "a.sens") as reader, pytest.raises(DecodeError, match="16 x 13 uint16 need 416"):
        reader.depth(0)


def test_a_depth_image_without_its_checksum_is_refused(tmp_path):
    write_sens(tmp_path / "a.sens", HEADER, make_frames(1))
    with SensReader(tmp_path / "a.sens") as reader:
        head, size = int(reader._offsets[0]) - 16, int(reader._sizes[0].sum())
    data = bytearray((tmp_path / "a.sens").read_bytes())
    (depth,) = struct.unpack_from("<Q", data, head + 8)
    struct.pack_into("<Q", data, head + 8, depth - 2)
    del data[head + 16 + size - 2 : head + 16 + size]
    (tmp_path / "a.sens").write_bytes(data)
    with SensReader(tmp_path / "a.sens") as reader, pytest.raises(DecodeError, match="ends within its checksum"):
        reader.depth(0)


def test_a_frame_out_of_range_is_an_index_error(path):
    with SensReader(path) as reader:
        for frame in (-1, FRAMES):
            with pytest.raises(IndexError):
                reader.jpeg(frame)

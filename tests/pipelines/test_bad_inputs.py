"""Bad items beside good ones, through `scenecache run`: each is named under its own error, all others are done."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from extractors.sens import SensFrame, SensHeader, write_sens
from pipelines.sources.ply import write_ply
from pipelines.stage import Stage
from tests.pipelines.fakes import Folder, Hosted, Numbers
from tests.pipelines.front_door import FrontDoor
from tests.pipelines.running import Runs, job
from tests.sound import write_sound

VOTENET = {"weights": "untrained:0", "num_points": 2048, "proposals": 8}


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontDoor:
    return FrontDoor(tmp_path, monkeypatch)


def mesh(points: int = 3000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    xyz = rng.uniform(0, 4, (points, 3)).astype(np.float32)
    rgb = rng.integers(0, 256, (points, 3)).astype(np.uint8)
    faces = np.stack([np.arange(points - 2), np.arange(1, points - 1), np.arange(2, points)], 1)
    return xyz, rgb, faces


def text_ply(path: Path, xyz: np.ndarray, rgb: np.ndarray | None, faces: np.ndarray, text: bool, order: str) -> None:
    import plyfile

    names = [(n, "f4") for n in "xyz"] + ([(n, "u1") for n in ("red", "green", "blue")] if rgb is not None else [])
    vertex = np.zeros(len(xyz), names)
    for i, n in enumerate("xyz"):
        vertex[n] = xyz[:, i]
    if rgb is not None:
        for i, n in enumerate(("red", "green", "blue")):
            vertex[n] = rgb[:, i]
    face = np.zeros(len(faces), [("vertex_indices", "i4", (3,))])
    face["vertex_indices"] = faces
    elements = [plyfile.PlyElement.describe(vertex, "vertex"), plyfile.PlyElement.describe(face, "face")]
    plyfile.PlyData(elements, text=text, byte_order=order).write(str(path))


def write_scans(root: Path) -> None:
    """Scene folders in ScanNet's layout, one for each kind of mesh."""
    xyz, rgb, faces = mesh()

    def place(name: str) -> Path:
        folder = root / "scans" / f"scene_{name}_00"
        folder.mkdir(parents=True)
        return folder / f"scene_{name}_00_vh_clean_2.ply"

    good = place("good")
    write_ply(good, xyz, rgb, faces)
    place("missing")
    place("empty").touch()
    place("cut").write_bytes(good.read_bytes()[:-100])
    place("cutvertex").write_bytes(good.read_bytes()[:5000])
    place("foreign").write_bytes(b"solid stl, not ply\n" * 50)
    text_ply(place("colourless"), xyz, None, faces, False, "<")
    text_ply(place("ascii"), xyz, rgb, faces, True, "=")
    text_ply(place("bigendian"), xyz, rgb, faces, False, ">")
    holes = xyz.copy()
    holes[7] = np.nan
    write_ply(place("nan"), holes, rgb, faces)
    write_ply(place("allnan"), np.full_like(xyz, np.nan), rgb, faces)
    write_ply(place("nofaces"), xyz, rgb, faces[:0])
    write_ply(place("tiny"), xyz[:10], rgb[:10], faces[:8])
    write_ply(place("novertices"), xyz[:0], rgb[:0], faces[:0])
    write_ply(place("wildface"), xyz, rgb, np.array([[0, 1, 99_999]]))


UNREADABLE = {
    "missing": "MissingFile",
    "empty": "EmptyInput",
    "cut": "TruncatedFile",
    "cutvertex": "TruncatedFile",
    "foreign": "UnsupportedFile",
    "novertices": "EmptyInput",
    "wildface": "InvalidValues",
}
GOOD = {"good", "ascii", "bigendian", "nofaces", "tiny"}


def scene(name: str) -> str:
    return f"scene_{name}_00"


def test_meshes_of_every_kind_are_read_or_named(door: FrontDoor, tmp_path: Path) -> None:
    write_scans(tmp_path)
    path = door.job({"type": "scannet", "root": "."}, {"scan_info": {}, "votenet": VOTENET})
    code, _, _ = door("run", path, "--max-failure-rate", "1")
    assert code == 3

    info, votes = door.failures("scan_info"), door.failures("votenet")
    bad = {**UNREADABLE, "allnan": "InvalidValues"}
    assert {k: v[0] for k, v in info.items()} == {scene(k): v for k, v in bad.items()}
    bad["colourless"] = "NoColors"
    assert {k: v[0] for k, v in votes.items()} == {scene(k): v for k, v in bad.items()}
    assert all(item in text for found in (info, votes) for item, (_, text) in found.items())

    records = door.records("scan_info")
    assert set(records) == {scene(k) for k in {*GOOD, "colourless", "nan"}}
    for name in ("ascii", "bigendian"):  # dialects of one mesh give one record
        assert records.digest(scene(name)) == records.digest(scene("good"))
    assert int(records[scene("nan")]["invalid_vertices"]) == 1
    assert int(records[scene("nofaces")]["faces"]) == 0
    assert int(records[scene("tiny")]["vertices"]) == 10
    proposals = door.records("votenet")
    assert set(proposals) == {scene(k) for k in {*GOOD, "nan"}}  # single vertices without a place are left out
    for record in proposals.values():
        assert record["feature"].shape == (8, 128)
        assert np.isfinite(record["feature"]).all()


def test_a_failure_is_remembered_until_its_file_is_mended(door: FrontDoor, tmp_path: Path) -> None:
    write_scans(tmp_path)
    path = door.job({"type": "scannet", "root": "."}, {"scan_info": {}})
    door("run", path, "--max-failure-rate", "1")
    before = door.digests("scan_info")
    bad = {k for k, v in door.plan(path, "scan_info").items() if v == ("skip", "failed before")}
    assert bad == {scene(k) for k in (*UNREADABLE, "allnan")}
    assert door("run", path)[0] == 3

    xyz, rgb, faces = mesh(500)
    for key in bad:
        write_ply(tmp_path / "scans" / key / f"{key}_vh_clean_2.ply", xyz, rgb, faces)
    assert {k for k, v in door.plan(path, "scan_info").items() if v == ("compute", "input changed")} == bad
    assert door("run", path)[0] == 0
    after = door.digests("scan_info")
    assert {k: after[k] for k in before} == before
    assert set(after) == set(before) | bad
    assert not door.failures("scan_info")


@pytest.mark.parametrize("points", [200_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_a_large_mesh_is_only_large(points: int, door: FrontDoor, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    xyz, rgb, faces = mesh(points)
    write_ply(tmp_path / "raw" / "large.ply", xyz, rgb, faces)
    path = door.job({"type": "folder", "root": "raw"}, {"scan_info": {}, "votenet": VOTENET})
    assert door("run", path)[0] == 0
    assert int(door.records("scan_info")["large"]["vertices"]) == points
    assert np.isfinite(door.records("votenet")["large"]["center"]).all()


# recordings and videos

HEADER = SensHeader(
    "test", *(np.eye(4, dtype=np.float32),) * 4, "jpeg", "zlib", (32, 24), (16, 12), 1000.0, 6
)  # fmt: skip


def sens_frames(lost: Iterable[int] = ()) -> Iterable[SensFrame]:
    import cv2

    for i in range(6):
        image = np.full((24, 32, 3), 40 * i, np.uint8)
        pose = np.eye(4, dtype=np.float32) if i not in set(lost) else np.full((4, 4), -np.inf, np.float32)
        yield SensFrame(cv2.imencode(".jpg", image)[1].tobytes(), np.ones((12, 16), np.uint16), pose, 1000 * i)


def write_video(path: Path, size: tuple[int, int] = (64, 48), pixels: str = "yuv420p", times: Iterable[int] = range(12),
                turn: int | None = None) -> None:  # fmt: skip
    """A clip whose frame k has brightness 20 * k and is shown at times[k] / 30 s."""
    import av

    with av.open(str(path), "w") as output:
        video = output.add_stream("libx264", rate=30, options={"crf": "5"})
        video.width, video.height = size
        video.pix_fmt = pixels
        video.codec_context.time_base = Fraction(1, 30)
        if turn is not None:
            video.set_display_rotation(turn)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), 20 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 30)
            output.mux(video.encode(frame))
        output.mux(video.encode(None))


def test_clips_of_every_kind_are_decoded_or_named(door: FrontDoor, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_video(raw / "good.mp4")
    write_video(raw / "variable.mp4", times=[0, 1, 2, 5, 6, 7, 20, 21, 22, 23, 24, 40])
    write_video(raw / "odd.mp4", size=(65, 49), pixels="yuv444p")
    write_video(raw / "ten.mp4", pixels="yuv420p10le")
    write_video(raw / "turned.mp4", turn=90)
    write_sens(raw / "sens.sens", HEADER, sens_frames())
    write_sens(raw / "lost.sens", HEADER, sens_frames(lost=(0, 4)))
    (raw / "zero.mp4").touch()
    write_sound(raw / "sound.mp4")
    (raw / "cut.mp4").write_bytes((raw / "good.mp4").read_bytes()[:-300])
    (raw / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    whole = (raw / "sens.sens").read_bytes()
    (raw / "cutsens.sens").write_bytes(whole[:-150])
    (raw / "old.sens").write_bytes(struct.pack("<I", 3) + whole[4:])
    (raw / "zerosens.sens").touch()
    path = door.job({"type": "folder", "root": "raw"}, {"video": {"every": 4, "size": 16}})
    assert door("run", path, "--max-failure-rate", "1")[0] == 3

    expected = {
        "zero": "EmptyInput", "sound": "UnsupportedFile", "cut": "TruncatedFile", "noise": "UnsupportedFile",
        "cutsens": "TruncatedFile", "old": "UnsupportedFile", "zerosens": "EmptyInput",
    }  # fmt: skip
    found = door.failures("video")
    assert {item: kind for item, (kind, _) in found.items()} == expected
    assert all(f"{item}." in text for item, (_, text) in found.items())
    assert "version 3" in found["old"][1]

    records = door.records("video")
    assert set(records) == {"good", "variable", "odd", "ten", "turned", "sens", "lost"}
    for name in ("good", "variable", "odd", "ten", "turned"):
        record = records[name]
        assert record["frame_index"].tolist() == [0, 4, 8]
        np.testing.assert_allclose(record["frame"].mean(axis=(1, 2, 3)), [0, 80, 160], atol=6)
    np.testing.assert_allclose(records["variable"]["time_s"], np.array([0, 6, 22]) / 30, atol=1e-4)
    assert set(records["turned"]["rotation"].tolist()) == {90}
    assert records["sens"]["pose_valid"].tolist() == [True, True]
    assert records["lost"]["pose_valid"].tolist() == [False, False]
    assert door.plan(path, "video")["cut"] == ("skip", "failed before")
    write_video(raw / "cut.mp4")
    assert door.plan(path, "video")["cut"] == ("compute", "input changed")
    assert door("run", path)[0] == 3
    assert door.records("video").digest("cut") == records.digest("good")


def test_what_hangs_or_leaks_costs_one_item(tmp_path: Path) -> None:
    source = Folder.make(tmp_path / "raw", {"a": "x", "hangs": "hang", "leaks": "leak", "dies": "die", "z": "x"})
    runs = Runs(tmp_path)
    summary = runs(job(source, Stage(Hosted())), max_failure_rate=1.0)
    assert summary.exit_code == 3
    assert {k: r["error_class"] for k, r in runs.rows("numbers").items() if r["status"] == "failed"} == {
        "hangs": "DeadlineExceeded", "leaks": "MemoryCapExceeded", "dies": "ChildDied",
    }  # fmt: skip
    assert set(runs.digests("numbers")) == {"a", "z"}


# checkpoints and stores


class Canary:
    """Pickled code that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def one_scan(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    write_ply(tmp_path / "raw" / "a.ply", *mesh())
    return tmp_path


def test_checkpoints_that_do_not_fit_stop_the_stage_and_say_so(door: FrontDoor, one_scan: Path) -> None:
    import torch

    from extractors.votenet_network import VoteNetwork

    canary, control = one_scan / "canary", one_scan / "control"
    state = VoteNetwork(4, 8).state_dict()
    name = max((n for n in state if n.endswith("conv.weight")), key=len)
    torch.save({"model_state_dict": {"weight": torch.zeros(3)}}, one_scan / "wrong.pth")
    torch.save({"model_state_dict": {**state, name: state[name][:-1]}}, one_scan / "shape.pth")
    torch.save({"model_state_dict": Canary(canary)}, one_scan / "code.pth")
    (one_scan / "pickle.pth").write_bytes(pickle.dumps({"state_dict": Canary(canary)}))
    (one_scan / "noise.pth").write_bytes(b"not a checkpoint")
    (one_scan / "empty.pth").touch()
    pickle.loads(pickle.dumps(Canary(control)))
    assert control.exists()  # the trap works
    says = {"wrong": "no VoteNet", "shape": name, "code": "could run code", "pickle": "", "noise": "", "empty": ""}
    for file, text in says.items():
        stages = {"scan_info": {}, "votenet": {**VOTENET, "weights": f"{file}.pth"}}
        code, out, err = door("run", door.job({"type": "folder", "root": "raw"}, stages))
        assert code == 3, (file, code, err)
        assert f"{file}.pth" in out + err
        kind, cause = door.failures("votenet")["a"]
        assert kind == "WeightsError"
        assert f"{file}.pth" in cause
        assert text in cause, (file, cause)
    assert not canary.exists()
    assert "a" in door.records("scan_info")
    code, _, err = door("run", door.job({"type": "folder", "root": "raw"}, {"votenet": {"weights": "absent.pth"}}))
    assert code == 2
    assert "absent.pth" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_in_a_folder_without_write_permission_is_refused(door: FrontDoor, one_scan: Path) -> None:
    shut = one_scan / "shut"
    shut.mkdir(mode=0o500)
    path = door.job({"type": "folder", "root": "raw"}, {"scan_info": {}})
    code, _, err = door("run", path, "--store", str(shut / "store"))
    assert code == 1
    assert "shut" in err


def test_a_store_that_cannot_be_made_is_refused_by_name(door: FrontDoor, one_scan: Path) -> None:
    (one_scan / "file").write_text("in the way")
    path = door.job({"type": "folder", "root": "raw"}, {"scan_info": {}})
    for place in ("file/store", "/proc/scenecache/store"):
        store = str(one_scan / place)
        code, out, err = door("run", path, "--store", store)
        assert code == 1, (place, code, out, err)
        assert store in err


KEYS = [
    "with space",
    "sub/folder/item",
    "..",
    "../out",
    "a/../b",
    "Zoë ☃ 場面",
    "k" * 300,
    "quo'te\"=%2F",
    "tab\tnew\nline",
]


class Named(Folder):
    """Items of any name; what they hold is their name."""

    def keys(self) -> list[str]:
        return sorted(KEYS)

    def files(self, key: str, kind: str) -> list[Path]:
        return [self.root / "one.txt"]

    def facts(self, key: str, kind: str) -> bytes:
        return b""

    def open(self, key: str, kind: str) -> str:
        return "x"


def test_item_keys_of_any_form_are_kept_and_stay_inside_the_store(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "one.txt").write_text("x")
    runs = Runs(tmp_path)
    before = set(tmp_path.iterdir())
    assert runs(job(Named(tmp_path / "raw"), Stage(Numbers()))).exit_code == 0
    assert {p.name for p in set(tmp_path.iterdir()) - before} <= {"store", "digests.sqlite"}
    assert set(runs.digests("numbers")) == set(KEYS)
    assert len(set(runs.digests("numbers").values())) == len(KEYS)
    import storage

    records = storage.open(runs.url)["numbers"]
    assert {key: records[key]["value"].shape for key in KEYS} == dict.fromkeys(KEYS, (3, 4))


def test_files_of_odd_names_are_items(door: FrontDoor, tmp_path: Path) -> None:
    names = ["with space", "a..b", "Zoë ☃ 場面", "/".join(["n" * 149] * 2), "sub/..x"]
    for name in names:
        path = tmp_path / "raw" / f"{name}.ply"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_ply(path, *mesh(30))
    job_path = door.job({"type": "folder", "root": "raw"}, {"scan_info": {}})
    assert door("run", job_path)[0] == 0
    assert set(door.records("scan_info")) == {n for n in names if "/." not in n}
    assert door("run", job_path)[0] == 0


# shards


@pytest.fixture
def store(door: FrontDoor, tmp_path: Path) -> tuple[FrontDoor, str]:
    (tmp_path / "raw").mkdir()
    for n in range(3):
        write_ply(tmp_path / "raw" / f"{n}.ply", *mesh(100 + n))
        write_sens(tmp_path / "raw" / f"{n}.sens", HEADER, sens_frames(lost=(n,)))
    path = door.job({"type": "folder", "root": "raw"}, {"scan_info": {}, "video": {"every": 2, "size": 32}})
    assert door("run", path)[0] == 0
    return door, path


@pytest.mark.parametrize("stage", ["scan_info", "video"])
@pytest.mark.parametrize("damage", ["deleted", "truncated", "flipped"])
def test_a_damaged_shard_is_found_named_and_made_again(
    damage: str, stage: str, store: tuple[FrontDoor, str], tmp_path: Path
) -> None:
    door, path = store
    before = door.digests(stage)
    (shard,) = {door.records(stage).row(k).shard for k in before}
    file = tmp_path / "store" / shard
    data = bytearray(file.read_bytes())
    if damage == "deleted":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        value = door.records(stage)["1"]["frame" if stage == "video" else "bbox_min"]
        at = bytes(data).index(value.tobytes()[-24:])
        data[at + 3] ^= 0x41
        file.write_bytes(data)
    reason = "missing shard" if damage == "deleted" else "corrupt"
    if damage != "flipped":  # its size gives it away
        assert set(door.plan(path, stage).values()) == {("compute", reason)}
    code, out, _ = door("verify", "--deep")
    assert code == 3
    assert shard in out.replace("\n", "") or stage in out
    reasons = set(door.plan(path, stage).values())  # verify has marked the rows, so the plan no longer looks at files
    assert ("compute", "corrupt") in reasons
    assert reasons <= {("compute", "corrupt"), ("reuse", "unchanged")}
    assert door("run", path)[0] == 0
    assert door.digests(stage) == before
    code, out, _ = door("verify", "--deep")
    assert code == 0, out
    assert door.records(stage)["1"]

"""NuScenes-QA's .npz files: written so that the released trainer reads them, and read back as a stage."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipelines.__main__ as command
import storage
from extractors.bev_detector import object_columns
from extractors.errors import EmptyInput, InvalidValues, MissingFile, UnsupportedFile
from extractors.nuscenes_qa_features import NuScenesQAFeatures
from pipelines import nuscenes_qa_npz
from pipelines.errors import JobError
from pipelines.export import export
from pipelines.sources.nuscenes_qa_npz import NuScenesQANpz
from pipelines.stage import Stage
from tests.pipelines.running import Runs, counts, job

OBJECTS = {"aa": 3, "bb": 0, "cc": 100, "dd": 130}  # of each sample


def trainer_reads(folder: Path, width: int = 512) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Features and boxes by sample token as the released trainer has them, written from the format's description.

    A file's token is its name up to the first dot. `results` lists dicts; the first 100 count, zeros fill up to 100; an
    empty list stands for one row of zeros.
    """
    samples = {}
    for path in folder.iterdir():
        if not path.name.endswith(".npz"):
            continue
        results = np.load(path, allow_pickle=True)["results"]
        if len(results) > 0:
            features = np.array([entry["feats"] for entry in results])
            boxes = np.array([entry["box"][:7] for entry in results])
            assert all(isinstance(entry["label"], int) for entry in results)
        else:
            features, boxes = np.zeros((1, width)), np.zeros((1, 7))
        count = min(len(features), 100)
        padded = np.zeros((100, width), np.float32), np.zeros((100, 7), np.float32)
        padded[0][:count], padded[1][:count] = features[:100], boxes[:100]
        samples[path.name.split(".")[0]] = padded
    return samples


def record(key: str, width: int, dtype: str) -> storage.Record:
    rng, count = np.random.RandomState(len(key) + OBJECTS[key]), OBJECTS[key]
    return {
        "feature": rng.standard_normal((count, width)).astype(dtype),
        "box": rng.standard_normal((count, 7)).astype(np.float32),
        "velocity": np.zeros((count, 2), np.float32),
        "score": np.sort(rng.rand(count).astype(np.float32))[::-1].copy(),
        "label": rng.randint(0, 10, count).astype(np.int16),
        "class_name": np.full(count, "car", object),
        "frame": np.full(count, "lidar", object),
        "convention": np.full(count, "mmdet3d-1.0", object),
    }


def store(folder: Path, width: int = 512, dtype: str = "float16", keys: Any = OBJECTS) -> storage.reader.Records:
    """A store with a stage `objects`."""
    columns = {"feature": storage.Column((width,), dtype), **object_columns("mmdet3d-1.0", "lidar")}
    writer = storage.ShardWriter(str(folder), "objects", storage.Schema(columns, element="object"))
    for key in keys:
        row = storage.Row("objects", key, bytes(16), bytes(16), "0" * 32, "ok")
        writer.add(row, record(key if key in OBJECTS else "aa", width, dtype))
    storage.Manifest(str(folder)).commit(writer.flush())
    return storage.open(str(folder))["objects"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_trainer_reads_what_the_store_holds(tmp_path: Path, dtype: str) -> None:
    files = export(store(tmp_path / "store", dtype=dtype), tmp_path / "out", "nuscenes-qa")
    assert files == {key: f"{key}.npz" for key in OBJECTS}
    read = trainer_reads(tmp_path / "out")
    assert sorted(read) == sorted(OBJECTS)
    for key, (features, boxes) in read.items():
        expected, count = record(key, 512, dtype), min(OBJECTS[key], 100)
        np.testing.assert_array_equal(features[:count], expected["feature"][:100].astype(np.float32))
        np.testing.assert_array_equal(boxes[:count], expected["box"][:100])
        assert not features[count:].any()
        assert not boxes[count:].any()


def test_files_have_the_documented_layout(tmp_path: Path) -> None:
    export(store(tmp_path / "store"), tmp_path / "out", "nuscenes-qa")
    with np.load(tmp_path / "out" / "dd.npz", allow_pickle=True) as file:
        assert file.files == ["results"]
        results = file["results"]
    assert (results.dtype, results.shape) == (np.dtype(object), (130,))
    first = results[0]
    assert list(first) == ["feats", "box", "label"]
    assert (first["feats"].shape, first["feats"].dtype) == ((512,), np.float32)
    assert (first["box"].shape, first["box"].dtype) == ((7,), np.float32)
    assert [entry["label"] for entry in results] == record("dd", 512, "float16")["label"].tolist()
    assert np.load(tmp_path / "out" / "bb.npz", allow_pickle=True)["results"].shape == (0,)


def test_other_widths_are_filled_up_with_zeros_only_where_asked_for(tmp_path: Path) -> None:
    records = store(tmp_path / "store", width=256)
    with pytest.raises(JobError, match="features of 256 numbers.*--width 512 fills them up with zeros"):
        export(records, tmp_path / "refused", "nuscenes-qa")
    assert not (tmp_path / "refused").exists()
    export(records, tmp_path / "wide", "nuscenes-qa", width=512)
    export(records, tmp_path / "native", "nuscenes-qa", width=256)
    wide, native = trainer_reads(tmp_path / "wide"), trainer_reads(tmp_path / "native", 256)
    for key in OBJECTS:
        np.testing.assert_array_equal(wide[key][0][:, :256], native[key][0])
        assert not wide[key][0][:, 256:].any()
    with pytest.raises(JobError, match="none are dropped"):
        export(records, tmp_path / "refused", "nuscenes-qa", width=100)
    long = store(tmp_path / "long", width=600)
    with pytest.raises(JobError, match="reads 512: --width 600 writes them as they are"):
        export(long, tmp_path / "refused", "nuscenes-qa")


def test_stages_and_keys_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    records = store(tmp_path / "store")
    with pytest.raises(JobError, match="no label"):
        export(records.select("feature", "box"), tmp_path / "out", "nuscenes-qa")
    strange = store(tmp_path / "strange", keys=["a.b"])
    with pytest.raises(JobError, match=r"'a\.b' would not be read as one"):
        export(strange, tmp_path / "out", "nuscenes-qa")


def test_the_note_tells_of_empty_and_overlong_key_frames() -> None:
    assert nuscenes_qa_npz.note({"a": 5}) == ""
    text = nuscenes_qa_npz.note(OBJECTS)
    assert text == "1 without objects, 1 with more than the 100 objects that the trainer reads"


def test_the_command_line_exports_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path / "store", width=256)

    def call(*argv: str) -> tuple[int, str, str]:
        words = ["scenecache", "export", "objects", str(tmp_path / "out"), "--store", str(tmp_path / "store"), *argv]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            command.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    code, _, err = call("--format", "nuscenes-qa")
    assert code == 2
    assert "--width 512" in err
    code, out, _ = call("--format", "nuscenes-qa", "--width", "512")
    assert code == 0
    assert "4 files" in out
    assert "1 with more than the 100 objects" in out
    code, _, err = call("--format", "npz", "--width", "512")
    assert code == 2
    assert "--width goes with --format nuscenes-qa" in err


def test_released_files_become_a_stage_and_what_comes_back_is_equal(tmp_path: Path) -> None:
    export(store(tmp_path / "first"), tmp_path / "features", "nuscenes-qa")
    runs = Runs(tmp_path)
    source = NuScenesQANpz(tmp_path / "features")
    stage = Stage(NuScenesQAFeatures(dtype="float16"))
    assert counts(runs(job(source, stage)), "nuscenes_qa_features") == {"made": 4}
    records = storage.open(runs.url)["nuscenes_qa_features"]
    for key in OBJECTS:
        expected, found = record(key, 512, "float16"), records[key]
        for name in ("feature", "box", "label"):
            np.testing.assert_array_equal(found[name], expected[name])
        assert set(found["convention"]) <= {"unknown"}
    assert counts(runs(job(source, stage)), "nuscenes_qa_features") == {"reused": 4}
    export(records, tmp_path / "again", "nuscenes-qa")
    first, again = trainer_reads(tmp_path / "features"), trainer_reads(tmp_path / "again")
    assert all(np.array_equal(a, b) for key in first for a, b in zip(first[key], again[key], strict=True))


def write(path: Path, results: Any, name: str = "results") -> NuScenesQANpz:
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{name: results})
    return NuScenesQANpz(path.parent)


def entries(*rows: Any) -> np.ndarray:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def good(**change: Any) -> dict[str, Any]:
    return {"feats": np.ones(512, np.float32), "box": np.ones(9, np.float32), "label": np.int64(3), **change}


def test_files_made_by_others_are_read_in_their_variants(tmp_path: Path) -> None:
    source = write(tmp_path / "f" / "aa.npz", entries(good(), good(label=2, box=[0.5] * 7, score=0.3)))
    found = source.open("aa", "objects")
    assert (found.features.shape, found.boxes.shape, found.labels.tolist()) == ((2, 512), (2, 7), [3, 2])
    for empty in (np.zeros(0), np.empty(0, object), np.array([])):
        found = write(tmp_path / "f" / "bb.pcd.npz", empty).open("bb", "objects")
        assert found.features.shape[0] == found.boxes.shape[0] == found.labels.shape[0] == 0
    unlabelled = {name: value for name, value in good().items() if name != "label"}
    assert write(tmp_path / "f" / "cc.npz", entries(unlabelled)).open("cc", "objects").labels.tolist() == [-1]
    assert write(tmp_path / "f" / "dd.npz", entries(good())).keys() == ["aa", "bb", "cc", "dd"]


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (np.ones((3, 512)), "expected a list of dicts"),
        (entries(1, 2), r"results\[0\] is no dict"),
        (entries(good(), {"box": np.ones(7)}), r"results\[1\] is no dict with feats and box"),
        (entries(good(), good(feats=np.ones(256))), r"feats of results\[1\] have shape \(256,\)"),
        (entries(good(feats="x")), r"feats of results\[0\]"),
        (entries(good(box=np.ones(6))), r"box of results\[0\] has shape \(6,\)"),
        (entries(good(label="car")), r"label of results\[0\] is 'car'"),
        (entries(good(feats=np.full(512, np.nan))), "NaN or infinity"),
    ],
)
def test_files_of_another_content_are_refused_by_name(tmp_path: Path, results: np.ndarray, text: str) -> None:
    source = write(tmp_path / "f" / "aa.npz", results)
    with pytest.raises((UnsupportedFile, InvalidValues), match=f"aa.npz: .*{text}"):
        source.open("aa", "objects")


def test_damaged_and_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "f" / "aa.npz", entries(good()))
    path = tmp_path / "f" / "aa.npz"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"PK\x03\x04" + bytes(200), whole[:60] + b"\xff" * 40 + whole[100:]):
        path.write_bytes(content)
        with pytest.raises(UnsupportedFile, match=r"aa\.npz"):
            source.open("aa", "objects")
    path.write_bytes(b"")
    with pytest.raises(EmptyInput, match=r"aa\.npz"):
        source.open("aa", "objects")
    write(path, entries(good()), name="other")
    with pytest.raises(UnsupportedFile, match="no array 'results'; it holds other"):
        source.open("aa", "objects")
    with pytest.raises(MissingFile, match=r"no zz\.npz"):
        source.open("zz", "objects")
    with pytest.raises(MissingFile, match="no such folder"):
        NuScenesQANpz(tmp_path / "none").keys()
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFile, match=r"no \.npz in it"):
        NuScenesQANpz(tmp_path / "empty").keys()
    write(tmp_path / "f" / "aa.more.npz", entries(good()))
    with pytest.raises(UnsupportedFile, match="another file has the sample token 'aa'"):
        NuScenesQANpz(tmp_path / "f").keys()


class Attack:
    """Unpickled by Python itself, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("inside", ["an entry", "a feature", "all of it"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path, inside: str) -> None:
    attack = Attack(tmp_path / "broken in")
    path = tmp_path / "f" / "aa.npz"
    source = write(path, entries(good(feats=attack) if inside == "a feature" else attack))
    if inside == "all of it":
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("results.npy", header.getvalue() + pickle.dumps(attack))
    with pytest.raises(UnsupportedFile, match=r"aa\.npz: refers to posix\.mkdir"):
        source.open("aa", "objects")
    assert not (tmp_path / "broken in").exists()
    np.load(path, allow_pickle=True)["results"]  # the attack is a real one
    assert (tmp_path / "broken in").exists()


def test_a_bad_file_is_quarantined_and_the_others_are_kept(tmp_path: Path) -> None:
    for key in ("aa", "bb", "cc", "dd"):
        write(tmp_path / "f" / f"{key}.npz", entries(good()))
    write(tmp_path / "f" / "bb.npz", entries(good(feats=np.ones(256))))
    write(tmp_path / "f" / "cc.npz", entries(Attack(tmp_path / "x")))
    runs = Runs(tmp_path)
    summary = runs(job(NuScenesQANpz(tmp_path / "f"), Stage(NuScenesQAFeatures())), max_failure_rate=1.0)
    assert counts(summary, "nuscenes_qa_features") == {"made": 2, "failed": 2}
    rows = runs.rows("nuscenes_qa_features")
    assert rows["bb"]["error_class"] == "InvalidValues"
    assert "nuscenes_qa_features.channels=256" in rows["bb"]["error_text"]
    assert rows["cc"]["error_class"] == "UnsupportedFile"

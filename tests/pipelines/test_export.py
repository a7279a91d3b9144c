"""Exported files: their names, what they hold, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq

import storage
from pipelines.export import export, file_names
from tests.pipelines.rooms import Call, object_of


def test_exported_files_hold_the_records(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    expected = storage.open("store")["fake"]["b"]
    for form in ("npz", "hdf5", "parquet"):
        listed = object_of(call("export", "fake", form, "--format", form, "--json")[1])["files"]
        assert listed == json.loads((folder / form / "keys.json").read_text())
        assert sorted(listed) == ["a", "b"]
        path = folder / form / listed["b"]
        if form == "npz":
            found = dict(np.load(path, allow_pickle=False))
        elif form == "hdf5":
            with h5py.File(path) as file:
                found = {name: np.array(data) for name, data in file.items()}
        else:
            columns = pq.read_table(path).to_pydict()
            found = {name: np.array(values, expected[name].dtype) for name, values in columns.items()}
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    assert list(object_of(call("export", "fake", "one", "--item", "a", "--column", "index", "--json")[1])["files"]) == [
        "a"
    ]
    assert list(np.load(folder / "one" / "a.npz")) == ["index"]


def test_an_export_that_does_not_fit_leaves_no_file(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    code, _, err = call("export", "fake", "out", "--format", "mp4")
    assert code == 2
    assert "needs a column 'frame'" in err
    assert list((folder / "out").iterdir()) == []
    code, _, err = call("export", "fake", "out", "--item", "c")
    assert code == 2
    assert "UnsupportedFile" in err


def test_an_export_onto_a_file_or_into_the_store_is_refused(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    (folder / "taken").write_text("mine")
    for out, text in (
        ("taken", "taken is a file: export writes a folder"),
        ("taken/below/it", "taken is a file: export writes a folder"),
        ("store/exported", "is inside the store"),
        ("store", "is inside the store"),
    ):
        code, _, err = call("export", "fake", out)
        assert code == 2
        assert text in err
        assert err.count("\n") == 1
    assert (folder / "taken").read_text() == "mine"
    assert not (folder / "store" / "exported").exists()


def test_text_bytes_and_lists_are_exported_without_pickle(tmp_path: Path) -> None:
    schema = storage.Schema(
        {
            "text": storage.Column((), "string"),
            "image": storage.Column((), "bytes"),
            "ids": storage.Column((None,), "int32"),
        },
        element="view",
    )
    record = {
        "text": np.array(["ä", "", "c d"], object),
        "image": np.array([b"\x89PNG\r\n\x1a\n\0", b"", b"x\0"], object),
        "ids": np.array([np.array([1, 2], np.int32), np.array([], np.int32), np.array([3], np.int32)], object),
    }
    writer = storage.ShardWriter(str(tmp_path / "store"), "views", schema)
    row = storage.Row("views", "a/b", bytes(16), bytes(16), "0" * 32, "ok")
    writer.add(row, record)
    storage.Manifest(str(tmp_path / "store")).commit(writer.flush())
    records = storage.open(str(tmp_path / "store"))["views"]
    for form in ("npz", "hdf5", "parquet"):
        name = export(records, tmp_path / form, form)["a/b"]
        path = tmp_path / form / name
        if form == "parquet":
            columns = pq.read_table(path).to_pydict()
            assert columns == {
                n: [v.tolist() if isinstance(v, np.ndarray) else v for v in c] for n, c in record.items()
            }
            continue
        if form == "npz":
            found = dict(np.load(path, allow_pickle=False))
            texts = found["text"].tolist()
        else:
            with h5py.File(path) as file:
                found = {n: np.array(d) for n, d in file.items()}
                texts = file["text"].asstr()[:].tolist()
        assert texts == record["text"].tolist()
        for column in ("image", "ids"):
            offsets = found[f"{column}_offsets"]
            parts = [found[column][first:end] for first, end in pairwise(offsets)]
            for part, value in zip(parts, record[column], strict=True):
                assert bytes(part) == value if column == "image" else part.tolist() == value.tolist()


def test_an_empty_record_is_exported_with_the_types_of_the_others(tmp_path: Path) -> None:
    columns = {"text": ((), "string"), "image": ((), "bytes"), "ids": ((None,), "int16"), "box": ((7,), "float32")}
    schema = storage.Schema({name: storage.Column(*column) for name, column in columns.items()}, element="object")
    full = {
        "text": np.array(["a"], object),
        "image": np.array([b"b"], object),
        "ids": np.array([None], object),
        "box": np.zeros((1, 7), np.float32),
    }
    full["ids"][0] = np.array([1, 2], np.int16)
    writer = storage.ShardWriter(tmp_path / "store", "objects", schema)
    for key, record in (("full", full), ("empty", {name: array[:0] for name, array in full.items()})):
        writer.add(storage.Row("objects", key, bytes(16), bytes(16), "0" * 32, "ok"), record)
    storage.Manifest(tmp_path / "store").commit(writer.flush())
    records = storage.open(tmp_path / "store")["objects"]
    paths = [tmp_path / "parquet" / name for name in export(records, tmp_path / "parquet", "parquet").values()]
    assert pq.read_schema(paths[0]) == pq.read_schema(paths[1])
    assert pq.read_table(paths).num_rows == 1
    paths = [tmp_path / "npz" / name for name in export(records, tmp_path / "npz", "npz").values()]
    one, other = (dict(np.load(path)) for path in paths)
    assert {name: array.dtype.kind for name, array in one.items()} == {name: a.dtype.kind for name, a in other.items()}


def test_a_record_of_older_columns_is_shown_and_its_export_says_what_to_do(call: Call, folder: Path) -> None:
    old = {"a": storage.Column((2,))}
    for key, columns in (("old", old), ("new", old | {"b": storage.Column()})):
        writer = storage.ShardWriter("store", "stage", storage.Schema(columns))
        recipe = storage.Manifest("store").save_recipe({"extractor": "mine"})
        record = {name: np.zeros(column.element_shape, np.float32) for name, column in columns.items()}
        writer.add(storage.Row("stage", key, bytes(16), bytes(16), recipe, "ok"), record)
        storage.Manifest("store").commit(writer.flush())
    assert [c["name"] for c in object_of(call("show", "stage", "old", "--json")[1])["columns"]] == ["a"]
    assert [c["name"] for c in object_of(call("show", "stage", "new", "--json")[1])["columns"]] == ["a", "b"]
    code, _, err = call("export", "stage", "out")
    assert code == 2
    assert "has no column 'b': it has a. select() those" in err
    assert call("export", "stage", "out", "--column", "a")[0] == 0


def test_file_names_are_safe_and_different_for_any_keys() -> None:
    keys = ["scene0000_00", "Scene0000_00", "a/b", "a b", "..", ".hidden", "ü", "x" * 300, "con.txt"]
    names = file_names(keys, ".npz")
    assert names["scene0000_00"] == "scene0000_00.npz"
    assert len({name.lower() for name in names.values()}) == len(keys)
    for name in names.values():
        assert name.isascii()
        assert not set(name) & set("/\\: ")
        assert not name.startswith(".")
        assert len(name) < 120

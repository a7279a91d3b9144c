"""Reading records by key: from one snapshot, as read-only views, in any process."""

from __future__ import annotations

import errno
import multiprocessing
import pickle
import re
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import storage
from storage import (
    Cache,
    Column,
    CorruptShard,
    Manifest,
    RecordMissing,
    Schema,
    StoreNotFound,
    read_record,
)
from storage.fingerprint import record_digest
from tests.storage.small_store import OBJECTS, assert_same, digests_of, fill, objects, row

ODD_KEYS = [
    "a b",
    "a/b",
    "../../etc/passwd",
    "/abs",
    "..",
    ".",
    "ü",
    "\U0001f600",
    "\U00020000",
    "x" * 300,
    "%2F",
    "a\nb",
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Objects of 20 scenes in two shards (one scene without objects), a caption of 15, and a failed scene."""
    given = {f"scene{i:04}": objects(i % 5, seed=i) for i in range(20)}
    fill(tmp_path, dict(list(given.items())[:10]))
    fill(tmp_path, dict(list(given.items())[10:]))
    caption = Schema({"text": Column((), "string"), "vector": Column((4,), "float32")})
    fill(
        tmp_path,
        {
            f"scene{i:04}": {"text": np.array(f"caption {i}", object), "vector": np.full(4, i, np.float32)}
            for i in range(5, 20)
        },
        "caption",
        caption,
    )
    Manifest(tmp_path).commit([row("broken", status="failed", error_class="ValueError", error_text="no mesh")])
    return tmp_path


def by_index(records: storage.Records) -> storage.Records:
    """The same records once their index is read; before, keys are looked up one by one."""
    len(records)
    return records


@pytest.mark.parametrize("indexed", [False, True])
def test_records_are_read_by_key(store: Path, indexed: bool) -> None:
    records = storage.open(store)["objects"]
    for i in range(6) if not indexed else range(20):
        assert_same((by_index(records) if indexed else records)[f"scene{i:04}"], objects(i % 5, seed=i))
    assert records._stage.indexed == indexed


def test_a_stage_is_a_mapping_sorted_by_key(store: Path) -> None:
    records = storage.open(store)["objects"]
    assert list(records) == sorted(records) == [f"scene{i:04}" for i in range(20)]
    assert len(records) == 20
    assert "scene0003" in records
    assert "broken" not in records
    assert [key for key, record in records.items() if not len(record["box"])] == [
        f"scene{i:04}" for i in (0, 5, 10, 15)
    ]
    assert records.get("nothing") is None


def test_arrays_are_views_of_one_mapping_that_cannot_be_written_to(store: Path) -> None:
    records = by_index(storage.open(store)["objects"])
    one, again = records["scene0003"], records["scene0003"]
    for name in ("feature", "box"):
        assert np.shares_memory(one[name], again[name])
    for name, values in one.items():
        assert not values.flags.writeable, name
        with pytest.raises(ValueError, match="read-only"):
            values[0] = values[0]
    for name in ("feature", "box"):
        with pytest.raises(ValueError, match="WRITEABLE"):
            one[name].flags.writeable = True
    copy = np.array(one["box"])
    copy[:] = 0
    assert_same(records["scene0003"], objects(3, seed=3))


def test_the_first_keys_are_read_without_the_index_and_many_with_it(store: Path) -> None:
    cache = storage.open(store)
    records = cache["objects"]
    for i in range(12):
        records[f"scene{i:04}"]
        assert records._stage.indexed == (i >= 8)


@pytest.mark.parametrize("indexed", [False, True])
def test_selected_columns_alone_are_read(store: Path, indexed: bool) -> None:
    records = storage.open(store)["objects"].select("name", "box")
    if indexed:
        by_index(records)
    assert list(records["scene0004"]) == ["name", "box"]
    assert list(records.schema.columns) == ["name", "box"]
    assert records.schema.element == "object"
    with pytest.raises(StoreNotFound, match="no column 'boxes'; did you mean 'box'.*it has feature, box, name"):
        records.select("boxes")


def test_records_without_an_element_axis_have_none(store: Path) -> None:
    for records in (storage.open(store)["caption"], by_index(storage.open(store)["caption"])):
        record = records["scene0007"]
        assert record["text"].shape == ()
        assert record["text"].item() == "caption 7"
        np.testing.assert_array_equal(record["vector"], np.full(4, 7, np.float32))


def test_records_without_elements_keep_shapes_and_dtypes(tmp_path: Path) -> None:
    fill(tmp_path / "alone", {"a": objects(0)})
    fill(tmp_path / "among", {"a": objects(0), "b": objects(2)})
    for name in ("alone", "among"):
        for records in (storage.open(tmp_path / name)["objects"], by_index(storage.open(tmp_path / name)["objects"])):
            assert {n: (v.shape, str(v.dtype)) for n, v in records["a"].items()} == {
                "feature": ((0, 64), "float16"), "box": ((0, 7), "float32"), "name": ((0,), "object"),
            }  # fmt: skip
            assert records.row("a").status == "empty"


@pytest.mark.parametrize("indexed", [False, True])
def test_odd_keys_read_back_and_their_like_do_not(tmp_path: Path, indexed: bool) -> None:
    fill(tmp_path, {key: objects(2, seed=i) for i, key in enumerate(ODD_KEYS)})
    records = storage.open(tmp_path)["objects"]
    if indexed:
        assert list(records) == sorted(ODD_KEYS)
    for i, key in enumerate(ODD_KEYS):
        assert_same(records[key], objects(2, seed=i))
    for key in ["x" * 299, "x" * 301, "u\u0308", "a", "", "A/B", "a\0b", "\ud800"]:
        with pytest.raises(RecordMissing):
            records[key]


@pytest.mark.parametrize("indexed", [False, True])
def test_a_key_that_is_not_there_is_an_error_with_keys_like_it(store: Path, indexed: bool) -> None:
    records = storage.open(store)["objects"]
    if indexed:
        by_index(records)
    with pytest.raises(RecordMissing, match="objects has no record for 'scene0021'; did you mean 'scene0") as raised:
        records["scene0021"]
    assert isinstance(raised.value, KeyError)
    with pytest.raises(RecordMissing, match="no record for 'xyz'; there are 20, such as 'scene0000', 'scene0001'"):
        records["xyz"]


@pytest.mark.parametrize("indexed", [False, True])
def test_a_failed_item_is_an_error_that_says_why(store: Path, indexed: bool) -> None:
    records = storage.open(store)["objects"]
    if indexed:
        by_index(records)
    with pytest.raises(RecordMissing, match="no record for 'broken', it is marked failed: ValueError: no mesh"):
        records["broken"]
    assert records.row("broken").error_text == "no mesh"


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("key", [3, None, ("scene0001", "scene0002"), slice(0, 3), ["scene0001"]])
def test_what_is_no_key_is_told_what_keys_are(store: Path, key: Any, indexed: bool) -> None:
    records = storage.open(store)["objects"]
    if indexed:
        by_index(records)["scene0003"]
    with pytest.raises((RecordMissing, TypeError), match="is no key, which is a text. By position: .*MapDataset"):
        records[key]


def test_an_unknown_stage_is_an_error_with_stages_like_it(store: Path) -> None:
    with pytest.raises(StoreNotFound, match="no stage 'object'; did you mean 'objects'"):
        storage.open(store)["object"]
    with pytest.raises(KeyError, match="no stage 'xyz'; there are 2, such as 'caption', 'objects'"):
        storage.open(store)["xyz"]


def test_a_stage_of_failures_alone_is_empty_and_says_what_to_look_at(tmp_path: Path) -> None:
    Manifest(tmp_path).commit([row("broken", status="failed")])
    records = storage.open(tmp_path)["objects"]
    assert list(records) == []
    with pytest.raises(StoreNotFound, match="`scenecache failures`"):
        _ = records.schema


def test_a_folder_without_a_store_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StoreNotFound, match=f"no store at {re.escape(str(place))}"):
            storage.open(place)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="url, or lock"):
        storage.open()


def test_a_tilde_is_the_home_folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(store.parent))
    for url in (f"~/{store.name}", Path("~") / store.name):
        assert storage.open(url).url == str(store)
        assert Manifest(url).folder.local == store


def test_a_cache_stays_at_its_snapshot_until_refreshed(store: Path) -> None:
    cache = storage.open(store)
    snapshot, records = cache.snapshot, by_index(cache["objects"])
    fill(store, {"scene0003": objects(9, seed=99), "new": objects(1)})
    for reader in (records, storage.open(store, snapshot=snapshot)["objects"]):
        assert_same(reader["scene0003"], objects(3, seed=3))
        assert "new" not in reader
    cache.refresh()
    assert cache.snapshot > snapshot
    assert_same(cache["objects"]["scene0003"], objects(9, seed=99))
    assert "new" in cache["objects"]
    assert_same(records["scene0003"], objects(3, seed=3))
    with pytest.raises(StoreNotFound, match="snapshot 99"):
        storage.open(store, snapshot=99)


def test_join_drops_raises_or_masks_what_not_all_stages_have(store: Path) -> None:
    cache = storage.open(store)
    joined = cache.join("objects", cache["caption"].select("text"))
    assert list(joined) == [f"scene{i:04}" for i in range(5, 20)]
    assert len(joined) == 15
    both = joined["scene0007"]
    assert list(both) == ["objects", "caption"]
    assert_same(both["objects"], objects(2, seed=7))  # type: ignore[arg-type]
    assert list(both["caption"]) == ["text"]  # type: ignore[arg-type]
    with pytest.raises(RecordMissing, match="no record for 'scene0004' in the join of objects, caption; did you mean"):
        joined["scene0004"]

    masked = cache.join("objects", "caption", missing="mask")
    assert len(masked) == 20
    assert masked["scene0004"]["caption"] is None
    assert masked["scene0004"]["objects"] is not None

    with pytest.raises(RecordMissing, match="5 of 20 keys are not in all stages: caption lacks 5, 'scene0000' for one"):
        cache.join("objects", "caption", missing="raise")
    assert len(cache.join("objects", missing="raise")) == 20
    with pytest.raises(ValueError, match="different stages"):
        cache.join("objects", "objects")
    with pytest.raises(ValueError, match="'drop', 'raise' or 'mask'"):
        cache.join("objects", missing="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of the records of stages, such as .*not of Join"):
        cache.join(joined, "objects")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["parquet", "hdf5"])
def test_a_record_without_elements_is_fit_for_torch(tmp_path: Path, format: str) -> None:
    torch = pytest.importorskip("torch")
    columns = {
        "feature": Column((64,), "float16"), "box": Column((7,), "float32"), "label": Column((), "int16"),
        "seen": Column((3,), "bool"),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    records = {f"{i}": {n: rng.random((i % 3, *c.dims)).astype(c.dtype) for n, c in columns.items()} for i in range(12)}
    rows = fill(tmp_path, records, schema=Schema(columns, "object", format))  # type: ignore[arg-type]
    opened = storage.open(tmp_path)["objects"]
    for _ in range(2):
        for key in (*records, *records):  # by the index, after the first few
            for found in (opened[key], read_record(tmp_path, rows[key])):
                for name, values in found.items():
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # that the array is read-only
                        np.testing.assert_array_equal(torch.from_numpy(values).numpy(), records[key][name])


def test_a_selection_of_no_columns_is_refused(store: Path) -> None:
    with pytest.raises(TypeError, match="names of columns; objects has feature, box, name"):
        storage.open(store)["objects"].select()
    with pytest.raises(TypeError, match=r"names one by one, select\('feature', ...\), not \['box', 'name'\]"):
        storage.open(store)["objects"].select(["box", "name"])  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), OSError(errno.EMFILE, "too many")])
def test_a_shard_that_cannot_be_read_here_is_not_called_corrupt(
    store: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr(storage.parquet, "map_file", fail)
    with pytest.raises(type(error)) as raised:
        storage.open(store)["objects"]["scene0003"]
    assert raised.value is error


@pytest.mark.parametrize("indexed", [False, True])
def test_caches_records_and_joins_pickle_small_and_read_on(store: Path, indexed: bool) -> None:
    cache = storage.open(store)
    records = cache["objects"].select("box")
    joined = cache.join("objects", "caption", missing="mask")
    if indexed:
        for i in range(20):
            records[f"scene{i:04}"], joined[f"scene{i:04}"]
    texts = [pickle.dumps(thing) for thing in (cache, records, joined)]
    assert max(map(len, texts)) < 4000
    fill(store, {"scene0003": objects(9, seed=99)})
    cache2, records2, joined2 = map(pickle.loads, texts)
    assert cache2.snapshot == cache.snapshot
    assert list(records2["scene0003"]) == ["box"]
    assert_same(cache2["objects"]["scene0003"], objects(3, seed=3))
    assert_same(joined2["scene0003"]["objects"], objects(3, seed=3))
    assert joined2["scene0003"]["caption"] is None


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_records_that_they_are_given(store: Path, method: Any) -> None:
    records = by_index(storage.open(store)["objects"])
    records["scene0003"]
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    processes = [context.Process(target=digests_of, args=(records, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    expected = {key: (float(r["box"].sum()), r["name"].tolist()) for key, r in records.items()}
    assert [answers.get() for _ in processes] == [expected] * 2
    for process in processes:
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize("compress", [False, True])
def test_threads_read_at_once(tmp_path: Path, compress: bool) -> None:
    given = {f"{i}": objects(4, seed=i) for i in range(40)}
    fill(tmp_path, given, schema=Schema(OBJECTS.columns, "object", compress=compress))
    records = storage.open(tmp_path)["objects"]
    faults: list[BaseException] = []

    def read(start: int) -> None:
        try:
            for i in range(start, start + 40):
                assert_same(records[f"{i % 40}"], given[f"{i % 40}"])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=read, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_lost_shard_costs_its_records_alone(store: Path) -> None:
    cache = storage.open(store)
    lost = cache["objects"].row("scene0012").shard
    (store / lost).unlink()
    with pytest.raises(CorruptShard, match=f"{lost} is missing; `scenecache verify`"):
        cache["objects"]["scene0012"]
    assert_same(cache["objects"]["scene0003"], objects(3, seed=3))


def test_a_record_says_what_made_it(store: Path) -> None:
    recipe = {"extractor": "fake", "settings": {"size": 2}}
    manifest = Manifest(store)
    name = manifest.save_recipe(recipe)
    found = manifest.find("objects", "scene0003")
    assert found is not None
    manifest.commit([replace(found, recipe=name)])
    records = storage.open(store)["objects"]
    assert records.recipe == recipe
    assert (records.row("scene0003").recipe, records.row("scene0004").recipe) == (name, "0" * 32)
    assert records.digest("scene0003") == found.digest == record_digest(objects(3, seed=3))
    with pytest.raises(RecordMissing, match="marked failed"):
        records.digest("broken")


def test_the_schema_is_that_of_the_newest_record(store: Path) -> None:
    """Another split's records may have been made under other settings; they stay in the store."""
    wide = {**OBJECTS.columns, "feature": Column((64,), "float32")}
    record = {**objects(3), "feature": np.zeros((3, 64), np.float32)}
    fill(store, {"scene0004": record}, schema=Schema(wide, "object"))
    records = storage.open(store)["objects"]
    assert records.schema.columns == wide
    assert records["scene0004"]["feature"].dtype == np.float32
    assert records["scene0003"]["feature"].dtype == np.float16


@pytest.mark.parametrize("indexed", [False, True])
def test_records_of_older_columns_are_read_beside_the_new_ones(tmp_path: Path, indexed: bool) -> None:
    few = Schema({"a": Column((2,)), "b": Column()}, "object")
    many = Schema({**few.columns, "c": Column((3,)), "d": Column((), "string")}, "object")
    given = {
        "a": np.ones((2, 2), np.float32),
        "b": np.ones(2, np.float32),
        "c": np.zeros((2, 3), np.float32),
        "d": np.array(["x", "y"], object),
    }
    only = {name: given[name] for name in few.columns}
    fill(tmp_path / "grown", {"old": only}, schema=few)
    fill(tmp_path / "grown", {"new": given}, schema=many)
    fill(tmp_path / "shrunk", {"old": given}, schema=many)
    fill(tmp_path / "shrunk", {"new": only}, schema=few)

    def records(name: str) -> storage.Records:
        found = storage.open(tmp_path / name)["objects"]
        return by_index(found) if indexed else found

    for first, second in (("old", "new"), ("new", "old")):
        chosen = records("grown").select("b", "a")
        assert [list(chosen[key]) for key in (first, second)] == [["b", "a"]] * 2
        assert list(records("grown")["new"]) == list(many.columns)
        shrunk = records("shrunk")
        assert_same(shrunk["new"], only)
        assert set(only) <= set(shrunk["old"])
    with pytest.raises(storage.SchemaError, match="older recipe, has no column 'd': it has a, b. select"):
        records("grown").select("a", "d")["old"]
    if indexed:
        with pytest.raises(storage.SchemaError, match="has no column 'c', 'd'"):
            records("grown")["old"]


def test_shard_numbers_say_what_lies_together(store: Path) -> None:
    numbers = storage.open(store)["objects"].shards(["scene0001", "scene0002", "scene0011", "nothing"])
    assert numbers[0] == numbers[1] != numbers[2]
    assert numbers[3] == -1


def test_an_hdf5_stage_reads_the_same_and_plain_h5py_reads_its_file(tmp_path: Path) -> None:
    given = {"a": objects(3), "b": objects(0), "c": objects(2, seed=1)}
    rows = fill(tmp_path, given, schema=Schema(OBJECTS.columns, "object", "hdf5"))
    records = storage.open(tmp_path)["objects"]
    for key, record in given.items():
        assert_same(records[key], record)
    with h5py.File(tmp_path / rows["c"].shard) as file:
        np.testing.assert_array_equal(file["feature"][3:5], given["c"]["feature"])
        assert file["item"].asstr()[:].tolist() == ["a"] * 3 + ["c"] * 2


def test_duckdb_and_pandas_read_the_records_of_a_stage(store: Path) -> None:
    duckdb, pd = pytest.importorskip("duckdb"), pytest.importorskip("pandas")
    found = duckdb.sql(f"select item, count(*), max(name) from '{store}/objects/*.parquet' group by item").fetchall()
    assert {item: (n, name) for item, n, name in found} == {
        f"scene{i:04}": (i % 5, f"object {i % 5 - 1} of {i}") for i in range(20) if i % 5
    }
    frame = pd.concat(pd.read_parquet(path) for path in (store / "objects").glob("*.parquet"))
    scene = frame[frame["item"] == "scene0004"]
    np.testing.assert_array_equal(np.stack(scene["box"]).reshape(4, 7), objects(4, seed=4)["box"])
    features = np.frombuffer(b"".join(scene["feature"]), np.float16).reshape(4, 64)
    np.testing.assert_array_equal(features, objects(4, seed=4)["feature"])


def test_a_cache_says_what_it_is(store: Path) -> None:
    cache = storage.open(store)
    assert isinstance(cache, Cache)
    assert repr(cache) == f"Cache('{store}', snapshot={cache.snapshot}, stages=['caption', 'objects'])"
    assert repr(cache["objects"]) == f"Records('objects', all columns, snapshot={cache.snapshot})"
    assert repr(cache.join("objects", "caption")) == "Join('objects', 'caption', missing='drop': 15 keys)"


def test_mappings_equal_themselves_alone_and_no_shard_is_read_for_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = storage.open(store)
    one, other = cache["objects"], cache["objects"].select("box")
    monkeypatch.setattr(storage.reader, "open_shard", None)
    for first, second in ((one, other), (cache.join("objects"), cache.join("objects")), (cache, storage.open(store))):
        assert first == first
        assert first != second
        assert len({first, second, first}) == 2


def test_the_tab_key_offers_stages_and_keys(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = storage.open(store)
    assert cache._ipython_key_completions_() == ["caption", "objects"]
    assert cache["objects"]._ipython_key_completions_() == [f"scene{i:04}" for i in range(20)]
    monkeypatch.setattr(storage.join, "_COMPLETED", 19)  # a shell would look at a million for a while
    assert cache["objects"]._ipython_key_completions_() == []


@pytest.mark.parametrize("snapshot", [-1, -2, 77, 1 << 63, 1 << 70])
def test_a_snapshot_that_is_not_there_is_an_error(store: Path, snapshot: int) -> None:
    with pytest.raises(StoreNotFound, match=str(snapshot)):
        storage.open(store, snapshot=snapshot)


def test_a_cache_is_a_collection_of_its_stages(store: Path) -> None:
    cache = storage.open(store)
    assert list(cache) == cache.stages == ["caption", "objects"]
    assert len(cache) == 2
    assert "objects" in cache
    assert "object" not in cache
    assert 0 not in cache
    assert dict(cache) == dict(cache.items()) == {"caption": cache["caption"], "objects": cache["objects"]}
    assert cache.get("object") is None


def test_a_column_described_in_other_words_reads_the_same_records(store: Path) -> None:
    reworded = {name: replace(column, doc="in other words") for name, column in OBJECTS.columns.items()}
    found = storage.open(store)["objects"].row("scene0003")
    assert_same(storage.read_record(store, found, Schema(reworded, "object")), objects(3, seed=3))
    other = {name: replace(column, unit="px") for name, column in OBJECTS.columns.items()}
    with pytest.raises(CorruptShard, match="expected"):
        storage.read_record(store, found, Schema(other, "object"))

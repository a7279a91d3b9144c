"""What a stream's batches are made of: joins, questions, changes of one's own; and whose memory they are in."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import storage  # noqa: E402
from storage import recycle  # noqa: E402
from storage.errors import RecordMissing, SchemaError  # noqa: E402
from storage.lookup import Lookup  # noqa: E402
from storage.torch_data import MapDataset, Stream, collate_padded, collate_ragged  # noqa: E402
from tests.storage.training_store import COUNT, GRID, objects  # noqa: E402

# Three workers are more than some machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_batches_kept_by_the_trainer_are_not_overwritten(url):
    records = storage.open(url)["objects"].select("feature")
    plain = Stream(records, 2, seed=2)
    stream = Stream(records, 2, seed=2, num_workers=2, persistent_workers=True)
    for _ in range(2):  # in the second epoch buffers are used again
        kept = list(stream)
        for batch, expected in zip(kept, plain, strict=True):
            assert torch.equal(batch["feature"], expected["feature"])
            assert torch.equal(batch["object_mask"], expected["object_mask"])
    part = kept[3]["feature"][1:, :, ::2].numpy()  # a view of a view keeps the memory too
    value = part.copy()
    del kept, batch
    list(stream)
    np.testing.assert_array_equal(part, value)


def test_buffers_are_used_again_and_forgotten(url):
    records = storage.open(url)["objects"].select("feature")
    stream = Stream(records, 1, num_workers=1, persistent_workers=True)
    for _ in range(3):
        for batch in stream:
            del batch
    slots = recycle._held[stream._name]
    assert 1 <= len(slots) < 10  # of 69 batches
    name = stream._name
    del stream, slots
    gc.collect()
    assert name not in recycle._held
    ended = Stream(records, 1, num_workers=1)
    list(ended)
    assert ended._name not in recycle._held


def test_a_collate_of_ones_own_may_change_the_batch(url):
    records = storage.open(url)["objects"].select("feature")
    for own in (with_sum, copied):
        stream = Stream(records, 4, seed=2, collate=own, num_workers=2, persistent_workers=True)
        for _ in range(2):
            order = stream.epoch
            plain = Stream(records, 4, seed=2)
            plain.set_epoch(order)
            for batch, expected in zip(stream, plain, strict=True):
                assert type(batch) is dict
                assert torch.equal(batch["feature"], expected["feature"])
                assert torch.equal(batch["sum"], expected["feature"].float().sum())


def with_sum(samples):
    batch = collate_padded(samples)
    batch["sum"] = batch["feature"].float().sum()
    return batch


def copied(samples):
    batch = collate_padded(samples)
    return {"feature": batch["feature"], "sum": batch["feature"].float().sum()}


class Turned(MapDataset):
    """The elements of each sample in reverse, without the last one."""

    def __getitem__(self, position):
        sample = super().__getitem__(position)
        for name in ("feature", "label"):
            sample[name] = sample[name][::-1][1:]
        return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_ones_own_changes_samples(url, workers):
    records = storage.open(url)["objects"]
    for batch in Stream(Turned(records), 4, num_workers=workers):
        for key, feature, mask, label in zip(
            batch["item"], batch["feature"], batch["object_mask"], batch["label"], strict=True
        ):
            np.testing.assert_array_equal(feature[mask].numpy(), objects(int(key[5:]))["feature"][::-1][1:])
            assert label == objects(int(key[5:]))["label"][::-1][1:].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_join_gives_nested_batches(url, workers):
    cache = storage.open(url)
    join = cache.join(cache["objects"].select("feature"), "grid", missing="mask")
    for batch in Stream(join, 5, num_workers=workers):
        even = [int(key[5:]) % 2 == 0 for key in batch["item"]]
        assert batch["grid"]["present"].tolist() == even
        assert batch["objects"]["present"].all()
        values = [float(key[5:]) if int(key[5:]) % 2 == 0 else 0.0 for key in batch["item"]]
        assert batch["grid"]["grid"][:, 1, 2].tolist() == values
    dropped = cache.join("objects", "grid")
    assert sum(len(batch["item"]) for batch in Stream(dropped, 5, collate=collate_ragged)) == 12


def test_questions_come_with_the_objects_of_their_scene(url):
    cache = storage.open(url)
    pairs = Lookup(cache["questions"].select("text", "answer"), "scene_id", cache["objects"].select("feature"))
    assert len(pairs) == COUNT + 15  # scenes 23 .. 29 have no objects
    collate = functools.partial(collate_padded, dtype=torch.float32)
    answers = []
    for batch in Stream(pairs, 4, seed=1, num_workers=2, collate=collate):
        answers += batch["questions"]["answer"].tolist()
        assert batch["questions"]["text"] == [f"what is {int(key[1:])}?" for key in batch["item"]]
        for i, key in enumerate(batch["item"]):
            expected = objects(int(key[1:]) % 30)["feature"]
            found = batch["objects"]["feature"][i][batch["objects"]["object_mask"][i]]
            assert found.dtype == torch.float32
            np.testing.assert_array_equal(found.numpy(), expected)
    assert sorted(answers) == [i for i in range(45) if i % 30 < COUNT]


def test_a_parent_that_is_absent_is_masked_or_raised(url):
    cache = storage.open(url)
    masked = Lookup(cache["questions"], "scene_id", cache["objects"], cache["grid"], missing="mask")
    assert len(masked) == 45
    assert masked["q025"]["objects"] is None
    assert masked["q001"]["grid"] is None
    assert masked["q001"]["objects"]["feature"].shape == (2, 40)
    with pytest.raises(RecordMissing, match=r"7 of 45 questions.*'q023' of 'scene23'"):
        Lookup(cache["questions"], "scene_id", cache["objects"], missing="raise")
    with pytest.raises(SchemaError, match="not one value per record"):
        Lookup(cache["objects"], "label", cache["grid"])
    with pytest.raises(RecordMissing, match="left out"):
        Lookup(cache["questions"], "scene_id", cache["objects"])["q025"]


@pytest.mark.parametrize("what", ["objects", "join"])
def test_a_lookup_of_something_else_than_records_says_what_to_give(url, what):
    cache = storage.open(url)
    parent = cache.join("objects", "grid") if what == "join" else what
    with pytest.raises(TypeError, match=r"records of stages, such as cache\['votenet'\], not of .*"):
        Lookup(cache["questions"], "scene_id", parent)


class Renamed(dict):
    """Records of a stage."""

    schema, stage = GRID, "item"


def test_a_stage_called_item_is_refused_in_a_join():
    data = {"scene00": {"item": {"grid": np.zeros((2, 3), np.float32)}}}
    join = type("Joined", (dict,), {"records": [Renamed()]})(data)
    with pytest.raises(ValueError, match="'item' can't be among"):
        MapDataset(join)


def test_a_window_over_what_has_no_shards_is_refused():
    with pytest.raises(TypeError, match="Renamed does not say what lies together"):
        Stream(Renamed(a={"grid": np.zeros((2, 3), np.float32)}), 1, window=5)


@pytest.mark.parametrize("what", ["cache", "dict"])
def test_a_whole_cache_is_refused_with_what_to_give_instead(url, what):
    data = storage.open(url) if what == "cache" else {"a": {"feature": np.zeros(3)}}
    for read in (lambda: Stream(data, 2), lambda: MapDataset(data)):
        with pytest.raises(TypeError, match=r"no records to read: give those of a stage, such as cache\['votenet'\]"):
            read()


def test_datasets_and_streams_say_what_they_read(url):
    records = storage.open(url)["objects"].select("feature")
    cache = storage.open(url)
    pairs = Lookup(cache["questions"], "scene_id", cache["objects"])
    assert repr(pairs) == f"Lookup('questions', 'objects', missing='drop': {len(pairs)} keys)"
    assert pairs != Lookup(cache["questions"], "scene_id", cache["objects"])
    assert pairs in {pairs}
    dataset = MapDataset(records)
    assert repr(dataset) == f"MapDataset({records!r}: {COUNT} items)"
    stream = Stream(records, 4, seed=3, last="drop", rank=1, world_size=2)
    stream.set_epoch(5)

    class Memory(dict):
        schema = records.schema

    assert repr(MapDataset(Memory(records))) == f"MapDataset(Memory: {COUNT} items)"
    assert repr(stream) == (
        f"Stream({dataset!r}, batch_size=4, seed=3, shuffle=True, last='drop', rank=1, world_size=2, "
        "num_workers=0, epoch=5)"
    )


def test_storage_itself_does_not_import_torch():
    code = "import sys, storage, storage.lookup, storage.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

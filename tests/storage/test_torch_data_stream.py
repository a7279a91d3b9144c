"""The stream over a real store: the same batches for any number of workers and ranks, resumed anywhere."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import storage  # noqa: E402
from storage import recycle, torch_data  # noqa: E402
from storage.errors import RecordMissing, SchemaError, StateMismatch  # noqa: E402
from storage.lookup import Lookup  # noqa: E402
from storage.manifest import Manifest, Row  # noqa: E402
from storage.order import epoch_order  # noqa: E402
from storage.schema import Column, Schema  # noqa: E402
from storage.torch_data import MapDataset, Stream, collate_padded, collate_ragged  # noqa: E402
from storage.writer import ShardWriter  # noqa: E402

# Three workers are more than some machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 23
OBJECTS = Schema({"feature": Column((40,), "float16"), "label": Column((), "string")}, element="object")
GRID = Schema({"grid": Column((2, 3))}, format="hdf5")
QUESTIONS = Schema({"scene_id": Column((), "string"), "text": Column((), "string"), "answer": Column((), "int64")})


def objects(i: int) -> dict[str, np.ndarray]:
    count = i * 7 % 5  # one in five records is empty
    feature = (np.arange(count * 40).reshape(count, 40) + i).astype(np.float16)
    return {"feature": feature, "label": np.array([f"{i}/{j}" for j in range(count)], object)}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of three stages in several shards: objects, a grid for the even scenes, questions on scenes 0 .. 29."""
    url = str(tmp_path_factory.mktemp("training") / "store")
    rows = []

    def write(stage, schema, records, per_shard):
        writer = ShardWriter(url, stage, schema)
        for n, (key, record) in enumerate(records, 1):
            writer.add(Row(stage, key, b"f", b"i", "r", "ok"), record)
            if n % per_shard == 0:
                rows.extend(writer.flush())
        rows.extend(writer.flush())

    write("objects", OBJECTS, ((f"scene{i:02}", objects(i)) for i in range(COUNT)), 6)
    grids = ((f"scene{i:02}", {"grid": np.full((2, 3), i, np.float32)}) for i in range(0, COUNT, 2))
    write("grid", GRID, grids, 5)
    asked = (
        (
            f"q{i:03}",
            {
                "scene_id": np.array(f"scene{i % 30:02}", object),
                "text": np.array(f"what is {i}?", object),
                "answer": np.array(i),
            },
        )
        for i in range(45)
    )
    write("questions", QUESTIONS, asked, 20)
    Manifest(url).commit(rows)
    return url


def seen(batches) -> list[list[str]]:
    return [batch["item"] for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_are_the_records_in_the_order_of_seed_and_epoch(url, workers):
    records = storage.open(url)["objects"]
    stream = Stream(records, 4, seed=5, num_workers=workers)
    for epoch in (0, 1):
        keys = [f"scene{i:02}" for i in epoch_order(COUNT, 5, epoch)]
        batches = list(stream)
        assert list(itertools.chain(*seen(batches))) == keys
        for batch in batches:
            for key, feature, mask, label in zip(
                batch["item"], batch["feature"], batch["object_mask"], batch["label"], strict=True
            ):
                expected = objects(int(key[5:]))
                np.testing.assert_array_equal(feature[mask].numpy(), expected["feature"])
                assert not feature[~mask].any()
                assert label == expected["label"].tolist()


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 0), (2, 2), (3, 1)])
def test_ranks_and_workers_do_not_change_the_global_order(url, world_size, workers):
    records = storage.open(url)["objects"].select("feature")
    ranks = [
        seen(Stream(records, 2, seed=1, rank=rank, world_size=world_size, num_workers=workers))
        for rank in range(world_size)
    ]
    steps = itertools.zip_longest(*ranks, fillvalue=[])
    assert [key for step in steps for batch in step for key in batch] == [
        f"scene{i:02}" for i in epoch_order(COUNT, 1, 0)
    ]


@pytest.mark.parametrize("workers", [(0, 0), (2, 1), (2, 3), (0, 2)])
def test_resumes_after_every_batch_with_other_workers(url, workers):
    records = storage.open(url)["objects"].select("feature")
    plain = Stream(records, 4, seed=3)
    whole, second = seen(plain), seen(plain)
    for taken in range(len(whole) + 1):
        before = Stream(records, 4, seed=3, num_workers=workers[0])
        first = [batch["item"] for _, batch in zip(range(taken), before, strict=False)]
        state = json.loads(json.dumps(before.state_dict()))  # plain enough for any checkpoint
        after = Stream(records, 4, seed=3, num_workers=workers[1])
        after.load_state_dict(state)
        if taken == len(whole):  # no empty epoch
            assert (after.epoch, seen(after)) == (1, second)
        else:
            assert first + seen(after) == whole
            assert (after.epoch, after.state_dict()["items"]) == (1, 0)


def test_resumes_with_other_ranks(url):
    records = storage.open(url)["objects"].select("feature")
    whole = [f"scene{i:02}" for i in epoch_order(COUNT, 3, 0)]
    before = [Stream(records, 3, seed=3, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(stream) for stream in before]
    done = [key for _ in range(2) for iterator in iterators for key in next(iterator)["item"]]
    states = [stream.state_dict() for stream in before]
    assert states[0] == states[1]
    after = Stream(records, 5, seed=3)
    after.load_state_dict(states[0])
    assert done + list(itertools.chain(*seen(after))) == whole


def test_set_epoch_keeps_a_position_of_that_epoch_and_drops_others(url):
    records = storage.open(url)["objects"].select("feature")
    stream = Stream(records, 4)
    state = {**stream.state_dict(), "epoch": 2, "items": 8}
    second = seen(_at_epoch(records, 2))
    stream.load_state_dict(state)
    stream.set_epoch(2)
    assert seen(stream) == second[2:]
    stream.load_state_dict(state)
    stream.set_epoch(3)
    assert seen(stream) == seen(_at_epoch(records, 3))


def _at_epoch(records, epoch):
    stream = Stream(records, 4)
    stream.set_epoch(epoch)
    return stream


def test_an_iteration_that_was_broken_off_starts_over(url):
    stream = Stream(storage.open(url)["objects"].select("feature"), 4, num_workers=2)
    first = next(iter(stream))["item"]
    gc.collect()
    assert next(iter(stream))["item"] == first
    assert stream.epoch == 0


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_that_counts_batches_gets_another_order_in_the_next_epoch(url, workers, last):
    """Lightning's, for one: it asks for len(stream) batches and never learns that there are no more."""
    records = storage.open(url)["objects"].select("feature")
    plain = Stream(records, 4, last=last)
    epochs = [seen(plain) for _ in range(3)]
    stream = Stream(records, 4, last=last, num_workers=workers, persistent_workers=workers > 0)
    assert [seen(itertools.islice(stream, len(stream))) for _ in range(2)] == epochs[:2]
    state = stream.state_dict()
    assert (state["epoch"], state["items"]) == (2, 0)
    stream.load_state_dict(state)
    assert seen(stream) == epochs[2]
    stream.set_epoch(1)
    seen(itertools.islice(stream, len(stream)))
    stream.set_epoch(1)  # once more, because somebody says so
    assert seen(stream) == epochs[1]


def test_a_position_that_leaves_less_than_a_batch_is_the_next_epoch(url):
    records = storage.open(url)["objects"].select("feature")
    stream = Stream(records, 10, last="drop")
    next(iter(stream))
    after = Stream(records, 22, last="drop")
    after.load_state_dict(stream.state_dict())  # 13 of 23 are left
    assert (after.epoch, len(seen(after)), after.epoch) == (1, 1, 2)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_persistent_workers_follow_epochs_and_broken_iterations(url, context):
    records = storage.open(url)["objects"].select("feature")
    stream = Stream(
        records, 4, seed=9, num_workers=2, persistent_workers=True, multiprocessing_context=context
    )  # fmt: skip
    plain = Stream(records, 4, seed=9)
    assert seen(stream) == seen(plain)
    for _ in zip(range(2), stream, strict=False):
        pass
    assert seen(stream) == seen(plain)
    assert stream.epoch == plain.epoch == 2


@pytest.mark.parametrize("changed", [{"seed": 4}, {"shuffle": False}, {"window": 5}], ids=["seed", "shuffle", "window"])
def test_a_position_of_another_order_is_refused(url, changed):
    records = storage.open(url)["objects"]
    state = Stream(records, 4).state_dict()
    with pytest.raises(StateMismatch, match=f"has {next(iter(changed))}="):
        Stream(records, 4, **changed).load_state_dict(state)
    split = MapDataset(records, keys=list(records)[1:])
    with pytest.raises(StateMismatch, match="items_of='23 keys"):
        Stream(split, 4).load_state_dict(state)


def test_window_reads_shard_after_shard(url):
    records = storage.open(url)["objects"].select("feature")
    shard = dict(zip(records, records.shards(list(records)), strict=True))
    assert len(set(shard.values())) == 4
    keys = list(itertools.chain(*seen(Stream(records, 4, window=1))))
    assert sorted(keys) == sorted(records)
    assert len(list(itertools.groupby(keys, shard.__getitem__))) == 4
    assert records.shards(["nowhere"]).tolist() == [-1]


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_of_a_stream_goes_on_when_the_original_ends(url, copied):
    original = Stream(storage.open(url)["objects"].select("feature"), 2, seed=4, num_workers=1)
    original.set_epoch(1)
    twin = copied(original)
    batches = iter(twin)
    first = [next(batches)["item"] for _ in range(8)]
    whole = seen(original)
    del original
    gc.collect()
    assert first + seen(batches) == whole
    assert twin.epoch == 2


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


def test_rank_and_world_size_come_from_torch_distributed(url, tmp_path):
    records = storage.open(url)["objects"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        order = Stream(records, 4).order
        assert (order.rank, order.world_size) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match="both or neither"):
        Stream(records, 4, rank=1)


def test_ranks_are_those_of_the_iteration_not_of_the_construction(url, monkeypatch):
    """A loader is often made before torch.distributed is set up: every rank would read everything."""
    records = storage.open(url)["objects"].select("feature")
    early, told = Stream(records, 4), Stream(records, 4, rank=0, world_size=1)
    whole = seen(early)
    monkeypatch.setattr(torch_data, "_distributed", lambda: (1, 2))
    assert len(early) == 3
    early.set_epoch(0)
    assert seen(early) == seen(Stream(records, 4, rank=1, world_size=2))
    assert seen(told) == whole


@pytest.mark.parametrize(("last", "batch_size", "warned"), [("keep", 11, 1), ("keep", 4, 0), ("drop", 11, 0)])
def test_ranks_that_would_wait_for_ever_are_warned(url, monkeypatch, last, batch_size, warned):
    monkeypatch.setattr(torch_data, "_distributed", lambda: (0, 2))
    stream = Stream(storage.open(url)["objects"].select("feature"), batch_size, last=last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen(stream)
    assert len(caught) == warned
    assert all("some ranks have a batch less" in str(one.message) and one.filename == __file__ for one in caught)


@pytest.mark.parametrize("name", ["collate_fn", "drop_last", "sampler", "batch_sampler", "keys", "in_order"])
def test_what_a_dataloader_takes_and_a_stream_does_not_is_answered_with_what_to_give(url, name):
    with pytest.raises(TypeError, match=f"Stream takes no {name}: .*(give |DataLoader|position)"):
        Stream(storage.open(url)["objects"], 4, **{name: None})


def test_integers_of_numpy_are_the_same_seed_and_leave_plain_checkpoints(url):
    records = storage.open(url)["objects"].select("feature")
    stream = Stream(records, np.int32(4), seed=np.int64(3), window=np.int16(7))
    stream.set_epoch(np.uint8(2))
    plain = Stream(records, 4, seed=3, window=7)
    plain.set_epoch(2)
    assert json.loads(json.dumps(stream.state_dict())) == plain.state_dict()
    assert seen(stream) == seen(plain)
    with pytest.raises(TypeError, match="integer"):
        Stream(records, 4, seed="three")


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


def test_storage_itself_does_not_import_torch():
    code = "import sys, storage, storage.lookup, storage.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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

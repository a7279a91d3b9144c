"""The stream over a real store: the same batches for any number of workers and ranks, resumed anywhere."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import storage  # noqa: E402
from storage import torch_data  # noqa: E402
from storage.errors import StateMismatch  # noqa: E402
from storage.order import epoch_order  # noqa: E402
from storage.torch_data import MapDataset, Stream  # noqa: E402
from tests.storage.training_store import COUNT, objects  # noqa: E402

# Three workers are more than some machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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

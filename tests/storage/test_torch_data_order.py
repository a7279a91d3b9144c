"""The order of an epoch: a permutation, the same for any number of ranks, resumable anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.order import Order, epoch_order

sizes = st.integers(0, 60)
lasts = st.sampled_from(["keep", "drop", "pad"])
worlds = st.tuples(st.integers(1, 5), st.integers(1, 3))  # batch size, ranks
seeds = st.integers(-(2**40), 2**40)


def epoch_of_all_ranks(n, batch_size, world_size, last, epoch=0, start=0, seed=7):
    """Batches of every rank, and the sequence they make side by side, step by step."""
    ranks = []
    for rank in range(world_size):
        order = Order(n, batch_size, seed=seed, rank=rank, world_size=world_size, last=last)
        order.epoch, order.start = epoch, start
        ranks.append(list(order))
    steps = max(map(len, ranks))
    together = [i for step in range(steps) for rank in ranks if step < len(rank) for i in rank[step]]
    return ranks, together


@given(n=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_full_shuffle_is_a_permutation(n, seed, epoch):
    assert sorted(epoch_order(n, seed, epoch)) == list(range(n))


@given(n=sizes, seed=seeds, window=st.integers(1, 70), shards=st.integers(1, 9))
def test_window_shuffle_is_a_permutation(n, seed, window, shards):
    shard = np.arange(n) % shards
    assert sorted(epoch_order(n, seed, 3, shards=shard, window=window)) == list(range(n))


def test_order_is_pinned_for_all_machines_and_versions():
    # Computed with Python integers from the definition of SplitMix64, not with this code.
    assert epoch_order(8, 0, 0).tolist() == pure_python_order(8, 0, 0)
    assert epoch_order(100, -5, 12).tolist() == pure_python_order(100, -5, 12)


def pure_python_order(n, seed, epoch):
    import hashlib

    start = int.from_bytes(hashlib.sha256(repr(("item", seed, epoch)).encode()).digest()[:8], "little")

    def mix(i):
        x = (i * 0x9E3779B97F4A7C15 + start) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    return sorted(range(n), key=mix)


def test_epochs_and_seeds_give_other_orders():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_shuffle_favours_no_place():
    places = np.stack([np.argsort(epoch_order(20, 0, epoch)) for epoch in range(4000)])
    # 4000 draws of a uniform place: mean 9.5, standard error 0.091; five of them
    assert np.abs(places.mean(0) - 9.5).max() < 0.46


def test_a_window_reads_few_shards_at_a_time():
    shards = np.repeat(np.arange(20), 50)
    order = epoch_order(1000, 1, 0, shards=shards, window=100)
    for start in range(0, 1000, 100):
        assert len(set(shards[order[start : start + 100]])) == 2
    assert len(set(shards[epoch_order(1000, 1, 0)[:100]])) > 15  # which a full shuffle does not


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match=f"window is {window}"):
        epoch_order(5, 0, 0, shards=np.zeros(5), window=window)


@given(n=sizes, batch_size=st.integers(1, 9), epoch=st.integers(0, 3))
def test_ranks_side_by_side_make_the_same_sequence(n, batch_size, epoch):
    _, alone = epoch_of_all_ranks(n, batch_size, 1, "keep", epoch) if n else (0, [])
    for world_size in (1, 2, 3):
        ranks, together = epoch_of_all_ranks(n, batch_size, world_size, "keep", epoch)
        assert together == alone
        assert all(0 < len(batch) <= batch_size for rank in ranks for batch in rank)
        assert [len(rank) for rank in ranks] == sorted((len(rank) for rank in ranks), reverse=True)


@given(n=sizes, batch_size=st.integers(1, 9), world_size=st.integers(1, 4))
def test_drop_and_pad_give_all_ranks_the_same_full_batches(n, batch_size, world_size):
    order = epoch_order(n, 7, 0).tolist()
    step = batch_size * world_size
    dropped, together = epoch_of_all_ranks(n, batch_size, world_size, "drop")
    assert together == order[: n // step * step]
    assert {len(rank) for rank in dropped} == {n // step}
    padded, together = epoch_of_all_ranks(n, batch_size, world_size, "pad")
    assert {len(rank) for rank in padded} == {-(-n // step)}
    assert {len(batch) for rank in padded for batch in rank} <= {batch_size}
    assert together == (order * (step + 1))[: -(-n // step) * step]


@given(n=sizes, batch_size=st.integers(1, 9), world_size=st.integers(1, 4), last=lasts)
def test_length_is_the_number_of_batches(n, batch_size, world_size, last):
    for rank in range(world_size):
        order = Order(n, batch_size, rank=rank, world_size=world_size, last=last)
        assert len(order) == len(list(order))


@given(
    n=st.integers(1, 60),
    old=worlds,
    new=worlds,
    data=st.data(),
)
def test_an_epoch_goes_on_with_another_number_of_ranks_or_batch_size(n, old, new, data):
    steps = data.draw(st.integers(0, n // (old[0] * old[1])))
    start = steps * old[0] * old[1]
    _, whole = epoch_of_all_ranks(n, *old, "keep")
    _, rest = epoch_of_all_ranks(n, *new, "keep", start=start) if start < n else (0, [])
    assert whole[:start] + rest == epoch_order(n, 7, 0).tolist()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not among the ranks 0 .. 1"),
        ({"rank": -1}, "rank -1"),
        ({"last": "wrap"}, "'wrap', expected 'keep', 'drop' or 'pad'"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        Order(**{"n": 5, "batch_size": 2} | settings)

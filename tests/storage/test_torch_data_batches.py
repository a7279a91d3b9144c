"""Batches: equal to what plain Python makes of the records, one by one."""

from __future__ import annotations

import functools
import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from storage.collate import Sample, _Shared, collate_padded, collate_ragged  # noqa: E402
from storage.errors import RecordMissing, SchemaError  # noqa: E402
from storage.schema import Column, Schema  # noqa: E402
from storage.torch_data import MapDataset  # noqa: E402

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]


@st.composite
def sample_lists(draw, element="object"):
    """Samples of one random schema; the values are random too."""
    columns = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from([*DTYPES, "string"]))
        dims = () if dtype == "string" else tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        columns[name] = Column(dims, dtype)
    schema = Schema(columns, element=element)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = []
    for i in range(draw(st.integers(1, 5))):
        count = (draw(st.integers(0, 4)),) if element else ()
        record = {}
        for name, column in columns.items():
            values = rng.integers(0, 100, (*count, *column.dims))
            record[name] = (
                values.astype(str).astype(object) if column.dtype == "string" else values.astype(column.dtype)
            )
        samples.append(Sample({"item": f"item {i}", **record}, schema))
    return samples


def padded_by_hand(samples, name, limit):
    lengths = [min(len(sample[name]), limit) for sample in samples]
    out = np.zeros((len(samples), max(lengths), *samples[0][name].shape[1:]), samples[0][name].dtype)
    mask = np.zeros(out.shape[:2], bool)
    for i, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        for j in range(length):
            out[i, j] = sample[name][j]
            mask[i, j] = True
    return out, mask


@given(samples=sample_lists(), limit=st.sampled_from([None, 1, 2, 9]))
def test_padded_batches_hold_the_records_and_zeros(samples, limit):
    batch = collate_padded(samples, max_elements=limit)
    assert batch["item"] == [sample["item"] for sample in samples]
    for name, column in samples[0].schema.columns.items():
        if column.dtype == "string":
            assert batch[name] == [sample[name][:limit].tolist() for sample in samples]
            continue
        expected, mask = padded_by_hand(samples, name, 10 if limit is None else limit)
        assert batch[name].numpy().dtype == expected.dtype
        np.testing.assert_array_equal(batch[name].numpy(), expected)
        np.testing.assert_array_equal(batch["object_mask"].numpy(), mask)
    assert set(batch) == {"item", "object_mask", *samples[0].schema.columns}


@given(samples=sample_lists(), limit=st.sampled_from([None, 1, 2, 9]))
def test_ragged_batches_hold_the_records_end_to_end(samples, limit):
    batch = collate_ragged(samples, max_elements=limit)
    offsets = batch["object_offsets"].tolist()
    for name, column in samples[0].schema.columns.items():
        for i, sample in enumerate(samples):
            if column.dtype == "string":
                assert batch[name][i] == sample[name][:limit].tolist()
            else:
                found = batch[name][offsets[i] : offsets[i + 1]].numpy()
                np.testing.assert_array_equal(found, sample[name][:limit])
                assert found.dtype == sample[name].dtype


@given(samples=sample_lists(element=None))
def test_without_an_element_axis_records_are_stacked(samples):
    for collate in (collate_padded, collate_ragged):
        batch = collate(samples)
        assert set(batch) == {"item", *samples[0].schema.columns}
        for name, column in samples[0].schema.columns.items():
            if column.dtype == "string":
                assert batch[name] == [sample[name].tolist() for sample in samples]
            else:
                np.testing.assert_array_equal(batch[name].numpy(), np.stack([sample[name] for sample in samples]))


@given(samples=sample_lists())
def test_floats_are_cast_and_nothing_else(samples):
    plain, cast = collate_padded(samples), collate_padded(samples, dtype=torch.bfloat16)
    for name, column in samples[0].schema.columns.items():
        if column.dtype == "string":
            assert cast[name] == plain[name]
        elif column.dtype.startswith("float"):
            assert cast[name].dtype == torch.bfloat16
            assert torch.equal(cast[name], plain[name].to(torch.bfloat16))
        else:
            assert cast[name].dtype == plain[name].dtype
            assert torch.equal(cast[name], plain[name])


@settings(deadline=None)
@given(samples=sample_lists())
def test_a_worker_s_batch_pickles_to_the_same_plain_dict(samples):
    batch = collate_padded(samples)
    memory = next(value for value in batch.values() if isinstance(value, torch.Tensor))
    whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
    sent = _Shared({**batch, "mine": torch.arange(3)}, whole, None)  # one tensor that lies elsewhere
    back = pickle.loads(pickle.dumps(sent))
    assert type(back) is dict
    assert back.keys() == {*batch, "mine"}
    for name, value in batch.items():
        assert torch.equal(back[name], value) if isinstance(value, torch.Tensor) else back[name] == value
    assert back["mine"].tolist() == [0, 1, 2]


def test_stages_are_nested_and_absent_records_marked():
    objects = Schema({"feature": Column((2,)), "name": Column((), "string")}, element="object")
    view = Schema({"grid": Column((3,)), "caption": Column((), "string")})
    both = {"objects": objects, "view": view}
    record = {"feature": np.ones((2, 2), np.float32), "name": np.array(["a", "b"], object)}
    grid = {"grid": np.full(3, 7, np.float32), "caption": np.array("c", object)}
    samples = [
        Sample({"item": "x", "objects": record, "view": None}, both),
        Sample({"item": "y", "objects": None, "view": grid}, both),
    ]
    padded = collate_padded(samples)
    assert padded["objects"]["present"].tolist() == [True, False]
    assert padded["objects"]["object_mask"].tolist() == [[True, True], [False, False]]
    assert padded["objects"]["feature"].tolist() == [[[1, 1], [1, 1]], [[0, 0], [0, 0]]]
    assert padded["objects"]["name"] == [["a", "b"], []]
    assert padded["view"]["grid"].tolist() == [[0, 0, 0], [7, 7, 7]]
    assert padded["view"]["caption"] == [None, "c"]
    assert padded["view"]["present"].tolist() == [False, True]
    ragged = collate_ragged(samples)
    assert ragged["objects"]["object_offsets"].tolist() == [0, 2, 2]
    alone = collate_padded([samples[0]])
    assert alone["view"]["grid"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("name", ["object_mask", "object_offsets"])
def test_a_column_named_like_an_addition_is_an_error(name):
    schema = Schema({name: Column((), "bool")}, element="object")
    collate = collate_padded if name == "object_mask" else collate_ragged
    with pytest.raises(SchemaError, match=f"'{name}'.*select"):
        collate([Sample({"item": "x", name: np.zeros(1, bool)}, schema)])


@given(samples=sample_lists(), limit=st.sampled_from([1, 2, 9]))
def test_fixed_batches_have_one_shape_and_the_same_values(samples, limit):
    longest = collate_padded(samples, max_elements=limit)
    fixed = collate_padded(samples, max_elements=limit, fixed=True)
    assert list(fixed) == list(longest)
    for name, values in fixed.items():
        if torch.is_tensor(values):
            length = longest[name].shape[1]
            assert values.shape[:2] == (len(samples), limit)
            assert torch.equal(values[:, :length], longest[name])
            assert not values[:, length:].any()
        else:
            assert values == longest[name]


def test_each_kind_of_element_may_have_a_limit_of_its_own():
    schemas = {name: Schema({"a": Column()}, element=name) for name in ("object", "frame", "view")}
    record = {"a": np.ones(5, np.float32)}
    sample = Sample({"item": "x", "object": record, "frame": record, "view": None}, schemas)
    batch = collate_padded([sample], max_elements={"object": 2, "view": 3})
    assert [batch[name]["a"].sum().item() for name in schemas] == [2, 5, 0]
    ragged = collate_ragged([sample], max_elements={"object": 2, "view": 3})
    assert [ragged[name][f"{name}_offsets"].tolist() for name in schemas] == [[0, 2], [0, 5], [0, 0]]
    batch = collate_padded([sample], max_elements={"object": 2, "frame": 7, "view": 3}, fixed=True)
    assert [tuple(batch[name][f"{name}_mask"].shape) for name in schemas] == [(1, 2), (1, 7), (1, 3)]
    with pytest.raises(ValueError, match="fixed=True needs max_elements, here for elements called 'frame'"):
        collate_padded([sample], max_elements={"object": 2, "view": 3}, fixed=True)
    with pytest.raises(ValueError, match="at least 1"):
        collate_padded([sample], max_elements={"object": 0})


def test_max_elements_below_one_is_an_error():
    schema = Schema({"a": Column()}, element="object")
    with pytest.raises(ValueError, match="max_elements is 0"):
        collate_padded([Sample({"item": "x", "a": np.zeros(1, np.float32)}, schema)], max_elements=0)


CHANGES = {
    "divided": lambda s: s.update(label=s["label"] / np.float32(255)),  # would be cast to zeros
    "cut": lambda s: s.update(label=s["label"][:1]),  # would be repeated
    "longer": lambda s: s.update(label=np.append(s["label"], s["label"])),  # would be cut
    "narrow": lambda s: s.update(box=s["box"][:, :1]),  # would be repeated
    "flat": lambda s: s.update(name=s["name"][:1]),
}


@pytest.mark.parametrize("collate", [collate_padded, collate_ragged])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sample_changed_against_its_schema_is_refused_by_name(change, collate):
    columns = {"box": Column((3,)), "label": Column((), "uint8"), "name": Column((), "string")}
    schema = Schema(columns, element="object")
    record = {
        "box": np.ones((2, 3), np.float32),
        "label": np.full(2, 9, np.uint8),
        "name": np.array(["a", "b"], object),
    }
    samples = [Sample({"item": key, **record}, schema) for key in "xy"]
    assert collate(samples)["label"].sum() == 36
    CHANGES[change](samples[1])
    with pytest.raises(SchemaError, match="sample 'y': '.*its schema says .*Change the batch instead"):
        collate(samples)


def test_without_an_element_axis_a_value_that_would_be_repeated_is_refused():
    schema = Schema({"grid": Column((3,)), "text": Column((), "string")})
    sample = Sample({"item": "x", "grid": np.zeros(1, np.float32), "text": np.array("t", object)}, schema)
    with pytest.raises(SchemaError, match=r"'grid' is float32 of shape \(1,\), its schema says float32 \(3,\)"):
        collate_padded([sample])
    sample["grid"] = torch.ones(3)  # a tensor will do as well
    assert collate_padded([sample])["grid"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("samples", [[], [{"item": "x"}]])
def test_what_is_no_sample_is_answered_with_what_to_give(samples):
    with pytest.raises(TypeError, match="samples of a MapDataset.*Sample\\(content, schema\\)"):
        collate_padded(samples)


@pytest.mark.parametrize("dtype", ["float32", torch.int32])
def test_a_dtype_that_is_no_floating_point_one_of_torch_is_refused(dtype):
    schema = Schema({"a": Column()}, element="object")
    with pytest.raises(TypeError, match=r"such as torch\.float32"):
        collate_padded([Sample({"item": "x", "a": np.zeros(1, np.float32)}, schema)], dtype=dtype)


class Records(dict):
    """The least that a dataset needs: a mapping with a schema."""

    schema = Schema({"a": Column()}, element="object")


def test_any_mapping_with_a_schema_is_a_dataset():
    data = Records({key: {"a": np.full(i, i, np.float32)} for i, key in enumerate("cab")})
    dataset = MapDataset(data)
    assert [dataset[i]["item"] for i in range(len(dataset))] == ["a", "b", "c"]
    split = MapDataset(data, keys=["b", "c"])
    assert [sample["a"].tolist() for sample in split.__getitems__([1, 0])] == [[], [2.0, 2.0]]
    collate = functools.partial(collate_padded, max_elements=1)
    loader = torch.utils.data.DataLoader(split, batch_size=2, collate_fn=collate)
    assert [batch["a"].tolist() for batch in loader] == [[[2.0], [0.0]]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_pads_without_being_told_to(workers):
    values = np.arange(9, dtype=np.float32)
    values.flags.writeable = False
    data = Records({key: {"a": values[i : 2 * i]} for i, key in enumerate("abcd")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own way warns of arrays that can't be written to, then fails
        (batch,) = torch.utils.data.DataLoader(MapDataset(data), batch_size=4, num_workers=workers)
    expected = collate_padded([MapDataset(data)[i] for i in range(4)])
    assert batch.keys() == expected.keys()
    assert batch["item"] == expected["item"] == ["a", "b", "c", "d"]
    assert torch.equal(batch["a"], expected["a"])
    assert torch.equal(batch["object_mask"], expected["object_mask"])


def test_a_split_with_an_unknown_key_names_it():
    with pytest.raises(RecordMissing, match="1 of 2 keys have no record, the first is 'z'"):
        MapDataset(Records(a={"a": np.zeros(1, np.float32)}), keys=["a", "z"])


def test_a_text_is_no_list_of_keys():
    with pytest.raises(TypeError, match="keys is the text 'train': give a list"):
        MapDataset(Records(a={"a": np.zeros(1, np.float32)}), keys="train")


def test_samples_pickle_with_their_schema():
    sample = MapDataset(Records(a={"a": np.zeros(1, np.float32)}))[0]
    back = pickle.loads(pickle.dumps(sample))
    assert back.schema == sample.schema
    assert back["item"] == "a"

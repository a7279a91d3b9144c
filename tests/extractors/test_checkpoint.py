import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from extractors.checkpoint import load_strict, read_checkpoint, read_state, seeded_init
from extractors.errors import WeightsError


def small() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4))


class RunsCode:
    """What a hostile checkpoint holds: unpickling it makes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [("", ""), ("", "module."), ("state_dict", ""), ("model_state_dict", "module."), ("model", "")],
)
@pytest.mark.parametrize("old_format", [False, True])
def test_wrappers_and_prefixes_are_removed(tmp_path: Path, wrapper: str, prefix: str, old_format: bool) -> None:
    state = {prefix + key: value for key, value in small().state_dict().items()}
    content = {wrapper: state, "epoch": 3, "optimizer_state_dict": {"state": {}}} if wrapper else state
    torch.save(content, tmp_path / "model.pth", _use_new_zipfile_serialization=not old_format)
    checkpoint = read_checkpoint(tmp_path / "model.pth")
    assert (checkpoint.wrapper, checkpoint.prefix) == (wrapper, prefix)
    assert checkpoint.others == (("epoch", "optimizer_state_dict") if wrapper else ())
    assert checkpoint.state.keys() == small().state_dict().keys()
    load_strict(small(), checkpoint.state, "model.pth")


def test_safetensors_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = small().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    read = read_state(tmp_path / "model.safetensors")
    assert all(torch.equal(read[key], value) for key, value in state.items())


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, form: str) -> None:
    path, witness = tmp_path / "hostile.pth", tmp_path / "witness"
    content = {"state_dict": small().state_dict(), "hook": RunsCode(witness)}
    if form == "pickle":
        path.write_bytes(pickle.dumps({"hook": RunsCode(witness)}))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(WeightsError, match=r"hostile\.pth: .*code"):
        read_state(path)
    assert not witness.exists()
    with path.open("rb") as file:  # the file does run code where one lets it
        torch.load(file, weights_only=False) if form != "pickle" else pickle.load(file)
    assert witness.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off", bytes(range(256)) * 10])
@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
def test_damaged_files_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=name):
        read_state(tmp_path / name)


def test_one_flipped_bit_of_a_weight_is_noticed(tmp_path: Path) -> None:
    torch.save({"a": torch.full((1000,), 7.0)}, tmp_path / "a.pth")
    data = bytearray((tmp_path / "a.pth").read_bytes())
    data[data.index(torch.full((9,), 7.0).numpy().tobytes()) + 400] ^= 1
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(WeightsError, match=r"a\.pth: damaged.*get the file again"):
        read_checkpoint(tmp_path / "a.pth")


def test_a_file_saved_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_state(tmp_path / "a.pth")["a"].tolist() == [1, 1]


def test_the_form_of_a_file_counts_and_not_its_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "a.pth")
    torch.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    for name in ("a.pth", "a.safetensors"):
        assert read_state(tmp_path / name)["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
    ],
    ids=["complex", "without values", "sparse"],
)
def test_tensors_that_are_no_plain_numbers_are_refused(value: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"a": value}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"a\.pth: entries that are no plain tensors: a"):
        read_checkpoint(tmp_path / "a.pth")


def test_whole_numbers_are_no_weights() -> None:
    module = small()
    state = {key: value.to(torch.int64) for key, value in module.state_dict().items()}
    with pytest.raises(WeightsError, match=r"other types: 0.weight is torch.int64, expected torch.float32"):
        load_strict(module, state, "a.pth")


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.pth"
    torch.save({"weight": torch.zeros(5000)}, path)
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(WeightsError, match=r"cut\.pth"):
        read_state(path)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, {"state_dict": {"a": torch.zeros(1), "b": 2}}])
def test_files_without_a_state_dict_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"other\.pth: .*state_dict"):
        read_state(tmp_path / "other.pth")


@pytest.mark.parametrize("wrapper", ["model", "blobs", ""])
@pytest.mark.parametrize("name", ["R-50.pkl", "R-50.pth"])
def test_pickles_of_arrays_are_read(tmp_path: Path, name: str, wrapper: str) -> None:
    arrays = OrderedDict({"conv1_w": np.arange(6, dtype=np.float32).reshape(2, 3), "fc_b": np.ones(2)})
    content = {wrapper: arrays, "__author__": "Caffe2", "matching_heuristics": True} if wrapper else dict(arrays)
    (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    checkpoint = read_checkpoint(tmp_path / name)
    assert checkpoint.wrapper == wrapper
    assert checkpoint.state["conv1_w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.state["fc_b"].dtype == torch.float64
    (tmp_path / name).write_bytes(pickle.dumps({"a": np.array(["text"])}))
    with pytest.raises(WeightsError, match=rf"{name}: entries that are no plain tensors: a"):
        read_state(tmp_path / name)


def test_every_key_that_does_not_fit_is_listed() -> None:
    state = dict(small().state_dict())
    state["extra.weight"] = torch.zeros(1)
    state["0.weight"] = torch.zeros(4, 5, 1)
    state["1.bias"] = torch.full((4,), torch.nan)
    del state["0.bias"]
    with pytest.raises(WeightsError) as raised:
        load_strict(small(), state, "model.pth")
    text = str(raised.value)
    for part in (
        "model.pth",
        "missing: 0.bias",
        "unexpected: extra.weight",
        "0.weight is (4, 5, 1), expected (4, 3, 1)",
        "NaN or infinity in: 1.bias",
    ):
        assert part in text


def test_a_module_is_unchanged_where_loading_fails() -> None:
    module = small()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(WeightsError):
        load_strict(module, {"0.weight": torch.ones(4, 3, 1)}, "model.pth")
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())


def test_batch_counters_may_be_absent() -> None:
    state = {k: torch.ones_like(v) for k, v in small().state_dict().items() if "num_batches" not in k}
    module = small()
    load_strict(module, state, "old.pth")
    assert all(torch.equal(module.state_dict()[key], value) for key, value in state.items())


def test_seeded_weights_depend_on_seed_and_name_alone() -> None:
    first, second, other = small(), nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Linear(4, 4)), small()
    torch.manual_seed(1)
    seeded_init(first, 0)
    torch.manual_seed(2)
    seeded_init(second, 0)
    seeded_init(other, 1)
    assert all(torch.equal(second.state_dict()[key], value) for key, value in first.state_dict().items())
    assert not torch.equal(first[0].weight, other[0].weight)
    assert first[1].running_var.tolist() == [1] * 4
    assert first[0].bias.tolist() == [0] * 4


def test_seeded_weights_keep_activations_at_their_size() -> None:
    layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(256, 256), nn.ReLU())))
    seeded_init(layers, 0)
    size = layers(torch.randn(100, 256)).square().mean().sqrt().item()
    assert 0.3 < size < 3


def test_a_text_file_is_refused_with_the_kind_of_error(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("epoch 1 loss 0.3\n")
    with pytest.raises(WeightsError, match=r"text\.pth: no checkpoint .*\([A-Za-z]+Error: .+\)"):
        read_state(tmp_path / "text.pth")

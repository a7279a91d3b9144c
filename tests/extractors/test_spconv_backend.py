"""spconv computes what our own sparse convolution computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from extractors import spconv_backend
from extractors.checkpoint import seeded_init
from extractors.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d
from extractors.sparse_encoder import SparseEncoder

SHAPE = (41, 48, 64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """spconv's CPU build is right with one thread alone."""
    pytest.importorskip("spconv.pytorch", reason="spconv is not installed (pip install 'scenecache[spconv]')")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def voxels(device: str) -> SparseTensor:
    rng = np.random.RandomState(0)
    cells = np.unique(rng.randint(0, 2 * int(np.prod(SHAPE)), 4000))
    coords = torch.from_numpy(np.stack(np.unravel_index(rng.permutation(cells), (2, *SHAPE)), 1).astype(np.int64))
    features = torch.from_numpy(rng.randn(len(cells), 5).astype(np.float32))
    return SparseTensor(features.to(device), coords.to(device), SHAPE, 2)


def assert_equal(ours: SparseTensor, theirs: SparseTensor) -> None:
    assert torch.equal(ours.coords, theirs.coords)
    assert (ours.shape, ours.batch_size) == (theirs.shape, theirs.batch_size)
    assert float((ours.features - theirs.features).norm()) <= 1e-5 * float(ours.features.norm())


@pytest.mark.parametrize(
    "conv",
    [
        SubMConv3d(5, 16),
        SparseConv3d(5, 16, 3, 2, 1),
        SparseConv3d(5, 16, 3, 2, (0, 1, 1)),
        SparseConv3d(5, 16, (3, 1, 1), (2, 1, 1), 0),
    ],
    ids=lambda conv: f"{type(conv).__name__} {conv.kernel}",
)
def test_every_kind_of_layer_agrees(conv: SubMConv3d | SparseConv3d) -> None:
    seeded_init(conv, 0)
    x = voxels("cpu")
    assert_equal(conv(x), spconv_backend.convolve(conv, x))


def test_the_encoder_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SparseEncoder(shape=SHAPE).eval()
    seeded_init(encoder, 1)
    ours, our_stages = encoder(voxels("cpu"))
    monkeypatch.setattr(spconv_backend, "usable", lambda features: len(features) > 0)
    calls = []
    convolve = spconv_backend.convolve
    monkeypatch.setattr(spconv_backend, "convolve", lambda *args: calls.append(1) or convolve(*args))
    theirs, their_stages = encoder(voxels("cpu"))
    assert len(calls) == 21
    assert float((ours - theirs).norm()) <= 1e-5 * float(ours.norm())
    for one, other in zip(our_stages, their_stages, strict=True):
        assert_equal(one, other)


def test_the_cpu_build_is_never_chosen() -> None:
    assert not spconv_backend.usable(torch.ones(3, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_chosen_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    x = voxels("cuda")
    if not spconv_backend.usable(x.features):
        pytest.skip("this build of spconv has no CUDA")
    encoder = SparseEncoder(shape=SHAPE).eval()
    seeded_init(encoder, 1)
    encoder.cuda()
    theirs, _ = encoder(x)
    monkeypatch.setattr(spconv_backend, "usable", lambda features: False)
    ours, _ = encoder(voxels("cuda"))
    assert float((ours - theirs).norm()) <= 1e-5 * float(ours.norm())

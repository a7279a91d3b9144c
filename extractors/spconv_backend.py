"""Sparse convolution by spconv 2, where it is installed with CUDA: the same sites and values, faster on GPUs.

`extractors.sparse_conv` asks `usable` for every tensor and computes by itself where the answer is no. spconv's CPU
build is never chosen: with more than one thread its results are wrong.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

if TYPE_CHECKING:
    from extractors.sparse_conv import SparseConv3d, SparseTensor, SubMConv3d

_modules: WeakKeyDictionary[SubMConv3d | SparseConv3d, Any] = WeakKeyDictionary()


def usable(features: Tensor) -> bool:
    """Whether spconv can convolve these features."""
    return features.is_cuda and len(features) > 0 and _built_with_cuda()


@cache
def _built_with_cuda() -> bool:
    try:
        from spconv.cppconstants import CPU_ONLY_BUILD
    except ImportError:
        return False
    return not CPU_ONLY_BUILD


def convolve(conv: SubMConv3d | SparseConv3d, x: SparseTensor) -> SparseTensor:
    """What `conv` computes; rows of a strided convolution sorted by batch, z, y, x as ever."""
    import spconv.pytorch as spconv

    from extractors.sparse_conv import SparseTensor

    if conv not in _modules:
        _modules[conv] = _module(conv)
    if "spconv" not in x.maps:  # index pairs live here, so that layers with the same sites share them
        x.maps["spconv"] = (x.coords.int(), {})
    coords, pairs = x.maps["spconv"]
    given = spconv.SparseConvTensor(x.features, coords, list(x.shape), x.batch_size, indice_dict=pairs)
    y = _modules[conv](given)
    if isinstance(_modules[conv], spconv.SubMConv3d):
        return x.replace(y.features)
    found = y.indices.long()
    z, height, width = (int(size) for size in y.spatial_shape)
    order = (((found[:, 0] * z + found[:, 1]) * height + found[:, 2]) * width + found[:, 3]).argsort()
    return SparseTensor(y.features[order], found[order], (z, height, width), x.batch_size)


def _module(conv: SubMConv3d | SparseConv3d) -> Any:
    """spconv's layer around the same weight tensor."""
    import spconv.pytorch as spconv

    from extractors.sparse_conv import SparseConv3d

    out_channels, in_channels = conv.weight.shape[0], conv.weight.shape[-1]
    if isinstance(conv, SparseConv3d):
        module = spconv.SparseConv3d(in_channels, out_channels, conv.kernel, conv.stride, conv.padding, bias=False)
    else:
        key = f"submanifold {conv.kernel}"
        module = spconv.SubMConv3d(in_channels, out_channels, conv.kernel, bias=False, indice_key=key)
    module.weight = conv.weight
    return module.eval()

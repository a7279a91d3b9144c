"""How networks are run: without gradients, in full float32 on a GPU too, repeatably."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def inference(run: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that calls networks.

    In TF32, cuDNN's default, convolutions keep 10 bits of each factor: a GPU would give other values than a CPU.
    """
    import torch

    @functools.wraps(run)
    def exact(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        matmul = torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, False
        try:
            with (
                torch.inference_mode(),
                torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
            ):
                return run(*args, **kwargs)
        finally:
            matmul.allow_tf32 = before

    return exact

from typing import Any

import numpy as np
import pytest
import torch

from extractors.base import Weights
from extractors.image_grid import ResNetFPN
from extractors.inference import inference
from extractors.votenet import Points, VoteNet


def state() -> tuple[bool, bool, bool]:
    return (
        torch.is_inference_mode_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )


EXACT = (True, False, False)


@pytest.mark.parametrize("before", [False, True])
def test_networks_run_in_full_float32_and_settings_come_back(before: bool) -> None:
    own = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = before
    try:
        assert inference(lambda: state())() == EXACT
        assert state() == (False, before, before)
        with pytest.raises(ZeroDivisionError):
            inference(lambda: 1 / 0)()
        assert state() == (False, before, before)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = own


def test_arguments_and_results_pass_through() -> None:
    @inference
    def add(a: int, *, b: int) -> int:
        """Documented."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Documented.")


class Found(Exception):
    """Carries what a network saw out of an extractor."""


def report(*_: Any, **__: Any) -> Any:
    raise Found(state())


def test_votenet_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = VoteNet(weights=Weights("untrained:0")).load()
    monkeypatch.setattr("extractors.votenet_network.VoteNetwork.forward", report)
    points = Points(np.zeros((40_000, 7), np.float32), np.zeros(40_000, np.int32), False)
    with pytest.raises(Found) as found:
        run([points])
    assert found.value.args == (EXACT,)


def test_image_grids_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ResNetFPN(weights=Weights("untrained:0")).load()
    monkeypatch.setattr(torch.nn.Module, "__call__", report)
    with pytest.raises(Found) as found:
        run([([np.zeros((224, 224, 3), np.uint8)], np.zeros(1))])
    assert found.value.args == (EXACT,)

import torch
from torch import nn

from extractors.second import SECOND, SECONDFPN

torch.set_num_threads(1)


def test_maps_halve_and_come_together_at_the_first_ones_size() -> None:
    backbone, neck = SECOND().eval(), SECONDFPN().eval()
    with torch.inference_mode():
        maps = backbone(torch.randn(2, 256, 12, 20))
        bev = neck(maps)
    assert [tuple(m.shape) for m in maps] == [(2, 128, 12, 20), (2, 256, 6, 10)]
    assert bev.shape == (2, 512, 12, 20)
    assert bev.min() >= 0


def test_keys_are_the_official_ones() -> None:
    backbone, neck = SECOND().state_dict(), SECONDFPN().state_dict()
    assert tuple(backbone["blocks.0.0.weight"].shape) == (128, 256, 3, 3)
    assert tuple(backbone["blocks.1.15.weight"].shape) == (256, 256, 3, 3)
    assert {f"blocks.{b}.{n}.running_var" for b in (0, 1) for n in (1, 4, 7, 10, 13, 16)} < backbone.keys()
    assert len(backbone) == 2 * 6 * 6
    assert {key: tuple(value.shape) for key, value in neck.items() if value.ndim == 4} == {
        "deblocks.0.0.weight": (256, 128, 1, 1),
        "deblocks.1.0.weight": (256, 256, 2, 2),
    }


def test_every_batchnorm_has_the_epsilon_of_the_checkpoints() -> None:
    norms = [m for net in (SECOND(), SECONDFPN()) for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 14
    assert {m.eps for m in norms} == {1e-3}


def test_an_impulse_stays_where_it_is() -> None:
    """The second map's half comes back to the cells it came from: rows are rows, columns are columns."""
    neck = SECONDFPN().eval()
    for key, value in neck.state_dict().items():
        if key.endswith("weight") and value.ndim == 4:
            value.fill_(1.0)
    maps = [torch.zeros(1, 128, 8, 10), torch.zeros(1, 256, 4, 5)]
    maps[0][0, 0, 3, 6] = 1
    maps[1][0, 0, 1, 4] = 1
    with torch.inference_mode():
        bev = neck(maps)[0]
    assert bev[:256].sum(0).nonzero().tolist() == [[3, 6]]
    assert bev[256:].sum(0).nonzero().tolist() == [[2, 8], [2, 9], [3, 8], [3, 9]]

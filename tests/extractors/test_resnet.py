"""ResNet and its pyramid against torchvision's own modules, and a plain definition for the stride in the 1x1."""

import pickle
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from extractors.base import Weights
from extractors.checkpoint import describe, load_strict
from extractors.errors import WeightsError
from extractors.grid_networks import untrained_resnet
from extractors.image_grid import ResNetFPN as Extractor
from extractors.resnet import ResNetFPN, to_torchvision

IMAGE = torch.rand(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Every normalisation with statistics of its own."""
    random = torch.Generator().manual_seed(1)
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=random) * 0.5 + (0.75 if "var" in name else -0.25))
    return module.eval()


def assert_close(ours: Tensor, reference: Tensor) -> None:
    assert float((ours - reference).norm() / reference.norm()) < 1e-5


@torch.no_grad()
def test_levels_equal_torchvision_classifier() -> None:
    from torchvision.models import resnet50

    reference = randomised(resnet50(weights=None))
    ours = ResNetFPN(pyramid=False).eval()
    load_strict(ours, to_torchvision(reference.state_dict(), False, "test"), "test")
    x = reference.maxpool(reference.relu(reference.bn1(reference.conv1(IMAGE))))
    levels = ours(IMAGE)
    for n in (1, 2, 3, 4):
        x = getattr(reference, f"layer{n}")(x)
        assert_close(levels[f"c{n + 1}"], x)


@torch.no_grad()
@pytest.mark.parametrize("old_keys", [False, True])
def test_pyramid_equals_torchvision_detector(old_keys: bool) -> None:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    reference = randomised(resnet_fpn_backbone(backbone_name="resnet50", weights=None))
    state = {f"backbone.{key}": value for key, value in reference.state_dict().items()}
    if old_keys:
        state = {
            k.replace(".0.weight", ".weight").replace(".0.bias", ".bias") if ".fpn." in k else k: v
            for k, v in state.items()
        }
    state |= {"rpn.head.conv.0.0.weight": torch.zeros(1), "roi_heads.box_head.fc6.weight": torch.zeros(1)}
    ours = ResNetFPN(pyramid=True).eval()
    load_strict(ours, to_torchvision(state, True, "test"), "test")
    levels, expected = ours(IMAGE), reference(IMAGE)
    for n in (2, 3, 4, 5):
        assert_close(levels[f"p{n}"], expected[str(n - 2)])


def caffe_forward(state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """detectron2's ResNet-50 (stride in the 1x1, frozen normalisation) and pyramid, written out over its state_dict."""

    def conv(x: Tensor, name: str, stride: int = 1, padding: int = 0) -> Tensor:
        x = F.conv2d(x, state[f"{name}.weight"], None, stride, padding)
        norm = [state[f"{name}.norm.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *norm, training=False, eps=1e-5)

    x = F.max_pool2d(F.relu(conv(x, "stem.conv1", 2, 3)), 3, 2, 1)
    levels = OrderedDict()
    for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            name, stride = f"res{stage}.{block}", 2 if stage > 2 and block == 0 else 1
            y = F.relu(conv(x, f"{name}.conv1", stride))
            y = conv(F.relu(conv(y, f"{name}.conv2", 1, 1)), f"{name}.conv3")
            x = F.relu(y + (conv(x, f"{name}.shortcut", stride) if block == 0 else x))
        levels[f"c{stage}"] = x
    above = None
    for n in (5, 4, 3, 2):
        inner = F.conv2d(levels[f"c{n}"], state[f"fpn_lateral{n}.weight"], state[f"fpn_lateral{n}.bias"])
        above = inner if above is None else inner + F.interpolate(above, scale_factor=2.0, mode="nearest")
        levels[f"p{n}"] = F.conv2d(above, state[f"fpn_output{n}.weight"], state[f"fpn_output{n}.bias"], padding=1)
    return levels


def detectron2_state(network: ResNetFPN) -> dict[str, Tensor]:
    """A network's parameters under detectron2's names, one by one."""
    state = {"stem.conv1.weight": network.body.conv1.weight}

    def norm(name: str, module: torch.nn.Module) -> None:
        state.update({f"{name}.norm.{part}": buffer for part, buffer in module.named_buffers()})

    norm("stem.conv1", network.body.bn1)
    for stage in (2, 3, 4, 5):
        for at, block in enumerate(getattr(network.body, f"layer{stage - 1}")):
            for k in (1, 2, 3):
                state[f"res{stage}.{at}.conv{k}.weight"] = getattr(block, f"conv{k}").weight
                norm(f"res{stage}.{at}.conv{k}", getattr(block, f"bn{k}"))
            if at == 0:
                state[f"res{stage}.{at}.shortcut.weight"] = block.downsample[0].weight
                norm(f"res{stage}.{at}.shortcut", block.downsample[1])
        assert network.fpn is not None
        for kind, modules in (("lateral", network.fpn.inner_blocks), ("output", network.fpn.layer_blocks)):
            state[f"fpn_{kind}{stage}.weight"] = modules[stage - 2][0].weight
            state[f"fpn_{kind}{stage}.bias"] = modules[stage - 2][0].bias
    return state


@torch.no_grad()
def test_detectron2_checkpoint_gives_the_features_of_its_definition() -> None:
    source = ResNetFPN(pyramid=True, stride_in_1x1=True)
    untrained_resnet(source, 7)
    state = detectron2_state(randomised(source))  # type: ignore[arg-type]
    file = {
        f"backbone.{key}" if key.startswith("fpn") else f"backbone.bottom_up.{key}": value
        for key, value in state.items()
    }
    file |= {"proposal_generator.rpn_head.conv.weight": torch.zeros(1), "pixel_mean": torch.zeros(3)}
    ours = ResNetFPN(pyramid=True, stride_in_1x1=True).eval()
    load_strict(ours, to_torchvision(file, True, "test"), "test")
    levels = ours(IMAGE)
    for name, expected in caffe_forward(state, IMAGE).items():
        assert_close(levels[name], expected)
    other = ResNetFPN(pyramid=True, stride_in_1x1=False).eval()
    load_strict(other, to_torchvision(file, True, "test"), "test")
    assert float((other(IMAGE)["c3"] - levels["c3"]).norm() / levels["c3"].norm()) > 0.01


def caffe2_name(key: str) -> str:
    """A blob of Detectron for a parameter as detectron2 names it."""
    if match := re.fullmatch(r"fpn_(lateral|output)(\d)\.(weight|bias)", key):
        kind, level, what = match.groups()
        block = {"2": 2, "3": 3, "4": 5, "5": 2}[level]
        side = "_lateral" if kind == "lateral" and level != "5" else ""
        return f"fpn_{'inner_' if kind == 'lateral' else ''}res{level}_{block}_sum{side}_{what[0]}"
    key = key.replace("stem.conv1.norm", "res_conv1_bn").replace("stem.conv1", "conv1").replace(".norm", "_bn")
    for ours, theirs in (("shortcut", "1"), ("conv1", "2a"), ("conv2", "2b"), ("conv3", "2c")):
        key = re.sub(rf"^(res\d)\.(\d+)\.{ours}", rf"\1_\2_branch{theirs}", key)
    return re.sub(r"bn\.weight$", "bn_s", key).replace(".weight", "_w").replace(".bias", "_b")


@torch.no_grad()
def test_detectrons_caffe2_blobs_give_the_features_of_their_definition() -> None:
    source = ResNetFPN(pyramid=True, stride_in_1x1=True)
    untrained_resnet(source, 7)
    state = detectron2_state(randomised(source))  # type: ignore[arg-type]
    for key in list(state):  # Detectron folded the statistics into scale and shift
        if key.endswith("norm.weight"):
            stem = key.removesuffix("weight")
            scale = state[key] / (state[stem + "running_var"] + 1e-5).sqrt()
            state[stem + "bias"] = state[stem + "bias"] - state[stem + "running_mean"] * scale
            state[key] = scale
            state[stem + "running_mean"] = torch.zeros_like(scale)
            state[stem + "running_var"] = torch.full_like(scale, 1 - 1e-5)
    blobs = {caffe2_name(key): value for key, value in state.items() if "running" not in key}
    assert {"conv1_w", "res_conv1_bn_s", "res2_0_branch1_bn_b", "res5_2_branch2c_w"} <= blobs.keys()
    assert {"fpn_inner_res5_2_sum_w", "fpn_inner_res4_5_sum_lateral_b", "fpn_res2_2_sum_w"} <= blobs.keys()
    heads = ("conv1_b", "fc1000_w", "fc1000_b", "conv1_w_momentum", "rpn_cls_logits_w")
    blobs |= {name: torch.zeros(1) for name in heads}
    ours = ResNetFPN(pyramid=True, stride_in_1x1=True).eval()
    load_strict(ours, to_torchvision(blobs, True, "test"), "test")
    levels = ours(IMAGE)
    for name, expected in caffe_forward(state, IMAGE).items():
        assert_close(levels[name], expected)
    with pytest.raises(WeightsError, match=r"unexpected: body\.layer5\.0\.downsample\.0\.weight"):
        load_strict(ours, to_torchvision(blobs | {"res6_0_branch1_w": torch.zeros(1)}, True, "test"), "test")


def test_the_report_on_caffe2_blobs_asks_for_no_statistics(tmp_path: Path) -> None:
    state = detectron2_state(ResNetFPN(pyramid=True, stride_in_1x1=True))
    blobs = {caffe2_name(key): value.detach().numpy() for key, value in state.items() if "running" not in key}
    blobs["fc1000_w"] = np.zeros(1)
    (tmp_path / "R-50-FPN.pkl").write_bytes(pickle.dumps({"blobs": blobs}))
    report = describe(tmp_path / "R-50-FPN.pkl")
    assert (report["network"], report["naming"], report["loads"]) == ("resnet_fpn", "Caffe2", True)
    assert [entry["key"] for entry in report["keys"] if entry["use"] != "loaded"] == ["fc1000_w"]
    Extractor(weights=Weights(str(tmp_path / "R-50-FPN.pkl")), stride_in_1x1=True, pixels="caffe").build()


def test_a_checkpoint_without_a_pyramid_gives_c_levels_alone(tmp_path: Path) -> None:
    from torchvision.models import resnet50

    torch.save(resnet50(weights=None).state_dict(), tmp_path / "resnet50.pth")
    weights = Weights(str(tmp_path / "resnet50.pth"))
    Extractor(weights=weights, levels=("c4", "c5")).build()
    with pytest.raises(WeightsError, match=r"missing: fpn\.inner_blocks"):
        Extractor(weights=weights, levels=("p5",)).build()


def test_unknown_levels_are_named() -> None:
    with pytest.raises(ValueError, match=r"levels \['p6'\], expected some of c2, c3, c4, c5, p2"):
        Extractor(weights=Weights("untrained:0"), levels=("p6",))

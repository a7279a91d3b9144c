"""Grids of images: the official networks and namings, batches over items, the columns of earlier stages."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from extractors.base import Weights
from extractors.checkpoint import describe, seeded_init
from extractors.errors import DecodeError, InvalidValues, WeightsError
from extractors.grid_networks import ClipBertCnn, timm_model
from extractors.image_grid import ClipBertGrid, ImageGrid, ResNetFPN, TimmGrid
from storage.schema import Record

UNTRAINED = Weights("untrained:0")
SMALL = TimmGrid(weights=UNTRAINED, model="resnet18", column="frame", size=64, dtype="float32")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def frames(count: int, seed: int = 0, side: int = 64) -> Record:
    random = np.random.RandomState(seed)
    small = random.randint(0, 256, (count, 8, 8, 3)).astype(np.uint8)
    images = [cv2.resize(image, (side, side)) for image in small]
    return {"frame": np.array(images), "frame_index": np.arange(count, dtype=np.int32) * 20}


def run(extractor: ImageGrid, *records: Record) -> list[Record]:
    out = extractor.load()([extractor.prepare(f"item {i}", record) for i, record in enumerate(records)])
    return [extractor.schema.check(record, "test") for record in out]


def relative(ours: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize(
    ("extractor", "dims"),
    [
        (TimmGrid(weights=UNTRAINED, column="frame"), {"grid": (49, 512)}),
        (ResNetFPN(weights=UNTRAINED, levels=("p3", "c5")), {"p3": (7, 7, 256), "c5": (7, 7, 2048)}),
        (ClipBertGrid(weights=UNTRAINED, res5=True), {"grid": (7, 7, 768), "res5": (14, 14, 2048)}),
    ],
    ids=lambda value: value.name if isinstance(value, ImageGrid) else "",
)
def test_grids_have_the_official_shapes(extractor: ImageGrid, dims: dict[str, tuple[int, ...]]) -> None:
    (record,) = run(extractor, frames(2, side=224))
    for name, shape in dims.items():
        assert record[name].shape == (2, *shape)
        assert record[name].dtype == np.float16
        assert np.std(record[name].astype(np.float32)) > 0
    assert record["frame_index"].tolist() == [0, 20]


def test_a_grid_does_not_depend_on_its_batch() -> None:
    records = [frames(count, seed) for seed, count in enumerate((1, 17, 3, 9))]
    together = run(SMALL, *records)
    for record, alone in zip(records, together, strict=True):
        assert relative(alone["grid"], run(SMALL, record)[0]["grid"]) < 1e-5


def test_a_record_without_frames_gives_an_empty_grid() -> None:
    empty, full = run(SMALL, frames(0), frames(2))
    assert empty["grid"].shape == (0, 4, 512)
    assert full["grid"].shape == (2, 4, 512)


def test_tokens_run_row_by_row_for_every_layout_of_timm() -> None:
    image = torch.rand(1, 3, 224, 224)
    for name in ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224", "resnet18"):
        extractor = TimmGrid(weights=UNTRAINED, model=name, column="frame")
        network = extractor.build().eval()
        with torch.no_grad():
            grid, features = network(image)["grid"][0], network.model.forward_features(image)[0]
        assert grid.shape == extractor.grids["grid"][0]
        expected = features[1, 2] if "swin" in name else features[1 + 9] if "vit" in name else features[:, 1, 2]
        assert torch.equal(grid[9], expected), name  # row 1, column 2 of 7; the ViT has 14 columns and a class token


def test_bird_eye_images_are_read_from_either_column() -> None:
    small = frames(1, side=224)["frame"][0]
    large = cv2.resize(small, (320, 180), interpolation=cv2.INTER_CUBIC)
    record = {
        "image": np.array(cv2.imencode(".png", large[..., ::-1])[1].tobytes(), object),
        "image224": small,
    }
    exact = TimmGrid(weights=UNTRAINED, model="resnet18", dtype="float32")
    (grid,) = run(exact, record)
    assert set(grid) == {"grid"}
    pixels = torch.from_numpy(large).permute(2, 0, 1).float()[None] / 255  # SQA3D: tensor, resize, normalise
    pixels = F.interpolate(pixels, size=(224, 224), mode="bilinear", align_corners=False)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = exact.build().eval()((pixels - mean[:, None, None]) / std[:, None, None])["grid"][0].numpy()
    assert relative(grid["grid"], expected) < 1e-5
    (rounded,) = run(TimmGrid(weights=UNTRAINED, model="resnet18", column="image224", dtype="float32"), record)
    assert rounded["grid"].shape == (49, 512)


def test_encoded_frames_of_any_size_are_read() -> None:
    images = [cv2.resize(frames(1)["frame"][0], size) for size in ((64, 64), (80, 48))]
    encoded = np.empty(2, object)
    encoded[:] = [cv2.imencode(".png", image[..., ::-1])[1].tobytes() for image in images]
    (record,) = run(SMALL, {"frame": encoded, "frame_index": np.array([0, 20], np.int32)})
    (plain,) = run(SMALL, {"frame": images[0][None], "frame_index": np.zeros(1, np.int32)})
    assert relative(record["grid"][:1], plain["grid"]) < 1e-5


def test_wrong_columns_and_damaged_images_are_named() -> None:
    with pytest.raises(InvalidValues, match=r"scan7: .*no column 'image'.*set timm_grid\.column"):
        TimmGrid(weights=UNTRAINED).prepare("scan7", frames(1))
    with pytest.raises(DecodeError, match="scan7"):
        TimmGrid(weights=UNTRAINED).prepare("scan7", {"image": np.array(b"no png", object)})
    with pytest.raises(ValueError, match="column 'colour', expected one of frame, image, image224"):
        TimmGrid(weights=UNTRAINED, column="colour")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timm has no model 'pvt_v9'"):
        TimmGrid(weights=UNTRAINED, model="pvt_v9")


def test_values_beyond_float16_are_an_error_not_infinity() -> None:
    half = TimmGrid(weights=UNTRAINED, model="resnet18", column="frame", size=64)
    run_half = half.load()
    half_input = half.prepare("scan7", frames(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extractors.image_grid.imagenet_pixels", lambda image: image * 1e6)
        with pytest.raises(InvalidValues, match="'grid' is .*float16 can't hold it"):
            run_half([half_input])


def official_pvt(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """timm's PVTv2 under the names of the original code, written out here from its module tree."""
    named = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[0] == "patch_embed":
            parts[0] = "patch_embed1"
        else:
            stage = int(parts[1])
            if parts[2] == "downsample":
                parts = [f"patch_embed{stage + 1}", *parts[3:]]
            elif parts[2] == "blocks":
                parts = [f"block{stage + 1}", *parts[3:]]
            else:
                parts = [f"norm{stage + 1}", *parts[3:]]
        if "dwconv" in parts:
            parts.insert(parts.index("dwconv"), "dwconv")
        named[".".join(parts)] = value
    return named


def test_mcan_checkpoint_loads_with_its_unused_layers(tmp_path: Path) -> None:
    model = timm_model("pvt_v2_b2", 224)
    seeded_init(model, 5)
    state = {f"module.encoder.encoder.{key}": value for key, value in official_pvt(model.state_dict()).items()}
    assert "module.encoder.encoder.block3.5.mlp.dwconv.dwconv.weight" in state
    state |= {"module.encoder.encoder.proj.weight": torch.zeros(4, 4), "module.connector.weight": torch.zeros(4, 4)}
    torch.save({"epoch": 3, "state_dict": state, "tea_k_state_dict": {}}, tmp_path / "mcan.pkl")
    extractor = TimmGrid(weights=Weights(str(tmp_path / "mcan.pkl")), column="frame")
    loaded = extractor.build().model.state_dict()  # type: ignore[union-attr, operator]
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    state.pop("module.encoder.encoder.norm4.weight")
    torch.save({"state_dict": state}, tmp_path / "short.pkl")
    with pytest.raises(WeightsError, match=r"missing: stages\.3\.norm\.weight"):
        TimmGrid(weights=Weights(str(tmp_path / "short.pkl"))).build()


def test_timm_checkpoint_loads_without_its_classifier(tmp_path: Path) -> None:
    import timm

    model = timm.create_model("resnet18", pretrained=False)
    torch.save(model.state_dict(), tmp_path / "timm.pth")
    extractor = TimmGrid(weights=Weights(str(tmp_path / "timm.pth")), model="resnet18", column="frame", dtype="float32")
    record = frames(1, side=224)
    pixels = torch.from_numpy(record["frame"]).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = model.eval().forward_features((pixels - mean[:, None, None]) / std[:, None, None])
    assert relative(run(extractor, record)[0]["grid"], expected.flatten(2).transpose(1, 2).numpy()) < 1e-5


def detectron2_names(body: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our ResNet's parameters under detectron2's names."""
    named = {}
    for key, value in body.items():
        key = re.sub(r"^body\.conv1\.", "stem.conv1.", key)
        key = re.sub(r"^body\.bn1\.", "stem.conv1.norm.", key)
        key = re.sub(r"^body\.layer(\d)", lambda m: f"res{int(m[1]) + 1}", key)
        key = key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        named[re.sub(r"\.bn(\d)\.", r".conv\1.norm.", key)] = value
    return named


def test_clipbert_checkpoint_gives_the_grid_of_its_code(tmp_path: Path) -> None:
    cnn = ClipBertCnn().eval()
    seeded_init(cnn, 3)
    for module in cnn.modules():
        if hasattr(module, "bn3"):
            module.bn3.weight.fill_(0.2)
    body = {key: value for key, value in cnn.state_dict().items() if key.startswith("body.")}
    state = {f"cnn.feature.backbone.{key}": value for key, value in detectron2_names(body).items()}
    state["cnn.grid_encoder.0.weight"] = cnn.grid_encoder[0].weight
    state["transformer.bert.pooler.dense.weight"] = torch.zeros(2, 2)
    torch.save(state, tmp_path / "clipbert.pt")
    extractor = ClipBertGrid(weights=Weights(str(tmp_path / "clipbert.pt")), dtype="float32", res5=True)
    record = frames(1, side=224)
    (ours,) = run(extractor, record)
    rgb = torch.from_numpy(record["frame"]).permute(0, 3, 1, 2).float()
    rgb = F.interpolate(rgb, size=(448, 448), mode="bilinear", align_corners=False)
    bgr = (rgb - torch.tensor([123.675, 116.28, 103.53])[:, None, None])[:, [2, 1, 0]]
    with torch.no_grad():
        res5 = cnn.body(bgr)["c5"]
        grid = F.relu(F.max_pool2d(F.conv2d(res5, cnn.grid_encoder[0].weight, padding=1), 2))
    assert relative(ours["res5"][0], res5[0].permute(1, 2, 0).numpy()) < 1e-5
    assert relative(ours["grid"][0], grid[0].permute(1, 2, 0).numpy()) < 1e-5


def test_oblong_frames_are_padded_at_the_right_and_the_bottom() -> None:
    fit = ClipBertGrid(weights=UNTRAINED).fit
    image = fit(torch.full((3, 120, 160), 200.0))
    assert image.shape == (3, 448, 448)
    black = -torch.tensor([103.53, 116.28, 123.675])
    torch.testing.assert_close(image[:, 336:, :], black[:, None, None].expand(3, 112, 448))
    torch.testing.assert_close(image[:, :336], (200 + black)[:, None, None].expand(3, 336, 448))


@pytest.mark.parametrize(
    ("shape", "seen"),  # (height, width) of a frame -> what of it is left at 448
    [((360, 640), (252, 448)), ((720, 1280), (252, 448)), ((55, 110), (224, 448)), ((110, 55), (448, 224))],
)
def test_the_longer_side_is_exact_and_the_shorter_one_as_in_clipbert(
    shape: tuple[int, int], seen: tuple[int, int]
) -> None:
    image = ClipBertGrid(weights=UNTRAINED).fit(torch.full((3, *shape), 200.0))
    lit = (image[0] > 0).nonzero().max(0).values + 1  # padding is below zero
    assert tuple(lit.tolist()) == seen


def test_convolutions_keep_float32_on_any_device() -> None:
    allowed = []

    class Watched(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            allowed.append(torch.backends.cudnn.allow_tf32)
            return {"grid": torch.zeros(len(images), 4, 512)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimmGrid, "build", lambda self: Watched())
        before = torch.backends.cudnn.allow_tf32
        run(SMALL, frames(1))
        run(SMALL, frames(1))
    assert allowed == [False, False]
    assert torch.backends.cudnn.allow_tf32 == before


def test_images_that_are_not_8_bit_rgb_are_refused() -> None:
    for strange in (np.zeros((1, 64, 64, 3), np.float32), np.zeros((1, 3, 64, 64), np.uint8)):
        with pytest.raises(InvalidValues, match=r"scan7: an image is .*expected uint8 \(height, width, 3\)"):
            SMALL.prepare("scan7", {"frame": strange, "frame_index": np.zeros(1, np.int32)})
    with pytest.raises(InvalidValues, match="no column 'frame_index'"):
        SMALL.prepare("scan7", {"frame": frames(1)["frame"]})


def test_a_foreign_checkpoint_is_refused_by_its_keys(tmp_path: Path) -> None:
    torch.save({"vote.conv1.weight": torch.zeros(3)}, tmp_path / "foreign.pt")
    weights = Weights(str(tmp_path / "foreign.pt"))
    for extractor in (ResNetFPN(weights=weights), ClipBertGrid(weights=weights), TimmGrid(weights=weights)):
        with pytest.raises(WeightsError, match=r"foreign\.pt.*vote\.conv1\.weight"):
            extractor.build()


def test_a_known_timm_model_is_checked_without_importing_timm_and_an_unknown_one_names_its_neighbours() -> None:
    code = (
        "import sys; from extractors.base import Weights; from extractors.image_grid import TimmGrid; "
        "TimmGrid(weights=Weights('untrained:0')); print([m for m in ('torch', 'timm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    TimmGrid(weights=UNTRAINED, model="resnet18.a1_in1k")  # a name with the tag of its weights, which only timm knows
    with pytest.raises(ValueError, match="no model 'resnet19'; did you mean .*resnet18"):
        TimmGrid(weights=UNTRAINED, model="resnet19")


def blank(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One stored number for each tensor."""
    return {key: torch.zeros((), dtype=value.dtype).expand(value.shape) for key, value in shapes.items()}


def clipbert_file() -> tuple[dict[str, torch.Tensor], str]:
    state = ClipBertCnn().state_dict()
    body = detectron2_names({key: value for key, value in state.items() if key.startswith("body.")})
    named = {f"cnn.feature.backbone.{key}": value for key, value in body.items()}
    return named | {"cnn.grid_encoder.0.weight": state["grid_encoder.0.weight"]}, "transformer.bert.pooler.dense.weight"


def resnet_file(naming: str) -> tuple[dict[str, torch.Tensor], str]:
    from torchvision.models import resnet50
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    if naming == "detector":
        return {
            f"backbone.{k}": v
            for k, v in resnet_fpn_backbone(backbone_name="resnet50", weights=None).state_dict().items()
        }, "rpn.head.conv.weight"
    state = resnet50(weights=None).state_dict()
    return {k: v for k, v in state.items() if not k.startswith("fc.")}, "fc.weight"


def mcan_file() -> tuple[dict[str, torch.Tensor], str]:
    state = official_pvt(timm_model("pvt_v2_b2", 224).state_dict())
    return {f"encoder.encoder.{key}": value for key, value in state.items()}, "connector.weight"


@pytest.mark.parametrize(
    ("network", "naming", "make"),
    [
        ("clipbert_grid", "ClipBERT", clipbert_file),
        ("resnet_fpn", "torchvision", lambda: resnet_file("classifier")),
        ("resnet_fpn", "torchvision", lambda: resnet_file("detector")),
        ("timm_grid", "SQA3D's MCAN", mcan_file),
    ],
    ids=["clipbert", "resnet", "resnet_fpn", "mcan"],
)
def test_the_report_on_a_checkpoint_knows_the_encoders_and_what_they_lack(
    network: str, naming: str, make: Callable[[], tuple[dict[str, torch.Tensor], str]], tmp_path: Path
) -> None:
    state, other = make()
    state = blank(state)
    torch.save(state | {other: torch.zeros(2)}, tmp_path / "file.pth")
    report = describe(tmp_path / "file.pth")
    assert (report["network"], report["naming"], report["loads"]) == (network, naming, True)
    counters = {key for key in state if key.endswith("num_batches_tracked")}  # of training steps: not needed
    uses = {entry["key"]: entry["use"] for entry in report["keys"]}
    assert uses == dict.fromkeys(state, "loaded") | dict.fromkeys({*counters, other}, "ignored")
    lost = next(key for key in state if re.search(r"(layer3|res4|block3)\.\d+\.(conv2|attn\.q)\.weight$", key))
    kept = {key: value for key, value in state.items() if key != lost}
    torch.save(kept | {first_of(kept): torch.zeros(7)}, tmp_path / "file.pth")
    report = describe(tmp_path / "file.pth")
    assert not report["loads"]
    assert len(report["missing"]) == 1
    assert report["mismatched"][0]["key"] == first_of(kept)


def first_of(state: dict[str, torch.Tensor]) -> str:
    return next(
        key for key in state if key.endswith(("layer4.0.conv1.weight", "res5.0.conv1.weight", "block4.0.attn.q.weight"))
    )

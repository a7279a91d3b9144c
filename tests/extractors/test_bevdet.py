"""BEVDet: images and calibrations that are right or refused, generations, maps and heads, batches."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from extractors import errors
from extractors.base import Weights, recipe
from extractors.batchnorm import fold
from extractors.bevdet import CAMERAS, BEVDet, BEVDetHead, Views
from extractors.checkpoint import describe, seeded_init
from extractors.image_preprocess import Fit
from extractors.inputs import Camera, Cameras
from storage.schema import Record

UNTRAINED = Weights("untrained:3")
SIZE = (160, 90)  # a tenth of nuScenes'


def pattern(width: int, height: int, seed: int = 0) -> np.ndarray:
    """(height, width, 3) uint8: smooth waves with some sharp blocks, the same everywhere."""
    y, x = np.mgrid[:height, :width]
    waves = [(x * (7 + seed) * c + y * (5 + c)) // 11 % 256 for c in (1, 2, 3)]
    image = np.stack(waves, -1).astype(np.uint8)
    image[height // 3 : height // 2, width // 4 : width // 2] = (250, 10, 90 + seed)
    return image


def camera(name: str, path: Path, yaw: float, size: tuple[int, int] = SIZE) -> Camera:
    """A level camera 1.5 m up that looks along `yaw` (radians from +x), in both frames alike."""
    c, s = np.cos(yaw), np.sin(yaw)
    pose = np.array([[s, 0, c, 0.3 * c], [-c, 0, s, 0.3 * s], [0, -1, 0, 1.5], [0, 0, 0, 1]])
    focal = 0.8 * size[0]
    intrinsic = np.array([[focal, 0, size[0] / 2], [0, focal, size[1] / 2], [0, 0, 1]])
    shifted = pose.copy()
    shifted[:3, 3] += (10.0, 0, 0.8)
    return Camera(name, path, intrinsic, pose, shifted)


@pytest.fixture
def cameras(tmp_path: Path) -> Cameras:
    """Six cameras with JPEGs of `SIZE`."""
    views = []
    for i, name in enumerate(CAMERAS):
        Image.fromarray(pattern(*SIZE, i)).save(tmp_path / f"{name}.jpg", quality=95)
        views.append(camera(name, tmp_path / f"{name}.jpg", np.pi / 2 + i))
    return Cameras(tuple(reversed(views)))  # extractors pick by name


def bevdet(**settings: Any) -> BEVDet:
    return BEVDet(**{"weights": UNTRAINED, "image_size": SIZE, **settings})


def rewrite(path: Path, count: int, data: bytes) -> None:
    """Put other bytes in the place of `count` in the middle of a file."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + data + whole[middle + count :])


def swap(cameras: Cameras, name: str, **changed: Any) -> Cameras:
    return Cameras(tuple(replace(view, **changed) if view.name == name else view for view in cameras.views))


@functools.cache
def official(generation: str) -> dict[str, Tensor]:
    """A whole state_dict in little memory: of each tensor one number, repeated; constants as they have to be."""
    state = bevdet(generation=generation).blank().state_dict()
    constants = [f"img_view_transformer.{name}" for name in ("dx", "bx", "nx", "frustum")]
    return {
        key: value if key in constants or not value.ndim else value.new_ones(1).expand(value.shape)
        for key, value in state.items()
    }


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Weights]:
    """Function that writes a state_dict as a checkpoint."""

    def write(state: dict[str, Tensor], **meta: Any) -> Weights:
        path = tmp_path / f"checkpoint{len(list(tmp_path.glob('*.pth')))}.pth"
        torch.save({"state_dict": state, "meta": meta}, path)
        return Weights(str(path))

    return write


# ---------------------------------------------------------------------------------------------------------- images


def test_first_generation_sees_the_bottom_middle_of_the_image_at_0_48() -> None:
    fit = BEVDet(weights=UNTRAINED).fit
    image = np.zeros((900, 1600, 3), np.uint8)
    image[600:650, 400:500] = 255
    seen = fit.apply(Image.fromarray(image))
    assert seen.shape == (256, 704, 3)
    rows, columns = np.nonzero(seen[..., 0] > 127)
    corners = np.array([[400, 600, 1], [500, 650, 1]]) @ fit.matrix((1600, 900)).T
    assert fit.matrix((1600, 900)).tolist() == [[0.48, 0, -32], [0, 0.48, -176], [0, 0, 1]]
    assert [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] == np.rint(corners[:, :2]).ravel().tolist()


def test_second_generation_sees_the_whole_width_at_0_44() -> None:
    fit = BEVDet(weights=UNTRAINED, generation="bd2").fit
    assert (fit.resize, fit.crop) == ((704, 396), (0, 140, 704, 396))
    assert fit.matrix((1600, 900)).tolist() == [[0.44, 0, 0], [0, 0.44, -140], [0, 0, 1]]


def test_pillow_resizes_as_it_did_when_this_was_written() -> None:
    """Pillow 12.3 gave these; BEVDet's scores moved with other resampling."""
    image = Image.fromarray(pattern(1600, 900))
    digests = {
        (generation, resample): hashlib.sha256(
            BEVDet(weights=UNTRAINED, generation=generation, resample=resample).fit.apply(image)
        ).hexdigest()[:16]
        for generation in ("bd1", "bd2")
        for resample in ("bicubic", "legacy_nearest")
    }
    assert digests == DIGESTS


DIGESTS = {
    ("bd1", "bicubic"): "6887c6cfe134edbf",
    ("bd1", "legacy_nearest"): "f5a6071ff4e904e3",
    ("bd2", "bicubic"): "a5157c238cd18c79",
    ("bd2", "legacy_nearest"): "8e5849e3d7ff68e0",
}


def test_legacy_nearest_takes_single_pixels() -> None:
    image = pattern(1600, 900)
    fit = Fit((768, 432), (32, 176, 736, 432), "legacy_nearest")
    rows, columns = ((np.arange(*span) + 0.5) / 0.48 for span in ((176, 432), (32, 736)))
    expected = image[np.ix_(rows.astype(int), columns.astype(int))]
    np.testing.assert_array_equal(fit.apply(Image.fromarray(image)), expected)


def test_cameras_are_taken_in_the_official_order(cameras: Cameras) -> None:
    views = bevdet().prepare("k", cameras)
    assert views.pixels.shape == (6, 256, 704, 3)
    assert views.cells.shape == (6, 59, 16, 44)
    for i, name in enumerate(CAMERAS):
        with Image.open(next(view.path for view in cameras.views if view.name == name)) as image:
            np.testing.assert_array_equal(views.pixels[i], bevdet().fit.apply(image))


def test_a_grey_image_has_the_same_value_in_each_colour(cameras: Cameras) -> None:
    path = cameras.views[0].path
    grey = Image.fromarray(pattern(*SIZE)[..., 0])
    grey.save(path.with_suffix(".png"))
    pixels = bevdet().prepare("k", swap(cameras, "CAM_BACK_RIGHT", path=path.with_suffix(".png"))).pixels[-1]
    assert (pixels == pixels[..., :1]).all()
    np.testing.assert_array_equal(pixels, bevdet().fit.apply(grey.convert("RGB")))


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (lambda path: path.unlink(), errors.MissingFile, "no file"),
        (lambda path: path.write_bytes(b""), errors.EmptyInput, "no bytes"),
        (lambda path: path.write_bytes(b"no image at all" * 99), errors.DecodeError, "no image"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), errors.TruncatedFile, "decode"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), errors.TruncatedFile, "decode"),
        (lambda path: rewrite(path, 500, b""), errors.DecodeError, "damaged JPEG"),
        (lambda path: rewrite(path, 2, b"\xff\xd9"), errors.DecodeError, "damaged JPEG"),
        (lambda path: Image.new("RGB", (320, 180)).save(path), errors.InvalidValues, "320 x 180 pixels"),
        (lambda path: Image.new("RGB", (90, 160)).save(path), errors.InvalidValues, "expected 160 x 90"),
        (lambda path: Image.new("CMYK", SIZE).save(path), errors.UnsupportedFile, "mode CMYK"),
    ],
)
def test_a_damaged_image_is_named(cameras: Cameras, damage: Any, kind: type, text: str) -> None:
    path = cameras.views[2].path
    damage(path)
    with pytest.raises(kind, match=text) as caught:
        bevdet().prepare("sample-7", cameras)
    assert f"sample-7 {cameras.views[2].name}" in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_camera_is_named(cameras: Cameras) -> None:
    five = Cameras(tuple(view for view in cameras.views if view.name != "CAM_BACK"))
    with pytest.raises(errors.MissingFile, match="sample-7: no CAM_BACK;"):
        bevdet().prepare("sample-7", five)


MIRROR = np.diag([-1.0, 1, 1, 1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda view: {"to_lidar": view.to_lidar @ MIRROR}, "to_lidar mirrors"),
        (lambda view: {"to_ego": view.to_ego @ MIRROR}, "to_ego mirrors"),
        (lambda view: {"to_lidar": view.to_lidar * np.nan}, "to_lidar"),
        (lambda view: {"to_lidar": view.to_lidar @ np.diag([2.0, 1, 1, 1])}, "no rigid motion"),
        (lambda view: {"to_lidar": view.to_lidar[:3]}, "4 x 4"),
        (lambda view: {"intrinsic": view.intrinsic + np.inf}, "intrinsic"),
        (lambda view: {"intrinsic": np.diag([-100.0, 100, 1])}, "intrinsic"),
        (lambda view: {"intrinsic": np.diag([0.0, 100, 1])}, "intrinsic"),
    ],
)
def test_a_calibration_that_no_camera_has_is_named(cameras: Cameras, change: Any, text: str) -> None:
    (view,) = cameras.named(["CAM_FRONT"])
    with pytest.raises(errors.InvalidValues, match=f"sample-7 CAM_FRONT: .*{text}|{text}") as caught:
        bevdet().prepare("sample-7", swap(cameras, "CAM_FRONT", **change(view)))
    assert "sample-7 CAM_FRONT" in str(caught.value)


def test_the_second_generation_needs_the_ego_frame(cameras: Cameras) -> None:
    lost = swap(cameras, "CAM_BACK", to_ego=None)
    assert bevdet(generation="bd1").prepare("k", lost).cells.shape == (6, 59, 16, 44)
    with pytest.raises(errors.InvalidValues, match="sample-7: .* where CAM_BACK is in the ego frame"):
        bevdet(generation="bd2").prepare("sample-7", lost)


@pytest.mark.parametrize("generation", ["bd1", "bd2"])
def test_points_straight_ahead_lie_ahead_in_the_frame_of_the_generation(cameras: Cameras, generation: str) -> None:
    cells = bevdet(generation=generation).prepare("k", cameras).cells
    ahead = cells[0, 20, 8, 21:23]  # CAM_FRONT_LEFT looks along +y here; 21 m off, the two middle columns
    row, column = ahead // 128, ahead % 128
    x = 10.0 if generation == "bd2" else 0.0
    assert (abs(column * 0.8 - 51.2 + 0.4 - x) < 1.5).all()
    assert (abs(row * 0.8 - 51.2 + 0.4 - 21.3) < 0.8).all()


# ------------------------------------------------------------------------------------------------------ generations


def test_parameters_and_entries_are_as_many_as_the_official_ones() -> None:
    network = bevdet().blank()
    trained = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    assert trained == {
        "img_backbone": 23_508_032,
        "img_neck": 3_933_696,
        "img_view_transformer": 123 * 512 + 123,
        "img_bev_encoder_backbone": 12_394_368,
        "img_bev_encoder_neck": 6_556_416,
        "pts_bbox_head": 1_519_686,
    }
    state = network.state_dict()
    assert len(state) == 722
    assert sum(trained.values()) == 47_975_297
    constants = sum(state[f"img_view_transformer.{name}"].numel() for name in ("dx", "bx", "nx", "frustum"))
    assert constants == 124_617
    assert sum(trained.values()) + constants == 48_099_914
    assert sum(key.endswith("running_var") for key in state) == 105


def test_the_generation_is_found_in_the_checkpoint_and_told_in_the_recipe(save: Callable[..., Weights]) -> None:
    for generation, frame, convention in (("bd1", "lidar", "mmdet3d-0.x"), ("bd2", "ego", "mmdet3d-1.0")):
        weights = save({f"module.{key}": value for key, value in official(generation).items()})
        for cls in (BEVDet, BEVDetHead):
            found = cls(weights=weights)
            assert recipe(found)["settings"]["generation"] == generation
            assert recipe(found) == recipe(cls(weights=weights, generation=generation))
            assert (found.grid.frame, found.box_convention) == (frame, convention)
        Path(weights.source).rename(weights.source + ".moved")
        assert pickle.loads(pickle.dumps(found)) == found  # a worker doesn't look again
    assert BEVDet(weights=UNTRAINED).generation == "bd1"


def test_a_setting_that_disagrees_with_the_checkpoint_is_refused(save: Callable[..., Weights]) -> None:
    weights = save(official("bd2"))
    with pytest.raises(errors.WeightsError, match=r"is of generation bd2, the setting says bd1.*generation=bd2"):
        BEVDet(weights=weights, generation="bd1")


def test_other_bevdets_are_refused_with_what_was_found(save: Callable[..., Weights]) -> None:
    state = official("bd2")
    wider = {**state, "img_view_transformer.depth_net.weight": torch.zeros(139, 256, 1, 1)}
    with pytest.raises(errors.WeightsError, match=r"variant that is not read: .*depth_net.weight \(139, 256, 1, 1\)"):
        BEVDet(weights=save(wider))
    six = {k: v for k, v in official("bd1").items() if k.startswith("pts_bbox_head.")}
    mixed = {k: v for k, v in state.items() if not k.startswith("pts_bbox_head.")} | six
    with pytest.raises(errors.WeightsError, match="depth layer of generation bd2 and a head of 6 tasks"):
        BEVDet(weights=save(mixed))
    lidar = {"pts_middle_encoder.conv_input.0.weight": torch.zeros(1), "pts_bbox_head.x": torch.zeros(1)}
    with pytest.raises(errors.WeightsError, match="is no BEVDet.*its parts are pts_bbox_head, pts_middle_encoder"):
        BEVDet(weights=save(lidar))


def test_missing_keys_and_constants_of_another_grid_are_refused(save: Callable[..., Weights]) -> None:
    state = official("bd1")
    less = {key: value for key, value in state.items() if key != "img_neck.fpn_convs.0.conv.bias"}
    with pytest.raises(errors.WeightsError, match=r"missing: img_neck.fpn_convs.0.conv.bias"):
        BEVDet(weights=save(less)).build()
    finer = {**state, "img_view_transformer.dx": torch.tensor([0.4, 0.4, 20.0])}
    with pytest.raises(errors.WeightsError, match=r"dx is \[0.4.*another grid"):
        BEVDet(weights=save(finer)).build()
    with pytest.raises(errors.WeightsError, match=r"mmdetection3d 1.0.0rc4, whose boxes are mmdet3d-1.0"):
        BEVDet(weights=save(state, mmdet3d_version="1.0.0rc4")).build()


@pytest.mark.parametrize("generation", ["bd1", "bd2"])
def test_the_doctor_knows_both_generations(save: Callable[..., Weights], generation: str) -> None:
    report = describe(Path(save(official(generation)).source))
    assert (report["network"], report["naming"], report["loads"]) == ("bevdet", generation, True)
    state = {**official(generation)}
    del state["img_neck.fpn_convs.0.conv.bias"]
    report = describe(Path(save(state).source))
    assert (report["missing"], report["loads"]) == (["img_neck.fpn_convs.0.conv.bias"], False)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"generation": "bd3"}, "generation"),
        ({"map": "up"}, "map"),
        ({"resample": "lanczos"}, "resample"),
        ({"image_size": (1600,)}, "image_size"),
        ({"image_size": (0, 900)}, "image_size"),
        ({"objects": 0}, "objects"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"bevdet: {text}"):
        bevdet(**settings)


def test_folding_batch_normalisation_changes_no_value() -> None:
    from extractors.resnet import ResNet

    network = ResNet(blocks=(1, 1, 1, 1), norm=nn.BatchNorm2d).eval()
    seeded_init(network, 0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value, low, high in ((module.running_mean, -1, 1), (module.running_var, 0.5, 2), (module.bias, -1, 1)):
                nn.init.uniform_(value, low, high)
    image = torch.rand(1, 3, 64, 96)
    with torch.inference_mode():
        before = network(image)
        assert fold(network) == 1 + 4 * 4
        after = network(image)
    for level, value in before.items():
        assert (after[level] - value).norm() < 1e-5 * value.norm()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


# -------------------------------------------------------------------------------------------------- the whole network


@pytest.fixture(scope="module")
def frames() -> list[Views]:
    """Two prepared key frames."""
    rng = np.random.RandomState(0)
    views = []
    for _ in range(2):
        pixels = np.repeat(np.repeat(rng.randint(0, 256, (6, 16, 44, 3), np.uint8), 16, 1), 16, 2)
        views.append(Views(pixels, rng.randint(0, 128 * 128 + 1, (6, 59, 16, 44)).astype(np.int32)))
    return views


@pytest.fixture(scope="module")
def maps(frames: list[Views]) -> list[Record]:
    """Records of the 512-channel map of both key frames, computed together."""
    extractor = bevdet(give="bev", map="before_up2", dtype="float32")
    return [extractor.schema.check(record, "bevdet") for record in extractor.load()(frames)]


def test_a_batch_changes_no_value(frames: list[Views], maps: list[Record]) -> None:
    (alone,) = bevdet(give="bev", map="before_up2", dtype="float32").load()(frames[1:])
    assert np.linalg.norm(alone["bev"] - maps[1]["bev"]) <= 1e-5 * np.linalg.norm(alone["bev"])
    assert not np.allclose(maps[0]["bev"], maps[1]["bev"], rtol=0.1)
    assert maps[0]["bev"].shape == (512, 64, 64)
    assert [float(maps[0]["cell"]), *maps[0]["origin"]] == pytest.approx([1.6, -51.2, -51.2], abs=1e-5)


def test_objects_are_the_same_from_either_map_and_from_a_kept_one(frames: list[Views], maps: list[Record]) -> None:
    whole = bevdet(objects=200)
    (direct,) = (whole.schema.check(record, "bevdet") for record in whole.load()(frames[:1]))
    behind = BEVDetHead(weights=UNTRAINED, map="before_up2", objects=200)
    kept = behind.load()([behind.prepare("k", record) for record in maps])[0]
    assert direct["feature"].shape == (len(direct["score"]), 256)
    assert 20 < len(direct["score"]) <= 200
    assert (np.diff(direct["score"]) <= 0).all()
    for column in ("box", "velocity", "score"):
        np.testing.assert_allclose(kept[column], direct[column], rtol=1e-4, atol=1e-5)
    assert kept["class_name"].tolist() == direct["class_name"].tolist()
    with pytest.raises(errors.InvalidValues, match="takes a map 256x128x128"):
        BEVDetHead(weights=UNTRAINED).prepare("k", maps[0])


def test_a_key_frame_without_objects_gives_an_empty_record(frames: list[Views], save: Callable[..., Weights]) -> None:
    state = {key: value * 0 - 9 * key.endswith("heatmap.1.bias") for key, value in official("bd2").items()}
    extractor = bevdet(weights=save(state), objects=100)
    (record,) = extractor.load()(frames[:1])
    assert extractor.schema.rows(extractor.schema.check(record, "bevdet")) == 0
    assert record["feature"].shape == (0, 256)

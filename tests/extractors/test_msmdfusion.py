import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extractors import msmdfusion_network
from extractors.base import Weights, recipe
from extractors.checkpoint import seeded_init
from extractors.errors import DecodeError, EmptyInput, InvalidValues, MissingFile, TruncatedFile, WeightsError
from extractors.inputs import Camera, Cameras, LidarScan, LidarSweeps
from extractors.modality_fusion import STAGES
from extractors.msmdfusion import MSMDFusion, MSMDFusionHead
from extractors.msmdfusion_inputs import CAMERAS, RESIZED, Frame, foreground, read_images
from extractors.msmdfusion_network import MSMDFusionNetwork, voxel_tensor
from extractors.sparse_conv import SparseTensor
from extractors.virtual_points import SCHEMA

torch.set_num_threads(1)
UNTRAINED = MSMDFusion(weights=Weights("untrained:0"))
CPU = torch.device("cpu")


def scan(points: int, seed: int, to_key: np.ndarray | None = None, lag: float = 0.0) -> LidarScan:
    rng = np.random.RandomState(seed)
    rows = rng.rand(points, 5) * [100, 100, 6, 255, 32] - [50, 50, 4, 0, 0]
    return LidarScan(rows.astype(np.float32), np.eye(4) if to_key is None else to_key, lag)


def moved(x: float, turn: float) -> np.ndarray:
    pose = np.eye(4)
    pose[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    pose[0, 3] = x
    return pose


def drive(points: int = 3000, sweeps: int = 2) -> LidarSweeps:
    before = tuple(scan(points, 1 + i, moved(i + 1.0, 0.3 * i), 0.05 * (i + 1)) for i in range(sweeps))
    return LidarSweeps(scan(points, 0), before, 0, np.eye(4))


def virtual_points(count: int = 40, sweeps: int = 2, seed: int = 5) -> dict[str, np.ndarray]:
    """Rows by camera, then sweep, virtual before real."""
    rng = np.random.RandomState(seed)
    camera, sweep, real = (part.ravel() for part in np.indices((6, sweeps + 1, 2)).repeat(count, axis=3))
    rows = len(camera)
    paint = np.hstack([np.eye(10)[rng.randint(0, 10, rows)], rng.rand(rows, 1)])
    record = {
        "pixel": (rng.rand(rows, 2) * [1600, 900]).astype(np.float32),
        "depth": (rng.rand(rows) * 40).astype(np.float32),
        "xyz": (rng.rand(rows, 3) * [100, 100, 6] - [50, 50, 4]).astype(np.float32),
        "paint": paint.astype(np.float32),
        "camera": camera.astype(np.uint8),
        "sweep": sweep.astype(np.uint8),
        "real": real.astype(bool),
    }
    return SCHEMA.check(record, "virtual points")


def pictures(folder: Path, size: tuple[int, int] = (1600, 900)) -> Cameras:
    views = []
    for i, name in enumerate(CAMERAS):
        path = folder / f"{name}.jpg"
        small = np.random.RandomState(i).randint(0, 255, (9, 16, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size).save(path)
        intrinsic = np.array([[1200.0, 0, 800], [0, 1200, 450], [0, 0, 1]])
        views.append(Camera(name, path, intrinsic, moved(0.5, i * np.pi / 3), None))
    return Cameras(tuple(views[::-1]))  # the source's order does not matter


def test_painted_points_go_to_the_key_frame_and_pixels_stay() -> None:
    lidar, record = drive(), virtual_points()
    pixels, camera, painted, _ = foreground(record, lidar, 10, "k")
    wanted = []
    for row in range(len(record["real"])):
        sweep = (lidar.key, *lidar.before)[record["sweep"][row]]
        xyz = sweep.to_key[:3, :3] @ record["xyz"][row] + sweep.to_key[:3, 3]
        if (np.abs(xyz[:2]) < 54).all() and -5 < xyz[2] < 3:
            u, v = record["pixel"][row] * [796 / 1600, 448 / 900]
            rest = [*record["paint"][row], sweep.lag, u, v, record["depth"][row], record["camera"][row]]
            wanted.append([*xyz, *rest])
    ours = np.column_stack([painted, pixels, camera])
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    assert len(ours) < len(record["real"]), "some were out of range"


def test_depth_is_kept_at_real_pixels_and_the_last_one_counts() -> None:
    record = virtual_points(1, 1)
    rows = np.flatnonzero(record["real"] & (record["camera"] == 2))
    record["pixel"][rows] = [1000.5, 600.5]
    record["xyz"][rows[1]] = [200, 0, 0]  # out of range: no painted point, but a depth
    depth = foreground(record, drive(), 10, "k")[3]
    assert depth.shape == (6, 448, 800)
    assert depth[2, int(600.5 * 448 / 900), int(1000.5 * 796 / 1600)] == record["depth"][rows[1]]
    assert (depth[2] != 0).sum() == 1


def test_sweeps_behind_the_wanted_number_are_left_out() -> None:
    lidar, record = drive(), virtual_points()
    assert set(foreground(record, lidar, 1, "k")[2][:, 14].round(3).tolist()) == {np.float32(0.05).round(3), 0.0}
    assert set(foreground(record, lidar, 0, "k")[2][:, 14].tolist()) == {0.0}


def test_virtual_points_of_other_files_are_refused() -> None:
    with pytest.raises(InvalidValues, match="k: virtual points of sweep 2, but the source has 1"):
        foreground(virtual_points(), drive(sweeps=1), 10, "k")
    for pixel in ([1700, 10], [10, 910], [-1, 10]):
        record = virtual_points()
        record["pixel"][7] = pixel
        with pytest.raises(InvalidValues, match=rf"k: a virtual point at pixel \({pixel[0]}, {pixel[1]}\)"):
            foreground(record, drive(), 10, "k")


def test_images_come_in_the_networks_order_whatever_the_sources(tmp_path: Path) -> None:
    cameras = pictures(tmp_path)
    images, projections = read_images(cameras, "k")
    for name, image, projection in zip(CAMERAS, images, projections, strict=True):
        (view,) = cameras.named([name])
        whole = np.asarray(Image.open(view.path).resize(RESIZED, Image.Resampling.BILINEAR), float)
        assert np.abs(whole - image).mean() < 2
        ahead = view.to_lidar @ [0.1, 0.2, 4, 1]
        u, v, d = (projection @ ahead)[:3]
        np.testing.assert_allclose([u / d, v / d, d], [1200 * 0.025 + 800, 1200 * 0.05 + 450, 4])


FAULTS = {
    "gone": MissingFile, "unnamed": MissingFile, "cut": TruncatedFile, "text": DecodeError, "small": InvalidValues,
}  # fmt: skip


@pytest.mark.parametrize(("fault", "error"), FAULTS.items())
def test_a_camera_at_fault_is_named(tmp_path: Path, fault: str, error: type[Exception]) -> None:
    cameras = pictures(tmp_path, (1600, 900))
    path = tmp_path / "CAM_BACK.jpg"
    if fault == "gone":
        path.unlink()
    if fault == "unnamed":
        cameras = Cameras(tuple(view for view in cameras.views if view.name != "CAM_BACK"))
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:3000])
    if fault == "text":
        path.write_text("no image")
    if fault == "small":
        Image.new("RGB", (800, 450)).save(path)
    with pytest.raises(error, match="k.*CAM_BACK"):
        UNTRAINED.prepare("k", drive(), cameras, virtual_points())


def test_a_cloud_without_a_point_in_range_is_refused(tmp_path: Path) -> None:
    far = LidarScan(np.full((10, 5), 70, np.float32), np.eye(4), 0.0)
    with pytest.raises(EmptyInput, match="k: none of 10 LiDAR points lies within 54 m"):
        UNTRAINED.prepare("k", LidarSweeps(far, (), 0, np.eye(4)), pictures(tmp_path), virtual_points(sweeps=0))


def test_embeddings_are_seeded_by_the_key_or_constant() -> None:
    first, again, other = UNTRAINED.embeddings("a"), UNTRAINED.embeddings("a"), UNTRAINED.embeddings("b")
    assert [row.shape for row in first] == [(1, stage.channels) for stage in STAGES]
    for one, same, different in zip(first, again, other, strict=True):
        assert np.array_equal(one, same)
        assert not np.array_equal(one, different)
        assert ((one >= 0) & (one < 1)).all()
    constant = dataclasses.replace(UNTRAINED, embedding="constant")
    assert all((row == 0.5).all() for row in constant.embeddings("a"))
    assert recipe(constant)["settings"]["embedding"] == "constant"


@functools.cache
def network() -> MSMDFusionNetwork:
    return UNTRAINED.build()


def frame(painted: int = 300, points: int = 2000, seed: int = 0, key: str = "k") -> Frame:
    """A frame of small images: 60 x 64 pixels, 64 x 64 when padded."""
    rng = np.random.RandomState(seed)
    pixels = (rng.rand(painted, 3) * [60, 64, 40]).astype(np.float32)
    camera = np.sort(rng.randint(0, 6, painted))
    xyz = rng.rand(painted, 3) * [80, 80, 6] - [40, 40, 4]
    paint = np.hstack([np.eye(10)[rng.randint(0, 10, painted)], np.ones((painted, 2))])
    depth = np.zeros((6, 64, 64), np.float32)
    depth[:, ::5, ::7] = 9
    return Frame(
        points=scan(points, seed).points * np.array([1, 1, 1, 1, 0], np.float32),
        images=rng.randint(0, 255, (6, 64, 60, 3), dtype=np.uint8),
        lidar_to_image=rng.standard_normal((6, 4, 4)).astype(np.float32),
        depth=depth,
        pixels=pixels,
        camera=camera,
        painted=np.hstack([xyz, paint]).astype(np.float32),
        embeddings=UNTRAINED.embeddings(key),
    )


def test_a_point_is_painted_with_the_feature_at_its_pixel_times_its_score() -> None:
    one, features = frame(5), torch.rand(6, 49, 16, 16)
    found: list[np.ndarray] = []

    def keep(rows: np.ndarray, *rest: Any) -> SparseTensor:
        found.append(rows)
        return voxel_tensor(rows, *rest)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(msmdfusion_network, "voxel_tensor", keep)
        network().image_voxels(one, features, 1, (41, 1440, 1440))
        for row, pixel, camera, painted in zip(found[0], one.pixels, one.camera, one.painted, strict=True):
            seen = features[camera, :, int(pixel[1] / 4), int(pixel[0] / 4)]
            projection = torch.from_numpy(one.lidar_to_image[camera]).flatten()
            score = network().score_net(torch.cat([seen, torch.tensor([pixel[2]]), projection]))
            np.testing.assert_allclose(row, [*painted, *(seen * score)], rtol=1e-4, atol=1e-6)


def test_without_painted_points_one_voxel_of_zeros_stands_amid_the_grid() -> None:
    voxels = network().image_voxels(frame(0), torch.rand(6, 49, 16, 16), 1, (41, 1440, 1440))
    assert voxels.coords.tolist() == [[0, 25, 720, 720]]
    assert not voxels.features.any()


def test_a_full_grid_of_voxels_stops_at_the_point_that_would_open_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msmdfusion_network, "MAX_VOXELS", 2)
    rows = np.array([[0, 0, 0, 1], [1, 0, 0, 1], [2, 0, 0, 1], [0, 0, 0, 9]], np.float32)
    voxels = voxel_tensor(rows, (0.075, 0.075, 0.2), (41, 1440, 1440), CPU)
    assert voxels.features[:, 3].tolist() == [1, 1], "the last point came too late for its own voxel"


LACKING = [(300, 2000), (0, 2000), (1, 2000), (300, 0), (300, 1), (0, 0)]  # painted points, LiDAR points


@pytest.mark.parametrize(
    ("painted", "points", "pairing"),
    [*((*counts, "exact") for counts in LACKING), (1, 2000, "legacy_float"), (300, 1, "legacy_float")],
)
def test_frames_that_lack_something_give_a_whole_map(
    painted: int, points: int, pairing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network(), "pairing", pairing)
    maps: list[torch.Tensor] = []

    class Kept(Exception):
        pass

    def keep(module: Any, inputs: Any) -> None:
        maps.append(inputs[0])
        raise Kept  # what follows are plain convolutions

    hook = network().bev_fusion.register_forward_pre_hook(keep)
    with torch.inference_mode(), pytest.raises(Kept):
        network()(frame(painted, points))
    hook.remove()
    assert maps[0].shape == (1, 640, 180, 180)
    assert maps[0].isfinite().all()
    assert maps[0][:, 256:].any() == (painted > 0 or points > 0)
    assert maps[0][:, :256].any() == (points > 0)


class Shortcut(torch.nn.Module):
    """In place of the plain convolutions between the sparse part and the head, which take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(640, 512, 1)
        seeded_init(self, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-3 * self.conv(x).relu()  # float16 can hold it


@functools.cache
def shortened() -> MSMDFusionNetwork:
    made = copy.deepcopy(network())
    made.bev_fusion = Shortcut().requires_grad_(False)  # type: ignore[assignment]
    made.pts_backbone = made.pts_neck = torch.nn.Identity()  # type: ignore[assignment]
    return made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the network but its plain convolutions on the map."""
    made = shortened()
    monkeypatch.setattr(MSMDFusion, "build", lambda detector: made)


def assert_same_bytes(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    for name, values in first.items():
        same = values.tolist() == second[name].tolist() if values.dtype == object else None
        assert same or values.tobytes() == second[name].tobytes(), name


@pytest.mark.usefixtures("short")
def test_records_are_whole_repeatable_and_alone_what_they_are_in_a_batch() -> None:
    frames = [frame(seed=0), frame(0, seed=1)]
    run = UNTRAINED.load()
    together = run(frames)
    assert_same_bytes(together[0], run(frames[:1])[0])
    assert_same_bytes(together[1], run(frames[1:])[0])
    for record, one in zip(together, frames, strict=True):
        checked = UNTRAINED.schema.check(record, "msmdfusion k")
        assert 0 < len(checked["score"]) <= 80
        assert np.isfinite(checked["feature"]).all()
        assert (checked["painted_points"] == len(one.pixels)).all()
        assert set(checked["convention"]) == {"mmdet3d-0.x"}


@pytest.mark.slow
def test_the_whole_network_gives_the_same_bytes_again() -> None:
    one = frame(seed=3)
    assert_same_bytes(UNTRAINED.load()([one])[0], UNTRAINED.load()([one])[0])


@pytest.mark.usefixtures("short")
def test_the_head_on_a_kept_map_finds_what_the_whole_network_finds() -> None:
    whole = dataclasses.replace(UNTRAINED, give="bev", dtype="float32")
    one = frame(seed=2)
    (kept,) = whole.load()([one])
    head = MSMDFusionHead(weights=UNTRAINED.weights)
    (found,) = head.load()([head.prepare("k", whole.schema.check(kept, "bev"))])
    (detections,) = dataclasses.replace(UNTRAINED, give="detections").load()([one])
    for name in ("box", "score", "label", "velocity", "painted_points"):
        np.testing.assert_array_equal(found[name], detections[name])
    raw = dataclasses.replace(head, give="heads")
    (outputs,) = raw.load()([kept])
    assert raw.schema.check(outputs, "heads")["query_label"].shape == (200,)


def test_facts_tell_what_a_frame_was_made_of(tmp_path: Path) -> None:
    prepared = UNTRAINED.prepare("k", drive(), pictures(tmp_path), virtual_points())
    facts = UNTRAINED.facts_of(prepared)
    assert facts == {"sweeps": 2, "painted_points": len(prepared.pixels), "painted_sweeps": 3}
    assert len(prepared.points) == 9000
    assert np.array_equal(prepared.points[:3000, :4], drive().key.points[:, :4])
    assert not prepared.points[:3000, 4].any()


def test_the_merged_file_of_the_first_training_stage_is_refused_with_what_it_covers(tmp_path: Path) -> None:
    fusion = ("multimodal_middle_encoder.", "bev_fusion.", "conv1x1_blocks.", "score_net.")
    state = {key: value for key, value in MSMDFusionNetwork().state_dict().items() if not key.startswith(fusion)}
    torch.save({"state_dict": state}, tmp_path / "fusion_voxel0075_R50.pth")
    detector = MSMDFusion(weights=Weights(str(tmp_path / "fusion_voxel0075_R50.pth")))
    with pytest.raises(WeightsError, match=r"not a trained model.*img_backbone 318 of 318") as caught:
        detector.build()
    assert "multimodal_middle_encoder 0 of " in str(caught.value)


@pytest.mark.parametrize("settings", [{"pairing": "float"}, {"embedding": "random"}, {"sweeps": -1}, {"objects": 0}])
def test_settings_that_do_not_exist_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"msmdfusion: {next(iter(settings))}"):
        MSMDFusion(weights=Weights("untrained:0"), **settings)


def test_parameter_counts_are_the_official_ones() -> None:
    with torch.device("meta"):
        whole = MSMDFusionNetwork()
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in whole.named_children()}
    assert sum(counts.values()) == 50_571_906
    assert len(whole.state_dict()) == 874
    norms = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)
    assert sum(isinstance(module, norms) for module in whole.modules()) == 133
    parts = {"multimodal_middle_encoder": 9_817_888, "pts_bbox_head": 1_034_910, "bev_fusion": 4_852_224}
    assert {name: counts[name] for name in parts} == parts

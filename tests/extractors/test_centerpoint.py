from typing import Any

import numpy as np
import pytest
import torch

from extractors.base import Weights, recipe
from extractors.bev_detector import Detections, bev_record
from extractors.centerpoint import CenterPoint, CenterPointHead, VoxelScan
from extractors.centerpoint_network import CenterPointNetwork, sparse_batch
from extractors.checkpoint import seeded_init
from extractors.errors import EmptyInput, InvalidValues
from extractors.inputs import LidarScan, LidarSweeps
from extractors.object_crop import ObjectCrop
from storage.schema import Record

torch.set_num_threads(1)
HEAD = {"weights": Weights("untrained:0"), "voxel": 0.1, "objects": 500}


def detector(**settings: Any) -> CenterPoint:
    """The smaller of the two maps, to be quick."""
    return CenterPoint(**{"dtype": "float32", **HEAD, **settings})


def cloud(points: int = 400, seed: int = 0) -> np.ndarray:
    """(point, 5) float32 within 50 m, x, y, z, intensity, ring."""
    rng = np.random.RandomState(seed)
    xyz = rng.uniform((-50, -50, -4), (50, 50, 2), (points, 3))
    return np.column_stack([xyz, rng.randint(0, 256, points), rng.randint(0, 32, points)]).astype(np.float32)


def lidar(points: np.ndarray, *before: np.ndarray, missing: int = 0) -> LidarSweeps:
    """A key frame and sweeps before it, each 0.05 s and half a metre further back."""
    sweeps = []
    for number, other in enumerate(before, 1):
        move = np.eye(4)
        move[1, 3] = -0.5 * number
        sweeps.append(LidarScan(other, move, 0.05 * number))
    return LidarSweeps(LidarScan(points, np.eye(4), 0.0), tuple(sweeps), missing, np.eye(4))


@pytest.fixture(scope="module")
def scans() -> list[VoxelScan]:
    return [detector().prepare(f"frame {i}", lidar(cloud(400 + 300 * i, i), cloud(200, 9))) for i in range(2)]


@pytest.fixture(scope="module")
def fused(scans: list[VoxelScan]) -> list[Record]:
    return detector().load()(scans)


@pytest.fixture(scope="module")
def kept(scans: list[VoxelScan]) -> list[Record]:
    extractor = detector(give="bev")
    return [extractor.schema.check(record, "centerpoint_bev") for record in extractor.load()(scans)]


def test_records_fit_the_schema_and_are_finite(fused: list[Record]) -> None:
    extractor = detector()
    for record in fused:
        checked = extractor.schema.check(record, "centerpoint")
        assert 10 < extractor.schema.rows(checked) <= 498
        assert all(np.isfinite(values).all() for values in checked.values() if values.dtype.kind == "f")
        assert checked["feature"].shape[1] == 512
        assert set(checked["frame"]) == {"lidar"}
        assert set(checked["convention"]) == {"mmdet3d-1.0"}
        assert checked["sweeps"].tolist() == [1] * len(checked["sweeps"])
        assert (np.diff(checked["score"]) <= 0).all()
        assert checked["valid"].any()
        assert checked["feature"][checked["valid"]].std() > 0


def test_map_then_head_then_crop_give_what_the_whole_gives(fused: list[Record], kept: list[Record]) -> None:
    stage, cut = CenterPointHead(**HEAD), ObjectCrop(dtype="float32")
    found = stage.load()([stage.prepare("frame", record) for record in kept])
    for bev, objects, whole in zip(kept, found, fused, strict=True):
        objects = stage.schema.check(objects, "centerpoint_head")
        assert objects.keys() == whole.keys() - {"feature", "valid"}
        assert all(np.array_equal(objects[name], whole[name]) for name in objects)
        (record,) = cut.load()([cut.prepare("frame", bev, objects)])
        assert all(np.array_equal(record[name], whole[name]) for name in record)
        assert record.keys() == whole.keys() - {"sweeps"}


def test_raw_outputs_lead_to_the_same_objects(fused: list[Record], kept: list[Record]) -> None:
    stage = CenterPointHead(**HEAD, give="heads")
    (record,) = stage.load()([stage.prepare("frame", kept[1])])
    outputs = stage.schema.check(record, "centerpoint_head")
    assert outputs["task1_heatmap"].shape == (2, 128, 128)
    head = stage.head("cpu")
    (found,) = head.detect({name: torch.from_numpy(v[None]) for name, v in outputs.items() if name != "sweeps"})
    np.testing.assert_allclose(found.pick("score", 500).boxes[:, :7], fused[1]["box"], rtol=1e-5, atol=1e-5)


def test_the_order_and_number_of_objects_are_settings(fused: list[Record], kept: list[Record]) -> None:
    few, listed = CenterPointHead(**{**HEAD, "objects": 7}), CenterPointHead(**HEAD, order="detector")
    np.testing.assert_array_equal(few.load()(kept)[0]["box"], fused[0]["box"][:7])
    by_task = listed.load()(kept)[0]
    task = np.array([0, 1, 1, 2, 2, 3, 4, 4, 5, 5])[by_task["label"]]
    assert (np.diff(task) >= 0).all()
    assert not (np.diff(by_task["score"]) <= 0).all()
    assert len(by_task["score"]) == len(fused[0]["score"])


def test_no_detections_are_an_empty_record(kept: list[Record]) -> None:
    stage = CenterPointHead(**HEAD, score_threshold=1.0)
    record = stage.schema.check(stage.load()(kept[:1])[0], "centerpoint_head")
    assert stage.schema.rows(record) == 0


def test_both_suppressions_run_on_a_full_map(kept: list[Record]) -> None:
    maps = [{**kept[0], "bev": np.random.RandomState(0).rand(*kept[0]["bev"].shape).astype(np.float32)}]
    for nms in ("circle", "rotate"):
        stage = CenterPointHead(**HEAD, nms=nms)
        assert 0 < len(stage.load()(maps)[0]["score"]) <= 498


def test_company_in_a_batch_changes_no_map(scans: list[VoxelScan], kept: list[Record]) -> None:
    """All samples in one pass, as on a GPU."""
    extractor = detector()
    network = CenterPointNetwork(extractor.build_head(), extractor.voxels).eval()
    seeded_init(network, 0)
    with torch.inference_mode():
        together = network(sparse_batch([(s.coords, s.mean) for s in scans], extractor.voxels, "cpu")).numpy()
    for ours, record in zip(together, kept, strict=True):
        assert np.linalg.norm(ours - record["bev"]) < 1e-5 * np.linalg.norm(record["bev"])


def test_key_frames_of_one_lidar_file_get_equal_records() -> None:
    points = cloud(50)
    extractor = detector(give="bev")
    one, other = extractor.load()([extractor.prepare("one", lidar(points)), extractor.prepare("other", lidar(points))])
    assert one["bev"].tobytes() == other["bev"].tobytes()


def test_one_point_is_enough() -> None:
    extractor = detector(give="bev", pad_empty=False)
    (record,) = extractor.load()([extractor.prepare("frame", lidar(cloud(1)))])
    assert np.isfinite(record["bev"]).all()


def test_voxels_are_those_of_the_points_strictly_inside() -> None:
    rows = [[54, 0, 0, 1, 0], [-54, 0, 0, 1, 0], [0, 0, 3, 1, 0], [53.97, 1, 0.1, 7, 0], [0, 0, -5, 1, 0]]
    points = np.array(rows, np.float32)
    scan = CenterPoint(weights=Weights("untrained:0"), pad_empty=False).prepare("frame", lidar(points))
    assert scan.coords.tolist() == [[25, 733, 1439]]
    np.testing.assert_allclose(scan.mean, [[points[3, 0], 1, 0.1, 7, 0]])


def test_sweeps_are_moved_stamped_and_counted() -> None:
    key, before = cloud(1, 0), cloud(1, 1)
    scan = detector().prepare("frame", lidar(key, before))
    np.testing.assert_allclose(scan.mean[1], [before[0, 0], before[0, 1] - 0.5, *before[0, 2:4], 0.05], rtol=1e-6)
    assert scan.sweeps == 1
    assert detector(sweeps=2).prepare("frame", lidar(*[cloud(5, i) for i in range(6)])).sweeps == 2


def test_points_that_are_no_numbers_are_left_out() -> None:
    points = cloud(30)
    clean = detector().prepare("frame", lidar(points))
    broken = np.concatenate([points, points[:5]])
    broken[30:, [0, 1, 2, 3, 0]] = np.nan
    broken[31, 1] = np.inf
    found = detector().prepare("frame", lidar(broken))
    np.testing.assert_array_equal(found.coords, clean.coords)
    np.testing.assert_array_equal(found.mean, clean.mean)


def test_too_few_sweeps_are_refused_where_asked_for() -> None:
    with pytest.raises(InvalidValues, match=r"scene 1: 2 sweeps before the key frame, 3 are not on the disk.*is 5"):
        detector(min_sweeps=5).prepare("scene 1", lidar(*[cloud(5)] * 3, missing=3))


@pytest.mark.parametrize("points", [np.zeros((0, 5), np.float32), cloud(9) + np.float32([200, 0, 0, 0, 0])])
def test_a_scan_without_points_in_range_is_refused_by_name(points: np.ndarray) -> None:
    with pytest.raises(EmptyInput, match="frame 7: none of"):
        detector().prepare("frame 7", lidar(points))


@pytest.mark.parametrize("shape", [(10, 4), (10, 6), (10,)])
def test_points_of_other_columns_are_refused_by_name(shape: tuple[int, ...]) -> None:
    for scans in ((np.ones(shape, np.float32), cloud(5)), (cloud(5), np.ones(shape, np.float32))):
        with pytest.raises(InvalidValues, match=r"frame 7: .*expected \(point, 5\)"):
            detector().prepare("frame 7", lidar(*scans))


def test_more_voxels_than_the_cap_leave_the_first_ones() -> None:
    every = detector(sweeps=0).prepare("frame", lidar(cloud(300)))
    few = detector(sweeps=0, max_voxels=100).prepare("frame", lidar(cloud(300)))
    np.testing.assert_array_equal(few.coords, every.coords[:100])


def test_random_sweeps_depend_on_the_key_alone() -> None:
    sweeps = lidar(*[cloud(20, i) for i in range(12)])
    first, again, other = (detector(sweep_choice="random", sweeps=3).prepare(key, sweeps) for key in ("a", "a", "b"))
    np.testing.assert_array_equal(first.mean, again.mean)
    assert not np.array_equal(first.mean, other.mean)


@pytest.mark.parametrize(("voxel", "side", "cell", "edge"), [(0.075, 180, 0.6, -54.0), (0.1, 128, 0.8, -51.2)])
def test_all_that_depends_on_the_voxel_follows_it(voxel: float, side: int, cell: float, edge: float) -> None:
    extractor = CenterPoint(weights=Weights("untrained:0"), voxel=voxel, give="bev")
    assert (extractor.grid.width, extractor.grid.height) == (side, side)
    assert extractor.grid.cell == pytest.approx(cell)
    assert extractor.grid.origin == (edge, edge)
    assert extractor.voxels == (41, 8 * side, 8 * side)
    assert extractor.schema.columns["bev"].dims == (512, side, side)
    far = cloud(1)
    far[0, 0] = -edge - 0.01
    assert detector(voxel=voxel).prepare("frame", lidar(far)).coords[0, 2] == 8 * side - 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"voxel": 0.05}, "voxel is 0.05"),
        ({"nms": "soft"}, "nms is 'soft', expected one of"),
        ({"convention": "kitti"}, "convention is 'kitti'"),
        ({"give": "all"}, "give is 'all'"),
        ({"objects": 501}, "objects is 501"),
        ({"min_sweeps": 10}, "min_sweeps 10"),
        ({"max_voxels": 0}, "max_points 10, max_voxels 0"),
        ({"sweep_choice": "best"}, "sweep_choice is 'best'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"centerpoint: {text}"):
        detector(**settings)


def test_a_head_refuses_a_map_of_another_detector(kept: list[Record]) -> None:
    fine = CenterPointHead(weights=Weights("untrained:0"))
    with pytest.raises(InvalidValues, match=r"frame 7: centerpoint_head takes a map 512x180x180 .* has a map 512x128"):
        fine.prepare("frame 7", kept[0])
    stage = CenterPointHead(**HEAD)
    with pytest.raises(InvalidValues, match="ego frame"):
        stage.prepare("frame 7", {**kept[0], "frame": np.array("ego", object)})
    with pytest.raises(InvalidValues, match="no column"):
        stage.prepare("frame 7", {"box": np.zeros((1, 7))})


def test_maps_that_float16_cannot_hold_are_refused(kept: list[Record]) -> None:
    grid = detector().grid
    with pytest.raises(InvalidValues, match=r"as large as .*dtype=float32"):
        bev_record(kept[0]["bev"] + 1e5, grid, "float16")
    with pytest.raises(InvalidValues, match="NaN"):
        bev_record(kept[0]["bev"] * np.nan, grid, "float32")


def test_every_setting_is_in_the_recipe() -> None:
    base = recipe(detector())
    assert base["weights"] == {"weights": "untrained:0"}
    for change in (
        {"nms": "rotate"},
        {"sweeps": 3},
        {"convention": "mmdet3d-0.x"},
        {"pad_empty": False},
        {"pool": "max"},
    ):
        assert recipe(detector(**change)) != base


def test_picking_by_score_keeps_the_detectors_order_of_equals() -> None:
    found = Detections(np.zeros((4, 9), np.float32), np.array([0.5, 0.9, 0.5, 0.5], np.float32), np.array([0, 1, 2, 3]))
    assert found.pick("score", 3).labels.tolist() == [1, 0, 2]
    assert found.pick("detector", 3).labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("voxel", [0.075, 0.1])
def test_a_point_lights_the_row_of_its_y_and_the_column_of_its_x(voxel: float) -> None:
    extractor = detector(voxel=voxel, pad_empty=False)
    point = np.array([[20.0, -8.0, 0.0, 100.0, 3.0]], np.float32)
    scan = extractor.prepare("frame", lidar(point))
    encoder = extractor.build().pts_middle_encoder
    with torch.inference_mode():
        bev, _ = encoder(sparse_batch([(scan.coords, scan.mean)], extractor.voxels, "cpu"))
    assert bev.shape[2:] == (extractor.grid.height, extractor.grid.width)
    rows, columns = bev[0].abs().sum(0).nonzero(as_tuple=True)
    x, y = ((cells + 0.5) * extractor.grid.cell + extractor.grid.origin[0] for cells in (columns, rows))
    assert abs(x - 20).max() < 2 * extractor.grid.cell
    assert abs(y + 8).max() < 2 * extractor.grid.cell

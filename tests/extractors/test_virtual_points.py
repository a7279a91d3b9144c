import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractors.boxes3d import CLASSES
from extractors.errors import EmptyInput, InvalidValues, MissingFile, UnsupportedFile
from extractors.inputs import Camera, Cameras, Foreground, LidarScan, LidarSweeps, MaskFiles
from extractors.masks import Instance, read_masks
from extractors.msmdfusion_inputs import CAMERAS, IMAGE_SIZE, lidar_to_image
from extractors.virtual_points import SCHEMA, VirtualPoints, VirtualPointsFiles, make_points, read_foreground

INTRINSIC = np.array([[1000.0, 0, 800], [0, 1000, 450], [0, 0, 1]])
AHEAD = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])  # camera z is LiDAR y, camera y is -z


def published(seed: int, points: int = 3, columns: int = 14) -> dict[str, list[np.ndarray]]:
    """The content of a file: numbers that tell where they are from."""
    rng = np.random.RandomState(seed)

    def pixels(count: int) -> np.ndarray:
        paint = np.hstack([np.eye(10)[rng.randint(0, 10, count)], rng.rand(count, 1)])
        return np.hstack([rng.rand(count, 3) * [1599, 899, 60], *([paint] if columns == 3 else [])])

    def xyz(count: int) -> np.ndarray:
        paint = np.hstack([np.eye(10)[rng.randint(0, 10, count)], rng.rand(count, 1)])
        return np.hstack([rng.rand(count, 3) * 10, *([paint] if columns == 14 else [])])

    return {
        "virtual_pixel_indices": [pixels(points + c) for c in range(6)],
        "virtual_points": [xyz(points + c) for c in range(6)],
        "real_pixel_indices": [pixels(2) for _ in range(6)],
        "real_points": [xyz(2) for _ in range(6)],
    }


def saved(path: Path, content: Any) -> Path:
    np.save(path, np.array(content, dtype=object), allow_pickle=True)
    return path if path.suffix == ".npy" else path.with_name(path.name + ".npy")


def test_files_become_rows_by_camera_then_sweep_virtual_first(tmp_path: Path) -> None:
    contents = [published(0), published(1)]
    files = [saved(tmp_path / f"{i}.pcd.bin.pkl", content) for i, content in enumerate(contents)]
    record = VirtualPointsFiles().prepare("k", Foreground((files[0], None, files[1]), (tmp_path / "none",)))
    checked = SCHEMA.check(record, "virtual points")
    at = 0
    for camera in range(6):
        for sweep, content in ((0, contents[0]), (2, contents[1])):
            for kind in ("virtual", "real"):
                pixels = content[f"{kind}_pixel_indices"][camera].astype(np.float32)
                points = content[f"{kind}_points"][camera].astype(np.float32)
                rows = slice(at, at := at + len(pixels))
                assert np.array_equal(checked["pixel"][rows], pixels[:, :2])
                assert np.array_equal(checked["depth"][rows], pixels[:, 2])
                assert np.array_equal(checked["xyz"][rows], points[:, :3])
                assert np.array_equal(checked["paint"][rows], points[:, 3:])
                assert (checked["camera"][rows] == camera).all()
                assert (checked["sweep"][rows] == sweep).all()
                assert (checked["real"][rows] == (kind == "real")).all()
    assert at == len(checked["real"])


def test_points_of_three_columns_are_completed_from_their_pixels(tmp_path: Path) -> None:
    content = published(2, columns=3)
    found = read_foreground(saved(tmp_path / "old.pkl", content))
    for camera, points in enumerate(found):
        paint = np.concatenate([content[f"{k}_pixel_indices"][camera][:, -11:] for k in ("virtual", "real")])
        assert np.array_equal(points.points[:, 3:], paint.astype(np.float32))
        assert points.pixels.shape == (len(paint), 3)


def test_a_frame_without_foreground_gives_no_row(tmp_path: Path) -> None:
    none = {name: [[] for _ in range(6)] for name in published(0)}
    shorter = {name: [] for name in published(0)}
    files = tuple(saved(tmp_path / f"{i}.pkl", content) for i, content in enumerate((none, shorter)))
    record = SCHEMA.check(VirtualPointsFiles().prepare("k", Foreground(files, ())), "k")
    assert SCHEMA.rows(record) == 0


def test_an_item_without_a_file_of_its_own_is_refused_with_a_count(tmp_path: Path) -> None:
    file = saved(tmp_path / "sweep.pkl", published(0))
    with pytest.raises(MissingFile, match=r"k: no virtual points at /there/x \(1 of 3 files"):
        VirtualPointsFiles().prepare("k", Foreground((None, file, None), (Path("/there/x"),)))


class Trap:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ({"real_points": []}, UnsupportedFile, "expected a dict with"),
        ([1, 2], UnsupportedFile, "expected"),
        ({**published(0), "extra": Trap()}, UnsupportedFile, "builtins.print"),
        ({**published(0), "real_points": [np.zeros((2, 14))] * 5}, UnsupportedFile, "expected 6 each"),
        ({**published(0), "real_points": [np.zeros((2, 13))] * 6}, InvalidValues, r"CAM_FRONT_LEFT: .*\(2, 13\)"),
        ({**published(0), "real_points": [np.full((2, 14), np.nan)] * 6}, InvalidValues, "NaN"),
        ({**published(0), "real_points": [np.array(["a", "b"])] * 6}, UnsupportedFile, "no arrays of numbers"),
    ],
)  # fmt: skip
def test_other_files_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, error: type[Exception], text: str
) -> None:
    wrapped = np.empty((), object)
    wrapped[()] = content
    np.save(tmp_path / "x.npy", wrapped, allow_pickle=True)
    with pytest.raises(error, match=text) as caught:
        read_foreground(tmp_path / "x.npy")
    assert "x.npy" in str(caught.value)
    assert capsys.readouterr().out == ""


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.pkl", published(0)).read_bytes()
    for name, data, error in (
        ("nothing", b"", EmptyInput),
        ("half", whole[: len(whole) // 2], UnsupportedFile),
        ("bare", pickle.dumps(published(0)), UnsupportedFile),
        ("numbers", None, UnsupportedFile),
    ):
        path = tmp_path / f"{name}.npy"
        np.save(path, np.zeros(3)) if data is None else path.write_bytes(data)
        with pytest.raises(error, match=name):
            read_foreground(path)


def instance(name: str, left: int, upper: int, right: int, lower: int, score: float = 0.5) -> Instance:
    mask = np.zeros(IMAGE_SIZE[::-1], bool)
    mask[upper:lower, left:right] = True
    return Instance(name, score, mask)


def view(name: str = "CAM_FRONT") -> Camera:
    return Camera(name, Path("image.jpg"), INTRINSIC, AHEAD, None)


def wall(count: int = 4000, seed: int = 0) -> np.ndarray:
    """Echoes in front, behind, and beside the camera."""
    rng = np.random.RandomState(seed)
    return (rng.rand(count, 3) * [30, 40, 12] - [15, 10, 6]).astype(np.float32)


def test_real_points_are_the_echoes_within_the_first_mask() -> None:
    xyz, masks = wall(), [instance("car", 700, 300, 900, 600, 0.9), instance("bus", 800, 200, 1200, 700, 0.8)]
    made = make_points(xyz, lidar_to_image(view()), masks, CLASSES, 50, np.random.RandomState(0))
    wanted = []
    for x, y, z in xyz.astype(np.float64):  # y is depth
        if y <= 0:
            continue
        u, v = 1000 * x / y + 800, 1000 * -z / y + 450
        if not (0 < u < 1600 and 0 < v < 900):
            continue
        inside = [m for m in masks if m.mask[int(v), int(u)]]
        if inside:
            paint = [inside[0].name == name for name in CLASSES]
            wanted.append([int(u), int(v), y, x, y, z, *paint, inside[0].score])
    ours = np.hstack([made.pixels, made.points])[made.real]
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    assert len(np.unique(ours[:, 16])) == 2


def test_virtual_points_take_the_depths_of_the_six_nearest_echoes_of_their_mask() -> None:
    xyz, projection = wall(), lidar_to_image(view())
    car, bus = instance("car", 700, 300, 900, 600), instance("bus", 900, 300, 1000, 600)
    masks = [car, instance("truck", 100, 100, 104, 102), bus]
    made = make_points(xyz, projection, masks, CLASSES, 20, np.random.RandomState(1))
    virtual, real = ({"pixel": made.pixels[rows], "point": made.points[rows]} for rows in (~made.real, made.real))
    assert len(virtual["pixel"]) == 2 * 20 * 6, "the mask without an echo gives none"
    for label in (0, 3):
        mine, lent = (part["point"][:, 3 + label] == 1 for part in (virtual, real))
        echoes = real["pixel"][lent].astype(np.float64)
        for group in virtual["pixel"][mine].reshape(-1, 6, 3).astype(np.float64):
            distance = ((echoes[:, :2] - group[0, :2]) ** 2).sum(1)
            order = np.argsort(distance, kind="stable")[:6]
            np.testing.assert_allclose(group[:, 2], echoes[order, 2])
    lifted = virtual["point"][:, :3].astype(np.float64) @ projection[:3, :3].T + projection[:3, 3]
    np.testing.assert_allclose(lifted[:, 2], virtual["pixel"][:, 2], rtol=1e-5)
    np.testing.assert_allclose(lifted[:, :2] / lifted[:, 2:], virtual["pixel"][:, :2], rtol=1e-4)


def test_pixels_of_a_mask_are_drawn_without_repeats_and_padded_by_the_first() -> None:
    xyz = np.array([[0, 10, 0]], np.float32)  # at pixel (800, 450)
    small = instance("car", 799, 449, 802, 451)
    made = make_points(xyz, lidar_to_image(view()), [small], CLASSES, 10, np.random.RandomState(0))
    drawn = made.pixels[~made.real, :2]
    assert len(drawn) == 10, "one echo lends one depth"
    assert len(np.unique(drawn[:6], axis=0)) == 6
    assert (drawn[6:] == drawn[0]).all()


def write_masks(folder: Path, name: str, **arrays: Any) -> Path:
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return folder / f"{name}.npz"


def frame(folder: Path, **boxes: list[list[float]]) -> tuple[LidarSweeps, Cameras, MaskFiles]:
    lidar = LidarSweeps(
        LidarScan(np.hstack([wall(), np.zeros((4000, 2), np.float32)]), np.eye(4), 0.0), (), 0, np.eye(4)
    )
    files = {}
    for name in CAMERAS:
        found = np.reshape(boxes.get(name, []), (-1, 4))
        files[name] = write_masks(
            folder, name, names=["traffic cone"] * len(found), scores=[0.7] * len(found), boxes=found
        )
    return lidar, Cameras(tuple(map(view, CAMERAS))), MaskFiles(files)


def test_a_key_frame_is_made_from_its_mask_files_alike_each_time(tmp_path: Path) -> None:
    inputs = frame(tmp_path, CAM_FRONT=[[700.2, 300.9, 899.1, 599.5]], CAM_BACK=[[0, 0, 1600, 900]])
    stage = VirtualPoints(per_mask=8)
    first, again, other = (SCHEMA.check(stage.prepare(key, *inputs), key) for key in ("a", "a", "b"))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert not np.array_equal(first["pixel"], other["pixel"])
    assert set(first["camera"].tolist()) == {1, 4}
    assert np.array_equal(np.flatnonzero(first["paint"][0]), [8, 10]), "nuImages' order of classes"
    detector = dataclasses.replace(stage, one_hot="detector").prepare("a", *inputs)
    assert np.array_equal(np.flatnonzero(detector["paint"][0]), [9, 10])


def test_points_that_were_made_and_then_published_read_back_as_they_were(tmp_path: Path) -> None:
    made = VirtualPoints().prepare(
        "k", *frame(tmp_path, CAM_FRONT=[[700, 300, 900, 600]], CAM_BACK=[[0, 0, 1600, 900]])
    )
    content: dict[str, list[np.ndarray]] = {}
    for kind, real in (("virtual", False), ("real", True)):
        rows = [np.flatnonzero((made["camera"] == camera) & (made["real"] == real)) for camera in range(6)]
        content[f"{kind}_pixel_indices"] = [np.column_stack([made["pixel"][r], made["depth"][r]]) for r in rows]
        content[f"{kind}_points"] = [np.column_stack([made["xyz"][r], made["paint"][r]]) for r in rows]
    read = VirtualPointsFiles().prepare("k", Foreground((saved(tmp_path / "k.pcd.bin.pkl", content),), ()))
    for name, values in made.items():
        np.testing.assert_array_equal(read[name], values)


def test_no_mask_gives_no_row(tmp_path: Path) -> None:
    inputs = frame(tmp_path)
    assert SCHEMA.rows(SCHEMA.check(VirtualPoints().prepare("k", *inputs), "k")) == 0
    inputs = frame(tmp_path, CAM_FRONT=[[0, 0, 1600, 900]])
    assert SCHEMA.rows(VirtualPoints(min_score=0.8).prepare("k", *inputs)) == 0


def test_a_camera_without_a_file_of_masks_is_missing(tmp_path: Path) -> None:
    lidar, cameras, masks = frame(tmp_path)
    some = MaskFiles({name: path for name, path in masks.files.items() if name != "CAM_BACK"})
    with pytest.raises(MissingFile, match="k: no masks of CAM_BACK; source.masks"):
        VirtualPoints().prepare("k", lidar, cameras, some)


def test_boxes_are_masks_of_the_pixels_they_touch(tmp_path: Path) -> None:
    boxes = [[10.2, 20.9, 12.0, 22.1], [-5, -5, 2, 1], [1700, 0, 1800, 10]]
    path = write_masks(tmp_path, "b", names=["car", "bus", "truck"], scores=[1, 1, 1], boxes=boxes)
    car, bus = read_masks(path, IMAGE_SIZE)
    rows, columns = car.mask.nonzero()
    assert (set(rows), set(columns)) == ({20, 21, 22}, {10, 11})
    assert (bus.name, bus.mask.sum(), bus.mask[0, :2].all()) == ("bus", 2, True)


@pytest.mark.parametrize(
    ("arrays", "error", "text"),
    [
        ({"names": ["car"], "scores": [1]}, UnsupportedFile, "either masks or boxes"),
        ({"names": ["car"], "scores": [1], "boxes": [[0, 0, 1]]}, InvalidValues, r"\(1, 3\)"),
        ({"names": ["car"], "scores": [1], "masks": np.ones((1, 448, 800), bool)}, InvalidValues, "900, 1600"),
        ({"names": ["car"], "scores": [np.nan], "boxes": [[0, 0, 1, 1]]}, InvalidValues, "NaN"),
        ({"names": np.array(["car", None]), "scores": [1], "boxes": [[0, 0, 1, 1]]}, UnsupportedFile, "plain arrays"),
    ],
)
def test_other_mask_files_are_refused_by_name(tmp_path: Path, arrays: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        read_masks(write_masks(tmp_path, "wrong", **arrays), IMAGE_SIZE)
    assert "wrong.npz" in str(caught.value)
    (tmp_path / "no.npz").write_bytes(b"not a zip")
    with pytest.raises(UnsupportedFile, match="no.npz"):
        read_masks(tmp_path / "no.npz", IMAGE_SIZE)

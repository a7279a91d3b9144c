"""`scenecache draw`: a nuScenes key frame as one picture, its boxes over six images and over the LiDAR from above.

The quickest check that calibration, frames and box conventions agree: a box that is off in one camera shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extractors.boxes3d import bottom_from_centre, convert, corners
from extractors.errors import InputError
from extractors.inputs import Annotations, Camera, Cameras, LidarSweeps
from pipelines.cli_jobs import find_job
from pipelines.cli_store import open_store
from pipelines.errors import JobError

_ROWS = (
    ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT"),
    ("CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT"),
)
_IMAGE = (640, 360)  # width, height of one camera in the picture
_METRES = 54.0  # half the side of the view from above
_NEAR = 0.1  # metres in front of a camera: edges are cut there
_EDGES = (
    *((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4)),
    *((0, 4), (1, 5), (2, 6), (3, 7), (0, 5), (1, 4)),  # the last two cross the front
)
_WHITE, _GREY, _GREEN, _ORANGE = (255, 255, 255), (140, 140, 140), (60, 220, 60), (255, 150, 30)


@dataclass(frozen=True)
class Boxes:
    """Boxes of one colour.

    Attributes:
        boxes: (n, 7) in the LIDAR_TOP frame, `mmdet3d-1.0`.
        names: n classes.
        color: RGB, 0..255.
    """

    boxes: np.ndarray
    names: Sequence[str]
    color: tuple[int, int, int]


def main(job: str, item: str, out: Path, overrides: Sequence[str], store: str | None, stage: str | None) -> None:
    """Draw one key frame and say what is on the picture.

    Args:
        job: its source is used, nothing else of it.
        item: sample token.
        out: PNG to write.
        overrides: of the job, as `source.root=/data/nuscenes`.
        store, stage: where set, the objects that this stage found are drawn in orange.

    Raises:
        JobError: the job's source has no cameras and LiDAR, the stage's records have no boxes of the LiDAR's frame, or
            `out` can't be written.
    """
    import cv2

    if out.suffix.lower() != ".png" or not out.absolute().parent.is_dir():
        raise JobError(f"can't write {out}: give a file name that ends in .png, in a folder that is there")
    spec = find_job(job).override(overrides)
    source = spec.model_copy(update={"stages": {}, "tables": {}}).build().source
    if source is None or not {"lidar", "cameras", "annotations"} <= set(source.kinds):
        raise JobError(f"job {spec.name}: its source offers no cameras and LiDAR; draw needs a source of type nuscenes")
    lidar, cameras = source.open(item, "lidar"), source.open(item, "cameras")
    groups = []
    try:
        groups.append(annotated(source.open(item, "annotations")))
    except InputError as error:  # the test split has none
        print(f"without annotations: {error}")
    if stage:
        groups.append(_found(open_store(store or spec.store)[stage][item], stage))
    if not cv2.imwrite(str(out), draw(lidar, cameras, groups)[..., ::-1]):
        raise JobError(f"can't write {out}: is there a folder of this name, or no permission?")
    counts = [f"{len(group.boxes)} {'annotated' if group.color == _GREEN else 'found'}" for group in groups]
    print(f"{out}: {', '.join(counts) or 'no boxes'}")


def annotated(found: Annotations) -> Boxes:
    """Annotated boxes of the ten classes, green."""
    rows = [i for i, name in enumerate(found.names) if name]
    return Boxes(bottom_from_centre(found.boxes[rows]), [found.names[i] for i in rows], _GREEN)


def _found(record: dict[str, np.ndarray], stage: str) -> Boxes:
    """A detector's objects, orange."""
    if missing := [name for name in ("box", "class_name", "frame", "convention") if name not in record]:
        raise JobError(f"stage {stage} has no column {', '.join(missing)}: name a stage that finds objects")
    if strange := sorted(set(record["frame"].tolist()) - {"lidar"}):
        raise JobError(f"stage {stage} gives boxes in the frame {strange[0]}; only those of the LiDAR are drawn")
    boxes = record["box"].astype(np.float64)
    for convention in set(record["convention"].tolist()):
        rows = record["convention"] == convention
        boxes[rows] = convert(boxes[rows], convention, "mmdet3d-1.0")
    return Boxes(boxes, record["class_name"].tolist(), _ORANGE)


def draw(lidar: LidarSweeps, cameras: Cameras, groups: Sequence[Boxes]) -> np.ndarray:
    """The picture: three images above three, and to their right the LiDAR from above, y (ahead) up.

    Returns:
        (720, 2640, 3) uint8 RGB.
    """
    views = {view.name: view for view in cameras.views}
    rows = [np.hstack([_camera(views.get(name), name, groups) for name in row]) for row in _ROWS]
    return np.hstack([np.vstack(rows), _above(lidar, groups, 2 * _IMAGE[1])])


def edges_in_image(boxes: np.ndarray, view: Camera) -> np.ndarray:
    """The boxes' edges as a camera sees them.

    Args:
        boxes: (n, 7) in the LIDAR_TOP frame, `mmdet3d-1.0`.
        view: the camera.

    Returns:
        (n, 14, 2, 2) float64: start and end of each edge in pixels, those of the front crossed; NaN for an edge
        behind the camera; one that passes it is cut short.
    """
    points = corners(boxes, "mmdet3d-1.0")
    to_camera = np.linalg.inv(view.to_lidar)
    points = points @ to_camera[:3, :3].T + to_camera[:3, 3]
    ends = points[:, _EDGES]  # (n, 14, 2, 3)
    start, end = ends[:, :, 0], ends[:, :, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        cut = start + (end - start) * ((_NEAR - start[..., 2:]) / (end[..., 2:] - start[..., 2:]))
    clipped = np.stack([np.where(start[..., 2:] < _NEAR, cut, start), np.where(end[..., 2:] < _NEAR, cut, end)], axis=2)
    clipped[(start[..., 2] < _NEAR) & (end[..., 2] < _NEAR)] = np.nan
    pixels = clipped @ np.asarray(view.intrinsic, np.float64).T
    return pixels[..., :2] / pixels[..., 2:]


def _camera(view: Camera | None, name: str, groups: Sequence[Boxes]) -> np.ndarray:
    import cv2

    image: Any = np.zeros((_IMAGE[1], _IMAGE[0], 3), np.uint8)
    label = name if view else f"{name}: none"
    if view is not None:
        pixels = cv2.imread(str(view.path), cv2.IMREAD_COLOR)
        if pixels is None:
            label = f"{name}: {view.path.name} can't be read"
        else:
            image = cv2.resize(pixels[..., ::-1], _IMAGE, interpolation=cv2.INTER_AREA)
            scale = np.array(_IMAGE) / pixels.shape[1::-1]
            for group in groups:
                _lines(image, edges_in_image(group.boxes, view).reshape(-1, 2, 2) * scale, group.color)
    cv2.putText(image, label, (8, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.5, _WHITE, 1, cv2.LINE_AA)
    return image


def _above(lidar: LidarSweeps, groups: Sequence[Boxes], side: int) -> np.ndarray:
    import cv2

    def place(xy: np.ndarray) -> np.ndarray:
        return (xy * [1, -1] + _METRES) * (side / (2 * _METRES))

    image = np.zeros((side, side, 3), np.uint8)
    column, row = place(lidar.key.points[:, :2].astype(np.float64)).astype(int).T
    inside = (column >= 0) & (column < side) & (row >= 0) & (row < side)
    image[row[inside], column[inside]] = _GREY
    for group in groups:
        bottom = corners(group.boxes, "mmdet3d-1.0")[:, :4, :2]
        front, centre = bottom[:, [0, 3]].mean(1), group.boxes[:, :2]
        outline = np.stack([bottom, np.roll(bottom, -1, axis=1)], axis=2).reshape(-1, 2, 2)
        _lines(image, place(np.concatenate([outline, np.stack([centre, front], axis=1)])), group.color)
    cv2.putText(image, f"LIDAR_TOP, {2 * _METRES:.0f} m, ahead is up", (8, 20), 0, 0.5, _WHITE, 1, cv2.LINE_AA)
    return image


def _lines(image: np.ndarray, ends: np.ndarray, color: tuple[int, int, int]) -> None:
    """Draw (n, 2, 2) lines; those with NaN are left out."""
    import cv2

    for start, end in ends[np.isfinite(ends).all((1, 2))].clip(-10_000, 10_000).round().astype(int).tolist():
        cv2.line(image, start, end, color, 1, cv2.LINE_AA)

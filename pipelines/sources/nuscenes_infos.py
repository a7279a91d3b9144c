"""Build an index from info pickles of mmdetection3d, of its layouts before and since 1.1, and of BEVDet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extractors.boxes3d import CONVENTIONS, convert, wrap
from extractors.errors import UnsupportedFile
from extractors.safe_pickle import read_pickle
from pipelines.sources.nuscenes_index import CAMERAS, LIDAR, MAX_SWEEPS, SCHEMAS, make_tables
from pipelines.sources.rigid import IDENTITY, compose, from_quaternion, invert, is_rigid

_LONG = {"car", "truck", "bus", "trailer", "bicycle", "motorcycle"}  # longer than wide
_HEIGHT_CHANGE = 0.3  # metres that a car may rise between a camera's time and the LiDAR's
_TOP_SPEED = 60.0  # m/s
_PLACE_ERROR = 0.005  # metres between two ways to the same pose, one of them through float32 in world coordinates


def build(path: Path) -> dict[str, pa.Table]:
    """Read one pickle.

    Raises:
        MissingFile, UnsupportedFile: it is not there, refers to code, or is no info file of nuScenes.
    """
    data = read_pickle(path)
    keys = sorted(map(str, data)) if isinstance(data, dict) else []
    rows = _Rows()
    try:
        if "data_list" in keys:
            names = [name for name, _ in sorted(data["metainfo"]["categories"].items(), key=lambda entry: entry[1])]
            samples = sorted(data["data_list"], key=lambda sample: str(sample["token"]))
            annotated = any(sample.get("instances") for sample in samples)
            for sample in samples:
                rows.add_new(sample, names)
            dialect = "mmdetection3d infos 1.1"
        elif "infos" in keys:
            samples = sorted(data["infos"], key=lambda info: str(info["token"]))
            annotated = any("gt_boxes" in info for info in samples)
            for info in samples:
                rows.add_old(info)
            bevdet = any("ann_infos" in info for info in samples)
            dialect = "BEVDet infos" if bevdet else "mmdetection3d infos before 1.1"
        else:
            raise UnsupportedFile(
                f"{path}: {type(data).__name__} with {', '.join(keys[:6]) or 'no keys'}; infos of mmdetection3d have "
                "`infos` and `metadata` (before 1.1) or `data_list` and `metainfo` (since)"
            )
    except UnsupportedFile:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedFile(
            f"{path}: no info file of nuScenes: sample {len(rows.tokens)} in order of tokens: "
            f"{type(error).__name__}: {error}"
        ) from error
    if twice := [a for a, b in pairwise(rows.tokens) if a == b]:
        raise UnsupportedFile(f"{path}: sample {twice[0]} is there twice; make the file again")
    return rows.tables(dialect, annotated)


class _Rows:
    """Rows of an index, gathered sample by sample in the order of tokens."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.to_ego: list[np.ndarray] = []
        self.faults: list[str] = []
        self.lidar: dict[str, list[Any]] = {name: [] for name in SCHEMAS["lidar"].names}
        self.camera: dict[str, list[Any]] = {name: [] for name in SCHEMAS["camera"].names}
        self.object: dict[str, list[Any]] = {name: [] for name in SCHEMAS["object"].names}

    def add_old(self, info: Mapping[str, Any]) -> None:
        """A sample of `infos`. Poses come from its quaternions, not from the products that the file also holds."""
        sweeps = info["sweeps"][:MAX_SWEEPS]
        cameras = {channel: info["cams"][name] for channel, name in enumerate(CAMERAS) if info["cams"].get(name)}
        (lidar_to_ego,) = _poses([info], "lidar2ego")
        to_key = invert(compose(_poses([info], "ego2global")[0], lidar_to_ego))
        shots = [*sweeps, *cameras.values()]
        placed = compose(to_key, compose(_poses(shots, "ego2global"), _poses(shots, "sensor2ego")))
        row = self._sample(info, lidar_to_ego)
        self._scan(row, "", info["lidar_path"], 0, IDENTITY)
        for sweep, pose in zip(sweeps, placed, strict=False):
            lag = int(info["timestamp"]) - int(sweep["timestamp"])
            self._scan(row, sweep["sample_data_token"], sweep["data_path"], lag, pose)
        for (channel, camera), pose in zip(cameras.items(), placed[len(sweeps) :], strict=True):
            token = camera.get("sample_data_token", "")
            self._image(row, token, camera["data_path"], channel, pose, camera["cam_intrinsic"])
        if "gt_boxes" in info:
            count = len(info["gt_boxes"])
            self._boxes(
                row,
                np.asarray(info["gt_boxes"], np.float64).reshape(count, -1)[:, :7],
                [str(name) for name in info["gt_names"]],
                np.asarray(info.get("gt_velocity", np.full((count, 2), np.nan)), np.float64).reshape(count, 2),
                info.get("num_lidar_pts", np.zeros(count)),
                info.get("num_radar_pts", np.zeros(count)),
            )

    def add_new(self, sample: Mapping[str, Any], names: Sequence[str]) -> None:
        """A sample of `data_list`, whose cameras have no ego pose of their own: `lidar2cam` is what there is."""
        sweeps = sample.get("lidar_sweeps", [])[:MAX_SWEEPS]
        scans = [sweep["lidar_points"] for sweep in sweeps]
        cameras = {c: sample["images"][name] for c, name in enumerate(CAMERAS) if sample["images"].get(name)}
        lidar_to_ego = _matrices([sample["lidar_points"]], "lidar2ego")[0]
        to_key = invert(compose(_matrices([sample], "ego2global")[0], lidar_to_ego))
        row = self._sample(sample, lidar_to_ego)
        self._scan(row, "", sample["lidar_points"]["lidar_path"], 0, IDENTITY)
        through_world = compose(to_key, compose(_matrices(sweeps, "ego2global"), _matrices(scans, "lidar2ego")))
        placed = invert(_matrices(scans, "lidar2sensor"))  # sharper: the file has world coordinates in float32
        agree = abs(placed - through_world).max((1, 2)) < _PLACE_ERROR
        placed = np.where(agree[:, None, None], placed, through_world)
        for sweep, scan, pose in zip(sweeps, scans, placed, strict=True):
            lag = round((sample["timestamp"] - sweep["timestamp"]) * 1e6)
            self._scan(row, sweep.get("sample_data_token", ""), scan["lidar_path"], lag, pose)
        placed = invert(_matrices(list(cameras.values()), "lidar2cam"))
        moved = compose(
            compose(lidar_to_ego, placed), invert(_matrices(list(cameras.values()), "cam2ego"))
        )  # of the car, from the camera's time to the LiDAR's
        for (channel, camera), pose, motion in zip(cameras.items(), placed, moved[:, :, 3], strict=True):
            if is_rigid(pose):
                self._check_motion(CAMERAS[channel], motion, sample["timestamp"] - camera["timestamp"])
            token = camera.get("sample_data_token", "")
            self._image(row, token, camera["img_path"], channel, pose, camera["cam2img"])
        objects = sample.get("instances", [])
        labels = [int(one["bbox_label_3d"]) for one in objects]
        self._boxes(
            row,
            np.array([one["bbox_3d"][:7] for one in objects], np.float64).reshape(-1, 7),
            [names[label] if label >= 0 else "" for label in labels],
            np.array([one.get("velocity", (np.nan, np.nan)) for one in objects], np.float64).reshape(-1, 2),
            [one.get("num_lidar_pts", 0) for one in objects],
            [one.get("num_radar_pts", 0) for one in objects],
        )

    def tables(self, dialect: str, annotated: bool) -> dict[str, pa.Table]:
        """The tables of the index, boxes brought to one convention."""
        boxes = np.concatenate(self.object["box"]) if self.object["box"] else np.empty((0, 7))
        names = [name for part in self.object["category"] for name in part]
        convention = _convention(boxes, names)
        fault = ""
        if convention:
            boxes = convert(boxes, convention, CONVENTIONS[0])
            dialect = f"{dialect}, boxes as in {convention}"
        elif len(boxes):
            fault = "neither sizes nor yaws tell which box convention it has; use the official tables"
        boxes[:, 6] = wrap(np.round(boxes[:, 6], 9))  # as in an index from tables
        categories = sorted({*names, ""})
        code = {name: i for i, name in enumerate(categories)}
        joined = {name: np.concatenate(parts) for name, parts in self.object.items() if name != "category" and parts}
        joined |= {"box": boxes, "category": [code[name] for name in names]}
        columns: dict[str, dict[str, Any]] = {
            "sample": {
                "token": self.tokens,
                "scene": [""] * len(self.tokens),
                "to_ego": self.to_ego,
                "fault": self.faults,
            },
            "lidar": self.lidar,
            "camera": self.camera,
            "object": {name: joined.get(name, []) for name in SCHEMAS["object"].names},
        }
        return make_tables(columns, dialect, categories, [""], annotated, fault)

    def _sample(self, sample: Mapping[str, Any], lidar_to_ego: np.ndarray) -> int:
        self.tokens.append(str(sample["token"]))
        self.to_ego.append(lidar_to_ego)
        self.faults.append("")
        return len(self.tokens) - 1

    def _scan(self, row: int, token: str, path: str, lag: int, to_key: np.ndarray) -> None:
        values = (row, str(token), _relative(path, LIDAR), lag, to_key)
        for name, value in zip(self.lidar, values, strict=True):
            self.lidar[name].append(value)

    def _image(self, row: int, token: str, path: str, channel: int, to_lidar: np.ndarray, intrinsic: Any) -> None:
        values = (row, str(token), _relative(path, CAMERAS[channel]), channel, to_lidar)
        for name, value in zip(self.camera, (*values, np.asarray(intrinsic, np.float64)[:3, :3]), strict=True):
            self.camera[name].append(value)

    def _boxes(
        self,
        row: int,
        boxes: np.ndarray,
        names: list[str],
        velocity: np.ndarray,
        lidar_points: Sequence[int],
        radar_points: Sequence[int],
    ) -> None:
        if not len(boxes) == len(names) == len(velocity) == len(lidar_points) == len(radar_points):
            raise ValueError(f"{len(boxes)} boxes, {len(names)} names, {len(lidar_points)} counts of points")
        values: dict[str, Any] = {
            "sample": np.full(len(boxes), row),
            "token": np.full(len(boxes), "", object),
            "box": boxes,
            "velocity": velocity,
            "category": names,
            "attribute": np.zeros(len(boxes), np.int16),
            "lidar_points": np.asarray(lidar_points),
            "radar_points": np.asarray(radar_points),
        }
        for name, value in values.items():
            self.object[name].append(value)

    def _check_motion(self, camera: str, moved: np.ndarray, seconds: float) -> None:
        """The car's motion between the camera's time and the LiDAR's must be one that a car can make.

        Files converted to 1.1 before mmdetection3d's PR 2110 have -t for the translation of lidar2cam in place of
        -R^-1 t, which makes the car jump by about a metre up or down.
        """
        if abs(moved[2]) > _HEIGHT_CHANGE or np.hypot(moved[0], moved[1]) > 0.5 + _TOP_SPEED * abs(seconds):
            self.faults[-1] = (
                f"lidar2cam of {camera} moves the car by {np.round(moved, 2).tolist()} m within {seconds:.3f} s: the "
                "file was converted to 1.1 by an mmdetection3d that got translations wrong (its PR 2110); make it "
                "again, or use the infos it was made from or the official tables"
            )


def _convention(boxes: np.ndarray, names: Sequence[str]) -> str | None:
    """Which convention boxes are in: by which size is the longer of vehicles, or else by the range of yaws."""
    new, old = CONVENTIONS
    vehicle = np.array([name in _LONG for name in names], bool)
    longer = boxes[vehicle, 3] > boxes[vehicle, 4]
    if len(longer) and not 0.2 < longer.mean() < 0.8:
        return new if longer.mean() > 0.5 else old
    if (boxes[:, 6] < -np.pi - 1e-3).any():
        return old  # -yaw - pi / 2 goes down to -3 pi / 2
    return new if (boxes[:, 6] > np.pi / 2 + 1e-3).any() else None


def _relative(path: str, channel: str) -> str:
    """Path below the dataset's root: since 1.1 infos have only the file's name, older ones have their maker's root."""
    parts = re.split(r"[/\\]", str(path))
    if len(parts) >= 3 and parts[-3] in ("samples", "sweeps"):
        return "/".join(parts[-3:])
    return f"samples/{channel}/{parts[-1]}"


def _poses(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """(n, 3, 4) of `NAME_translation` and `NAME_rotation` (w, x, y, z)."""
    shift = np.array([record[f"{name}_translation"] for record in records], np.float64).reshape(-1, 3)
    return from_quaternion(shift, np.array([r[f"{name}_rotation"] for r in records], np.float64).reshape(-1, 4))


def _matrices(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """(n, 3, 4) of (4, 4) poses."""
    return np.array([record[name] for record in records], np.float64).reshape(-1, 4, 4)[:, :3]

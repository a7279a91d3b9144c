"""A short drive in nuScenes' official layout: tables, map, LiDAR sweeps, camera images; masks and questions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from extractors.geometry import transform
from pipelines.errors import JobError
from pipelines.make_data import lidar
from pipelines.make_data.folder import made_in
from pipelines.make_data.nuscenes_drive import BLOCK, CAMERAS, IMAGE, Drive, Sensor, ego_body, make_drive
from pipelines.make_data.nuscenes_questions import CLASSES, Node, ask, node
from pipelines.make_data.nuscenes_tables import Tables, visibility_token, wxyz
from pipelines.make_data.solids import Mesh
from pipelines.make_data.street_camera import StreetCamera, lit, shadows
from pipelines.make_data.streets import drivable
from pipelines.make_data.traffic import Thing

# The scenes of nuScenes' mini; the devkit's lists say which are for training
SCENES = (
    "scene-0061", "scene-0103", "scene-0553", "scene-0655", "scene-0757", "scene-0796", "scene-1077", "scene-1094",
    "scene-1100", "scene-0916",
)  # fmt: skip
VAL = ("scene-0103", "scene-0916")
_LOCATION = "boston-seaport"  # of nuScenes' two cities, the one that drives on the right
_MAP_CELL = 0.1  # metres per pixel: the devkit expects that
_KEY_US, _SWEEPS = 500_000, 10  # key frames at 2 Hz, LiDAR turns from one to the next
_START_US, _SCENE_US = 1_533_151_603_547_590, 600_000_000
_ANNOTATED = 75.0  # metres from the ego car
_FEWEST_PIXELS = 12  # of an instance mask


def make(
    out: Path, seed: int = 0, scenes: int = 2, key_frames: int = 4, image_scale: float = 1.0,
    version: str = "v1.0-mini",
) -> dict[str, Any]:  # fmt: skip
    """Write a synthetic drive; on one machine the same arguments give the same bytes.

    The first scene turns left at a crossing, the second goes straight on and is of the val split, then one turns right,
    one waits, and so on. There are six cameras (key frames alone) and LIDAR_TOP; there is no radar. Beside nuScenes'
    folders are `masks` (extractors/masks.py) and `questions` (NuScenes-QA).

    Args:
        out: folder, made if need be; what an earlier make left there is removed first.
        seed: everything follows from it.
        scenes: how many drives, at most 10; they have the names of nuScenes' mini scenes.
        key_frames: of each scene, half a second apart; between two of them there are nine more LiDAR sweeps.
        image_scale: 1 gives images of 1600 x 900 pixels; the intrinsics follow.
        version: folder of the tables.

    Returns:
        Counts: scenes, key frames, sweeps, points, images, annotations, questions by split.

    Raises:
        JobError: a count or the scale is out of range, or the folder holds something else.
        MissingPackage: Blender is not installed.
    """
    if not 1 <= scenes <= len(SCENES):
        raise JobError(f"scenes is {scenes}, need 1 to {len(SCENES)}: as many as nuScenes' mini has")
    if key_frames < 1:
        raise JobError(f"key_frames is {key_frames}, need at least 1")
    if not 0.01 <= image_scale <= 4:
        raise JobError(f"image_scale is {image_scale}, need 0.01 to 4; 1 gives 1600 x 900 pixels")
    size = round(IMAGE[0] * image_scale), round(IMAGE[1] * image_scale)
    with made_in(out, "nuscenes"):
        return _make(out, seed, scenes, key_frames, size, version)


def _make(
    out: Path, seed: int, scenes: int, key_frames: int, size: tuple[int, int], version: str
) -> dict[str, Any]:  # fmt: skip
    tables = Tables(seed)
    for channel in ("LIDAR_TOP", *CAMERAS):
        tables.add("sensor", channel, channel=channel, modality="lidar" if channel == "LIDAR_TOP" else "camera")
    duration_s = (key_frames - 1) * _KEY_US / 1e6
    drives = [make_drive(seed, index, duration_s, size) for index in range(scenes)]
    summary: Counter[str] = Counter(scenes=scenes)
    questions: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    with StreetCamera() as camera:
        for index, drive in enumerate(drives):
            scene = _SceneWriter(out, tables, drive, index, camera)
            questions["val" if scene.name in VAL else "train"] += scene.write(key_frames, size, summary)
    _write_map(out, tables, drives)
    tables.write(out / version)
    folder = out / "questions"
    folder.mkdir(parents=True, exist_ok=True)
    for split, asked in questions.items():
        (folder / f"NuScenes_{split}_questions.json").write_text(json.dumps({"questions": asked}, indent=0))
        summary[f"{split} questions"] = len(asked)
    return dict(summary)


@dataclass(frozen=True, eq=False)
class _Shot:
    """An image to be drawn."""

    sensor: Sensor
    time_s: float
    filename: str
    size: tuple[int, int]


class _SceneWriter:
    """Writes one scene's files and adds its records to the tables."""

    def __init__(self, out: Path, tables: Tables, drive: Drive, index: int, camera: StreetCamera) -> None:
        self.out, self.tables, self.drive, self.camera = out, tables, drive, camera
        self.name = SCENES[index]
        self.rng = np.random.default_rng([tables.seed, index, 1])
        self.start_us = _START_US + index * _SCENE_US
        self.log = f"n008-2018-08-01-{15 + index // 6}-{10 * (index % 6):02d}-36-0400"

    def write(self, key_frames: int, size: tuple[int, int], summary: Counter[str]) -> list[dict[str, Any]]:
        """Write LiDAR and images, add records and counts; give the questions."""
        samples = self._add_scene(key_frames)
        with ThreadPoolExecutor(1) as pool:  # Blender draws while the LiDAR turns
            drawing = pool.submit(self._draw, self._add_images(samples, size))
            questions = self._sweep(samples, summary)
            drawing.result()
        summary["key frames"] += key_frames
        summary["images"] += key_frames * (len(self.drive.sensors) - 1)
        return questions

    def _sweep(self, samples: Sequence[str], summary: Counter[str]) -> list[dict[str, Any]]:
        """Write the LiDAR's sweeps, add annotations; give the questions."""
        tokens, key_sweeps = [], []
        for turn, time_us in enumerate(self.times):
            frame, key = -(-turn // _SWEEPS), turn % _SWEEPS == 0  # a sweep is of the key frame that follows
            sweep = self._scan(time_us)
            row = self._add_data(self.drive.sensors[0], turn, samples[frame], time_us, key)
            _parent(self.out / row["filename"])
            sweep.points.tofile(self.out / row["filename"])
            tokens.append(row["token"])
            summary["points"] += len(sweep.points)
            if key:
                key_sweeps.append(sweep)
        self.tables.chain(tokens)

        annotations: list[tuple[int, str]] = []  # thing, token
        questions: list[dict[str, Any]] = []
        asked_before: Counter[str] = Counter()
        seen = {int(thing) for sweep in key_sweeps for thing in np.unique(sweep.owner)} - {-1}
        for frame, (sample, sweep) in enumerate(zip(samples, key_sweeps, strict=True)):
            nodes = self._annotate(frame, sample, sweep, sorted(seen), annotations)
            asked = ask(self.rng, nodes, asked_before)
            questions += [{**question, "sample_token": sample} for question in asked]
        self._add_instances(annotations)
        summary["sweeps"] += len(self.times)
        summary["annotations"] += len(annotations)
        return questions

    def _add_scene(self, key_frames: int) -> list[str]:
        """Log, scene, samples and calibrations; gives the samples' tokens."""
        tables, name = self.tables, self.name
        log = tables.add(
            "log", name, logfile=self.log, vehicle=self.log[:4], date_captured=self.log[5:15], location=_LOCATION
        )
        samples = [tables.token("sample", name, frame) for frame in range(key_frames)]
        scene = tables.add(
            "scene", name, log_token=log, nbr_samples=key_frames, first_sample_token=samples[0],
            last_sample_token=samples[-1], name=name, description=f"Synthetic crossing, {self.drive.manoeuvre}",
        )  # fmt: skip
        turns = np.arange((key_frames - 1) * _SWEEPS + 1)
        late = self.rng.integers(-400, 401, len(turns)) * (turns > 0)
        self.times: list[int] = (self.start_us + turns * (_KEY_US // _SWEEPS) + late).tolist()
        for frame, time_us in enumerate(self.times[::_SWEEPS]):
            tables.add("sample", name, frame, timestamp=time_us, scene_token=scene)
        tables.chain(samples)
        for sensor in self.drive.sensors:
            tables.add(
                "calibrated_sensor", name, sensor.channel, sensor_token=tables.token("sensor", sensor.channel),
                translation=sensor.to_ego[:3, 3].tolist(), rotation=wxyz(sensor.to_ego[:3, :3]),
                camera_intrinsic=sensor.intrinsic.tolist(),
            )  # fmt: skip
        return samples

    def _seconds(self, time_us: int) -> float:
        return (time_us - self.start_us) / 1e6

    def _scan(self, time_us: int) -> lidar.Sweep:
        drive, time_s = self.drive, self._seconds(time_us)
        ego = drive.ego_in_street(time_s)
        things = [(thing.solids, thing.pose(time_s)) for thing in drive.things]
        return lidar.scan(self.rng, ego @ drive.sensors[0].to_ego, drive.street, [(ego_body(), ego)], things)

    def _add_data(
        self, sensor: Sensor, number: int, sample: str, time_us: int, key: bool, size: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]:
        """A sample_data record with an ego pose of its own time."""
        pose, ending = self.drive.ego(self._seconds(time_us)), "jpg" if sensor.early_us else "pcd.bin"
        ego_pose = self.tables.add(
            "ego_pose", self.name, sensor.channel, number, timestamp=time_us, rotation=wxyz(pose[:3, :3]),
            translation=pose[:3, 3].tolist(),
        )  # fmt: skip
        name = f"{self.log}__{sensor.channel}__{time_us}.{ending}"
        return self.tables.add_row(
            "sample_data", self.name, sensor.channel, number, sample_token=sample, ego_pose_token=ego_pose,
            calibrated_sensor_token=self.tables.token("calibrated_sensor", self.name, sensor.channel),
            timestamp=time_us, fileformat=ending[:3], is_key_frame=key, height=size[1], width=size[0],
            filename=f"{'samples' if key else 'sweeps'}/{sensor.channel}/{name}",
        )  # fmt: skip

    def _annotate(
        self, frame: int, sample: str, sweep: lidar.Sweep, seen: Sequence[int], annotations: list[tuple[int, str]]
    ) -> list[Node]:
        """Annotate what is near and seen in some key frame; give the graph's nodes: of a class, and with points now."""
        time_s = self._seconds(self.times[frame * _SWEEPS])
        ego = self.drive.ego(time_s)
        points = transform(sweep.points[:, :3].astype(np.float64), ego @ self.drive.sensors[0].to_ego)
        nodes = []
        for index in seen:
            thing = self.drive.things[index]
            pose = self.drive.to_global @ thing.pose(time_s)
            centre = pose[:3, 3] + (0, 0, thing.size[2] / 2)
            if np.linalg.norm((centre - ego[:3, 3])[:2]) > _ANNOTATED:
                continue
            inside = (np.abs((points - centre) @ pose[:3, :3]) <= np.array(thing.size) / 2).all(axis=1)
            length, width, height = thing.size
            token = self.tables.add(
                "sample_annotation", self.name, index, frame, sample_token=sample,
                instance_token=self.tables.token("instance", self.name, index),
                visibility_token=visibility_token(sweep.visible[index]),
                attribute_tokens=[self.tables.token("attribute", thing.attribute)] if thing.attribute else [],
                translation=centre.tolist(), size=[width, length, height], rotation=wxyz(pose[:3, :3]),
                num_lidar_pts=int(inside.sum()), num_radar_pts=0,
            )  # fmt: skip
            annotations.append((index, token))
            if inside.any() and (known := node(thing.category, thing.attribute, (centre - ego[:3, 3]) @ ego[:3, :3])):
                nodes.append(known)
        return nodes

    def _add_instances(self, annotations: Sequence[tuple[int, str]]) -> None:
        """One for each thing that was annotated, and the links of its annotations."""
        for index, thing in enumerate(self.drive.things):
            tokens = [token for thing_index, token in annotations if thing_index == index]
            if tokens:
                self.tables.chain(tokens)
                self.tables.add(
                    "instance", self.name, index, category_token=self.tables.token("category", thing.category),
                    nbr_annotations=len(tokens), first_annotation_token=tokens[0], last_annotation_token=tokens[-1],
                )  # fmt: skip

    def _add_images(self, samples: Sequence[str], size: tuple[int, int]) -> list[_Shot]:
        """Records of every camera's image of each key frame, taken a little before the LiDAR's time."""
        shots = []
        for sensor in self.drive.sensors[1:]:
            tokens = []
            for frame, sample in enumerate(samples):
                time_us = self.times[frame * _SWEEPS] - sensor.early_us
                row = self._add_data(sensor, frame, sample, time_us, True, size)
                shots.append(_Shot(sensor, self._seconds(time_us), row["filename"], size))
                tokens.append(row["token"])
            self.tables.chain(tokens)
        return shots

    def _draw(self, shots: Sequence[_Shot]) -> None:
        """Write images and masks; touches no table."""
        drive = self.drive
        still = Mesh.join([
            lit(drive.street.mesh, drive.sun), shadows([(s, np.eye(4)) for s in drive.street.furniture], drive.sun)
        ])  # fmt: skip
        shapes = [Mesh.of([*thing.solids, *thing.trim]) for thing in drive.things]
        for shot in shots:
            pose, camera = drive.ego_in_street(shot.time_s) @ shot.sensor.to_ego, shot.sensor.intrinsic
            lit_scene = Mesh.join([still, *_moving(drive.things, shapes, shot.time_s, drive.sun)])
            rgb = self.camera.draw(lit_scene, pose, camera, shot.size)
            jpeg = cv2.imencode(".jpg", rgb[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])[1]
            _parent(self.out / shot.filename).write_bytes(jpeg.tobytes())
            numbered = Mesh.join([_plain(drive.street.mesh, 0), *_numbered(drive.things, shapes, shot.time_s)])
            number = self.camera.draw(numbered, pose, camera, shot.size, oversampling=1)[..., 0]
            _write_masks(self.out / "masks" / f"{Path(shot.filename).stem}.npz", drive.things, number)


def _moving(things: Sequence[Thing], shapes: Sequence[Mesh], time_s: float, sun: np.ndarray) -> list[Mesh]:
    """Traffic at a time, with its shadows."""
    poses = [thing.pose(time_s) for thing in things]
    dark = shadows([(s, pose) for thing, pose in zip(things, poses, strict=True) for s in thing.solids], sun)
    return [*[lit(shape.moved(pose), sun) for shape, pose in zip(shapes, poses, strict=True)], dark]


def _numbered(things: Sequence[Thing], shapes: Sequence[Mesh], time_s: float) -> list[Mesh]:
    """Traffic at a time, each thing in the red of its index + 1."""
    return [_plain(s.moved(t.pose(time_s)), i) for i, (t, s) in enumerate(zip(things, shapes, strict=True), 1)]


def _plain(mesh: Mesh, red: int) -> Mesh:
    """The mesh in one colour."""
    return Mesh(mesh.xyz, mesh.normal, np.tile(np.array([red, 0, 0], np.uint8), (len(mesh.xyz), 1)), mesh.faces)


def _write_masks(path: Path, things: Sequence[Thing], number: np.ndarray) -> None:
    """Instance masks of one image, as a segmenter would leave them (extractors/masks.py): the ten classes, score 1.

    Args:
        path: the file.
        things: what there is.
        number: (height, width) uint8, index + 1 of the thing that a pixel shows, 0 for none.
    """
    pixels = np.bincount(number.ravel(), minlength=len(things) + 1)
    seen = [i for i, t in enumerate(things) if t.category in CLASSES and pixels[i + 1] >= _FEWEST_PIXELS]
    names = np.array([CLASSES[things[i].category] for i in seen], "U32")
    masks = number == np.array(seen, np.uint8).reshape(-1, 1, 1) + 1
    np.savez_compressed(_parent(path), names=names, scores=np.ones(len(seen), np.float32), masks=masks)


def _write_map(out: Path, tables: Tables, drives: Sequence[Drive]) -> None:
    """The mask of what can be driven on, white; the picture's last row is at global y = 0."""
    columns, rows = (round(BLOCK / _MAP_CELL) * n for n in (min(len(drives), 5), (len(drives) + 4) // 5))
    mask = np.zeros((rows, columns), np.uint8)
    for drive in drives:
        for corners in drivable():
            x, y = (corners @ drive.to_global[:2, :2].T + drive.to_global[:2, 3]).T
            pixels = np.column_stack([x / _MAP_CELL, rows - y / _MAP_CELL])
            cv2.fillConvexPoly(mask, np.rint(pixels).astype(np.int32), [255])
    name = f"maps/{tables.token('map', _LOCATION)}.png"
    _parent(out / name).write_bytes(cv2.imencode(".png", mask)[1].tobytes())
    logs = [row["token"] for row in tables.rows["log"]]
    tables.add("map", _LOCATION, category="semantic_prior", filename=name, log_tokens=logs)


def _parent(path: Path) -> Path:
    """The path, after its folder was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

"""nuScenes: official tables of any version, or info pickles of mmdetection3d (docs/nuscenes.md draws the folders)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.errors import EmptyInput, InputError, InvalidValues, MissingFile, UnsupportedFile
from extractors.fetch import cache_folder
from extractors.inputs import Annotations, Camera, Cameras, Foreground, LidarScan, LidarSweeps, MaskFiles
from pipelines.sources import nuscenes_infos, nuscenes_tables
from pipelines.sources.nuscenes_index import CAMERAS, LIDAR, MAX_SWEEPS, Index, class_of, open_index
from pipelines.sources.nuscenes_splits import SPLITS, scenes_of
from pipelines.sources.points import read_lidar
from pipelines.sources.rigid import compose, homogeneous, is_rigid

_FOREGROUND = "FOREGROUND_MIXED_6NN_WITH_DEPTH"


@dataclass(frozen=True)
class NuScenes:
    """Key frames of nuScenes; the item key is the sample token.

    Offers `lidar` (the LIDAR_TOP scan and the sweeps before it), `cameras` (six images with calibration), `annotations`
    (boxes, where the split has them), `foreground` (MSMDFusion's virtual points, where they were made) and `masks`
    (instance masks of the images, in a folder of the user's).

    Attributes:
        root: the folder that holds `samples/`, `sweeps/` and the tables' folder (or the files themselves).
        version: the tables' folder, `v1.0-mini`, or an info pickle, by its path or its name in `root`. `auto` takes
            what is there, tables before pickles.
        split: `all`, or `train`, `val`, `test`, `mini_train`, `mini_val`, or a path of a text file of scene names.
            Scenes of the split that the tables lack are left out.
        scenes: only these, by name.
        samples: only these, by sample token.
        sweeps: how many earlier sweeps `lidar` has at most, 0 to 10.
        missing_sweeps: a sweep that is named but not on disk: `skip` leaves it out and counts it, `raise` fails the
            item.
        masks: folder with one `.npz` for each camera image, named as the image (`extractors.masks` has the format).
    """

    root: Path
    version: str = "auto"
    split: str = "all"
    scenes: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    sweeps: int = MAX_SWEEPS
    missing_sweeps: Literal["skip", "raise"] = "skip"
    masks: Path | None = None

    name: ClassVar[str] = "nuscenes"
    kinds: ClassVar[tuple[str, ...]] = ("lidar", "cameras", "annotations", "foreground", "masks")

    def __post_init__(self) -> None:
        if not 0 <= self.sweeps <= MAX_SWEEPS:
            raise ValueError(f"sweeps is {self.sweeps}, expected 0 to {MAX_SWEEPS}")

    def __reduce__(self) -> tuple[Any, ...]:
        # travels to workers without the index, which they map from the cache folder
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def dialect(self) -> str:
        """What the items come from: `official tables v1.0-mini`, `mmdetection3d infos 1.1, boxes as in ...`."""
        return self._index.dialect

    def keys(self) -> list[str]:
        """Sample tokens, sorted.

        Raises:
            MissingFile: no tables, no such split, or a scene or sample that they do not have.
            EmptyInput: tables without samples.
        """
        if not self._index.row:
            raise EmptyInput(f"{self._place}: no samples; get it again")
        for token in self.samples:
            self._known(token)
        keys = sorted(set(self.samples)) or list(self._index.row)
        if self.split == "all" and not self.scenes:
            return keys
        scenes = dict(zip(self._index.row, self._index.scenes(), strict=True))
        there = set(scenes.values()) - {""}
        if not there:
            raise UnsupportedFile(
                f"{self._place}: {self.dialect} do not name scenes; leave out source.split and source.scenes, and "
                "choose the file by source.version"
            )
        if strange := sorted(set(self.scenes) - there):
            raise MissingFile(
                f"{self._place}: no scene {strange[0]!r}; it has {len(there)}, {min(there)} to {max(there)}"
            )
        wanted = set(self.scenes) or there
        if self.split != "all":
            wanted &= self._listed()
        keys = [key for key in keys if scenes[key] in wanted]
        if not keys:
            raise MissingFile(f"{self._place}: no samples of split {self.split} among what was asked for")
        return keys

    def files(self, key: str, kind: str) -> list[Path]:
        """Sensor files: of `lidar` the key frame's and then the sweeps', nearest first, of `cameras` the six images."""
        self._known(key)
        match kind:
            case "lidar":
                return self._paths(self._index.rows("lidar", key, 1 + self.sweeps).text("file"))
            case "cameras":
                return self._paths(self._index.rows("camera", key).text("file"))
            case "foreground":
                return [_foreground(path) for path in self.files(key, "lidar")] if self._has_foreground else []
            case "masks":
                return list(self._masks(key).values())
            case "annotations":
                return []
        raise ValueError(f"source nuscenes has no {kind!r}; it offers {', '.join(self.kinds)}")

    def facts(self, key: str, kind: str) -> bytes:
        """Poses, times, calibration or boxes of one item."""
        self._known(key)
        sample = self._index.rows("sample", key)
        match kind:
            case "lidar":
                rows = self._index.rows("lidar", key, 1 + self.sweeps)
                refused = self.missing_sweeps == "raise" and not all(p.is_file() for p in self.files(key, kind))
                text = [*sample.text("fault"), *["raise"] * refused]
                return _canonical(text, sample.numbers("to_ego"), *map(rows.numbers, ("lag", "to_key")))
            case "cameras":
                rows = self._index.rows("camera", key)
                numbers = map(rows.numbers, ("channel", "to_lidar", "intrinsic"))
                return _canonical(sample.text("fault"), sample.numbers("to_ego"), *numbers)
            case "annotations" if self._index.annotated:
                found = self._annotations(key)
                text = [self._index.box_fault, *found.names, *found.categories, *found.attributes, *found.tokens]
                return _canonical(text, found.boxes, found.velocity, found.lidar_points, found.radar_points)
        return b""

    def open(self, key: str, kind: str) -> LidarSweeps | Cameras | Annotations | Foreground | MaskFiles:
        """Read one input of a key frame; see `Source.open`."""
        self._known(key)
        match kind:
            case "lidar":
                return self._lidar(key)
            case "cameras":
                return self._cameras(key)
            case "foreground":
                return self._virtual_points(key)
            case "masks":
                return MaskFiles({name: path for name, path in self._masks(key).items() if path.is_file()})
            case "annotations":
                if not self._index.annotated:
                    raise MissingFile(f"{self._place}: {self.dialect} have no annotations (the test split has none)")
                if self._index.box_fault:
                    raise UnsupportedFile(f"sample {key}: {self._place}: {self._index.box_fault}")
                pose = self._index.rows("lidar", key, 1).transforms("to_key")
                if not (len(pose) and is_rigid(pose)):  # boxes went through it
                    self._to_ego(key)  # which may know more
                    raise InvalidValues(self._no_motion(key))
                return self._annotations(key)
        raise ValueError(f"source nuscenes has no {kind!r}; it offers {', '.join(self.kinds)}")

    def _lidar(self, key: str) -> LidarSweeps:
        rows = self._index.rows("lidar", key, 1 + self.sweeps)
        paths, to_key = self._paths(rows.text("file")), rows.transforms("to_key")
        to_ego = self._to_ego(key)
        if not is_rigid(to_key):
            raise InvalidValues(self._no_motion(key))
        here = [path.is_file() for path in paths]
        if not here[0]:
            raise MissingFile(f"sample {key}: LIDAR_TOP: {paths[0]}: no such file; get the archive that holds it")
        if self.missing_sweeps == "raise" and not all(here):
            path = paths[here.index(False)]
            raise MissingFile(
                f"sample {key}: LIDAR_TOP: {len(here) - sum(here)} of {len(here) - 1} sweeps are not there, such as "
                f"{path}; get the archives that hold them, or set source.missing_sweeps=skip"
            )
        lags = rows.numbers("lag") / 1e6
        try:
            first, *before = (
                LidarScan(read_lidar(path), homogeneous(pose), float(lag))
                for path, pose, lag, there in zip(paths, to_key, lags, here, strict=True)
                if there
            )
        except InputError as error:
            raise type(error)(f"sample {key}: LIDAR_TOP: {error}") from error
        return LidarSweeps(first, tuple(before), len(here) - sum(here), homogeneous(to_ego))

    def _cameras(self, key: str) -> Cameras:
        rows = self._index.rows("camera", key)
        names = [CAMERAS[code] for code in rows.numbers("channel")]
        paths, to_lidar = self._paths(rows.text("file")), rows.transforms("to_lidar")
        intrinsic = rows.numbers("intrinsic").reshape(-1, 3, 3)
        to_ego = self._to_ego(key)
        if unnamed := [name for name in CAMERAS if names.count(name) != 1]:
            raise MissingFile(
                f"sample {key}: {self.dialect} do not name one image of {', '.join(unnamed)}; get them again"
            )
        lacking = [f"{name}: {path}" for name, path in zip(names, paths, strict=True) if not path.is_file()]
        if lacking:
            raise MissingFile(f"sample {key}: no such file: {'; '.join(lacking)}; get the archive that holds it")
        views = []
        for name, path, pose, matrix in zip(names, paths, to_lidar, intrinsic, strict=True):
            if not is_rigid(pose):
                raise InvalidValues(
                    f"sample {key}: {name}: pose and calibration are no rotation and translation; mend {self._place}"
                )
            if not (
                np.isfinite(matrix).all() and matrix[0, 0] > 0 and matrix[1, 1] > 0 and (matrix[2] == [0, 0, 1]).all()
            ):
                raise InvalidValues(f"sample {key}: {name}: {matrix.tolist()} is no camera matrix; mend {self._place}")
            views.append(Camera(name, path, matrix.copy(), homogeneous(pose), homogeneous(compose(to_ego, pose))))
        return Cameras(tuple(views))

    def _annotations(self, key: str) -> Annotations:
        rows = self._index.rows("object", key)
        categories = [self._index.categories[code] for code in rows.numbers("category")]
        return Annotations(
            boxes=rows.numbers("box").copy(),
            velocity=rows.numbers("velocity").copy(),
            names=tuple(map(class_of, categories)),
            categories=tuple(categories),
            attributes=tuple(self._index.attributes[code] for code in rows.numbers("attribute")),
            lidar_points=rows.numbers("lidar_points").astype(np.int64),
            radar_points=rows.numbers("radar_points").astype(np.int64),
            tokens=tuple(rows.text("token")),
        )

    def _virtual_points(self, key: str) -> Foreground:
        scans = self.files(key, "lidar")
        files = [_foreground(path) for path in scans]
        if not files or not files[0].is_file():
            wanted = files[0] if files else self.root / "samples" / _FOREGROUND
            raise MissingFile(f"sample {key}: {wanted}: no such file; make virtual points first (docs/nuscenes.md)")
        files = [file for scan, file in zip(scans, files, strict=True) if scan is scans[0] or scan.is_file()]
        there = tuple(file if file.is_file() else None for file in files)
        return Foreground(there, tuple(file for file in files if file not in there))

    def _masks(self, key: str) -> dict[str, Path]:
        """Camera -> where the masks of its image are looked for; empty where no folder is given."""
        rows = self._index.rows("camera", key)
        names = [CAMERAS[code] for code in rows.numbers("channel")]
        images = map(Path, rows.text("file"))
        folder = self.masks
        return {n: folder / f"{path.stem}.npz" for n, path in zip(names, images, strict=True)} if folder else {}

    def _to_ego(self, key: str) -> np.ndarray:
        """(3, 4) LIDAR_TOP -> ego of the key frame, checked."""
        sample = self._index.rows("sample", key)
        if fault := sample.text("fault")[0]:
            raise UnsupportedFile(f"sample {key}: {self._place}: {fault}")
        pose: np.ndarray = sample.transforms("to_ego")[0]
        if not is_rigid(pose):
            raise InvalidValues(
                f"sample {key}: LIDAR_TOP: the calibration is no rotation and translation; mend {self._place}"
            )
        return pose

    def _no_motion(self, key: str) -> str:
        return f"sample {key}: LIDAR_TOP: a pose or calibration is no rotation and translation; mend {self._place}"

    def _known(self, token: str) -> None:
        if token not in self._index.row:
            what = self._index.whereabouts(token)
            raise MissingFile(
                f"{self._place}: {token!r} is {f'{what}; items go by sample tokens' if what else 'no sample token'}"
            )

    def _paths(self, names: list[str]) -> list[Path]:
        if self._flat:
            names = [name.rpartition("/")[2] for name in names]
        return [self.root / name for name in names]

    def _listed(self) -> set[str]:
        if self.split in SPLITS:
            return scenes_of(self.split)
        path = Path(self.split)
        if not path.is_file():
            raise MissingFile(f"no split {self.split!r}: give one of {', '.join(SPLITS)}, or a file of scene names")
        return set(path.read_text().split())

    @cached_property
    def _flat(self) -> bool:
        """Sensor files lie in `root` itself."""
        return not (self.root / "samples").is_dir()

    @cached_property
    def _has_foreground(self) -> bool:
        if self._flat:
            return any(self.root.glob("*.pcd.bin.pkl.npy"))
        return (self.root / "samples" / _FOREGROUND).is_dir()

    @cached_property
    def _place(self) -> Path:
        """The folder of tables or the pickle that is read."""
        if not self.root.is_dir():
            raise MissingFile(f"{self.root}: no such folder; source.root is the folder that holds nuScenes' samples/")
        if self.version != "auto":
            places = [Path(self.version), self.root / self.version]
            place = next((p for p in places if p.is_file() or (p / "sample_data.json").is_file()), None)
            if place is None:
                there = [path.name for path in (*self._tables, *self._pickles)]
                raise MissingFile(
                    f"{self.root}: no tables or info pickle {self.version!r}; it has {', '.join(there) or 'none'}"
                )
            return place
        found = self._tables or self._pickles
        if not found:
            above = (self.root / "sample_data.json").is_file()
            hint = "; source.root is the folder above, that of samples/" if above else ""
            raise MissingFile(f"{self.root}: neither tables (v1.0-*/sample_data.json) nor an info pickle (*.pkl){hint}")
        if len(found) > 1:
            raise MissingFile(
                f"{self.root}: has {', '.join(path.name for path in found)}; choose one: source.version={found[0].name}"
            )
        return found[0]

    @property
    def _tables(self) -> list[Path]:
        return sorted(path.parent for path in self.root.glob("*/sample_data.json"))

    @property
    def _pickles(self) -> list[Path]:
        return sorted(self.root.glob("*.pkl"))

    @cached_property
    def _index(self) -> Index:
        place, folder = self._place, cache_folder() / "nuscenes"
        if place.is_file():
            return open_index([place], lambda: nuscenes_infos.build(place), folder)
        tables = [place / f"{table}.json" for table in nuscenes_tables.TABLES]
        return open_index(tables, lambda: nuscenes_tables.build(place), folder)


def _foreground(scan: Path) -> Path:
    """Where MSMDFusion's preprocessing puts the virtual points of a scan."""
    folder = scan.parent.with_name(_FOREGROUND) if scan.parent.name == LIDAR else scan.parent
    return folder / f"{scan.name}.pkl.npy"


def _canonical(text: Iterable[str], *numbers: np.ndarray) -> bytes:
    """Bytes that differ where the values do."""
    parts = ["\0".join(text).encode(), *(f"{n.dtype.str}{n.shape}".encode() + n.tobytes() for n in numbers)]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

"""Build an index from the official tables of nuScenes, of any version, in bounded memory.

`sample_data.json`, `ego_pose.json` and `sample_annotation.json` have up to 2.6 million records each; they are read
in pieces by Arrow's JSON parser, and of the first two only rows of LIDAR_TOP and of the cameras' key frames are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from extractors.boxes3d import wrap
from extractors.errors import EmptyInput, MissingFile, TruncatedFile, UnsupportedFile
from pipelines.sources.json_file import read_json
from pipelines.sources.nuscenes_index import CAMERAS, LIDAR, MAX_SWEEPS, SCHEMAS, make_tables
from pipelines.sources.rigid import IDENTITY, compose, from_quaternion, invert

TABLES = (
    "attribute", "calibrated_sensor", "category", "ego_pose", "instance",
    "sample", "sample_annotation", "sample_data", "scene", "sensor",
)  # fmt: skip
"""The tables that are read; `log`, `map` and `visibility` are not needed."""

_HINT = "download the metadata again"
_PIECE = 1 << 24  # bytes parsed at a time
_AHEAD = 2  # pieces that are parsed while one is used
_MAX_GAP_US = 1_500_000  # between annotations, for a velocity (nuscenes-devkit, box_velocity)

# fields read of the large tables: an Arrow type, or how many numbers a vector has
_SAMPLE_DATA = {
    **dict.fromkeys(("token", "sample_token", "ego_pose_token", "calibrated_sensor_token"), pa.string()),
    "timestamp": pa.int64(),
    "is_key_frame": pa.bool_(),
    "filename": pa.string(),
    "prev": pa.string(),
}
_EGO_POSE = {"token": pa.string(), "rotation": 4, "translation": 3}
_ANNOTATION = {
    **dict.fromkeys(("token", "sample_token", "instance_token", "prev", "next"), pa.string()),
    "attribute_tokens": pa.list_(pa.string()),
    "translation": 3,
    "size": 3,
    "rotation": 4,
    "num_lidar_pts": pa.int32(),
    "num_radar_pts": pa.int32(),
}
_KEPT = ("token", "prev", "next", "sample", "translation", "category", "attribute", "num_lidar_pts", "num_radar_pts")


def build(folder: Path) -> dict[str, pa.Table]:
    """Read the tables of one version, `v1.0-mini` ...

    Raises:
        MissingFile, EmptyInput, TruncatedFile, UnsupportedFile: of the table that is named.
    """
    samples = _Samples(folder)
    calibration = _Calibration(folder)
    shots = _shots(folder, samples, calibration)
    to_global = compose(_poses(folder, shots["ego_pose_token"]), calibration.to_ego[shots["calibration"]])

    is_lidar = shots["channel"] == -1
    key_shot = np.full(len(samples.tokens), -1)
    chosen = np.flatnonzero(is_lidar & shots["is_key_frame"])
    key_shot[shots["sample"][chosen]] = chosen
    known = key_shot >= 0
    to_key = np.full((len(key_shot), 3, 4), np.nan)  # global -> LIDAR_TOP at the key frame
    to_key[known] = invert(to_global[key_shot[known]])
    to_ego = np.full_like(to_key, np.nan)
    to_ego[known] = calibration.to_ego[shots["calibration"][key_shot[known]]]

    cameras = np.flatnonzero(~is_lidar)
    cameras = cameras[np.lexsort((shots["channel"][cameras], shots["sample"][cameras]))]
    sample = shots["sample"][cameras]
    columns: dict[str, dict[str, Any]] = {
        "sample": {
            "token": samples.tokens,
            "scene": samples.scenes,
            "to_ego": to_ego,
            "fault": np.where(known, "", f"the tables have no key frame of {LIDAR}").astype(object),
        },
        "lidar": _lidar(shots, key_shot, to_global, to_key),
        "camera": {
            "sample": sample,
            "token": shots["token"].take(cameras),
            "file": shots["filename"].take(cameras),
            "channel": shots["channel"][cameras],
            "to_lidar": compose(to_key[sample], to_global[cameras]),
            "intrinsic": calibration.intrinsic[shots["calibration"][cameras]],
        },
    }
    columns["object"], categories, attributes = _objects(folder, samples, to_key)
    annotated = len(columns["object"]["sample"]) > 0
    return make_tables(columns, f"official tables {folder.name}", categories, attributes, annotated)


class _Samples:
    """Samples, sorted by token."""

    def __init__(self, folder: Path) -> None:
        scenes = {scene["token"]: scene["name"] for scene in _records(folder, "scene", "token", "name")}
        records = _records(folder, "sample", "token", "timestamp", "scene_token")
        records.sort(key=lambda record: record["token"])
        if twice := [a["token"] for a, b in pairwise(records) if a["token"] == b["token"]]:
            raise UnsupportedFile(f"{folder}/sample.json: token {twice[0]} is there twice; {_HINT}")
        self.tokens = pa.array([record["token"] for record in records], pa.string())
        self.scenes = [scenes.get(record["scene_token"], "") for record in records]
        self.times = np.array([record["timestamp"] for record in records], np.int64)


class _Calibration:
    """Calibrations of LIDAR_TOP and the cameras.

    Attributes:
        tokens: of calibrated_sensor.
        channel: index into CAMERAS, -1 for LIDAR_TOP.
        to_ego: (n, 3, 4). intrinsic: (n, 9), NaN for LIDAR_TOP.
    """

    def __init__(self, folder: Path) -> None:
        channels = {r["token"]: r["channel"] for r in _records(folder, "sensor", "token", "channel")}
        fields = ("token", "sensor_token", "translation", "rotation", "camera_intrinsic")
        codes = {LIDAR: -1, **{name: i for i, name in enumerate(CAMERAS)}}
        records = [
            r for r in _records(folder, "calibrated_sensor", *fields) if channels.get(r["sensor_token"]) in codes
        ]
        self.tokens = pa.array([r["token"] for r in records], pa.string())
        self.channel = np.array([codes[channels[r["sensor_token"]]] for r in records], np.int8)
        self.to_ego = np.empty((len(records), 3, 4))
        self.intrinsic = np.full((len(records), 9), np.nan)
        for i, record in enumerate(records):
            try:
                self.to_ego[i] = from_quaternion(record["translation"], record["rotation"])
                if record["camera_intrinsic"]:
                    self.intrinsic[i] = np.array(record["camera_intrinsic"], np.float64).reshape(9)
            except (ValueError, TypeError) as error:
                raise UnsupportedFile(
                    f"{folder}/calibrated_sensor.json: record {record['token']}: {error}; {_HINT}"
                ) from error


def _shots(folder: Path, samples: _Samples, calibration: _Calibration) -> dict[str, Any]:
    """Rows of sample_data: all of LIDAR_TOP, and the cameras' key frames."""
    parts = []
    for piece in _pieces(folder, "sample_data", _SAMPLE_DATA):
        row = _find(piece["calibrated_sensor_token"], calibration.tokens)
        channel = np.append(calibration.channel, -2)[row].astype(np.int8)
        sample = _find(piece["sample_token"], samples.tokens)
        is_key = piece["is_key_frame"] & (sample >= 0)
        kept = {name: piece[name] for name in ("token", "ego_pose_token", "filename", "prev", "timestamp")}
        kept |= {"calibration": row, "channel": channel, "sample": sample, "is_key_frame": is_key}
        parts.append(_take(kept, np.flatnonzero((channel == -1) | ((channel >= 0) & is_key))))
    if not parts:
        raise UnsupportedFile(f"{folder}/sample_data.json: no records")
    return _joined(parts)


def _poses(folder: Path, tokens: pa.Array) -> np.ndarray:
    """(n, 3, 4) ego -> global of each token of ego_pose; NaN where the table lacks it."""
    wanted = tokens.unique()
    poses = np.full((len(wanted), 3, 4), np.nan)
    for piece in _pieces(folder, "ego_pose", _EGO_POSE):
        row = _find(piece["token"], wanted)
        keep = row >= 0
        poses[row[keep]] = from_quaternion(piece["translation"][keep], piece["rotation"][keep])
    return poses[_find(tokens, wanted)]


def _lidar(shots: dict[str, Any], key_shot: np.ndarray, to_global: np.ndarray, to_key: np.ndarray) -> dict[str, Any]:
    """Key frame and earlier sweeps of each sample, by walking `prev`."""
    earlier = np.where(shots["channel"] == -1, _find(shots["prev"], shots["token"]), -1)
    earlier = np.append(earlier, -1)  # [-1]: nothing is before nothing
    walk = np.empty((len(key_shot), 1 + MAX_SWEEPS), np.int64)
    walk[:, 0] = key_shot
    for back in range(MAX_SWEEPS):
        walk[:, back + 1] = earlier[walk[:, back]]
    sample, step = np.nonzero(walk >= 0)
    rows = walk[sample, step]
    placed = compose(to_key[sample], to_global[rows])
    at_key = (step == 0) & np.isfinite(placed).all((1, 2))
    placed[at_key] = IDENTITY
    return {
        "sample": sample,
        "token": shots["token"].take(rows),
        "file": shots["filename"].take(rows),
        "lag": shots["timestamp"][key_shot[sample]] - shots["timestamp"][rows],
        "to_key": placed,
    }


def _objects(folder: Path, samples: _Samples, to_key: np.ndarray) -> tuple[dict[str, Any], list[str], list[str]]:
    """Annotated boxes in the LIDAR_TOP frame (none in the test split), and names of categories and attributes."""
    categories = {r["token"]: r["name"] for r in _records(folder, "category", "token", "name", optional=True)}
    attributes = {r["token"]: r["name"] for r in _records(folder, "attribute", "token", "name", optional=True)}
    instances = _records(folder, "instance", "token", "category_token", optional=True)
    code = {token: i for i, token in enumerate(categories)}
    category = np.array([code.get(r["category_token"], len(code)) for r in instances] + [len(code)], np.int16)
    instance_tokens = pa.array([r["token"] for r in instances], pa.string())
    attribute_tokens = pa.array(list(attributes), pa.string())

    parts = []
    for piece in _pieces(folder, "sample_annotation", _ANNOTATION, optional=True):
        kept = {"sample": _find(piece["sample_token"], samples.tokens), **piece}
        kept["category"] = category[_find(piece["instance_token"], instance_tokens)]
        kept["attribute"] = _first_of(piece["attribute_tokens"], attribute_tokens) + 1
        rows = np.flatnonzero(kept["sample"] >= 0)
        part = _take({name: kept[name] for name in _KEPT}, rows)
        placed = compose(to_key[part["sample"]], from_quaternion(part["translation"], piece["rotation"][rows]))
        part["box"] = np.column_stack([placed[:, :, 3], piece["size"][rows][:, [1, 0, 2]], _yaw(placed)])
        parts.append(part)
    names = [*categories.values(), ""], ["", *attributes.values()]
    if not parts:
        return {column: [] for column in SCHEMAS["object"].names}, *names
    found = _joined(parts)
    found["velocity"] = _velocity(found, samples.times[found["sample"]], to_key)
    found = _take(found, np.argsort(found["sample"], kind="stable"))
    found["lidar_points"], found["radar_points"] = found["num_lidar_pts"], found["num_radar_pts"]
    return found, *names


def _yaw(placed: np.ndarray) -> np.ndarray:
    """Yaw of (n, 3, 4) boxes as pyquaternion's yaw_pitch_roll and so mmdetection3d have it, radians.

    Rounded, since the last bit of arctan2 differs between machines and boxes count in fingerprints.
    """
    return wrap(np.round(np.arctan2(-placed[:, 0, 1], placed[:, 0, 0]), 9))


def _velocity(found: dict[str, Any], times: np.ndarray, to_key: np.ndarray) -> np.ndarray:
    """(n, 2) m/s in the LIDAR_TOP frame between the neighbours in time; NaN where there are none or too far apart.

    As nuscenes-devkit's box_velocity; the vertical part is dropped before turning, as mmdetection3d does.
    """
    before, after = _find(found["prev"], found["token"]), _find(found["next"], found["token"])
    here = np.arange(len(before))
    first, last = np.where(before >= 0, before, here), np.where(after >= 0, after, here)
    gap = times[last] - times[first]
    limit = _MAX_GAP_US * (1 + ((before >= 0) & (after >= 0)))
    seconds = np.where((gap > 0) & (gap <= limit), gap, np.nan) / 1e6
    velocity = (found["translation"][last, :2] - found["translation"][first, :2]) / seconds[:, None]
    turn = to_key[:, :2, :2][found["sample"]]
    return turn[:, :, 0] * velocity[:, :1] + turn[:, :, 1] * velocity[:, 1:]


def _first_of(lists: pa.ListArray, known: pa.Array) -> np.ndarray:
    """Position in `known` of each list's first entry, -1 where there is none."""
    codes = np.append(_find(lists.values, known), -1)
    starts, ends = lists.offsets.to_numpy()[:-1], lists.offsets.to_numpy()[1:]
    return codes[np.where(ends > starts, starts, -1)]


def _find(tokens: pa.Array, known: pa.Array) -> np.ndarray:
    """(n,) int64 position of each token in `known`, -1 where it is not there."""
    return pc.index_in(tokens, known).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _take(columns: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    return {
        name: column.take(rows, **({"axis": 0} if isinstance(column, np.ndarray) else {}))
        for name, column in columns.items()
    }


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in list(parts[0]):
        columns = [part.pop(name) for part in parts]  # freed as it goes
        joined[name] = np.concatenate(columns) if isinstance(columns[0], np.ndarray) else pa.concat_arrays(columns)
    return joined


def _records(folder: Path, table: str, *fields: str, optional: bool = False) -> list[dict[str, Any]]:
    """A small table."""
    path = folder / f"{table}.json"
    if optional and not path.is_file():
        return []
    records = read_json(path, _HINT)
    if not isinstance(records, list):
        raise UnsupportedFile(f"{path}: no list of records; {_HINT}")
    for record in records:
        if lacking := [field for field in fields if field not in record]:
            raise UnsupportedFile(f"{path}: a record has no {lacking[0]!r}: {str(record)[:200]}")
    return records


def _pieces(
    folder: Path, table: str, fields: Mapping[str, pa.DataType | int], optional: bool = False
) -> Iterator[dict[str, Any]]:
    """Read a large table piece by piece: field -> Arrow array of text, numpy array of numbers, (n, k) of vectors."""
    path = folder / f"{table}.json"
    if not path.is_file():
        if optional:
            return
        raise MissingFile(f"{path}: no such file; {_HINT}")
    with ThreadPoolExecutor(_AHEAD) as pool:  # Arrow parses outside of the interpreter's lock
        pending: deque[Future[dict[str, Any]]] = deque()
        for text in _texts(path):
            pending.append(pool.submit(_parsed, path, text, fields))
            if len(pending) > _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _texts(path: Path) -> Iterator[bytes]:
    """Pieces of a list of records, each a JSON document `{"records": [...]}` of whole records."""
    rest, started = b"", False  # what is behind the last whole record
    with path.open("rb") as file:
        while block := file.read(_PIECE):
            if not started and (head := (rest + block).lstrip()):
                if not head.startswith(b"["):
                    raise UnsupportedFile(f"{path}: no list of records; {_HINT}")
                started = True
            end = block.rfind(b"}") + 1  # records hold no objects, so this is the end of one
            if end:
                first = rest.find(b"{")
                start = 0 if first >= 0 else block.find(b"{")
                parts = (b'{"records":[', rest[first:] if first >= 0 else b"", memoryview(block)[start:end], b"]}")
                rest = b""
                yield b"".join(parts)
            rest += block[end:]
    if not started:
        raise EmptyInput(f"{path}: empty; {_HINT}")
    if rest.strip(b"[ \r\n\t") != b"]":
        raise TruncatedFile(f"{path}: ends within the list of records; {_HINT}")


def _parsed(path: Path, text: bytes, fields: Mapping[str, pa.DataType | int]) -> dict[str, Any]:
    record = pa.struct({n: pa.list_(pa.float64()) if isinstance(t, int) else t for n, t in fields.items()})
    options = pj.ParseOptions(
        explicit_schema=pa.schema({"records": pa.list_(record)}),
        newlines_in_values=True,
        unexpected_field_behavior="ignore",
    )
    try:
        read = pj.read_json(pa.BufferReader(text), pj.ReadOptions(use_threads=False, block_size=len(text) + 1), options)
    except pa.ArrowInvalid as error:
        raise UnsupportedFile(f"{path}: {error}; {_HINT}") from error
    records = read["records"].chunk(0).values
    columns: dict[str, Any] = {}
    for name, kind in fields.items():
        column = records.field(name)
        if records.null_count or column.null_count:
            raise UnsupportedFile(f"{path}: {column.null_count} records have no {name!r}; {_HINT}")
        if isinstance(kind, int):
            numbers = column.flatten().to_numpy(zero_copy_only=False)
            if len(numbers) != kind * len(column) or (np.diff(column.offsets) != kind).any():
                raise UnsupportedFile(f"{path}: a {name} has other than {kind} numbers; {_HINT}")
            columns[name] = numbers.reshape(-1, kind)
        else:
            text_like = pa.types.is_string(kind) or pa.types.is_list(kind)
            columns[name] = column if text_like else column.to_numpy(zero_copy_only=False)
    return columns

"""What the items of nuScenes take from its tables, in a form that opens at once.

An index is four Arrow tables, made from the official tables (`nuscenes_tables`) or from info pickles
(`nuscenes_infos`), kept in the user's cache folder and mapped into memory. Poses are resolved: a row says where a
file was taken relative to its key frame's LIDAR_TOP.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extractors.boxes3d import CLASSES
from pipelines.inputs import SETTLED_NS

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
LIDAR = "LIDAR_TOP"
MAX_SWEEPS = 10

CATEGORY_CLASSES = {
    **{f"human.pedestrian.{who}": "pedestrian" for who in ("adult", "child", "construction_worker", "police_officer")},
    **{f"vehicle.bus.{form}": "bus" for form in ("bendy", "rigid")},
    **{f"vehicle.{name}": name for name in ("car", "truck", "trailer", "motorcycle", "bicycle")},
    "vehicle.construction": "construction_vehicle",
    "movable_object.barrier": "barrier",
    "movable_object.trafficcone": "traffic_cone",
}
"""Category -> class of the detection task; the other categories are ignored by it."""

_FORMAT = 1  # raise it when the tables of an index change
_CONTENTS = "contents.json"  # digests of the files that had not settled when the index was built


def _matrix(count: int) -> pa.DataType:
    return pa.list_(pa.float64(), count)


SCHEMAS = {
    # sorted by token; the rows of the other tables are sorted by sample
    "sample": pa.schema({"token": pa.string(), "scene": pa.string(), "to_ego": _matrix(12), "fault": pa.string()}),
    # per sample the key frame, then at most MAX_SWEEPS earlier sweeps, nearest first
    "lidar": pa.schema(
        {"sample": pa.int32(), "token": pa.string(), "file": pa.string(), "lag": pa.int64(), "to_key": _matrix(12)}
    ),
    # per sample in the order of CAMERAS
    "camera": pa.schema(
        {
            "sample": pa.int32(),
            "token": pa.string(),
            "file": pa.string(),
            "channel": pa.int8(),
            "to_lidar": _matrix(12),
            "intrinsic": _matrix(9),
        }
    ),
    # per sample in the order of the tables; boxes as in `extractors.inputs.Annotations`
    "object": pa.schema(
        {
            "sample": pa.int32(),
            "token": pa.string(),
            "box": _matrix(7),
            "velocity": _matrix(2),
            "category": pa.int16(),
            "attribute": pa.int16(),
            "lidar_points": pa.int32(),
            "radar_points": pa.int32(),
        }
    ),
}


class Index:
    """An index in use.

    Args:
        tables: by the names of SCHEMAS; the metadata of `sample` holds `facts` as JSON.

    Attributes:
        dialect: what it was made from, in words.
        categories: by the code in `object`, `` for unknown.
        attributes: names by the code in `object`.
        annotated: objects are known (not so in the test split).
        box_fault: why boxes can't be used, `` where they can.
        row: sample token -> row of `sample`.
    """

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        facts = json.loads(tables["sample"].schema.metadata[b"facts"])
        self.dialect: str = facts["dialect"]
        self.categories: list[str] = facts["categories"]
        self.attributes: list[str] = facts["attributes"]
        self.annotated: bool = facts["annotated"]
        self.box_fault: str = facts["box_fault"]
        self.tables = tables
        self.row = {token: i for i, token in enumerate(tables["sample"]["token"].to_pylist())}

    def scenes(self) -> list[str]:
        """Scene names of the samples, in order; `` where not known."""
        names: list[str] = self.tables["sample"]["scene"].to_pylist()
        return names

    def rows(self, table: str, key: str, limit: int | None = None) -> Rows:
        """The rows of a sample, the first `limit` of them."""
        i = self.row[key]
        if table == "sample":
            return Rows(self._columns[table], i, i + 1)
        first, end = (int(row) for row in self._first[table][i : i + 2])
        return Rows(self._columns[table], first, end if limit is None else min(end, first + limit))

    def whereabouts(self, token: str) -> str | None:
        """Where a token that is no sample's occurs: `camera image CAM_FRONT of sample ...`."""
        for table in ("lidar", "camera", "object"):
            found = pc.index(self.tables[table]["token"], token).as_py()
            if token and found >= 0:
                sample = self.tables["sample"]["token"][self.tables[table]["sample"][found].as_py()].as_py()
                what = {"lidar": "sample_data (LIDAR_TOP)", "object": "sample_annotation"}.get(table)
                what = what or f"sample_data ({CAMERAS[self.tables[table]['channel'][found].as_py()]})"
                return f"a {what} of sample {sample}"
        return None

    @cached_property
    def _columns(self) -> dict[str, dict[str, Any]]:
        return {name: {c: _column(table[c]) for c in table.column_names} for name, table in self.tables.items()}

    @cached_property
    def _first(self) -> dict[str, np.ndarray]:
        """Table -> row at which each sample's rows begin, and the end of the last."""
        rows = np.arange(len(self.row) + 1)
        return {name: np.searchsorted(self._columns[name]["sample"], rows) for name in ("lidar", "camera", "object")}


class Rows:
    """Consecutive rows of a table of an index."""

    def __init__(self, columns: Mapping[str, Any], start: int, stop: int) -> None:
        self._columns, self._start, self._stop = columns, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def text(self, column: str) -> list[str]:
        """A column of strings."""
        values: list[str] = self._columns[column].slice(self._start, len(self)).to_pylist()
        return values

    def numbers(self, column: str) -> np.ndarray:
        """A column of numbers, (row, ...)."""
        values: np.ndarray = self._columns[column][self._start : self._stop]
        return values

    def transforms(self, column: str) -> np.ndarray:
        """A column of poses, (row, 3, 4) float64."""
        return self.numbers(column).reshape(-1, 3, 4)


def _column(column: pa.ChunkedArray) -> Any:
    """A view: numpy for numbers, Arrow for text."""
    chunks = column.chunks or [pa.array([], column.type)]
    array = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    if pa.types.is_string(array.type):
        return array
    if pa.types.is_fixed_size_list(array.type):
        return array.values.to_numpy(zero_copy_only=True).reshape(-1, array.type.list_size)
    return array.to_numpy(zero_copy_only=True)


def make_tables(
    columns: Mapping[str, Mapping[str, Any]],
    dialect: str,
    categories: Sequence[str],
    attributes: Sequence[str],
    annotated: bool,
    box_fault: str = "",
) -> dict[str, pa.Table]:
    """Check and join columns (numpy arrays, lists or Arrow arrays) into the tables of an index."""
    facts = {
        "dialect": dialect,
        "categories": categories,
        "attributes": attributes,
        "annotated": annotated,
        "box_fault": box_fault,
    }
    tables = {}
    for name, schema in SCHEMAS.items():
        arrays = [_arrow(columns[name][field.name], field.type) for field in schema]
        tables[name] = pa.Table.from_arrays(arrays, schema=schema)
    tables["sample"] = tables["sample"].replace_schema_metadata({"facts": json.dumps(facts)})
    return tables


def _arrow(values: Any, type_: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(type_):
        flat = np.ascontiguousarray(values, np.float64).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), type_.list_size)
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values.cast(type_)
    return pa.array(values, type_)


def class_of(category: str) -> str:
    """Class of the detection task of an annotated category, `` for none."""
    return CATEGORY_CLASSES.get(category, category if category in CLASSES else "")


def open_index(
    files: Iterable[Path], build: Callable[[], dict[str, pa.Table]], folder: Path, settle_ns: int = SETTLED_NS
) -> Index:
    """Open the index of some files, building it first where they are new or have changed.

    Any number of processes may do so at once: one builds, the others wait for it. Where the cache folder can't be
    used, the index is built in memory.

    Args:
        files: what it is made from; known again by path, size, modification time and inode. One that had changed
            within the last `settle_ns` when the index was built is compared by content too, until it has settled,
            since the clock's grain could hide another change.
        build: makes the tables.
        folder: of indexes; older ones of the same files are removed.
    """
    files = [Path(os.path.abspath(path)) for path in files]
    place = hashlib.sha256("\0".join(map(str, files)).encode()).hexdigest()[:16]
    stamp = hashlib.sha256("\0".join([str(_FORMAT), *map(_identity, files)]).encode()).hexdigest()[:16]
    home = folder / f"{place}-{stamp}"
    if (index := _mapped(home, settle_ns)) is not None:
        return index
    with _locked(folder / f"{place}.lock"):
        if (index := _mapped(home, settle_ns)) is not None:
            return index
        contents = {str(path): _digest(path) for path in files if _is_fresh(path, settle_ns)}
        tables = build()
        try:
            _save(tables, contents, home)
        except OSError:
            return Index(tables)
        for old in folder.glob(f"{place}-*"):
            if old != home:
                shutil.rmtree(old, ignore_errors=True)
    return _mapped(home, settle_ns) or Index(tables)


def _identity(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "absent"
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"


def _is_fresh(path: Path, settle_ns: int) -> bool:
    try:
        return time.time_ns() - path.stat().st_mtime_ns < settle_ns
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mapped(home: Path, settle_ns: int) -> Index | None:
    """The index in a folder; None where it is absent, damaged, or of other contents."""
    contents = home / _CONTENTS
    try:
        if contents.exists():
            digests: dict[str, str] = json.loads(contents.read_text())
            settled = not any(_is_fresh(Path(path), settle_ns) for path in digests)
            if any(_digest(Path(path)) != digest for path, digest in digests.items()):
                return None
            if settled:  # from here on a change shows in the modification time
                with suppress(OSError):
                    contents.unlink()
        return Index(
            {name: pa.ipc.open_file(pa.memory_map(str(home / f"{name}.arrow"))).read_all() for name in SCHEMAS}
        )
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError):
        return None


def _save(tables: Mapping[str, pa.Table], contents: Mapping[str, str], home: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=home.parent))
    try:
        for name, table in tables.items():
            with pa.OSFile(str(temporary / f"{name}.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table.combine_chunks())  # one piece, so that columns map as one
        if contents:
            (temporary / _CONTENTS).write_text(json.dumps(contents))
        shutil.rmtree(home, ignore_errors=True)  # a damaged one, or of other contents
        os.rename(temporary, home)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, where there can be one."""
    import fcntl

    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield

"""`scenecache export`: a stage's records as plain files, one an item, for code that does not read the store.

    npz      arrays by column name. Text is a unicode array; a column of bytes or of lists is NAME (all values, one
             after the other) and NAME_offsets (element i is NAME[NAME_offsets[i]:NAME_offsets[i + 1]])
    hdf5     one dataset a column, same rule
    parquet  one row an element; tensors as nested fixed-size lists
    mp4      records of `video` as SQA3D's own 20 fps files (mp4v, lossy)
    png      the one image column of a record, as of `bev_render`
    nuscenes-qa  object features as NuScenes-QA's released trainer reads them (`pipelines.nuscenes_qa_npz`)

keys.json maps each item key to its file: a key need not be a file name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from pipelines import nuscenes_qa_npz
from pipelines.cli_store import open_store
from pipelines.errors import JobError, unknown
from storage.errors import RecordMissing, SchemaError
from storage.reader import Records
from storage.schema import Record, Schema

Write = Callable[[Path, Record, Schema], None]
_PNG = b"\x89PNG\r\n\x1a\n"


def main(
    store: str | None,
    stage: str,
    out: Path,
    form: str,
    items: Sequence[str] | None,
    columns: Sequence[str] | None,
    width: int | None,
    as_json: bool,
) -> None:
    """Export and say what was written; arguments as on the command line and for `export`."""
    if form not in FORMATS:
        raise JobError(unknown("format", form, FORMATS))
    if width is not None and form != "nuscenes-qa":
        raise JobError(f"--width goes with --format nuscenes-qa, not {form}")
    cache = open_store(store)
    if out.resolve().is_relative_to(Path(cache.url).resolve()):
        raise JobError(
            f"{out} is inside the store {cache.url}, where gc removes what no record needs: give another folder"
        )
    records = cache[stage]
    if columns:
        records = records.select(*columns)
    files = export(records, out, form, items, width)
    if as_json:
        print(json.dumps({"stage": stage, "format": form, "folder": str(out), "files": files}, ensure_ascii=False))
    else:
        print(f"{len(files)} files in {out}, and keys.json")
        if form == "nuscenes-qa" and (note := nuscenes_qa_npz.note({key: records.row(key).rows for key in files})):
            print(note)


def export(
    records: Records, out: Path, form: str, items: Sequence[str] | None = None, width: int | None = None
) -> dict[str, str]:
    """Write records to a folder; files that are there are replaced.

    Args:
        records: a stage's records, perhaps with a selection of columns.
        out: the folder; it is made.
        form: a name of FORMATS.
        items: keys to write, all by default.
        width: numbers of a feature in format nuscenes-qa.

    Returns:
        Item key -> file name.

    Raises:
        RecordMissing: no record of a key that was asked for.
        JobError: the records do not fit the format, or a file stands where the folder should be.
    """
    suffix, write = FORMATS[form]
    files = file_names(items or list(records), suffix)
    for key in files:
        if key not in records:
            records.digest(key)  # says why
            raise RecordMissing(f"{records.stage} has no record for {key!r}")
    if form == "nuscenes-qa":
        nuscenes_qa_npz.check(files, records.schema, width)
        write = partial(nuscenes_qa_npz.write, width=width)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (out, *out.parents) if path.exists())
        raise JobError(f"{file} is a file: export writes a folder of files, one an item") from error
    for key, name in files.items():
        part = out / f".part-{os.getpid()}{suffix}"
        try:
            write(part, records[key], records.schema)
            part.replace(out / name)
        except SchemaError as error:  # a record of an older recipe, with other columns
            raise JobError(f"{key}: {error}, with --column") from error
        finally:
            part.unlink(missing_ok=True)
    (out / "keys.json").write_text(json.dumps(files, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    return files


def file_names(keys: Sequence[str], suffix: str) -> dict[str, str]:
    """A file name for each key: the key itself where that is a safe and unambiguous name, else with a digest of it."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for key in keys:
        plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", key) and key.lower() not in taken
        slug = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")[:40]
        name = key if plain else f"{slug or 'item'}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        taken.add(name.lower())
        names[key] = name + suffix
    return names


def flat(record: Record, schema: Schema) -> dict[str, np.ndarray]:
    """A record as arrays without Python objects: text as unicode, bytes and lists as values and offsets."""
    arrays: dict[str, np.ndarray] = {}
    for name, column in schema.columns.items():
        array = record[name]
        if array.dtype != object:
            arrays[name] = array
        elif column.dtype == "string":
            arrays[name] = array.astype(str)
        else:
            as_bytes = column.dtype == "bytes"
            parts = [np.frombuffer(value, np.uint8) if as_bytes else value for value in array.reshape(-1)]
            arrays[name] = np.concatenate([np.zeros(0, np.uint8 if as_bytes else column.dtype), *parts])
            arrays[f"{name}_offsets"] = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return arrays


def _npz(path: Path, record: Record, schema: Schema) -> None:
    np.savez(path, **flat(record, schema))


def _hdf5(path: Path, record: Record, schema: Schema) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in flat(record, schema).items():
            text = array.dtype.kind == "U"
            data = file.create_dataset(
                name, data=array.astype(object) if text else array, dtype=h5py.string_dtype() if text else None
            )
            column = schema.columns.get(name)
            if column:
                data.attrs.update({"unit": column.unit, "frame": column.frame, "doc": column.doc})


def _parquet(path: Path, record: Record, schema: Schema) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = {"string": pa.string(), "bytes": pa.binary()}
    columns: dict[str, pa.Array] = {}
    for name, column in schema.columns.items():
        array = record[name] if schema.element else record[name][None]
        if array.dtype == object:  # the type is said, since nothing tells it where there is no element
            columns[name] = pa.array(array, texts.get(column.dtype) or pa.list_(pa.from_numpy_dtype(column.dtype)))
            continue
        values = pa.array(array.reshape(-1))
        for length in reversed(array.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, length)
        columns[name] = values
    pq.write_table(pa.table(columns), path)


def _mp4(path: Path, record: Record, schema: Schema) -> None:
    from extractors.video import write_mp4

    if "frame" not in schema.columns:
        raise JobError(
            f"format mp4 needs a column 'frame', as the stage video has; here are {', '.join(schema.columns)}"
        )
    write_mp4(record, path)


def _png(path: Path, record: Record, schema: Schema) -> None:
    images = {n: record[n].item() for n, c in schema.columns.items() if c.dtype == "bytes" and record[n].ndim == 0}
    images = {name: data for name, data in images.items() if data.startswith(_PNG)}
    if len(images) != 1:
        found = ", ".join(images) or "none"
        raise JobError(f"format png needs one column with a PNG file, found {found}; choose it with --column")
    path.write_bytes(next(iter(images.values())))


FORMATS: Mapping[str, tuple[str, Write]] = {
    "npz": (".npz", _npz),
    "parquet": (".parquet", _parquet),
    "hdf5": (".h5", _hdf5),
    "mp4": (".mp4", _mp4),
    "png": (".png", _png),
    "nuscenes-qa": (".npz", nuscenes_qa_npz.write),
}

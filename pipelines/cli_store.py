"""Verbs that look at a store or tend it: status, failures, show, verify, gc."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import storage
from pipelines.errors import JobError, unknown
from pipelines.plan_view import size
from storage.errors import CacheError
from storage.files import plain

if TYPE_CHECKING:
    from rich.table import Table

_LISTED = 200  # failures that are printed for people; --json has all
_WRITTEN_AGAIN = "Their records are whole; `scenecache run` of the job that made them writes them again."


def open_store(url: str | None) -> storage.Cache:
    """The store named on the command line, `./store` by default."""
    with reaching(url or "store"):
        return storage.open(url or "store")


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Say in a line why a store's URL leads nowhere: no such protocol, a package or credentials are missing."""
    try:
        yield
    except CacheError:
        raise
    except (OSError, ValueError, ImportError) as error:
        if "://" not in url:
            raise
        raise JobError(f"can't reach the store {url}: {plain(error)}") from error


def status(url: str | None, as_json: bool) -> None:
    """Print what each stage of a store holds."""
    cache = open_store(url)
    stages = [_stage_status(cache, name) for name in cache.stages]
    if as_json:
        _print_json({"store": cache.url, "snapshot": cache.snapshot, "stages": stages})
        return
    rows = [
        (s["stage"], s["ok"], s["empty"], s["failed"], s["corrupt"], s["elements"], size(s["bytes"]), s["recipes"])
        for s in stages
    ]
    title = f"{cache.url}, snapshot {cache.snapshot}"
    print_table(title, ("stage", "ok", "empty", "failed", "corrupt", "elements", "size", "recipes"), rows)
    if lost := [f"{s['stage']} ({', '.join(s['recipes_lost'])})" for s in stages if s["recipes_lost"]]:
        print(f"Recipes gone from the store: {'; '.join(lost)}. {_WRITTEN_AGAIN}")
    if untrained := [f"{s['stage']} ({', '.join(s['untrained'])})" for s in stages if s["untrained"]]:
        print(f"Weights without training: {'; '.join(untrained)}")


def _stage_status(cache: storage.Cache, name: str) -> dict[str, Any]:
    table = cache.manifest.latest(name, ["status", "rows", "bytes", "seconds", "recipe"])
    counts = {group["values"]: group["counts"] for group in pc.value_counts(table["status"]).to_pylist()}
    made = table.filter(pc.is_in(table["status"], value_set=pa.array(["ok", "empty"])))
    recipes = {id: cache.manifest.find_recipe(id) for id in pc.unique(made["recipe"]).to_pylist()}
    weights = {weight for recipe in recipes.values() if recipe for weight in recipe.get("weights", {}).values()}
    return {
        "stage": name,
        **{status: counts.get(status, 0) for status in ("ok", "empty", "failed", "corrupt")},
        "elements": pc.sum(made["rows"]).as_py() or 0,
        "bytes": pc.sum(made["bytes"]).as_py() or 0,
        "seconds": pc.sum(made["seconds"]).as_py() or 0.0,
        "recipes": len(recipes),
        "recipes_lost": [id for id, recipe in recipes.items() if recipe is None],
        "untrained": sorted(weight for weight in weights if weight.startswith("untrained:")),
    }


def failures(url: str | None, stages: Sequence[str] | None, as_json: bool) -> None:
    """Print the items without a record because they failed, or are corrupt."""
    cache = open_store(url)
    for stage in stages or ():
        if stage not in cache.stages:
            raise JobError(f"{cache.url}: {unknown('stage', stage, cache.stages)}")
    columns = ["item", "status", "error_class", "error_text", "attempts", "run"]
    found = []
    for stage in stages or cache.stages:
        table = cache.manifest.latest(stage, columns)
        bad = table.filter(pc.is_in(table["status"], value_set=pa.array(["failed", "corrupt"])))
        found += [{"stage": stage, **row} for row in bad.to_pylist()]
    if as_json:
        _print_json({"store": cache.url, "snapshot": cache.snapshot, "failures": found})
        return
    if not found:
        print(f"No failures in {cache.url}")
        return
    rows = [
        (f["stage"], f["item"], f["error_class"] or f["status"], f["error_text"], f["attempts"])
        for f in found[:_LISTED]
    ]
    print_table(f"{len(found)} failures in {cache.url}", ("stage", "item", "error", "cause", "tries"), rows)
    if len(found) > _LISTED:
        print(f"... and {len(found) - _LISTED} more; --stage NAME or --json shows them")
    if any(f["status"] == "failed" for f in found):
        print("Tried again when the input or the recipe changes, or with `scenecache run JOB --retry-failed`.")
    if any(f["status"] == "corrupt" for f in found):
        print("What is corrupt was found damaged: the next run computes it again.")


def show(url: str | None, stage: str, item: str, as_json: bool) -> None:
    """Print one record: its columns with first values, and the recipe that made it."""
    cache = open_store(url)
    records = cache[stage]
    row = records.row(item)
    recipe = cache.manifest.find_recipe(row.recipe)
    about = {
        "stage": stage, "item": item, "status": row.status, "shard": row.shard, "first_row": row.first_row,
        "rows": row.rows, "bytes": row.bytes, "seconds": row.seconds, "attempts": row.attempts, "run": row.run,
        "fingerprint": row.fingerprint.hex(), "digest": row.digest.hex(), "error_class": row.error_class,
        "error_text": row.error_text, "recipe": recipe,
    }  # fmt: skip
    columns = []
    if row.status in ("ok", "empty"):
        record = records[item]
        for name, column in records.schema.columns.items():
            if name not in record:  # it is of an older recipe
                continue
            array = record[name]
            columns.append(
                {
                    "name": name, "dtype": column.dtype, "shape": list(array.shape), "unit": column.unit,
                    "frame": column.frame, "doc": column.doc, **_range(array),
                }
            )  # fmt: skip
    if as_json:
        _print_json({"store": cache.url, "snapshot": cache.snapshot, **about, "columns": columns})
        return
    print(f"{stage} {item}: {row.status}, {row.rows} rows, {size(row.bytes)}, {row.shard or 'no shard'}")
    if row.error_class:
        print(f"{row.error_class}: {row.error_text}")
    if recipe is None:
        print(f"recipe {row.recipe} is gone from the store or damaged: a run of the job that made it writes it again")
    else:  # who writes a store without a job may have said less
        given = {**recipe.get("settings", {}), **recipe.get("weights", {})}
        settings = ", ".join(f"{name}={value}" for name, value in given.items())
        print(f"{recipe.get('extractor', 'recipe')} version {recipe.get('version', '?')}: {settings or 'no settings'}")
    if columns:
        unit = [" ".join(filter(None, [c["unit"], c["frame"] and f"({c['frame']})"])) for c in columns]
        rows = [
            (c["name"], f"{c['dtype']} {tuple(c['shape'])}", u, c["sample"], c["doc"])
            for c, u in zip(columns, unit, strict=True)
        ]
        print_table("", ("column", "array", "unit (frame)", "values", "what"), rows)


def _range(array: np.ndarray) -> dict[str, Any]:
    """Smallest and largest finite value and their number, or the first values of what has no order."""
    if array.dtype == object or array.dtype == bool or not array.size:
        first = [str(value) if not isinstance(value, bytes) else f"{len(value)} bytes" for value in array.flat[:3]]
        return {"sample": ", ".join(text if len(text) <= 40 else text[:37] + "..." for text in first)}
    finite = array[np.isfinite(array)].astype(np.float64) if array.dtype.kind == "f" else array
    if not finite.size:
        return {"sample": "no finite value", "finite": 0}
    low, high = finite.min().item(), finite.max().item()
    if array.size <= 8:
        few = [str(value) if array.dtype.kind in "iu" else f"{value:.4g}" for value in array.flat]
        return {"sample": ", ".join(few), "min": low, "max": high, "finite": int(finite.size)}
    text = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    if finite.size < array.size:
        text += f", {array.size - finite.size} not finite"
    return {"sample": text, "min": low, "max": high, "finite": int(finite.size)}


def verify(url: str | None, deep: bool, mark: bool, snapshot: int | None, lock: Path | None, as_json: bool) -> int:
    """Check a store and print what is damaged; returns the exit code."""
    from storage.verify import verify as check

    if lock is not None:
        if snapshot is not None:
            raise JobError("--snapshot and --lock: a lock file names a snapshot, so give one of the two")
        pinned = storage.open(url, lock=lock)
        url, snapshot = pinned.url, pinned.snapshot
    with reaching(url or "store"):
        report = check(url or "store", deep, mark, snapshot)
    code = 3 if report.faults or report.recipes else 0
    if as_json:
        _print_json(asdict(report))
        return code
    print(f"snapshot {report.snapshot}: {report.records:,} records, {size(report.bytes)}: {len(report.faults)} damaged")
    if report.faults:
        rows = [(f.stage, f.item, f.shard, f.problem) for f in report.faults[:_LISTED]]
        print_table("", ("stage", "item", "shard", "problem"), rows)
    if report.marked:
        print(f"{report.marked} marked: the next run computes them again.")
    if snapshot is not None and mark and report.marked < len(report.faults):
        print(
            f"{len(report.faults) - report.marked} not marked: newer snapshots have other records in their place. For "
            f"readers of snapshot {report.snapshot} run once with the settings of then: equal records, equal file."
        )
    for lost in report.recipes:
        print(f"{lost.stage}, {lost.records:,} records: {lost.problem}")
    if report.recipes:
        print(_WRITTEN_AGAIN)
    if report.orphans:
        print(f"{len(report.orphans)} files that no record needs, {size(sum(report.orphans.values()))}: scenecache gc")
    return code


def gc(
    url: str | None, dry_run: bool, keep_days: float, orphan_days: float, locks: Iterable[Path] | None, as_json: bool
) -> None:
    """Remove what no kept snapshot needs and print it."""
    from storage.verify import gc as collect

    with reaching(url or "store"):
        report = collect(url or "store", dry_run, keep_days, orphan_days, tuple(locks or ()))
    if as_json:
        _print_json(asdict(report))
        return
    for name, count in report.removed.items():
        print(f"{name}  {size(count)}")
    verb = "would be removed" if dry_run else "removed"
    total = size(sum(report.removed.values()))
    print(
        f"{len(report.removed)} files {verb}, {total}; {len(report.manifest_files)} of the manifest; {report.kept} kept"
    )


def print_table(title: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    from pipelines.plan_view import console

    table = _table(title, names)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else _escaped(str(value)) for value in row))
    console().print(table)


def _table(title: str, names: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=_escaped(title) or None, title_justify="left")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))

"""Judge the items of one stage against the rows that the manifest has for them.

How one item is decided, given the rows that the manifest has for it, newest first:

    an upstream failed                     skip      upstream failed
    the stage is forced                    compute   forced
    an upstream runs, and some row has     maybe     why it would be computed
        this recipe and these inputs
    no row at all                          compute   new
    no row has this fingerprint            compute   what differs from the newest row: settings, weights, input ...
    else the newest that has it is
        failed                             skip      failed before          (compute with `retry_failed`)
        corrupt, or its shard's size is    compute   corrupt                (what differs, where newer rows exist)
        in a shard that is gone            compute   missing shard          (what differs, where newer rows exist)
        sound                              reuse     unchanged              (earlier run, where newer rows exist)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.columns import DIGEST, TEXT, as_bytes, as_column, as_texts, at, is_text, match, same
from pipelines.stage import Stage, Table
from pipelines.stage_plan import (
    ACTIONS,
    CORRUPT,
    MISSING,
    READ,
    SOUND,
    STORED,
    UPSTREAM_FAILED,
    Candidates,
    Options,
    StagePlan,
    recipe_of,
)
from storage.files import Folder
from storage.fingerprint import fingerprints, recipe_id


class History(Protocol):
    """What a plan reads of the past: `storage.manifest.Manifest`, or a fake in a test."""

    folder: Folder  # `files(stage)` gives the sizes of the stage's shards

    def latest(self, stage: str, columns: Iterable[str] | None = None, encoded: bool = False) -> pa.Table: ...
    def rows(self, stage: str, columns: Iterable[str] | None = None, encoded: bool = False) -> pa.Table: ...
    def find_recipe(self, id: str) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Work:
    """The items of one stage and what is known of their inputs.

    `parts` (item, entry, 16) uint8 digests; `known` (item,) all of them are final; `failed` (item,) an upstream has
    no record; `inputs` (item, 16) digest of the raw inputs alone.
    """

    items: pa.Array
    parents: pa.Array
    feeds: tuple[str, ...]
    parts: np.ndarray
    inputs: np.ndarray
    known: np.ndarray
    failed: np.ndarray


_FIXED = ("upstream failed", "forced", "new", "failed before", "corrupt", "missing shard", "unchanged", "earlier run")


def judge(stage: Stage | Table, work: Work, manifest: History, options: Options) -> StagePlan:
    """Plan one stage; see the top of this file for the rules."""
    sizes = {name: info.size for name, info in manifest.folder.files(stage.name).items()}
    recipe = recipe_of(stage)
    rid = recipe_id(recipe)
    n = len(work.items)
    known, pending = work.known, ~work.known & ~work.failed
    forced = np.full(n, stage.name in options.force) & ~work.failed
    now = np.zeros((n, 16), np.uint8)
    now[known] = fingerprints(rid, work.parts[known])

    # The newest row of every item, and where the recipe was used before, older ones that may stand again.
    saved = manifest.find_recipe(rid) is not None  # recipes are saved before the rows that name them
    rows = _arrange((manifest.rows if saved else manifest.latest)(stage.name, READ, encoded=True))
    newest, item_of = match(work.items, rows["item"])
    has = newest >= 0
    fits = has & known
    fits[fits] = same(as_bytes(rows["fingerprint"])[newest[fits]], now[fits])
    stands = np.where(fits, newest, -1)  # per item, the newest row of its present fingerprint
    search = has & ~fits & ~work.failed & ~forced & saved
    fault = _faults(rows, sizes)
    candidates = None
    if pending.any() or search.any():
        index, past = _past(rows, item_of, work, now, rid, search)
        final = known[index]
        stands[index[final]] = past[final]
        index, past = index[~final], past[~final]
        chosen, place = rows, past
        if len(past) < len(rows) // 2:  # keep no more of the rows than it takes
            chosen, place = rows.take(pa.array(past)), np.arange(len(past))
        candidates = Candidates(chosen, index, place, newest[index] == past, fault[past])
    failure = is_text(rows["status"], "failed")
    alike = has.copy()  # the newest row is of this recipe and these inputs: only an upstream can differ
    alike[has] = is_text(rows["recipe"], rid)[newest[has]] & same(
        as_bytes(rows["inputs"])[newest[has]], work.inputs[has]
    )
    stood, same_item = stands >= 0, fits | (pending & alike)
    failed_before = stood & at(failure, stands)
    corrupt = same_item & ~failed_before & (at(fault, newest) == CORRUPT)
    missing = same_item & ~failed_before & (at(fault, newest) == MISSING)
    reuse = stood & ~failed_before & (at(fault, stands) == SOUND) & ~forced
    means = _means(rows, rid)
    why, texts = _differences(rows, newest, has, work, recipe, rid, manifest)
    reason = np.select(
        [work.failed, forced, ~has, failed_before, corrupt, missing, reuse & fits, reuse],
        range(len(_FIXED)),
        default=len(_FIXED) + why,
    )
    action = np.full(n, ACTIONS.index("compute"), np.int8)
    action[reuse] = ACTIONS.index("reuse")
    action[work.failed | (failed_before & ~forced & (not options.retry_failed))] = ACTIONS.index("skip")
    if candidates is not None:
        hopeful = candidates.fault == SOUND
        if options.retry_failed:
            hopeful &= ~is_text(candidates.rows["status"], "failed")[candidates.row]
        action[candidates.index[hopeful]] = ACTIONS.index("maybe")

    visible = has.copy()
    visible[has] = is_text(rows["status"], "ok", "empty")[newest[has]]
    again = (action != ACTIONS.index("compute")) & stood & ~fits
    stored = _taken(rows.select(list(STORED)), stands, reuse)
    columns = {
        "item": work.items,
        "parent": work.parents,
        "action": pa.DictionaryArray.from_arrays(pa.array(action), list(ACTIONS)),
        "reason": as_texts(reason, [*_FIXED, *texts]),
        "fingerprint": as_column(now, known),
        "inputs": as_column(work.inputs),
        "visible": visible,
        "tries": np.where(failed_before, at(rows["attempts"].to_numpy(), stands), 0).astype(np.int32),
        **{name: stored[name] for name in STORED},
    }
    return StagePlan(
        stage, recipe, rid, work.feeds, pa.table(columns),
        again=_again(stage.name, rid, rows.take(pa.array(stands[again])), work, work.failed & visible),
        kept=0 if options.items else _kept(rows, item_of),
        recipe_lost=not saved and bool(is_text(rows["recipe"], rid).any()),
        mean_bytes=means[0], mean_seconds=means[1],
        forced=stage.name in options.force, retry_failed=options.retry_failed,
        _parts=work.parts if pending.any() else None, _candidates=candidates,
    )  # fmt: skip


def _kept(rows: pa.Table, item_of: np.ndarray) -> int:
    """Records that readers see of items that are not among the work's."""
    strange = item_of < 0
    if not strange.any():
        return 0
    rows = rows.select(["item", "status"]).filter(pa.array(strange))
    newest = match(pc.unique(rows["item"]), rows["item"])[0]
    return int(is_text(rows["status"], "ok", "empty")[newest].sum())


def _past(
    rows: pa.Table, item_of: np.ndarray, work: Work, now: np.ndarray, rid: str, search: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of any age that stand for an item now, or may once its upstream has run: one per item and fingerprint.

    Returns:
        Item and row numbers, by item, the newest row of an item first.
    """
    at = np.flatnonzero((item_of >= 0) & search[item_of] & is_text(rows["recipe"], rid))
    index = item_of[at]
    same_now = same(as_bytes(rows["fingerprint"])[at], now[index])
    same_inputs = same(as_bytes(rows["inputs"])[at], work.inputs[index])
    fitting = np.where(work.known[index], same_now, same_inputs)
    at, index = at[fitting], index[fitting]
    several = np.bincount(index, minlength=1)[index] > 1
    if several.any():  # runs of one item: of one fingerprint the newest counts
        twice = pa.table({"index": index, "fingerprint": rows["fingerprint"].take(pa.array(at)), "at": at}).filter(
            several
        )
        firsts = twice.group_by(["index", "fingerprint"]).aggregate([("at", "min")])["at_min"].to_numpy()
        at = np.sort(np.concatenate([at[~several], firsts]))
        index = item_of[at]
    order = np.argsort(index, kind="stable")
    return index[order], at[order]


def _faults(rows: pa.Table, sizes: Mapping[str, int]) -> np.ndarray:
    """Per row (int8): its record is sound, missing or corrupt; sound where there is none because it failed."""
    shards = rows["shard"].combine_chunks()
    real = np.array([sizes.get(name, -1) for name in shards.dictionary.to_pylist()] or [-1], np.int64)
    size = at(real, shards.indices.to_numpy())
    record = is_text(rows["status"], "ok", "empty") & ~is_text(rows["shard"], "")
    fault = np.full(len(rows), SOUND, np.int8)
    fault[record & (size != rows["shard_bytes"].to_numpy())] = CORRUPT
    fault[record & (size < 0)] = MISSING
    fault[is_text(rows["status"], "corrupt")] = CORRUPT
    return fault


def _differences(
    rows: pa.Table,
    newest: np.ndarray,
    has: np.ndarray,
    work: Work,
    recipe: dict[str, Any],
    rid: str,
    manifest: History,
) -> tuple[np.ndarray, list[str]]:
    """Why items are not what their newest rows were: (item,) index into the texts, and the texts."""
    texts: list[str] = []
    recipes = rows["recipe"].combine_chunks()
    for id in recipes.dictionary.to_pylist():
        change = ""
        if id != rid:
            old = manifest.find_recipe(id)
            lost = "settings changed: from a recipe that is lost"
            change = lost if old is None else recipe_change(old, recipe)
        texts.append(change or ("upstream changed" if work.feeds else "input changed"))
        texts.append("; ".join(filter(None, [change, "input changed"])))
    why = np.zeros(len(has), np.int64)
    new_input = ~same(as_bytes(rows["inputs"])[newest[has]], work.inputs[has])
    why[has] = 2 * recipes.indices.to_numpy()[newest[has]] + new_input
    return why, texts


def recipe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """How one recipe differs from another, `settings changed: proposals 256 -> 128; weights changed`."""
    parts = []
    changes = []
    old = {"extractor": "(none)", "version": "(none)", "settings": {}, "weights": {}, **old}  # written without a job
    if old["extractor"] != new["extractor"]:
        changes.append(f"extractor {old['extractor']} -> {new['extractor']}")
    weights = {*old["weights"], *new["weights"]}  # None stands among the settings
    for name in dict.fromkeys([*old["settings"], *new["settings"]]):
        if name in weights:
            continue
        before, after = (r["settings"].get(name, "(none)") for r in (old, new))
        if before != after or type(before) is not type(after):
            changes.append(f"{name} {_short(before)} -> {_short(after)}")
    if changes:
        parts.append("settings changed: " + ", ".join(changes))
    if old["weights"] != new["weights"]:
        parts.append("weights changed")
    if old["version"] != new["version"]:
        parts.append("version changed")
    return "; ".join(parts) or "settings changed"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _again(stage: str, rid: str, rows: pa.Table, work: Work, hidden: np.ndarray) -> pa.Table:
    """Rows to commit again, and a failed row in place of each hidden record."""
    at = np.flatnonzero(hidden)
    n = len(at)
    failed: dict[str, Any] = {
        "item": work.items.take(pa.array(at)),
        "fingerprint": as_column(np.zeros((n, 16), np.uint8)),
        "inputs": as_column(work.inputs[at]),
        "recipe": [rid] * n,
        "status": ["failed"] * n,
        "shard": [""] * n,
        "error_class": [UPSTREAM_FAILED] * n,
        "error_text": [f"{' or '.join(work.feeds)} has no record of this item any more"] * n,
        "mapped": [False] * n,
        "digest": as_column(np.zeros((n, 16), np.uint8)),
        "attempts": [1] * n,
        "seconds": [0.0] * n,
        **{name: [0] * n for name in ("first_row", "rows", "bytes", "shard_bytes")},
    }
    rows = rows.select(list(READ))
    table = pa.concat_tables([rows, _arrange(pa.table({name: failed[name] for name in READ}))]).combine_chunks()
    return table.add_column(0, "stage", pa.array([stage] * len(table), pa.string()))


def _taken(rows: pa.Table, at: np.ndarray, valid: np.ndarray) -> pa.Table:
    """Rows by number, null where not valid."""
    if valid.all() and np.array_equal(at, np.arange(len(rows))):
        return rows
    if not valid.any():
        return pa.table({field.name: pa.nulls(len(at), field.type) for field in rows.schema})
    return rows.take(pa.array(np.maximum(at, 0), mask=~valid))


def _means(rows: pa.Table, rid: str) -> tuple[float | None, float | None]:
    """Mean bytes and seconds of past records, of this recipe if it has some."""
    made = is_text(rows["status"], "ok", "empty")
    if (same := made & is_text(rows["recipe"], rid)).any():
        made = same
    if not made.any():
        return None, None
    return float(rows["bytes"].to_numpy()[made].mean()), float(rows["seconds"].to_numpy()[made].mean())


def _arrange(table: pa.Table) -> pa.Table:
    """Manifest rows in the types used here: one chunk a column, repeated texts as dictionaries."""
    columns = {}
    for name in READ:
        column = table[name].combine_chunks() if isinstance(table[name], pa.ChunkedArray) else table[name]
        kind = STORED.get(name, DIGEST if name in ("fingerprint", "inputs") else pa.string())
        if name == "recipe" or pa.types.is_dictionary(kind):
            kind = TEXT
            if not pa.types.is_dictionary(column.type):
                column = column.cast(pa.string()).dictionary_encode()
        elif kind == DIGEST and column.type != kind:
            column = as_column(as_bytes(column))
        columns[name] = column.cast(kind)
    return pa.table(columns)

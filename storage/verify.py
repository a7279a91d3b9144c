"""Is all there that the manifest names (`verify`), and what on disk is no longer needed (`gc`)?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from storage import lock
from storage.delta_log import EMPTY
from storage.errors import CacheError, CorruptShard, StoreNotFound, StoreUnwritable
from storage.files import RESERVED, FileInfo, Folder
from storage.fingerprint import SIZE, record_digest
from storage.manifest import ROW_COLUMNS, Manifest, Row
from storage.reader import read_record
from storage.shards import open_shard

_DAY = 86400.0
_SHARD = re.compile(rf"[0-9a-f]{{{2 * SIZE}}}\.(parquet|h5)")


@dataclass(frozen=True)
class Fault:
    """A record that can't be read, or does not hold what was written."""

    stage: str
    item: str
    shard: str
    problem: str


@dataclass(frozen=True)
class LostRecipe:
    """A recipe whose file is gone or damaged. Its records are whole; what made them can't be told.

    A run of a job with that recipe writes the file again.
    """

    stage: str
    recipe: str
    records: int
    problem: str


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        snapshot: the one that was looked at.
        records: records that were looked at.
        bytes: size of their values.
        faults: the bad ones.
        recipes: those of these records that can't be read.
        orphans: shards in stage folders that no row names, name -> bytes. `gc` removes them when they are old enough.
        marked: how many of the faults were marked `corrupt` in the manifest.
    """

    snapshot: int
    records: int
    bytes: int
    faults: tuple[Fault, ...]
    recipes: tuple[LostRecipe, ...]
    orphans: dict[str, int]
    marked: int


@dataclass(frozen=True)
class GcReport:
    """What `gc` removed, or would remove.

    Attributes:
        removed: shards and leftover temporary files, name -> bytes.
        manifest_files: files of the manifest that no kept snapshot reads.
        kept: number of shards that stay.
        dry_run: nothing was removed.
    """

    removed: dict[str, int]
    manifest_files: tuple[str, ...]
    kept: int
    dry_run: bool


def verify(
    url: str | os.PathLike[str], deep: bool = False, mark: bool = True, snapshot: int | None = None
) -> VerifyReport:
    """Look at every record that readers see.

    Args:
        deep: read each one, compare its content with its digest, and check it against the schema; else only that its
            shard is there and has the right size.
        mark: append a `corrupt` row for each bad record: readers no longer see it and the next run makes it again.
            Of an older snapshot, for those that readers of the newest one still see.
        snapshot: the one whose readers are meant, the newest by default.

    Raises:
        StoreNotFound: there is no store, or no such snapshot.
        StoreUnwritable: the marks can't be written.
        OSError: a shard can't be looked at from here (no permission, too many open files, a server that does not
            answer), which says nothing about what is in it; nothing was marked.
    """
    manifest = _existing(url, snapshot)
    files = _shard_files(manifest.folder)
    looked_at = manifest.snapshot
    newest = manifest if snapshot is None else _existing(url)
    named: set[str] = set()
    for stage in newest.stages():
        named.update(pc.unique(newest.rows(stage, ["shard"])["shard"]).to_pylist())
    faults: list[tuple[Row, str]] = []
    recipes: list[LostRecipe] = []
    records = size = 0
    for stage in manifest.stages():
        table = manifest.latest(stage)
        table = table.filter(pc.is_in(table["status"], value_set=pa.array(["ok", "empty"])))
        records += table.num_rows
        size += pc.sum(table["bytes"]).as_py() or 0
        faults += _damaged(manifest, table, files, deep)
        recipes += _lost_recipes(manifest, stage, table)
    marked = _mark(newest, faults) if mark and faults else 0
    return VerifyReport(
        looked_at,
        records,
        size,
        tuple(Fault(row.stage, row.item, row.shard, problem) for row, problem in faults),
        tuple(recipes),
        {name: info.size for name, info in sorted(files.items()) if name not in named},
        marked,
    )


def _lost_recipes(manifest: Manifest, stage: str, table: pa.Table) -> Iterator[LostRecipe]:
    """Recipes of records that can't be read."""
    for named in pc.value_counts(table["recipe"]).to_pylist():
        try:
            manifest.recipe(named["values"])
        except StoreNotFound as error:
            yield LostRecipe(stage, named["values"], named["counts"], str(error))


def _existing(url: str | os.PathLike[str], snapshot: int | None = None) -> Manifest:
    manifest = Manifest(url, snapshot)
    if manifest.snapshot == EMPTY:
        raise StoreNotFound(f"no store at {manifest.folder.url}: it has no manifest")
    return manifest


def _shard_files(store: Folder) -> dict[str, FileInfo]:
    """All files that are called as shards are, in the folders of stages, those of stages without rows too.

    Other files are the user's: a store may have been made in a folder with data.
    """
    found: dict[str, FileInfo] = {}
    for folder in store.folders():
        if folder not in RESERVED and not folder.startswith("."):
            found |= {name: info for name, info in store.files(folder).items() if _SHARD.fullmatch(name.split("/")[-1])}
    return found


def _damaged(manifest: Manifest, table: pa.Table, files: dict[str, FileInfo], deep: bool) -> Iterator[tuple[Row, str]]:
    """Rows of a stage with what is wrong with them."""
    problems: dict[tuple[str, int], str] = {}
    shards = table.group_by(["shard", "shard_bytes"]).aggregate([])
    for shard, expected in zip(shards["shard"].to_pylist(), shards["shard_bytes"].to_pylist(), strict=True):
        if shard not in files:
            problems[shard, expected] = "its shard is missing"
        elif files[shard].size != expected:
            problems[shard, expected] = f"its shard has {files[shard].size} bytes instead of {expected}"
    if not deep:
        bad = pa.array([shard for shard, _ in problems], pa.string())
        table = table.filter(pc.is_in(table["shard"], value_set=bad))
    for batch in table.sort_by([("shard", "ascending"), ("first_row", "ascending")]).to_batches(1 << 14):
        for values in batch.select(ROW_COLUMNS).to_pylist():
            row = Row(**values)
            if (problem := problems.get((row.shard, row.shard_bytes))) or (
                deep and (problem := _unlike(manifest, row))
            ):
                yield row, problem


def _unlike(manifest: Manifest, row: Row) -> str:
    """What is wrong with a record's content, empty where nothing is."""
    try:
        record = read_record(manifest.folder, row)
        schema = open_shard(manifest.folder, row.shard, row.shard_bytes, row.mapped).schema
        schema.check(record, f"{row.stage} {row.item!r}")
    except CacheError as error:
        return str(error)
    if record_digest(record) != row.digest:
        return "its content is not what was written"
    return ""


def _mark(manifest: Manifest, faults: Sequence[tuple[Row, str]]) -> int:
    """Commit `corrupt` rows, but not over rows that another run has committed since."""
    manifest.refresh()
    rows: list[Row] = []
    for stage in {row.stage for row, _ in faults}:
        latest = manifest.latest(stage, ["item", "shard", "first_row", "status"]).to_pylist()
        now = {(r["item"], r["shard"], r["first_row"], r["status"]) for r in latest}
        rows += [
            replace(row, status="corrupt", error_class=CorruptShard.__name__, error_text=problem)
            for row, problem in faults
            if row.stage == stage and (row.item, row.shard, row.first_row, row.status) in now
        ]
    try:
        manifest.commit(rows)
    except StoreUnwritable as error:
        raise StoreUnwritable(
            f"{len(rows)} damaged records can't be marked: {error}. `verify --no-mark` lists them"
        ) from error
    return len(rows)


def gc(
    url: str | os.PathLike[str],
    dry_run: bool = False,
    keep_days: float = 7,
    orphan_days: float = 1,
    locks: Sequence[str | os.PathLike[str]] = (),
) -> GcReport:
    """Remove the shards that no kept snapshot reads, files that no row names, and manifest files nobody reads.

    Kept are the newest snapshot, every one that was the newest at some time in the last `keep_days`, and those that
    lock files name (in the store's `locks` folder, and `locks`). No file younger than `orphan_days` is removed: it may
    be of a run that has not committed yet.

    Where nothing was ever committed there is no manifest to go by: of such a store only the temporary files of killed
    writers are removed.

    Args:
        dry_run: only say what would be removed.
        locks: further lock files, written by `Cache.lock`.

    Raises:
        StoreNotFound: there is no store, or a lock file is not there, is none, or names a snapshot that is not there;
            nothing was removed.
        StoreUnwritable: a file can't be removed.
    """
    old = time.time() - orphan_days * _DAY
    store = Folder(url)
    writing = store.temporary()
    temporary = {name: info.size for name, info in sorted(writing.items()) if info.mtime < old}
    begun = writing or store.files("recipes")  # else it is a folder of something else, not to be touched
    if begun and not locks and Manifest(url).snapshot == EMPTY:
        if not dry_run:
            _delete(store, temporary, old)
        return GcReport(temporary, (), len(_shard_files(store).keys() - temporary.keys()), dry_run)
    # Files are listed before the manifest is read: what is committed meanwhile is kept.
    files = _shard_files(_existing(url).folder)
    manifest = _existing(url)
    locked = _locked(manifest, locks)
    keep: set[str] = set()
    for snapshot in {manifest.snapshot, *locked}:
        keep |= _read_by(Manifest(url, snapshot))
    cutoff = datetime.now(UTC) - timedelta(days=keep_days)
    oldest = manifest.snapshot_at(cutoff)
    if oldest != manifest.snapshot:
        keep |= _read_by(Manifest(url, oldest))
        keep |= _committed_since(manifest, cutoff - timedelta(hours=1))  # rows are dated just before their commit
    orphans = {name: info.size for name, info in sorted(files.items()) if name not in keep and info.mtime < old}
    unread = manifest.vacuum(max(keep_days, orphan_days) * 24, sorted({*locked, oldest}), dry_run)
    remove = orphans | temporary
    if not dry_run:
        _delete(manifest.folder, remove, old)
    return GcReport(remove, tuple(unread), len(files) - len(orphans), dry_run)


def _delete(folder: Folder, names: Iterable[str], old: float) -> None:
    for name in names:
        if folder.files_changed(name) < old:  # a run may have written the same shard again since
            folder.delete(name)


def _locked(manifest: Manifest, locks: Sequence[str | os.PathLike[str]]) -> dict[int, str]:
    """Snapshots that lock files name -> the file."""
    named = {os.fspath(path): lock.read(path) for path in locks}
    for name in manifest.folder.files("locks"):
        if name.endswith(".json"):
            path = manifest.folder.path(name)
            named[path] = lock.parse(manifest.folder.read(name).decode(errors="replace"), path)
    for path, one in named.items():
        if one.manifest != manifest.id:
            raise StoreNotFound(f"lock {path} is of another store; remove it or leave it out, then run gc again")
    return {one.snapshot: path for path, one in named.items()}


def _read_by(manifest: Manifest) -> set[str]:
    """Shards that readers of a snapshot see."""
    shards: set[str] = set()
    for stage in manifest.stages():
        table = manifest.latest(stage, ["shard", "status"])
        shards.update(pc.unique(table.filter(pc.not_equal(table["status"], "corrupt"))["shard"]).to_pylist())
    return shards


def _committed_since(manifest: Manifest, when: datetime) -> set[str]:
    shards: set[str] = set()
    for stage in manifest.stages():
        table = manifest.rows(stage, ["shard", "time"])
        recent = pc.greater_equal(table["time"], pa.scalar(when, table["time"].type))
        shards.update(pc.unique(table.filter(recent)["shard"]).to_pylist())
    return shards

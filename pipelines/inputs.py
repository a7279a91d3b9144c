"""Identify inputs by content, and remember the digests of unchanged files.

A file's digest is sha256 of its bytes. The stat cache (SQLite in the user's cache folder) remembers it for a path
together with size, modification time and inode; a file is read again when one of them differs. It may be deleted at
any time, and is shared by any number of processes.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from extractors.fetch import cache_folder
from pipelines.errors import JobError
from pipelines.stage import Source
from storage.files import check_item

Progress = Callable[[int, int, int, int], None]  # files read, files to read, bytes read, bytes to read

SETTLED_NS = 2_000_000_000  # a file changed again within the clock's grain would keep its modification time
_BATCH = 1000  # files hashed between two writes to the cache


@dataclass(frozen=True)
class Digests:
    """The items of a source and what their inputs contain.

    Attributes:
        items: (item,) string, sorted and unique.
        kinds: kind of input -> (item,) binary(16); null where the item does not offer the kind.
    """

    items: pa.Array
    kinds: Mapping[str, pa.Array]


NOTHING = Digests(pa.array([], pa.string()), {})


def digest_inputs(
    source: Source, kinds: Iterable[str], cache: StatCache | None = None, progress: Progress | None = None
) -> Digests:
    """Digest the inputs of every item of a source.

    An item's input of a kind counts by the contents of its files, in the source's order, never by their paths, and by
    its facts from shared tables. An item with neither does not offer the kind. A file that is missing or unreadable
    has a digest of its own, so that the item is computed, fails by name, and is computed again when the file appears.

    Args:
        source: the dataset.
        kinds: which of its kinds to digest.
        cache: digests of files seen before; the user's own by default.
        progress: called while files are read.
    """
    keys = source.keys()
    if twice := {key for key, count in Counter(keys).items() if count > 1}:
        raise JobError(f"source {source.name}: key {min(twice)!r} is given to several items")
    for key in keys:
        try:
            check_item(key)
        except ValueError as error:
            raise JobError(f"source {source.name}: {error}; rename the file") from None
    kinds = [kind for kind in dict.fromkeys(kinds) if kind in source.kinds]
    listed = {kind: [source.files(key, kind) for key in keys] for kind in kinds}
    paths = dict.fromkeys(os.path.abspath(path) for lists in listed.values() for files in lists for path in files)
    digests = (cache or StatCache()).digest(list(paths), progress)
    columns = {}
    for kind, lists in listed.items():
        values = [
            _joined([digests[os.path.abspath(path)] for path in files], source.facts(key, kind))
            for key, files in zip(keys, lists, strict=True)
        ]
        columns[kind] = pa.array(values, pa.binary(16))
    return Digests(pa.array(keys, pa.string()), columns)


def digest_items(
    source: Source, keys: Sequence[str], kinds: Sequence[str], cache: StatCache | None = None
) -> np.ndarray:
    """Digests (item, 16) uint8 of some items' inputs of some kinds together, as in a plan's column `inputs`."""
    listed = [[[os.path.abspath(path) for path in source.files(key, kind)] for kind in kinds] for key in keys]
    digests = (cache or StatCache()).digest(list({path for item in listed for paths in item for path in paths}))
    raw = [
        _joined([digests[path] for path in paths], source.facts(key, kind)) or bytes(16)
        for key, item in zip(keys, listed, strict=True)
        for kind, paths in zip(kinds, item, strict=True)
    ]
    return combined(np.frombuffer(b"".join(raw), np.uint8).reshape(len(keys), len(kinds), 16))


def combined(raw: np.ndarray) -> np.ndarray:
    """One digest (item, 16) of the raw inputs (item, kind, 16), all uint8."""
    n, kinds, _ = raw.shape
    if kinds == 0:
        return np.zeros((n, 16), np.uint8)
    if kinds == 1:
        return np.ascontiguousarray(raw[:, 0])
    flat = raw.tobytes()
    whole = b"".join([hashlib.sha256(flat[i : i + 16 * kinds]).digest()[:16] for i in range(0, len(flat), 16 * kinds)])
    return np.frombuffer(whole, np.uint8).reshape(-1, 16)


def missing_files(source: Source, kinds: Iterable[str], keys: Iterable[str] | None = None) -> dict[str, list[Path]]:
    """Files that items need and the disk lacks: key -> files in the source's order; items that lack none are left out.

    Args:
        source: the dataset.
        kinds: which of its kinds are wanted.
        keys: which items; all by default.
    """
    kinds = [kind for kind in dict.fromkeys(kinds) if kind in source.kinds]
    wanted = {
        key: list(dict.fromkeys(path for kind in kinds for path in source.files(key, kind)))
        for key in (source.keys() if keys is None else keys)
    }
    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        stats = _stat_all(list({os.path.abspath(path) for paths in wanted.values() for path in paths}), pool)
    lacking = {key: [p for p in paths if stats[os.path.abspath(p)] == _MISSING] for key, paths in wanted.items()}
    return {key: paths for key, paths in lacking.items() if paths}


def digest_file(path: Path) -> bytes:
    """sha256 of a file's content, from the user's stat cache where the file is unchanged.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb"):
        return StatCache().digest([os.path.abspath(path)])[os.path.abspath(path)]


class StatCache:
    """Digests of files by path, size, modification time and inode.

    Where the cache can't be used (no permission, a damaged file, a file system without locks) files are simply read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "files.sqlite"

    def digest(self, paths: Sequence[str], progress: Progress | None = None) -> dict[str, bytes]:
        """Digest files and folders.

        Args:
            paths: absolute paths; a folder counts by the names and contents of all files in it.
            progress: called after each file that was read.

        Returns:
            path -> 32 bytes.
        """
        with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
            stats = _stat_all(paths, pool)
            folders = {path: _files_under(path) for path, found in stats.items() if found == _FOLDER}
            stats |= _stat_all([os.path.join(folder, n) for folder, names in folders.items() for n in names], pool)
            present = {path: found for path, found in stats.items() if isinstance(found, _Stat)}
            digests = {
                path: _sha256(b"absent", found.encode()) for path, found in stats.items() if isinstance(found, str)
            }
            digests |= self._recall(present)
            unread = [path for path in present if path not in digests]
            trusted, size, total = [], 0, sum(present[path].size for path in unread)
            for done, (path, (digest, found)) in enumerate(zip(unread, pool.map(_hash_file, unread), strict=True), 1):
                digests[path] = digest
                if found:
                    trusted.append((path, digest, found))
                size += present[path].size
                if progress:
                    progress(done, len(unread), size, total)
                if len(trusted) == _BATCH:  # an interrupted first run need not start over
                    self._remember(trusted)
                    trusted.clear()
        self._remember(trusted)
        for folder, names in folders.items():
            pairs = [(os.fsencode(name), digests[os.path.join(folder, name)]) for name in names]
            digests[folder] = _sha256(b"folder", *(part for pair in pairs for part in pair))
        return digests

    def _recall(self, stats: Mapping[str, _Stat]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        paths = list(stats)

        def read(db: sqlite3.Connection) -> None:
            for start in range(0, len(paths), 500):
                part = [os.fsencode(path) for path in paths[start : start + 500]]
                marks = ",".join("?" * len(part))
                query = f"SELECT path, digest, size, mtime_ns, inode FROM file WHERE path IN ({marks})"
                for path, digest, *stat_then in db.execute(query, part):
                    name = os.fsdecode(path)
                    if _Stat(*stat_then) == stats[name]:
                        found[name] = digest

        self._use(read)
        return found

    def _remember(self, files: Sequence[tuple[str, bytes, _Stat]]) -> None:
        rows = [(os.fsencode(path), digest, *found) for path, digest, found in files]
        if rows:
            self._use(lambda db: db.executemany("INSERT OR REPLACE INTO file VALUES (?, ?, ?, ?, ?)", rows))

    def _use(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Work on the database in one transaction; where that fails, files are read instead."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=30)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.execute(
                    "CREATE TABLE IF NOT EXISTS file (path BLOB PRIMARY KEY, digest BLOB,"
                    " size INTEGER, mtime_ns INTEGER, inode INTEGER) WITHOUT ROWID"
                )
                with db:
                    work(db)
        except (sqlite3.Error, OSError) as error:
            if "not a database" in str(error) or "malformed" in str(error):
                for suffix in ("", "-wal", "-shm"):  # what it remembers can be read again
                    with suppress(OSError):
                        os.unlink(f"{self.path}{suffix}")


class _Stat(NamedTuple):
    size: int
    mtime_ns: int
    inode: int


_FOLDER, _MISSING = "folder", "missing"


def _stat_all(paths: Sequence[str], pool: ThreadPoolExecutor) -> dict[str, _Stat | str]:
    """Stat files (in threads: network file systems answer slowly): what is remembered, or a word for what it is."""
    parts = [paths[start : start + 256] for start in range(0, len(paths), 256)]
    found = pool.map(lambda part: [_stat(path) for path in part], parts)
    return dict(zip(paths, (one for part in found for one in part), strict=True))


def _stat(path: str) -> _Stat | str:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if stat.S_ISDIR(found.st_mode):
        return _FOLDER
    return _Stat(found.st_size, found.st_mtime_ns, found.st_ino) if stat.S_ISREG(found.st_mode) else "not a file"


def _files_under(folder: str) -> list[str]:
    """Paths, relative to a folder, of all files in it that are not hidden, sorted."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [os.path.relpath(os.path.join(parent, name), folder) for name in files if not name.startswith(".")]
    return sorted(names)


def _hash_file(path: str) -> tuple[bytes, _Stat | None]:
    """Digest of a file's content, and the stat under which to remember it (None: it may still be changing)."""
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "sha256").digest()
            after = os.fstat(file.fileno())
    except OSError as error:
        return _absent(f"unreadable: {error.strerror}"), None
    found = _Stat(after.st_size, after.st_mtime_ns, after.st_ino)
    settled = time.time_ns() - after.st_mtime_ns > SETTLED_NS and (before.st_size, before.st_mtime_ns) == found[:2]
    return digest, found if settled else None


def _absent(why: str) -> bytes:
    """The digest that stands for a file which can't be read."""
    return _sha256(b"absent", why.encode())


def _joined(digests: Sequence[bytes], facts: bytes) -> bytes | None:
    """One digest (16 bytes) of an input's files, in order, and facts; None for no input."""
    if facts:
        return _sha256(b"files and facts", facts, *digests)[:16]
    return _sha256(b"files", *digests)[:16] if digests else None


def _sha256(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()

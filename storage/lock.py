"""Lock files, which name the snapshot of a store that somebody reads; `Cache.lock` writes them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StoreNotFound


@dataclass(frozen=True)
class Lock:
    """What a lock file names.

    Attributes:
        url: the store.
        snapshot: version of its manifest.
        manifest: id of its manifest.
    """

    url: str
    snapshot: int
    manifest: str


def read(path: str | os.PathLike[str]) -> Lock:
    """Read a lock file; StoreNotFound where there is none, or where it is something else."""
    try:
        text = Path(path).read_text(encoding="utf8")
    except OSError as error:
        raise StoreNotFound(f"can't read the lock file {os.fspath(path)}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    return parse(text, os.fspath(path))


def parse(text: str, path: str) -> Lock:
    """The content of a lock file; `path` is for the error text."""
    try:
        named = json.loads(text)
        lock = Lock(named["url"], named["snapshot"], named["manifest"])
    except (ValueError, TypeError, LookupError):
        lock = None
    if lock is None or not (type(lock.url) is type(lock.manifest) is str and type(lock.snapshot) is int):
        raise StoreNotFound(f"{path} is no lock file: expected url, snapshot and manifest, as `Cache.lock` writes them")
    return lock

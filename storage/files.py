"""The files of a store, in a folder or under an fsspec URL: published whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from storage.errors import CacheError, StoreNotFound, StoreUnwritable

_FLOW_S = 0.02  # between two fsyncs of a file that grows
TEMPORARY = ".tmp-"
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + r"\d+-[0-9a-f]{16}")
_ODD_PATH = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f\ud800-\udfff]")  # deltalake misreads or refuses these
RESERVED = {"manifest", "recipes", "locks", "runs"}


@lru_cache
def check_stage(stage: str) -> str:
    """Return the stage name, which is also a folder of the store; raise ValueError where it can't be one."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", stage) or stage in RESERVED:
        raise ValueError(
            f"stage name {stage!r}: use letters, digits, '_', '-' and '.', at most 100, and none of {sorted(RESERVED)}"
        )
    return stage


def storable(item: str) -> bool:
    """Whether a text can be an item key."""
    try:
        return bool(item.encode()) and "\0" not in item
    except UnicodeEncodeError:
        return False


def check_item(item: str) -> str:
    """Return the item key, any text of at least one character; raise ValueError where it can't be stored."""
    if not storable(item):
        raise ValueError(f"item key {item!r:.80}: use valid Unicode text, not empty, without NUL")
    return item


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and time of the last change, seconds since the epoch."""

    size: int
    mtime: float


class Folder:
    """A store's files by their name relative to it (`votenet/3f2a.parquet`).

    Attributes:
        url: as given, without a trailing slash; of a folder its whole path, `~` the home folder.
        local: the folder as a path, None under a URL such as s3:// or gs://.

    Raises:
        StoreNotFound: a URL that fsspec can't open: no such protocol, or its package is not installed. Or a path with
            an escape such as %20, a backslash, a control character or bytes that are no UTF-8.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.path.expanduser(os.fspath(url).removeprefix("file://")).rstrip("/") or "/"
        self.local: Path | None = None if "://" in self.url else Path(self.url).absolute()
        self.url = str(self.local or self.url)
        if self.local is not None and (odd := _ODD_PATH.search(self.url)):
            raise StoreNotFound(f"can't use {self.url!r}: the path of a store can't hold {odd[0]!r}; rename the folder")
        if self.local is None:
            try:
                self.fs  # noqa: B018  # before hours of work, not after
            except (ImportError, ValueError) as error:
                raise StoreNotFound(
                    f"can't use {self.url}: {error}. s3:// needs `pip install scenecache[s3]`, gs:// scenecache[gs]"
                ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self.url,)

    @property
    def fs(self) -> Any:
        """fsspec file system of a remote store, of this process: a forked one can't use its parent's."""
        import fsspec

        return fsspec.core.url_to_fs(self.url)[0]

    def path(self, name: str) -> str:
        """Full path (or URL) of a file of the store."""
        return f"{self.url.rstrip('/')}/{name}"

    def put(self, name: str, write: Callable[[str], object]) -> int:
        """`put_new` for a file whose name is known beforehand; returns its size in bytes."""
        folder, _, last = name.rpartition("/")

        def named(path: str) -> str:
            write(path)
            return last

        return self.put_new(folder, named)[1]

    def put_new(self, folder: str, write: Callable[[str], str]) -> tuple[str, int]:
        """Let `write` fill a temporary file and say what it is called, then publish it in a folder of the store.

        On disk: a temporary file in the same folder, fsync of file and folder, rename. Under a URL: one upload, which
        object stores show whole or not at all.

        Returns:
            Name relative to the store, size in bytes.

        Raises:
            StoreUnwritable: disk full, read-only, no permission; the temporary file is gone.
        """
        with unwritable(self.path(folder)), self._temporary(folder) as temporary:
            with _flowing(temporary) if self.local is not None else nullcontext():  # else it only waits for its upload
                name = "/".join(filter(None, [folder, write(temporary)]))
            size = os.path.getsize(temporary)
            if self.local is None:
                self.fs.put_file(temporary, self.path(name))
                return name, size
            sync(temporary)
            os.replace(temporary, self.path(name))
            sync(self.local / folder)
            return name, size

    def put_text(self, name: str, text: str) -> None:
        """`put` for a text, as UTF-8."""

        def write(path: str) -> None:
            Path(path).write_text(text, encoding="utf8")

        self.put(name, write)

    @contextmanager
    def _temporary(self, folder: str) -> Iterator[str]:
        if self.local is None:
            with tempfile.TemporaryDirectory() as elsewhere:
                yield os.path.join(elsewhere, "new")
            return
        home = self.local / folder
        if not home.is_dir():
            try:
                home.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # a place where nothing can be made, such as /proc
                raise StoreUnwritable(f"can't make the folder {home}: {error}; give a store elsewhere") from error
            sync(home.parent)
        temporary = home / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            yield str(temporary)
        finally:
            with suppress(OSError):  # renamed; or the disk lets nothing be removed either: `gc` does that later
                os.unlink(temporary)

    def read(self, name: str) -> bytes:
        """Content of a file; FileNotFoundError where there is none."""
        if self.local is not None:
            try:
                return (self.local / name).read_bytes()
            except NotADirectoryError as error:  # a file stands where the store, or a folder above it, should be
                raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
        return bytes(self.fs.cat_file(self.path(name)))

    def exists(self, name: str) -> bool:
        return (self.local / name).is_file() if self.local is not None else bool(self.fs.isfile(self.path(name)))

    def delete(self, name: str) -> None:
        with unwritable(self.path(name)):
            os.unlink(self.path(name)) if self.local is not None else self.fs.rm_file(self.path(name))

    def files_changed(self, name: str) -> float:
        """Time of a file's last change, in seconds since the epoch; now where there is no such file."""
        info = self.files(name.rpartition("/")[0]).get(name) if self.local is None else None
        if self.local is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                return os.stat(self.local / name).st_mtime
        return info.mtime if info else time.time()

    def folders(self) -> list[str]:
        """Names of the folders of the store, sorted."""
        if self.local is not None:
            return sorted(e.name for e in os.scandir(self.local) if e.is_dir()) if self.local.is_dir() else []
        if not self.fs.isdir(self.url):
            return []
        listing = self.fs.ls(self.url, detail=True, refresh=True)
        return sorted(e["name"].rstrip("/").rsplit("/", 1)[-1] for e in listing if e["type"] == "directory")

    def files(self, folder: str) -> dict[str, FileInfo]:
        """Files directly in a folder of the store, by their names relative to the store; {} without such a folder."""
        found: dict[str, FileInfo] = {}
        if self.local is not None:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.local / folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # renamed or removed while we list
                        if entry.is_file():
                            stat = entry.stat()
                            found[f"{folder}/{entry.name}"] = FileInfo(stat.st_size, stat.st_mtime)
            return found
        with suppress(FileNotFoundError):
            for entry in self.fs.ls(self.path(folder), detail=True, refresh=True):
                if entry["type"] == "file":
                    when = (
                        entry.get("LastModified") or entry.get("mtime") or entry.get("created") or entry.get("updated")
                    )
                    name = f"{folder}/{entry['name'].rsplit('/', 1)[-1]}"
                    found[name] = FileInfo(entry["size"], when.timestamp() if hasattr(when, "timestamp") else 0.0)
        return found

    def temporary(self) -> dict[str, FileInfo]:
        """Temporary files of `put_new` anywhere in the store, of writers at work or killed; {} under a URL."""
        found: dict[str, FileInfo] = {}
        for folder in self.folders() if self.local is not None else ():
            inner = [folder]
            if folder == "manifest":
                inner += [f"{folder}/{name}" for name in Folder(self.path(folder)).folders()]
            for name in inner:
                files = self.files(name)
                found |= {path: info for path, info in files.items() if _TEMPORARY_NAME.fullmatch(path.split("/")[-1])}
        return found


def sync(path: str | os.PathLike[str]) -> None:
    """fsync a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _flowing(path: str) -> Iterator[None]:
    """Send a file to the disk while it is being written, so that the fsync at its end has little to wait for.

    An error of the disk is told only once, to whoever syncs first, so what happens here is raised at the end.
    """
    written, failed = threading.Event(), []

    def flow() -> None:
        while not written.wait(_FLOW_S):
            try:
                sync(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed.append(error)
                return

    thread = threading.Thread(target=flow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        written.set()
        thread.join()
    if failed:
        raise failed[0]


@contextmanager
def unwritable(path: str) -> Iterator[None]:
    """Turn what the disk, Arrow, HDF5 or Delta Lake say about a failed write into StoreUnwritable."""
    from deltalake.exceptions import DeltaError
    from pyarrow import ArrowException

    try:
        yield
    except CacheError:
        raise
    except (OSError, ArrowException, DeltaError) as error:
        if isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT:
            raise
        raise StoreUnwritable(
            f"can't write {path}: {plain(error)} ({free_space(path)}). Make room or give a store on another disk, then "
            "run again: what was committed before is kept"
        ) from error


def plain(error: Exception) -> str:
    """An error's text on one line, without the colours and the stack that deltalake puts into it."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|\n\s+0: .*", "", str(error), flags=re.DOTALL).split())


def free_space(path: str) -> str:
    """`1.2 GB free`, of the disk that holds the nearest existing parent of a path."""
    if "://" in path:
        return "remote store"
    parent = Path(path)
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        return f"{shutil.disk_usage(parent).free / 1e9:.3f} GB free at {parent}"
    except OSError:
        return f"free space of {parent} is unknown"

"""The log of the manifest's Delta Lake table: which data files a snapshot has, and commits to it.

deltalake's threads do not survive a fork: a forked process can't commit, and asks a new process to read the log.

deltalake leaves it to the system when the log reaches the disk. We sync it right after; a power cut before that can
leave the newest entry or checkpoint with other bytes than were written, which `_mend` undoes.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from storage.errors import StoreNotFound, of_this_machine
from storage.files import plain

EMPTY = -1  # snapshot of a store that has no manifest yet


@dataclass(frozen=True)
class File:
    """A data file of the table: its rows are of one stage, sorted by item."""

    path: str
    stage: str
    bytes: int
    rows: int
    low: str | None  # no item sorts before it; None where the file was written without statistics
    high: str | None

    def may_hold(self, item: str) -> bool:
        """Whether the item can be among the rows. (Code points sort like the UTF-8 bytes that Parquet compares.)"""
        return self.low is None or self.high is None or self.low <= item <= self.high


@dataclass(frozen=True)
class Snapshot:
    """One version of the table.

    Attributes:
        version: its number, `EMPTY` where there is no table.
        id: of the table, "" where there is none.
        files: its data files.
    """

    version: int
    id: str
    files: tuple[File, ...]


_runtime: int | None = None  # process in which deltalake's threads were started; a fork of it can't use them


def open_table(url: str, version: int | None) -> DeltaTable:
    """The table at a version, None for the newest; RuntimeError in a forked process."""
    global _runtime
    if _runtime not in (None, os.getpid()):
        raise RuntimeError("deltalake does not work in a forked process: start those that commit with 'spawn'")
    _runtime = os.getpid()
    return DeltaTable(url, version=version)


def transact(table: DeltaTable, actions: Sequence[AddAction | RemoveAction], schema: pa.Schema, retries: int) -> None:
    """Commit data files that are there already; rows are partitioned by stage.

    Args:
        retries: how often to try again where another process committed meanwhile.
    """
    properties = CommitProperties(max_commit_retries=retries)
    table.create_write_transaction(list(actions), "append", schema, ["stage"], commit_properties=properties)


def look(url: str, version: int | None) -> Snapshot:
    """Read the table's log, in a forked process too; an absent table is an empty one.

    Raises:
        StoreNotFound: there is no such version, or the log can't be read.
    """
    if version is not None and not EMPTY <= version < 1 << 63:  # deltalake counts in 64 bits
        raise StoreNotFound(f"{url.removesuffix('/manifest')}: there can't be a snapshot {version}")
    if _runtime not in (None, os.getpid()):
        return _look_elsewhere(url, version)
    try:
        table = open_table(url, None if version == EMPTY else version)
    except TableNotFoundError:
        if version in (None, EMPTY):
            return Snapshot(EMPTY, "", ())
        raise StoreNotFound(f"no store at {url.removesuffix('/manifest')}, so no snapshot {version}") from None
    except (DeltaError, OSError) as error:
        if _mend(url):
            return look(url, version)
        what = "the newest snapshot" if version is None else f"snapshot {version}"
        why = plain(error)
        if version is not None and (newest := look(url, None).version) < version:
            why = f"the newest is {newest}"
        raise StoreNotFound(f"{url.removesuffix('/manifest')}: can't open {what}: {why}") from error
    if version == EMPTY:
        raise StoreNotFound(f"{url.removesuffix('/manifest')} has no snapshot {version}: the first is 0")
    listed = pa.table(table.get_add_actions(flatten=True))
    names = ("path", "partition.stage", "size_bytes", "num_records", "min.item", "max.item")
    columns = [listed[n].to_pylist() if n in listed.column_names else [None] * len(listed) for n in names]
    return Snapshot(table.version(), str(table.metadata().id), tuple(map(File, *columns)))


def _mend(url: str) -> bool:
    """Drop what a power cut left unreadable of the log, and say whether there was any.

    A checkpoint only repeats the entries before it, which are all kept. An entry that never was whole on the disk is
    the newest, and stands for a commit that did not happen: it becomes an empty one. Damage of other kinds, such as
    flipped bits, stays as it is, for people to see.
    """
    log = Path(url, "_delta_log")
    if "://" in url or not log.is_dir():
        return False
    mended = False
    with suppress(OSError):  # it can't be written here
        checkpoints = set(log.glob("*.checkpoint*.parquet"))
        for path in {path for path in checkpoints if not _is_parquet(path)}:
            path.unlink()
            checkpoints.remove(path)
            mended = True
        hint = log / "_last_checkpoint"
        if hint.exists() and not any(path.name.startswith(_version_in(hint)) for path in checkpoints):
            hint.unlink()
            mended = True
        entries = sorted(log.glob("*.json"))
        if entries and entries[-1].stat().st_size and _is_unfinished(entries[-1]):
            os.truncate(entries[-1], 0)
            mended = True
        if len(entries) == 1 and not entries[0].stat().st_size:
            entries[0].unlink()
            mended = True
    return mended


def _version_in(hint: Path) -> str:
    """The version of the checkpoint that `_last_checkpoint` names, as it stands in file names."""
    try:
        return f"{json.loads(hint.read_bytes())['version']:020d}."
    except (ValueError, KeyError, TypeError):
        return "none"


def _is_parquet(path: Path) -> bool:
    try:
        pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        return of_this_machine(error)  # then nothing is known of the file
    return True


def _is_unfinished(entry: Path) -> bool:
    """Whether an entry ends before its last line does, or with blocks that never reached the disk (zeros)."""
    text = entry.read_bytes().rstrip(b"\n")
    return not text.endswith(b"}") or b"\0" in text


def _look_elsewhere(url: str, version: int | None) -> Snapshot:
    """`look` for a forked process, in a new one."""
    code = (
        "import pickle, sys; from storage.delta_log import _look_safely as look; look(*pickle.load(sys.stdin.buffer))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    request = pickle.dumps((url, version))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=request, capture_output=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"a helper process could not read the log of {url}: {done.stderr.decode()[-2000:]}")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _look_safely(url: str, version: int | None) -> None:
    """The helper's side of `_look_elsewhere`."""
    try:
        answer: object = look(url, version)
    except StoreNotFound as error:
        answer = StoreNotFound(str(error))
    sys.stdout.buffer.write(pickle.dumps(answer))

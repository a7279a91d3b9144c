"""Open the shards of a store, once a process."""

from __future__ import annotations

import os

import pyarrow as pa

from storage import hdf5, parquet
from storage.columns import Shard
from storage.errors import CorruptShard, of_this_machine
from storage.files import Folder

_open: dict[str, tuple[tuple[int, int, int], Shard]] = {}  # path -> (inode, size, mtime), shard


def open_shard(folder: Folder, name: str, size: int, mapped: bool) -> Shard:
    """Open a shard, or return the one this process has open already.

    Args:
        name: path relative to the store.
        size: size in bytes that the manifest names.
        mapped: whether the manifest says that the fixed columns can be mapped.

    Raises:
        CorruptShard: the file is absent, of another size, or can't be parsed.
        OSError: it can't be read here: no permission, too many open files ...
    """
    path = folder.path(name)
    try:
        if folder.local is None:
            state = (0, folder.fs.size(path), 0)
        else:
            stat = os.stat(path)
            state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except FileNotFoundError as error:
        raise CorruptShard(
            f"shard {path} is missing; `scenecache verify` lists its items, a run makes them again"
        ) from error
    if (known := _open.get(path)) and known[0] == state:
        return known[1]
    if state[1] != size:
        raise CorruptShard(
            f"shard {path} has {state[1]} bytes, the manifest says {size}; `scenecache verify` lists its items"
        )
    try:
        shard = (hdf5 if name.endswith(".h5") else parquet).read(folder, name, state, mapped)
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError) as error:
        if of_this_machine(error):
            raise
        raise CorruptShard(
            f"shard {path} can't be opened: {error}; `scenecache verify --deep` finds what is lost"
        ) from error
    _open[path] = (state, shard)
    return shard

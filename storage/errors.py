"""Errors of the feature cache.

    CacheError
    +-- StoreNotFound (FileNotFoundError)   no store, stage or snapshot of that name
    |   +-- StageMissing (KeyError)         the stage, of a store that is there
    +-- RecordMissing (KeyError)            no record under that key
    +-- SchemaError (ValueError)            arrays do not fit the stage's schema
    +-- CorruptShard (OSError)              a shard's bytes are not what was written
    +-- StoreUnwritable (OSError)           disk full, read-only, no permission
    +-- StateMismatch (ValueError)          a saved reading position belongs to other data or settings

Each also derives from the built-in error that a caller would expect.
"""

import difflib
import errno
from collections.abc import Sequence
from typing import Any


class CacheError(Exception):
    """Base of all errors of `storage`."""

    def __str__(self) -> str:  # KeyError would show the repr of its text
        return str(self.args[0]) if self.args else ""


class StoreNotFound(CacheError, FileNotFoundError):
    """The store, stage or snapshot does not exist."""


class StageMissing(StoreNotFound, KeyError):
    """The store has no stage of this name."""


class RecordMissing(CacheError, KeyError):
    """No record is stored under this item key."""


class SchemaError(CacheError, ValueError):
    """A record's arrays do not fit the schema of their stage."""


class CorruptShard(CacheError, OSError):
    """A shard is missing, truncated or altered."""


class StoreUnwritable(CacheError, OSError):
    """The store can't be written: disk full, read-only or no permission."""


class StateMismatch(CacheError, ValueError):
    """A saved reading position belongs to other data or to another order."""


def of_this_machine(error: Exception) -> bool:
    """Whether an error is of this machine or process and not of the file."""
    return isinstance(error, PermissionError | TimeoutError | ConnectionError) or (
        isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
    )


def near(name: Any, known: Sequence[str]) -> str:
    """`; did you mean ...?` with names like the one given."""
    if len(known) > 5000:  # comparing with all would take seconds
        known = [k for k in known if k[:4] == str(name)[:4]][:5000] or known[:5000]
    close = difflib.get_close_matches(str(name), known, n=3)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; there are {len(known)}, such as {', '.join(map(repr, known[:3]))}" if known else ""

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

import errno


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

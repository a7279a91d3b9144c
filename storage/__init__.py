"""The feature cache: schemas, shards, manifest, reader. Knows nothing of extractors.

    cache = storage.open("store")
    record = cache["votenet"]["scene0000_00"]

Importing it needs numpy, pyarrow, h5py, deltalake and fsspec; torch only by `storage.torch_data`.
"""

from storage.errors import (
    CacheError,
    CorruptShard,
    RecordMissing,
    SchemaError,
    StageMissing,
    StateMismatch,
    StoreNotFound,
    StoreUnwritable,
)
from storage.join import Join
from storage.lookup import Lookup
from storage.manifest import Manifest, Row
from storage.reader import Cache, Records, open, read_record
from storage.schema import Column, Record, Schema
from storage.writer import ShardWriter

__all__ = [
    "Cache",
    "CacheError",
    "Column",
    "CorruptShard",
    "Join",
    "Lookup",
    "Manifest",
    "Record",
    "RecordMissing",
    "Records",
    "Row",
    "Schema",
    "SchemaError",
    "ShardWriter",
    "StageMissing",
    "StateMismatch",
    "StoreNotFound",
    "StoreUnwritable",
    "open",
    "read_record",
]

"""What a record looks like: named columns along one element axis.

A record is a `dict[str, numpy.ndarray]`. With an element axis (objects, frames,
views) every array has that axis first and all have the same length; without one
each array has exactly its column's dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from storage.errors import SchemaError

Record = dict[str, np.ndarray]

TEXT = {"string": str, "bytes": bytes}
_NUMBERS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)


@dataclass(frozen=True)
class Column:
    """One named array of a record.

    Attributes:
        dims: sizes behind the element axis; `()` is one value per element. `(None,)` is
            a list of any length per element, given as an object array of 1-D arrays or lists.
        dtype: a numpy name (`float16`, `int32`, `bool` ...), `string` or `bytes`; the last
            two are object arrays of `str` or `bytes`.
        unit: physical unit, `m`, `rad`, `s`, `px`; empty where there is none.
        frame: coordinate frame, `scan` (as in the file) or `aligned` (axis-aligned) ...
        nullable: floats only: NaN is stored as null (a missing value with a reason elsewhere).
        doc: one line on what it is; columns that differ in it alone are equal, so that it can be reworded.
    """

    dims: tuple[int | None, ...] = ()
    dtype: str = "float32"
    unit: str = ""
    frame: str = ""
    nullable: bool = False
    doc: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in TEXT and np.dtype(self.dtype).name not in _NUMBERS:
            raise ValueError(f"dtype {self.dtype!r} can't be stored; choose one of {', '.join([*_NUMBERS, *TEXT])}")
        if self.dtype in TEXT and self.dims != ():
            raise ValueError(f"a {self.dtype} column holds one value per element, so its dims are (), not {self.dims}")
        if any(size is not None and size < 1 for size in self.dims):
            raise ValueError(f"dims {self.dims}: every size is at least 1")
        if None in self.dims and self.dims != (None,):
            raise ValueError(f"dims {self.dims}: None (any length) is allowed only alone, as (None,)")
        if self.nullable and not (self.dtype.startswith("float") and None not in self.dims):
            raise ValueError(f"nullable needs a float column of fixed dims, this is {self.dtype} {self.dims}")

    def __repr__(self) -> str:
        given = [repr(getattr(self, f.name)) for f in fields(self)[:2]]
        given += [f"{f.name}={value!r}" for f in fields(self)[2:] if (value := getattr(self, f.name)) != f.default]
        return f"Column({', '.join(given)})"

    @cached_property
    def fixed(self) -> bool:
        """True where every element takes the same number of bytes (can be memory-mapped)."""
        return self.dtype not in TEXT and None not in self.dims and not self.nullable

    @cached_property
    def element_shape(self) -> tuple[int, ...]:
        """Shape of one element in the array that a record holds; `()` for a list, which is one object."""
        return tuple(size for size in self.dims if size is not None)

    @cached_property
    def numpy(self) -> np.dtype:
        """dtype of the array that a record holds (`object` for text and lists)."""
        return np.dtype(object if self.dtype in TEXT or None in self.dims else self.dtype)


@dataclass(frozen=True)
class Schema:
    """The columns of a stage's records.

    Attributes:
        columns: name -> Column, in stored order.
        element: name of the element axis (`object`, `frame`, `view`), None for one row an item.
        format: `parquet` (object tables) or `hdf5` (dense tensors).
        compress: compress the shards; such shards are not memory-mapped.
    """

    columns: Mapping[str, Column]
    element: str | None = None
    format: Literal["parquet", "hdf5"] = "parquet"
    compress: bool = False
    version: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if "item" in self.columns:
            raise ValueError("column name 'item' is taken: it holds the item key in every shard")
        if bad := [name for name in self.columns if not name.isidentifier()]:
            raise ValueError(f"column names {bad} are not identifiers (letters, digits, underscores)")
        if not self.columns:
            raise ValueError("a schema needs at least one column")
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def __repr__(self) -> str:
        """A line for each column: its array, unit (frame), and what it is."""
        arrays = {
            name: f"{c.dtype} {(self.element, *c.dims) if self.element else c.dims}".replace("'", "")
            for name, c in self.columns.items()
        }
        wide, wider = max(map(len, arrays)), max(map(len, arrays.values()))
        lines = [f"Schema(element={self.element!r}, format={self.format!r}, compress={self.compress})"]
        for name, c in self.columns.items():
            about = "  ".join(filter(None, [c.unit, c.frame and f"({c.frame})", c.doc]))
            lines.append(f"  {name:<{wide}}  {arrays[name]:<{wider}}  {about}".rstrip())
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # a mappingproxy does not pickle
        return Schema, (dict(self.columns), self.element, self.format, self.compress)

    def rows(self, record: Mapping[str, np.ndarray]) -> int:
        """Number of elements of a checked record (1 without an element axis)."""
        return len(next(iter(record.values()))) if self.element else 1

    def check(self, record: Mapping[str, Any], where: str) -> Record:
        """Return the record as it will be read back: C-contiguous arrays of the declared dtypes.

        Lists become 1-D arrays of the column's dtype, and every NaN of a nullable column the same NaN.

        Args:
            record: column name -> array.
            where: `stage item`, for the error text.

        Raises:
            SchemaError: a column is missing, unknown, of another shape or dtype, the columns
                disagree on the number of elements, a text value is not of its column's type, or the
                record is no mapping of arrays at all.
        """
        if not isinstance(record, Mapping):
            raise SchemaError(f"{where}: {type(record).__name__} in place of a record, a dict of arrays by column")
        if missing := self.columns.keys() - record.keys():
            raise SchemaError(f"{where}: no column {sorted(missing)}; return it or drop it from the schema")
        if unknown := record.keys() - self.columns.keys():
            raise SchemaError(f"{where}: column {sorted(unknown)} is not in the schema; add it or do not return it")
        checked: Record = {}
        count: int | None = None
        for name, column in self.columns.items():
            array = record[name]
            if type(array) is not np.ndarray or column.numpy.hasobject:
                array = _array(array, object if column.numpy.hasobject else None, f"{where}: '{name}'")
            if array.dtype != column.numpy:
                raise SchemaError(f"{where}: '{name}' is {array.dtype}, the schema says {column.dtype}")
            dims = () if column.numpy.hasobject and None in column.dims else column.dims
            found = array.shape[1:] if self.element else array.shape
            if (self.element and array.ndim == 0) or found != dims:
                expected = (self.element, *column.dims) if self.element else column.dims
                raise SchemaError(f"{where}: '{name}' has shape {array.shape}, expected {expected}")
            if self.element:
                if count is None:
                    count = len(array)
                elif len(array) != count:
                    raise SchemaError(
                        f"{where}: '{name}' has {len(array)} {self.element}s, the columns before it {count}"
                    )
            if not column.fixed or not array.flags.c_contiguous:  # else it is stored as it is
                array = _stored(column, self.format, array, f"{where}: '{name}'")
            checked[name] = array
        return checked

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_json`."""
        columns = {name: asdict(column) for name, column in self.columns.items()}
        for column in columns.values():
            column["dims"] = list(column["dims"])
        return {
            "version": self.version, "element": self.element, "format": self.format,
            "compress": self.compress, "columns": columns,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        """Rebuild a schema from `to_json`'s output."""
        columns = {n: Column(**{**c, "dims": tuple(c["dims"])}) for n, c in data["columns"].items()}
        return cls(columns, data["element"], data["format"], data["compress"])


def _array(value: Any, dtype: type | None, where: str) -> np.ndarray:
    """The value as an array, which lists of unequal lengths are not, nor tensors on a GPU or with a gradient."""
    try:
        return np.asarray(value, dtype=dtype)
    except Exception as error:
        text = " ".join(str(error).split())
        raise SchemaError(f"{where} is a {type(value).__name__} that gives no array: {text}") from None


def one_nan(array: np.ndarray) -> np.ndarray:
    """The array with every NaN as numpy writes it: a null keeps no other bits, and record digests count bits."""
    missing = np.isnan(array)
    return np.where(missing, np.array(np.nan, array.dtype), array) if missing.any() else array


def _stored(column: Column, format: str, array: np.ndarray, where: str) -> np.ndarray:
    """The array as it is read back; text and lists are checked value by value."""
    if column.dtype in TEXT:
        kind = TEXT[column.dtype]
        for value in array.flat:
            if type(value) is not kind:
                raise SchemaError(f"{where} holds {value!r:.60}, expected {kind.__name__}")
            if kind is str and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise SchemaError(f"{where} holds {value!r:.60}, which is not valid Unicode text") from None
            if format == "hdf5" and column.dtype == "string" and "\0" in value:
                raise SchemaError(f"{where} holds a string with a NUL, which HDF5 can't store; use dtype 'bytes'")
        return array
    if column.numpy.hasobject:
        lists = np.empty(array.shape, object)
        for index, value in np.ndenumerate(array):
            values = _array(value, None, where)
            if values.ndim != 1 or not (len(values) == 0 or np.can_cast(values.dtype, column.dtype, "same_kind")):
                raise SchemaError(
                    f"{where} holds {values.dtype} of shape {values.shape}, expected a list of {column.dtype}"
                )
            lists[index] = values.astype(column.dtype)
        return lists
    if column.nullable:
        array = one_nan(array)
    return np.ascontiguousarray(array).reshape(array.shape)

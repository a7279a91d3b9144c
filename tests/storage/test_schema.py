"""A schema takes what it can store and says of all else what it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from storage import Column, Schema, SchemaError

OBJECTS = Schema({"feature": Column((4,)), "tags": Column((None,), "int32")}, "object")
FEATURE = np.zeros((2, 4), np.float32)


class NoArray:
    """What a tensor on a GPU does."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse Tensor.cpu()")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (None, "where: NoneType in place of a record"),
        ([FEATURE], "where: list in place of a record"),
        ({"feature": [[1.0], [1.0, 2.0]], "tags": [[1], [2]]}, "'feature' is a list that gives no array"),
        ({"feature": NoArray(), "tags": [[1], [2]]}, "'feature' is a NoArray .*tensor to numpy. Use Tensor.cpu()"),
        ({"feature": FEATURE, "tags": [NoArray(), [2]]}, "'tags' is a list that gives no array: .*Use Tensor.cpu"),
        ({"feature": FEATURE, "tags": [[[1], [2, 3]], [2]]}, "'tags' is a list that gives no array"),
    ],
)
def test_what_is_no_record_of_arrays_is_a_schema_error_in_one_line(record: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text) as caught:
        OBJECTS.check(record, "where")
    assert "\n" not in str(caught.value)


def test_lists_of_numbers_are_taken_as_arrays() -> None:
    found = OBJECTS.check({"feature": FEATURE, "tags": [[1, 2], []]}, "where")
    assert [one.tolist() for one in found["tags"]] == [[1, 2], []]


def test_a_schema_is_shown_as_a_table() -> None:
    schema = Schema(
        {"box": Column((7,), unit="m", frame="scan", doc="centre, size, yaw"), "name": Column((), "string")}, "object"
    )
    assert repr(schema).splitlines() == [
        "Schema(element='object', format='parquet', compress=False)",
        "  box   float32 (object, 7)  m  (scan)  centre, size, yaw",
        "  name  string (object,)",
    ]
    assert repr(schema.columns["box"]) == "Column((7,), 'float32', unit='m', frame='scan', doc='centre, size, yaw')"
    assert repr(Schema({"grid": Column((3, 4), "float16")})).endswith("  grid  float16 (3, 4)")

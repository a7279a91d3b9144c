"""What every shard format must do. A format's own test file subclasses `ShardFormatContract`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import Column, CorruptShard, Record, Row, Schema, SchemaError, ShardWriter, read_record
from storage.columns import same
from storage.fingerprint import record_digest

NUMBERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]
NUMBERS.append("float64")
DIMS = [(), (3,), (2, 4), (33,), (5, 7, 2)]  # on both sides of the 32 values up to which numbers stay visible


def identity(stage: str, item: str) -> Row:
    """A row as a worker gives it to the writer."""
    return Row(stage, item, b"f" * 16, b"i" * 16, "0" * 32, "ok")


def write(url: Any, schema: Schema, records: dict[str, Record], stage: str = "fake") -> dict[str, Row]:
    """Write records as one shard; their rows by item."""
    writer = ShardWriter(url, stage, schema)
    for item, record in records.items():
        writer.add(identity(stage, item), record)
    return {row.item: row for row in writer.flush()}


def bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bit pattern, NaN payloads and signed zeros among them."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def some_values(rng: np.random.Generator, column: Column, shape: tuple[int, ...], texts: list[str]) -> np.ndarray:
    if column.dtype in ("string", "bytes") or None in column.dims:
        values = np.empty(shape, object)
        for index in np.ndindex(shape):
            text = texts[rng.integers(len(texts))]
            if None in column.dims:
                values[index] = bits(rng, (int(rng.integers(4)),), column.dtype)
            else:
                values[index] = text if column.dtype == "string" else text.encode() + b"\0" * int(rng.integers(2))
        return values
    values = bits(rng, (*shape, *column.dims), column.dtype)  # type: ignore[arg-type]
    if column.nullable:
        values = np.where(rng.random(values.shape) < 0.3, np.array(np.nan, values.dtype), values)
    return values


def columns() -> st.SearchStrategy[Column]:
    numbers = st.builds(Column, st.sampled_from(DIMS), st.sampled_from(NUMBERS))
    nullable = st.builds(
        lambda dims, dtype: Column(dims, dtype, nullable=True), st.sampled_from(DIMS), st.sampled_from(NUMBERS[-3:])
    )
    lists = st.builds(lambda dtype: Column((None,), dtype), st.sampled_from(NUMBERS))
    text = st.builds(lambda dtype: Column((), dtype), st.sampled_from(["string", "bytes"]))
    return st.one_of(numbers, numbers, nullable, lists, text)


class ShardFormatContract:
    format: ClassVar[str]

    def schema(self, **changes: Any) -> Schema:
        given = {
            "feature": Column((64,), "float16"),
            "box": Column((7,), "float32", unit="m", frame="scan"),
            "seen": Column((), "bool"),
            "label": Column((), "uint8"),
            "name": Column((), "string"),
        }
        options = {"element": "object", "format": self.format} | changes
        return Schema(options.pop("columns", given), **options)

    def record(self, count: int, seed: int = 0) -> Record:
        rng = np.random.default_rng(seed)
        return {
            "feature": rng.random((count, 64)).astype(np.float16),
            "box": rng.random((count, 7), np.float32),
            "seen": rng.random(count) < 0.5,
            "label": rng.integers(0, 255, count, dtype=np.uint8),
            "name": np.array([f"stuhl {i} Ä" for i in range(count)], object),
        }

    @settings(
        max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors]
    )
    @given(
        schema_columns=st.lists(columns(), min_size=1, max_size=4),
        element=st.sampled_from([None, "object"]),
        compress=st.booleans(),
        counts=st.lists(st.integers(0, 7), min_size=1, max_size=5),
        texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_record_of_any_schema_reads_back_to_the_last_bit(
        self,
        schema_columns: list[Column],
        element: str | None,
        compress: bool,
        counts: list[int],
        texts: list[str],
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        named = {f"column_{i}": column for i, column in enumerate(schema_columns)}
        schema = Schema(named, element, self.format, compress)  # type: ignore[arg-type]
        records = {
            f"item {i}": {n: some_values(rng, c, (count,) if element else (), texts) for n, c in named.items()}
            for i, count in enumerate(counts)
        }
        with tempfile.TemporaryDirectory() as store:
            rows = write(store, schema, records)
            for item, record in records.items():
                found = read_record(store, rows[item], schema)
                for name, values in schema.check(record, item).items():
                    if values.dtype == object:
                        assert found[name].shape == values.shape
                        for a, b in zip(found[name].flat, values.flat, strict=True):
                            assert same(a, b) if isinstance(b, np.ndarray) else (type(a) is type(b) and a == b)
                    elif schema.columns[name].nullable:
                        np.testing.assert_array_equal(found[name], values)
                        assert found[name].dtype == values.dtype
                    else:
                        assert same(found[name], values)
                assert record_digest(found) == rows[item].digest

    def test_a_record_without_elements_reads_back_with_its_shapes(self, tmp_path: Path) -> None:
        for name, records in {"alone": [0], "among": [2, 0, 3]}.items():
            rows = write(tmp_path / name, self.schema(), {str(i): self.record(n) for i, n in enumerate(records)})
            empty = rows[str(records.index(0))]
            assert (empty.status, empty.rows) == ("empty", 0)
            found = read_record(tmp_path / name, empty)
            assert {n: v.shape for n, v in found.items()} == {
                "feature": (0, 64), "box": (0, 7), "seen": (0,), "label": (0,), "name": (0,),
            }  # fmt: skip
            assert found["feature"].dtype == np.float16

    def test_large_columns_are_views_of_the_mapped_file_that_nobody_can_write_to(self, tmp_path: Path) -> None:
        rows = write(tmp_path, self.schema(), {"a": self.record(3), "b": self.record(5, seed=1)})
        assert all(row.mapped for row in rows.values())
        first, again = (read_record(tmp_path, rows["b"]) for _ in range(2))
        for name in ("feature", "box"):
            assert np.shares_memory(first[name], again[name])
        for name, values in first.items():
            assert not values.flags.writeable, name
            with pytest.raises(ValueError, match="read-only"):
                values[...] = values
        for name in ("feature", "box"):  # of the mapping; the others are copies, which are their reader's own
            with pytest.raises(ValueError, match="writeable|WRITEABLE"):
                first[name].flags.writeable = True

    def test_views_outlive_the_file(self, tmp_path: Path) -> None:
        rows = write(tmp_path, self.schema(), {"a": self.record(3)})
        found = read_record(tmp_path, rows["a"])["feature"]
        os.unlink(tmp_path / rows["a"].shard)
        assert same(found, self.record(3)["feature"])

    def test_open_shards_hold_no_file_descriptors(self, tmp_path: Path) -> None:
        rows = [write(tmp_path, self.schema(), {str(i): self.record(3, seed=i)})[str(i)] for i in range(12)]
        before = len(os.listdir("/proc/self/fd"))
        kept = [read_record(tmp_path, row) for row in rows]
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(kept) == 12

    def test_compressed_shards_are_decoded_and_equal(self, tmp_path: Path) -> None:
        records = {str(i): self.record(40, seed=i) for i in range(30)}
        plain = write(tmp_path / "plain", self.schema(), records)
        small = write(tmp_path / "small", self.schema(compress=True), records)
        assert not any(row.mapped for row in small.values())
        for item in records:
            assert (
                plain[item].digest == small[item].digest == record_digest(read_record(tmp_path / "small", small[item]))
            )

    def test_equal_content_gives_an_equal_file_under_the_same_name(self, tmp_path: Path) -> None:
        records = {"a": self.record(3), "b": self.record(4)}
        names = {write(tmp_path / str(i), self.schema(), records)["a"].shard for i in range(2)}
        assert len(names) == 1
        assert len({(tmp_path / str(i) / next(iter(names))).read_bytes() for i in range(2)}) == 1
        other = write(tmp_path / "2", self.schema(), {"a": self.record(3), "b": self.record(4, seed=1)})
        assert other["a"].shard not in names

    def test_columns_can_be_read_alone(self, tmp_path: Path) -> None:
        row = write(tmp_path, self.schema(), {"a": self.record(3)})["a"]
        assert list(read_record(tmp_path, row, columns=["label", "box"])) == ["label", "box"]

    def test_a_shard_is_found_missing_truncated_or_foreign(self, tmp_path: Path) -> None:
        row = write(tmp_path, self.schema(), {"a": self.record(3)})["a"]
        path = tmp_path / row.shard
        whole = path.read_bytes()
        path.write_bytes(whole[:-7])
        with pytest.raises(CorruptShard, match=f"has {len(whole) - 7} bytes, the manifest says {len(whole)}"):
            read_record(tmp_path, row)
        path.write_bytes(b"x" * len(whole))
        with pytest.raises(CorruptShard, match="can't be opened"):
            read_record(tmp_path, row)
        path.unlink()
        with pytest.raises(CorruptShard, match="is missing"):
            read_record(tmp_path, row)
        path.write_bytes(whole)
        assert same(read_record(tmp_path, row)["feature"], self.record(3)["feature"])

    def test_another_schema_than_expected_is_an_error(self, tmp_path: Path) -> None:
        row = write(tmp_path, self.schema(), {"a": self.record(3)})["a"]
        with pytest.raises(CorruptShard, match="holds columns"):
            read_record(tmp_path, row, schema=self.schema(columns={"feature": Column((64,), "float16")}))

    def test_a_record_that_does_not_fit_is_refused_by_name_and_the_others_go_on(self, tmp_path: Path) -> None:
        writer = ShardWriter(tmp_path, "fake", self.schema())
        writer.add(identity("fake", "good"), self.record(2))
        with pytest.raises(SchemaError, match=r"fake 'bad': 'box' has shape \(2, 6\), expected \('object', 7\)"):
            writer.add(identity("fake", "bad"), self.record(2) | {"box": np.zeros((2, 6), np.float32)})
        with pytest.raises(SchemaError, match="not valid Unicode"):
            writer.add(identity("fake", "bad"), self.record(1) | {"name": np.array(["\ud800"], object)})
        with pytest.raises(SchemaError, match="expected str"):
            writer.add(identity("fake", "bad"), self.record(1) | {"name": np.array([None], object)})
        assert [row.item for row in writer.flush()] == ["good"]

    def test_a_shard_under_an_fsspec_url_reads_back(self) -> None:
        url = f"memory://scenecache-{self.format}"
        records = {"a": self.record(3), "b": self.record(0), "c": self.record(4, seed=1)}
        for compress in (False, True):
            rows = write(url, self.schema(compress=compress), records)
            for item in records:
                assert record_digest(read_record(url, rows[item])) == rows[item].digest

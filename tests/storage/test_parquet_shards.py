"""Parquet shards: the contract, the layout that makes them mappable, and what other tools see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import storage
from storage import Column, CorruptShard, Manifest, Record, Schema, parquet, read_record, shards
from storage.columns import Decoded
from tests.contracts.shard_format import ShardFormatContract, write


@pytest.fixture(scope="class")
def small_groups() -> Iterator[None]:
    """Row groups that end after 1000 bytes, so that small shards have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_GROUP_BYTES", 1000)
        patch.setattr(parquet, "_COMPRESSED_GROUP_BYTES", 1000)
        yield


def unequal(case: ShardFormatContract) -> dict[str, Record]:
    """Records of many sizes, some without elements, the last one too."""
    return {f"{i:02}": case.record(count, seed=i) for i, count in enumerate([3, 0, 9, 1, 1, 40, 0, 0, 17, 2, 5, 8, 0])}


@pytest.mark.usefixtures("small_groups")
class TestParquetOfManyRowGroups(ShardFormatContract):
    format = "parquet"

    def test_row_groups_end_between_records_and_each_column_of_one_is_one_plain_page(self, tmp_path: Path) -> None:
        records = unequal(self)
        rows = write(tmp_path, self.schema(), records)
        path = tmp_path / rows["00"].shard
        meta, data, first, ends = pq.read_metadata(path), path.read_bytes(), 0, {0}
        for group in range(meta.num_row_groups):
            count = meta.row_group(group).num_rows
            chunk = meta.row_group(group).column(1)
            assert (chunk.path_in_schema, set(chunk.encodings)) == ("feature", {"PLAIN", "RLE"})
            end = chunk.data_page_offset + chunk.total_compressed_size
            found = np.frombuffer(data[end - count * 128 : end], np.float16).reshape(count, 64)
            np.testing.assert_array_equal(
                found, np.concatenate([r["feature"] for r in records.values()])[first : first + count]
            )
            first += count
            ends.add(first)
        assert first == sum(row.rows for row in rows.values())
        assert 5 <= len(ends) - 1 < len(records)
        assert ends < {row.first_row + row.rows for row in rows.values()} | {0}

    def test_records_by_key_are_views_of_the_group_that_holds_them_however_often_they_are_read(
        self, tmp_path: Path
    ) -> None:
        records = unequal(self)
        rows = write(tmp_path, self.schema(), records)
        more = {f"more {key}": self.record(len(r["seen"]) + 1, seed=100) for key, r in records.items()}
        Manifest(tmp_path).commit([*rows.values(), *write(tmp_path, self.schema(), more).values()])
        cache = storage.open(tmp_path)["fake"]
        few, everything = cache.select("label", "feature"), records | more
        shard = cache.shards(list(everything))
        order = np.random.default_rng(0).permutation([*everything] * 3).tolist()
        for key in order:
            for name, values in few[key].items():
                np.testing.assert_array_equal(values, everything[key][name])
            for name, values in cache[key].items():
                np.testing.assert_array_equal(values, everything[key][name])
                assert values.dtype == everything[key][name].dtype
        assert np.shares_memory(few["05"]["feature"], cache["05"]["feature"])
        np.testing.assert_array_equal(cache.shards(list(everything)), shard)

    def test_shards_of_one_large_group_as_earlier_versions_wrote_them_still_map(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        records = unequal(self)
        monkeypatch.setattr(parquet, "_GROUP_BYTES", 1 << 40)
        rows = write(tmp_path, self.schema(), records)
        monkeypatch.undo()
        assert pq.read_metadata(tmp_path / rows["00"].shard).num_row_groups == 1
        for item, record in records.items():
            for name, values in read_record(tmp_path, rows[item]).items():
                np.testing.assert_array_equal(values, record[name])
        first, again = (read_record(tmp_path, rows["05"])["feature"] for _ in range(2))
        assert np.shares_memory(first, again)

    def test_equal_content_in_groups_of_another_size_is_a_file_of_another_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small = write(tmp_path, self.schema(), {"a": self.record(3)})["a"].shard
        monkeypatch.setattr(parquet, "_GROUP_BYTES", 1 << 40)
        assert write(tmp_path, self.schema(), {"a": self.record(3)})["a"].shard != small


class TestParquet(ShardFormatContract):
    format = "parquet"

    def test_values_lie_raw_where_the_footer_says(self, tmp_path: Path) -> None:
        record = self.record(80)
        row = write(tmp_path, self.schema(), {"a": record})["a"]
        chunk = pq.ParquetFile(tmp_path / row.shard).metadata.row_group(0).column(1)
        assert chunk.path_in_schema == "feature"
        end = chunk.data_page_offset + chunk.total_compressed_size
        data = (tmp_path / row.shard).read_bytes()[end - record["feature"].nbytes : end]
        np.testing.assert_array_equal(np.frombuffer(data, np.float16).reshape(80, 64), record["feature"])

    def test_duckdb_reads_geometry_text_and_numbers(self, tmp_path: Path) -> None:
        record = self.record(3)
        row = write(tmp_path, self.schema(), {"a b/c": record})["a b/c"]
        table = duckdb.sql(f"select * from '{tmp_path / row.shard}'").fetchall()
        assert [r[0] for r in table] == ["a b/c"] * 3
        assert [r[1] for r in table] == [v.tobytes() for v in record["feature"]]
        np.testing.assert_array_equal(np.array([r[2] for r in table], np.float32), record["box"])
        assert [r[3] for r in table] == record["seen"].tolist()
        assert [r[4] for r in table] == record["label"].tolist()
        assert [r[5] for r in table] == record["name"].tolist()

    def test_duckdb_reads_small_half_precision_lists_and_nulls(self, tmp_path: Path) -> None:
        schema = Schema(
            {
                "half": Column((2,), "float16"), "flags": Column((2,), "bool"), "ids": Column((None,), "int32"),
                "pose": Column((2,), "float32", nullable=True), "angle": Column((), "float64", nullable=True),
            },
            "object",
        )  # fmt: skip
        ids = np.empty(2, object)
        ids[:] = [[1, 2], []]
        record = {
            "half": np.array([[1, 2], [3, 0.5]], np.float16), "flags": np.array([[True, False], [False, True]]),
            "ids": ids,
            "pose": np.array([[1, np.nan], [np.nan, np.nan]], np.float32), "angle": np.array([np.nan, 2.5]),
        }  # fmt: skip
        path = tmp_path / write(tmp_path, schema, {"a": record})["a"].shard
        assert duckdb.sql(f"select half, flags, ids, pose, angle from '{path}'").fetchall() == [
            ([1, 2], [True, False], [1, 2], [1, None], None),
            ([3, 0.5], [False, True], [], [None, None], 2.5),
        ]

    def test_pandas_reads_a_shard(self, tmp_path: Path) -> None:
        record = self.record(3)
        row = write(tmp_path, self.schema(), {"a": record})["a"]
        frame = pd.read_parquet(tmp_path / row.shard)
        assert list(frame.columns) == ["item", "feature", "box", "seen", "label", "name"]
        np.testing.assert_array_equal(np.stack(frame["box"]).reshape(3, 7), record["box"])
        assert frame["label"].tolist() == record["label"].tolist()
        assert frame["name"].tolist() == record["name"].tolist()

    def test_shape_and_dtype_of_large_columns_are_in_the_metadata(self, tmp_path: Path) -> None:
        row = write(tmp_path, self.schema(), {"a": self.record(3)})["a"]
        field = pq.read_schema(tmp_path / row.shard).field("feature")
        assert field.metadata == {b"dtype": b"<f2", b"shape": b"[64]"}
        assert field.type.byte_width == 128

    def test_a_mapping_that_shows_other_values_is_never_called_mapped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def shifted(path: str) -> object:
            data = bytearray(Path(path).read_bytes())
            data[5] ^= 1  # within the first page's header or values
            data[len(data) // 2] ^= 1
            return shards.pa.py_buffer(bytes(data))

        monkeypatch.setattr(parquet, "map_file", shifted)
        schema = Schema({"feature": Column((512,), "float16")}, "object")
        with pytest.raises(CorruptShard, match="'feature' reads back differently"):
            write(tmp_path, schema, {"a": {"feature": np.ones((100, 512), np.float16)}})
        assert list((tmp_path / "fake").iterdir()) == []

    def test_the_mapping_of_every_row_group_is_proven(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        schema = Schema({"feature": Column((512,), "float16")}, "object")
        rng = np.random.default_rng(0)
        records = {str(i): {"feature": rng.random((80, 512)).astype(np.float16)} for i in range(200)}
        last = records["199"]["feature"].tobytes()

        def changed(path: str) -> object:
            data = Path(path).read_bytes()
            place = data.rindex(last[-1024:])
            return shards.pa.py_buffer(data[:place] + bytes(1024) + data[place + 1024 :])

        monkeypatch.setattr(parquet, "map_file", changed)
        with pytest.raises(CorruptShard, match="'feature' reads back differently from row 15920 on"):
            write(tmp_path, schema, records)

    def test_one_key_of_a_compressed_shard_decodes_a_part_of_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schema = Schema({"feature": Column((512,), "float16")}, "object", compress=True)
        rng = np.random.default_rng(0)
        records = {str(i): {"feature": rng.random((80, 512)).astype(np.float16)} for i in range(200)}
        rows = write(tmp_path, schema, records)
        decoded: list[int] = []
        group = Decoded._group
        monkeypatch.setattr(Decoded, "_group", lambda self, key: decoded.append(key[-1]) or group(self, key))
        np.testing.assert_array_equal(read_record(tmp_path, rows["77"])["feature"], records["77"]["feature"])
        assert 1 <= len(decoded) <= 2
        assert pq.ParquetFile(tmp_path / rows["77"].shard).num_row_groups >= 4

    def test_a_file_of_another_program_is_refused(self, tmp_path: Path) -> None:
        row = write(tmp_path, self.schema(), {"a": self.record(3)})["a"]
        frame = pq.read_table(tmp_path / row.shard).replace_schema_metadata(None)
        pq.write_table(frame, tmp_path / row.shard)
        size = (tmp_path / row.shard).stat().st_size
        with pytest.raises(CorruptShard, match="no 'scenecache' schema"):
            read_record(tmp_path, replace(row, shard_bytes=size))

    def test_a_shard_rewritten_by_another_tool_is_still_read(self, tmp_path: Path) -> None:
        record = self.record(30)
        row = write(tmp_path, self.schema(), {"a": record})["a"]
        pq.write_table(
            pq.read_table(tmp_path / row.shard), tmp_path / row.shard, compression="snappy", row_group_size=7
        )
        size = (tmp_path / row.shard).stat().st_size
        found = read_record(tmp_path, replace(row, shard_bytes=size, mapped=False))
        for name, values in record.items():
            np.testing.assert_array_equal(found[name], values)

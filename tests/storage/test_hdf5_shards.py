"""HDF5 shards: the contract, and what plain h5py sees."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from storage import Column, Schema, SchemaError, read_record
from tests.contracts.shard_format import ShardFormatContract, write


class TestHdf5(ShardFormatContract):
    format = "hdf5"

    def test_plain_h5py_reads_a_shard(self, tmp_path: Path) -> None:
        record, other = self.record(3), self.record(2, seed=1)
        row = write(tmp_path, self.schema(), {"a": record, "ü": other})["ü"]
        with h5py.File(tmp_path / row.shard) as file:
            assert file["item"].asstr()[:].tolist() == ["a"] * 3 + ["ü"] * 2
            rows = slice(row.first_row, row.first_row + row.rows)
            for name in ("feature", "box", "seen", "label"):
                np.testing.assert_array_equal(file[name][rows], other[name])
                assert file[name].dtype == other[name].dtype
            assert file["name"].asstr()[rows].tolist() == other["name"].tolist()
            assert Schema.from_json(json.loads(file.attrs["scenecache"])) == self.schema()

    def test_datasets_are_contiguous_and_mapped_by_their_offset(self, tmp_path: Path) -> None:
        record = self.record(80)
        row = write(tmp_path, self.schema(), {"a": record})["a"]
        with h5py.File(tmp_path / row.shard) as file:
            assert file["feature"].chunks is None
            offset = file["feature"].id.get_offset()
        data = np.fromfile(tmp_path / row.shard, np.float16, 80 * 64, offset=offset).reshape(80, 64)
        np.testing.assert_array_equal(data, record["feature"])

    def test_a_shard_is_read_where_a_file_system_refuses_locks(self, tmp_path: Path) -> None:
        record = self.record(3)
        row = write(tmp_path, self.schema(), {"a": record})["a"]
        with open(tmp_path / row.shard) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # HDF5's own lock now fails, as on some network file systems
            with pytest.raises(OSError, match="lock"):
                h5py.File(tmp_path / row.shard, locking=True)
            assert read_record(tmp_path, row)["name"].tolist() == record["name"].tolist()

    def test_frames_without_an_element_axis_keep_their_shape(self, tmp_path: Path) -> None:
        schema = Schema({"grid": Column((4, 6, 3), "uint8"), "note": Column((), "string")}, format="hdf5")
        record = {
            "grid": np.arange(72, dtype=np.uint8).reshape(4, 6, 3), "note": np.array("x", object),
        }  # fmt: skip
        found = read_record(tmp_path, write(tmp_path, schema, {"a": record, "b": record})["b"])
        np.testing.assert_array_equal(found["grid"], record["grid"])
        assert found["note"].shape == ()
        assert found["note"].item() == "x"

    def test_a_string_that_hdf5_cuts_short_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match="NUL"):
            write(tmp_path, self.schema(), {"a": self.record(1) | {"name": np.array(["a\0b"], object)}})

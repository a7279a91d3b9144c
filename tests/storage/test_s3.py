"""A store on S3: a server of the same interface in this process (moto)."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import storage
from storage import Manifest, RecordMissing, Schema, ShardWriter, StoreNotFound
from storage.verify import gc, verify
from tests.storage.small_store import OBJECTS, assert_same, digests_of, fill, make_at_once, objects, row

pytest.importorskip("moto", reason="moto is not installed: no S3 server to test with")
pytest.importorskip("s3fs", reason="s3fs is not installed")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        }.items():  # fmt: skip
            environment.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # those of another server
        boto3.client("s3").create_bucket(Bucket="features")
        yield "s3://features"
    server.stop()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("format", ["parquet", "hdf5"])
def test_records_read_back_and_damage_is_found(bucket: str, format: str, compress: bool) -> None:
    url = f"{bucket}/{format}/{compress}"
    records = {f"item {i}": objects(i % 4, seed=i) for i in range(12)}
    schema = Schema(OBJECTS.columns, "object", format, compress)  # type: ignore[arg-type]
    rows = fill(url, records, schema=schema)
    cache = storage.open(url)
    for key, record in records.items():
        assert_same(cache["objects"][key], record)
    assert verify(url, deep=True).faults == ()
    cache.manifest.folder.delete(rows["item 1"].shard)
    assert {fault.item for fault in verify(url).faults} == set(records)


def test_values_of_several_row_groups_are_read_by_byte_range(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.parquet, "_GROUP_BYTES", 1000)
    records = {f"item {i}": objects(5, seed=i) for i in range(9)}
    fill(f"{bucket}/groups", records)
    features = storage.open(f"{bucket}/groups")["objects"].select("feature")
    for key in reversed(records):
        np.testing.assert_array_equal(features[key]["feature"], records[key]["feature"])


def test_a_shard_that_was_not_committed_is_found_and_removed(bucket: str) -> None:
    url = f"{bucket}/orphan"
    fill(url, {"a": objects(2)})
    writer = ShardWriter(url, "objects", OBJECTS)
    writer.add(row("b"), objects(3))
    (lost,) = writer.flush()
    assert list(verify(url).orphans) == [lost.shard]
    assert gc(url, orphan_days=0).removed.keys() == {lost.shard}
    assert list(storage.open(url)["objects"]) == ["a"]
    with pytest.raises(RecordMissing):
        storage.open(url)["objects"]["b"]


def test_processes_that_make_stores_at_once_lose_no_row(bucket: str) -> None:
    urls = [f"{bucket}/shared{i}" for i in range(3)]
    make_at_once(urls, processes=3, commits=2)
    for url in urls:
        assert Manifest(url).rows("objects").num_rows == 12
        assert Manifest(url, 0).id == Manifest(url).id


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_reads_what_its_parent_has_open(bucket: str, method: str) -> None:
    url = f"{bucket}/{method}"
    records = {f"item {i}": objects(3, seed=i) for i in range(10)}
    fill(url, records)
    opened = storage.open(url)["objects"]
    expected = {key: (float(r["box"].sum()), r["name"].tolist()) for key, r in opened.items()}
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=digests_of, args=(opened, answers))
    process.start()
    assert answers.get(timeout=120) == expected
    process.join()


@pytest.mark.parametrize(("url", "package"), [("gs://features/store", "gcsfs"), ("s3://features/store", "s3fs")])
def test_a_url_whose_package_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url[:2], raising=False)  # it was imported before
    with pytest.raises(StoreNotFound, match=rf"can't use {url}: .*scenecache\[{url[:2]}\]"):
        storage.open(url)


def test_a_url_of_no_known_protocol_is_not_taken_for_an_empty_store() -> None:
    with pytest.raises(StoreNotFound, match="Protocol not known: nowhere"):
        storage.open("nowhere://features/store")

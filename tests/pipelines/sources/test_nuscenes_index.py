"""The index of nuScenes' tables: built once, of any layout, and an item's facts change with that item alone."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.inputs import StatCache, digest_inputs
from pipelines.sources import nuscenes_tables
from pipelines.sources.nuscenes import NuScenes
from pipelines.sources.nuscenes_index import Index, open_index
from tests.pipelines.small_nuscenes import read_table, token, write_table
from tests.pipelines.sources.small_drive import KEY, VERSION, facts_of


@pytest.mark.parametrize("indent", [None, 4])
def test_tables_may_be_laid_out_in_any_way(own_drive: Path, indent: int | None) -> None:
    before = facts_of(NuScenes(own_drive))
    for table in nuscenes_tables.TABLES:
        write_table(own_drive / VERSION, table, read_table(own_drive / VERSION, table)[::-1], indent)
    after = facts_of(NuScenes(own_drive))
    assert {k: v for k, v in before.items() if k[1] != "annotations"} == {
        k: v for k, v in after.items() if k[1] != "annotations"
    }, "boxes are in the table's order, nothing else depends on it"
    assert before.keys() == after.keys()


def test_small_pieces_give_the_same_index(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = facts_of(NuScenes(drive))
    monkeypatch.setattr(nuscenes_tables, "_PIECE", 8 * 1500)
    tables = nuscenes_tables.build(drive / VERSION)
    pieces = dataclasses.replace(NuScenes(drive))
    pieces.__dict__["_index"] = Index(tables)
    assert facts_of(pieces) == whole


def test_an_index_is_built_once(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(NuScenes(drive))
    monkeypatch.setattr(nuscenes_tables, "build", lambda folder: pytest.fail("built again"))
    assert facts_of(NuScenes(drive)) == facts


def test_changed_tables_are_read_again_and_the_old_index_goes(own_drive: Path) -> None:
    path = own_drive / VERSION / "sample_annotation.json"
    os.utime(path, (soon := time.time() + 3600, soon))  # so that it does not settle while this runs
    assert len(NuScenes(own_drive).open(KEY, "annotations").boxes) == 6
    found = path.stat()
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"num_lidar_pts": 3,', b'"num_lidar_pts": 4,'))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # the same size and time, as within the clock's grain
    assert 4 in NuScenes(own_drive).open(KEY, "annotations").lidar_points
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "scenecache/nuscenes"
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 1


def test_a_damaged_index_is_built_again(drive: Path) -> None:
    facts = facts_of(NuScenes(drive))
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "scenecache/nuscenes"
    (table,) = cache.glob("*/lidar.arrow")
    table.write_bytes(table.read_bytes()[:100])
    assert facts_of(NuScenes(drive)) == facts
    assert table.stat().st_size > 100


def test_without_a_cache_folder_the_index_is_built_in_memory(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(NuScenes(drive))
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert facts_of(NuScenes(drive)) == facts


def test_processes_that_open_at_once_build_one_index(drive: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        counts = pool.map(_build_and_count, [drive] * 3)
    assert sum(built for built, _ in counts) == 1
    assert {rows for _, rows in counts} == {6}


def _build_and_count(root: Path) -> tuple[int, int]:
    built = 0

    def build() -> Any:
        nonlocal built
        built += 1
        return nuscenes_tables.build(root / VERSION)

    files = [root / VERSION / f"{table}.json" for table in nuscenes_tables.TABLES]
    index = open_index(files, build, Path(os.environ["XDG_CACHE_HOME"]) / "together")
    return built, len(index.row)


def test_tables_that_settle_keep_their_index(own_drive: Path, tmp_path: Path) -> None:
    files = [own_drive / VERSION / f"{table}.json" for table in nuscenes_tables.TABLES]
    tables = nuscenes_tables.build(own_drive / VERSION)
    open_index(files, lambda: tables, tmp_path, settle_ns=10**15)
    for settle_ns in (10**15, 0, 0):  # still fresh, settled now, and known to be
        index = open_index(files, lambda: pytest.fail("built again"), tmp_path, settle_ns)
        assert len(index.row) == 6
    assert not list(tmp_path.glob("*/contents.json"))


def test_content_counts_until_the_tables_have_settled(own_drive: Path, tmp_path: Path) -> None:
    path = own_drive / VERSION / "sample_annotation.json"
    files = [own_drive / VERSION / f"{table}.json" for table in nuscenes_tables.TABLES]
    open_index(files, lambda: nuscenes_tables.build(own_drive / VERSION), tmp_path, settle_ns=10**15)
    found = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"num_lidar_pts": 3,', b'"num_lidar_pts": 4,'))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    index = open_index(files, lambda: nuscenes_tables.build(own_drive / VERSION), tmp_path, settle_ns=0)
    assert 4 in index.tables["object"]["lidar_points"].to_pylist()


def test_a_changed_calibration_changes_only_its_own_items(own_drive: Path, tmp_path: Path) -> None:
    before = digests_of(own_drive, tmp_path)
    rows = read_table(own_drive / VERSION, "calibrated_sensor")
    next(row for row in rows if row["token"] == token("calibration", "scene-0061", "CAM_BACK"))["translation"][0] += (
        1e-9
    )
    write_table(own_drive / VERSION, "calibrated_sensor", rows)
    after = digests_of(own_drive, tmp_path)
    changed = {item for item in before if before[item] != after[item]}
    assert changed == {(token("sample", "scene-0061", frame), "cameras") for frame in range(3)}


def test_a_changed_box_a_changed_pose_and_a_changed_file_change_only_their_items(
    own_drive: Path, tmp_path: Path
) -> None:
    before = digests_of(own_drive, tmp_path)
    boxes = read_table(own_drive / VERSION, "sample_annotation")
    next(row for row in boxes if row["sample_token"] == KEY)["num_lidar_pts"] += 1
    write_table(own_drive / VERSION, "sample_annotation", boxes)
    data = read_table(own_drive / VERSION, "sample_data")
    last = token("sample", "scene-0103", 2)
    image = next(r for r in data if r["sample_token"] == last and r["is_key_frame"] and "CAM_BACK_R" in r["filename"])
    poses = read_table(own_drive / VERSION, "ego_pose")
    next(row for row in poses if row["token"] == image["ego_pose_token"])["translation"][1] += 1e-6
    write_table(own_drive / VERSION, "ego_pose", poses)
    sweep = NuScenes(own_drive).files(token("sample", "scene-0061", 2), "lidar")[10]
    sweep.write_bytes(sweep.read_bytes()[::-1])
    after = digests_of(own_drive, tmp_path)
    changed = {item for item in before if before[item] != after[item]}
    third = token("sample", "scene-0061", 2)
    assert changed == {(KEY, "annotations"), (last, "cameras"), (third, "lidar"), (KEY, "lidar")}, (
        "the tenth sweep before the third key frame is the second key frame"
    )


def test_tables_that_only_move_or_are_rewritten_change_no_item(own_drive: Path, tmp_path: Path) -> None:
    before = digests_of(own_drive, tmp_path)
    moved = own_drive.rename(tmp_path / "elsewhere")
    for table in nuscenes_tables.TABLES:
        write_table(moved / VERSION, table, read_table(moved / VERSION, table), indent=2)
    assert digests_of(moved, tmp_path) == before


def digests_of(root: Path, cache: Path) -> dict[tuple[str, str], bytes | None]:
    digests = digest_inputs(NuScenes(root), NuScenes.kinds, StatCache(cache / "files.sqlite"))
    items = digests.items.to_pylist()
    return {
        (item, kind): value
        for kind in digests.kinds
        for item, value in zip(items, digests.kinds[kind].to_pylist(), strict=True)
    }

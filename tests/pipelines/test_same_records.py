"""One job, many ways to run it: the records are the same, bit for bit.

No tolerance is needed on the CPU, where VoteNet takes the scans of a batch one by one.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from extractors.base import Weights
from extractors.scan_info import ScanInfo
from extractors.video import Video
from extractors.votenet import VoteNet
from pipelines.make_data.scannet import make
from pipelines.questions.sqa3d import SQA3DQuestions
from pipelines.runners.local import LocalRunner
from pipelines.sources.scannet import ScanNet
from pipelines.stage import Job, Stage
from tests.pipelines.running import Runs, job

SCENES = 3
STAGES = ("scan_info", "video", "votenet", "sqa3d_questions")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rooms")
    make(folder, seed=1, scenes=SCENES, quick=True)
    return folder


def rooms(data: Path, batch: int = 2, workers: int | None = None, only: int = len(STAGES)) -> Job:
    votenet = VoteNet(weights=Weights("untrained:0"), num_points=2048, proposals=16)
    stages = (
        Stage(ScanInfo(), batch=batch, workers=workers),
        Stage(Video(size=32), batch=batch, workers=workers),
        Stage(votenet, batch=batch, workers=workers),
    )
    questions = (SQA3DQuestions(data / "sqa_task"),) if only == len(STAGES) else ()
    return job(ScanNet(data), *stages[:only], tables=questions)


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The store of one local run from start to end."""
    runs = Runs(tmp_path_factory.mktemp("straight"))
    assert runs(rooms(data)).exit_code == 0
    return runs


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from pipelines.runners.ray import start_ray

    folder = tempfile.mkdtemp(prefix="scenecache-ray-")
    start_ray(2, object_store_memory=200 << 20, _temp_dir=folder)
    yield
    import ray

    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def assert_same(runs: Runs, expected: Runs) -> None:
    for stage in STAGES:
        assert expected.digests(stage)
        assert runs.digests(stage) == expected.digests(stage), stage


def test_again_in_another_store(data: Path, straight: Runs, tmp_path: Path) -> None:
    again = Runs(tmp_path)
    again(rooms(data))
    assert_same(again, straight)


@pytest.mark.parametrize("batch", [1, 4])
def test_other_batch_sizes(batch: int, data: Path, straight: Runs, tmp_path: Path) -> None:
    other = Runs(tmp_path)
    assert other(rooms(data, batch=batch)).exit_code == 0
    assert_same(other, straight)


def test_stage_by_stage_in_several_runs(data: Path, straight: Runs, tmp_path: Path) -> None:
    parts = Runs(tmp_path)
    for only in range(1, len(STAGES) + 1):
        assert parts(rooms(data, only=only)).exit_code == 0
    assert_same(parts, straight)


class Interrupted(LocalRunner):
    """Gives up after its first reports."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def poll(self, *args, **how):  # type: ignore[no-untyped-def]
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().poll(*args, **how)


@pytest.mark.parametrize("after", [1, 3])
def test_interrupted_and_run_again(after: int, data: Path, straight: Runs, tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with contextlib.suppress(KeyboardInterrupt):
        assert runs(rooms(data, batch=2), runner=Interrupted(after)).exit_code != 0
    done = sum(len(runs.digests(stage)) for stage in STAGES)
    assert done < sum(len(straight.digests(stage)) for stage in STAGES)
    assert runs(rooms(data, batch=2)).exit_code == 0
    assert_same(runs, straight)


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, 2])
def test_on_ray_with_one_and_two_workers(
    workers: int, data: Path, straight: Runs, cluster: None, tmp_path: Path
) -> None:
    from pipelines.runners.ray import RayRunner

    runs = Runs(tmp_path)
    assert runs(rooms(data, workers=workers), runner=RayRunner(workers)).exit_code == 0
    assert_same(runs, straight)

"""Stages on Ray: the same records as in one process, whatever dies on the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from extractors.base import recipe
from pipelines.stage import Stage
from pipelines.worker import Report, StageTask, Work
from storage.fingerprint import recipe_id
from tests.contracts.runner import RunnerContract
from tests.pipelines.fakes import Both, Folder, Hosted, NoWeights, Numbers, OnGpu, Questions, Sums
from tests.pipelines.running import Runs, counts, job

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    """Ray on two CPUs and a GPU that is only said to be there."""
    from pipelines.runners.ray_session import start_ray

    folder = tempfile.mkdtemp(prefix="scenecache-ray-")
    start_ray(2, num_gpus=1, object_store_memory=200 << 20, _temp_dir=folder)
    yield
    import ray

    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runner(cluster):
    from pipelines.runners.ray import RayRunner

    return RayRunner


@pytest.fixture
def texts() -> dict[str, str]:
    texts = {f"item {i:02d}": "x" * i for i in range(40)}
    return texts | {"item 05": "bad", "item 06": "bug", "item 07": "none", "item 08": "shape"}


@pytest.fixture
def source(tmp_path, texts) -> Folder:
    return Folder.make(tmp_path / "raw", texts)


@pytest.fixture
def expected(tmp_path, source) -> Runs:
    """The store of a local run."""
    runs = Runs(tmp_path / "local")
    runs(chain(source))
    return runs


def chain(source, numbers=Numbers, **how):
    stages = (Stage(numbers(), **how), Stage(Sums(), **how), Stage(Both(), **how))
    return job(source, *stages, tables=(Questions(tuple(source.keys())),))


STAGES = ("numbers", "sums", "both", "questions")


def assert_same(runs: Runs, expected: Runs, ignore=frozenset()) -> None:
    for stage in STAGES:
        ours, theirs = runs.rows(stage), expected.rows(stage)
        assert ours.keys() - ignore == theirs.keys() - ignore
        for item, row in ours.items():
            if item.rsplit("-", 1)[0] not in ignore:
                same = ("status", "digest", "fingerprint", "error_class", "rows")
                assert {n: row[n] for n in same} == {n: theirs[item][n] for n in same}, (stage, item)


@pytest.mark.parametrize("how", [{}, {"batch": 4}, {"workers": 1, "batch": 3}])
def test_ray_gives_the_records_of_a_local_run(runner, source, expected, tmp_path, how):
    runs = Runs(tmp_path / "ray")
    summary = runs(chain(source, **how), runner())
    assert_same(runs, expected)
    assert summary.exit_code == 3
    assert counts(summary, "both") == {"made": 37, "skipped": 3}
    assert counts(runs(chain(source, **how), runner()), "both") == {"reused": 37, "skipped": 3}


def test_one_worker_gives_the_records_of_two(runner, source, expected, tmp_path):
    runs = Runs(tmp_path / "ray")
    runs(chain(source), runner(workers=1))
    assert_same(runs, expected)


@pytest.mark.parametrize("gpus", [None, 0.5])
def test_gpu_stage_is_prepared_on_cpus_and_gives_the_same_records(runner, source, expected, tmp_path, gpus):
    runs = Runs(tmp_path / "ray")
    stages = (Stage(OnGpu(), gpus=gpus), Stage(Sums()), Stage(Both()))
    runs(job(source, *stages, tables=(Questions(tuple(source.keys())),)), runner())
    assert_same(runs, expected)


def test_helper_processes_work_under_actors(runner, tmp_path):
    source = Folder.make(tmp_path / "hosted", {"a": "x", "b": "die", "c": "hang"})
    runs = Runs(tmp_path)
    runs(job(source, Stage(Hosted(), batch=2)), runner())
    found = {item: row["error_class"] for item, row in runs.rows("numbers").items()}
    assert found == {"a": "", "b": "ChildDied", "c": "DeadlineExceeded"}


def test_relative_paths_of_a_job_lead_workers_to_the_same_files(runner, tmp_path, monkeypatch):
    Folder.make(tmp_path / "raw", {"a": "x", "b": "y"})
    monkeypatch.chdir(tmp_path)  # the cluster was started elsewhere
    summary = Runs(tmp_path)(job(Folder(Path("raw")), Stage(Numbers()), Stage(Hosted(), "hosted")), runner())
    assert [counts(summary, name) for name in ("numbers", "hosted")] == [{"made": 2}] * 2


@pytest.mark.parametrize("numbers", [Numbers, OnGpu])
def test_item_that_kills_its_worker_twice_is_quarantined_and_no_other_suffers(
    runner, source, expected, tmp_path, numbers
):
    (source.root / "item 20.txt").write_text("die")
    (source.root / "item 21.txt").write_text(f"die once:{tmp_path / 'flag'}")
    runs = Runs(tmp_path / "ray")
    summary = runs(chain(source, numbers), runner())
    row = runs.rows("numbers")["item 20"]
    assert (row["error_class"], row["attempts"]) == ("WorkerDied", 2)
    assert "died twice" in row["error_text"]
    assert runs.rows("numbers")["item 21"]["status"] == "ok"
    assert_same(runs, expected, ignore={"item 20", "item 21"})
    assert summary.exit_code == 3


def test_worker_that_dies_once_loses_nothing(runner, tmp_path):
    texts = {f"{i:03d}": "slow:0.02" for i in range(60)}
    source = Folder.make(tmp_path / "raw", texts | {"030": f"die once:{tmp_path / 'flag'}"})
    runs = Runs(tmp_path)
    summary = runs(job(source, Stage(Numbers())), runner())
    assert counts(summary, "numbers") == {"made": 60}
    assert summary.exit_code == 0


def test_workers_that_always_die_stop_the_stage(runner, tmp_path):
    source = Folder.make(tmp_path / "raw", {f"{i:03d}": "die" for i in range(60)})
    runs = Runs(tmp_path)
    summary = runs(job(source, Stage(Numbers())), runner())
    assert summary.exit_code == 1
    assert "WorkerDied" in summary.text()


def test_wrong_weights_stop_their_stage_alone(runner, source, tmp_path):
    runs = Runs(tmp_path)
    summary = runs(job(source, Stage(NoWeights()), Stage(Numbers(), name="others")), runner())
    assert counts(summary, "numbers") == {"failed": 40}
    assert counts(summary, "others") == {"made": 37, "failed": 3}
    assert "stopped: WeightsError: votes.pt: no key" in summary.text()


def test_end_of_a_run_waits_for_one_long_call_of_each_worker(runner, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.runners.ray._LONG_S", 0.5)
    source = Folder.make(tmp_path / "raw", {f"{i}": "slow:1" for i in range(6)})
    stage = Stage(Numbers(), batch=1)
    task = StageTask(stage, source, str(tmp_path / "store"), recipe_id(recipe(stage.extractor)), run="test")
    one = runner(workers=1)
    one.start([task])
    one.put("numbers", [Work(f"{i}", bytes(16), bytes(16)) for i in range(6)])
    reports: list[Report] = []
    while not sum(report.made for report in reports):
        reports += one.poll(1.0)
    reports += one.close(flush=True)
    assert sum(len(report.rows) for report in reports) == sum(report.made for report in reports) == 2


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:1", "ray://127.0.0.1:1"])
def test_cluster_out_of_reach_ends_the_run_with_a_line(source, tmp_path, address):
    script = (
        "import sys\nfrom pathlib import Path\nfrom pipelines.runners.ray import RayRunner\n"
        "from pipelines.stage import Stage\nfrom tests.pipelines.fakes import Folder, Numbers\n"
        "from tests.pipelines.running import Runs, job\n"
        "numbers = job(Folder(Path(sys.argv[2])), Stage(Numbers()))\n"
        "summary = Runs(Path(sys.argv[1]))(numbers, RayRunner(address=sys.argv[3]))\n"
        "print(summary.text())\nsys.exit(summary.exit_code)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(source.root), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert f"The run stopped: can't reach the Ray cluster {address}: " in done.stdout
    assert "Traceback" not in done.stderr


def test_stages_run_at_the_same_time_and_change_places_within_the_cpus(runner, tmp_path):
    texts = {f"{i:03d}": "slow:0.03" for i in range(40)} | {"000": f"meet:{tmp_path / 'place'}"}
    source = Folder.make(tmp_path / "raw", texts)
    stages = [Stage(Numbers(rows=rows), name=f"rows_{rows}") for rows in (3, 4, 5)]
    runs = Runs(tmp_path)
    summary = runs(job(source, *stages), runner())
    assert [counts(summary, s.name) for s in stages] == [{"made": 40}] * 3


def test_items_are_prepared_while_the_gpu_works(runner, tmp_path):
    gate = tmp_path / "gate"  # the first batch waits until the third is prepared
    texts = {f"{i:03d}": "x" for i in range(20)} | {"000": f"gate:{gate}", "010": f"open:{gate}"}
    summary = Runs(tmp_path)(job(Folder.make(tmp_path / "raw", texts), Stage(OnGpu())), runner())
    assert counts(summary, "numbers") == {"made": 20}


def test_few_prepared_calls_wait_for_a_gpu():
    from pipelines.runners.ray import _PREPARED_AHEAD, _Lane, _Stage

    stage = _Stage(StageTask(Stage(OnGpu()), None, "store", "recipe"))
    lane = _Lane("numbers prepare", "prepare", stage)
    stage.queue.extend(Work(f"{i}", bytes(16), bytes(16)) for i in range(100))
    stage.prepared.extend([((), None)] * (_PREPARED_AHEAD - 2))
    stage.preparing = 1
    assert lane.waiting == 100
    stage.preparing = 2
    assert lane.waiting == 0
    assert _PREPARED_AHEAD < 10


@pytest.mark.usefixtures("cluster")
class TestRayRunner(RunnerContract):
    def make(self):
        from pipelines.runners.ray import RayRunner

        return RayRunner()

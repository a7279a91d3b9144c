"""Killed at any instant, a run goes on from what was committed and ends with the same records.

A few kills in every run of the tests, 100 with `-m slow`; the seeds are fixed, so a failure can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from storage.manifest import Manifest
from storage.reader import open as open_store
from tests.pipelines import kill_driver
from tests.pipelines.fakes import Numbers, Sums

REPO = Path(__file__).parents[2]
STAGES = ("numbers", "sums", "questions")


@pytest.fixture
def root(tmp_path) -> Path:
    kill_driver.make_source(tmp_path)
    return tmp_path


@pytest.fixture
def ray_temp():
    folder = Path(tempfile.mkdtemp(prefix="sk-"))  # short: Ray's socket paths have 107 characters at most
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def drive(root, ray_temp):
    started = []

    def drive(kind: str = "local", *how: str) -> subprocess.Popen[str]:
        """Start a run and wait until it has a plan."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipelines.kill_driver", str(root), kind, *how],
            cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RAY_TEST_TEMP": str(ray_temp), "PYTHONWARNINGS": "always::ResourceWarning"},
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        return process

    yield drive
    for process in started:
        process.kill()
        process.communicate()


def processes(text: str) -> list[int]:
    """Ids of running processes with a text in their command line or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if (
                    stat != "Z"
                    and text.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                ):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def gated(root: Path, item: int) -> Path:
    """Let runs wait at an item for a file, which is given back; beside it, `.reached` says that one is there."""
    gate = root / "gate"
    (root / "raw" / f"{item:03d}.txt").write_text(f"gate:{gate}")
    return gate


def wait_at(gate: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not gate.with_name("gate.reached").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for_note(process: subprocess.Popen[str]) -> None:
    """Wait until a run has said that it was asked to end."""
    assert process.stderr is not None
    assert any("finishing and committing" in line for line in process.stderr)


def wait_until_gone(ray_temp: Path) -> None:
    until = time.monotonic() + 120
    while (left := processes(str(ray_temp))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, "Ray processes outlive their driver"


def check_visible(root: Path) -> dict[str, int]:
    """Every record that a reader sees is whole and right, and seen once; returns how many there are per stage."""
    seen = {}
    manifest = Manifest(str(root / "store"))
    cache = open_store(str(root / "store")) if manifest.snapshot >= 0 else {}
    for stage in STAGES:
        if stage not in manifest.stages():
            seen[stage] = 0
            continue
        keys = list(cache[stage])
        assert len(keys) == len(set(keys))
        for key in keys:
            record = cache[stage][key]
            if stage == "questions":
                assert record["objects"] == 3
                continue
            text = (root / "raw" / f"{key}.txt").read_text()
            numbers = Numbers().one(key, "x" * len(text))
            expected = numbers if stage == "numbers" else Sums().load()([numbers])[0]
            for name, values in expected.items():
                np.testing.assert_array_equal(record[name], values)
        seen[stage] = len(keys)
    return seen


def finish(drive, root: Path, kind: str, before: dict[str, int]) -> None:
    """Run again, with nothing done by hand, and check that it made what was missing and no more."""
    process = drive(kind)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "ResourceWarning" not in err, "a process or a file is left open"
    full = {"numbers": kill_driver.ITEMS, "sums": kill_driver.ITEMS, "questions": 2 * kill_driver.ITEMS}
    assert check_visible(root) == full
    for part in out.split():
        stage, made, reused, failed = part.split(":")
        assert (int(made), int(reused), int(failed)) == (full[stage] - before[stage], before[stage], 0)


def wait_for_commit(process: subprocess.Popen[str], root: Path) -> None:
    until = time.monotonic() + 60
    while check_visible(root)["numbers"] == 0 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)


def kill_driver_at(drive, root: Path, kind: str, seconds: float | None, ray_temp: Path) -> None:
    """Kill a run so many seconds after its plan, or with its first commit."""
    process = drive(kind)
    if seconds is None:
        wait_for_commit(process, root)
    else:
        time.sleep(seconds)
    process.kill()
    process.wait()
    if kind == "ray":
        wait_until_gone(ray_temp)
    finish(drive, root, kind, check_visible(root))


def kill_writer_at(drive, root: Path, step: int) -> None:
    process = drive("local", f"write:{step}")
    process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL)  # 0: there were fewer steps than that
    finish(drive, root, "local", check_visible(root))


def kill_worker_at(drive, root: Path, seconds: float, random_: random.Random, ray_temp: Path) -> None:
    process = drive("ray")
    actors: list[int] = []
    until = time.monotonic() + 60
    while not actors and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
        ours = set(processes(str(ray_temp)))
        actors = [pid for pid in processes("ray::_StageActor") if pid in ours]
    time.sleep(seconds)
    if actors:
        with contextlib.suppress(ProcessLookupError):
            os.kill(random_.choice(actors), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err  # the run itself makes up for it
    full = {"numbers": kill_driver.ITEMS, "sums": kill_driver.ITEMS, "questions": 2 * kill_driver.ITEMS}
    assert check_visible(root) == full
    finish(drive, root, "ray", full)


@pytest.mark.parametrize("seed", [1, 2])
def test_driver_killed(drive, root, ray_temp, seed):
    kill_driver_at(drive, root, "local", random.Random(seed).uniform(0.1, 1.2), ray_temp)


@pytest.mark.parametrize("seed", [1, 2])
def test_writer_killed(drive, root, seed):
    kill_writer_at(drive, root, random.Random(seed).randint(1, 60))


@pytest.mark.ray
def test_driver_on_ray_killed(drive, root, ray_temp):
    kill_driver_at(drive, root, "ray", None, ray_temp)


@pytest.mark.ray
def test_worker_killed(drive, root, ray_temp):
    kill_worker_at(drive, root, 0.3, random.Random(1), ray_temp)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 128))
def test_driver_killed_often(drive, root, ray_temp, seed):
    kill_driver_at(drive, root, "local", random.Random(seed).uniform(0.0, 2.0), ray_temp)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 246))
def test_writer_killed_often(drive, root, seed):
    kill_writer_at(drive, root, random.Random(seed).randint(1, 160))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("seed", range(300, 310))
def test_driver_on_ray_killed_often(drive, root, ray_temp, seed):
    kill_driver_at(drive, root, "ray", random.Random(seed).uniform(1.0, 7.0), ray_temp)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("seed", range(400, 410))
def test_worker_killed_often(drive, root, ray_temp, seed):
    random_ = random.Random(seed)
    kill_worker_at(drive, root, random_.uniform(0.0, 1.5), random_, ray_temp)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_commits_what_is_finished(drive, root, number):
    gate = gated(root, 20)
    process = drive()
    wait_at(gate, process)
    os.killpg(process.pid, number)  # as a terminal does
    wait_for_note(process)
    gate.touch()
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    before = check_visible(root)
    assert before["numbers"] == 22, "20 before the batch under way, and its two"
    finish(drive, root, "local", before)


def test_second_interrupt_ends_the_run_at_once(drive, root):
    gate = gated(root, 0)
    process = drive()
    wait_at(gate, process)
    process.send_signal(signal.SIGINT)
    wait_for_note(process)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT


@pytest.mark.ray
def test_interrupted_run_on_ray_commits_what_is_finished(drive, root, ray_temp):
    process = drive("ray")
    wait_for_commit(process, root)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=120)
    assert process.returncode in (0, 130), err
    wait_until_gone(ray_temp)
    finish(drive, root, "local", check_visible(root))


def test_two_runs_on_one_store_at_once_both_finish(drive, root):
    gate = gated(root, 0)
    first, second = drive(), drive()
    gate.touch()  # both have their plan, and neither has committed anything
    made = dict.fromkeys(STAGES, 0)
    for process in (first, second):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        for part in out.split():
            stage, count, *_ = part.split(":")
            made[stage] += int(count)
    full = {"numbers": kill_driver.ITEMS, "sums": kill_driver.ITEMS, "questions": 2 * kill_driver.ITEMS}
    assert check_visible(root) == full
    assert made == {stage: 2 * count for stage, count in full.items()}
    for stage in STAGES:
        assert len(Manifest(str(root / "store")).rows(stage)) == made[stage], "a commit was lost"
    finish(drive, root, "local", full)

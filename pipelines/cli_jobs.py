"""Verbs that work on a job: plan, run, make-data."""

from __future__ import annotations

import importlib
import inspect
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.cli_store import reaching
from pipelines.errors import JobError, unknown
from pipelines.inputs import NOTHING, Digests, Progress, digest_inputs, missing_files
from pipelines.job_spec import JobSpec, read_job
from pipelines.plan import Options, Plan, plan
from pipelines.plan_view import as_table, console, items_table, to_json
from pipelines.stage import Job
from storage.errors import StoreUnwritable
from storage.manifest import Manifest

LAYOUTS = {  # each has make(out, seed, ...)
    "nuscenes": "pipelines.make_data.nuscenes",
    "scannet": "pipelines.make_data.scannet",
}
RUNNERS = ("local", "ray")


@dataclass(frozen=True)
class Ready:
    """A job with its plan."""

    job: Job
    store: str
    snapshot: int
    plan: Plan


def prepare(
    name: str,
    overrides: Sequence[str] | None = None,
    store: str | None = None,
    retry_failed: bool = False,
    force: Sequence[str] | None = None,
    stages: Sequence[str] | None = None,
    items: Sequence[str] | None = None,
) -> Ready:
    """Read a job, digest its inputs and plan it.

    Args:
        name: a name of JOBS or a YAML file.
        overrides, store, retry_failed, force, stages, items: as on the command line.
    """
    spec = find_job(name).override(overrides or ())
    url = store or spec.store or "store"
    job = spec.only(stages or ()).build()
    if not (job.stages or job.tables):
        raise JobError(f"job {job.name} has no stages and no tables: say under `stages` what runs, `scan_info: {{}}`")
    options = Options(retry_failed, frozenset(force or ()), frozenset(stages or ()), frozenset(items or ()))
    with reaching(url):
        manifest = Manifest(url)
        manifest.folder.folders()  # what can't be listed can't be planned on
    if manifest.folder.local and manifest.folder.local.exists() and not manifest.folder.local.is_dir():
        raise JobError(f"the store {manifest.folder.url} is a file: give a folder with --store")
    made = plan(job, digests_of(job), manifest, options)
    return Ready(job, manifest.folder.url, manifest.snapshot, made)


def find_job(name: str) -> JobSpec:
    """A job by name or file; JobError where there is none."""
    if Path(name).suffix in (".yaml", ".yml"):
        return read_job(Path(name))
    from pipelines.jobs import JOBS

    if name not in JOBS:
        file = f"did you mean the file {name}.yaml?" if Path(f"{name}.yaml").is_file() else "or give a YAML file"
        raise JobError(f"{unknown('job', name, JOBS)}; {file}")
    return JOBS[name]


def digests_of(job: Job) -> Digests:
    """Digests of the inputs that the job's stages take from its source, with progress on a terminal."""
    if job.source is None:
        return NOTHING
    with _reading() as progress:
        return digest_inputs(job.source, _kinds(job), progress=progress)


def show_missing(
    name: str, overrides: Sequence[str] | None, stages: Sequence[str] | None, items: Sequence[str] | None, as_json: bool
) -> None:
    """Print the files that a job's items need and the disk lacks, by item."""
    job = find_job(name).override(overrides or ()).only(stages or ()).build()
    found = missing_files(job.source, _kinds(job), items or None) if job.source else {}
    if as_json:
        print(json.dumps({key: list(map(str, paths)) for key, paths in found.items()}, ensure_ascii=False))
        return
    for key, paths in found.items():
        for path in paths:
            print(f"{key}: {path}")
    looked_at = len(items or job.source.keys()) if job.source else 0
    count = sum(map(len, found.values()))
    print(f"{looked_at:,} items looked at: {count:,} files of {len(found):,} of them are missing", file=sys.stderr)


def _kinds(job: Job) -> list[str]:
    """The kinds of input that the job's stages take from its source."""
    stages = {stage.name for stage in job.stages}
    return [kind for stage in job.stages for kind in stage.of if kind not in stages]


def show_plan(ready: Ready, as_json: bool = False, every: bool = False) -> None:
    """Print a plan: as a table, or as one JSON object."""
    if as_json:
        print(json.dumps(plan_json(ready, every), ensure_ascii=False))
        return
    if every:
        console().print(items_table(ready.plan))
    console().print(as_table(ready.plan, ready.store))


def plan_json(ready: Ready, every: bool = False) -> dict[str, Any]:
    """The plan for machines; `every` adds a row for each item."""
    return {"store": ready.store, "snapshot": ready.snapshot, **to_json(ready.plan, every)}


def check_runner(runner: str, address: str | None, workers: int | None) -> None:
    """Refuse a wrong runner before inputs are read."""
    if runner not in RUNNERS:
        raise JobError(unknown("runner", runner, RUNNERS))
    if workers and runner == "local" and not address:
        raise JobError("--workers needs --runner ray: the local runner is this process")


def run(ready: Ready, runner: str, address: str | None, workers: int | None, max_failure_rate: float) -> int:
    """Carry out a plan, keep its log in the store; returns the exit code."""
    from pipelines import run_log
    from pipelines.execute import execute
    from pipelines.runners import Runner

    if ready.plan.idle:
        skipped = any(line.action == "skip" for line in ready.plan.lines())
        if skipped:
            print("Nothing to do; what failed before stays so until its input or recipe changes, or --retry-failed.")
        else:
            print("Nothing to do: every record is there.")
        return 3 if skipped else 0
    chosen: Runner
    if runner == "ray" or address:
        from pipelines.runners.ray import RayRunner

        chosen = RayRunner(workers, address)
    else:
        from pipelines.runners.local import LocalRunner

        chosen = LocalRunner()
    summary = execute(ready.job, ready.plan, ready.store, chosen, max_failure_rate=max_failure_rate)
    print(summary.text())
    if summary.exit_code == 3:
        print(f"`scenecache failures --store {shlex.quote(ready.store)}` lists what has no record, and why.")
    try:
        run_log.save(ready.store, ready.plan, summary)
    except StoreUnwritable:
        if not summary.error:  # else it has been said
            raise
    return summary.exit_code


def make_data(layout: str, out: Path, seed: int, **settings: float | None) -> None:
    """Write a synthetic dataset and say what it holds; settings that are None keep the layout's default."""
    if layout not in LAYOUTS:
        raise JobError(unknown("layout", layout, LAYOUTS))
    make = importlib.import_module(LAYOUTS[layout]).make
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given.keys() - inspect.signature(make).parameters.keys():
        raise JobError(f"layout {layout} has no --{name.replace('_', '-')}; leave it out")
    check_folder(out)
    print(f"{out}: {_counts(make(out, seed=seed, **given))}")


def _counts(counts: Mapping[str, Any]) -> str:
    """`3 scenes, 240 questions (80 train, 160 val)`."""
    parts = []
    for what, count in counts.items():
        within = isinstance(count, Mapping)
        parts.append(f"{sum(count.values()):,} {what} ({_counts(count)})" if within else f"{count:,} {what}")
    return ", ".join(parts)


def check_folder(out: Path) -> None:
    """Refuse a folder to write to that is a file, or lies below one."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise JobError(f"can't write to {out}: {path} is a file; give a folder")


@contextmanager
def _reading() -> Iterator[Progress | None]:
    """A progress bar for files that are read, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("reading inputs: {task.fields[files]}"), BarColumn(), DownloadColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task: Any = None

        def update(done: int, files: int, size: int, total: int) -> None:
            nonlocal task
            text = f"{done} of {files} files"
            task = bars.add_task("", total=total, files=text) if task is None else task
            bars.update(task, completed=size, total=total, files=text)

        yield update

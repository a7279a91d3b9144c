"""The command line: `scenecache VERB`, or `python -m pipelines VERB`.

Only signatures are here, so that `--help` is quick; what a verb does is imported when it runs.

Exit codes: 0 done, 1 crash, 2 usage, 3 done with failures, 130 interrupted.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="scenecache",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobName = Annotated[str, typer.Argument(metavar="JOB", help="sqa3d, nuscenes-qa, or a YAML file (docs/jobs.md).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[STAGE.SETTING=VALUE]...", help="Such as votenet.proposals=128 source.root=/data/scannet."),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="SCENECACHE_STORE",
        help="Folder or URL of the store; the job's own, or ./store.",
        callback=lambda url: url and os.path.expanduser(url),  # of --store=~/features a shell leaves the tilde
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]
Force = Annotated[list[str] | None, typer.Option("--force", metavar="STAGE", help="Compute a stage again, all of it.")]
Only = Annotated[list[str] | None, typer.Option("--stage", metavar="NAME", help="Only this stage and what feeds it.")]
Items = Annotated[list[str] | None, typer.Option("--item", metavar="KEY", help="Only this item.")]
StageName = Annotated[str, typer.Argument(metavar="STAGE")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"scenecache {version('scenecache')}")
        raise typer.Exit


@app.callback()
def scenecache(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn raw embodied and driving datasets into cached, object-centric features."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where data, store and report go.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the made-up rooms.")] = 0,
) -> None:
    """Make a small dataset, extract, change a setting, extract again; write a picture report."""
    from pipelines.demo import main

    raise typer.Exit(main(out=out, seed=seed) or 0)


@app.command()
def plan(
    job: JobName,
    overrides: Overrides = None,
    store: Store = None,
    retry_failed: RetryFailed = False,
    force: Force = None,
    stage: Only = None,
    item: Items = None,
    list_items: Annotated[bool, typer.Option("--list", help="List every item, not only counts.")] = False,
    missing: Annotated[bool, typer.Option("--missing", help="List instead the files that are not there.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a run would compute or reuse, and why."""
    from pipelines import cli_jobs

    if missing:
        cli_jobs.show_missing(job, overrides, stage, item, as_json)
        return
    ready = cli_jobs.prepare(job, overrides, store, retry_failed, force, stage, item)
    cli_jobs.show_plan(ready, as_json=as_json, every=list_items)


@app.command()
def run(
    job: JobName,
    overrides: Overrides = None,
    store: Store = None,
    runner: Annotated[str, typer.Option(metavar="local|ray", help="In this process, or on Ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Ray cluster to use (implies ray), such as auto.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="CPU workers on Ray; all CPUs by default.")] = None,
    retry_failed: RetryFailed = False,
    force: Force = None,
    stage: Only = None,
    item: Items = None,
    max_failure_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of a stage's last 50 items that may fail before the run stops.")
    ] = 0.5,
) -> None:
    """Compute what the plan says, and print that plan first."""
    from pipelines import cli_jobs

    cli_jobs.check_runner(runner, address, workers)
    ready = cli_jobs.prepare(job, overrides, store, retry_failed, force, stage, item)
    cli_jobs.show_plan(ready)
    raise typer.Exit(cli_jobs.run(ready, runner, address, workers, max_failure_rate))


@app.command()
def draw(
    job: JobName,
    item: Annotated[str, typer.Argument(metavar="ITEM", help="Sample token.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="PNG to write.")],
    overrides: Overrides = None,
    store: Store = None,
    stage: Annotated[str | None, typer.Option(help="Also draw the objects that this stage found.")] = None,
) -> None:
    """Draw a driving key frame with its boxes: six images, and the LiDAR from above."""
    from pipelines import draw as drawing

    drawing.main(job, item, out, overrides or [], store, stage)


@app.command()
def status(store: Store = None, as_json: Json = False) -> None:
    """Say what a store holds: records, failures and sizes of each stage."""
    from pipelines import cli_store

    cli_store.status(store, as_json)


@app.command()
def failures(
    store: Store = None,
    stage: Annotated[list[str] | None, typer.Option("--stage", metavar="NAME", help="Only this stage.")] = None,
    as_json: Json = False,
) -> None:
    """List the items that failed, with error class and cause."""
    from pipelines import cli_store

    cli_store.failures(store, stage, as_json)


@app.command()
def show(
    stage: StageName, item: Annotated[str, typer.Argument(metavar="ITEM")], store: Store = None, as_json: Json = False
) -> None:
    """Show one record: its columns, and how it was made."""
    from pipelines import cli_store

    cli_store.show(store, stage, item, as_json)


@app.command()
def verify(
    store: Store = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every record and compare its digest.")] = False,
    mark: Annotated[bool, typer.Option(help="Mark what is damaged, so that the next run computes it again.")] = True,
    snapshot: Annotated[int | None, typer.Option(help="Check this snapshot; the newest by default.")] = None,
    lock: Annotated[Path | None, typer.Option(help="Check the snapshot that this lock file names.")] = None,
    as_json: Json = False,
) -> None:
    """Check that every shard is there and whole. Exit code 3 if something is damaged."""
    from pipelines import cli_store

    raise typer.Exit(cli_store.verify(store, deep, mark, snapshot, lock, as_json))


@app.command()
def gc(
    store: Store = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    keep_days: Annotated[float, typer.Option(min=0, help="Keep snapshots younger than this.")] = 7,
    orphan_days: Annotated[float, typer.Option(min=0, help="Keep unreferenced files younger than this.")] = 1,
    lock: Annotated[list[Path] | None, typer.Option(help="Keep the snapshot that this lock file names.")] = None,
    as_json: Json = False,
) -> None:
    """Remove shards that no kept snapshot names."""
    from pipelines import cli_store

    cli_store.gc(store, dry_run, keep_days, orphan_days, lock, as_json)


@app.command()
def export(
    stage: StageName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    store: Store = None,
    form: Annotated[
        str, typer.Option("--format", metavar="npz|parquet|hdf5|mp4|png|nuscenes-qa", help="What to write.")
    ] = "npz",
    item: Items = None,
    column: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this column.")] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="nuscenes-qa: numbers of a feature; zeros fill up what is missing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a stage's records as plain files, one an item, and keys.json that says which is which."""
    from pipelines import export as exporting

    exporting.main(store, stage, out, form, item, column, width, as_json)


@app.command("make-data")
def make_data(
    layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="scannet: rooms; nuscenes: a drive.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; what an earlier make left there goes first.")
    ],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    scenes: Annotated[int | None, typer.Option(min=1, help="3 rooms or 2 drives, unless you say.")] = None,
    key_frames: Annotated[
        int | None, typer.Option(min=1, help="nuscenes: key frames of each drive, half a second apart; 4.")
    ] = None,
    image_scale: Annotated[
        float | None, typer.Option(help="nuscenes: 1 is 1600 x 900 pixels; smaller images are quicker.")
    ] = None,
) -> None:
    """Write a small synthetic dataset in an official on-disk layout."""
    from pipelines import cli_jobs

    cli_jobs.make_data(layout, out, seed, scenes=scenes, key_frames=key_frames, image_scale=image_scale)


@app.command()
def doctor(
    checkpoint: Annotated[Path | None, typer.Option(help="Say what a checkpoint holds and whether it loads.")] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Say what works on this machine, and how to mend what does not."""
    from pipelines import doctor as examination

    raise typer.Exit(examination.main(checkpoint, store, as_json))


def main() -> None:
    """Run a verb. What a user can mend is a paragraph, what they can't a traceback."""
    os.environ.setdefault("RUST_LOG", "error")  # deltalake's warnings: what matters of them is in our errors
    _open_streams()
    try:
        try:
            app()
        finally:
            _flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # nobody reads on, such as `head`
        sys.exit(1)
    except Exception as error:
        if code := _exit_code(error):
            print(f"scenecache: {error}", file=sys.stderr)
            sys.exit(code)
        raise


def _open_streams() -> None:
    """Let both streams take any text: one that is closed swallows it, one that is not UTF-8 gets JSON's escapes."""
    codecs.register_error("json", lambda error: (json.dumps(error.object[error.start : error.end])[1:-1], error.end))  # type: ignore[attr-defined]
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json")


def _flush() -> None:
    """Write out what is still buffered, here, where an error can be told; Python would do it at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None  # else it is tried again at exit
        raise


def _exit_code(error: Exception) -> int:
    """2 for what was asked for wrongly, 1 for what this machine can't do, 0 for a fault of ours."""
    from extractors.errors import InputError, MissingPackage, WeightsError
    from pipelines.errors import JobError
    from storage.errors import CorruptShard, RecordMissing, SchemaError, StoreNotFound, StoreUnwritable

    if isinstance(error, JobError | InputError | WeightsError | StoreNotFound | RecordMissing | SchemaError):
        return 2
    if isinstance(error, MissingPackage | StoreUnwritable | CorruptShard):
        return 1
    # a folder of the user's is full, shut, or a file, or what takes the output is full; the text says so
    if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
        return 1
    if isinstance(error, ModuleNotFoundError) and error.name in ("rich", "yaml", "pydantic"):
        error.args = (f"{error.name} is not installed: pip install 'scenecache[cli]'",)
        return 1
    return 0


if __name__ == "__main__":
    main()

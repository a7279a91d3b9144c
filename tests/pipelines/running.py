"""Plan and run jobs on a store of a test."""

from __future__ import annotations

import io
from pathlib import Path

from pipelines.execute import execute
from pipelines.inputs import NOTHING, StatCache, digest_inputs
from pipelines.plan import Options, plan
from pipelines.runners.local import LocalRunner
from pipelines.stage import Job
from pipelines.summary import Summary
from storage.manifest import Manifest


class Runs:
    """Plans and runs jobs on one store."""

    def __init__(self, path: Path) -> None:
        self.url = str(path / "store")
        self.cache = StatCache(path / "digests.sqlite")
        self.said = io.StringIO()

    def plan(self, job: Job, **options):
        digests = digest_inputs(job.source, job.source.kinds, self.cache) if job.source else NOTHING
        return plan(job, digests, Manifest(self.url), Options(**options))

    def __call__(self, job: Job, runner=None, max_failure_rate=0.5, **options) -> Summary:
        self.said = io.StringIO()
        return execute(
            job, self.plan(job, **options), self.url, runner or LocalRunner(),
            max_failure_rate=max_failure_rate, stream=self.said,
        )  # fmt: skip

    def rows(self, stage: str) -> dict[str, dict]:
        return {row["item"]: row for row in Manifest(self.url).latest(stage).to_pylist()}

    def digests(self, stage: str) -> dict[str, bytes]:
        return {item: row["digest"] for item, row in self.rows(stage).items() if row["status"] in ("ok", "empty")}


def job(source, *stages, tables=()) -> Job:
    return Job("test", source, stages, tables)


def counts(summary: Summary, stage: str) -> dict[str, int]:
    (result,) = [s for s in summary.stages if s.name == stage]
    return {n: getattr(result, n) for n in ("reused", "made", "failed", "skipped", "left") if getattr(result, n)}

"""A run to be killed: `python -m tests.pipelines.kill_driver ROOT RUNNER [write:K]`.

Writes and commits often, so that a kill at any instant may hit a write. `write:K` kills the process itself at the Kth
step of a write (a file written, flushed to disk, renamed, or a commit) of whichever process writes the shards.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from pipelines import execute, worker
from pipelines.inputs import StatCache, digest_inputs
from pipelines.plan import plan
from pipelines.runners.local import LocalRunner
from pipelines.stage import Job, Stage
from storage.manifest import Manifest
from storage.schema import Record
from tests.pipelines.fakes import Folder, Numbers, Questions, Sums

ITEMS = 40


@dataclass(frozen=True, kw_only=True)
class OftenWritten(Numbers):
    """`numbers` in a process that writes its shards every tenth of a second."""

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        worker.FLUSH_S = 0.1
        return super().load(device)


def source(root: Path) -> Folder:
    return Folder(root / "raw")


def make_source(root: Path) -> None:
    Folder.make(root / "raw", {f"{i:03d}": f"slow:{0.01 + i % 5 * 0.01}" for i in range(ITEMS)})


def job(root: Path) -> Job:
    keys = tuple(source(root).keys())
    return Job("killed", source(root), (Stage(OftenWritten(), batch=2), Stage(Sums())), (Questions(keys),))


def die_at(step: int) -> None:
    """Kill this process at the so-manyth call of what a write consists of."""
    left = step

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **keywords)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.replace, os.rename, os.fsync = dying(os.replace), dying(os.rename), dying(os.fsync)
    DeltaTable.create_write_transaction = dying(DeltaTable.create_write_transaction)  # type: ignore[method-assign]


def main() -> int:
    root, kind, *how = Path(sys.argv[1]), *sys.argv[2:]
    execute.COMMIT_S = 0.2
    runner: Any = LocalRunner()
    if kind == "ray":
        from pipelines.runners.ray import RayRunner

        temp = tempfile.mkdtemp(prefix="scr-", dir=os.environ["RAY_TEST_TEMP"])
        runner = RayRunner(2, object_store_memory=100 << 20, _temp_dir=temp)
    url = str(root / "store")
    digests = digest_inputs(source(root), ("text",), StatCache(root / "digests.sqlite"))
    ready = plan(job(root), digests, Manifest(url))
    print("started", flush=True)
    if how:
        die_at(int(how[0].removeprefix("write:")))
    summary = execute.execute(job(root), ready, url, runner)
    print(" ".join(f"{s.name}:{s.made}:{s.reused}:{s.failed}" for s in summary.stages), flush=True)
    return summary.exit_code


if __name__ == "__main__":
    sys.exit(main())

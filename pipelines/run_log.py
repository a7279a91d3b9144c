"""What each run planned and did, kept in the store as `runs/<run>.json`."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pipelines.plan import Plan
from pipelines.summary import Summary
from storage.files import Folder


def save(url: str | os.PathLike[str], plan: Plan, summary: Summary) -> None:
    """Write the log of one run."""
    entry = {
        "run": summary.run,
        "job": summary.job,
        "snapshot": summary.snapshot,
        "seconds": summary.seconds,
        "exit_code": summary.exit_code,
        "plan": [asdict(line) for line in plan.lines()],
        "stages": [vars(stage) | {"errors": dict(stage.errors)} for stage in summary.stages],
    }
    Folder(url).put_text(f"runs/{summary.run}.json", json.dumps(entry, indent=1, ensure_ascii=False))


def load(url: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Logs of all runs, oldest first (run ids begin with their time), without those that can't be read any more."""
    folder = Folder(url)
    logs = []
    for name in sorted(name for name in folder.files("runs") if name.endswith(".json")):
        with suppress(ValueError):  # cut short by hand or by a disk; nothing depends on it
            logs.append(json.loads(folder.read(name)))
    return logs

"""Jobs of a test, run as a user does: a YAML file and the verbs of the command line, in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipelines.__main__ as command
import storage


class FrontDoor:
    """A folder with one job, its store and the verbs on them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = monkeypatch
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("SCENECACHE_STORE", str(folder / "store"))

    def job(self, source: dict[str, Any] | None, stages: dict[str, Any], tables: dict[str, Any] | None = None) -> str:
        """Write a job file; its path."""
        text = {"name": "test", "source": source, "stages": stages, "tables": tables or {}}
        path = self.folder / "job.yaml"
        given = {k: v for k, v in text.items() if v is not None}
        path.write_text(yaml.safe_dump(given, allow_unicode=True, sort_keys=False))
        return str(path)

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error of a verb."""
        self.patch.setattr(sys, "argv", ["scenecache", *argv])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            command.main()
        code = ended.value.code
        return (code if isinstance(code, int) else int(code is not None)), out.getvalue(), err.getvalue()

    def json(self, *argv: str) -> Any:
        code, out, err = self(*argv, "--json")
        assert out, (code, err)
        return json.loads(out)

    def failures(self, stage: str) -> dict[str, tuple[str, str]]:
        """item -> error class and text."""
        found = self.json("failures", "--stage", stage)["failures"]
        return {f["item"]: (f["error_class"], f["error_text"]) for f in found}

    def plan(self, job: str, stage: str) -> dict[str, tuple[str, str]]:
        """item -> action and reason."""
        (lines,) = [s for s in self.json("plan", job, "--list")["stages"] if s["stage"] == stage]
        return {row["item"]: (row["action"], row["reason"]) for row in lines["items"]}

    def records(self, stage: str) -> storage.Records:
        return storage.open(str(self.folder / "store"))[stage]

    def digests(self, stage: str) -> dict[str, bytes]:
        records = self.records(stage)
        return {key: records.digest(key) for key in records}

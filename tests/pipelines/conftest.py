"""A folder with a small job, and the command line on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import pipelines.__main__ as command
from tests.pipelines.rooms import JOB, PLY, Call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a job over three scans, the third of which is none."""
    (tmp_path / "scans").mkdir()
    for number, name in enumerate("ab"):
        (tmp_path / "scans" / f"{name}.ply").write_text(PLY.format(z=number))
    (tmp_path / "scans" / "c.ply").write_text("not a mesh")
    (tmp_path / "rooms.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SCENECACHE_STORE", raising=False)
    return tmp_path


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a verb in this process: exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scenecache", *argv])
        with pytest.raises(SystemExit) as ended:
            command.main()
        code = ended.value.code
        done = capsys.readouterr()
        return (code if isinstance(code, int) else int(code is not None)), done.out, done.err

    return run

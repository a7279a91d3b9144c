"""Import rules that import-linter's contracts do not hold: what the product must not know of, and the GPL program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipelines", "extractors", "storage", "heads")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
OURS = {*PACKAGES, "tests", "infra", "benchmarks"}


def imported(path: Path) -> set[str]:
    """Dotted names of all modules, and of all names from modules, that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_product_knows_nothing_of_its_tests_and_of_where_it_runs(path: Path) -> None:
    assert not {name for name in imported(path) if name.split(".")[0] in ("tests", "infra", "benchmarks")}


@pytest.mark.parametrize("path", sorted((ROOT / "extractors").rglob("*.py")), ids=lambda path: path.name)
def test_extractors_know_of_storage_the_schema_and_the_errors_alone(path: Path) -> None:
    of_storage = {name for name in imported(path) if name.split(".")[0] == "storage"}
    assert {".".join(name.split(".")[:2]) for name in of_storage} <= {"storage.schema", "storage.errors"}


def test_the_gpl_program_and_the_rest_do_not_import_each_other() -> None:
    program = ROOT / "extractors" / "_bev_scene.py"
    assert not {name for name in imported(program) if name.split(".")[0] in OURS}
    assert [path for path in FILES if any("_bev_scene" in name for name in imported(path))] == []
    assert "SPDX-License-Identifier: GPL-3.0-or-later" in program.read_text("utf8")[:80]
    assert "GNU GENERAL PUBLIC LICENSE" in (ROOT / "extractors" / "LICENSE.GPL-3.0").read_text("utf8")[:200]
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf8")[:200]

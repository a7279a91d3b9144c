"""Training code that reads a store needs little: `import storage` must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from tests.storage.small_store import fill, objects

HEAVY = [
    "torch",
    "ray",
    "pandas",
    "cv2",
    "av",
    "decord",
    "apache_beam",
    "bpy",
    "torchvision",
    "timm",
    "pydantic",
    "typer",
]
PRINT_HEAVY = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def loaded(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {PRINT_HEAVY}", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_storage_loads_neither_torch_nor_ray_nor_pandas() -> None:
    assert loaded("import storage") == "[]"
    assert loaded("import storage.verify") == "[]"


def test_the_check_sees_a_heavy_import() -> None:
    pytest.importorskip("pandas")
    assert loaded("import pandas") == "['pandas']"


def test_reading_a_record_loads_no_more_than_pyarrow_does(tmp_path: Path) -> None:
    fill(tmp_path, {"a": objects(3)})
    code = "import storage, sys; r = storage.open(sys.argv[1])['objects']; assert len(r) == 1; r['a']['feature'].sum()"
    assert loaded(code, str(tmp_path)) in ("[]", "['pandas']")  # pyarrow looks for pandas when it converts a list


CORE = {"numpy", "pyarrow", "h5py", "deltalake", "fsspec"}
FOR_TRAINING = {"collate.py", "recycle.py", "torch_data.py"}  # not imported by `import storage`


@pytest.mark.parametrize("path", sorted(Path(storage.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_storage_names_its_five_packages_and_no_other(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    allowed = CORE | {"storage"} | ({"torch"} if path.name in FOR_TRAINING else set())
    assert names - set(sys.stdlib_module_names) <= allowed


def test_the_other_packages_are_not_imported() -> None:
    code = "import storage, storage.verify, sys; print({n.split('.')[0] for n in sys.modules} & set(sys.argv[1:]))"
    assert loaded(code, "pipelines", "extractors", "heads").splitlines()[0] == "set()"

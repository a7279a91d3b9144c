"""The folder that a synthetic dataset is written to: what an earlier make left there goes, nothing else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelines.errors import JobError

LIST = ".made-by-scenecache.json"  # in the folder: the layout, and the files that were written


@contextmanager
def made_in(out: Path, layout: str) -> Iterator[None]:
    """Write a dataset in the block; what is written is listed in the folder, also where the block is interrupted.

    Args:
        out: the folder, made if need be. The files of an earlier make of the same layout are removed first.
        layout: name of the layout.

    Raises:
        JobError: the folder holds something else.
    """
    _clear(out, layout)
    out.mkdir(parents=True, exist_ok=True)
    others = _files(out)
    try:
        yield
    finally:
        made = sorted(str(path.relative_to(out)) for path in _files(out) - others)
        (out / LIST).write_text(json.dumps({"layout": layout, "files": made}, indent=0))


def _clear(out: Path, layout: str) -> None:
    try:
        earlier = json.loads((out / LIST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        if _files(out):
            raise JobError(
                f"{out} is not empty, and no make-data wrote what is there: give another folder, or empty it"
            ) from None
        return
    if earlier["layout"] != layout:
        raise JobError(f"{out} holds made data in {earlier['layout']}'s layout: give another folder")
    paths = [out / name for name in earlier["files"]]
    for path in (*paths, out / LIST):
        path.unlink(missing_ok=True)
    for folder in sorted({parent for path in paths for parent in path.relative_to(out).parents}, reverse=True):
        with suppress(OSError):  # not empty: somebody keeps files of their own there
            (out / folder).rmdir()


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}

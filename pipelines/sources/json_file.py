"""Read JSON files with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from extractors.errors import EmptyInput, MissingFile, TruncatedFile, UnsupportedFile


def read_json(path: Path, missing: str) -> Any:
    """Parse a JSON file.

    Args:
        path: the file.
        missing: what to do where it is not there.

    Raises:
        MissingFile, EmptyInput, TruncatedFile, UnsupportedFile: it can't be read or parsed.
    """
    if not path.is_file():
        raise MissingFile(f"{path}: no such file; {missing}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedFile(f"{path}: not text: {error}") from error
    if not text.strip():
        raise EmptyInput(f"{path}: empty; download it again")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        ends = error.pos >= len(text.rstrip()) - 1 and error.msg != "Extra data"
        cut = ends or error.msg.startswith("Unterminated")
        raise (TruncatedFile if cut else UnsupportedFile)(f"{path}: {error}; download it again") from error

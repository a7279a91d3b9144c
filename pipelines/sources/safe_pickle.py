"""Read pickles of plain values and numpy arrays, and nothing that could run code."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import IO, Any

from extractors.errors import MissingFile, UnsupportedFile

_ALLOWED = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file, encoding="latin1")  # arrays pickled by Python 2
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UnsupportedFile(
                f"{self.path}: refers to {module}.{name}; only plain values and numpy arrays are read"
            )
        if module.startswith("numpy._core"):  # written by numpy 2
            try:
                importlib.import_module(module)
            except ImportError:
                module = module.replace("numpy._core", "numpy.core")
        return super().find_class(module, name)


def read_pickle(path: Path) -> Any:
    """Read a pickle of dicts, lists, numbers, text and numpy arrays.

    Raises:
        MissingFile: no such file.
        UnsupportedFile: it refers to anything else (which is not executed), or is damaged.
    """
    if not path.is_file():
        raise MissingFile(f"{path}: no such file")
    with path.open("rb") as file:
        try:
            return _Unpickler(file, path).load()
        except UnsupportedFile:
            raise
        except Exception as error:  # damaged bytes make pickle raise nearly anything
            raise UnsupportedFile(f"{path}: cannot be unpickled: {error}") from error

"""Read pickles of plain values and numpy arrays, and nothing that could run code."""

from __future__ import annotations

import importlib
import math
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from extractors.errors import EmptyInput, MissingFile, UnsupportedFile

_ALLOWED = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"), ("collections", "OrderedDict"),
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
        return _load(file, path)


def read_pickled_npy(path: Path) -> Any:
    """Read what `numpy.save` writes for one Python object, a dict for example; errors as `read_pickle`.

    Raises:
        EmptyInput: the file has no bytes.
    """
    if not path.is_file():
        raise MissingFile(f"{path}: no such file")
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise EmptyInput(f"{path}: no bytes; is the download complete?")
        array = _read_npy(file, path)
    if not array.dtype.hasobject or array.shape != ():
        raise UnsupportedFile(f"{path}: holds {array.dtype} of shape {array.shape}, expected one pickled object")
    return array.item()


def read_pickled_npz(path: Path, name: str) -> np.ndarray:
    """Read one array of Python objects (or of anything) from what `numpy.savez` writes; errors as `read_pickled_npy`.

    Raises:
        UnsupportedFile: there is no array of this name, besides.
    """
    if not path.is_file():
        raise MissingFile(f"{path}: no such file")
    if not path.stat().st_size:
        raise EmptyInput(f"{path}: no bytes; is the download complete?")
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{name}.npy" not in archive.namelist():
                there = ", ".join(one.removesuffix(".npy") for one in archive.namelist()[:5]) or "nothing"
                raise UnsupportedFile(f"{path}: no array {name!r}; it holds {there}")
            with archive.open(f"{name}.npy") as file:
                return _read_npy(file, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedFile(f"{path}: not a file of numpy.savez, or damaged: {error}") from error


def _read_npy(file: IO[bytes], path: Path) -> np.ndarray:
    try:
        major, _ = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)  # type: ignore[no-untyped-call]
    except (ValueError, EOFError) as error:
        raise UnsupportedFile(f"{path}: not a file of numpy.save: {error}") from error
    if dtype.hasobject:
        array = _load(file, path)
        if not isinstance(array, np.ndarray) or array.shape != shape:
            raise UnsupportedFile(f"{path}: its pickle is a {type(array).__name__}, expected an array of {shape}")
        return array
    data = file.read()
    if len(data) != dtype.itemsize * math.prod(shape):
        raise UnsupportedFile(f"{path}: {len(data)} bytes for {dtype} of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _load(file: IO[bytes], path: Path) -> Any:
    try:
        return _Unpickler(file, path).load()
    except UnsupportedFile:
        raise
    except Exception as error:  # damaged bytes make pickle raise nearly anything
        raise UnsupportedFile(f"{path}: cannot be unpickled: {error}") from error

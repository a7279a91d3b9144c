"""Reference files: `golden("model")` parametrises a test over every file of that model, driven by its recipe."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@dataclass(frozen=True)
class Golden:
    """One reference file.

    Attributes:
        path: the `.npz`.
        recipe: what made it (`model`, `salt`, ...).
        arrays: taps by name; a large one is stored as `.shape`, `.index`, `.value` (see `compare`).
        weights: the folder's `weights.py`.
    """

    path: Path
    recipe: dict[str, Any]
    arrays: Mapping[str, np.ndarray]
    weights: ModuleType

    def check_recipe(self, *known: str) -> None:
        """Fail where the recipe asks for what the caller doesn't do."""
        if unknown := self.recipe.keys() - {"model", "salt", *known}:
            pytest.fail(f"the recipe asks for {sorted(unknown)}, which this test doesn't know")

    def state(self) -> dict[str, np.ndarray]:
        """The state_dict that the reference ran with, in its own key names."""
        named = [self.path.parent / f"{name}.keys.json" for name in (self.path.stem, self.recipe["model"])]
        keys = json.loads(next(path for path in named if path.is_file()).read_text())
        state = self.weights.state_dict_for({k["key"]: tuple(k["shape"]) for k in keys}, self.recipe["salt"])
        for key in state:
            if f"override.{key}" in self.arrays:
                state[key] = self.arrays[f"override.{key}"]
        return state

    def error(self, tap: str, ours: np.ndarray) -> float:
        """norm(ours - reference) / norm(reference), over the stored entries of the tap.

        A tap of integers gives the share of entries that differ.
        """
        ours = np.asarray(ours)
        if tap in self.arrays:
            reference = self.arrays[tap]
            assert ours.shape == reference.shape, f"{tap}: shape {ours.shape}, reference {reference.shape}"
        else:
            shape = tuple(self.arrays[f"{tap}.shape"])
            assert ours.shape == shape, f"{tap}: shape {ours.shape}, reference {shape}"
            reference, ours = self.arrays[f"{tap}.value"], ours.ravel()[self.arrays[f"{tap}.index"]]
        if reference.dtype.kind in "iub":
            return float(np.mean(ours != reference))
        assert np.isfinite(ours).all(), f"{tap}: not finite"
        scale = float(np.linalg.norm(reference.astype(np.float64)))
        difference = float(np.linalg.norm(ours.astype(np.float64) - reference.astype(np.float64)))
        return difference / scale if scale else difference

    def check(self, taps: Mapping[str, Any], tolerance: float = 1e-4) -> dict[str, float]:
        """Compare every tap; integers must be equal.

        Returns:
            The error of each tap.
        """
        errors = {tap: self.error(tap, np.asarray(ours)) for tap, ours in taps.items()}
        report = "\n".join(f"  {tap:40s} {error:.2e}" for tap, error in errors.items())
        print(f"{self.path.name} (salt {self.recipe['salt']!r}), relative error per tap:\n{report}")
        wrong = {
            tap: error for tap, error in errors.items() if error > (0 if self.dtype(tap).kind in "iub" else tolerance)
        }
        assert not wrong, f"{self.path.name}: taps differ from the reference: {wrong}"
        return errors

    def dtype(self, tap: str) -> np.dtype:
        """dtype of the reference's tap."""
        return (self.arrays[tap] if tap in self.arrays else self.arrays[f"{tap}.value"]).dtype


@functools.cache  # pytest keeps a fixture as long as its parameter is the same object
def _files(folder: Path, model: str) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            if "recipe" in arrays:
                recipe = json.loads(str(arrays["recipe"]))
                if recipe.get("model") == model:
                    found.append((path, recipe))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.golden("MODEL")` runs the test once per reference file of the model, as the fixture `golden`.

    The tests of a module take one file after the other, so that a fixture of the module that depends on `golden` (a
    pass of a network) is made once per file.
    """
    marker = metafunc.definition.get_closest_marker("golden")
    if marker is None:
        return
    folder = (metafunc.config.rootpath / str(metafunc.config.getoption("--golden"))).resolve()
    cases = _files(folder, marker.args[0]) if folder.is_dir() else []
    if not cases:
        skip = pytest.mark.skip(reason=f"no file for {marker.args[0]} in {folder}: give the folder with --golden")
        none = pytest.param(None, marks=skip, id=marker.args[0])
        metafunc.parametrize("golden", [none], indirect=True, scope="module")
        return
    metafunc.parametrize("golden", cases, ids=[path.stem for path, _ in cases], indirect=True, scope="module")


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    path, recipe = request.param
    spec = importlib.util.spec_from_file_location("golden_weights", path.parent / "weights.py")
    assert spec is not None
    assert spec.loader is not None
    weights = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(weights)
    with np.load(path) as arrays:
        return Golden(path, recipe, dict(arrays), weights)

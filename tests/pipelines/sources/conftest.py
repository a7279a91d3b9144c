"""A small nuScenes drive on disk, in nuscenes-devkit, and as info pickles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines import small_nuscenes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index is kept from one test to the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drive that no test changes."""
    return small_nuscenes.make(tmp_path_factory.mktemp("drive"))


@pytest.fixture
def own_drive(drive: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(drive, tmp_path / "drive"))


@pytest.fixture(scope="session")
def nusc(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same drive in nuscenes-devkit."""
    pytest.importorskip("nuscenes", reason="nuscenes-devkit, the oracle, is not installed")
    return small_nuscenes.devkit(small_nuscenes.make(tmp_path_factory.mktemp("devkit")))


@pytest.fixture(scope="session")
def infos(nusc: Any) -> dict[str, Any]:
    return small_nuscenes.old_infos(nusc)

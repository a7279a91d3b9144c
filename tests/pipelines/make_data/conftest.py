"""A drive that `make-data nuscenes` wrote, made once, and the same drive in nuscenes-devkit."""

import pytest

from pipelines.make_data.nuscenes import make
from tests.pipelines.make_data.made_files import SCALE, SEED


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folder and summary."""
    pytest.importorskip("bpy", reason="Blender is not installed")
    out = tmp_path_factory.mktemp("nuscenes")
    return out, make(out, seed=SEED, scenes=1, key_frames=2, image_scale=SCALE)


@pytest.fixture(scope="session")
def devkit(made):
    nuscenes = pytest.importorskip("nuscenes.nuscenes", reason="nuscenes-devkit is not installed")
    return nuscenes.NuScenes("v1.0-mini", str(made[0]), verbose=False)

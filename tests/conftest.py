"""Where the folders of reference outputs and real samples are, which only some machines have."""

import os
from pathlib import Path

import hypothesis
import pytest

for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "LINES", "SCENECACHE_STORE"):
    os.environ.pop(name, None)  # what a shell or a CI may set: plain text of a known width is compared
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave their core to others on a busy machine

# The same examples on every machine, however slow it is; `--hypothesis-profile default` looks for new ones.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", default="../shared/golden", help="folder of reference outputs, for tests/parity")
    parser.addoption("--data", default="../shared/data", help="folder of real samples")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden(model): runs once per reference file of the model (tests/parity)")


def _folder(request: pytest.FixtureRequest, option: str) -> Path:
    folder = (request.config.rootpath / str(request.config.getoption(option))).resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: give it with {option}")
    return folder


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """Folder of reference outputs; the test is skipped where there is none."""
    return _folder(request, "--golden")


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """Folder of real samples; the test is skipped where there is none."""
    return _folder(request, "--data")

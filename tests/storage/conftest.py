"""One store for all tests that train from it."""

from __future__ import annotations

import pytest

from tests.storage import training_store


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The store of `training_store`, which no test changes."""
    url = str(tmp_path_factory.mktemp("training") / "store")
    training_store.make(url)
    return url

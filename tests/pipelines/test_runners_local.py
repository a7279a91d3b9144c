"""The local runner keeps the runners' contract."""

from __future__ import annotations

from pipelines.runners.local import LocalRunner
from tests.contracts.runner import RunnerContract


class TestLocalRunner(RunnerContract):
    def make(self) -> LocalRunner:
        return LocalRunner()

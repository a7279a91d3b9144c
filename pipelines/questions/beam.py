"""How tables run their Beam pipelines: in this process, without a word about cloud clients."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """Beam's import warns of cloud clients that nobody asked for."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def runner() -> Any:
    """What DirectRunner runs in the end; DirectRunner first looks for a runner that it would have to download."""
    with quiet():
        from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
    return FnApiRunner()

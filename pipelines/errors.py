"""Errors that a user of the command line can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RunnerError(RuntimeError):
    """A runner can't work on: its cluster is out of reach, busy or gone."""


class JobError(ValueError):
    """A job, an option or an override can't be used as given; the text says what is expected."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown setting 'proposal'; did you mean proposals?`, or all there are."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 3, 0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
    return f"unknown {what} '{name}'; {hint}"

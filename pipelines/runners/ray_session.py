"""Start a Ray on this machine that ends with this process, or connect to a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from extractors.errors import MissingPackage
from pipelines.errors import RunnerError

_CONNECT_S = 10.0  # for a cluster's port to answer


def start_ray(workers: int | None = None, address: str | None = None, **init: Any) -> None:
    """Connect to a cluster, or start a quiet Ray on this machine that ends with this process.

    Args:
        workers: CPUs of a Ray on this machine, all by default.
        address: of a cluster, None for a Ray on this machine.
        init: further arguments of `ray.init`.

    Raises:
        RunnerError: the cluster is out of reach.
    """
    ray = import_ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address:
        try:
            if place := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):  # Ray itself would try for minutes
                socket.create_connection((place[1], int(place[2])), _CONNECT_S).close()
            ray.init(address=address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            cause = str(error).splitlines()[0]
            advice = "Give `auto` on a node of it, host:6379 of its head node, or ray://host:10001"
            if "AuthToken" in f"{error}{error.__cause__}":  # which Ray says in a cause of the cause
                cause = "it wants another token than it was shown"
                advice = "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a copy of its ~/.ray/auth_token"
            raise RunnerError(f"can't reach the Ray cluster {address}: {cause}. {advice}") from error
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on this machine alone
    cpus = workers or len(os.sched_getaffinity(0))
    with _guarded():
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet, **init)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Mark the processes started within, so that a guard ends them should this process be killed."""
    if sys.platform != "linux":
        yield
        return
    mark = f"SCENECACHE_RAY={os.getpid()}-{secrets.token_hex(8)}"
    guard = [sys.executable, "-S", "-E", str(Path(__file__).with_name("ray_guard.py")), mark]
    reader, _ = os.pipe()  # the other end is never closed here, so the guard's stdin ends with this process
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, reader, 0)]
    # It outlives this process: whoever reads what that writes must not wait for it.
    actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    os.posix_spawn(guard[0], guard, os.environ, file_actions=actions, setsid=True)
    os.close(reader)
    name, value = mark.split("=")
    for_ray = {name: value, "SPT_NOENV": "1"}  # the latter keeps Ray's process titles from overwriting the environment
    os.environ.update(for_ray)
    try:
        yield
    finally:
        for name in for_ray:
            os.environ.pop(name, None)


def import_ray() -> Any:
    """Ray without its chatter; it reads these when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")  # the run reports deaths itself
    try:
        import ray
    except ImportError as error:
        raise MissingPackage("the Ray runner needs ray: pip install 'scenecache[ray]'") from error
    return ray

"""Ends what a killed driver leaves of its Ray: `python ray_guard.py MARK`.

Ray's main processes die with their driver, but some of those that they started stay for a minute or more. This process
waits for its stdin to end, which happens with the driver however it ends, and then kills every process that has MARK in
its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

QUIET = 20  # looks in a row, a tenth of a second apart, that find none: one may just be starting another


def marked(mark: bytes) -> list[int]:
    """Ids of the processes whose environment holds the mark."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read():
                    found.append(int(name))
    return found


def main() -> None:
    mark = sys.argv[1].encode()
    sys.stdin.buffer.read()
    quiet = 0
    while quiet < QUIET:
        processes = marked(mark)
        quiet = 0 if processes else quiet + 1
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()

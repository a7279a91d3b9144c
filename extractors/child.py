"""A helper process for native code that can hang, crash or leak.

The protocol is small enough to be spoken by a program that imports nothing of ours:

- a frame is 8 bytes of length (unsigned, little endian) and a pickle of protocol 5;
- requests come on the helper's stdin, one at a time; the end of stdin means: exit;
- every request gets one reply, on the file that was fd 1 when the helper started. The helper
  copies fd 1 first and points fd 1 at fd 2, so that what a library prints can't damage a frame;
- a request that fails gets `{"error": class name, "text": str(error), "traceback": ..., "place": ...}`,
  the last two where there are any;
- the helper asks Linux to be killed with its parent (`prctl(PR_SET_PDEATHSIG, SIGKILL)`).

`serve` does the helper's side of this in Python.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from extractors import errors

_HEADER = 8
_CHUNK = 1 << 20  # bytes per read or write, and the pipes' size
_POLL_S = 0.05  # how often memory is looked at during a call
_STDERR_TAIL = 4096  # bytes of stderr kept for error texts
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1


class Child:
    """A helper process that answers one request at a time.

    The process starts with the first call, in a session and process group of its own. It is
    killed with its group over a limit, and when this object or this process goes away; the next
    call starts a fresh one. Calls from several threads wait for each other.

    Args:
        argv: command of the helper.
        name: what error texts call it.
        deadline_s: seconds an item may take, None for no limit.
        memory_gb: resident memory (GiB) of the helper and its descendants, None for no limit. It
            is looked at every 50 ms; a helper that ends a call above three quarters of it is
            replaced, so that a slow leak is not blamed on the item that comes last.
        recycle_after: items after which the helper is replaced, None for never.
        start_s: what the first call of a fresh helper may take longer (imports).
        setup: a request sent first to each fresh helper, within `start_s`; its reply is dropped.
        env: environment of the helper, this process's by default.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        deadline_s: float | None = None,
        memory_gb: float | None = None,
        recycle_after: int | None = None,
        start_s: float = 120.0,
        setup: dict[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.argv = list(argv)
        self.name = name
        self.deadline_s = deadline_s
        self.memory_gb = memory_gb
        self.recycle_after = recycle_after
        self.start_s = start_s
        self.setup = setup
        self.env = env
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], object] | None = None
        self._served = 0
        self._stderr = bytearray()

    @property
    def pid(self) -> int | None:
        """Process id of the helper, None before the first call and after it was ended."""
        return self._process.pid if self._process else None

    @property
    def served(self) -> int:
        """Items that the present helper process has answered."""
        return self._served if self._process else 0

    def call(self, request: dict[str, Any], *, deadline_s: float | None = None, items: int = 1) -> Any:
        """Send a request and wait for its reply.

        Args:
            request: picklable: plain values and numpy arrays.
            deadline_s: instead of the deadline given at construction; per item.
            items: how many items the request stands for: the deadline is multiplied by it.

        Raises:
            DeadlineExceeded, MemoryCapExceeded: the helper was killed over a limit.
            ChildDied: the helper ended by itself; the text has its exit status and last words.
            ExtractError: of the class that the helper reported; a built-in error keeps its class
                as well, any other becomes a RuntimeError that starts with the class's name.
        """
        limit = deadline_s if deadline_s is not None else self.deadline_s
        seconds = None if limit is None else limit * max(items, 1)
        with self._lock:
            if self._process is not None and self.recycle_after and self._served + items > self.recycle_after > 0:
                self._end()
            if self._process is None:
                self._start()
                if self.setup is not None:
                    self._ask(self.setup, self.start_s, "start")
                elif seconds is not None:
                    seconds += self.start_s
            reply = self._ask(request, seconds, "call")
            self._served += items
            assert self._process is not None
            if self.memory_gb and tree_rss(self._process.pid) > 0.75 * self.memory_gb * 2**30:
                self._end()
            return reply

    def close(self) -> None:
        """End the helper; a later call starts a fresh one."""
        with self._lock:
            if self._process is not None:
                self._end()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        # A folder of its own for temporary files: a helper that is killed leaves its own behind (Blender does).
        temporary = tempfile.mkdtemp(prefix="scenecache-")
        env = {**(os.environ if self.env is None else self.env), "TMPDIR": temporary}
        try:
            self._process = process = _spawner().submit(_spawn, self.argv, env).result()
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._finalizer = weakref.finalize(self, _kill, process, temporary)
        self._served = 0
        self._stderr.clear()

    def _end(self) -> None:
        """Let an idle helper exit by itself, then make sure of it and of its group."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            if _ended(process):
                break
            time.sleep(0.005)
        self._kill()

    def _kill(self) -> int:
        """Kill helper and group, close the pipes; returns the exit status."""
        process, finalizer = self._process, self._finalizer
        assert process is not None
        assert finalizer is not None
        self._process = self._finalizer = None
        finalizer()
        return process.returncode

    def _ask(self, request: dict[str, Any], seconds: float | None, what: str) -> Any:
        try:
            reply = self._exchange(request, seconds, what)
        except BaseException:  # a KeyboardInterrupt too: a helper in mid-call can't be asked again
            if self._process is not None:
                self._kill()
            raise
        if isinstance(reply, dict) and "error" in reply:
            raise _rebuild(self.name, reply)
        return reply

    def _exchange(self, request: dict[str, Any], seconds: float | None, what: str) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stdin, stdout, stderr = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
        started = time.monotonic()
        body = pickle.dumps(request, protocol=5)
        unsent = [memoryview(len(body).to_bytes(_HEADER, "little")), memoryview(body)]
        target, filled, header = bytearray(_HEADER), 0, True
        next_look = started
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if seconds is not None and now - started > seconds:
                    self._kill()
                    raise errors.DeadlineExceeded(
                        f"{self.name} helper: no answer within {seconds:g} s, killed{self._last_words()}"
                    )
                if self.memory_gb and now >= next_look:
                    used = tree_rss(process.pid) / 2**30
                    if used > self.memory_gb:
                        self._kill()
                        raise errors.MemoryCapExceeded(
                            f"{self.name} helper: {used:.2f} GiB in use, the cap is {self.memory_gb:g}, "
                            f"killed{self._last_words()}"
                        )
                    next_look = now + _POLL_S
                ended = _ended(process)  # its end of the pipes may live on in a process that it forked
                wait = 0.0 if ended else _POLL_S if self.memory_gb else 1.0
                if seconds is not None:
                    wait = min(wait, max(started + seconds - now, 0.0) + 0.001)
                ready = selector.select(wait)
                if ended and not any(key.fd == stdout for key, _ in ready):
                    raise self._died(stderr, what)
                for key, _ in ready:
                    if key.fd == stderr:
                        if not self._read_stderr(stderr):
                            selector.unregister(stderr)
                    elif key.fd == stdin:
                        try:
                            sent = os.write(stdin, unsent[0][:_CHUNK])
                        except BlockingIOError:
                            continue
                        except BrokenPipeError:  # it died; stdout says so in a moment
                            selector.unregister(stdin)
                            continue
                        unsent[0] = unsent[0][sent:]
                        if not unsent[0]:
                            unsent.pop(0)
                        if not unsent:
                            selector.unregister(stdin)
                    else:
                        try:
                            count = os.readv(stdout, [memoryview(target)[filled : filled + _CHUNK]])
                        except BlockingIOError:
                            continue
                        if count == 0:
                            raise self._died(stderr, what)
                        filled += count
                        if filled < len(target):
                            continue
                        if header:
                            target, filled, header = bytearray(int.from_bytes(target, "little")), 0, False
                        else:
                            return pickle.loads(target)

    def _read_stderr(self, fd: int) -> bool:
        """Keep the tail of what is there; False at the end of the file."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        self._stderr += data
        del self._stderr[:-_STDERR_TAIL]
        return bool(data)

    def _died(self, stderr: int, what: str) -> errors.ChildDied:
        until = time.monotonic() + 1.0  # fd 1 may close a moment before the process is gone
        process = self._process
        assert process is not None
        while not _ended(process):
            if time.monotonic() > until:
                break
            time.sleep(0.005)
        while self._stderr_ready(stderr) and self._read_stderr(stderr):
            pass
        return errors.ChildDied(f"{self.name} helper: {_exit_text(self._kill())} during {what}{self._last_words()}")

    @staticmethod
    def _stderr_ready(fd: int) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._stderr.decode(errors="replace").splitlines() if line.strip()]
        return "; its last output: " + " | ".join(lines[-3:]) if lines else ""


def serve(function: Callable[[Any], Any]) -> NoReturn:
    """Be a helper: answer requests with `function` until stdin ends, then exit.

    Args:
        function: request -> reply; what it raises is reported, and the helper goes on.
    """
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    while (request := _receive(requests)) is not None:
        try:
            body = pickle.dumps(function(pickle.loads(request)), protocol=5)
        except Exception as error:
            body = pickle.dumps(
                {
                    "error": type(error).__name__, "text": str(error), "place": place(error),
                    "traceback": traceback.format_exc(),
                },
                protocol=5,
            )  # fmt: skip
        del request
        _send(replies, len(body).to_bytes(_HEADER, "little"))
        _send(replies, body)
        del body
    sys.stderr.flush()
    os._exit(0)  # native libraries that hang at exit are what helpers are for


def place(error: BaseException) -> str:
    """File, line and function in which an error came up, "" where that is not known; in the helper, if it was there."""
    if (there := getattr(error, "place", None)) is not None:
        return str(there)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, {frames[-1].name}" if frames else ""


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants (0 where there is no /proc)."""
    total, pending = 0, [pid]
    while pending:
        process = pending.pop()
        try:
            with open(f"/proc/{process}/statm", "rb") as file:
                total += int(file.read().split()[1]) * _PAGE
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                    pending += map(int, file.read().split())
        except OSError:  # it, or one of its threads, ended meanwhile
            continue
    return total


def _receive(stream: Any) -> bytearray | None:
    header = bytearray(_HEADER)
    if not _fill(stream, header):
        return None
    body = bytearray(int.from_bytes(header, "little"))
    return body if _fill(stream, body) else None


def _fill(stream: Any, buffer: bytearray) -> bool:
    view = memoryview(buffer)
    while view:
        count = stream.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def _send(stream: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_spawners: dict[int, ThreadPoolExecutor] = {}
_spawners_lock = threading.Lock()


def _spawner() -> ThreadPoolExecutor:
    """The one thread of this process that starts helpers.

    Linux sends PR_SET_PDEATHSIG when the *thread* that started the helper ends, so this must be
    a thread that lives as long as the process. Keyed by process id: threads don't survive a fork.
    """
    with _spawners_lock:
        if os.getpid() not in _spawners:
            _spawners.clear()
            _spawners[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="child-spawner")
        return _spawners[os.getpid()]


def _spawn(argv: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=env,
        start_new_session=True,
    )
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        if pipe is not process.stderr:
            _widen(pipe.fileno())
    return process


def _widen(fd: int) -> None:
    """Ask for a larger pipe: fewer wake-ups per large frame; where it is refused the default works too."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _CHUNK)


def _kill(process: subprocess.Popen[bytes], temporary: str) -> None:
    """Kill a helper's whole group, reap it, close its pipes, remove its temporary files."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    pipes: tuple[Any, ...] = (process.stdin, process.stdout, process.stderr)
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(temporary, ignore_errors=True)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a helper is gone. It stays a zombie, so that its process group can't be another's when it is killed."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _rebuild(name: str, reply: dict[str, Any]) -> Exception:
    """The error that a helper reported, with the helper's traceback as a note."""
    text = str(reply.get("text", ""))
    kind = getattr(errors, str(reply["error"]), None) or getattr(builtins, str(reply["error"]), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(text)
        except TypeError:  # such as UnicodeDecodeError, which wants five arguments
            error = RuntimeError(f"{reply['error']}: {text}")
    else:
        error = RuntimeError(f"{reply['error']}: {text}")
    error.place = str(reply.get("place", ""))  # type: ignore[attr-defined]
    if reply.get("traceback"):
        error.add_note(f"in the {name} helper:\n{reply['traceback']}")
    return error

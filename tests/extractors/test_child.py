"""Helper processes: limits, deaths, errors, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from extractors.child import Child, tree_rss
from extractors.errors import ChildDied, DeadlineExceeded, InputError, MemoryCapExceeded, NoFaces

HELPER = """
import ctypes, os, subprocess, sys, time
import numpy as np
from extractors.child import serve
from extractors.errors import NoFaces

class Odd(Exception): ...
kept, calls = [], 0

def answer(request):
    global calls
    calls += 1
    match request["do"]:
        case "echo": return {"value": request["value"], "calls": calls, "pid": os.getpid()}
        case "print": print("noise"); os.write(1, b"more noise"); return {"ok": True}
        case "hang": time.sleep(1000)
        case "spin":
            while True: pass
        case "grandchild": return {"pid": subprocess.Popen(["sleep", "1000"]).pid}
        case "grow":
            for _ in range(1000): kept.append(np.ones(4 << 20, np.uint8)); time.sleep(0.002)
        case "leak": kept.append(np.ones(request["mb"] << 20, np.uint8)); return {"pid": os.getpid()}
        case "segv": print("about to crash", file=sys.stderr, flush=True); ctypes.string_at(0)
        case "exit": os._exit(7)
        case "fork and exit":
            if os.fork(): os._exit(7)
            time.sleep(1000)
        case "no faces": raise NoFaces("a.ply: no faces")
        case "zero": 1 / 0
        case "odd": raise Odd("what")
        case "unpicklable": return lambda: 0
        case "chatter": sys.stderr.write("x" * 300_000); sys.stderr.flush(); return {"ok": True}

serve(answer)
"""


@pytest.fixture
def make(tmp_path):
    script = tmp_path / "helper.py"
    script.write_text(HELPER)
    children: list[Child] = []

    def make(**limits) -> Child:
        child = Child([sys.executable, str(script)], name="test", **limits)
        children.append(child)
        return child

    yield make
    for child in children:
        child.close()


def pipes() -> set[tuple[str, str]]:
    """Descriptors of this process that are pipes, each with the pipe it is an end of."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return {(fd, name) for fd, name in found if name.startswith("pipe:")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=60.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_arrays_of_any_size_come_back_unchanged_and_writable(make):
    child = make(deadline_s=60)
    for shape, dtype in [((), "float32"), ((0, 3), "int64"), ((300, 224, 224, 3), "uint8")]:
        value = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
        back = child.call({"do": "echo", "value": value})["value"]
        np.testing.assert_array_equal(back, value)
        assert back.dtype == value.dtype
        assert back.flags.writeable


def test_what_a_library_prints_does_not_damage_replies(make):
    child = make()
    assert child.call({"do": "print"}) == {"ok": True}
    assert child.call({"do": "chatter"}) == {"ok": True}
    assert child.call({"do": "echo", "value": 1})["value"] == 1


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_hanging_helper_is_killed_at_its_deadline_and_replaced(make, how):
    child = make(start_s=60)
    first = child.call({"do": "echo", "value": 0})["pid"]
    with pytest.raises(DeadlineExceeded, match=r"test helper.*0\.3 s"):
        child.call({"do": how}, deadline_s=0.3)
    assert not alive(first)
    assert child.call({"do": "echo", "value": 5})["pid"] != first


def test_deadline_counts_per_item(make):
    child = make()
    child.call({"do": "echo", "value": 0})
    with pytest.raises(DeadlineExceeded, match=r"0\.6 s"):
        child.call({"do": "hang"}, deadline_s=0.2, items=3)


def test_descendants_are_killed_with_the_helper(make):
    child = make()
    grandchild = child.call({"do": "grandchild"})["pid"]
    assert alive(grandchild)
    with pytest.raises(DeadlineExceeded):
        child.call({"do": "hang"}, deadline_s=0.2)
    assert wait_until(lambda: not alive(grandchild))


def test_helper_over_its_memory_cap_is_killed(make):
    child = make(memory_gb=0.4)
    with pytest.raises(MemoryCapExceeded, match=r"the cap is 0\.4"):
        child.call({"do": "grow"})
    assert child.pid is None


def test_slow_leak_replaces_the_helper_between_calls(make):
    child = make(memory_gb=0.4)
    pids = [child.call({"do": "leak", "mb": 60})["pid"] for _ in range(12)]  # 720 MB in all
    assert len(set(pids)) > 1


def test_helper_is_replaced_after_so_many_items(make):
    child = make(recycle_after=3)
    counts = [child.call({"do": "echo", "value": 0})["calls"] for _ in range(7)]
    assert counts == [1, 2, 3, 1, 2, 3, 1]
    assert child.call({"do": "echo", "value": 0}, items=9)["calls"] == 1  # a batch larger than the count still runs


@pytest.mark.parametrize(
    ("how", "text"),
    [("segv", "killed by SIGSEGV during call; its last output:.*about to crash"), ("exit", "exited with status 7")],
)
def test_crash_names_the_helper_and_its_last_words(make, how, text):
    child = make(deadline_s=60)
    with pytest.raises(ChildDied, match=f"test helper: {text}"):
        child.call({"do": how})
    assert child.call({"do": "echo", "value": 2})["value"] == 2


def test_crash_is_noticed_while_a_process_that_the_helper_forked_holds_its_pipes(make):
    child = make()  # without a deadline
    with pytest.raises(ChildDied, match="exited with status 7 during call"):
        child.call({"do": "fork and exit"})
    assert child.call({"do": "echo", "value": 2})["value"] == 2


def test_reported_errors_keep_their_class(make):
    child = make()
    with pytest.raises(NoFaces, match=r"a\.ply: no faces") as caught:
        child.call({"do": "no faces"})
    assert isinstance(caught.value, InputError)
    assert "in the test helper" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        child.call({"do": "zero"})
    with pytest.raises(RuntimeError, match="Odd: what"):
        child.call({"do": "odd"})
    with pytest.raises(Exception, match="pickle"):
        child.call({"do": "unpicklable"})
    assert child.call({"do": "echo", "value": 3})["calls"] == 5  # one process answered all of them


def test_missing_program_is_an_error():
    with pytest.raises(FileNotFoundError):
        Child(["/nowhere/blender"], name="blender").call({})


def test_no_descriptor_or_zombie_is_left(make):
    child = make()
    child.call({"do": "echo", "value": 0})
    child.close()
    before = pipes()
    pids = []
    for how in ("echo", "exit", "echo", "hang"):
        with contextlib.suppress(ChildDied, DeadlineExceeded):
            pids.append(child.call({"do": how, "value": 0}, deadline_s=0.2 if how == "hang" else None)["pid"])
    child.close()
    assert pipes() <= before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_helper_outlives_the_thread_that_started_it(make):
    child = make()
    pids = []
    thread = threading.Thread(target=lambda: pids.append(child.call({"do": "echo", "value": 0})["pid"]))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert child.call({"do": "echo", "value": 0})["pid"] == pids[0]


def test_calls_from_threads_wait_for_each_other(make):
    child, answers = make(), {}

    def ask(i):
        answers[i] = child.call({"do": "echo", "value": i})["value"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: i for i in range(8)}


def test_helper_dies_with_its_parent_even_in_the_middle_of_a_call(tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import sys
            from extractors.child import Child
            child = Child([sys.executable, {str(tmp_path / "helper.py")!r}], name="test")
            print(child.call({{"do": "echo", "value": 0}})["pid"], flush=True)
            child.call({{"do": "spin"}})
        """)],
        stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert parent.stdout is not None
    helper = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not alive(helper))


def test_helper_ends_when_the_object_is_dropped(make, tmp_path):
    child = Child([sys.executable, str(tmp_path / "helper.py")], name="test")
    pid = child.call({"do": "echo", "value": 0})["pid"]
    del child
    assert wait_until(lambda: not alive(pid))


def test_memory_of_a_process_counts_its_descendants():
    process = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"]
    )
    try:
        assert wait_until(
            lambda: len(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()) == 1
        )
        (grandchild,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert tree_rss(process.pid) > tree_rss(int(grandchild)) > 0
        os.kill(int(grandchild), signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert tree_rss(process.pid) == 0


def test_temporary_files_of_a_helper_go_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os, tempfile\n"
        "from extractors.child import serve\n"
        "def make(request):\n"
        "    os.close(tempfile.mkstemp()[0])\n"
        "    return os.listdir(tempfile.gettempdir())\n"
        "serve(make)\n"
    )
    with Child([sys.executable, "-c", program], name="maker") as child:
        assert len(child.call({})) == 1
        assert len(child.call({})) == 2
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []

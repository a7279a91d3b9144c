"""The command line from outside: what it prints, in which form, and how it exits."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import pipelines.__main__ as command
import storage
from tests.pipelines.rooms import PLY, Call, object_of


def actions(plan: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {
        stage["stage"]: {f"{line['action']}: {line['reason']}": line["items"] for line in stage["lines"]}
        for stage in plan["stages"]
    }


def test_help_names_every_verb_and_loads_nothing_heavy() -> None:
    code = "import sys, pipelines.__main__; print([m for m in ('torch', 'numpy', 'pyarrow', 'ray', 'pydantic', 'yaml', "
    code += "'storage', 'bpy', 'cv2', 'apache_beam') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    done = subprocess.run([sys.executable, "-m", "pipelines", "--help"], capture_output=True, text=True, check=True)
    for verb in ["demo", "plan", "run", "status", "failures", "show", "verify", "gc", "export", "make-data", "doctor"]:
        assert verb in done.stdout


def test_the_version_is_that_of_the_package(call: Call) -> None:
    assert call("--version")[:2] == (0, f"scenecache {version('scenecache')}\n")


def test_made_up_data_is_told_by_its_counts(call: Call, folder: Path) -> None:
    code, out, _ = call("make-data", "nuscenes", "drive", "--scenes", "1", "--key-frames", "2", "--image-scale", "0.02")
    assert code == 0
    samples = len(json.loads(next(Path("drive").glob("v1.0-*/sample.json")).read_text()))
    assert re.match(rf"drive: 1 scenes, [\d,]+ points, .* {samples} key frames, 12 images, ", out)


def test_a_run_prints_its_plan_and_ends_with_3_for_a_failure(call: Call) -> None:
    code, out, err = call("run", "rooms.yaml")
    assert code == 3
    assert out.index("compute") < out.index("snapshot")
    assert "fake c: UnsupportedFile" in err
    (command_line,) = re.findall("`(scenecache failures .*)`", out)
    assert "UnsupportedFile" in call(*shlex.split(command_line)[1:])[1]
    code, out, _ = call("run", "rooms.yaml")
    assert code == 3
    assert "--retry-failed" in out


def test_a_long_key_is_listed_whole(call: Call, folder: Path) -> None:
    key = "long/" * 30 + "k" * 150
    (folder / "scans" / key).parent.mkdir(parents=True)
    (folder / "scans" / f"{key}.ply").write_text(PLY.format(z=1))
    lines = call("plan", "rooms.yaml", "--list")[1].splitlines()
    assert key in "".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))


def test_a_run_without_failures_ends_with_0(call: Call, folder: Path) -> None:
    (folder / "scans" / "c.ply").unlink()
    assert call("run", "rooms.yaml")[0] == 0
    code, out, _ = call("run", "rooms.yaml")
    assert (code, out.splitlines()[-1]) == (0, "Nothing to do: every record is there.")


def test_a_changed_setting_is_planned_and_run_and_only_what_it_touches(call: Call) -> None:
    call("run", "rooms.yaml")
    plan = object_of(call("plan", "rooms.yaml", "second.objects=3", "--json")[1])
    assert actions(plan) == {
        "fake": {"reuse: unchanged": 2, "skip: failed before": 1},
        "second": {"compute: settings changed: objects 2 -> 3": 2, "skip: upstream failed": 1},
    }
    assert plan["totals"] == {"reuse": 2, "compute": 2, "maybe": 0, "skip": 2}
    call("run", "rooms.yaml", "second.objects=3")
    assert storage.open("store")["second"]["a"]["index"].tolist() == [0, 1, 2]
    assert call("plan", "rooms.yaml")[1].count("earlier run") == 1


def test_a_changed_input_is_noticed(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    (folder / "scans" / "a.ply").write_text(PLY.format(z=9))
    (folder / "scans" / "c.ply").write_text(PLY.format(z=2))
    plan = object_of(call("plan", "rooms.yaml", "--json", "--list")[1])
    rows = {row["item"]: (row["action"], row["reason"]) for row in plan["stages"][0]["items"]}
    assert rows == {
        "a": ("compute", "input changed"),
        "b": ("reuse", "unchanged"),
        "c": ("compute", "input changed"),
    }
    assert call("run", "rooms.yaml")[0] == 0


def test_items_that_are_gone_from_the_source_are_counted_and_kept(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    assert "kept in the store" not in call("plan", "rooms.yaml")[1]
    call("run", "rooms.yaml", "fake.objects=5")  # an item with two records counts once
    for name in "ac":  # c has no record
        (folder / "scans" / f"{name}.ply").unlink()
    plan = object_of(call("plan", "rooms.yaml", "--json")[1])
    assert {stage["stage"]: stage["kept"] for stage in plan["stages"]} == {"fake": 1, "second": 1}
    assert plan["totals"]["reuse"] + plan["totals"]["maybe"] == 2
    table = " ".join(call("plan", "rooms.yaml")[1].split())
    assert "kept in the store, not in this job's source: fake 1, second 1" in table
    assert "kept in the store" not in call("plan", "rooms.yaml", "--item", "b")[1]
    assert "a" in storage.open("store")["fake"]


def test_a_missing_shard_is_named_and_made_again(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    before = storage.open("store")["fake"]["a"]["feature"].copy()
    for shard in (folder / "store" / "fake").iterdir():
        shard.unlink()
    plan = object_of(call("plan", "rooms.yaml", "--json")[1])
    assert actions(plan)["fake"] == {"compute: missing shard": 2, "skip: failed before": 1}
    call("run", "rooms.yaml")
    np.testing.assert_array_equal(storage.open("store")["fake"]["a"]["feature"], before)


@pytest.mark.parametrize("size", [None, 100])
def test_a_damaged_shard_is_a_line_wherever_it_is_read(call: Call, folder: Path, size: int | None) -> None:
    call("run", "rooms.yaml")
    for shard in (folder / "store" / "fake").iterdir():
        shard.unlink() if size is None else os.truncate(shard, size)
    for argv in (["show", "fake", "a"], ["export", "fake", "out"]):
        code, _, err = call(*argv)
        assert code == 1
        assert "`scenecache verify` lists its items" in err
        assert "Traceback" not in err
    assert call("verify")[0] == 3
    out = call("failures")[1]
    assert "CorruptShard" in out
    assert "the next run computes it again" in out


def test_a_changed_byte_is_found_by_deep_verify_and_made_again(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    assert call("verify", "--deep")[0] == 0
    shard = next((folder / "store" / "fake").iterdir())
    data = bytearray(shard.read_bytes())
    data[data.index(storage.open("store")["fake"]["a"]["feature"].tobytes())] ^= 1
    shard.write_bytes(data)
    code, out, _ = call("verify", "--deep", "--json")
    assert code == 3
    assert [fault["item"] for fault in object_of(out)["faults"]] == ["a"]
    plan = object_of(call("plan", "rooms.yaml", "--json")[1])
    assert actions(plan)["fake"] == {"compute: corrupt": 1, "reuse: unchanged": 1, "skip: failed before": 1}
    call("run", "rooms.yaml")
    assert call("verify", "--deep")[0] == 0


@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_a_lost_recipe_is_named_wherever_it_is_read_and_written_again_by_the_next_run(
    call: Call, folder: Path, damage: str
) -> None:
    call("run", "rooms.yaml")
    files = {path.name: path.read_text() for path in (folder / "store" / "recipes").iterdir()}
    snapshot = storage.open("store").snapshot
    for path in (folder / "store" / "recipes").iterdir():
        path.unlink() if damage == "gone" else path.write_text(files[path.name][:30])
    plan = object_of(call("plan", "rooms.yaml", "--json")[1])
    assert [stage["recipe_lost"] for stage in plan["stages"]] == [True, True]
    assert actions(plan)["fake"] == {"reuse: unchanged": 2, "skip: failed before": 1}
    changed = object_of(call("plan", "rooms.yaml", "fake.objects=3", "--json")[1])
    assert actions(changed)["fake"] == {"compute: settings changed: from a recipe that is lost": 3}
    table = " ".join(call("plan", "rooms.yaml")[1].split())
    assert "recipe gone from the store, written again by a run: fake, second" in table
    code, out, _ = call("verify")
    assert code == 3
    assert re.search("fake, 2 records: .*recipe", out)
    assert [lost["stage"] for lost in object_of(call("verify", "--json")[1])["recipes"]] == ["fake", "second"]
    assert "Recipes gone from the store: fake" in call("status")[1]
    assert len(object_of(call("status", "--json")[1])["stages"][0]["recipes_lost"]) == 1
    assert "is gone from the store or damaged" in call("show", "fake", "a")[1]
    assert object_of(call("show", "fake", "a", "--json")[1])["recipe"] is None
    assert call("run", "rooms.yaml")[0] == 3  # for what failed before
    assert {path.name: path.read_text() for path in (folder / "store" / "recipes").iterdir()} == files
    assert storage.open("store").snapshot == snapshot
    assert call("verify")[0] == 0
    assert "Nothing to do" in call("run", "rooms.yaml")[1]


def test_verify_checks_the_snapshot_that_a_training_run_reads(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    pinned = storage.open("store")
    pinned.lock("run.lock.json")
    shard = folder / "store" / pinned["fake"].row("a").shard
    call("run", "rooms.yaml", "fake.objects=3")
    shard.unlink()
    assert call("verify")[0] == 0
    for options in (["--snapshot", str(pinned.snapshot)], ["--lock", "run.lock.json"]):
        code, out, _ = call("verify", *options)
        assert code == 3
        assert f"snapshot {pinned.snapshot}: 4 records" in out
        assert "2 not marked" in out
    call("run", "rooms.yaml")  # the settings of then: equal records are an equal file
    assert call("verify", "--deep", "--lock", "run.lock.json")[0] == 0
    assert object_of(call("verify", "--snapshot", "0", "--json")[1])["snapshot"] == 0
    code, _, err = call("verify", "--snapshot", "1", "--lock", "run.lock.json")
    assert (code, "give one of the two" in err) == (2, True)
    assert call("verify", "--snapshot", "77")[0] == 2


def test_force_stage_item_and_retry_narrow_or_widen_the_work(call: Call) -> None:
    call("run", "rooms.yaml")
    plan = object_of(call("plan", "rooms.yaml", "--force", "fake", "--item", "a", "--json")[1])
    assert actions(plan) == {"fake": {"compute: forced": 1}, "second": {"maybe: upstream changed": 1}}
    plan = object_of(call("plan", "rooms.yaml", "--stage", "fake", "--retry-failed", "--json")[1])
    assert actions(plan) == {"fake": {"reuse: unchanged": 2, "compute: failed before": 1}}


def test_reading_verbs_give_text_and_one_json_object(call: Call) -> None:
    call("run", "rooms.yaml")
    status = object_of(call("status", "--json")[1])
    assert [(s["stage"], s["ok"], s["failed"], s["elements"]) for s in status["stages"]] == [
        ("fake", 2, 1, 8),
        ("second", 2, 0, 4),
    ]
    assert "second" in call("status")[1]
    failures = object_of(call("failures", "--json")[1])["failures"]
    assert [(f["stage"], f["item"], f["error_class"]) for f in failures] == [("fake", "c", "UnsupportedFile")]
    assert "not a PLY file" in call("failures", "--stage", "fake")[1]
    shown = object_of(call("show", "fake", "a", "--json")[1])
    assert [(c["name"], c["dtype"], c["shape"]) for c in shown["columns"]] == [
        ("feature", "float16", [4, 16]),
        ("index", "int32", [4]),
    ]
    assert shown["recipe"]["settings"]["objects"] == 4
    assert "feature" in call("show", "fake", "a")[1]
    assert "UnsupportedFile" in call("show", "fake", "c")[1]
    assert object_of(call("gc", "--dry-run", "--json")[1])["removed"] == {}
    assert "0 files would be removed" in call("gc", "--dry-run")[1]


def test_a_stage_that_no_job_made_is_told_as_far_as_its_recipe_says(call: Call, folder: Path) -> None:
    store = folder / "store"
    recipe = storage.Manifest(store).save_recipe({"made": "by hand"})
    writer = storage.ShardWriter(store, "mine", storage.Schema({"x": storage.Column()}))
    writer.add(storage.Row("mine", "a", b"", b"", recipe, "ok"), {"x": np.array(1, np.float32)})
    storage.Manifest(store).commit(writer.flush())
    assert "recipe version ?: no settings" in call("show", "mine", "a")[1]
    assert call("status")[0] == 0


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["plan", "rooms"], "did you mean the file rooms.yaml?"),
        (["plan", "room"], "unknown job 'room'; known: sqa3d, nuscenes-qa; or give a YAML file"),
        (["plan", "none.yaml"], "can't read the job none.yaml"),
        (["plan", "empty.yaml"], "job empty has no stages and no tables"),
        (["plan", "rooms.yaml", "fake.object=3"], "did you mean objects?"),
        (["plan", "rooms.yaml", "source.root=nowhere"], "nowhere: no such folder"),
        (["plan", "rooms.yaml", "--stage", "fak"], "did you mean fake?"),
        (["plan", "rooms.yaml", "--force", "fak"], "no stage fak"),
        (["plan", "rooms.yaml", "--item", "z"], "no item 'z'"),
        (["run", "rooms.yaml", "--runner", "roy"], "did you mean ray?"),
        (["run", "rooms.yaml", "--workers", "2"], "--workers needs --runner ray"),
        (["status"], "no store at"),
        (["show", "fake", "a"], "no store at"),
        (["export", "fake", "out", "--format", "csv"], "unknown format 'csv'"),
        (["make-data", "scanet", "out"], "did you mean scannet?"),
        (["make-data", "scannet", "out", "--key-frames", "2"], "layout scannet has no --key-frames"),
        (["make-data", "nuscenes", "out", "--scenes", "11"], "need 1 to 10"),
        (["make-data", "nuscenes", "out", "--image-scale", "0"], "need 0.01 to 4"),
        (["make-data", "scannet", "rooms.yaml"], "rooms.yaml is a file; give a folder"),
        (["make-data", "nuscenes", "rooms.yaml/below"], "rooms.yaml is a file; give a folder"),
        (["demo", "--out", "rooms.yaml"], "rooms.yaml is a file; give a folder"),
        (["plan", "rooms.yaml", "--store", "foo://x"], "foo://x: Protocol not known"),
        (["run", "rooms.yaml", "--store", "foo://x"], "foo://x: Protocol not known"),
        (["verify", "--store", "foo://x"], "foo://x"),
        (["plan", "rooms.yaml", "--store", "s3://nope/x"], "s3://nope/x: can't open"),
        (["run", "rooms.yaml", "--store", "s3://nope/x"], "s3://nope/x: can't open"),
        (["status", "--store", "s3://nope/x"], "s3://nope/x: can't open"),
        (["doctor", "--checkpoint", "none.pth"], "none.pth"),
        (["frobnicate"], "No such command"),
        (["plan"], "Missing argument"),
    ],
)
def test_what_a_user_can_mend_is_said_without_a_traceback_and_exits_2(
    call: Call, monkeypatch: pytest.MonkeyPatch, argv: list[str], text: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # no credentials, and none are asked for on the network
    Path("empty.yaml").write_text("source: {type: folder, root: scans}\n")
    code, _, err = call(*argv)
    assert code == 2
    assert text in err
    assert "Traceback" not in err
    assert "\x1b" not in err


def test_unknown_stages_and_items_of_a_store_name_near_ones(call: Call) -> None:
    call("run", "rooms.yaml")
    for argv in (["show", "fak", "a"], ["failures", "--stage", "fak"], ["export", "fak", "out"]):
        code, _, err = call(*argv)
        assert code == 2
        assert "fake" in err
    assert call("show", "fake", "z")[0] == 2


def test_the_store_is_taken_from_the_option_then_the_environment(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("run", "rooms.yaml", "--store", "one")
    monkeypatch.setenv("SCENECACHE_STORE", str(folder / "two"))
    call("run", "rooms.yaml")
    assert sorted(p.name for p in folder.iterdir() if (p / "manifest").exists()) == ["one", "two"]


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert object_of(call("plan", "rooms.yaml", "--store=~/cache", "--json")[1])["store"] == f"{folder}/home/cache"
    assert object_of(call("plan", "rooms.yaml", "store=~/cache", "--json")[1])["store"] == f"{folder}/home/cache"


@pytest.mark.parametrize("how", ["ascii", "latin-1", "closed", "full", "unread"])
def test_an_output_that_cannot_take_all_text_is_no_crash(call: Call, folder: Path, how: str) -> None:
    (folder / "scans" / "böse 漢 🙂.ply").write_text(PLY.format(z=1))
    argv = [sys.executable, "-m", "pipelines", "plan", "rooms.yaml", "--list"]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUTF8": "1"}
    env.pop("PYTHONUNBUFFERED", None)  # most have it not
    if how in ("closed", "full", "unread"):
        reader, unread = os.pipe()
        os.close(reader)
        with open("/dev/full", "w") as full, open(unread, "w") as pipe:
            for words in ([*argv, "--json"], argv):
                words = ["sh", "-c", f"exec {shlex.join(words)} >&-"] if how == "closed" else words
                output = {"closed": subprocess.PIPE, "full": full, "unread": pipe}[how]
                done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, cwd=folder, env=env)
                text = "scenecache: [Errno 28] No space left on device\n" if how == "full" else ""
                assert (done.returncode, done.stderr) == (int(how != "closed"), text)
        return
    for words in ([*argv, "--json"], argv):
        done = subprocess.run(words, cwd=folder, env={**env, "PYTHONIOENCODING": how}, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        if "--json" in words:
            items = object_of(done.stdout.decode(how))["stages"][0]["items"]
            assert "böse 漢 🙂" in [row["item"] for row in items]
        else:
            assert "\\u6f22" in done.stdout.decode(how)


def test_a_store_that_is_a_file_is_refused(call: Call, folder: Path) -> None:
    (folder / "store").write_text("in the way")
    code, _, err = call("run", "rooms.yaml")
    assert code == 2
    assert f"{folder / 'store'} is a file" in err


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a file system that nobody can write to")
def test_a_store_that_cannot_be_written_is_said_and_exits_1(call: Call) -> None:
    code, out, err = call("run", "rooms.yaml", "--store", "/sys/kernel/store")
    assert code == 1
    assert "/sys/kernel/store" in out + err
    assert "Traceback" not in err


def test_a_long_reason_is_printed_whole(call: Call) -> None:
    call("run", "rooms.yaml")
    out = call("plan", "rooms.yaml", "fake.objects=5", "fake.width=32", "fake.scale=2")[1]
    assert "settings changed: objects 4 -> 5, scale 1.0 -> 2.0, width 16 -> 32" in out


def test_gc_of_an_odd_lock_or_of_an_empty_store_is_one_line(call: Call, folder: Path) -> None:
    call("run", "rooms.yaml")
    (folder / "odd.json").write_text("{}")
    for path, text in (("none.json", "can't read the lock file none.json"), ("odd.json", "odd.json is no lock file")):
        code, _, err = call("gc", "--lock", path)
        assert code == 2
        assert text in err
        assert err.count("\n") == 1
    (folder / "begun" / "recipes").mkdir(parents=True)
    (folder / "begun" / "recipes" / "ab.json").write_text("{}")
    code, out, _ = call("gc", "--store", "begun")
    assert code == 0
    assert "0 files removed" in out


def documented_commands() -> list[list[str]]:
    """The words of every `scenecache ...` in code of the README and the docs."""
    root = Path(command.__file__).parents[1]
    found = []
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf8").replace("\\\n", " ")
        fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = re.findall(r"^scenecache (.*)", "".join(fenced), re.MULTILINE)
        lines += re.findall(r"^ {4}scenecache (.*)", text, re.MULTILINE)
        found += [shlex.split(line, comments=True) for line in lines]
    return found


@pytest.mark.parametrize("words", documented_commands(), ids=" ".join)
def test_documented_commands_are_understood(words: list[str]) -> None:
    verb, *rest = words
    known = typer.main.get_command(command.app).commands[verb]  # type: ignore[attr-defined]
    known.make_context(verb, rest)  # raises for an option or an argument that there is not

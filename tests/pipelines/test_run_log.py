"""Logs of runs, as a store keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import storage
from pipelines import run_log
from tests.pipelines.rooms import Call


def test_each_run_leaves_a_log_of_what_it_planned_and_did(call: Call) -> None:
    call("run", "rooms.yaml")
    call("run", "rooms.yaml", "second.objects=3")
    call("run", "rooms.yaml", "second.objects=3")  # nothing to do
    first, second = run_log.load("store")
    assert (first["job"], first["exit_code"], second["snapshot"]) == ("rooms", 3, storage.open("store").snapshot)
    assert {line["reason"] for line in first["plan"]} == {"new"}
    assert [(stage["name"], stage["made"], stage["failed"]) for stage in first["stages"]] == [
        ("fake", 2, 1),
        ("second", 2, 0),
    ]
    assert "settings changed: objects 2 -> 3" in {line["reason"] for line in second["plan"]}


def test_a_log_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for number, text in enumerate((json.dumps({"run": "a"}), '{"run": "b', "")):
        (tmp_path / "runs" / f"{number}.json").write_text(text)
    assert run_log.load(tmp_path) == [{"run": "a"}]

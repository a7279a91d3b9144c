"""What every runner promises (`pipelines.runners.Runner`): subclass it and say how to make one."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import numpy as np
import pytest

from extractors.base import recipe
from pipelines.runners import Runner
from pipelines.stage import Stage
from pipelines.worker import Report, StageTask, Work
from storage.fingerprint import recipe_id
from storage.manifest import Row
from storage.reader import read_record
from tests.pipelines.fakes import Folder, NoSchema, Noted, Numbers, Sums


class RunnerContract:
    """Tests of one runner."""

    def make(self) -> Runner:
        raise NotImplementedError

    @pytest.fixture
    def runner(self):
        runner = self.make()
        yield runner
        runner.close(flush=False)

    @pytest.fixture
    def tasks(self, tmp_path) -> dict[str, StageTask]:
        texts = {f"{i:02d}": "x" * i for i in range(20)} | {"03": "bad", "04": "none"}
        source = Folder.make(tmp_path / "raw", texts)
        numbers, sums = Stage(Numbers(), batch=3), Stage(Sums())
        url = str(tmp_path / "store")
        return {
            "numbers": StageTask(numbers, source, url, recipe_id(recipe(numbers.extractor)), run="test"),
            "sums": StageTask(
                sums, source, url, recipe_id(recipe(sums.extractor)), {"numbers": Numbers().schema}, run="test"
            ),
        }

    @staticmethod
    def works(keys: list[str]) -> list[Work]:
        return [Work(key, key.encode().ljust(16), b"raw".ljust(16), attempts=2) for key in keys]

    @staticmethod
    def poll(runner: Runner, count: int) -> tuple[list[Report], dict[str, Row]]:
        """Poll until so many rows have come back."""
        reports: list[Report] = []
        until = time.monotonic() + 120
        while sum(len(r.rows) for r in reports) < count and time.monotonic() < until:
            reports += runner.poll(1.0)
        rows = [row for report in reports for row in report.rows]
        assert len(rows) == len({(row.stage, row.item) for row in rows}) == count
        return reports, {row.item: row for row in rows}

    def test_every_item_gives_one_row_with_its_identity(self, runner, tasks):
        runner.start(list(tasks.values()))
        keys = [f"{i:02d}" for i in range(20)]
        assert runner.room("numbers") >= 3
        runner.put("numbers", self.works(keys))
        reports, rows = self.poll(runner, 20)
        assert sorted(rows) == keys
        for key, row in rows.items():
            assert (row.stage, row.fingerprint, row.inputs) == ("numbers", key.encode().ljust(16), b"raw".ljust(16))
            assert (row.recipe, row.run, row.attempts) == (tasks["numbers"].recipe, "test", 2)
            assert row.status == {"03": "failed", "04": "empty"}.get(key, "ok")
        assert rows["03"].error_class == "InvalidValues"
        assert sum(report.made for report in reports) == 19

    def test_records_lie_where_their_rows_say(self, runner, tasks):
        runner.start(list(tasks.values()))
        runner.put("numbers", self.works(["01", "02"]))
        _, rows = self.poll(runner, 2)
        for key, row in rows.items():
            record = read_record(tasks["numbers"].url, row)
            np.testing.assert_array_equal(record["value"], Numbers().one(key, "x" * int(key))["value"])

    def test_later_stage_reads_the_records_it_is_pointed_to(self, runner, tasks):
        runner.start(list(tasks.values()))
        runner.put("numbers", self.works(["01"]))
        _, rows = self.poll(runner, 1)
        runner.put("sums", [Work("01", bytes(16), bytes(16), upstream=(rows["01"],))])
        _, sums = self.poll(runner, 1)
        expected = Sums().load()([Numbers().one("01", "x")])[0]["sum"]
        np.testing.assert_array_equal(read_record(tasks["sums"].url, sums["01"])["sum"], expected)

    def test_weights_are_loaded_once_by_each_worker_and_batches_are_of_several_items(self, runner, tasks, tmp_path):
        stage = Stage(Noted(notes=str(tmp_path / "notes")), batch=4)
        runner.start([replace(tasks["numbers"], stage=stage, recipe=recipe_id(recipe(stage.extractor)))])
        for first in (5, 9, 13):  # one after the other: the same workers get several calls
            runner.put("numbers", self.works([f"{i:02d}" for i in range(first, first + 4)]))
            self.poll(runner, 4)
        notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
        workers = {process for process, _ in notes}
        assert sorted(process for process, what in notes if what == "load") == sorted(workers)
        assert [what for _, what in notes if what != "load"] == ["4"] * 3

    def test_what_comes_back_is_rows_and_no_arrays(self, runner, tasks):
        stage = Stage(Numbers(rows=100_000))
        runner.start([replace(tasks["numbers"], stage=stage, recipe=recipe_id(recipe(stage.extractor)))])
        runner.put("numbers", self.works(["01", "02"]))
        reports, rows = self.poll(runner, 2)
        assert sum(row.bytes for row in rows.values()) >= 4_000_000
        assert len(pickle.dumps(reports)) < 10_000

    def test_a_queue_takes_as_much_as_it_has_room_for(self, runner, tasks):
        runner.start(list(tasks.values()))
        room = runner.room("numbers")
        assert room < 1000
        runner.put("numbers", self.works([f"{i % 20:02d}" for i in range(room)]))
        assert runner.room("numbers") == 0
        runner.stop("numbers")

    def test_stopped_stage_forgets_its_queue_and_others_go_on(self, runner, tasks, tmp_path):
        for path in (tmp_path / "raw").iterdir():
            path.write_text("slow:0.1")
        runner.start(list(tasks.values()))
        runner.put("numbers", self.works([f"{i:02d}" for i in range(20)]))
        runner.poll(0.1)
        runner.stop("numbers")
        assert sum(len(report.rows) for report in runner.close(flush=True)) < 20

    def test_stage_that_cannot_start_is_reported_with_its_cause_and_others_go_on(self, runner, tasks):
        bad = replace(tasks["numbers"], stage=Stage(NoSchema(), "bad"))
        runner.start([bad, tasks["numbers"]])
        runner.put("bad", self.works(["01", "02"]))
        stopped, until = [], time.monotonic() + 120
        while not stopped and time.monotonic() < until:
            stopped = [report for report in runner.poll(1.0) if report.stopped]
        assert stopped[0].stage == "bad"
        assert "no model 'nosuch'" in stopped[0].stopped.text
        runner.stop("bad")
        runner.put("numbers", self.works(["01"]))
        assert self.poll(runner, 1)[1]["01"].status == "ok"

    def test_close_with_flush_gives_the_rows_of_all_that_was_made(self, runner, tasks):
        runner.start(list(tasks.values()))
        runner.put("numbers", self.works([f"{i:02d}" for i in range(3)]))
        reports = []
        while not sum(report.made for report in reports):
            reports += runner.poll(1.0)
        reports += runner.close(flush=True)
        assert sum(report.made for report in reports) == sum(len(report.rows) for report in reports) > 0

    def test_close_is_allowed_at_any_time(self, runner, tasks):
        runner.close(flush=True)
        runner = self.make()
        runner.start(list(tasks.values()))
        assert runner.close(flush=True) == []
        runner.close(flush=False)

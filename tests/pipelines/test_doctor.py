"""The doctor says what works here and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_doctor_says_what_works_and_exits_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines import doctor

    good = doctor._tried("x", "print('noise'); print(6 * 7)", 120, lambda out: doctor.Finding("x", "ok", out))
    assert (good.state, good.text) == ("ok", "42")
    died = doctor._tried("x", "import os; os.abort()", 120, lambda out: doctor.Finding("x", "ok", out))
    assert died.state == "broken"
    assert "killed by signal 6" in died.text
    hung = doctor._tried("x", "import time; time.sleep(60)", 0.2, lambda out: doctor.Finding("x", "ok", out))
    assert (hung.state, hung.text) == ("broken", "no answer within 0 s")
    absent = doctor._tried("x", "", 1, lambda out: doctor.Finding("x", "ok", out), needs="no-such-package")
    assert absent.state == "missing"
    monkeypatch.setattr(doctor, "examine", lambda store: iter([good, absent]))
    assert doctor.main(None, None, as_json=True) == 0
    monkeypatch.setattr(doctor, "examine", lambda store: iter([good, died]))
    assert doctor.main(None, None, as_json=True) == 1


def test_doctor_reports_disk_and_packages(tmp_path: Path) -> None:
    from pipelines import doctor

    found = {finding.name: finding for finding in doctor._disk(str(tmp_path / "not" / "yet" / "there"))}
    assert str(tmp_path) in found["disk of the store"].text
    assert doctor._packages("core", ("numpy",)).state == "ok"
    lacking = doctor._packages("extract", ("numpy", "no-such-package"))
    assert lacking.state == "missing"
    assert "pip install" in lacking.hint

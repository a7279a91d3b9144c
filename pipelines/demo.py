"""The tour: make a small dataset, extract, change a setting, extract again, read the cache, draw a report."""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path

import storage

JOB = """\
# The demo's job. Change a number and say `scenecache plan {file}`: only what it touches is computed again.
# The rooms are made up and no weights are trained: the features show the plumbing, not a model.
name: demo
store: store
source: {{type: scannet, root: data}}
stages:
  scan_info: {{}}
  scan_objects: {{}}
  video: {{every: 20, size: 224}}
  bev_render: {{look: flat}}
  votenet: {{weights: untrained:0, proposals: 256}}
  bev_grid: {{extractor: timm_grid, of: [bev_render], model: pvt_v2_b2, weights: untrained:0}}
tables:
  sqa3d_questions: {{root: data/sqa_task/balanced}}
"""
CHANGE = "votenet.proposals=128"


def main(out: Path, seed: int = 0) -> int:
    """Run the tour in a folder; returns the exit code.

    Args:
        out: folder for data, store and report. Data and store that an earlier tour left there are replaced.
        seed: seed of the made-up rooms.
    """
    from pipelines import cli_jobs, report

    cli_jobs.check_folder(out)
    job = out / "demo.yaml"
    for folder in (out / "data", out / "store"):
        if folder.exists():
            if not job.exists():
                print(f"{folder} is not the demo's: give another folder with --out")
                return 2
            shutil.rmtree(folder)
    out.mkdir(parents=True, exist_ok=True)
    job.write_text(JOB.format(file=job))
    print(f"1. A small dataset in ScanNet's layout, in {out / 'data'}", flush=True)
    cli_jobs.make_data("scannet", out / "data", seed, scenes=3)

    runner = "ray" if importlib.util.find_spec("ray") else "local"
    code = 0
    for step, overrides in ((2, []), (3, [CHANGE])):
        words = ["scenecache run", str(job), *overrides, "--runner", runner]
        print(f"\n{step}. {' '.join(words)}", flush=True)
        ready = cli_jobs.prepare(str(job), overrides)
        cli_jobs.show_plan(ready)
        code = cli_jobs.run(ready, runner, None, None, 0.5) or code

    print("\n4. Training code reads the store")
    _read(out / "store")
    page = report.write(out / "store", out / "report.html")
    print(f"\n5. The report: {page}")
    print(f"\nNext: change a setting in {job}, then `scenecache plan {job}` (the command is in .venv/bin).")
    return code


def _read(url: Path) -> None:
    """An epoch over proposals and questions, as a trainer would read it."""
    from storage.torch_data import Stream

    cache = storage.open(url)
    records = cache["votenet"].select("feature", "mask")
    start = time.perf_counter()
    for batch in Stream(records, batch_size=2, seed=0):
        print(f"   votenet batch: feature {tuple(batch['feature'].shape)}, items {batch['item']}")
    print(f"   one epoch of {len(records)} scans in {1000 * (time.perf_counter() - start):.1f} ms")
    questions = cache["sqa3d_questions"]
    first = {name: array.item() for name, array in next(iter(questions.values())).items() if array.ndim == 0}
    print(f"   {len(questions)} questions, such as: {first['situation']} {first['question']} {first['answer']}")

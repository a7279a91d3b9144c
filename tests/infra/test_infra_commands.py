"""The commands of infra/ are ones that the command line takes, with all that their job asks for."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

pytest.importorskip("pydantic")

import yaml

from pipelines.__main__ import app
from pipelines.jobs import JOBS

INFRA = Path(__file__).parents[2] / "infra"


def commands() -> dict[str, str]:
    """File -> the words behind `scenecache run` in it, or behind the batch file's own name."""
    found = {}
    for path in sorted(path for path in INFRA.rglob("*") if path.is_file()):
        text = path.read_text(encoding="utf8")
        if path.name == "rayjob.yaml":
            text = yaml.safe_load(text)["spec"]["entrypoint"]
        joined = re.sub(r"\\\n# *", "", text)
        if match := re.search(r"(?:scenecache run|ray\.sbatch) (sqa3d .*)", joined):
            found[str(path.relative_to(INFRA))] = match[1]
    return found


COMMANDS = commands()


def test_every_way_to_run_shows_a_command() -> None:
    assert list(COMMANDS) == ["docker/Dockerfile", "kuberay/rayjob.yaml", "ray/cluster.yaml", "slurm/ray.sbatch"]


@pytest.mark.parametrize("file", COMMANDS)
def test_a_command_gives_all_that_its_job_asks_for(file: str, tmp_path: Path) -> None:
    words = shlex.split(COMMANDS[file].replace("/data", str(tmp_path)))
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    given = run.make_context("run", words).params
    (tmp_path / "weights").mkdir()
    for name in re.findall(r"weights/(\S+)", COMMANDS[file]):
        (tmp_path / "weights" / name).touch()
    job = JOBS[given["job"]].override(given["overrides"]).build()  # raises for what is not set, and lists it
    assert [stage.name for stage in job.stages] == list(JOBS["sqa3d"].stages)


def test_the_image_has_the_ray_of_the_project_and_of_the_cluster() -> None:
    project = tomllib.loads((INFRA.parent / "pyproject.toml").read_text(encoding="utf8"))["project"]
    extras = project["optional-dependencies"]
    (version,) = {match[1] for need in extras["ray"] if (match := re.match(r"ray(?:\[\w+\])?==(\S+)", need))}
    cluster = yaml.safe_load((INFRA / "kuberay" / "rayjob.yaml").read_text(encoding="utf8"))
    assert cluster["spec"]["rayClusterSpec"]["rayVersion"] == version
    image = (INFRA / "docker" / "Dockerfile").read_text(encoding="utf8")
    assert f"ray[default]=={version}" in image
    (chosen,) = re.findall(r"'\.\[(.*)\]'", image)
    assert set(chosen.split(",")) <= set(extras)

"""Jobs in YAML and Python: what is wrong is named, with its neighbours, all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from extractors.base import Extractor, Weights
from extractors.fake import Fake
from pipelines.errors import JobError
from pipelines.job_spec import EXTRACTORS, SOURCES, TABLES, JobSpec, SourceSpec, StageSpec, read_job
from pipelines.sources.folder import Folder
from pipelines.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Network(Extractor):
    name: ClassVar[str] = "network"
    takes: ClassVar[tuple[str, ...]] = ("scan",)
    batch: ClassVar[int] = 4
    weights: Weights
    proposals: int = 256
    scale: float = 1.0
    color: Literal["exact", "legacy"] = "exact"
    flip: bool = False
    size: int | None = 224
    levels: tuple[int, ...] = (2, 3)
    label: str = ""


SPEC = JobSpec(
    name="job",
    source=SourceSpec(type=Folder, root="scans"),
    stages={"network": StageSpec(extractor=Network), "fake": StageSpec(extractor=Fake, of=("network",))},
)


def network(*overrides: str) -> Network:
    extractor = SPEC.override(["network.weights=untrained:0", *overrides]).build().stages[0].extractor
    assert isinstance(extractor, Network)
    return extractor


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def save(text: str) -> Path:
        path = tmp_path / "rooms.yaml"
        path.write_text(text)
        return path

    return save


GOOD = """
source: {type: folder, root: scans}
stages:
  fake: {objects: 4}
  more: {extractor: fake, of: [fake], batch: 3}
"""


def test_a_stage_may_merge_the_settings_of_another(write: Callable[[str], Path]) -> None:
    text = "source: {type: folder, root: scans}\nstages:\n  fake: &fake {objects: 4, batch: 2}\n"
    stages = read_job(write(text + "  more: {<<: *fake, extractor: fake, batch: 3}\n")).build().stages
    assert [(stage.extractor.objects, stage.batch) for stage in stages] == [(4, 2), (4, 3)]  # type: ignore[attr-defined]


def test_a_yaml_job_becomes_stages(write: Callable[[str], Path]) -> None:
    path = write(GOOD)
    job = read_job(path).build()
    assert job.name == "rooms"
    assert job.source == Folder(path.parent / "scans")
    assert [(stage.name, stage.of, stage.batch) for stage in job.stages] == [
        ("fake", ("scan",), 1),
        ("more", ("fake",), 3),
    ]
    assert job.stages[0].extractor == Fake(objects=4)


def test_a_wrong_setting_names_its_neighbours(write: Callable[[str], Path]) -> None:
    with pytest.raises(JobError, match=r"fake: unknown setting 'object'; did you mean objects\?"):
        read_job(write(GOOD.replace("objects", "object"))).build()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("stages:", "stage:", r"unknown key 'stage'; did you mean stages"),
        ("extractor: fake", "extractor: fakes", r"unknown stage more: extractor 'fakes'; did you mean fake\?"),
        ("type: folder", "type: folders", r"unknown source 'folders'; did you mean folder\?"),
        ("batch: 3", "batch: 0", r"stages.more.batch: .*greater than or equal to 1"),
        ("of: [fake]", "of: [fakes]", r"stage more takes unknown input 'fakes'; did you mean fake\?"),
        ("of: [fake]", "of: [more]", r"stage more takes stage 'more', which comes after it: put that first"),
        ("of: [fake]", "of: [fake, fake]", r"fake takes \('scan',\), 'of' gives"),
        ("objects: 4", "objects: four", r"fake.objects = 'four': .*valid integer"),
        ("{objects: 4}", "4", r"expected settings as `key: value`, this is 4"),
        ("more:", "fake:", r"key 'fake' is given twice"),
        ("stages:", "stages: {", r"is not YAML"),
        ("batch: 3", "gpus: 2", r"stages.more.gpus: .*less than or equal to 1"),
        ("  fake:", "  2024-01-01:", r"stages.*2024.*: a name is text; put it in quotes"),
        ("objects: 4", "3: 4", r"stages.fake.settings.3: a name is text; put it in quotes"),
        (
            GOOD,
            "source: {type: folder, root: scans}\nstages:",
            r"stages: expected settings by name",
        ),
        (GOOD, "source: {type: folder, root: scans}\nstages: [fake]", r"stages: expected settings by name"),
        (
            GOOD,
            "name: [a]\nsource: {type: folder, root: scans}\nstages: {fake: {}}",
            r"name: Input should be a valid string",
        ),
        (
            GOOD,
            "stages: {votenet: {weights: 'file:///no/net.pth'}}",
            r"votenet.weights: file:///no/net.pth can't be fetched \(.*No such file.*: download",
        ),
        (GOOD, "stages: {votenet: {weights: 3}}", r"votenet.weights = 3: expected a checkpoint file, or untrained:0"),
        (GOOD, "- a list", r"expected keys name, source, stages; found list"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(write: Callable[[str], Path], old: str, new: str, text: str) -> None:
    with pytest.raises(JobError, match=text):
        read_job(write(GOOD.replace(old, new))).build()


def test_each_fault_of_a_file_is_said_once(write: Callable[[str], Path]) -> None:
    with pytest.raises(JobError) as caught:
        read_job(write("name: [a]\nstages: {2024-01-01: {extractor: fake}, fake: 3}")).build()
    lines = str(caught.value).splitlines()[1:]
    assert len(set(lines)) == len(lines) == 3


def test_numbers_are_names_too_and_one_input_needs_no_list(write: Callable[[str], Path]) -> None:
    job = read_job(write(GOOD.replace("of: [fake]", "of: fake").replace("more:", "7:") + "\nname: 12\n")).build()
    assert (job.name, [stage.name for stage in job.stages], job.stages[1].of) == ("12", ["fake", "7"], ("fake",))


def test_a_checkpoint_is_known_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.pth").touch()
    monkeypatch.chdir(tmp_path)
    assert network("network.weights=net.pth").weights == Weights(str(tmp_path / "net.pth"))


def test_every_checkpoint_that_is_not_there_is_named_with_its_setting() -> None:
    spec = SPEC.override(["network.weights=nosuch.pth", "network.size=x", "fake.objects=x"])
    with pytest.raises(JobError, match=r"network.weights: no file nosuch.pth") as caught:
        spec.build()
    assert "fake.objects = 'x'" in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"can't read the job .*none.yaml: No such file"):
        read_job(tmp_path / "none.yaml")


def test_paths_in_a_file_are_relative_to_it_and_in_overrides_to_here(write: Callable[[str], Path]) -> None:
    spec = read_job(write("store: features\n" + GOOD))
    folder = Path(str(spec.store)).parent
    assert folder == write(GOOD).parent
    assert spec.override(["source.root=here"]).build().source == Folder(Path.cwd() / "here")
    assert spec.override(["store=s3://bucket/features"]).store == "s3://bucket/features"


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    with pytest.raises(JobError) as caught:
        SPEC.override(["network.proposal=3", "fake.objects=x", "fake.width=y"]).build()
    for text in ("unknown setting 'proposal'", "network.weights is not set", "fake.objects = 'x'", "fake.width = 'y'"):
        assert text in str(caught.value)


def test_a_file_with_faults_of_every_kind_lists_them_all_at_once(write: Callable[[str], Path]) -> None:
    text = """
    storage: here
    source: {type: scannet, splot: val}
    stages:
      fake: {objects: four, batch: 0}
      votnet: {weights: untrained:0}
      more: {extractor: fake, of: [later], width: x}
      later: {extractor: fake, of: [fakes]}
      bad name: {extractor: fake}
      number: 4
    tables:
      sqa_questions: {root: q}
    """
    spec = read_job(write(text)).override(["fake.size=3", "nothing", "lost.size=3", "more.batch=many"])
    with pytest.raises(JobError) as caught:
        spec.build()
    for fault in [
        "unknown key 'storage'; ",
        "stages.fake.batch: Input should be greater than or equal to 1",
        "stages.number: expected settings as `key: value`, this is 4",
        "override 'nothing': expected STAGE.SETTING=VALUE",
        "override 'lost.size=3': unknown stage 'lost'",
        "more.batch: Input should be a valid integer",
        "source: unknown setting 'splot'; did you mean split?",
        "source.root is not set",
        "fake: unknown setting 'size'",
        "fake.objects = 'four': Input should be a valid integer",
        "unknown stage votnet: extractor 'votnet'; did you mean votenet?",
        "more.width = 'x': Input should be a valid integer",
        "stage more takes stage 'later', which comes after it: put that first",
        "stage later takes unknown input 'fakes'",
        "stage name 'bad name': use letters",
        "unknown table 'sqa_questions'; did you mean sqa3d_questions",
    ]:
        assert fault in str(caught.value)


@pytest.mark.parametrize("name", ["../evil", "manifest", "recipes", "a b"])
def test_a_stage_name_that_can_be_no_folder_of_the_store_is_refused(name: str) -> None:
    with pytest.raises(JobError, match="use letters, digits"):
        JobSpec(name="job", source=SPEC.source, stages={name: StageSpec(extractor=Fake)}).build()
    with pytest.raises(ValueError, match="use letters, digits"):
        Stage(Fake(), name)


@pytest.mark.parametrize("setting", ["proposals", "scale", "size", "levels", "label", "color", "batch", "gpus"])
def test_true_is_no_number_and_no_text(write: Callable[[str], Path], setting: str) -> None:
    value = [1, True] if setting == "levels" else True
    with pytest.raises(JobError, match=rf"{setting}.*true or false is no number"):
        JobSpec.read(
            {
                "name": "job",
                "source": {"type": Folder, "root": "scans"},
                "stages": {"network": {"extractor": Network, "weights": "untrained:0", setting: value}},
            }
        ).build()


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("video: {of: [scan]}", "stage video: its extractor takes 'clip', 'of' gives it the source's 'scan'"),
        ("votenet: {of: [clip], weights: untrained:0}", "takes 'scan', 'of' gives it the source's 'clip'"),
        ("scan_objects: {of: [scan, clip]}", "takes 'labels', 'of' gives it the source's 'clip'"),
        ("resnet_fpn: {of: [clip], weights: untrained:0}", "takes 'video', 'of' gives it the source's 'clip'"),
    ],
)
def test_a_kind_of_input_that_an_extractor_does_not_take_is_refused(
    write: Callable[[str], Path], stage: str, text: str
) -> None:
    with pytest.raises(JobError, match=text):
        read_job(write(f"source: {{type: scannet, root: scans}}\nstages:\n  {stage}\n")).build()


@pytest.mark.parametrize("how", ["override", "file"])
def test_weights_at_a_url_are_those_of_their_copy(
    how: str, tmp_path: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.pth").write_bytes(b"weights")
    url = (tmp_path / "net.pth").as_uri()
    if how == "override":
        weights = network(f"network.weights={url}").weights
    else:
        text = "source: {type: folder, root: scans}\nstages: {votenet: {weights: '" + url + "'}}"
        weights = read_job(write(text)).build().stages[0].extractor.weights  # type: ignore[attr-defined]
    assert weights.source == url
    assert weights.path.read_bytes() == b"weights"
    assert weights.path.is_relative_to(tmp_path / "cache")


def test_unset_weights_are_asked_for() -> None:
    with pytest.raises(JobError, match=r"network.weights is not set: give a checkpoint file, or untrained:0"):
        SPEC.build()


def test_overrides_take_the_type_of_their_setting() -> None:
    assert network().weights == Weights("untrained:0")
    assert network("network.proposals=128").proposals == 128
    assert network("network.scale=1e-3").scale == 0.001
    assert network("network.color=legacy").color == "legacy"
    assert network("network.flip=true").flip is True
    assert network("network.size=none").size is None
    assert network("network.levels=4,5").levels == (4, 5)
    assert network("network.levels=[4]").levels == (4,)
    assert network("network.label=007").label == "007"
    assert network("network.label=a=b").label == "a=b"
    assert SPEC.override(["network.weights=untrained:0", "source.root=~/x"]).build().source == Folder(Path.home() / "x")


def test_an_override_can_say_how_a_stage_runs() -> None:
    job = SPEC.override(["network.weights=untrained:0", "network.batch=8", "fake.of=scan", "network.gpus=0.5"]).build()
    assert (job.stages[0].batch, job.stages[0].gpus, job.stages[1].of) == (8, 0.5, ("scan",))


def test_an_override_leaves_the_job_as_it_was() -> None:
    SPEC.override(["network.proposals=1", "store=x"])
    assert (SPEC.stages["network"].settings, SPEC.store) == ({}, None)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("network.proposals", "expected STAGE.SETTING=VALUE"),
        ("proposals=3", "expected STAGE.SETTING=VALUE"),
        ("net.proposals=3", r"unknown stage 'net'; did you mean network\?"),
        ("network.levels=[1", "is not YAML"),
        ("network.batch=many", "batch: .*valid integer"),
        ("network.color=old", r"network.color = 'old': .*'exact' or 'legacy'"),
    ],
)
def test_a_wrong_override_is_refused(override: str, text: str) -> None:
    with pytest.raises(JobError, match=text):
        SPEC.override([override, "network.weights=untrained:0"]).build()


def test_a_part_of_a_job_keeps_what_feeds_it_and_needs_no_more() -> None:
    spec = JobSpec(
        name="job",
        source=SourceSpec(type=Folder, root="scans"),
        stages={
            "first": StageSpec(extractor=Fake),
            "network": StageSpec(extractor=Network),
            "last": StageSpec(extractor=Fake, of=("first",)),
        },
    )
    assert [stage.name for stage in spec.only(["last"]).build().stages] == ["first", "last"]
    with pytest.raises(JobError, match=r"unknown stage 'lost'; did you mean last\?"):
        spec.only(["lost"])


@pytest.mark.parametrize("known", [EXTRACTORS, SOURCES, TABLES], ids=["extractors", "sources", "tables"])
def test_every_name_that_yaml_takes_leads_to_a_class_of_that_name(known: dict[str, tuple[str, str]]) -> None:
    import importlib

    for name, (module, attribute) in known.items():
        assert getattr(importlib.import_module(module), attribute).name == name


def test_the_sqa3d_job_asks_for_what_it_needs_and_builds_with_it(tmp_path: Path) -> None:
    from pipelines.jobs import JOBS

    job = JOBS["sqa3d"]
    with pytest.raises(JobError) as caught:
        job.build()
    wanted = ("source.root", "sqa3d_questions.root", "votenet.weights", "bev_grid.weights", "clip_grid.weights")
    for name in wanted:
        assert f"{name} is not set" in str(caught.value)
    given = [f"{name}={tmp_path if name.endswith('root') else 'untrained:0'}" for name in wanted]
    built = job.override(given).build()
    assert [stage.name for stage in built.stages] == list(job.stages)
    assert [table.name for table in built.tables] == ["sqa3d_questions"]

"""A job as written by a user, in YAML or Python, and how it becomes stages.

    name: rooms
    store: features                   # optional; where the records go
    source: {type: scannet, root: scans, split: val}
    stages:                           # in order; each after those that feed it
      votenet: {weights: untrained:0, proposals: 128}
      coarse: {extractor: votenet, weights: untrained:0, proposals: 32, batch: 4}
    tables:
      sqa3d_questions: {root: sqa_task}

A stage's keys are its extractor's settings, besides `extractor` (the stage's own name by default), `of`, `batch`,
`workers` and `gpus`. Paths in a file are relative to that file, paths in overrides to the current folder.
"""

from __future__ import annotations

import importlib
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from extractors.base import Weights
from pipelines.errors import JobError, unknown
from pipelines.settings import has_type, instance_of, no_switch
from pipelines.stage import Job, Stage
from storage.files import check_stage

EXTRACTORS = {  # name in YAML -> module, class
    "scan_info": ("extractors.scan_info", "ScanInfo"),
    "scan_objects": ("extractors.scan_objects", "ScanObjects"),
    "video": ("extractors.video", "Video"),
    "bev_render": ("extractors.bev_render", "BevRender"),
    "votenet": ("extractors.votenet", "VoteNet"),
    "resnet_fpn": ("extractors.image_grid", "ResNetFPN"),
    "timm_grid": ("extractors.image_grid", "TimmGrid"),
    "clipbert_grid": ("extractors.image_grid", "ClipBertGrid"),
    "centerpoint": ("extractors.centerpoint", "CenterPoint"),
    "centerpoint_head": ("extractors.centerpoint", "CenterPointHead"),
    "bevdet": ("extractors.bevdet", "BEVDet"),
    "bevdet_head": ("extractors.bevdet", "BEVDetHead"),
    "msmdfusion": ("extractors.msmdfusion", "MSMDFusion"),
    "msmdfusion_head": ("extractors.msmdfusion", "MSMDFusionHead"),
    "virtual_points_files": ("extractors.virtual_points", "VirtualPointsFiles"),
    "virtual_points": ("extractors.virtual_points", "VirtualPoints"),
    "object_crop": ("extractors.object_crop", "ObjectCrop"),
    "groundtruth": ("extractors.groundtruth", "GroundTruth"),
    "nuscenes_qa_features": ("extractors.nuscenes_qa_features", "NuScenesQAFeatures"),
    "fake": ("extractors.fake", "Fake"),
}
SOURCES = {
    "scannet": ("pipelines.sources.scannet", "ScanNet"),
    "folder": ("pipelines.sources.folder", "Folder"),
    "nuscenes": ("pipelines.sources.nuscenes", "NuScenes"),
    "nuscenes_qa_npz": ("pipelines.sources.nuscenes_qa_npz", "NuScenesQANpz"),
}
TABLES = {
    "sqa3d_questions": ("pipelines.questions.sqa3d", "SQA3DQuestions"),
    "sqa3d_situations": ("pipelines.questions.sqa3d_situations", "SQA3DSituations"),
    "nuscenes_questions": ("pipelines.questions.nuscenes", "NuScenesQuestions"),
}

_ROUNDS = 5  # of reading a job without what was wrong in it; dropping a part may show another fault


_Count = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(no_switch)]


class _Part(BaseModel):
    """A class and its settings; keys that are not fields of the model are settings."""

    model_config = ConfigDict(extra="forbid")
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            raise ValueError(f"expected settings as `key: value`, this is {data!r}")
        own = {key: value for key, value in data.items() if key in cls.model_fields and key != "settings"}
        return {**own, "settings": {key: value for key, value in data.items() if key not in own}}


class SourceSpec(_Part):
    """The dataset: `type` is a name of SOURCES or a class."""

    type: str | type


class StageSpec(_Part):
    """A stage: `extractor` is a name of EXTRACTORS or a class; the rest as in `pipelines.stage.Stage`."""

    extractor: str | type | None = None
    of: Annotated[tuple[str, ...], BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)] = ()
    batch: _Count = None
    workers: _Count = None
    gpus: Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(no_switch)] = None


class TableSpec(_Part):
    """A table: `type` is a name of TABLES or a class, the table's own name by default."""

    type: str | type | None = None


class JobSpec(BaseModel):
    """A job before its settings are checked; `build` checks them."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    name: str
    store: str | None = None
    source: SourceSpec | None = None
    stages: dict[str, StageSpec] = Field(default_factory=dict)
    tables: dict[str, TableSpec] = Field(default_factory=dict)
    _faults: list[str] = PrivateAttr(default_factory=list)  # found so far: `build` lists them with its own

    @classmethod
    def read(cls, data: dict[str, Any]) -> JobSpec:
        """A spec of what can be used of some data; what can't be is listed by `build`."""
        faults: list[str] = []
        for _ in range(_ROUNDS):
            try:
                spec = cls.model_validate(data)
                break
            except ValidationError as error:
                faults += [line for line in _lines(error) if line not in faults]
                for fault in error.errors():
                    _drop(data, fault["loc"])
                data.setdefault("name", "job")
        else:
            raise JobError("\n  ".join(["job:", *faults]))
        spec._faults = faults
        return spec

    def override(self, assignments: Iterable[str]) -> JobSpec:
        """A copy with dotted overrides applied: `votenet.proposals=128`, `source.root=/data/scans`, `store=/data/f`.

        One that is not of that form, or names no part of the job, is listed by `build`.
        """
        spec = self.model_copy(deep=True)
        parts: dict[str, _Part] = {**spec.stages, **spec.tables, **({"source": spec.source} if spec.source else {})}
        for assignment in assignments:
            target, equals, text = assignment.partition("=")
            name, dot, key = target.partition(".")
            if target == "store" and equals:
                spec.store = os.path.expanduser(text)
                continue
            if not (equals and dot and name and key):
                spec._faults.append(f"override {assignment!r}: expected STAGE.SETTING=VALUE, as votenet.proposals=128")
                continue
            if name not in parts:
                spec._faults.append(f"override {assignment!r}: {unknown('stage', name, parts)}")
                continue
            try:
                part, value = parts[name], _plain(text)
            except JobError as error:
                spec._faults.append(str(error))
                continue
            if key in type(part).model_fields and key != "settings":
                changed = {**part.model_dump(exclude={"settings"}), key: value, **part.settings}
                try:
                    new = type(part).model_validate(changed)
                except ValidationError as error:
                    spec._faults += [f"{name}.{line}" for line in _lines(error)]
                    continue
                for field in type(part).model_fields:
                    setattr(part, field, getattr(new, field))
            else:
                part.settings[key] = value
        return spec

    def only(self, names: Iterable[str]) -> JobSpec:
        """A copy with these stages or tables and those that feed them; all for no names.

        Raises:
            JobError: the job has no such stage.
        """
        wanted = set(names)
        every: dict[str, StageSpec | TableSpec] = {**self.stages, **self.tables}
        for name in sorted(wanted - set(every)):
            raise JobError(f"job {self.name}: {unknown('stage', name, every)}")
        if not wanted:
            return self
        for name, part in reversed(every.items()):
            if name in wanted:
                wanted.update(_feeds(name, part))
        stages = {name: part for name, part in self.stages.items() if name in wanted}
        tables = {name: part for name, part in self.tables.items() if name in wanted}
        return self.model_copy(update={"stages": stages, "tables": tables})

    def build(self) -> Job:
        """The job, every setting checked.

        Raises:
            JobError: lists all that is wrong or still to be given.
        """
        faults = list(self._faults)
        source, spec = None, self.source
        kinds: tuple[str, ...] | None = None if spec or faults else ()  # None: not known, for what is wrong
        if spec:
            with suppress(JobError):
                kinds = _class(SOURCES, spec.type, "source").kinds  # type: ignore[attr-defined]
            source = instance_of("source", lambda: _class(SOURCES, spec.type, "source"), spec.settings, faults)
        stages, tables = [], []
        for name, part in self.stages.items():
            run = ("of", "batch", "workers", "gpus", "extractor")
            extractor = instance_of(name, lambda n=name, p=part: _extractor(n, p), part.settings, faults, run)
            try:
                check_stage(name)
                if extractor is not None:
                    stages.append(Stage(extractor, name, part.of, part.batch, part.workers, part.gpus))
            except ValueError as error:
                faults.append(str(error))
            faults += self._misfed(name, part, kinds)
        for name, table in self.tables.items():
            made = instance_of(
                name, lambda n=name, t=table: _class(TABLES, t.type or n, "table"), table.settings, faults
            )
            if made is not None and made.name != name:
                faults.append(f"table {name}: its records are called {made.name}; give it that name")
            tables.append(made)
        if faults:
            raise JobError(f"job {self.name}:\n  " + "\n  ".join(faults))
        return Job(self.name, source, tuple(stages), tuple(tables))

    def _misfed(self, name: str, part: StageSpec, kinds: Sequence[str] | None) -> list[str]:
        """What is wrong with the inputs of a stage; `kinds` are the source's, None where they are not known."""
        names = list(self.stages)
        earlier = names[: names.index(name)]
        takes: tuple[str, ...] = part.of
        with suppress(JobError):
            takes = _extractor(name, part).takes  # type: ignore[attr-defined]
        faults = []
        for entry, taken in zip(part.of or takes, takes, strict=False):
            if entry in earlier:
                continue
            if entry in names:
                faults.append(f"stage {name} takes stage {entry!r}, which comes after it: put that first")
            elif kinds is not None and entry not in kinds:
                faults.append(f"stage {name} takes {unknown('input', entry, [*kinds, *earlier])}")
            elif kinds is not None and entry != taken:
                faults.append(f"stage {name}: its extractor takes '{taken}', 'of' gives it the source's '{entry}'")
        return faults


def read_job(path: Path) -> JobSpec:
    """Read a YAML job. What is wrong in it (a key that is not known, say) is listed by `build`.

    Raises:
        JobError: no such file, not YAML, not keys and values.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise JobError(f"can't read the job {path}: {error.strerror}") from None
    if not isinstance(data, dict):
        raise JobError(f"{path}: expected keys name, source, stages; found {type(data).__name__}")
    data.setdefault("name", path.stem)
    spec = JobSpec.read(data)
    folder = path.parent.resolve()
    for name, part in spec.stages.items():
        _anchor(lambda n=name, p=part: _extractor(n, p), part, folder)
    for name, table in spec.tables.items():
        _anchor(lambda n=name, t=table: _class(TABLES, t.type or n, "table"), table, folder)
    if source := spec.source:
        _anchor(lambda: _class(SOURCES, source.type, "source"), source, folder)
    if spec.store and "://" not in spec.store:
        spec.store = str(folder / Path(spec.store).expanduser())
    return spec


class _UniqueKeys(yaml.SafeLoader):
    """A SafeLoader for which a key given twice is an error instead of a silent loss."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
        for twice in {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _extractor(name: str, part: StageSpec) -> type:
    return _class(EXTRACTORS, part.extractor or name, f"stage {name}: extractor")


def _class(known: Mapping[str, tuple[str, str]], name: str | type, what: str) -> type:
    if isinstance(name, type):
        return name
    if name not in known:
        raise JobError(unknown(what, name, known))
    module, attribute = known[name]
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def _feeds(name: str, part: StageSpec | TableSpec) -> tuple[str, ...]:
    try:
        if isinstance(part, TableSpec):
            return (_class(TABLES, part.type or name, "table").of,)  # type: ignore[attr-defined]
        takes: tuple[str, ...] = part.of or _extractor(name, part).takes  # type: ignore[attr-defined]
    except JobError:  # no such class: `build` says so
        return ()
    return takes


def _anchor(find: Any, part: _Part, folder: Path) -> None:
    """Make the paths among a part's settings relative to the folder of the job's file."""
    try:
        cls = find()
    except JobError:  # no such class: `build` says so
        return
    for key, hint in typing.get_type_hints(cls).items():
        value = part.settings.get(key)
        path = has_type(hint, Path) or (
            has_type(hint, Weights) and isinstance(value, str) and Weights(value).seed is None
        )
        if path and isinstance(value, str) and "://" not in value:
            part.settings[key] = str(folder / Path(value).expanduser())


def _plain(text: str) -> Any:
    """The value of an override: lists and null as YAML writes them, else the text (its type follows the setting)."""
    if text.lower() in ("null", "none", "~"):
        return None
    if text.startswith(("[", "{")):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise JobError(f"override value {text!r} is not YAML") from None
    return text


def _lines(error: ValidationError) -> list[str]:
    """A line for each fault that a pydantic validation found."""
    lines = []
    for fault in error.errors():
        *parents, key = fault["loc"] or ("job",)
        at = ".".join(map(str, [*parents, key]))
        if fault["type"] == "extra_forbidden":
            lines.append(unknown("key", at, JobSpec.model_fields))
        elif key == "[key]":
            lines.append(f"{'.'.join(map(str, parents))}: a name is text; put it in quotes")
        elif fault["type"] == "dict_type":
            lines.append(f"{at}: expected settings by name, as `scan_info: {{}}`")
        else:
            lines.append(f"{at}: {fault['msg'].removeprefix('Value error, ')}")
    return lines


def _drop(data: Any, where: Sequence[str | int]) -> None:
    """Remove what a fault is about: the innermost key on the way to it, so that the rest can be checked."""
    holder, path = data, []
    for key in where:  # with steps between that are no keys: members of a union, our `settings`
        if isinstance(data, dict) and key in data:
            holder, data = data, data[key]
            path.append(key)
    if len(path) == 2 and path[0] in ("stages", "tables") and where[-1] != "[key]":
        holder[path[1]] = None  # others may read it
    elif path:
        del holder[path[-1]]

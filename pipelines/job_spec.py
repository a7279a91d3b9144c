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

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from extractors.base import Weights
from pipelines.errors import JobError
from pipelines.stage import Job, Stage

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
    of: tuple[str, ...] = ()
    batch: int | None = Field(None, ge=1)
    workers: int | None = Field(None, ge=1)
    gpus: float | None = Field(None, ge=0)


class TableSpec(_Part):
    """A table: `type` is a name of TABLES or a class, the table's own name by default."""

    type: str | type | None = None


class JobSpec(BaseModel):
    """A job before its settings are checked; `build` checks them."""

    model_config = ConfigDict(extra="forbid")
    name: str
    store: str | None = None
    source: SourceSpec | None = None
    stages: dict[str, StageSpec] = Field(default_factory=dict)
    tables: dict[str, TableSpec] = Field(default_factory=dict)

    def override(self, assignments: Iterable[str]) -> JobSpec:
        """A copy with dotted overrides applied: `votenet.proposals=128`, `source.root=/data/scans`, `store=/data/f`.

        Raises:
            JobError: an override is not of that form, or names no part of the job.
        """
        spec = self.model_copy(deep=True)
        parts: dict[str, _Part] = {**spec.stages, **spec.tables, **({"source": spec.source} if spec.source else {})}
        for assignment in assignments:
            target, equals, text = assignment.partition("=")
            name, dot, key = target.partition(".")
            if target == "store" and equals:
                spec.store = text
                continue
            if not (equals and dot and name and key):
                raise JobError(f"override {assignment!r}: expected STAGE.SETTING=VALUE, as votenet.proposals=128")
            if name not in parts:
                raise JobError(f"override {assignment!r}: {unknown('stage', name, parts)}")
            part, value = parts[name], _plain(text)
            if key in type(part).model_fields and key != "settings":
                changed = {**part.model_dump(exclude={"settings"}), key: value, **part.settings}
                if key == "of" and isinstance(value, str):
                    changed["of"] = tuple(value.split(","))
                new = _checked(lambda part=part, changed=changed: type(part).model_validate(changed), name)
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
        faults: list[str] = []
        source, spec = None, self.source
        if spec:
            source = _made("source", lambda: _class(SOURCES, spec.type, "source"), spec.settings, faults)
        stages, tables = [], []
        for name, part in self.stages.items():
            run = ("of", "batch", "workers", "gpus", "extractor")
            extractor = _made(name, lambda n=name, p=part: _extractor(n, p), part.settings, faults, run)
            if extractor is not None:
                try:
                    stages.append(Stage(extractor, name, part.of, part.batch, part.workers, part.gpus))
                except ValueError as error:
                    faults.append(str(error))
        for name, table in self.tables.items():
            made = _made(name, lambda n=name, t=table: _class(TABLES, t.type or n, "table"), table.settings, faults)
            if made is not None and made.name != name:
                faults.append(f"table {name}: its records are called {made.name}; give it that name")
            tables.append(made)
        known = set(getattr(source, "kinds", ()))
        for stage in stages if not faults else ():
            for entry in (entry for entry in stage.of if entry not in known):
                late = f"stage {entry!r}, which comes after it: put that first"
                faults.append(
                    f"stage {stage.name} takes {late if entry in self.stages else unknown('input', entry, known)}"
                )
            known.add(stage.name)
        if faults:
            raise JobError(f"job {self.name}:\n  " + "\n  ".join(faults))
        return Job(self.name, source, tuple(stages), tuple(tables))


def read_job(path: Path) -> JobSpec:
    """Read a YAML job.

    Raises:
        JobError: not YAML, not a job, or a key that is not known (the text names its neighbours).
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
    spec: JobSpec = _checked(lambda: JobSpec.model_validate(data), str(path))
    folder = path.parent.resolve()
    for name, part in spec.stages.items():
        _anchor(_extractor(name, part), part, folder)
    for name, table in spec.tables.items():
        _anchor(_class(TABLES, table.type or name, "table"), table, folder)
    if spec.source:
        _anchor(_class(SOURCES, spec.source.type, "source"), spec.source, folder)
    if spec.store and "://" not in spec.store:
        spec.store = str(folder / Path(spec.store).expanduser())
    return spec


class _UniqueKeys(yaml.SafeLoader):
    """A SafeLoader for which a key given twice is an error instead of a silent loss."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
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
    if isinstance(part, TableSpec):
        return (_class(TABLES, part.type or name, "table").of,)  # type: ignore[attr-defined]
    takes: tuple[str, ...] = part.of or _extractor(name, part).takes  # type: ignore[attr-defined]
    return takes


def _made(name: str, find: Any, settings: Mapping[str, Any], faults: list[str], also: Sequence[str] = ()) -> Any:
    """An instance of a class with checked settings; None, and a line in `faults` for each that is wrong."""
    try:
        cls = find()
    except JobError as error:
        faults.append(str(error))
        return None
    before = len(faults)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    strange = [key for key in settings if key not in fields]
    faults += [f"{name}: {unknown('setting', key, [*fields, *also])}" for key in strange]
    hints = typing.get_type_hints(cls)
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and settings.get(key) is None:
            faults.append(f"{name}.{key} is not set: {_wish(hints[key])}, as {name}.{key}={_example(hints[key])}")
    if len(faults) > before:
        return None
    types: dict[str, Any] = {key: (_lenient(hints[key]), ...) for key in settings}
    model = create_model("Settings", __config__=ConfigDict(arbitrary_types_allowed=True), **types)
    try:
        checked = model.model_validate(dict(settings))
        return cls(**{key: getattr(checked, key) for key in settings})
    except ValidationError as error:
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"][:1])
            faults.append(f"{name}.{key} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}")
    except ValueError as error:
        faults.append(f"{name}: {error}")
    return None


def _lenient(hint: Any) -> Any:
    """A type as the command line gives it: weights by their source, tuples as `a,b`."""
    if _has(hint, Weights):
        return Annotated[hint, BeforeValidator(lambda value: Weights(value) if isinstance(value, str) else value)]
    if _has(hint, tuple):
        return Annotated[hint, BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]
    if _has(hint, Path):
        return Annotated[hint, BeforeValidator(lambda v: Path(v).expanduser() if isinstance(v, str) else v)]
    return hint


def _has(hint: Any, wanted: type) -> bool:
    """The type is `wanted`, or a union that has it."""
    origin = typing.get_origin(hint) or hint
    return origin is wanted or (origin is not tuple and any(_has(one, wanted) for one in typing.get_args(hint)))


def _anchor(cls: type, part: _Part, folder: Path) -> None:
    """Make the paths among a part's settings relative to the folder of the job's file."""
    for key, hint in typing.get_type_hints(cls).items():
        value = part.settings.get(key)
        path = _has(hint, Path) or (_has(hint, Weights) and isinstance(value, str) and Weights(value).seed is None)
        if path and isinstance(value, str):
            part.settings[key] = str(folder / Path(value).expanduser())


def _wish(hint: Any) -> str:
    if _has(hint, Weights):
        return "give a checkpoint file, or untrained:0 to run without training"
    if _has(hint, Path):
        return "give a path"
    return f"give a value of type {getattr(hint, '__name__', hint)}"


def _example(hint: Any) -> str:
    return "untrained:0" if _has(hint, Weights) else "/data/..." if _has(hint, Path) else "..."


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


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown setting 'proposal'; did you mean proposals?`, or all there are."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 3, 0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
    return f"unknown {what} '{name}'; {hint}"


def _checked(make: Any, where: str) -> Any:
    """Run a pydantic validation; its errors become one JobError, a line each."""
    try:
        return make()
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            *parents, key = fault["loc"] or ("job",)
            at = ".".join(map(str, [*parents, key]))
            if fault["type"] == "extra_forbidden":
                lines.append(unknown("key", ".".join(map(str, [*parents, key])), JobSpec.model_fields))
            else:
                lines.append(f"{at}: {fault['msg'].removeprefix('Value error, ')}")
        raise JobError(f"{where}:\n  " + "\n  ".join(lines)) from None

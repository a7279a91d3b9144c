"""Settings of a class, as a user writes them: checked against the types of its fields, and made into an instance."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, ValidationError, create_model

from extractors.base import Weights
from extractors.errors import WeightsError
from pipelines.errors import JobError, unknown


def instance_of(name: str, find: Any, settings: Mapping[str, Any], faults: list[str], also: Sequence[str] = ()) -> Any:
    """An instance of a class with checked settings; None, and a line in `faults` for each that is wrong.

    Args:
        name: of the stage or table, for the text.
        find: gives the class, a dataclass; a JobError of it is a fault.
        settings: by the names of its fields.
        faults: is added to.
        also: other keys that may stand beside the settings, for hints.
    """
    try:
        cls = find()
    except JobError as error:
        faults.append(str(error))
        return None
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    strange = [key for key in settings if key not in fields]
    faults += [f"{name}: {unknown('setting', key, [*fields, *also])}" for key in strange]
    hints = typing.get_type_hints(cls)
    unset = set()
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and settings.get(key) is None:
            unset.add(key)
            faults.append(f"{name}.{key} is not set: {_wish(hints[key])}, as {name}.{key}={_example(hints[key])}")
    given = {key: value for key, value in settings.items() if key in fields and key not in unset}
    lost = [f"{name}.{key}: {why}" for key, value in given.items() if (why := _lost(hints[key], value))]
    faults += lost
    types: dict[str, Any] = {key: (_lenient(hints[key]), ...) for key in given}
    model = create_model("Settings", __config__=ConfigDict(arbitrary_types_allowed=True), **types)
    try:
        checked = model.model_validate(given)
        if not unset:
            made = cls(**{key: getattr(checked, key) for key in given})
            return None if strange or lost else made
    except ValidationError as error:
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"][:1])
            faults.append(f"{name}.{key} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}")
    except ValueError as error:
        faults.append(f"{name}: {str(error).removeprefix(f'{name}: ')}")
    return None


def _lost(hint: Any, value: Any) -> str:
    """Why a setting's checkpoint can't be read, "" for one that is there and for all other settings."""
    weights = Weights(value) if has_type(hint, Weights) and isinstance(value, str) else value
    if isinstance(weights, Weights) and weights.seed is None:
        try:
            _ = weights.path
        except WeightsError as error:
            return str(error)
    return ""


def _lenient(hint: Any) -> Any:
    """A type as the command line gives it: weights by their source, tuples as `a,b`; true and false are no numbers."""
    if not _mentions(hint, bool):
        hint = Annotated[hint, BeforeValidator(no_switch)]
        return _parsed(hint, typing.get_args(hint)[0])
    return _parsed(hint, hint)


def no_switch(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for 1 and 0."""
    if isinstance(value, bool) or (isinstance(value, list | tuple) and any(isinstance(one, bool) for one in value)):
        raise ValueError(f"{'a list with ' if not isinstance(value, bool) else ''}true or false is no number or text")
    return value


def _mentions(hint: Any, wanted: type) -> bool:
    """The type is `wanted` or anything, a literal of it, or has such a part."""
    return (
        hint in (wanted, Any)
        or isinstance(hint, wanted)
        or any(_mentions(one, wanted) for one in typing.get_args(hint))
    )


def _parsed(hint: Any, bare: Any) -> Any:
    if has_type(bare, Weights):
        return Annotated[hint, BeforeValidator(_weights)]
    if has_type(bare, tuple):
        return Annotated[hint, BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]
    if has_type(bare, Path):
        return Annotated[hint, BeforeValidator(lambda v: _absolute(v) if isinstance(v, str) else v)]
    return hint


def _weights(value: Any) -> Any:
    if not isinstance(value, str | Weights | None):
        raise ValueError("expected a checkpoint file, or untrained:0 to run without training")
    if not isinstance(value, str):
        return value
    weights = Weights(value)
    return weights if weights.seed is not None or "://" in value else Weights(str(_absolute(value)))


def _absolute(text: str) -> Path:
    """A path of the command line as workers find it too, whose current folder is another."""
    return Path(text).expanduser().absolute()


def has_type(hint: Any, wanted: type) -> bool:
    """The type is `wanted`, or a union that has it."""
    origin = typing.get_origin(hint) or hint
    return origin is wanted or (origin is not tuple and any(has_type(one, wanted) for one in typing.get_args(hint)))


def _wish(hint: Any) -> str:
    if has_type(hint, Weights):
        return "give a checkpoint file, or untrained:0 to run without training"
    if has_type(hint, Path):
        return "give a path"
    return f"give a value of type {getattr(hint, '__name__', hint)}"


def _example(hint: Any) -> str:
    return "untrained:0" if has_type(hint, Weights) else "/data/..." if has_type(hint, Path) else "..."

"""Checkpoints: read them without running code from them, load them strictly, say what is in them.

A checkpoint holds tensors by name, bare or under `state_dict`, `model_state_dict` or `model`, maybe with the prefix
`module.` that DataParallel adds. Where it holds an average over training steps beside the last weights (EMA), the
average is taken, and that is logged.
"""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extractors.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor, nn

_log = logging.getLogger(__name__)

_AVERAGES = ("ema_state_dict", "state_dict_ema", "model_ema")
_WRAPPERS = ("model_state_dict", "state_dict", "model", "blobs")  # the last two in pickles of detectron2 and Detectron
_COUNTERS = ("steps", "n_averaged")  # that averages carry beside their tensors
_LEFT_OUT = (
    "mmengine.",
    "mmcv.",
    "mmdet.",
    "mmdet3d.",
    "numpy.",
)  # whose objects a training's file holds beside tensors
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # that BatchNorm keeps beside its parameters
_SHOWN = 12  # keys in an error text


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a file.

    Attributes:
        path: the file.
        state: key -> tensor on the CPU, without the prefix.
        wrapper: the entry of the file that held them, "" for a bare state_dict.
        prefix: `module.` where keys had it, else "".
        others: the file's other entries (`epoch`, `optimizer_state_dict` ...).
        meta: what the file tells of its training as plain values (`mmdet3d_version`, `config` ...).
        notes: what a user should know of how it was read.
    """

    path: Path
    state: dict[str, Tensor]
    wrapper: str
    prefix: str
    others: tuple[str, ...]
    meta: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """How the tensors of a checkpoint fit a network; all keys in the checkpoint's own naming.

    Attributes:
        network: `votenet`, `centerpoint` ...
        naming: whose key names, or which variant of the network.
        ignored: keys of other parts of a model, that are not needed.
        unexpected, missing: keys.
        mismatched: (key, shape, expected shape).
        notes: what else a user should know.
    """

    network: str
    naming: str
    ignored: frozenset[str]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    notes: tuple[str, ...]

    @property
    def loads(self) -> bool:
        """True where nothing is missing, unexpected or of another shape."""
        return not (self.unexpected or self.missing or self.mismatched)

    def use(self, key: str) -> str:
        """`loaded`, `ignored` or `unexpected`."""
        return "ignored" if key in self.ignored else "unexpected" if key in self.unexpected else "loaded"


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a safetensors file, what `torch.save` wrote, or a pickle of numpy arrays, as tensors and plain values alone.

    What a file is counts, not what it is called.

    Raises:
        WeightsError: there is no file, or it is damaged, or no checkpoint, or holds objects whose unpickling would run
            code (which is never done).
    """
    if not path.is_file():
        raise WeightsError(f"{path}: {'a folder, expected a file' if path.is_dir() else 'no such file'}")
    with path.open("rb") as file:
        head = file.read(9)
    safetensors = head[8:] == b"{" and 8 + int.from_bytes(head[:8], "little") <= path.stat().st_size
    content = _read_safetensors(path) if safetensors else _read_torch(path)
    wrapper = ""
    others: tuple[str, ...] = ()
    meta: Mapping[str, Any] = {}
    notes: list[str] = []
    if isinstance(content, Mapping):
        meta = content["meta"] if isinstance(content.get("meta"), Mapping) else {}
        averages: tuple[str, ...] = _AVERAGES
        if "message_hub" in content or "mmengine_version" in meta:
            averages = ()
            if "ema_state_dict" in content:
                notes.append("mmengine: state_dict holds the averaged weights (EMA), ema_state_dict the last ones")
        found = next((name for name in (*averages, *_WRAPPERS) if isinstance(content.get(name), Mapping)), "")
        if found:
            wrapper, others = found, tuple(str(key) for key in content if key != found)
            content = content[found]
        if wrapper in averages:
            content = {key: value for key, value in content.items() if key not in _COUNTERS}
            notes.append(f"the averaged weights (EMA, {wrapper}) are taken")
    if not isinstance(content, Mapping) or not content:
        raise WeightsError(f"{path}: holds a {type(content).__name__}, expected tensors by name (a state_dict)")
    if strangers := [key for key, value in content.items() if not (isinstance(key, str) and _is_plain_tensor(value))]:
        raise WeightsError(
            f"{path}: entries that are no plain tensors: {_some(strangers)}; expected a state_dict, bare or "
            f"under one of {', '.join(_WRAPPERS)}"
        )
    prefix = "module." if all(key.startswith("module.") for key in content) else ""
    state = {key.removeprefix(prefix): value for key, value in content.items()}
    state, averaged = _averaged(state)
    if averaged:
        notes.append(f"{averaged} tensors have averaged copies (ema_*), which are taken")
    beside = path.with_name(f"{path.stem}_ema{path.suffix}")
    if beside.is_file():
        notes.append(f"{beside.name} beside it holds averaged weights (EMA), which score higher")
    for note in notes:
        _log.warning("%s: %s", path, note)
    return Checkpoint(path, state, wrapper, prefix, others, meta, tuple(notes))


def _averaged(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The state_dict with mmcv's averaged copies in place of the tensors that they belong to; how many there were.

    The copy of `neck.conv.weight` is called `ema_neck_conv_weight`.
    """
    copies = {key: f"ema_{key.replace('.', '_')}" for key in state if not key.startswith("ema_")}
    copies = {key: copy for key, copy in copies.items() if copy in state}
    left = {key: value for key, value in state.items() if key not in copies.values()}
    return {key: state[copies.get(key, key)] for key in left}, len(copies)


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, wrapper and prefix removed; errors as `read_checkpoint`."""
    return read_checkpoint(path).state


def load_strict(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Copy a state_dict into a module; every key and every shape must match.

    `num_batches_tracked` may be absent (files older than PyTorch 0.4.1), nothing reads it in inference.

    Args:
        module: filled in place.
        state: key -> tensor, of any float dtype.
        where: the file, for the error text.

    Raises:
        WeightsError: keys are missing, unexpected, of another shape, whole numbers, or hold NaN or infinity.
    """
    import torch

    own = module.state_dict()
    required = {key for key in own if not key.endswith("num_batches_tracked")}
    faults = []
    if missing := required - state.keys():
        faults.append(f"missing: {_some(sorted(missing))}")
    if unexpected := state.keys() - own.keys():
        faults.append(f"unexpected: {_some(sorted(unexpected))}")
    if shapes := [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]:
        faults.append(f"other shapes: {_some(shapes)}")
    if kinds := [
        f"{key} is {state[key].dtype}, expected {own[key].dtype}"
        for key in own
        if key in state and own[key].is_floating_point() and not state[key].is_floating_point()
    ]:
        faults.append(f"other types: {_some(kinds)}")
    if broken := [key for key, value in state.items() if not bool(torch.isfinite(value).all())]:
        faults.append(f"NaN or infinity in: {_some(sorted(broken))}")
    if faults:
        raise WeightsError(
            f"{where}: does not fit {type(module).__name__}; {'; '.join(faults)}. "
            f"`scenecache doctor --checkpoint FILE` lists the file's keys"
        )
    module.load_state_dict({key: state.get(key, own[key]) for key in own})


def seeded_init(module: nn.Module, seed: int) -> None:
    """Fill a module for `untrained:SEED`: every tensor from the seed and its own name, whatever the order.

    Weights of two dims and more are normal with the variance that keeps ReLU activations at their size (He et al.
    2015); normalisation scales are 1, biases 0, running statistics 0 and 1.
    """
    import numpy as np
    import torch

    state = module.state_dict()
    for key, value in state.items():
        name = key.rpartition(".")[2]
        if value.ndim >= 2:
            digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
            # RandomState's stream is frozen, default_rng's is not.
            normal = np.random.RandomState(np.frombuffer(digest, np.uint32)).standard_normal(tuple(value.shape))
            filled = torch.from_numpy(normal * (2 / (value.numel() / value.shape[0])) ** 0.5)
        else:
            filled = torch.full(value.shape, 1.0 if name in ("weight", "running_var") else 0.0)
        state[key] = filled.to(value.dtype)
    module.load_state_dict(state)


def compare(
    network: str,
    naming: str,
    state: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    ignored: frozenset[str] = frozenset(),
    notes: tuple[str, ...] = (),
) -> Fit:
    """How a state_dict fits keys and shapes; counters of BatchNorm may be absent."""
    return Fit(
        network=network,
        naming=naming,
        ignored=ignored,
        unexpected=tuple(sorted(state.keys() - expected.keys() - ignored)),
        missing=tuple(k for k in expected if k not in state and not k.endswith("num_batches_tracked")),
        mismatched=tuple(
            (k, tuple(state[k].shape), shape) for k, shape in expected.items() if k in state and state[k].shape != shape
        ),
        notes=notes,
    )


def describe(path: Path) -> dict[str, Any]:
    """What a checkpoint holds and whether it loads, as plain JSON types: the report of `doctor --checkpoint`.

    Returns:
        file, bytes, sha256; wrapper, prefix, others (see `Checkpoint`); network and naming as detected (null where
        unknown); parts: [{part, keys, parameters}] by the first word of the keys; keys: [{key, shape, dtype, use}]
        with use `loaded`, `ignored` (known, of another part of the model) or `unexpected`; missing: expected keys that
        are absent; mismatched: [{key, shape, expected}]; notes; loads.

    Raises:
        WeightsError: the file can't be read.
    """
    from extractors import bev_checkpoint, grid_checkpoint, votenet_namings

    checkpoint = read_checkpoint(path)
    state = checkpoint.state
    fit = votenet_namings.inspect(state) or bev_checkpoint.inspect(checkpoint) or grid_checkpoint.inspect(state)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    parts: dict[str, list[int]] = {}
    for key, value in checkpoint.state.items():
        part = parts.setdefault(key.partition(".")[0], [0, 0])
        part[0] += 1
        part[1] += 0 if key.endswith(_STATISTICS) else value.numel()
    expected = f"{votenet_namings.EXPECTED}; {bev_checkpoint.EXPECTED}; or {grid_checkpoint.EXPECTED}"
    unknown = (f"no known network: {expected}",)
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "sha256": digest,
        "wrapper": checkpoint.wrapper,
        "prefix": checkpoint.prefix,
        "others": list(checkpoint.others),
        "network": fit.network if fit else None,
        "naming": fit.naming if fit else None,
        "parts": [{"part": part, "keys": keys, "parameters": count} for part, (keys, count) in parts.items()],
        "keys": [
            {
                "key": key,
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "use": fit.use(key) if fit else "unexpected",
            }
            for key, value in checkpoint.state.items()
        ],
        "missing": list(fit.missing) if fit else [],
        "mismatched": [{"key": k, "shape": list(s), "expected": list(e)} for k, s, e in fit.mismatched] if fit else [],
        "notes": [*checkpoint.notes, *(fit.notes if fit else unknown)],
        "loads": bool(fit and fit.loads),
    }


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: no safetensors file: {error}") from error


class _LeftOut:
    """Stands for an object of a training framework in a file: nothing of the framework is imported, no code is run."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _check_sums(path: Path) -> None:
    """Compare the checksums in what torch.save wrote, which torch.load does not: one flipped bit is another weight."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.CRC and entry.compress_type == zipfile.ZIP_STORED:  # 0: saved without
                    with archive.open(entry) as file:
                        while file.read(1 << 20):
                            pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise WeightsError(f"{path}: damaged: {error}; get the file again") from error


def _read_torch(path: Path) -> Any:
    import torch

    _check_sums(path)
    left_out: list[Any] = []
    while True:
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals(left_out):
                warnings.simplefilter("ignore")  # of formats that are refused below
                with path.open("rb") as file:  # of a path torch looks at the suffix
                    return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # an unpickler of foreign bytes raises whatever it meets
            if blocked := re.search(r"GLOBAL (\S+)", str(error)):
                name = blocked[1]
                if name.startswith(_LEFT_OUT) and name not in [known for _, known in left_out]:
                    left_out.append((_LeftOut, name))
                    continue
                raise WeightsError(
                    f"{path}: holds {name}, a Python object whose unpickling could run code, so nothing was "
                    f"unpickled. Where you trust the file, save its tensors alone: torch.save(model.state_dict(), ...)"
                ) from error
            if (arrays := _read_arrays(path)) is not None:
                return arrays
            reason = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ").partition(". ")[0]
            raise WeightsError(
                f"{path}: no checkpoint that can be read without running code from it, or a damaged one ({reason}); "
                f"expected what torch.save writes for a state_dict. Is the download complete?"
            ) from error


def _read_arrays(path: Path) -> Any:
    """A plain pickle of arrays by name, as detectron2 and Detectron keep them, as tensors; None for other files."""
    import numpy as np
    import torch

    from extractors.errors import InputError
    from extractors.safe_pickle import read_pickle

    def tensors(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: tensors(one) for key, one in value.items()}
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) and value.dtype.kind in "fiu" else value

    try:
        return tensors(read_pickle(path))
    except (InputError, TypeError):  # TypeError: numbers that torch does not have
        return None


def _is_plain_tensor(value: Any) -> bool:
    """A tensor whose values are there, as real numbers."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_meta or value.is_quantized or value.is_complex())


def _some(names: list[Any]) -> str:
    text = ", ".join(map(str, names[:_SHOWN]))
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"

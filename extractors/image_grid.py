"""Grids of features of images: of the frames of a `video` record, or of the picture of a `bev_render` record.

Three encoders: `ResNetFPN`, `TimmGrid` (any timm model; MCAN's PVTv2-B2 in SQA3D) and `ClipBertGrid`. All see images
of one size, so those of several items share a batch; a grid moves by less than 1e-5 of its norm with the company it is
computed in (float32; sums are taken in another order).
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor, Weights
from extractors.checkpoint import load_strict, read_state, seeded_init
from extractors.errors import DecodeError, InvalidValues, WeightsError
from storage.schema import Column, Record, Schema

if TYPE_CHECKING:
    from torch import Tensor, nn

ImageColumn = Literal["frame", "image", "image224"]

_CHUNK = 16  # images in one forward pass
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_CAFFE_MEAN = (123.675, 116.28, 103.53)  # RGB order, of 0..255


@dataclass(frozen=True, kw_only=True)
class ImageGrid(Extractor):
    """What the encoders share: where images come from, batches over items, the record.

    Attributes:
        weights: checkpoint (path or URL), or `untrained:SEED`.
        column: column of the input record that holds images: `frame` (one grid per frame, with its `frame_index`),
            `image` (encoded, at its own size) or `image224` (already 224 x 224, rounded to 8 bits).
        dtype: of the grids.
    """

    device: ClassVar[str] = "gpu"
    batch: ClassVar[int] = 4

    weights: Weights
    column: ImageColumn = "frame"
    dtype: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        for name, allowed in (("column", ("frame", "image", "image224")), ("dtype", ("float16", "float32"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{self.name}: {name} '{getattr(self, name)}', expected one of {', '.join(allowed)}")

    @property
    def grids(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name of each output -> (dims of one image's grid, what it is)."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """The network on the CPU, with its weights: normalised images -> {name: (image, *dims)}."""
        raise NotImplementedError

    def fit(self, image: Tensor) -> Tensor:
        """(3, height, width) float32 RGB, 0..255 -> (3, size, size) as the network wants it."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        columns = {name: Column(dims, self.dtype, doc=doc) for name, (dims, doc) in self.grids.items()}
        if self.column != "frame":
            return Schema(columns, format="hdf5")
        columns["frame_index"] = Column((), "int32", doc="number of the frame in its clip")
        return Schema(columns, element="frame", format="hdf5")

    def prepare(self, key: str, *inputs: Any) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Decode the images of one record.

        Returns:
            images, each (height, width, 3) uint8 RGB; frame_index (frame,) int32, None without frames.

        Raises:
            InvalidValues: the record has no such column, or it does not hold RGB images of 8 bits.
            DecodeError: an encoded image is damaged.
        """
        record: Mapping[str, np.ndarray] = inputs[0]
        for column in ("frame", "frame_index") if self.column == "frame" else (self.column,):
            if column not in record:
                raise InvalidValues(
                    f"{key}: the input record has no column '{column}', it has {', '.join(record)}; set "
                    f"{self.name}.column"
                )
        if self.column == "frame":
            return [_decode(value, key) for value in record["frame"]], np.asarray(record["frame_index"])
        value = record[self.column]
        return [_decode(value.item() if value.dtype == object else value, key)], None

    def load(self, device: str = "cpu") -> Callable[[Sequence[Any]], list[Record]]:
        import torch

        from extractors.inference import inference

        network = self.build().eval().requires_grad_(False).to(device)
        names = list(self.grids)

        @inference
        def run(items: Sequence[tuple[list[np.ndarray], np.ndarray | None]]) -> list[Record]:
            images = [image for item, _ in items for image in item]
            parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
            for start in range(0, len(images), _CHUNK):
                chunk = [
                    self.fit(torch.from_numpy(np.array(image, order="C")).to(device).permute(2, 0, 1).float())
                    for image in images[start : start + _CHUNK]
                ]
                for name, grid in network(torch.stack(chunk)).items():
                    if name in parts:
                        parts[name].append(grid.float().cpu().numpy())
            grids = {
                name: np.concatenate(part) if part else np.empty((0, *self.grids[name][0]), np.float32)
                for name, part in parts.items()
            }
            records, at = [], 0
            for item, frame_index in items:
                record = {name: self._store(name, grid[at : at + len(item)]) for name, grid in grids.items()}
                at += len(item)
                if frame_index is None:
                    record = {name: grid[0] for name, grid in record.items()}
                else:
                    record["frame_index"] = frame_index.astype(np.int32)
                records.append(record)
            return records

        return run

    def _store(self, name: str, grid: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            stored = grid.astype(self.dtype)
        if not np.isfinite(stored).all():
            reach = "infinite or NaN" if not np.isfinite(grid).all() else f"as large as {np.abs(grid).max():.3g}"
            raise InvalidValues(
                f"{self.name}: '{name}' is {reach}, {self.dtype} can't hold it; are these the right weights?"
            )
        return stored


@dataclass(frozen=True, kw_only=True)
class ResNetFPN(ImageGrid):
    """ResNet-50 with a feature pyramid, each level averaged onto a grid.

    Takes   a record with images, squeezed to size x size (bilinear, no antialias).
    Gives   one column per level, ([frame,] grid, grid, channels): 256 channels for p2 to p5, 256 to 2048 for c2 to c5.

    Attributes:
        levels: `p2` to `p5` of the pyramid, `c2` to `c5` of the ResNet (a file without a pyramid gives these alone).
        grid: cells along each side; a level of another size is averaged onto it.
        size: side of the images, pixels.
        stride_in_1x1: see `resnet.ResNet`: False for torchvision, True for He's Caffe weights in detectron2.
        pixels: `imagenet`: RGB in 0..1 by ImageNet's mean and deviation (torchvision); `caffe`: BGR in 0..255 minus
            the mean (detectron2).
        eps: added to stored variances; torchvision's COCO detectors have 0.
    """

    name: ClassVar[str] = "resnet_fpn"
    takes: ClassVar[tuple[str, ...]] = ("video",)

    levels: tuple[str, ...] = ("p5",)
    grid: int = 7
    size: int = 224
    stride_in_1x1: bool = False
    pixels: Literal["imagenet", "caffe"] = "imagenet"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "levels", tuple(self.levels))
        known = [f"{kind}{n}" for kind in "cp" for n in (2, 3, 4, 5)]
        if not self.levels or not set(self.levels) <= set(known):
            raise ValueError(f"resnet_fpn: levels {list(self.levels)}, expected some of {', '.join(known)}")
        if self.pixels not in ("imagenet", "caffe"):
            raise ValueError(f"resnet_fpn: pixels '{self.pixels}', expected imagenet or caffe")

    @property
    def grids(self) -> dict[str, tuple[tuple[int, ...], str]]:
        from extractors.resnet import CHANNELS

        return {
            level: ((self.grid, self.grid, CHANNELS[level]), f"level {level} of stride {2 ** int(level[1])}, averaged")
            for level in self.levels
        }

    def build(self) -> nn.Module:
        from extractors import resnet
        from extractors.grid_networks import Pooled, untrained_resnet

        pyramid = any(level.startswith("p") for level in self.levels)
        network = resnet.ResNetFPN(pyramid, self.stride_in_1x1, self.eps)
        if self.weights.seed is not None:
            untrained_resnet(network, self.weights.seed)
        else:
            path = self.weights.path
            load_strict(network, resnet.to_torchvision(read_state(path), pyramid, str(path)), str(path))
        return Pooled(network, self.levels, self.grid)

    def fit(self, image: Tensor) -> Tensor:
        image = squeeze(image, self.size)
        return imagenet_pixels(image) if self.pixels == "imagenet" else caffe_pixels(image)


@dataclass(frozen=True, kw_only=True)
class TimmGrid(ImageGrid):
    """Any timm model as an image encoder; PVTv2-B2 as in SQA3D's MCAN, (49, 512) after the last norm.

    Takes   a record with images; SQA3D squeezes the whole bird's-eye image to 224 x 224, bilinear without antialias.
    Gives   grid ([frame,] token, channel): row by row from the top left, without class tokens.

    Attributes:
        model: timm's name.
        size: side of the images, pixels.
        antialias: smooth while making images smaller (torchvision since 0.17); SQA3D's did not.

    Raises:
        ValueError: timm, where it is installed, has no such model.
    """

    name: ClassVar[str] = "timm_grid"
    takes: ClassVar[tuple[str, ...]] = ("bev_render",)

    column: ImageColumn = "image"
    model: str = "pvt_v2_b2"
    size: int = 224
    antialias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_timm_model(self.model)

    @property
    def grids(self) -> dict[str, tuple[tuple[int, ...], str]]:
        from extractors.grid_networks import timm_dims

        return {"grid": (timm_dims(self.model, self.size), f"last feature map of {self.model}, row by row")}

    def build(self) -> nn.Module:
        from extractors.grid_networks import Tokens, timm_model, to_timm

        network = timm_model(self.model, self.size)
        if self.weights.seed is not None:
            seeded_init(network, self.weights.seed)
        else:
            path = self.weights.path
            load_strict(network, to_timm(read_state(path), network), str(path))
        return Tokens(network)

    def fit(self, image: Tensor) -> Tensor:
        return imagenet_pixels(squeeze(image, self.size, self.antialias))


@dataclass(frozen=True, kw_only=True)
class ClipBertGrid(ImageGrid):
    """ClipBERT's CNN (Lei et al. 2021) as in SQA3D: detectron2's grid-feature ResNet-50 and its grid encoder.

    Images are scaled so that the longer side is `size` (bilinear), and padded with black at the right and the bottom.
    Position embeddings and the mean over a clip's frames belong to the head.

    Takes   a record with images.
    Gives   grid ([frame,] 7, 7, 768), after 3x3 convolution, 2x2 max pooling and ReLU;
            res5 ([frame,] 14, 14, 2048) where asked for.

    Attributes:
        size: longer side, pixels, a multiple of 64; the released configuration has 448 (the paper says 1000).
        res5: store the last map of the ResNet too (800 kB a frame in float16).
    """

    name: ClassVar[str] = "clipbert_grid"
    takes: ClassVar[tuple[str, ...]] = ("video",)

    size: int = 448
    res5: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size <= 0 or self.size % 64:
            raise ValueError(f"clipbert_grid: size {self.size}, expected a multiple of 64")

    @property
    def grids(self) -> dict[str, tuple[tuple[int, ...], str]]:
        cells = self.size // 64
        grids: dict[str, tuple[tuple[int, ...], str]] = {"grid": ((cells, cells, 768), "after ClipBERT's grid_encoder")}
        if self.res5:
            grids["res5"] = ((2 * cells, 2 * cells, 2048), "last map of the ResNet")
        return grids

    def build(self) -> nn.Module:
        from extractors.grid_networks import ClipBertCnn, untrained_resnet

        network = ClipBertCnn()
        if self.weights.seed is not None:
            untrained_resnet(network, self.weights.seed)
            return network
        path = self.weights.path
        load_strict(network, clipbert_state(read_state(path), str(path)), str(path))
        return network

    def fit(self, image: Tensor) -> Tensor:
        import torch.nn.functional as F

        height, width = image.shape[1:]
        # The ratio comes first, as in ClipBERT's code: (360, 640) gives (252, 448), and the longer side is exact.
        shorter = max(1, int(self.size * (min(height, width) / max(height, width))))
        sides = (self.size, shorter) if height >= width else (shorter, self.size)
        if sides != (height, width):
            image = F.interpolate(image[None], size=sides, mode="bilinear", align_corners=False)[0]
        image = F.pad(image, (0, self.size - image.shape[2], 0, self.size - image.shape[1]))
        return caffe_pixels(image)


def clipbert_state(state: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The CNN's parameters of a ClipBERT checkpoint under the names of `ClipBertCnn`; its transformer is left out.

    Args:
        state: key -> tensor.
        where: the file, for the error text.

    Raises:
        WeightsError: it is not ClipBERT's.
    """
    from extractors.resnet import to_torchvision

    feature = {k.removeprefix("cnn.feature."): v for k, v in state.items() if k.startswith("cnn.feature.")}
    encoder = {k.removeprefix("cnn."): v for k, v in state.items() if k.startswith("cnn.grid_encoder.")}
    if not feature:
        raise WeightsError(f"{where}: no key starts with 'cnn.feature.', is it ClipBERT's? It has {sorted(state)[:5]}")
    return to_torchvision(feature, False, where) | encoder


def squeeze(image: Tensor, size: int, antialias: bool = False) -> Tensor:
    """(3, height, width) -> (3, size, size), bilinear with half-pixel centres; the aspect ratio is not kept."""
    import torch.nn.functional as F

    if image.shape[1:] == (size, size):
        return image
    return F.interpolate(image[None], size=(size, size), mode="bilinear", align_corners=False, antialias=antialias)[0]


def imagenet_pixels(image: Tensor) -> Tensor:
    """(3, height, width) RGB 0..255 -> 0..1 minus ImageNet's mean, over its deviation."""
    mean, std = image.new_tensor(_IMAGENET_MEAN), image.new_tensor(_IMAGENET_STD)
    return (image / 255 - mean[:, None, None]) / std[:, None, None]


def caffe_pixels(image: Tensor) -> Tensor:
    """(3, height, width) RGB 0..255 -> BGR minus the mean of each colour."""
    return (image - image.new_tensor(_CAFFE_MEAN)[:, None, None]).flip(0)


@functools.cache
def _check_timm_model(model: str) -> None:
    """Refuse a name that timm does not have. Importing timm takes seconds: a name that its code registers is good."""
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        return
    named = re.compile(rf"@register_model\s+def {re.escape(model)}\(")
    folder = Path(found.submodule_search_locations[0]) / "models"
    if any(named.search(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")):
        return
    import timm

    if not timm.is_model(model):
        near = difflib.get_close_matches(model, timm.list_models(), 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() names them"
        raise ValueError(f"timm has no model '{model}'; {hint}")


def _decode(value: Any, key: str) -> np.ndarray:
    """(height, width, 3) uint8 RGB of a stored image, encoded or not."""
    if not isinstance(value, bytes):
        image = np.asarray(value)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise InvalidValues(
                f"{key}: an image is {image.dtype} {image.shape}, expected uint8 (height, width, 3), RGB"
            )
        return image
    import cv2

    bgr = cv2.imdecode(np.frombuffer(value, np.uint8), cv2.IMREAD_COLOR)
    if bgr is None:
        raise DecodeError(
            f"{key}: a stored image of {len(value)} bytes can't be decoded; see `scenecache verify --deep`"
        )
    return bgr[..., ::-1]

"""BEVDet (Huang et al. 2021) with a ResNet-50: objects and their features from six cameras."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from extractors.bev_detector import BevDetector, BevHead, Convention, Detections, Detector, Frame, Grid, Head
from extractors.boxes3d import CLASSES
from extractors.errors import InvalidValues, WeightsError
from extractors.image_preprocess import Filter, Fit, named_views, open_rgb
from extractors.inputs import Camera, Cameras

if TYPE_CHECKING:
    from extractors.bevdet_network import BEVDetNetwork
    from extractors.center_head import CenterHead
    from extractors.view_transform import Ground

CAMERAS = ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT")
_EDGE, _CELL, _CELLS = -51.2, 0.8, 128  # of the ground that images are lifted to, in x and y


@dataclass(frozen=True)
class Generation:
    """What differs between the two public trees, besides layers (`bevdet_network`).

    Attributes:
        frame, convention: of the map and the boxes.
        z: metres, lowest height that is lifted, and how far up from there.
        resize, crop: see `image_preprocess.Fit`; for images of any size, the same field of view.
    """

    frame: Frame
    convention: Convention
    z: tuple[float, float]
    resize: tuple[int, int]
    crop: tuple[int, int, int, int]


GENERATIONS = {
    "bd1": Generation("lidar", "mmdet3d-0.x", (-10.0, 20.0), (768, 432), (32, 176, 736, 432)),
    "bd2": Generation("ego", "mmdet3d-1.0", (-5.0, 8.0), (704, 396), (0, 140, 704, 396)),
}


@dataclass(frozen=True)
class Views:
    """A key frame as the network takes it.

    Attributes:
        pixels: (camera, 256, 704, 3) uint8 RGB, in the order of `CAMERAS`.
        cells: (camera, depth, row, column) int32, the ground's cell under each point, see `view_transform`.
    """

    pixels: np.ndarray
    cells: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Settings(Detector):
    """What both stages of BEVDet are told.

    Attributes:
        weights: an official `bevdet-r50` checkpoint of either generation, or `untrained:SEED`.
        generation: `bd1` (the first tree: frame of LIDAR_TOP, boxes of mmdet3d 0.x) or `bd2` (dev2, dev3: ego frame,
            boxes of mmdet3d 1.0). `auto` is settled when this object is made, from the checkpoint (`bd1` without one);
            from then on the field says what was found, and so does the recipe.
        map: what is stored, and what features are cut from. `final`: the head's own map, 256 channels, cells of 0.8 m.
            `before_up2`: the one before the last enlargement, 512 channels (as wide as NuScenes-QA's trainer reads),
            cells of 1.6 m. Detections are the same.
    """

    generation: Literal["auto", "bd1", "bd2"] = "auto"
    map: Literal["final", "before_up2"] = "final"

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self._found()
        if self.generation == "auto":
            object.__setattr__(self, "generation", found or "bd1")
        elif found and found != self.generation:
            raise WeightsError(
                f"{self.weights.source}: is of generation {found}, the setting says {self.generation}; give "
                f"{self.name}.generation={found}, or leave it out"
            )

    @property
    def grid(self) -> Grid:
        if self.map == "final":
            return self._final
        return Grid(512, _CELLS // 2, _CELLS // 2, 2 * _CELL, (_EDGE, _EDGE), self._kind.frame)

    @property
    def box_convention(self) -> Convention:
        return self._kind.convention

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        from extractors.center_head import output_shapes

        return output_shapes(self._final, self._tasks)

    @property
    def ground(self) -> Ground:
        """The cells that images are lifted into."""
        from extractors.view_transform import Ground

        lower, step = self._kind.z
        return Ground((_EDGE, _EDGE, lower), (_CELL, _CELL, step), (_CELLS, _CELLS, 1))

    def blank(self) -> BEVDetNetwork:
        """The network without its weights, in official keys."""
        from extractors.bevdet_network import BEVDetNetwork

        assert self.generation != "auto"
        return BEVDetNetwork(self.generation, self._center_head(), self.ground)

    def build(self) -> BEVDetNetwork:
        """The network on the CPU with its weights.

        Raises:
            WeightsError: the checkpoint does not fit, or was trained for another grid or image size.
        """
        from extractors import bev_checkpoint
        from extractors.bevdet_network import untrained

        network = self.blank().eval()
        if self.weights.seed is not None:
            untrained(network, self.weights.seed)
        else:
            bev_checkpoint.load(network, self.weights.path, "bevdet", self.box_convention)
            network.img_view_transformer.check(self.weights.source)
        return network

    @property
    def _kind(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def _final(self) -> Grid:
        return Grid(256, _CELLS, _CELLS, _CELL, (_EDGE, _EDGE), self._kind.frame)

    @property
    def _tasks(self) -> tuple[tuple[str, ...], ...]:
        from extractors.center_head import TASKS

        return TASKS if self.generation == "bd1" else (CLASSES,)

    def _found(self) -> str | None:
        """Generation of the checkpoint, None for untrained weights."""
        if self.weights.seed is not None:
            return None
        from extractors.bevdet_network import generation_of
        from extractors.checkpoint import read_state

        return generation_of(read_state(self.weights.path), self.weights.source)

    def _center_head(self) -> CenterHead:
        from extractors.center_head import CenterHead, Suppression

        if self.generation == "bd2":
            scale = (1.0, 0.7, 0.7, 0.4, 0.55, 1.1, 1.0, 1.0, 1.5, 3.5)
            rules = [Suppression("rotate", iou=0.2, post=500, scale=scale)]
        else:
            scales = ((1.0,), (0.7, 0.7), (0.4, 0.55), (), (1.0, 1.0), (4.5, 9.0))
            rules = [Suppression("rotate", iou=0.5 if task == 5 else 0.2, scale=s) for task, s in enumerate(scales)]
            rules[3] = Suppression("circle", squared_distance=1.0)
        return CenterHead(self._final, self.box_convention, rules, self._tasks)


@dataclass(frozen=True, kw_only=True)
class BEVDet(_Settings, BevDetector):
    """Detect objects in six camera images.

    Attributes:
        resample: how images are made smaller, see `image_preprocess.Fit`.
        image_size: (width, height) of all six images in pixels, which their intrinsics are for.

    The official second generation calls "ego" the car's pose when the first camera fired; here it is the pose at the
    key frame, for all six.
    """

    name: ClassVar[str] = "bevdet"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("cameras",)

    resample: Filter = "bicubic"
    image_size: tuple[int, int] = (1600, 900)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "image_size", tuple(self.image_size))
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise ValueError(f"bevdet: image_size is {self.image_size}, expected width and height in pixels")

    @property
    def fit(self) -> Fit:
        """How images are made smaller."""
        return Fit(self._kind.resize, self._kind.crop, self.resample)

    def prepare(self, key: str, *inputs: Cameras) -> Views:
        """Decode and fit the images, and find where their points lie.

        Raises:
            MissingFile, EmptyInput, TruncatedFile, DecodeError, UnsupportedFile: a camera or its image is not there, or
                damaged.
            InvalidValues: an image of another size than `image_size`, a calibration that no camera has, or (bd2) a
                source that does not tell where the car was.
        """
        (cameras,) = inputs
        views = named_views(cameras, CAMERAS, key)
        images = [open_rgb(view.path, self.image_size, f"{key} {view.name}") for view in views]
        return Views(np.stack([self.fit.apply(image) for image in images]), self.cells(views, key))

    def cells(self, views: Sequence[Camera], key: str) -> np.ndarray:
        """(camera, depth, row, column) int32: the ground's cell under each point, from calibration alone.

        Raises:
            InvalidValues: the source does not tell a pose that is needed.
        """
        import torch

        from extractors.bevdet_network import HEIGHT, WIDTH
        from extractors.view_transform import frustum, ground_cells, place

        placed = [(view, view.to_lidar if self._kind.frame == "lidar" else view.to_ego) for view in views]
        if lost := [view.name for view, pose in placed if pose is None]:
            raise InvalidValues(
                f"{key}: the source does not tell where {', '.join(lost)} is in the ego frame, which generation bd2 "
                f"needs; take the official tables as the source, or a bd1 checkpoint"
            )
        pose = np.stack([pose for _, pose in placed if pose is not None])
        intrinsic = np.stack([view.intrinsic for view in views])
        fit = self.fit.matrix(self.image_size)
        post_rot, post_tran = np.diag([fit[0, 0], fit[1, 1], 1.0]), np.array([fit[0, 2], fit[1, 2], 0.0])
        arrays = (pose[:, :3, :3], pose[:, :3, 3], intrinsic, post_rot, post_tran)
        points = place(frustum(HEIGHT, WIDTH), *(torch.from_numpy(a.astype(np.float32)) for a in arrays))
        return ground_cells(points, self.ground).numpy()

    def network(self, device: str) -> tuple[Callable[[Sequence[Any]], Any], Head]:
        import torch

        network = self.build().ready(device)

        def body(batch: Sequence[Views]) -> torch.Tensor:
            pixels = torch.from_numpy(np.stack([views.pixels for views in batch])).to(device)
            cells = torch.from_numpy(np.stack([views.cells for views in batch])).to(device)
            before = network.encode(network.lift(pixels, cells))
            return network.up2(before) if self.map == "final" else before

        return body, _Head(network, self.map)


@dataclass(frozen=True, kw_only=True)
class BEVDetHead(_Settings, BevHead):
    """Detect objects on maps that a `bevdet` stage of `give=bev` keeps; weights and `map` as there."""

    name: ClassVar[str] = "bevdet_head"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("bevdet_bev",)

    def head(self, device: str) -> Head:
        return _Head(self.build().ready(device), self.map)


class _Head:
    """All that lies behind the stored map."""

    def __init__(self, network: BEVDetNetwork, map: str) -> None:
        self.head: Any = network.pts_bbox_head
        self.enlarge = network.img_bev_encoder_neck.up2 if map == "before_up2" else None

    def __call__(self, bev: Any) -> dict[str, Any]:
        return self.head(bev if self.enlarge is None else self.enlarge(bev))

    def detect(self, outputs: Mapping[str, Any]) -> list[Detections]:
        return self.head.detect(outputs)

    def find(self, bev: Any) -> list[Detections]:
        return self.head.find(bev if self.enlarge is None else self.enlarge(bev))

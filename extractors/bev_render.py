"""Bird's-eye images of scans, rendered by Blender as SQA3D does.

Blender runs in a process of its own (`_bev_scene.py`), one per worker, that is kept for many scans, replaced from
time to time, and killed over a memory cap or a deadline.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from extractors.base import Extractor
from extractors.bev_camera import CLIP_END, CLIP_START, BevCamera, centre_and_radius
from extractors.child import Child
from extractors.errors import ChildDied, EmptyInput, InvalidValues, MissingPackage, NoColors, NoFaces
from extractors.geometry import transform
from extractors.inputs import Scan
from storage.schema import Column, Record, Schema

PROGRAM = Path(__file__).with_name("_bev_scene.py")


@dataclass(frozen=True, kw_only=True)
class BevRender(Extractor):
    """Render a scan's mesh from straight above (SQA3D code, `mesh2img.py`; docs/bev.md).

    Settings:
        look: `official`: SQA3D's light, material and white ground. `flat`: bare vertex colours on white, without
            light: what is seen is the scan's own colour, a hundred times faster.
        engine: what draws. `official` needs `cycles`. For `flat`, `workbench` is fast and needs a working GL (software
            is enough), `cycles` needs nothing. `auto` is settled when this object is made, by trying GL in a
            child process; from then on the field says what was found, and so does the recipe: a store never
            mixes two engines under one recipe, and a worker without GL fails instead of falling back.
        samples: Cycles samples per pixel of `official`; 0 is settled as `OFFICIAL_SAMPLES`. `flat` has no noise: 1.
        seed: Cycles' seed; SQA3D's file has 0.
        radius: `code` or `sphere`, see `bev_camera.centre_and_radius`. The camera is 7 radii above the centre.
        frame: frame in which the scan is seen; SQA3D uses the raw `scan`.
        width, height: size of the PNG in pixels.
        lens_mm, sensor_mm: the camera's lens, and its sensor's longer side.
        antialias: whether `image224` is smoothed when it is made smaller. SQA3D's torchvision did not smooth.
        blender: series of Blender that must be installed. Another one makes other pictures, by more than its noise.
    """

    look: Literal["official", "flat"] = "official"
    engine: Literal["auto", "cycles", "workbench"] = "auto"
    samples: int = 0
    seed: int = 0
    radius: Literal["code", "sphere"] = "code"
    frame: Literal["scan", "aligned"] = "scan"
    width: int = 1920
    height: int = 1080
    lens_mm: float = 45.0
    sensor_mm: float = 36.0
    antialias: bool = False
    blender: str = "4.5"

    name: ClassVar[str] = "bev_render"
    version: ClassVar[int] = 1
    takes: ClassVar[tuple[str, ...]] = ("scan",)

    OFFICIAL_SAMPLES: ClassVar[int] = 43  # fewest that stay within 4e-4 of 64 samples: docs/bev.md
    MEMORY_GB: ClassVar[float] = 8.0
    SCANS_PER_BLENDER: ClassVar[int] = 100

    def __post_init__(self) -> None:
        if self.look == "official" and self.engine == "workbench":
            raise ValueError("engine 'workbench' has no lights: look 'official' needs engine 'cycles' (or 'auto')")
        for name in ("width", "height", "lens_mm", "sensor_mm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        official = self.look == "official"
        if self.samples < 0 or (self.samples > 1 and not official):
            raise ValueError(f"samples is {self.samples}: give 1 or more with look 'official', or leave it out")
        if self.engine == "auto":
            object.__setattr__(self, "engine", "cycles" if official or not gl_works(self.blender) else "workbench")
        if self.samples == 0:
            object.__setattr__(self, "samples", self.OFFICIAL_SAMPLES if official else 1)

    @property
    def schema(self) -> Schema:
        return Schema(
            {
                "image": Column((), "bytes", doc=f"PNG, {self.width} x {self.height}, 8 bit, opaque"),
                "image224": Column((224, 224, 3), "uint8", doc="RGB, the whole image squeezed to a square"),
                "radius": Column((), "float64", "m", doc=f"rule '{self.radius}'"),
                "centre": Column((3,), "float64", "m", self.frame, doc="middle of the bounding box"),
                "camera": Column((3,), "float64", "m", self.frame, doc="location of the camera, minus centre"),
                "projection": Column((4, 4), "float64", doc="camera coordinates to clip coordinates (OpenGL)"),
                "render": Column((), "string", doc="JSON: Blender, engine, samples, seed and all that made the image"),
            }
        )

    def prepare(self, key: str, scan: Scan) -> dict[str, Any]:
        """Check the mesh and place the camera.

        Vertices that are NaN or infinite are left out with the faces that touch them.

        Returns:
            what `_bev_scene.py` wants to know of a mesh and a camera, and the camera itself.

        Raises:
            EmptyInput: no vertices.
            NoColors, NoFaces: the mesh has none of them, or no face is left.
            InvalidValues: no vertex is finite, a face names a vertex that is not there, or the mesh is so small or so
                large (other units than metres) that the camera would see nothing of it.
        """
        if len(scan.xyz) == 0:
            raise EmptyInput(f"{key}: the mesh has no vertices; is the file complete?")
        if scan.rgb is None:
            raise NoColors(f"{key}: the mesh has no vertex colours, a bird's-eye image needs them: use a coloured mesh")
        if len(scan.faces) == 0:
            raise NoFaces(f"{key}: the mesh has no faces, only {len(scan.xyz)} points; a render needs a surface")
        if scan.faces.min() < 0 or scan.faces.max() >= len(scan.xyz):
            wrong = scan.faces[(scan.faces < 0) | (scan.faces >= len(scan.xyz))][0]
            raise InvalidValues(f"{key}: a face names vertex {wrong}, the mesh has {len(scan.xyz)} vertices")

        xyz, rgb, faces = in_frame(scan, self.frame), scan.rgb, scan.faces
        finite = np.isfinite(xyz).all(1)
        if not finite.any():
            raise InvalidValues(f"{key}: none of the {len(xyz)} vertices is finite")
        if not finite.all():
            faces = np.cumsum(finite)[faces[finite[faces].all(1)]] - 1
            xyz, rgb = xyz[finite], rgb[finite]
        a, b, c = faces.T
        faces = faces[(a != b) & (b != c) & (c != a)]  # no area, and Blender wants none
        if len(faces) == 0:
            raise NoFaces(f"{key}: no face is left without the {np.sum(~finite)} vertices that are not finite")

        centre, radius = centre_and_radius(xyz, self.radius)
        camera = BevCamera(centre, radius, self.width, self.height, self.lens_mm, self.sensor_mm)
        heights = xyz[:, 2] - centre[2]
        if 7 * radius - heights.max() < CLIP_START or 7 * radius - heights.min() > CLIP_END:
            raise InvalidValues(
                f"{key}: radius {radius:.3g} m puts the mesh outside of what the camera sees, {CLIP_START} to "
                f"{CLIP_END:g} m; are its coordinates metres?"
            )
        return {
            "camera": camera,
            "xyz": np.ascontiguousarray(xyz - centre, np.float32),
            "rgb": np.ascontiguousarray(rgb, np.uint8),
            "faces": np.ascontiguousarray(faces, np.int32),
        }

    def load(self, device: str = "cpu") -> Callable[[Sequence[dict[str, Any]]], list[Record]]:
        """Start nothing yet: Blender comes up with the first scan, and is kept.

        Blender uses `OMP_NUM_THREADS` threads where that is set (Ray does), else one per core; the picture is the same.
        """
        blender = Child(
            [sys.executable, str(PROGRAM)],
            name="Blender",
            deadline_s=180.0 + 30.0 * self.samples,  # at 1920 x 1080, 64 samples took 195 to 325 s on 2 cores
            memory_gb=self.MEMORY_GB,
            recycle_after=self.SCANS_PER_BLENDER,
        )
        return lambda prepared: [self._render(blender, one) for one in prepared]

    def _render(self, blender: Child, prepared: Mapping[str, Any]) -> Record:
        camera: BevCamera = prepared["camera"]
        settings = {
            "look": self.look,
            "engine": {"cycles": "CYCLES", "workbench": "BLENDER_WORKBENCH"}[self.engine],
            "samples": self.samples,
            "seed": self.seed,
            "denoise": self.look == "official",
            "width": self.width,
            "height": self.height,
            "lens_mm": self.lens_mm,
            "sensor_mm": self.sensor_mm,
        }
        request = {
            **settings,
            **{name: prepared[name] for name in ("xyz", "rgb", "faces")},
            "camera_z": float(camera.location[2]),
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)),
            "blender": self.blender,
        }
        reply = blender.call(request)
        settings |= {
            "blender": reply["blender"],
            "radius": self.radius,
            "frame": self.frame,
            "view_transform": "Standard",
            "antialias": self.antialias,
        }
        small = input_image(reply["png"], self.antialias)
        return {
            "image": np.array(reply["png"], object),
            "image224": np.rint(small * 255).astype(np.uint8),
            "radius": np.array(camera.radius),
            "centre": camera.centre,
            "camera": camera.location,
            "projection": camera.projection,
            "render": np.array(json.dumps(settings), object),
        }


def in_frame(scan: Scan, frame: Literal["scan", "aligned"]) -> np.ndarray:
    """(vertex, 3) float64, metres: the scan's vertices in a frame; both are one where there is no `axis_align`."""
    xyz = scan.xyz.astype(np.float64)
    if scan.frame == frame or scan.axis_align is None:
        return xyz
    return transform(xyz, scan.axis_align if frame == "aligned" else np.linalg.inv(scan.axis_align))


def input_image(png: bytes, antialias: bool = False) -> np.ndarray:
    """The image as SQA3D's MCAN takes it, before the ImageNet normalisation.

    RGB / 255, then a bilinear resize of the tensor (torchvision below 0.17: without antialias), aspect ratio not kept.

    Args:
        png: the column `image`.
        antialias: smooth first, as torchvision does since 0.17.

    Returns:
        (224, 224, 3) float32, 0 to 1. `image224` is this in steps of 1/255.
    """
    import torch
    from PIL import Image

    rgb = torch.from_numpy(np.array(Image.open(io.BytesIO(png)).convert("RGB")))
    tensor = rgb.permute(2, 0, 1)[None].float() / 255
    small = torch.nn.functional.interpolate(
        tensor, (224, 224), mode="bilinear", align_corners=False, antialias=antialias
    )
    return np.ascontiguousarray(small[0].permute(1, 2, 0).numpy())


@functools.cache
def gl_works(blender: str = "4.5") -> bool:
    """Whether Blender's Workbench can draw here, found by drawing one triangle in a child process.

    Without GL, Workbench does not fail: it aborts its process.

    Raises:
        MissingPackage: there is no Blender of this series.
    """
    request = {
        "xyz": np.array([[-1, -1, 0], [1, -1, 0], [0, 1, 0]], np.float32),
        "rgb": np.full((3, 3), 255, np.uint8),
        "faces": np.array([[0, 1, 2]], np.int32),
        "look": "flat", "engine": "BLENDER_WORKBENCH", "samples": 1, "seed": 0, "denoise": False,
        "width": 16, "height": 16, "lens_mm": 45.0, "sensor_mm": 36.0, "camera_z": 7.0, "threads": 0,
        "blender": blender,
    }  # fmt: skip
    with Child([sys.executable, str(PROGRAM)], name="GL probe", deadline_s=60.0) as child:
        try:
            child.call(request)
        except MissingPackage:
            raise
        except ChildDied:
            return False
    return True

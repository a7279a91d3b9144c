"""Pictures of a street by Blender, from cameras anywhere.

Blender runs in a process of its own with the program that renders scans from above (extractors/_bev_scene.py), which
draws bare vertex colours from the origin along -z. So everything is moved into the camera's frame, and light and shadow
are put into the colours beforehand. A principal point off the middle, and pixels that are not square, are a
shear of that frame.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

import cv2
import numpy as np

from extractors.bev_render import PROGRAM, gl_works
from extractors.child import Child
from pipelines.make_data.solids import Mesh, Solid
from pipelines.make_data.streets import ASPHALT

BLENDER = "4.5"
_SENSOR_MM = 36.0
_AMBIENT = 0.55  # brightness of a face that the sun does not reach
_SHADOW_Z = 0.026  # metres, above the paint


class StreetCamera:
    """Draws pictures, one after the other, in one Blender.

    Workbench draws where GL works, Cycles elsewhere: the same pictures but for the pixels at edges.
    """

    def __init__(self) -> None:
        self.engine = "BLENDER_WORKBENCH" if gl_works(BLENDER) else "CYCLES"
        self._blender = Child([sys.executable, str(PROGRAM)], name="Blender", deadline_s=120.0, memory_gb=8.0)

    def __enter__(self) -> StreetCamera:
        return self

    def __exit__(self, *_: object) -> None:
        self._blender.close()

    def draw(
        self, mesh: Mesh, camera_to_street: np.ndarray, intrinsic: np.ndarray, size: tuple[int, int],
        oversampling: float = 1.5,
    ) -> np.ndarray:  # fmt: skip
        """What a pinhole camera sees.

        Args:
            mesh: in the street's frame; its colours are drawn as they are, see `lit`.
            camera_to_street: (4, 4); the camera looks along +z, x right, y down.
            intrinsic: (3, 3) pixels; pixel 0 spans 0 to 1.
            size: (width, height), pixels.
            oversampling: pixels drawn per pixel and axis; 1 keeps the mesh's colours unmixed.

        Returns:
            (height, width, 3) uint8 RGB.
        """
        width, height = (math.ceil(side * oversampling) for side in size)
        to_camera = np.linalg.inv(camera_to_street)
        scaled = intrinsic * np.array([[width / size[0]], [height / size[1]], [1]])
        fx, fy, cx, cy = scaled[0, 0], scaled[1, 1], scaled[0, 2], scaled[1, 2]
        # afterwards both focal lengths are fx, and the principal point is in the middle
        square = np.array([[1, 0, (cx - width / 2) / fx], [0, fy / fx, (cy - height / 2) / fx], [0, 0, 1]])
        to_blender = np.diag([1.0, -1.0, -1.0]) @ square
        xyz = mesh.xyz @ (to_blender @ to_camera[:3, :3]).T + to_blender @ to_camera[:3, 3]
        reply = self._blender.call({
            "xyz": xyz.astype(np.float32), "rgb": mesh.rgb, "faces": mesh.faces,
            "look": "flat", "engine": self.engine, "samples": 1, "seed": 0, "denoise": False,
            "width": width, "height": height, "camera_z": 0.0,
            "lens_mm": float(fx * _SENSOR_MM / max(width, height)), "sensor_mm": _SENSOR_MM,
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)), "blender": BLENDER,
        })  # fmt: skip
        large = cv2.imdecode(np.frombuffer(reply["png"], np.uint8), cv2.IMREAD_COLOR)
        return cv2.resize(large, size, interpolation=cv2.INTER_AREA)[..., ::-1]


def lit(mesh: Mesh, sun: np.ndarray) -> Mesh:
    """The mesh with sunlight in its colours.

    Args:
        mesh: in the street's frame.
        sun: (3,) unit vector towards the sun.
    """
    light = _AMBIENT + (1 - _AMBIENT) * np.maximum(mesh.normal @ sun, 0) / sun[2]
    light[~mesh.normal.any(axis=1)] = 1.0
    shaded = np.clip(np.rint(mesh.rgb * light[:, None]), 0, 255).astype(np.uint8)
    return Mesh(mesh.xyz, mesh.normal, shaded, mesh.faces)


def shadows(solids: Sequence[tuple[Solid, np.ndarray]], sun: np.ndarray) -> Mesh:
    """What solids, each with its pose (4, 4) in the street's frame, keep from the ground; coloured as asphalt there."""
    xyz, faces, start = [np.zeros((0, 3))], [], 0
    for solid, pose in solids:
        points = solid.vertices @ pose[:3, :3].T + pose[:3, 3]
        fallen = points[:, :2] - points[:, 2:] * sun[:2] / sun[2]
        hull = cv2.convexHull(fallen.astype(np.float32), clockwise=False)[:, 0]
        xyz.append(np.column_stack([hull, np.full(len(hull), _SHADOW_Z)]))
        faces += [(start, start + i, start + i + 1) for i in range(1, len(hull) - 1)]
        start += len(hull)
    points = np.concatenate(xyz)
    dark = np.rint(_AMBIENT * np.array(ASPHALT)).astype(np.uint8)
    return Mesh(
        points, np.zeros_like(points), np.tile(dark, (len(points), 1)), np.array(faces, np.int32).reshape(-1, 3)
    )

"""One drive of nuScenes' car: its sensors, its way through a crossing, and the traffic there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipelines.make_data.solids import Solid, block
from pipelines.make_data.streets import Street, make_street
from pipelines.make_data.traffic import EGO_MIDDLE, EGO_SIZE, Thing, Track, ego_track, planar_pose, populate

MANOEUVRES = ("left", "straight", "right", "wait")
BLOCK = 240.0  # metres between the crossings of two drives
IMAGE = (1600, 900)  # pixels

# As on the real cars, rounded. Cameras: direction of view (degrees), place (metres, ego frame), focal length (pixels),
# microseconds from the picture to the time that stands for the LiDAR's turn.
_CAMERAS: dict[str, tuple[float, tuple[float, float, float], float, int]] = {
    "CAM_FRONT": (0.0, (1.70, 0.016, 1.511), 1266.0, 35_500),
    "CAM_FRONT_RIGHT": (-56.4, (1.55, -0.493, 1.496), 1261.0, 27_600),
    "CAM_BACK_RIGHT": (-110.8, (1.015, -0.481, 1.562), 1260.0, 20_100),
    "CAM_BACK": (180.0, (0.028, 0.003, 1.579), 809.0, 10_400),
    "CAM_BACK_LEFT": (108.6, (1.036, 0.485, 1.591), 1257.0, 500),
    "CAM_FRONT_LEFT": (55.2, (1.524, 0.495, 1.509), 1273.0, 43_100),
}
CAMERAS = tuple(_CAMERAS)
_PRINCIPAL = (816.0, 491.0)
_LIDAR_PLACE = (0.944, 0.0, 1.84)
_LIDAR_AXES = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 1.0]])  # x right, y forward, z up -> x forward, y left, z up
_CAMERA_AXES = np.array([[0, 0, 1], [-1, 0, 0], [0, -1, 0.0]])  # x right, y down, z forward -> the same


@dataclass(frozen=True, eq=False)
class Sensor:
    """One sensor as it is mounted on one drive.

    Attributes:
        channel: `LIDAR_TOP`, `CAM_FRONT` ...
        to_ego: (4, 4).
        intrinsic: (3, 3) pixels, pixel 0 spans 0 to 1; (0, 0) for the LiDAR.
        early_us: how long before the LiDAR's time it measures.
    """

    channel: str
    to_ego: np.ndarray
    intrinsic: np.ndarray
    early_us: int


@dataclass(frozen=True, eq=False)
class Drive:
    """What happens on one crossing; time 0 is the first key frame.

    Attributes:
        manoeuvre: of the ego car.
        street: what stands still, in the street's frame.
        to_global: (4, 4) street's frame -> global.
        things: traffic.
        sensors: LIDAR_TOP first.
        sun: (3,) unit vector, street's frame.
        track: of the ego car's rear axle, street's frame.
        sway: (2, 2) of roll and of pitch: size, phase; radians.
    """

    manoeuvre: str
    street: Street
    to_global: np.ndarray
    things: list[Thing]
    sensors: tuple[Sensor, ...]
    sun: np.ndarray
    track: Track
    sway: np.ndarray

    def ego_in_street(self, time_s: float) -> np.ndarray:
        """(4, 4) ego frame (x forward, y left, z up, rear axle on the ground) -> street."""
        pose = planar_pose(*self.track.at(time_s))
        roll, pitch = self.sway[:, 0] * np.sin((2.1, 3.3) * np.array(time_s) + self.sway[:, 1])
        pose[:3, :3] = pose[:3, :3] @ _turn(1, pitch) @ _turn(0, roll)
        return pose

    def ego(self, time_s: float) -> np.ndarray:
        """(4, 4) ego frame -> global."""
        return self.to_global @ self.ego_in_street(time_s)


def make_drive(seed: int, index: int, duration_s: float, image_size: tuple[int, int]) -> Drive:
    """The drive of this number; drives have crossings of their own, `BLOCK` apart, and take turns in `MANOEUVRES`."""
    rng = np.random.default_rng([seed, index, 0])
    manoeuvre = MANOEUVRES[index % len(MANOEUVRES)]
    height, around = np.deg2rad(rng.uniform(42, 58)), rng.uniform(-np.pi, np.pi)
    return Drive(
        manoeuvre=manoeuvre,
        street=make_street(rng),
        to_global=planar_pose(BLOCK * (index % 5 + 0.5), BLOCK * (index // 5 + 0.5), rng.uniform(-np.pi, np.pi)),
        things=populate(rng, manoeuvre, duration_s),
        sensors=_mount(rng, image_size),
        sun=np.array([np.cos(height) * np.cos(around), np.cos(height) * np.sin(around), np.sin(height)]),
        track=ego_track(manoeuvre),
        sway=np.column_stack([(0.008, 0.006), rng.uniform(0, 2 * np.pi, 2)]),
    )


def ego_body() -> list[Solid]:
    """The ego car in its own frame: the lowest rays meet its roof."""
    back, side = EGO_MIDDLE - EGO_SIZE[0] / 2, EGO_SIZE[1] / 2
    black = (40, 40, 40)
    return [
        block((back, -side, 0.25), (back + EGO_SIZE[0], side, 0.95), black, echo=0.2),
        block((back + 0.3, 0.1 - side, 0.95), (2.6, side - 0.1, EGO_SIZE[2]), black, top=(back + 0.6, 1.8, -0.6, 0.6)),
    ]


def _turn(axis: int, angle: float) -> np.ndarray:
    """Rotation (3, 3) about x, y or z."""
    a, b = [(1, 2), (2, 0), (0, 1)][axis]
    rotation = np.eye(3)
    rotation[[a, b], [a, b]] = np.cos(angle)
    rotation[a, b], rotation[b, a] = -np.sin(angle), np.sin(angle)
    return rotation


def _mount(rng: np.random.Generator, image_size: tuple[int, int]) -> tuple[Sensor, ...]:
    """The sensors, each a little off its nominal place."""
    sensors = []
    for channel in ("LIDAR_TOP", *CAMERAS):
        off = np.linalg.multi_dot([_turn(axis, rng.normal(0, 0.004)) for axis in range(3)])
        pose, intrinsic, early_us = np.eye(4), np.zeros((0, 0)), 0
        if channel == "LIDAR_TOP":
            pose[:3, :3], pose[:3, 3] = _LIDAR_AXES @ off, _LIDAR_PLACE
        else:
            yaw, place, focal, early_us = _CAMERAS[channel]
            pose[:3, :3], pose[:3, 3] = _turn(2, np.deg2rad(yaw)) @ _CAMERA_AXES @ off, place
            cx, cy = np.array(_PRINCIPAL) + rng.uniform(-8, 8, 2)
            intrinsic = np.array([[focal, 0, cx], [0, focal, cy], [0, 0, 1]])
            intrinsic[:2] *= (np.array(image_size) / IMAGE)[:, None]
        pose[:3, 3] = np.round(pose[:3, 3] + rng.normal(0, 0.004, 3), 6)
        sensors.append(Sensor(channel, pose, intrinsic, early_us))
    return tuple(sensors)

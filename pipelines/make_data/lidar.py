"""A spinning LiDAR of 32 beams in a world of convex solids on flat ground."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from pipelines.make_data.solids import Solid
from pipelines.make_data.streets import Street

RINGS, COLUMNS = 32, 1084  # an HDL-32E at 20 Hz
ELEVATION = np.deg2rad(np.linspace(-30.67, 10.67, RINGS))
_REACH = 95.0  # metres
_NOISE = 0.012  # metres along the ray, one standard deviation; at most 1.5 of them
_LOST = 0.03  # share of rays without an echo


@dataclass(frozen=True)
class Sweep:
    """What one turn of the sensor gives.

    Attributes:
        points: (point, 5) float32 x, y, z (metres, sensor frame: x right, y forward, z up), intensity 0..255, ring
            0..31.
        owner: (point,) int64 index of the thing that was met, -1 for the ground and what is not annotated.
        visible: (thing,) float64 share of the rays that would meet a thing if it were alone that do meet it.
    """

    points: np.ndarray
    owner: np.ndarray
    visible: np.ndarray


@cache
def directions() -> np.ndarray:
    """(column, ring, 3) unit vectors in the sensor frame, in the order of the file: clockwise from the left side."""
    azimuth = np.pi - np.arange(COLUMNS) * 2 * np.pi / COLUMNS
    a, e = np.meshgrid(azimuth, ELEVATION, indexing="ij")
    return np.stack([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)], axis=-1)


def scan(
    rng: np.random.Generator,
    sensor_to_street: np.ndarray,
    street: Street,
    own: Sequence[tuple[Sequence[Solid], np.ndarray]],
    things: Sequence[tuple[Sequence[Solid], np.ndarray]],
) -> Sweep:
    """Send every ray at one instant (nuScenes' files are corrected for the car's motion within a turn).

    Args:
        rng: of noise and lost rays.
        sensor_to_street: (4, 4).
        street: what stands still.
        own: solids of the ego car, each with its pose (4, 4) in the street frame.
        things: solids of each annotated thing and its pose.
    """
    rays = directions()
    to_sensor = np.linalg.inv(sensor_to_street)
    distance = np.full((COLUMNS, RINGS), np.inf)
    owner = np.full((COLUMNS, RINGS), -1)
    echo = np.zeros((COLUMNS, RINGS))

    down = rays @ sensor_to_street[2, :3]
    with np.errstate(divide="ignore"):
        ground = np.where(down < 0, -sensor_to_street[2, 3] / down, np.inf)
    hit = ground < _REACH
    distance[hit] = ground[hit]
    xy = (rays[hit] * ground[hit][:, None]) @ sensor_to_street[:2, :3].T + sensor_to_street[:2, 3]
    echo[hit] = street.echo(xy) * np.abs(down[hit]) ** 0.3

    visible = np.zeros(len(things))
    bodies: list[tuple[int, Sequence[Solid], np.ndarray]]
    bodies = [(-1, [solid], np.eye(4)) for solid in (*street.buildings, *street.furniture)]
    bodies += [(-1, solids, pose) for solids, pose in own]
    bodies += [(index, solids, pose) for index, (solids, pose) in enumerate(things)]
    alone = np.zeros(len(things))
    for index, solids, pose in bodies:
        near = np.full((COLUMNS, RINGS), np.inf)
        back = np.zeros((COLUMNS, RINGS))
        for solid in solids:
            _meet(rays, to_sensor @ pose, solid, near, back)
        closer = near < distance
        distance[closer], owner[closer], echo[closer] = near[closer], index, back[closer]
        if index >= 0:
            alone[index] = np.isfinite(near).sum()

    met = np.bincount(owner[owner >= 0], minlength=len(things))
    np.divide(met, alone, out=visible, where=alone > 0)
    kept = (distance < _REACH) & (rng.random(distance.shape) > _LOST + 0.25 * (distance / _REACH) ** 2)
    noise = np.clip(rng.normal(0, _NOISE, distance.shape), -1.5 * _NOISE, 1.5 * _NOISE)
    xyz = rays[kept] * (distance + noise)[kept][:, None]
    bright = np.clip(np.rint(110 * echo * rng.uniform(0.7, 1.3, echo.shape)), 1, 255)[kept]
    ring = np.broadcast_to(np.arange(RINGS), kept.shape)[kept]
    points = np.column_stack([xyz, bright, ring]).astype(np.float32)
    return Sweep(points, owner[kept], visible)


def _meet(rays: np.ndarray, to_sensor: np.ndarray, solid: Solid, near: np.ndarray, back: np.ndarray) -> None:
    """Where rays enter a solid, if nearer than `near`; `near` and `back` (what comes back) are updated."""
    vertices = solid.vertices @ to_sensor[:3, :3].T + to_sensor[:3, 3]
    if np.linalg.norm(vertices, axis=1).min() > _REACH + 40:
        return
    columns = _columns(vertices)
    if not len(columns):
        return
    normal = solid.planes[:, :3] @ to_sensor[:3, :3].T
    offset = solid.planes[:, 3] + normal @ to_sensor[:3, 3]
    facing = offset < 0  # the sensor is outside of these planes: rays enter through them and leave through the others
    some = rays[columns]
    slope = some @ normal.T  # (column, ring, face)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = offset / slope
    enter = np.where(slope[..., facing] < 0, at[..., facing], np.inf)
    leave = np.where(slope[..., ~facing] > 0, at[..., ~facing], np.inf)
    first, face = enter.max(axis=-1), enter.argmax(axis=-1)
    met = (first < leave.min(axis=-1)) & (first < near[columns])
    c, r = np.nonzero(met)
    near[columns[c], r] = first[met]
    straight = np.abs(np.take_along_axis(slope[..., facing], face[..., None], -1)[..., 0][met])
    back[columns[c], r] = solid.echo * (0.35 + 0.65 * straight)


def _columns(vertices: np.ndarray) -> np.ndarray:
    """Columns of rays that may meet the hull of these points: all where it is above or below the sensor."""
    azimuth = np.arctan2(vertices[:, 1], vertices[:, 0])
    middle = np.arctan2(vertices[:, 1].mean(), vertices[:, 0].mean())
    apart = (azimuth - middle + np.pi) % (2 * np.pi) - np.pi
    if np.ptp(apart) > 0.98 * np.pi or np.hypot(*vertices[:, :2].T).min() < 1.0:
        return np.arange(COLUMNS)
    step = 2 * np.pi / COLUMNS
    first = int(np.ceil((np.pi - middle - apart.max()) / step))
    last = int(np.floor((np.pi - middle - apart.min()) / step))
    return np.arange(first, last + 1) % COLUMNS

"""Furnished rooms as textured rectangles: what both the mesh and the pictures are made of.

Everything is a box, and a box is six rectangles. Lengths are metres; the room frame has z up, the floor at z = 0 and
the origin at the middle of the floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipelines.make_data import furniture
from pipelines.make_data.furniture import FABRICS, WOODS, Color, Thing
from pipelines.make_data.surfaces import Patch, add_box, add_shell


@dataclass(frozen=True)
class Room:
    """A furnished room.

    Attributes:
        width, depth: extent along x and y.
        things: the objects; walls and floor are not among them.
        patches: all rectangles; `part_owner[patch.part]` is the index of the thing it belongs to, -1 the floor, -2 to
            -5 the walls, -9 what nobody annotated.
    """

    width: float
    depth: float
    things: tuple[Thing, ...]
    patches: tuple[Patch, ...]
    part_owner: tuple[int, ...]


def make_room(rng: np.random.Generator, kind: int) -> Room:
    """Furnish a bedroom (kind 0), a living room (1) or an office (2); the same generator state gives the same room."""
    width, depth = rng.uniform(4.6, 6.0), rng.uniform(4.2, 5.2)
    things = _furnish(rng, kind % 3, width, depth)
    patches: list[Patch] = []
    owners: list[int] = []
    add_shell(rng, width, depth, things, patches, owners)
    for index, thing in enumerate(things):
        for box in thing.boxes:
            add_box(rng, thing, box, len(owners), patches)
            owners.append(index)
    return Room(width, depth, tuple(things), tuple(patches), tuple(owners))


def _furnish(rng: np.random.Generator, kind: int, width: float, depth: float) -> list[Thing]:
    wood = WOODS[rng.integers(len(WOODS))]
    cloth = FABRICS[rng.integers(len(FABRICS))]
    at_wall: list[Thing] = [furniture.door(wood)]
    if kind == 0:
        at_wall += [
            furniture.bed(wood, cloth),
            furniture.window(),
            furniture.desk(wood),
            furniture.dresser(wood),
            furniture.bookshelf(wood),
            furniture.picture(),
            furniture.lamp(),
            furniture.trash_can(),
        ]
        middle: list[Thing] = []
    elif kind == 1:
        at_wall += [
            furniture.couch(cloth),
            furniture.window(),
            furniture.tv_cabinet(wood),
            furniture.bookshelf(wood),
            furniture.armchair(cloth),
            furniture.picture(),
            furniture.cabinet(wood),
            furniture.lamp(),
        ]
        middle = [furniture.table("coffee table", wood, 1.1, 0.65, 0.42)]
    else:
        at_wall += [
            furniture.whiteboard(),
            furniture.window(),
            furniture.desk(wood),
            furniture.cabinet(wood),
            furniture.refrigerator(),
            furniture.desk(wood),
            furniture.trash_can(),
            furniture.picture(),
        ]
        middle = [furniture.table("table", wood, 1.5, 0.9, 0.74)]
    placed: list[Thing] = []
    for thing in middle:
        placed.append(
            replace(thing, x=rng.uniform(-0.4, 0.4), y=rng.uniform(-0.3, 0.3), yaw=np.pi / 2 * rng.integers(2))
        )
        if thing.label == "table":
            placed += _chairs_around(rng, placed[-1], cloth)
    for thing in at_wall:
        placed += _at_wall(rng, thing, placed, width, depth, wood, cloth)
    return placed


def _at_wall(
    rng: np.random.Generator, thing: Thing, placed: list[Thing], width: float, depth: float, wood: Color, cloth: Color
) -> list[Thing]:
    """The thing with its back at a wall, and what belongs with it, where nothing is in their way; nothing where no
    such place was found."""
    back = thing.bounds[1, 1]
    half = (thing.bounds[1, 0] - thing.bounds[0, 0]) / 2
    for _ in range(200):
        wall = rng.integers(4)
        long, short = (width, depth) if wall % 2 == 0 else (depth, width)
        along = rng.uniform(half - long / 2 + 0.06, long / 2 - half - 0.06)
        yaw = wall * np.pi / 2  # wall 0 is at +y
        c, s = np.cos(yaw), np.sin(yaw)
        out = short / 2 - back - 0.02
        there = replace(thing, x=c * along - s * out, y=s * along + c * out, yaw=yaw)
        if not any(_in_the_way(there, other) for other in placed):
            companions = _companions(rng, there, wood, cloth)
            inside = all((abs(c.bounds[:, :2]) < (width / 2, depth / 2)).all() for c in companions)
            if inside and not any(_in_the_way(c, other) for c in companions for other in placed):
                return [there, *companions]
    return []


def _in_the_way(a: Thing, b: Thing) -> bool:
    margin = np.array([0.06, 0.06, 0.0])
    if "door" in (a.label, b.label):
        margin = np.array([0.55, 0.55, 0.0])
    elif {a.label, b.label} & {"desk", "bed"}:
        margin = np.array([0.25, 0.25, 0.0])
    (low_a, high_a), (low_b, high_b) = a.bounds, b.bounds
    return bool((low_a - margin < high_b).all() and (low_b - margin < high_a).all())


def _companions(rng: np.random.Generator, host: Thing, wood: Color, cloth: Color) -> list[Thing]:
    """What belongs with a piece of furniture, in its place."""

    def beside(thing: Thing, x: float, y: float, z: float, turn: float = 0.0) -> Thing:
        moved = host.rotation @ (x, y, z) + (host.x, host.y, host.z)
        return replace(thing, x=moved[0], y=moved[1], z=moved[2], yaw=host.yaw + turn)

    if host.label == "bed":
        found = [beside(furniture.pillow(), x, 0.7, 0.52) for x in (-0.38, 0.38)]
        return [*found, beside(furniture.nightstand(wood), 1.03, 0.79, 0)]
    if host.label == "desk":
        chair = beside(furniture.chair(cloth), rng.uniform(-0.15, 0.15), -0.62, 0, np.pi + rng.uniform(-0.3, 0.3))
        return [beside(furniture.monitor(), 0, 0.12, 0.74), chair]
    if host.label == "cabinet" and host.boxes[0].look == "doors" and host.bounds[1, 2] < 0.6:
        return [beside(furniture.tv(), 0, 0.05, 0.5)]
    return []


def _chairs_around(rng: np.random.Generator, table: Thing, cloth: Color) -> list[Thing]:
    chairs = []
    for x, y, turn in ((-0.38, -0.66, np.pi), (0.38, -0.66, np.pi), (-0.38, 0.66, 0), (0.38, 0.66, 0))[
        : rng.integers(2, 5)
    ]:
        moved = table.rotation @ (x, y, 0.0)
        yaw = table.yaw + turn + rng.uniform(-0.25, 0.25)
        chairs.append(replace(furniture.chair(cloth), x=table.x + moved[0], y=table.y + moved[1], yaw=yaw))
    return chairs

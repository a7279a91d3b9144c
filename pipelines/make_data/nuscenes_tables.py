"""nuScenes' thirteen tables while they are being filled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extractors.geometry import matrix_to_quaternion

TABLES = (
    "attribute", "calibrated_sensor", "category", "ego_pose", "instance", "log", "map", "sample", "sample_annotation",
    "sample_data", "scene", "sensor", "visibility",
)  # fmt: skip
CATEGORIES = (
    "human.pedestrian.adult", "human.pedestrian.child", "human.pedestrian.wheelchair", "human.pedestrian.stroller",
    "human.pedestrian.personal_mobility", "human.pedestrian.police_officer", "human.pedestrian.construction_worker",
    "animal", "vehicle.car", "vehicle.motorcycle", "vehicle.bicycle", "vehicle.bus.bendy", "vehicle.bus.rigid",
    "vehicle.truck", "vehicle.construction", "vehicle.emergency.ambulance", "vehicle.emergency.police",
    "vehicle.trailer", "movable_object.barrier", "movable_object.trafficcone", "movable_object.pushable_pullable",
    "movable_object.debris", "static_object.bicycle_rack",
)  # fmt: skip
ATTRIBUTES = (
    "vehicle.moving", "vehicle.stopped", "vehicle.parked", "cycle.with_rider", "cycle.without_rider",
    "pedestrian.sitting_lying_down", "pedestrian.standing", "pedestrian.moving",
)  # fmt: skip
VISIBILITY = (("v0-40", 0.0), ("v40-60", 0.4), ("v60-80", 0.6), ("v80-100", 0.8))  # level, share it begins at


class Tables:
    """Records by table, and tokens that follow from the seed.

    Args:
        seed: of the tokens.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self._by_token: dict[str, dict[str, Any]] = {}
        for name in CATEGORIES:
            self.add("category", name, name=name, description="")
        for name in ATTRIBUTES:
            self.add("attribute", name, name=name, description="")
        for number, (level, low) in enumerate(VISIBILITY, 1):
            text = f"at least {low:.0%} of an object can be seen" if low else "less than 40% of an object can be seen"
            self.rows["visibility"].append({"token": str(number), "level": level, "description": text})

    def token(self, table: str, *names: object) -> str:
        """32 hexadecimal digits."""
        text = json.dumps([self.seed, table, *[str(name) for name in names]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def add(self, table: str, *names: object, **fields: Any) -> str:
        """Append a record, give its token; `names` tell it from the others of its table."""
        token: str = self.add_row(table, *names, **fields)["token"]
        return token

    def add_row(self, table: str, *names: object, **fields: Any) -> dict[str, Any]:
        """The same, but give the record."""
        token = self.token(table, *names)
        row = {"token": token, **fields}
        if token in self._by_token:
            raise ValueError(f"{table}: a record {names} is there already")
        self._by_token[token] = row
        self.rows[table].append(row)
        return row

    def chain(self, tokens: Sequence[str]) -> None:
        """Set `prev` and `next` of records that follow each other."""
        for before, here, after in zip(["", *tokens[:-1]], tokens, [*tokens[1:], ""], strict=True):
            self._by_token[here] |= {"prev": before, "next": after}

    def write(self, folder: Path) -> None:
        """Write one JSON file per table."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in self.rows.items():
            (folder / f"{name}.json").write_text(json.dumps(rows, indent=0))


def wxyz(rotation: np.ndarray) -> list[float]:
    """Quaternion w, x, y, z of a rotation matrix (3, 3), as the tables have it."""
    x, y, z, w = matrix_to_quaternion(rotation).tolist()
    return [w, x, y, z]


def visibility_token(share: float) -> str:
    """Token of the level that a visible share (0 to 1) is on."""
    return str(max(number for number, (_, low) in enumerate(VISIBILITY, 1) if share >= low))

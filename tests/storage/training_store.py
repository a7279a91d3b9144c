"""A store as a trainer reads it: objects of scenes, grids of some of them, questions on them."""

from __future__ import annotations

import numpy as np

from storage import Column, Manifest, Row, Schema, ShardWriter

COUNT = 23
OBJECTS = Schema({"feature": Column((40,), "float16"), "label": Column((), "string")}, element="object")
GRID = Schema({"grid": Column((2, 3))}, format="hdf5")
QUESTIONS = Schema({"scene_id": Column((), "string"), "text": Column((), "string"), "answer": Column((), "int64")})


def objects(i: int) -> dict[str, np.ndarray]:
    count = i * 7 % 5  # one in five records is empty
    feature = (np.arange(count * 40).reshape(count, 40) + i).astype(np.float16)
    return {"feature": feature, "label": np.array([f"{i}/{j}" for j in range(count)], object)}


def make(url: str) -> None:
    """Three stages in several shards: objects, a grid for the even scenes, questions on scenes 0 .. 29."""
    rows = []

    def write(stage, schema, records, per_shard):
        writer = ShardWriter(url, stage, schema)
        for n, (key, record) in enumerate(records, 1):
            writer.add(Row(stage, key, b"f", b"i", "r", "ok"), record)
            if n % per_shard == 0:
                rows.extend(writer.flush())
        rows.extend(writer.flush())

    write("objects", OBJECTS, ((f"scene{i:02}", objects(i)) for i in range(COUNT)), 6)
    grids = ((f"scene{i:02}", {"grid": np.full((2, 3), i, np.float32)}) for i in range(0, COUNT, 2))
    write("grid", GRID, grids, 5)
    asked = (
        (
            f"q{i:03}",
            {
                "scene_id": np.array(f"scene{i % 30:02}", object),
                "text": np.array(f"what is {i}?", object),
                "answer": np.array(i),
            },
        )
        for i in range(45)
    )
    write("questions", QUESTIONS, asked, 20)
    Manifest(url).commit(rows)

"""A job over three scans, the third of which is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PLY = """ply
format ascii 1.0
element vertex 3
property float x
property float y
property float z
end_header
0 0 0
1 0 {z}
0 1 0
"""
JOB = """
name: rooms
store: store
source: {type: folder, root: scans}
stages:
  fake: {objects: 4}
  second: {extractor: fake, of: [fake], objects: 2}
"""
Call = Callable[..., tuple[int, str, str]]


def object_of(output: str) -> dict[str, Any]:
    """Standard output is one JSON object and nothing else."""
    value: dict[str, Any] = json.loads(output)
    assert output.count("\n") == 1
    return value

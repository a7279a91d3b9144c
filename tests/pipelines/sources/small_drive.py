"""The small drive's key frame that tests look at, and what they ask of a source on the drive."""

from __future__ import annotations

from pipelines.sources.nuscenes import NuScenes
from tests.pipelines.small_nuscenes import token

VERSION = "v1.0-mini"
KEY = token("sample", "scene-0061", 1)


def keys_of(source: NuScenes) -> list[str]:
    return source.keys()


def facts_of(source: NuScenes) -> dict[tuple[str, str], bytes]:
    """By item and kind."""
    return {(key, kind): source.facts(key, kind) for key in keys_of(source) for kind in source.kinds}

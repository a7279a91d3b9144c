"""A self-contained HTML page about a store of scans: pictures, counts, timings, plans, all from the store."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import storage
from extractors.bev_camera import BevCamera
from extractors.geometry import box_corners, transform
from pipelines import run_log
from pipelines.plan_view import size
from storage.errors import RecordMissing
from storage.reader import Cache
from storage.schema import Record

_EDGES = [(0, 1), (1, 2), (2, 3), (3, 0)]  # of one face of a box, in the official corner order
_BOXES = 12  # detections drawn, the most object-like ones
_PICTURE = (960, 720)  # pixels that a bird's-eye view may take
_MARGIN = 24  # pixels of white around what it shows
_FRAMES = 12  # frames on a contact sheet, at most
_SHEET = 960  # its width in pixels
_COLUMNS = ("item", "status", "rows", "bytes", "recipe", "error_class", "error_text")


def write(url: str | os.PathLike[str], path: str | os.PathLike[str], scenes: int = 6) -> Path:
    """Write the page.

    Args:
        url: the store.
        path: HTML file to write.
        scenes: scans that get pictures.
    """
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    cache = storage.open(url)
    runs = run_log.load(url)
    stages = {name: cache.manifest.latest(name, _COLUMNS) for name in cache.stages}
    questions = _questions(cache)
    untrained = [name for name, table in stages.items() if _untrained(cache, table)]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(["html"]))
    page = environment.get_template("report.html").render(
        url=cache.url,
        snapshot=cache.snapshot,
        runs=runs[-2:],
        stages=[_stage(name, table) for name, table in stages.items()],
        untrained=untrained,
        scenes=[_scene(cache, key, questions.get(key, []), untrained) for key in _scene_keys(cache)[:scenes]],
        failures=[f for name, table in stages.items() for f in _failures(name, table)],
    )
    path = Path(path)
    path.write_text(page, encoding="utf8")
    return path


def _stage(name: str, table: pa.Table) -> dict[str, Any]:
    done = table.filter(pc.is_in(table["status"], value_set=pa.array(["ok", "empty"])))
    return {
        "name": name,
        "items": done.num_rows,
        "rows": pc.sum(done["rows"]).as_py() or 0,
        "size": size(pc.sum(done["bytes"]).as_py() or 0),
        "failed": _failed(table).num_rows,
    }


def _failed(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(table["status"], "failed"))


def _failures(name: str, table: pa.Table) -> list[dict[str, str]]:
    return [{"stage": name, **row} for row in _failed(table).slice(0, 20).to_pylist()]


def _untrained(cache: Cache, table: pa.Table) -> bool:
    recipes = table["recipe"].unique().to_pylist()
    weights: list[str] = []
    for id in filter(None, recipes):
        weights += (cache.manifest.find_recipe(id) or {}).get("weights", {}).values()
    return any(w.startswith("untrained:") for w in weights)


def _scene_keys(cache: Cache) -> list[str]:
    for name in ("bev_render", "video", "votenet", "scan_info"):
        if name in cache.stages and len(cache[name]):
            return list(cache[name])
    return []


def _record(cache: Cache, stage: str, key: str) -> Record | None:
    try:
        return cache[stage][key] if stage in cache.stages else None
    except RecordMissing:
        return None


def _scene(cache: Cache, key: str, questions: list[dict[str, Any]], untrained: list[str]) -> dict[str, Any]:
    votes, objects = _record(cache, "votenet", key), _record(cache, "scan_objects", key)
    video = _record(cache, "video", key)
    counts: dict[str, str | int] = {}
    if votes is not None:
        counts["proposals"] = f"{len(votes['mask'])}, {int(votes['mask'].sum())} of them called an object"
    if objects is not None:
        counts["annotated objects"] = len(objects["object_id"])
    if video is not None:
        counts["frames kept"] = len(video["frame"])
    if questions:
        counts["questions"] = len(questions)
    info = _record(cache, "scan_info", key)
    picture, caption = _bev(_record(cache, "bev_render", key), votes, info, objects, questions[:1])
    if caption and "votenet" in untrained:
        caption += "; untrained weights, so the boxes mean nothing"
    return {
        "key": key,
        "counts": counts,
        "bev": picture,
        "caption": caption,
        "frames": None if video is None or not len(video["frame"]) else _contact_sheet(video),
        "questions": questions[:4],
    }


def _questions(cache: Cache) -> dict[str, list[dict[str, Any]]]:
    """Questions by scene."""
    found: dict[str, list[dict[str, Any]]] = {}
    if "sqa3d_questions" in cache.stages:
        wanted = ("scene_id", "situation", "question", "answer", "pose_scan", "facing_scan")
        for record in cache["sqa3d_questions"].select(*wanted).values():
            question = {name: value.item() if value.ndim == 0 else value for name, value in record.items()}
            found.setdefault(str(question["scene_id"]), []).append(question)
    return found


def _drawn(votes: Record, pixels: np.ndarray, image: np.ndarray) -> tuple[np.ndarray, str]:
    """Numbers of the proposals to draw, the most object-like of those centred over the scan; a caption.

    Args:
        votes: record of `votenet`.
        pixels: (proposal, 2) where the centres are in the image, NaN behind the camera.
        image: (height, width, 3) uint8, the picture on its white ground.
    """
    likely = np.argsort(votes["objectness"][:, 0] - votes["objectness"][:, 1], kind="stable")
    height, width = image.shape[:2]
    inside = ((pixels >= 0) & (pixels < (width, height))).all(1)
    x, y = np.where(inside[:, None], pixels, 0).astype(int).T
    over = likely[(inside & (image[y, x] < 255).any(1))[likely]]
    drawn = over[:_BOXES]
    of = "those" if len(over) <= _BOXES else f"the most object-like of the {len(over)}"
    return drawn, f"{len(drawn)} of {len(likely)} proposals drawn: {of} centred over the scan"


def _bev(
    bev: Record | None,
    votes: Record | None,
    info: Record | None,
    objects: Record | None,
    situations: list[dict[str, Any]],
) -> tuple[str | None, str]:
    """The bird's-eye image as a data URL: proposals (orange), annotated boxes (green), situations (blue); a caption."""
    from PIL import Image, ImageChops, ImageDraw, ImageOps

    if bev is None:
        return None, ""
    settings = json.loads(bev["render"].item())
    image = Image.open(io.BytesIO(bev["image"].item())).convert("RGB")
    camera = BevCamera(
        bev["centre"], float(bev["radius"]), image.width, image.height, settings["lens_mm"], settings["sensor_mm"]
    )
    to_picture = np.eye(4) if info is None or settings["frame"] == "aligned" else np.linalg.inv(info["axis_align"])
    proposals, caption = np.zeros((0, 8, 3)), ""
    if votes is not None:
        drawn, caption = _drawn(votes, camera.project(transform(votes["center"], to_picture)), np.asarray(image))
        proposals = votes["corners"][drawn]
    draw = ImageDraw.Draw(image)

    def outline(corners: np.ndarray, color: str, width: int) -> None:
        pixels = camera.project(transform(corners, to_picture))
        if not np.isfinite(pixels).all():
            return  # reaches behind the camera
        for face in (0, 4):
            for a, b in _EDGES:
                draw.line([tuple(pixels[face + a]), tuple(pixels[face + b])], color, width)
        for a in range(4):
            draw.line([tuple(pixels[a]), tuple(pixels[a + 4])], color, width)

    if objects is not None:
        for box in objects["box_aligned"]:
            outline(box_corners(box), "#1a9850", 4)
    for corners in proposals:
        outline(corners, "#f46d43", 3)
    for situation in situations:
        position, facing = situation["pose_scan"][:3], situation["facing_scan"]
        if settings["frame"] == "scan" and np.isfinite(position).all():
            tip = position + 0.6 * np.array([*facing, 0.0])
            (x, y), (u, v) = camera.project(position), camera.project(tip)
            draw.line([x, y, u, v], "#2166ac", 9)
            draw.ellipse([x - 16, y - 16, x + 16, y + 16], "#2166ac")
    if used := ImageChops.invert(image).getbbox():  # most of the picture is white ground
        image = ImageOps.expand(image.crop(used), _MARGIN, "white")
    image.thumbnail(_PICTURE)
    return _jpeg(image), caption


def _contact_sheet(video: Mapping[str, np.ndarray]) -> str:
    """Frames spread over the clip, in full rows."""
    from PIL import Image, ImageDraw

    count = min(len(video["frame"]), _FRAMES)
    rows = 1 if count <= 6 else 2
    columns = count // rows
    chosen = np.linspace(0, len(video["frame"]) - 1, rows * columns).round().astype(int)
    side = _SHEET // max(columns, 4)
    sheet = Image.new("RGB", (columns * side, rows * side), "white")
    draw = ImageDraw.Draw(sheet)
    for place, i in enumerate(chosen):
        x, y = place % columns * side, place // columns * side
        sheet.paste(Image.fromarray(np.array(video["frame"][i])).resize((side - 4, side - 4)), (x, y))
        draw.rectangle([x, y, x + 62, y + 14], "white")
        draw.text((x + 3, y + 1), f"frame {video['frame_index'][i]}", "black")
    return _jpeg(sheet)


def _jpeg(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()

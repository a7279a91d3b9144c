"""A few furnished rooms in ScanNet's and SQA3D's official layout: mesh, recording, annotation, questions."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from extractors.geometry import transform
from extractors.sens import SensFrame, SensHeader, write_sens
from pipelines.errors import JobError
from pipelines.make_data.folder import made_in
from pipelines.make_data.furniture import NYU40
from pipelines.make_data.render import render
from pipelines.make_data.rooms import Room, make_room
from pipelines.make_data.situations import Question, ask
from pipelines.make_data.surfaces import Patch
from pipelines.sources.ply import write_ply

COLOR_SIZE, DEPTH_SIZE = (320, 240), (160, 120)
_FOCAL = 290.0  # pixels, at COLOR_SIZE
_RAYS = 2  # per color pixel and axis: pictures are drawn larger and averaged, depth takes single rays
_SHELL_CELL, _CELL = 0.12, 0.08  # metres between mesh vertices, of walls and floor, of furniture
_LOST_FRAME = 40  # tracking is lost here: one of the frames that are kept of every 20
_FIRST_ID = 220602000000  # question ids have 12 digits, as the official ones
_UNANNOTATED = -9


def make(out: Path, seed: int = 0, scenes: int = 3, quick: bool = False) -> dict[str, Any]:
    """Write a synthetic dataset; the same arguments give the same bytes.

    The last scenes are of SQA3D's test and val splits, at least one each where there are three; as in the real data
    both are of ScanNet's val split.

    Args:
        out: folder, made if need be; what an earlier make left there is removed first.
        seed: everything follows from it.
        scenes: how many rooms.
        quick: shorter recordings (60 frames instead of 160) and fewer questions.

    Returns:
        Counts: scenes, vertices, frames, questions by split.

    Raises:
        JobError: `scenes` is out of range, or the folder holds something else.
    """
    if scenes < 1:
        raise JobError(f"scenes is {scenes}, need at least 1")
    with made_in(out, "scannet"):
        return _make(out, seed, scenes, quick)


def _make(out: Path, seed: int, scenes: int, quick: bool) -> dict[str, Any]:
    held_out = max(1, scenes // 5) if scenes > 1 else 0
    n_val = held_out if scenes > 2 else 0
    splits = ["train"] * (scenes - held_out - n_val) + ["val"] * n_val + ["test"] * held_out
    summary: dict[str, Any] = {"scenes": scenes, "vertices": 0, "frames": 0, "questions": {}}
    asked: dict[str, list[tuple[str, Question, np.ndarray, np.ndarray]]] = {"train": [], "val": [], "test": []}
    for index, split in enumerate(splits):
        rng = np.random.default_rng([seed, index])
        scene = f"scene{index:04d}_00"
        room, axis_align = make_room(rng, index), _random_alignment(rng)
        folder = out / "scans" / scene
        folder.mkdir(parents=True, exist_ok=True)
        xyz = _write_mesh(folder, scene, room, axis_align)
        frames = 60 if quick else 160
        header = _header()
        write_sens(folder / f"{scene}.sens", header, _walk(rng, room, axis_align, frames))
        _write_info(folder / f"{scene}.txt", axis_align, header, frames)
        center = (xyz.max(axis=0).astype(np.float64) + xyz.min(axis=0)) / 2
        asked[split] += [(scene, q, axis_align, center) for q in ask(rng, room, 24 if quick else 80)]
        summary["vertices"] += len(xyz)
        summary["frames"] += frames
    _write_lists(out, splits)
    for split, questions in asked.items():
        _write_questions(out / "sqa_task" / "balanced", split, questions)
        summary["questions"][split] = len(questions)
    return summary


def _random_alignment(rng: np.random.Generator) -> np.ndarray:
    """A raw scan frame that is turned and moved, as a scanner leaves it: (4, 4) raw -> aligned."""
    turn = np.deg2rad(rng.uniform(10, 40)) * rng.choice([-1, 1])
    c, s = np.cos(turn), np.sin(turn)
    matrix = np.array([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    matrix[:3, 3] = rng.uniform(-4, -2), rng.uniform(-4, -2), rng.uniform(-0.1, 0)
    return np.round(matrix, 6)  # the text file has six digits


def _write_mesh(folder: Path, scene: str, room: Room, axis_align: np.ndarray) -> np.ndarray:
    """Write the mesh and its annotation; give the vertices (vertex, 3) float32 in the raw frame."""
    points: list[np.ndarray] = []
    colors, faces, parts = [], [], []
    for patch in room.patches:
        xyz, rgb, triangles = _grid(patch, _SHELL_CELL if room.part_owner[patch.part] < 0 else _CELL)
        faces.append(triangles + sum(len(p) for p in points))
        points.append(xyz)
        colors.append(rgb)
        parts.append(np.full(len(xyz), patch.part))
    xyz = transform(np.concatenate(points), np.linalg.inv(axis_align)).astype(np.float32)
    write_ply(folder / f"{scene}_vh_clean_2.ply", xyz, np.concatenate(colors), np.concatenate(faces))

    segment_of_part = [7 * part + 3 for part in range(len(room.part_owner))]  # ids have gaps, as the real ones
    segments = [segment_of_part[part] for part in np.concatenate(parts)]
    _write_json(
        folder / f"{scene}_vh_clean_2.0.010000.segs.json",
        {"params": {"kThresh": "0.0001", "segMinVerts": "20"}, "sceneId": scene, "segIndices": segments},
    )
    owners = [o for o in dict.fromkeys(room.part_owner) if o != _UNANNOTATED]
    groups = [
        {"id": i, "objectId": i, "label": "floor" if owner == -1 else "wall" if owner < 0 else room.things[owner].label,
         "segments": [segment_of_part[part] for part, o in enumerate(room.part_owner) if o == owner]}
        for i, owner in enumerate(owners)
    ]  # fmt: skip
    _write_json(
        folder / f"{scene}.aggregation.json",
        {"sceneId": f"scannet.{scene}", "appId": "Aggregator.v2", "segGroups": groups,
         "segmentsFile": f"scannet.{scene}_vh_clean_2.0.010000.segs.json"},
    )  # fmt: skip
    return xyz


def _grid(patch: Patch, cell: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vertices (n, 3), colours (n, 3) uint8 and triangles (m, 3) of a rectangle cut into cells."""
    columns, rows = (max(1, int(np.ceil(np.linalg.norm(e) / cell))) for e in (patch.u, patch.v))
    t, s = np.meshgrid(np.linspace(0, 1, rows + 1), np.linspace(0, 1, columns + 1), indexing="ij")
    xyz = patch.origin + s[..., None] * patch.u + t[..., None] * patch.v
    height, width = patch.texture.shape[:2]
    at = (s * width - 0.5).astype(np.float32), (t * height - 0.5).astype(np.float32)
    rgb = cv2.remap(patch.texture, *at, cv2.INTER_LINEAR, None, cv2.BORDER_REPLICATE)
    corner = (np.arange(rows)[:, None] * (columns + 1) + np.arange(columns)).ravel()
    right, up, both = corner + 1, corner + columns + 1, corner + columns + 2
    faces = np.concatenate([np.stack([corner, right, both], 1), np.stack([corner, both, up], 1)])
    return xyz.reshape(-1, 3), rgb.reshape(-1, 3), faces


def _ray_intrinsic() -> np.ndarray:
    """(3, 3) of the enlarged picture, pixels."""
    cx, cy = (_RAYS * side / 2 - 0.5 for side in COLOR_SIZE)
    return np.array([[_FOCAL * _RAYS, 0, cx], [0, _FOCAL * _RAYS, cy], [0, 0, 1.0]])


def _header() -> SensHeader:
    color, depth = np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)
    color[:3, :3] = depth[:3, :3] = _ray_intrinsic()
    color[:2, 2] -= (_RAYS - 1) / 2  # a color pixel is the mean of a block of rays, a depth pixel the first of a block
    color[:2] /= _RAYS
    depth[:2] /= _RAYS * COLOR_SIZE[0] / DEPTH_SIZE[0]
    return SensHeader(
        "Synthetic", color, np.eye(4), depth, np.eye(4), "jpeg", "zlib", COLOR_SIZE, DEPTH_SIZE, 1000.0, 0
    )


def _walk(rng: np.random.Generator, room: Room, axis_align: np.ndarray, frames: int) -> Iterator[SensFrame]:
    """Somebody turns once around in the middle of the room, looking across it and a little down."""
    to_scan = np.linalg.inv(axis_align)
    start, back = rng.uniform(0, 2 * np.pi), 0.16 * min(room.width, room.depth)
    matrix, size = _ray_intrinsic(), (COLOR_SIZE[0] * _RAYS, COLOR_SIZE[1] * _RAYS)
    for frame in range(frames):
        turn = frame / frames * 2.1 * np.pi
        yaw, pitch = start + turn, -0.42 + 0.1 * np.sin(5 * turn)
        position = (-back * np.cos(yaw), -back * np.sin(yaw), 1.55 + 0.03 * np.sin(11 * turn))
        pose = camera_pose(position, yaw, pitch)
        image, depth = render(room.patches, pose, matrix, size)
        small = cv2.resize(image, COLOR_SIZE, interpolation=cv2.INTER_AREA)
        jpeg = cv2.imencode(".jpg", small[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
        step = size[0] // DEPTH_SIZE[0]
        near = depth[::step, ::step]
        millimetres = np.where(near < 10, np.rint(np.minimum(near, 10) * 1000), 0).astype(np.uint16)
        known = to_scan @ pose if frame != _LOST_FRAME else np.full((4, 4), -np.inf)
        yield SensFrame(jpeg, millimetres, known, frame * 1_000_000 // 30)


def camera_pose(position: tuple[float, float, float], yaw: float, pitch: float) -> np.ndarray:
    """(4, 4) camera -> world of an upright camera: x right, y down, z forward.

    Args:
        position: metres.
        yaw: direction of view, radians from +x to +y.
        pitch: radians above the horizon.
    """
    forward = np.array([np.cos(yaw) * np.cos(pitch), np.sin(yaw) * np.cos(pitch), np.sin(pitch)])
    right = np.array([np.sin(yaw), -np.cos(yaw), 0.0])
    pose = np.eye(4)
    pose[:3, :3] = np.stack([right, np.cross(forward, right), forward], axis=1)
    pose[:3, 3] = position
    return pose


def _write_info(path: Path, axis_align: np.ndarray, header: SensHeader, frames: int) -> None:
    numbers = " ".join(f"{x:.6f}" for x in axis_align.ravel())
    c, d = header.intrinsic_color, header.intrinsic_depth
    lines = {
        "axisAlignment": numbers + " ",
        "colorHeight": COLOR_SIZE[1], "colorToDepthExtrinsics": " ".join(f"{x:.6f}" for x in np.eye(4).ravel()),
        "colorWidth": COLOR_SIZE[0], "depthHeight": DEPTH_SIZE[1], "depthWidth": DEPTH_SIZE[0],
        "fx_color": f"{c[0, 0]:.6f}", "fx_depth": f"{d[0, 0]:.6f}", "fy_color": f"{c[1, 1]:.6f}",
        "fy_depth": f"{d[1, 1]:.6f}", "mx_color": f"{c[0, 2]:.6f}", "mx_depth": f"{d[0, 2]:.6f}",
        "my_color": f"{c[1, 2]:.6f}", "my_depth": f"{d[1, 2]:.6f}",
        "numColorFrames": frames, "numDepthFrames": frames, "numIMUmeasurements": 0,
    }  # fmt: skip
    path.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))


def _write_lists(out: Path, splits: list[str]) -> None:
    for name in ("train", "val", "test"):
        # SQA3D's val and test scenes are all of ScanNet's val split; its test split has no annotation
        chosen = [f"scene{i:04d}_00" for i, s in enumerate(splits) if (s == "train") == (name == "train")]
        (out / f"scannetv2_{name}.txt").write_text("".join(f"{s}\n" for s in chosen) if name != "test" else "")
    with (out / "scannetv2-labels.combined.tsv").open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t", lineterminator="\n")
        rows.writerow(["id", "raw_category", "category", "count", "nyu40id", "eigen13id", "nyuClass", "nyu40class"])
        for number, (label, (nyu40, name)) in enumerate(NYU40.items(), 1):
            rows.writerow([number, label, label, 1, nyu40, "", name, name])


def _write_questions(folder: Path, split: str, asked: list[tuple[str, Question, np.ndarray, np.ndarray]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = _FIRST_ID + {"train": 0, "val": 100_000, "test": 200_000}[split]
    questions, annotations = [], []
    for number, (scene, q, axis_align, center) in enumerate(asked, first):
        here = q.situation
        questions.append({
            "scene_id": scene, "situation": here.text, "alternative_situation": list(here.alternatives),
            "question": q.text, "question_id": number,
        })  # fmt: skip
        place = np.linalg.inv(axis_align) @ (here.x, here.y, 0, 1)
        look = np.linalg.inv(axis_align[:3, :3]) @ (np.cos(here.yaw), np.sin(here.yaw), 0)
        half = (np.arctan2(look[1], look[0]) - np.pi) / 2  # a situation without rotation faces -x
        annotations.append({
            "scene_id": scene, "question_type": "N/A", "answer_type": "other", "question_id": number,
            "answers": [{"answer": q.answer, "answer_confidence": "yes", "answer_id": 1}],
            "rotation": {"_x": 0, "_y": 0, "_z": float(np.sin(half)), "_w": float(np.cos(half))},
            "position": {"x": float(place[0] - center[0]), "y": float(place[1] - center[1]), "z": 0},
        })  # fmt: skip
    about = {"info": {"description": "synthetic rooms, made by scenecache"}, "license": {"name": "CC0-1.0"}}
    head = {**about, "data_type": "scannet", "data_subtype": "v2"}
    task = {"task_type": "Situated question answering in 3D scenes"}
    _write_json(folder / f"v1_balanced_questions_{split}_scannetv2.json", {**head, **task, "questions": questions})
    _write_json(folder / f"v1_balanced_sqa_annotations_{split}_scannetv2.json", {**head, "annotations": annotations})


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))

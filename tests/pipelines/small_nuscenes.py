"""A tiny drive in nuScenes' official layout, and info pickles made from it the way mmdetection3d does."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
SCENES = ("scene-0061", "scene-0103")  # of mini_train and mini_val
PLACES = ((0.9, 0.0), (1.7, 0.0), (1.6, -0.5), (1.5, 0.5), (0.0, 0.0), (1.0, 0.5), (1.0, -0.5), (3.4, 0.0))
HEIGHTS = (1.8, 1.5, 1.5, 1.5, 1.6, 1.6, 1.6, 0.5)  # of LIDAR_TOP, CAMERAS, a radar
CATEGORIES = ("vehicle.car", "human.pedestrian.adult", "movable_object.barrier", "animal", "vehicle.bus.rigid")
SIZES = ((1.9, 4.6, 1.7), (0.7, 0.8, 1.8), (2.1, 0.5, 1.0), (0.4, 0.9, 0.6), (2.8, 11.0, 3.4))  # w, l, h
MODEL_NAMES = {"vehicle.car": "car", "human.pedestrian.adult": "pedestrian", "movable_object.barrier": "barrier",
               "vehicle.bus.rigid": "bus"}  # fmt: skip
INFO_ORDER = ("car", "truck", "trailer", "bus", "construction_vehicle", "bicycle", "motorcycle", "pedestrian",
              "traffic_cone", "barrier")  # fmt: skip


def token(*names: object) -> str:
    return hashlib.md5(json.dumps([str(name) for name in names]).encode()).hexdigest()


def quaternion(yaw: float, pitch: float = 0.0, roll: float = 0.0) -> list[float]:
    """w, x, y, z of a turn about x, then y, then z."""
    about_z = [np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
    about_y = [np.cos(pitch / 2), 0.0, np.sin(pitch / 2), 0.0]
    return _product(_product(about_z, about_y), [np.cos(roll / 2), np.sin(roll / 2), 0.0, 0.0])


def make(root: Path, version: str = "v1.0-mini", key_frames: int = 3, annotated: bool = True) -> Path:
    """Two scenes; the car turns 90 degrees in every ten sweeps; a scene's first key frame has two sweeps before it.

    There is a radar, and cameras have images between key frames, so that tables hold rows nobody needs.
    """
    rng = np.random.default_rng(5)
    rows: dict[str, list[dict[str, Any]]] = {
        name: []
        for name in ("attribute", "calibrated_sensor", "category", "ego_pose", "instance", "log", "map", "sample",
                     "sample_annotation", "sample_data", "scene", "sensor", "visibility")
    }  # fmt: skip
    for category in CATEGORIES:
        rows["category"].append({"token": token("category", category), "name": category, "description": "a {b}, {c}"})
    for attribute in ("vehicle.moving", "pedestrian.standing"):
        rows["attribute"].append({"token": token("attribute", attribute), "name": attribute, "description": ""})
    rows["visibility"].append({"token": "4", "level": "v80-100", "description": ""})
    channels = ("LIDAR_TOP", *CAMERAS, "RADAR_FRONT")
    for channel in channels:
        modality = {"L": "lidar", "C": "camera", "R": "radar"}[channel[0]]
        rows["sensor"].append({"token": token("sensor", channel), "channel": channel, "modality": modality})
    for number, scene in enumerate(SCENES):
        log = token("log", scene)
        rows["log"].append(
            {"token": log, "logfile": "n", "vehicle": "n", "date_captured": "2018-07-24", "location": "boston-seaport"}
        )
        for i, channel in enumerate(channels):
            yaw = -np.pi / 2 if channel == "LIDAR_TOP" else 0.0
            turn = quaternion(yaw, 0.01 * i, -0.02)
            if channel.startswith("CAM"):  # z forward
                turn = _product(quaternion(1.0 * i), [0.5, -0.5, 0.5, -0.5])
            rows["calibrated_sensor"].append(
                {
                    "token": token("calibration", scene, channel),
                    "sensor_token": token("sensor", channel),
                    "translation": [*PLACES[i], HEIGHTS[i] + 0.05 * number],
                    "rotation": turn,
                    "camera_intrinsic": [[1266.4 + i, 0, 816.3], [0, 1266.4 + i, 491.5], [0, 0, 1]]
                    if channel.startswith("CAM")
                    else [],
                }
            )
        start = 1_532_402_927_000_000 + 100_000_000 * number
        first_key = 2  # sweeps before the first key frame
        for channel in channels:
            step, offset = (50_000, 0) if channel[0] == "L" else (83_333, 7_000 + 1000 * channels.index(channel))
            shots = []
            for frame in range(key_frames):
                for between in range(10 if channel[0] == "L" else 6):
                    time = start + 500_000 * frame + step * between - (first_key * 50_000 if channel[0] == "L" else 0)
                    is_key = between == (first_key if channel[0] == "L" else 0)
                    shots.append((time - (offset if channel[0] != "L" else 0), is_key, frame))
            names = [token("data", scene, channel, time) for time, _, _ in shots]
            for k, (time, is_key, frame) in enumerate(shots):
                folder = "samples" if is_key else "sweeps"
                suffix = {"L": "pcd.bin", "C": "jpg", "R": "pcd"}[channel[0]]
                path = f"{folder}/{channel}/n015__{channel}__{time}.{suffix}"
                pose = token("pose", names[k])
                rows["sample_data"].append(
                    {
                        "token": names[k], "sample_token": token("sample", scene, frame), "ego_pose_token": pose,
                        "calibrated_sensor_token": token("calibration", scene, channel), "timestamp": time,
                        "fileformat": suffix.rpartition(".")[2], "is_key_frame": is_key, "height": 900, "width": 1600,
                        "filename": path, "prev": names[k - 1] if k else "",
                        "next": names[k + 1] if k + 1 < len(names) else "",
                    }
                )  # fmt: skip
                seconds = (time - start) * 1e-6
                rows["ego_pose"].append(
                    {
                        "token": pose, "timestamp": time, "rotation": quaternion(np.pi * seconds, 0.02, 0.01),
                        "translation": [411.3 + 8 * seconds, 1180.9 + 2 * seconds**2, 0.0],
                    }
                )  # fmt: skip
                if channel == "LIDAR_TOP":
                    points = rng.uniform([-5, -5, -2, 0, 0], [5, 5, 2, 255, 0], (60, 5)).astype(np.float32)
                    points[:, 4] = np.arange(60) % 32
                    _write(root / path, points.tobytes())
                elif channel.startswith("CAM") and is_key:
                    _write(root / path, b"\xff\xd8 no picture")
        for frame in range(key_frames):
            names = [token("sample", scene, f) if 0 <= f < key_frames else "" for f in (frame - 1, frame, frame + 1)]
            rows["sample"].append(
                {"token": names[1], "timestamp": start + 500_000 * frame, "scene_token": token("scene", scene),
                 "prev": names[0], "next": names[2]}
            )  # fmt: skip
        rows["scene"].append(
            {"token": token("scene", scene), "log_token": log, "nbr_samples": key_frames, "name": scene,
             "description": "turns, {waits}, goes", "first_sample_token": token("sample", scene, 0),
             "last_sample_token": token("sample", scene, key_frames - 1)}
        )  # fmt: skip
        for thing in range(8 if annotated else 0):
            instance = token("instance", scene, thing)
            seen = [f for f in range(key_frames) if f != 1 or thing != 3]  # one is lost in between
            if thing == 4:
                seen = [0]
            rows["instance"].append(
                {"token": instance, "category_token": token("category", CATEGORIES[thing % len(CATEGORIES)]),
                 "nbr_annotations": len(seen), "first_annotation_token": token("box", instance, seen[0]),
                 "last_annotation_token": token("box", instance, seen[-1])}
            )  # fmt: skip
            place, speed = rng.uniform(-40, 40, 2), rng.uniform(-9, 9, 2)
            for k, frame in enumerate(seen):
                rows["sample_annotation"].append(
                    {
                        "token": token("box", instance, frame), "sample_token": token("sample", scene, frame),
                        "instance_token": instance, "visibility_token": "4",
                        "attribute_tokens": [token("attribute", ("vehicle.moving", "pedestrian.standing")[thing % 2])]
                        if thing % 3 else [],
                        "translation": [*([411, 1180] + place + speed * frame / 2), 0.7],
                        "size": list(SIZES[thing % len(CATEGORIES)]), "rotation": quaternion(0.7 * thing - 2.9),
                        "prev": token("box", instance, seen[k - 1]) if k else "",
                        "next": token("box", instance, seen[k + 1]) if k + 1 < len(seen) else "",
                        "num_lidar_pts": 3 * thing, "num_radar_pts": thing % 2,
                    }
                )  # fmt: skip
    rows["map"].append(
        {"token": token("map"), "log_tokens": [row["token"] for row in rows["log"]], "category": "semantic_prior",
         "filename": "maps/one.png"}
    )  # fmt: skip
    for name, records in rows.items():
        write_table(root / version, name, records)
    return root


def write_table(folder: Path, name: str, records: Any, indent: int | None = 0) -> None:
    _write(folder / f"{name}.json", json.dumps(records, indent=indent).encode())


def read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())
    return records


def devkit(root: Path, version: str = "v1.0-mini") -> Any:
    """The drive in nuscenes-devkit."""
    from nuscenes.nuscenes import NuScenes
    from PIL import Image

    (root / "maps").mkdir(exist_ok=True)
    Image.new("L", (8, 8)).save(root / "maps/one.png")
    return NuScenes(version, str(root), verbose=False)


def pose(record: dict[str, Any]) -> np.ndarray:
    """(4, 4) of a record of ego_pose or calibrated_sensor, by pyquaternion."""
    from pyquaternion import Quaternion

    matrix: np.ndarray = Quaternion(record["rotation"]).transformation_matrix
    matrix[:3, 3] = record["translation"]
    return matrix


def old_infos(nusc: Any, old_boxes: bool = False) -> dict[str, Any]:
    """What `create_data.py` of mmdetection3d 1.0 (or 0.x: `old_boxes`) would write, besides what nobody reads."""
    infos = []
    for sample in nusc.sample:
        data = nusc.get("sample_data", sample["data"]["LIDAR_TOP"])
        key = _sensor(nusc, data)
        info = {
            "token": sample["token"], "timestamp": sample["timestamp"], "lidar_path": key["data_path"],
            "lidar2ego_translation": key["sensor2ego_translation"], "lidar2ego_rotation": key["sensor2ego_rotation"],
            "ego2global_translation": key["ego2global_translation"],
            "ego2global_rotation": key["ego2global_rotation"], "sweeps": [], "cams": {},
        }  # fmt: skip
        world_to_key = np.linalg.inv(_to_world(key))
        while len(info["sweeps"]) < 10 and data["prev"]:
            data = nusc.get("sample_data", data["prev"])
            info["sweeps"].append(_sensor(nusc, data, world_to_key))
        for camera in CAMERAS:
            data = nusc.get("sample_data", sample["data"][camera])
            info["cams"][camera] = _sensor(nusc, data, world_to_key)
            calibration = nusc.get("calibrated_sensor", data["calibrated_sensor_token"])
            info["cams"][camera]["cam_intrinsic"] = np.array(calibration["camera_intrinsic"])
        _, boxes, _ = nusc.get_sample_data(sample["data"]["LIDAR_TOP"])
        yaw = np.array([box.orientation.yaw_pitch_roll[0] for box in boxes]).reshape(-1, 1)
        size = np.array([box.wlh for box in boxes]).reshape(-1, 3)
        if not old_boxes:
            size = size[:, [1, 0, 2]]
        centre = np.array([box.center for box in boxes]).reshape(-1, 3)
        velocity = np.array([[*nusc.box_velocity(name)[:2], 0.0] for name in sample["anns"]]).reshape(-1, 3)
        records = [nusc.get("sample_annotation", name) for name in sample["anns"]]
        info |= {
            "gt_boxes": np.concatenate([centre, size, -yaw - np.pi / 2 if old_boxes else yaw], 1),
            "gt_names": np.array([MODEL_NAMES.get(r["category_name"], r["category_name"]) for r in records]),
            "gt_velocity": (velocity @ world_to_key[:3, :3].T)[:, :2],
            "num_lidar_pts": np.array([r["num_lidar_pts"] for r in records]),
            "num_radar_pts": np.array([r["num_radar_pts"] for r in records]),
            "valid_flag": np.array([r["num_lidar_pts"] + r["num_radar_pts"] > 0 for r in records], bool),
        }
        infos.append(info)
    return {"infos": infos, "metadata": {"version": "v1.0-mini"}}


def new_infos(old: dict[str, Any], wrong_translation: bool = False) -> dict[str, Any]:
    """What mmdetection3d's converter to 1.1 makes of `old_infos`; with the defect of before its PR 2110 if asked."""
    samples = []
    for number, info in enumerate(old["infos"]):
        images = {}
        for camera, data in info["cams"].items():
            rotation, shift = data["sensor2lidar_rotation"], data["sensor2lidar_translation"]
            back = np.eye(4)
            back[:3, :3], back[:3, 3] = rotation.T, -shift if wrong_translation else -rotation.T @ shift
            images[camera] = {
                "img_path": Path(data["data_path"]).name, "cam2img": data["cam_intrinsic"].tolist(),
                "cam2ego": _float32(_chain(data, "sensor2ego")), "sample_data_token": data["sample_data_token"],
                "timestamp": data["timestamp"] / 1e6, "lidar2cam": _float32(back),
            }  # fmt: skip
        sweeps = []
        for data in info["sweeps"]:
            rotation, shift = data["sensor2lidar_rotation"], data["sensor2lidar_translation"]
            back = np.eye(4)
            back[:3, :3], back[:3, 3] = rotation.T, -shift if wrong_translation else -rotation.T @ shift
            sweeps.append(
                {
                    "timestamp": data["timestamp"] / 1e6, "sample_data_token": data["sample_data_token"],
                    "ego2global": _float32(_chain(data, "ego2global")),
                    "lidar_points": {"lidar_path": data["data_path"], "lidar2ego": _float32(_chain(data, "sensor2ego")),
                                     "lidar2sensor": _float32(back)},
                }
            )  # fmt: skip
        labels = [INFO_ORDER.index(name) if name in INFO_ORDER else -1 for name in info["gt_names"]]
        sample = {
            "sample_idx": number, "token": info["token"], "timestamp": info["timestamp"] / 1e6, "images": images,
            "ego2global": _float32(_chain(info, "ego2global")),
            "lidar_points": {"num_pts_feats": 5, "lidar_path": Path(info["lidar_path"]).name,
                             "lidar2ego": _float32(_chain(info, "lidar2ego"))},
            "lidar_sweeps": sweeps,
            "instances": [
                {"bbox_label": label, "bbox_3d": box.tolist(), "bbox_3d_isvalid": bool(valid), "bbox_label_3d": label,
                 "num_lidar_pts": int(lidar), "num_radar_pts": int(radar), "velocity": velocity.tolist()}
                for label, box, valid, lidar, radar, velocity in zip(
                    labels, info["gt_boxes"], info["valid_flag"], info["num_lidar_pts"], info["num_radar_pts"],
                    info["gt_velocity"], strict=True)
            ],
        }  # fmt: skip
        samples.append({name: value for name, value in sample.items() if value != []})
    categories = {name: i for i, name in enumerate(INFO_ORDER)}
    metainfo = {"categories": categories, "dataset": "nuscenes", "version": "v1.0-mini", "info_version": "1.1"}
    return {"metainfo": metainfo, "data_list": samples}


def write_pickle(path: Path, data: Any) -> Path:
    path.write_bytes(pickle.dumps(data))
    return path


def _product(first: list[float], then: list[float]) -> list[float]:
    (a, *b), (c, *d) = first, then
    return [a * c - np.dot(b, d), *(a * np.array(d) + c * np.array(b) + np.cross(b, d)).tolist()]


def _sensor(nusc: Any, data: dict[str, Any], world_to_key: np.ndarray | None = None) -> dict[str, Any]:
    calibration = nusc.get("calibrated_sensor", data["calibrated_sensor_token"])
    ego = nusc.get("ego_pose", data["ego_pose_token"])
    found = {
        "data_path": f"./data/nuscenes/{data['filename']}", "sample_data_token": data["token"],
        "sensor2ego_translation": calibration["translation"], "sensor2ego_rotation": calibration["rotation"],
        "ego2global_translation": ego["translation"], "ego2global_rotation": ego["rotation"],
        "timestamp": data["timestamp"],
    }  # fmt: skip
    if world_to_key is not None:
        placed = world_to_key @ _to_world(found)
        found |= {"sensor2lidar_rotation": placed[:3, :3], "sensor2lidar_translation": placed[:3, 3]}
    return found


def _chain(data: dict[str, Any], name: str) -> np.ndarray:
    return pose({"rotation": data[f"{name}_rotation"], "translation": data[f"{name}_translation"]})


def _to_world(data: dict[str, Any]) -> np.ndarray:
    return _chain(data, "ego2global") @ _chain(data, "sensor2ego")


def _float32(matrix: np.ndarray) -> list[list[float]]:
    return matrix.astype(np.float32).tolist()  # type: ignore[no-any-return]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

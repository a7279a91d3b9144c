"""What tests ask of made files: digests, and what nuscenes-devkit reads of a drive."""

import hashlib

import numpy as np

from tests.pipelines.small_nuscenes import pose

SEED, SCALE, SIZE = 3, 0.25, (400, 225)
CLASSES = {"car", "truck", "bus", "trailer", "construction vehicle", "pedestrian", "motorcycle", "bicycle",
           "traffic cone", "barrier"}  # fmt: skip


def points_of(devkit, token):
    return np.fromfile(devkit.get_sample_data_path(token), np.float32).reshape(-1, 5)


def sensor_to_global(devkit, token):
    data = devkit.get("sample_data", token)
    mounted = devkit.get("calibrated_sensor", data["calibrated_sensor_token"])
    return pose(devkit.get("ego_pose", data["ego_pose_token"])) @ pose(mounted)


def attributes_of(devkit, annotation):
    return [devkit.get("attribute", token)["name"] for token in annotation["attribute_tokens"]]


def digest(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

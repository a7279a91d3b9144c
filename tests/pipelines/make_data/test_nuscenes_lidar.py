"""The made drive's LiDAR points end on what they meet, in every frame that the tables state."""

import numpy as np
import pytest

from pipelines.make_data import lidar
from pipelines.make_data.nuscenes_drive import ego_body, make_drive
from tests.pipelines.make_data.made_files import attributes_of, points_of, sensor_to_global


@pytest.mark.blender
def test_points_are_as_in_official_files(devkit):
    for data in devkit.sample_data:
        if data["channel"] != "LIDAR_TOP":
            continue
        points = points_of(devkit, data["token"])
        assert 20_000 < len(points) < 34_688
        assert np.isfinite(points).all()
        assert set(np.unique(points[:, 4])) == set(range(32))
        assert points[:, 3].min() >= 1
        assert points[:, 3].max() <= 255
        assert (np.rint(points[:, 3]) == points[:, 3]).all()
        elevation = np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1]))
        assert np.abs(elevation - np.deg2rad(-30.67 + points[:, 4] * 41.34 / 31)).max() < 1e-3
        close = (np.abs(points[:, :2]) < 1).all(axis=1)  # the roof of the car itself
        assert 500 < close.sum() < 8_000
        to_global = sensor_to_global(devkit, data["token"])
        ground = points[:, :3] @ to_global[2, :3] + to_global[2, 3]
        assert ((np.abs(ground) < 0.025) & ~close).mean() > 0.3  # z of the global frame


@pytest.mark.blender
def test_points_in_boxes_are_counted_as_the_devkit_counts(devkit):
    from nuscenes.utils.geometry_utils import points_in_box

    counts = []
    for sample in devkit.sample:
        token = sample["data"]["LIDAR_TOP"]
        points = points_of(devkit, token)[:, :3].T
        for box in devkit.get_sample_data(token)[1]:
            stated = devkit.get("sample_annotation", box.token)["num_lidar_pts"]
            assert points_in_box(box, points).sum() == stated
            counts.append(stated)
    assert len(counts) == len(devkit.sample_annotation)
    assert max(counts) > 300
    assert np.mean(np.array(counts) > 5) > 0.5


@pytest.mark.blender
def test_sweeps_meet_what_stands_still_in_the_same_place(devkit):
    """Through the poses of the tables, what earlier sweeps see near a standing vehicle is in its box, not beside it."""
    sample = devkit.sample[1]
    sweeps, data = [], devkit.get("sample_data", sample["data"]["LIDAR_TOP"])
    while data["prev"]:
        data = devkit.get("sample_data", data["prev"])
        to_global = sensor_to_global(devkit, data["token"])
        sweeps.append(points_of(devkit, data["token"])[:, :3] @ to_global[:3, :3].T + to_global[:3, 3])
    xyz, inside, around = np.concatenate(sweeps), 0, 0
    for token in sample["anns"]:
        annotation = devkit.get("sample_annotation", token)
        if {"vehicle.parked", "vehicle.stopped", "cycle.without_rider"} & {*attributes_of(devkit, annotation)}:
            box = devkit.get_box(token)
            local = np.abs((xyz - box.center) @ box.rotation_matrix)
            half = box.wlh[[1, 0, 2]] / 2
            high = local[:, 2] < half[2] - 0.1  # not the ground
            inside += ((local <= half).all(axis=1) & high).sum()
            around += ((local[:, :2] <= half[:2] + 0.4).all(axis=1) & high).sum()
    assert inside > 500
    assert inside > 0.97 * around


def test_rays_end_where_the_first_solid_begins():
    """Against a definition by brute force: along each ray nothing is met before, and the end is on a surface."""
    drive = make_drive(1, 1, 0.0, (160, 90))
    ego = drive.ego_in_street(0.0)
    sensor = ego @ drive.sensors[0].to_ego
    things = [(t.solids, t.pose(0.0)) for t in drive.things]
    sweep = lidar.scan(np.random.default_rng(0), sensor, drive.street, [(ego_body(), ego)], things)
    bodies = [(-1, s, np.eye(4)) for s in (*drive.street.buildings, *drive.street.furniture)]
    bodies += [(-1, s, ego) for s in ego_body()] + [(i, s, p) for i, (solids, p) in enumerate(things) for s in solids]
    chosen = np.random.default_rng(1).permutation(len(sweep.points))[:400]
    chosen = np.concatenate([chosen, np.flatnonzero(sweep.owner >= 0)[::12]])
    steps = np.concatenate([np.linspace(0.02, 0.995, 120), [1.0]])
    sampled = sweep.points[chosen, None, :3] * steps[:, None]
    xyz = sampled.reshape(-1, 3).astype(float) @ sensor[:3, :3].T + sensor[:3, 3]
    depth = np.full(len(xyz), np.inf)  # signed distance to the nearest solid, negative inside
    nearest = np.full(len(xyz), -1)
    for index, solid, place in bodies:
        local = (xyz - place[:3, 3]) @ place[:3, :3]
        outside = (local @ solid.planes[:, :3].T - solid.planes[:, 3]).max(axis=1)
        nearest[outside < depth] = index
        depth = np.minimum(depth, outside)
    depth, nearest = depth.reshape(len(chosen), -1), nearest.reshape(len(chosen), -1)
    height = xyz[:, 2].reshape(len(chosen), -1)
    noise = 0.02
    assert depth[:, :-1].min() > -noise
    assert height[:, :-1].min() > -noise
    assert np.minimum(np.abs(depth[:, -1]), np.abs(height[:, -1])).max() < noise
    met = sweep.owner[chosen] >= 0
    assert met.sum() > 150
    assert (nearest[met, -1] == sweep.owner[chosen][met]).mean() > 0.99
    assert ((sweep.visible >= 0) & (sweep.visible <= 1)).all()
    assert (sweep.visible > 0.9).any()

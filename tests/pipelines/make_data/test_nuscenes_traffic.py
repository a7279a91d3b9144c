"""Who moves in the made drive: shapes, poses, velocities and what is said of them agree."""

import numpy as np
import pytest

from pipelines.make_data.road_users import SHAPES
from pipelines.make_data.traffic import planar_pose
from tests.pipelines.small_nuscenes import pose


@pytest.mark.blender
def test_velocity_attributes_and_heading_agree(devkit):
    speeds = {}
    for annotation in devkit.sample_annotation:
        velocity = devkit.box_velocity(annotation["token"])
        attributes = [devkit.get("attribute", t)["name"] for t in annotation["attribute_tokens"]]
        moves = attributes in (["vehicle.moving"], ["cycle.with_rider"], ["pedestrian.moving"])
        speed = np.linalg.norm(velocity)
        if np.isnan(speed):
            continue
        speeds.setdefault(moves, []).append(speed)
        if moves:
            heading = devkit.get_box(annotation["token"]).orientation.rotation_matrix[:2, 0]
            assert velocity[:2] @ heading > 0.999 * speed
    assert min(speeds[True]) > 0.7
    assert max(speeds[False]) < 1e-6
    assert len(speeds[True]) > 15


@pytest.mark.blender
def test_the_car_turns_and_every_sensor_has_a_pose_of_its_own_time(devkit):
    poses = {}
    for sample in devkit.sample:
        for channel, token in sample["data"].items():
            data = devkit.get("sample_data", token)
            ego = devkit.get("ego_pose", data["ego_pose_token"])
            assert ego["timestamp"] == data["timestamp"] <= sample["timestamp"]
            poses.setdefault(channel, []).append(pose(ego))
    assert len({tuple(p[0][:3, 3]) for p in poses.values()}) == 7
    turn = np.linalg.inv(poses["LIDAR_TOP"][0]) @ poses["LIDAR_TOP"][1]
    assert np.arctan2(turn[1, 0], turn[0, 0]) > 0.01  # to the left
    assert 2.5 < np.linalg.norm(turn[:2, 3]) < 3.5  # 6 m/s
    early = [s["timestamp"] - devkit.get("sample_data", s["data"]["CAM_FRONT"])["timestamp"] for s in devkit.sample]
    assert early == [35_500, 35_500]


@pytest.mark.blender
def test_nothing_stands_in_anything_else(devkit):
    polygon = pytest.importorskip("shapely.geometry").Polygon
    for sample in devkit.sample:
        ego = pose(devkit.get("ego_pose", devkit.get("sample_data", sample["data"]["LIDAR_TOP"])["ego_pose_token"]))
        corners = np.array([[3.24, 0.86, 0, 1], [3.24, -0.86, 0, 1], [-0.84, -0.86, 0, 1], [-0.84, 0.86, 0, 1]])
        shapes = [polygon((corners @ ego.T)[:, :2])]
        shapes += [polygon(devkit.get_box(token).bottom_corners()[:2].T) for token in sample["anns"]]
        for i, one in enumerate(shapes):
            assert not any(one.intersects(other) for other in shapes[:i])


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_fill_their_boxes_and_stay_inside(name):
    rng = np.random.default_rng(4)
    for ridden in (False, True):
        size = SHAPES[name].sample(rng)
        solids, trim = SHAPES[name].build(rng, size, ridden)
        half = np.array([size[0] / 2, size[1] / 2])
        for solid in (*solids, *trim):
            assert (np.abs(solid.vertices[:, :2]) <= half + 1e-9).all()
            assert solid.vertices[:, 2].min() >= 0
            assert solid.vertices[:, 2].max() <= size[2]
            inside = solid.vertices @ solid.planes[:, :3].T - solid.planes[:, 3]
            assert inside.max() < 1e-9  # convex, normals point out
        all_vertices = np.concatenate([s.vertices for s in solids])
        assert np.ptp(all_vertices[:, 2]) > 0.6 * size[2]
        assert (np.ptp(all_vertices[:, :2], axis=0) > 0.4 * np.array(size[:2])).all()


def test_a_pose_turns_counter_clockwise_and_moves():
    assert np.allclose(planar_pose(1, 2, np.pi / 2) @ [1, 0, 0, 1], [1, 3, 0, 1])

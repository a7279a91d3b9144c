"""The made drive's images and masks show what its boxes, points and calibrations say."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from extractors.bev_render import gl_works
from extractors.masks import read_masks
from pipelines.make_data.nuscenes_drive import CAMERAS, make_drive
from pipelines.make_data.nuscenes_questions import CLASSES as CATEGORIES
from pipelines.make_data.solids import Mesh
from pipelines.make_data.street_camera import StreetCamera
from tests.pipelines.make_data.made_files import SEED, SIZE, points_of, sensor_to_global


@pytest.fixture(scope="module")
def owners(made):
    """Of each key frame and camera, the index of the thing that each pixel shows (-1: none), from plain colours."""
    drive = make_drive(SEED, 0, 0.5, SIZE)
    colors = np.array([(0, 0, 0), *[(i + 1, (i + 1) * 97 % 256, 255) for i in range(len(drive.things))]], np.uint8)
    street = drive.street.mesh
    found = {}
    with StreetCamera() as camera:
        for sensor in drive.sensors[1:]:
            for frame in range(2):
                time_s = (frame * 500_000 - sensor.early_us) / 1e6
                meshes = [Mesh(street.xyz, street.normal, np.zeros_like(street.rgb), street.faces)]
                for thing, color in zip(drive.things, colors[1:], strict=True):
                    mesh = Mesh.of([*thing.solids, *thing.trim]).moved(thing.pose(time_s))
                    meshes.append(Mesh(mesh.xyz, mesh.normal, np.tile(color, (len(mesh.xyz), 1)), mesh.faces))
                pose = drive.ego_in_street(time_s) @ sensor.to_ego
                image = camera.draw(Mesh.join(meshes), pose, sensor.intrinsic, SIZE)
                same = (image[:, :, None] == colors[None, None]).all(axis=-1)
                found[frame, sensor.channel] = np.where(same.any(axis=-1), same.argmax(axis=-1) - 1, -1)
    return drive, found


@pytest.mark.blender
def test_what_the_pictures_show_is_inside_the_projected_boxes(devkit, owners):
    """By the devkit's boxes and calibrations, moved from the LiDAR's time to the camera's."""
    from nuscenes.utils.geometry_utils import view_points

    drive, shown = owners
    checked = 0
    for frame, sample in enumerate(devkit.sample):
        boxes = {}
        for token in sample["anns"]:
            street = np.linalg.inv(drive.to_global) @ [*devkit.get_box(token).center, 1]
            gap = [np.hypot(*(t.pose(frame * 0.5)[:2, 3] - street[:2])) for t in drive.things]
            assert min(gap) < 0.01
            boxes[int(np.argmin(gap))] = token
        for channel in CAMERAS:
            data = devkit.get("sample_data", sample["data"][channel])
            to_camera = np.linalg.inv(sensor_to_global(devkit, data["token"]))
            k = np.array(devkit.get("calibrated_sensor", data["calibrated_sensor_token"])["camera_intrinsic"])
            for index, token in boxes.items():
                v, u = np.nonzero(shown[frame, channel] == index)
                if len(v) < 30:
                    continue
                velocity = np.nan_to_num(devkit.box_velocity(token))
                lag = (data["timestamp"] - sample["timestamp"]) / 1e6
                corners = devkit.get_box(token).corners() + velocity[:, None] * lag
                corners = to_camera[:3, :3] @ corners + to_camera[:3, 3:]
                if corners[2].min() < 0.3:
                    continue
                hull = cv2.convexHull(view_points(corners, k, normalize=True)[:2].T.astype(np.float32))
                where = np.column_stack([u, v]) + 0.5
                inside = [cv2.pointPolygonTest(hull, tuple(p), True) for p in where.tolist()]
                assert min(inside) > -1.0
                size = hull[:, 0].clip(0, SIZE)
                assert len(v) > 0.05 * np.prod(np.ptp(size, axis=0))
                checked += 1
    assert checked > 30


@pytest.mark.blender
def test_points_fall_on_the_pixels_of_what_they_have_met(devkit, owners):
    """LiDAR points inside boxes of what stands still, through both ego poses, into the camera: the thing is there."""
    drive, shown = owners
    on, off = 0, 0
    for frame, sample in enumerate(devkit.sample):
        lidar_token = sample["data"]["LIDAR_TOP"]
        to_global = sensor_to_global(devkit, lidar_token)
        xyz = points_of(devkit, lidar_token)[:, :3] @ to_global[:3, :3].T + to_global[:3, 3]
        for index, thing in enumerate(drive.things):
            box = drive.to_global @ thing.pose(0.0)
            local = (xyz - box[:3, 3]) @ box[:3, :3]
            inside = (np.abs(local[:, :2]) <= np.array(thing.size[:2]) / 2).all(axis=1)
            inside &= (local[:, 2] > 0.1) & (local[:, 2] < thing.size[2])
            if thing.track.speed or inside.sum() < 20:
                continue
            for channel in CAMERAS:
                data = devkit.get("sample_data", sample["data"][channel])
                to_camera = np.linalg.inv(sensor_to_global(devkit, data["token"]))
                k = np.array(devkit.get("calibrated_sensor", data["calibrated_sensor_token"])["camera_intrinsic"])
                there = xyz[inside] @ to_camera[:3, :3].T + to_camera[:3, 3]
                there = there[there[:, 2] > 1] @ k.T
                u, v = np.floor(there[:, :2] / there[:, 2:]).astype(int).T
                seen = (u >= 0) & (u < SIZE[0]) & (v >= 0) & (v < SIZE[1])
                mask = cv2.dilate((shown[frame, channel] == index).astype(np.uint8), np.ones((3, 3)))  # mixed at rims
                hit = mask[v[seen], u[seen]] > 0
                on, off = on + hit.sum(), off + (~hit).sum()
    assert on + off > 500
    assert on / (on + off) > 0.9  # the camera, elsewhere than the LiDAR, does not see all that the LiDAR sees


@pytest.mark.blender
def test_masks_are_the_pixels_that_show_a_thing_of_a_class(made, devkit, owners):
    drive, shown = owners
    classed = [i for i, thing in enumerate(drive.things) if thing.category in CATEGORIES]
    matched = 0
    for frame, sample in enumerate(devkit.sample):
        for channel in CAMERAS:
            name = Path(devkit.get("sample_data", sample["data"][channel])["filename"]).stem
            found = read_masks(made[0] / "masks" / f"{name}.npz", SIZE)
            covered = np.zeros(SIZE[::-1], int)
            for one in found:
                here = shown[frame, channel][one.mask]
                covered += one.mask
                if (here >= 0).sum() > 20:  # else there are rims alone, where colours mix
                    index = np.bincount(here[here >= 0]).argmax()
                    assert (here[here >= 0] == index).mean() > 0.9
                    assert CATEGORIES[drive.things[index].category] == one.name.replace("_", " ")
                    matched += 1
            assert covered.max() <= 1
            large = [i for i in classed if (shown[frame, channel] == i).sum() > 40]
            assert not large or covered[np.isin(shown[frame, channel], large)].mean() > 0.99
    assert matched > 30


@pytest.mark.blender
def test_pictures_are_of_the_stated_size_and_show_things_by_daylight(devkit, owners):
    _, shown = owners
    for frame, sample in enumerate(devkit.sample):
        for channel in CAMERAS:
            data = devkit.get("sample_data", sample["data"][channel])
            assert (data["width"], data["height"]) == SIZE
            image = cv2.imread(devkit.get_sample_data_path(data["token"]))
            assert image.shape == (225, 400, 3)
            sky = image[:10, :, 0].astype(int) - image[:10, :, 2] > 20
            assert sky.mean() > 0.1 or image[:10].std() > 5  # blue, or a wall
            things = shown[frame, channel] >= 0
            edges = cv2.Canny(image, 60, 120) > 0
            if 0.02 < things.mean() < 0.5:
                rim = cv2.dilate(things.astype(np.uint8), np.ones((3, 3))) - cv2.erode(
                    things.astype(np.uint8), np.ones((3, 3))
                )
                assert cv2.dilate(edges.astype(np.uint8), np.ones((3, 3)))[rim > 0].mean() > 1.5 * edges.mean()


@pytest.mark.blender
def test_without_gl_the_pictures_are_the_same_but_for_edges():
    if not gl_works():
        pytest.skip("GL does not work here")
    drive = make_drive(SEED, 1, 0.0, SIZE)
    front = drive.sensors[1]
    assert front.channel == "CAM_FRONT"
    mesh = Mesh.join([drive.street.mesh, *[Mesh.of(t.solids).moved(t.pose(0.0)) for t in drive.things]])
    images = []
    with StreetCamera() as camera:
        for engine in ("BLENDER_WORKBENCH", "CYCLES"):
            camera.engine = engine
            images.append(camera.draw(mesh, drive.ego_in_street(0.0) @ front.to_ego, front.intrinsic, SIZE).astype(int))
    gap = np.abs(images[0] - images[1]).max(axis=-1)
    assert (gap > 8).mean() < 0.03
    assert np.median(gap) <= 1

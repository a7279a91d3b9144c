"""The synthetic drive is in the official layout by the devkit's judgement, and true to its own geometry."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from extractors.bev_render import gl_works
from extractors.masks import read_masks
from pipelines.errors import JobError
from pipelines.make_data import lidar
from pipelines.make_data.nuscenes import SCENES, make
from pipelines.make_data.nuscenes_drive import CAMERAS, ego_body, make_drive
from pipelines.make_data.nuscenes_questions import CLASSES as CATEGORIES
from pipelines.make_data.nuscenes_questions import ME, RELATIONS, STATUS, Node, ask, node, relation
from pipelines.make_data.nuscenes_tables import TABLES
from pipelines.make_data.road_users import SHAPES
from pipelines.make_data.solids import Mesh
from pipelines.make_data.street_camera import StreetCamera
from pipelines.make_data.traffic import planar_pose

nuscenes = pytest.importorskip("nuscenes.nuscenes", reason="nuscenes-devkit is not installed")
SEED, SCALE, SIZE = 3, 0.25, (400, 225)
CLASSES = {"car", "truck", "bus", "trailer", "construction vehicle", "pedestrian", "motorcycle", "bicycle",
           "traffic cone", "barrier"}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("bpy", reason="Blender is not installed")
    out = tmp_path_factory.mktemp("nuscenes")
    return out, make(out, seed=SEED, scenes=1, key_frames=2, image_scale=SCALE)


@pytest.fixture(scope="module")
def devkit(made):
    return nuscenes.NuScenes("v1.0-mini", str(made[0]), verbose=False)


def points_of(devkit, token):
    return np.fromfile(devkit.get_sample_data_path(token), np.float32).reshape(-1, 5)


def pose(record):
    from pyquaternion import Quaternion

    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = Quaternion(record["rotation"]).rotation_matrix, record["translation"]
    return matrix


def sensor_to_global(devkit, token):
    data = devkit.get("sample_data", token)
    mounted = devkit.get("calibrated_sensor", data["calibrated_sensor_token"])
    return pose(devkit.get("ego_pose", data["ego_pose_token"])) @ pose(mounted)


def digest(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.blender
def test_the_devkit_finds_what_the_summary_says(made, devkit):
    out, summary = made
    assert {p.stem for p in (out / "v1.0-mini").iterdir()} == set(TABLES)
    assert summary["scenes"] == len(devkit.scene) == 1
    assert summary["key frames"] == len(devkit.sample) == 2
    assert summary["sweeps"] == 11
    assert summary["images"] == 12
    assert summary["sweeps"] + summary["images"] == len(devkit.sample_data) == len(devkit.ego_pose)
    assert summary["annotations"] == len(devkit.sample_annotation) > 60
    assert summary["points"] == sum(
        len(points_of(devkit, d["token"])) for d in devkit.sample_data if d["channel"] == "LIDAR_TOP"
    )
    assert devkit.scene[0]["name"] == "scene-0061"
    for sample in devkit.sample:
        assert set(sample["data"]) == {"LIDAR_TOP", *CAMERAS}


@pytest.mark.blender
def test_tokens_are_32_hex_digits_and_files_are_those_of_the_tables(made, devkit):
    out, _ = made
    for table in set(TABLES) - {"visibility"}:
        tokens = [row["token"] for row in getattr(devkit, table)]
        assert len(set(tokens)) == len(tokens)
        assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    named = {d["filename"] for d in devkit.sample_data} | {m["filename"] for m in devkit.map}
    found = {str(p.relative_to(out)) for d in ("samples", "sweeps", "maps") for p in (out / d).rglob("*.*")}
    assert named == found


@pytest.mark.blender
def test_sweeps_are_at_20_hz_from_a_key_frame_without_any(devkit):
    first, second = (devkit.get("sample_data", sample["data"]["LIDAR_TOP"]) for sample in devkit.sample)
    assert first["prev"] == ""
    assert second["next"] == ""
    walked, times = second, [second["timestamp"]]
    while walked["prev"]:
        walked = devkit.get("sample_data", walked["prev"])
        times.append(walked["timestamp"])
        assert walked["is_key_frame"] == (walked["token"] == first["token"])
        assert walked["sample_token"] == (first if walked is first else second)["sample_token"]
    assert walked is first
    assert len(times) == 11
    assert np.abs(np.diff(times) + 50_000).max() < 1_000
    assert [s["timestamp"] for s in devkit.sample] == [first["timestamp"], second["timestamp"]]


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
        if {"vehicle.parked", "vehicle.stopped", "cycle.without_rider"} & {*names(devkit, annotation)}:
            box = devkit.get_box(token)
            local = np.abs((xyz - box.center) @ box.rotation_matrix)
            half = box.wlh[[1, 0, 2]] / 2
            high = local[:, 2] < half[2] - 0.1  # not the ground
            inside += ((local <= half).all(axis=1) & high).sum()
            around += ((local[:, :2] <= half[:2] + 0.4).all(axis=1) & high).sum()
    assert inside > 500
    assert inside > 0.97 * around


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


@pytest.mark.blender
def test_the_map_has_the_road_and_not_the_pavement(devkit):
    mask = devkit.map[0]["mask"]
    x, y = np.array([pose["translation"][:2] for pose in devkit.ego_pose]).T
    assert mask.is_on_mask(x, y).all()
    driving = [devkit.get_box(a["token"]) for a in devkit.sample_annotation if "vehicle.moving" in names(devkit, a)]
    assert mask.is_on_mask(*np.array([b.center[:2] for b in driving]).T).all()
    sitting = [a for a in devkit.sample_annotation if "pedestrian.sitting_lying_down" in names(devkit, a)]
    assert sitting  # on the pavement
    assert not any(mask.is_on_mask(*np.array(a["translation"])[:2, None])[0] for a in sitting)


def names(devkit, annotation):
    return [devkit.get("attribute", token)["name"] for token in annotation["attribute_tokens"]]


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


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (0, "front"), (29.999, "front"), (30.001, "front left"), (60, "front left"), (90, "front left"),
        (90.001, "back left"), (149.999, "back left"), (150.001, "back"), (180, "back"), (-179.999, "back"),
        (-150.001, "back"), (-149.999, "back right"), (-90, "back right"), (-89.999, "front right"),
        (-30.001, "front right"), (-29.999, "front"),
    ],
)  # fmt: skip
def test_relations_are_half_open_and_counter_clockwise(degrees, expected):
    angle = np.deg2rad(degrees)
    x, y = (0.0, np.sign(degrees)) if abs(degrees) == 90 else (np.cos(angle), np.sin(angle))
    one = Node("car", "parked", 5 + 3 * float(x), -2 + 3 * float(y))
    assert relation(one, Node("bus", "moving", 5, -2)) == expected
    assert relation(Node("bus", "moving", 5, -2), Node("car", "", 5, -2)) is None


def test_answers_follow_from_the_graph_by_another_evaluation():
    """Questions are parsed back and answered with loops over the nodes."""
    rng = np.random.default_rng(0)
    kinds = [("car", "vehicle.parked"), ("car", "vehicle.moving"), ("bus.rigid", "vehicle.stopped"),
             ("truck", "vehicle.moving"), ("bicycle", "cycle.with_rider"), ("trailer", "vehicle.parked")]  # fmt: skip
    seen, before = {}, Counter()
    for _ in range(25):
        picks = [kinds[i] for i in rng.integers(0, len(kinds), 7)]
        nodes = [node(f"vehicle.{kind}", state, rng.uniform(-30, 30, 3)) for kind, state in picks]
        nodes += [node("movable_object.barrier", "", rng.uniform(-30, 30, 3))]
        for question in ask(rng, nodes, before):
            answer = answered(question["question"], nodes)
            assert answer == question["answer"], question
            key = question["template_type"], question["num_hop"]
            seen[key] = seen.get(key, 0) + 1
    kinds = ("exist", "count", "object", "status", "comparison")
    assert set(seen) == {(kind, hop) for kind in kinds for hop in (0, 1)}


STATES = "moving|parked|stopped|not standing|standing|with rider|without rider"
KINDS = "car|truck|bus|trailer|construction vehicle|pedestrian|motorcycle|bicycle|traffic cone|barrier|thing"


def answered(text, nodes):
    """Answer a question from its words alone."""
    text = re.sub(r"\b(buses)\b", "bus", text.rstrip("?"))
    text = re.sub(rf"\b({KINDS})s\b", r"\1", text)
    where = "|".join(sorted(RELATIONS, key=len, reverse=True))
    plain = rf"(?:the |an? )?((?:(?:{STATES}) )?(?:{KINDS}))"

    def fitting(words, among):
        kind = re.search(rf"({KINDS})$", words)[1]
        state = words[: -len(kind)].strip()
        return [n for n in among if kind in ("thing", n.kind) and state in ("", n.status)]

    def only(words):
        """The node of a noun phrase, with or without a relation."""
        words = words.strip()
        if words == "me":
            return ME
        match = re.fullmatch(rf"{plain} that is both to the ({where}) of (.+) and the ({where}) of (.+)", words)
        if match:
            a, b = only(match[3]), only(match[5])
            found = [n for n in beside(match[1], a, match[2]) if n in beside(match[1], b, match[4])]
        elif match := re.fullmatch(rf"{plain} to the ({where}) of (.+)", words):
            found = beside(match[1], only(match[3]), match[2])
        else:
            match = re.fullmatch(plain, words)
            assert match, words
            found = fitting(match[1], nodes)
        assert len(found) == 1, words
        return found[0]

    def beside(words, to, direction):
        return [n for n in fitting(words, nodes) if n is not to and relation(n, to) == direction]

    def is_(truth):
        return "yes" if truth else "no"

    if match := re.fullmatch(rf"Are there any {plain}|Are any {plain} visible", text):
        return is_(fitting(match[1] or match[2], nodes))
    if match := re.fullmatch(
        rf"(?:Are there any|(How many|What number of)) {plain}(?: are)? to the ({where}) of (.+)", text
    ):
        found = beside(match[2], only(match[4]), match[3])
        return len(found) if match[1] else is_(found)
    if match := re.fullmatch(rf"There is {plain}; are there any {plain} to the ({where}) of it", text):
        return is_(beside(match[2], only(match[1]), match[3]))
    if match := re.fullmatch(rf"(?:How many|What number of) {plain} are there", text):
        return len(fitting(match[1], nodes))
    if match := re.fullmatch(
        rf"(Is there another|Are there any other|How many other|What number of other) {plain} "
        r"(?:that has|of|have|are in|are of) the same status as (.+)",
        text,
    ):
        one = only(match[3])
        found = [n for n in fitting(match[2], nodes) if n is not one and n.status == one.status]
        return is_(found) if match[1].startswith(("Is", "Are")) else len(found)
    if match := re.fullmatch(
        r"What is the status of (.+)|What status is (.+)|(.+) is in what status|There is (.+); what is its status", text
    ):
        return only(next(filter(None, match.groups())).replace("The ", "the ")).status
    if match := re.fullmatch(r"What is (.+)|(.+) is what|There is (.+); what is it", text):
        return only(next(filter(None, match.groups())).replace("The ", "the ")).kind
    match = re.fullmatch(
        r"Is the status of (.+) the same as (.+)|Do (.+) and (.+) have the same status"
        r"|Does (.+) have the same status as (.+)",
        text,
    )
    assert match, text
    one, other = filter(None, match.groups())
    return is_(only(one).status == only(other).status)


@pytest.mark.blender
def test_question_files_are_official_and_their_counts_hold_by_the_devkit(made, devkit):
    out, summary = made
    train, val = (
        json.loads((out / "questions" / f"NuScenes_{split}_questions.json").read_text())["questions"]
        for split in ("train", "val")
    )
    assert len(train) == summary["train questions"] == 28
    assert val == []
    words = {"yes", "no", *CLASSES, *STATUS.values(), *range(11)}
    assert {q["sample_token"] for q in train} == {s["token"] for s in devkit.sample}
    checked = 0
    for question in train:
        assert question["answer"] in words
        assert question["num_hop"] in (0, 1)
        assert 5 <= len(question["question"].split()) <= 35
        nodes = []
        sample = devkit.get("sample", question["sample_token"])
        ego = devkit.get("ego_pose", devkit.get("sample_data", sample["data"]["LIDAR_TOP"])["ego_pose_token"])
        for token in sample["anns"]:
            annotation = devkit.get("sample_annotation", token)
            place = np.linalg.inv(pose(ego)) @ [*annotation["translation"], 1]
            if annotation["num_lidar_pts"]:
                attribute = "".join(names(devkit, annotation))
                nodes.append(node(annotation["category_name"], attribute, place[:3]))
        assert answered(question["question"], [n for n in nodes if n]) == question["answer"]
        checked += 1
    assert checked == 28


@pytest.mark.blender
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, seed=seed, scenes=1, key_frames=1, image_scale=0.1)
    one, again, other = (digest(tmp_path / name) for name in "abc")
    assert one == again
    assert {n.split("/")[0] for n in one} == {"v1.0-mini", "maps", "masks", "samples", "questions"}
    assert not {d for n, d in one.items() if n.startswith("samples")} & set(other.values())
    assert one["v1.0-mini/sample_annotation.json"] != other["v1.0-mini/sample_annotation.json"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scenes": 0}, "need 1 to 10"),
        ({"scenes": 11}, "need 1 to 10"),
        ({"key_frames": 0}, "at least 1"),
        ({"image_scale": 0.0}, "1600 x 900"),
        ({"image_scale": float("nan")}, "1600 x 900"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_written(tmp_path, settings, text):
    with pytest.raises(JobError, match=text):
        make(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_scene_names_are_of_the_devkits_mini_splits():
    from nuscenes.utils.splits import mini_train, mini_val

    assert set(SCENES) == {*mini_train, *mini_val}
    assert SCENES[1] in mini_val
    assert SCENES[0] in mini_train


def test_a_pose_turns_counter_clockwise_and_moves():
    assert np.allclose(planar_pose(1, 2, np.pi / 2) @ [1, 0, 0, 1], [1, 3, 0, 1])


@pytest.mark.slow
@pytest.mark.blender
def test_the_default_has_every_class_and_both_splits(tmp_path):
    summary = make(tmp_path)
    devkit = nuscenes.NuScenes("v1.0-mini", str(tmp_path), verbose=False)
    assert [s["name"] for s in devkit.scene] == ["scene-0061", "scene-0103"]
    assert summary["images"] == 48
    assert summary["train questions"] == summary["val questions"] == 56
    met = [a for a in devkit.sample_annotation if a["num_lidar_pts"]]
    assert {k.kind for a in met if (k := node(a["category_name"], "", np.zeros(3)))} == CLASSES
    for sample in devkit.sample:
        assert len(sample["anns"]) > 40
        image = cv2.imread(devkit.get_sample_data_path(sample["data"]["CAM_FRONT"]))
        assert image.shape == (900, 1600, 3)
    assert {a["visibility_token"] for a in devkit.sample_annotation} == {"1", "2", "3", "4"}
    assert any(a["num_lidar_pts"] == 0 for a in devkit.sample_annotation)
    categories = {a["category_name"] for a in devkit.sample_annotation}
    assert {"vehicle.emergency.police", "movable_object.debris", "human.pedestrian.stroller"} & categories

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extractors import bev_render
from extractors.base import recipe
from extractors.bev_render import PROGRAM, BevRender, gl_works, input_image
from extractors.errors import ChildDied, EmptyInput, InvalidValues, MemoryCapExceeded, MissingPackage, NoColors, NoFaces
from extractors.inputs import Scan

SMALL = {"width": 192, "height": 108}
COLORS = {"left": (200, 30, 60), "right": (20, 90, 220), "table": (240, 220, 40)}
ENGINES = ["cycles", "workbench"]


def quad(x0: float, x1: float, y0: float, y1: float, z: float, color: tuple[int, int, int]) -> Scan:
    xyz = np.array([[x0, y0, z], [x1, y0, z], [x1, y1, z], [x0, y1, z]], np.float32)
    return Scan(xyz, np.array([color] * 4, np.uint8), np.array([[0, 1, 2], [0, 2, 3]], np.int32))


def together(*scans: Scan) -> Scan:
    starts = np.cumsum([0] + [len(scan.xyz) for scan in scans])
    return Scan(
        np.concatenate([scan.xyz for scan in scans]),
        np.concatenate([scan.rgb for scan in scans]),
        np.concatenate([scan.faces + start for scan, start in zip(scans, starts, strict=False)]),
    )


@pytest.fixture(scope="module")
def scan() -> Scan:
    """A red and a blue half floor, and a table on the red one; off the origin, as scans are."""
    floor = quad(3, 5, 2, 5, 0.2, COLORS["left"]), quad(5, 7, 2, 5, 0.2, COLORS["right"])
    return together(*floor, quad(3.5, 4.5, 3, 4, 1.0, COLORS["table"]))


def uneven(seed: int) -> Scan:
    """A rough patch whose vertices all have their own colours."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 3, 12), np.linspace(0, 2, 12), indexing="ij")
    xyz = np.stack([x, y, rng.uniform(0, 0.4, x.shape)], -1).reshape(-1, 3).astype(np.float32)
    i = np.arange(144).reshape(12, 12)
    a, b, c, d = i[:-1, :-1].ravel(), i[1:, :-1].ravel(), i[1:, 1:].ravel(), i[:-1, 1:].ravel()
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)]).astype(np.int32)
    return Scan(xyz, rng.integers(0, 256, (144, 3)).astype(np.uint8), faces)


def render(extractor: BevRender, *scans: Scan) -> list[dict]:
    """Records of scans, by one fresh Blender."""
    run = extractor.load()
    records = run([extractor.prepare(f"scan {i}", scan) for i, scan in enumerate(scans)])
    return [extractor.schema.check(record, "bev_render") for record in records]


def pixels(record: dict) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(record["image"].item())))


def digest(record: dict) -> str:
    return hashlib.sha256(pixels(record).tobytes()).hexdigest()


needs_gl = pytest.mark.skipif("not __import__('extractors.bev_render').bev_render.gl_works()", reason="no working GL")


# Settings


def test_official_look_is_cycles_with_the_measured_samples():
    extractor = BevRender()
    assert (extractor.engine, extractor.samples) == ("cycles", BevRender.OFFICIAL_SAMPLES)


@pytest.mark.parametrize(
    "settings",
    [
        {"look": "official", "engine": "workbench"},
        {"look": "flat", "engine": "cycles", "samples": 4},
        {"samples": -1},
        {"width": 0},
        {"lens_mm": -45.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=f"{list(settings)[-1]}"):
        BevRender(**settings)


@pytest.mark.blender
def test_auto_engine_is_settled_before_the_recipe_is_made(monkeypatch):
    for works, engine in [(True, "workbench"), (False, "cycles")]:
        monkeypatch.setattr(bev_render, "gl_works", lambda blender, works=works: works)
        assert recipe(BevRender(look="flat"))["settings"]["engine"] == engine


# Meshes


def test_point_cloud_is_refused(scan):
    with pytest.raises(NoFaces, match=r"hall: .* 12 points"):
        BevRender().prepare("hall", replace(scan, faces=np.zeros((0, 3), np.int32)))


def test_mesh_without_colours_is_refused(scan):
    with pytest.raises(NoColors, match="hall"):
        BevRender().prepare("hall", replace(scan, rgb=None))


def test_empty_mesh_is_refused():
    empty = Scan(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.uint8), np.zeros((0, 3), np.int32))
    with pytest.raises(EmptyInput, match="hall"):
        BevRender().prepare("hall", empty)


@pytest.mark.parametrize("wrong", [-1, 12, 2**31 - 1])
def test_face_of_a_missing_vertex_is_refused(scan, wrong):
    faces = scan.faces.copy()
    faces[3, 1] = wrong
    with pytest.raises(InvalidValues, match=f"vertex {wrong}, the mesh has 12"):
        BevRender().prepare("hall", replace(scan, faces=faces))


def test_mesh_without_one_finite_vertex_is_refused(scan):
    with pytest.raises(InvalidValues, match="none of the 12"):
        BevRender().prepare("hall", replace(scan, xyz=np.full_like(scan.xyz, np.nan)))


def test_mesh_whose_every_face_touches_nan_is_refused(scan):
    xyz = scan.xyz.copy()
    xyz[::4] = np.nan
    with pytest.raises(NoFaces, match="3 vertices that are not finite"):
        BevRender().prepare("hall", replace(scan, xyz=xyz))


@pytest.mark.parametrize("factor", [0.0, 1e-3, 1e3, 1e30])
def test_mesh_that_the_camera_would_not_see_is_refused(scan, factor):
    with pytest.raises(InvalidValues, match="metres"):
        BevRender().prepare("hall", replace(scan, xyz=scan.xyz * np.float32(factor)))


def test_vertices_that_are_not_finite_go_with_their_faces(scan):
    xyz = np.concatenate([scan.xyz[:2], [[np.nan, 0, 0], [9, np.inf, 9]], scan.xyz[2:]]).astype(np.float32)
    rgb = np.concatenate([scan.rgb[:2], [[1, 2, 3], [4, 5, 6]], scan.rgb[2:]]).astype(np.uint8)
    faces = np.concatenate([np.where(scan.faces < 2, scan.faces, scan.faces + 2), [[0, 1, 2], [3, 4, 5]]])
    found = BevRender().prepare("hall", Scan(xyz, rgb, faces.astype(np.int32)))
    wanted = BevRender().prepare("hall", scan)
    for name in ("xyz", "rgb", "faces"):
        np.testing.assert_array_equal(found[name], wanted[name])
    assert found["camera"].radius == wanted["camera"].radius


def test_faces_without_area_are_left_out(scan):
    faces = np.concatenate([scan.faces, [[1, 1, 2], [3, 0, 3]]]).astype(np.int32)
    found = BevRender().prepare("hall", replace(scan, faces=faces))
    np.testing.assert_array_equal(found["faces"], scan.faces)


def test_aligned_scan_is_seen_in_the_raw_frame_by_default(scan):
    turn = np.array([[0, -1, 0, 2], [1, 0, 0, 3], [0, 0, 1, -0.2], [0, 0, 0, 1]], np.float64)
    aligned = replace(scan, xyz=(scan.xyz @ turn[:3, :3].T + turn[:3, 3]).astype(np.float32), axis_align=turn)
    raw, moved = replace(scan, axis_align=turn), replace(aligned, frame="aligned")
    for extractor, frame in [(BevRender(), raw), (BevRender(frame="aligned"), moved)]:
        a, b = extractor.prepare("hall", raw), extractor.prepare("hall", moved)
        np.testing.assert_allclose(a["xyz"], b["xyz"], atol=1e-5)
        np.testing.assert_array_equal(a["xyz"], extractor.prepare("hall", replace(frame, axis_align=None))["xyz"])


# Pictures


@pytest.mark.blender
@pytest.mark.parametrize("engine", [pytest.param("workbench", marks=needs_gl), "cycles"])
def test_flat_look_shows_the_very_colours_of_the_vertices(scan, engine):
    extractor = BevRender(look="flat", engine=engine, **SMALL)
    (record,) = render(extractor, scan)
    image = pixels(record)
    view = extractor.prepare("hall", scan)["camera"]
    for point, color in [
        ([3.2, 2.3, 0.2], COLORS["left"]),
        ([6, 4, 0.2], COLORS["right"]),
        ([4, 3.5, 1], (240, 220, 40)),
    ]:
        x, y = view.project(np.array(point)).astype(int)
        np.testing.assert_array_equal(image[y, x], color)
    np.testing.assert_array_equal(image[0, 0], (255, 255, 255))


@needs_gl
@pytest.mark.blender
def test_both_engines_of_the_flat_look_agree():
    images = [pixels(render(BevRender(look="flat", engine=e, **SMALL), uneven(1))[0]).astype(int) for e in ENGINES]
    assert np.abs(images[0] - images[1]).mean() < 0.1, "of 255"


@pytest.mark.blender
def test_official_look_keeps_the_colours_under_a_light(scan):
    """A mesh that comes out grey has lost its vertex colours."""
    extractor = BevRender(samples=4, **SMALL)
    (record,) = render(extractor, scan)
    image = pixels(record)
    assert image.shape == (108, 192, 4)
    assert (image[..., 3] == 255).all()
    assert (image[:3] == 255).all(), "the ground is white"
    view = extractor.prepare("hall", scan)["camera"]
    at = view.project(np.array([[3.2, 2.4, 0.2], [6.0, 3.5, 0.2]])).astype(int)
    left, right = image[at[:, 1], at[:, 0], :3].astype(int)
    assert left[0] > left[1] + 30
    assert left[0] > left[2] + 30
    assert right[2] > right[0] + 30
    assert right[2] > right[1] + 30
    assert np.ptp(image[40:70, 100:140, 2]) > 3, "lit from one side"


@pytest.mark.blender
@pytest.mark.parametrize(
    "settings", [{"samples": 2}, {"look": "flat", "engine": "cycles"}, pytest.param({"look": "flat"}, marks=needs_gl)]
)
def test_same_seed_gives_the_same_bits_in_a_fresh_or_a_used_blender(scan, settings, monkeypatch):
    extractor = BevRender(**settings, **SMALL)
    used = render(extractor, scan, uneven(2), scan)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fresh = render(extractor, scan)
    assert digest(used[0]) == digest(used[2]) == digest(fresh[0])
    assert digest(used[1]) != digest(used[0])
    for name in used[0]:
        assert used[0][name].tolist() == used[2][name].tolist() == fresh[0][name].tolist(), name


@pytest.mark.blender
def test_another_seed_gives_another_picture(scan):
    one, two = (digest(render(BevRender(samples=1, seed=seed, **SMALL), scan)[0]) for seed in (0, 1))
    assert one != two


@pytest.mark.blender
@pytest.mark.parametrize("look", ["official", "flat"])
def test_mesh_from_arrays_looks_as_blenders_own_ply_import(look, tmp_path):
    mesh = uneven(3)
    extractor = BevRender(look=look, engine="cycles", samples=1, **SMALL)
    (record,) = render(extractor, mesh)
    prepared = extractor.prepare("hall", mesh)
    vertices = np.zeros(len(mesh.xyz), [("xyz", "<f4", 3), ("rgb", "u1", 3)])
    vertices["xyz"], vertices["rgb"] = prepared["xyz"], mesh.rgb
    faces = np.zeros(len(mesh.faces), [("n", "u1"), ("i", "<i4", 3)])
    faces["n"], faces["i"] = 3, mesh.faces
    header = (
        f"ply\nformat binary_little_endian 1.0\nelement vertex {len(vertices)}\nproperty float x\nproperty float y\n"
        "property float z\nproperty uchar red\nproperty uchar green\nproperty uchar blue\n"
        f"element face {len(faces)}\nproperty list uchar int vertex_indices\nend_header\n"
    )
    (tmp_path / "mesh.ply").write_bytes(header.encode() + vertices.tobytes() + faces.tobytes())
    script = f"""
import runpy, bpy
program = runpy.run_path({str(PROGRAM)!r})
bpy.ops.wm.read_factory_settings(use_empty=True)
bpy.ops.wm.ply_import(filepath={str(tmp_path / "mesh.ply")!r}, forward_axis="Y", up_axis="Z", import_colors="SRGB")
scene = bpy.context.scene
request = dict(look={look!r}, engine="CYCLES", samples=1, seed=0, denoise={look == "official"}, width=192, height=108,
               lens_mm=45.0, sensor_mm=36.0, camera_z={prepared["camera"].location[2]}, threads=0)
program[{"light_and_composite" if look == "official" else "show_bare_colors"!r}](scene, bpy.data.meshes[0])
program["add_camera"](scene, request)
program["set_engine"](scene, request)
scene.render.filepath = {str(tmp_path / "imported.png")!r}
bpy.ops.render.render(write_still=True)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    np.testing.assert_array_equal(pixels(record), np.array(Image.open(tmp_path / "imported.png")))


@pytest.mark.blender
def test_record_says_how_the_picture_was_made(scan):
    (record,) = render(BevRender(look="flat", engine="cycles", radius="sphere", antialias=True, **SMALL), scan)
    said = json.loads(record["render"].item())
    assert said.pop("blender").startswith("4.5.")
    assert said == {
        "look": "flat", "engine": "CYCLES", "samples": 1, "seed": 0, "denoise": False, "width": 192, "height": 108,
        "lens_mm": 45.0, "sensor_mm": 36.0, "radius": "sphere", "frame": "scan", "view_transform": "Standard",
        "antialias": True,
    }  # fmt: skip
    np.testing.assert_allclose(record["centre"], [5, 3.5, 0.6], atol=1e-6)
    np.testing.assert_allclose(record["camera"], [0, 0, 7 * record["radius"]])


@pytest.mark.blender
def test_our_projection_is_blenders(scan):
    extractor = BevRender(look="flat", engine="cycles", lens_mm=30.0, **SMALL)
    prepared = extractor.prepare("hall", scan)
    from extractors.child import Child

    request = {
        "look": "flat", "engine": "CYCLES", "samples": 1, "seed": 0, "denoise": False, "lens_mm": 30.0,
        "sensor_mm": 36.0, "camera_z": prepared["camera"].location[2], "threads": 0, "blender": "4.5", **SMALL,
        **{name: prepared[name] for name in ("xyz", "rgb", "faces")},
    }  # fmt: skip
    with Child([sys.executable, str(PROGRAM)], name="Blender") as child:
        reply = child.call(request)
    np.testing.assert_allclose(prepared["camera"].projection, reply["projection"], atol=1e-6)


@pytest.mark.parametrize("antialias", [False, True])
def test_input_image_is_resized_as_torchvision_resizes_the_tensor(antialias):
    from torchvision.transforms import Resize, ToTensor

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (108, 192, 4)).astype(np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    wanted = Resize([224, 224], antialias=antialias)(ToTensor()(picture.convert("RGB"))).numpy().transpose(1, 2, 0)
    found = input_image(buffer.getvalue(), antialias)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-6)


# Trouble


@pytest.mark.blender
def test_ten_points_with_faces_are_a_picture():
    rng = np.random.default_rng(0)
    mesh = Scan(
        rng.uniform(0, 1, (10, 3)).astype(np.float32),
        rng.integers(0, 200, (10, 3)).astype(np.uint8),
        np.arange(9, dtype=np.int32).reshape(3, 3),
    )
    (record,) = render(BevRender(look="flat", engine="cycles", **SMALL), mesh)
    assert (pixels(record) < 255).any()


@pytest.mark.blender
def test_two_million_vertices_are_a_picture():
    side = 1415
    x, y = np.meshgrid(np.linspace(0, 8, side), np.linspace(0, 6, side), indexing="ij")
    xyz = np.stack([x, y, 0.1 * np.sin(5 * x)], -1).reshape(-1, 3).astype(np.float32)
    i = np.arange(side * side, dtype=np.int32).reshape(side, side)
    a, b, c, d = i[:-1, :-1].ravel(), i[1:, :-1].ravel(), i[1:, 1:].ravel(), i[:-1, 1:].ravel()
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    rgb = np.full((len(xyz), 3), (10, 120, 30), np.uint8)
    (record,) = render(BevRender(look="flat", **SMALL), Scan(xyz, rgb, faces))
    np.testing.assert_array_equal(pixels(record)[54, 96], (10, 120, 30))


@pytest.fixture
def children(monkeypatch):
    """The helpers that are made during the test."""
    children = []

    class Watched(bev_render.Child):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            children.append(self)

    monkeypatch.setattr(bev_render, "Child", Watched)
    return children


@pytest.mark.blender
def test_blender_that_dies_fails_its_scan_and_the_next_one_is_rendered(scan, children):
    extractor = BevRender(look="flat", engine="cycles", **SMALL)
    run, prepared = extractor.load(), extractor.prepare("hall", scan)
    (before,) = run([prepared])
    os.kill(children[0].pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="Blender"):
        run([prepared])
    (after,) = run([prepared])
    assert digest(before) == digest(after)


@pytest.mark.blender
def test_blender_is_kept_replaced_after_so_many_scans_and_capped(scan, monkeypatch, children):
    monkeypatch.setattr(BevRender, "SCANS_PER_BLENDER", 2)
    extractor = BevRender(look="flat", engine="cycles", **SMALL)
    prepared, pids = extractor.prepare("hall", scan), []
    run = extractor.load()
    for _ in range(3):
        run([prepared])
        pids.append(children[0].pid)
    assert pids[0] == pids[1] != pids[2]
    monkeypatch.setattr(BevRender, "MEMORY_GB", 0.01)
    with pytest.raises(MemoryCapExceeded, match="Blender helper: .* the cap is 0.01"):
        extractor.load()([prepared])


@pytest.mark.blender
def test_without_gl_flat_is_settled_as_cycles_and_workbench_fails(scan, monkeypatch):
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/dev/null")
    gl_works.cache_clear()
    try:
        assert BevRender(look="flat").engine == "cycles"
        with pytest.raises(ChildDied, match="SIGABRT"):
            render(BevRender(look="flat", engine="workbench", **SMALL), scan)
    finally:
        gl_works.cache_clear()


@pytest.mark.blender
def test_another_blender_than_asked_for_is_refused(scan):
    with pytest.raises(MissingPackage, match=r"Blender 3.2 is asked for.*bpy==3.2"):
        render(BevRender(blender="3.2", engine="cycles", **SMALL), scan)


@pytest.mark.blender
def test_missing_blender_is_named_with_its_remedy(scan, monkeypatch, tmp_path: Path):
    (tmp_path / "bpy.py").write_text("raise ImportError('libX11.so.6: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingPackage, match=r"libX11.*pip install 'scenecache\[render\]'"):
        render(BevRender(**SMALL), scan)


def test_blender_never_enters_this_process():
    code = "import sys, extractors.bev_render; sys.exit('bpy' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""SQA3D's bird's-eye render, against pictures that its own Blender file made with Blender 4.4."""

import hashlib
import json

import numpy as np
import pytest

from extractors.bev_camera import BevCamera, centre_and_radius
from extractors.bev_render import BevRender, input_image
from extractors.inputs import Scan

# Another version of Blender differs by more than the noise of one version: with 64 samples, 1.1e-3 is left.
LIMIT = 1.5e-3


@pytest.fixture(scope="module")
def scan(golden) -> Scan:
    """The mesh of the reference, made by the code that the reference file carries."""
    golden.check_recipe("mesh_seed")
    about = json.loads(str(golden.arrays["about"]))
    code: dict = {"__name__": "mesh"}
    exec(about["mesh_code"], code)
    xyz, rgba, faces = code["room"](golden.recipe["mesh_seed"])
    found = {
        "verts float32": hashlib.sha256(xyz.tobytes()).hexdigest()[:16],
        "rgba uint8": hashlib.sha256(rgba.tobytes()).hexdigest()[:16],
        "tris int32": hashlib.sha256(faces.tobytes()).hexdigest()[:16],
    }
    assert found == about["mesh_sha256"]
    return Scan(xyz, rgba[:, :3], faces)


@pytest.mark.golden("bev_render_sqa3d")
def test_camera_sees_the_box_where_the_reference_does(golden, scan):
    centre, radius = centre_and_radius(scan.xyz, "code")
    camera = BevCamera(centre, radius)
    np.testing.assert_allclose(centre, golden.arrays["centre"], atol=1e-6)
    np.testing.assert_allclose(radius, golden.arrays["radius"], atol=1e-6)
    np.testing.assert_allclose(camera.location, golden.arrays["camera_location"], atol=1e-5)
    np.testing.assert_allclose(camera.projection, golden.arrays["projection_matrix"], atol=1e-6)
    np.testing.assert_allclose(
        camera.project(golden.arrays["bbox_corner_xyz"]), golden.arrays["bbox_corner_px"], atol=1e-3
    )


@pytest.mark.blender
@pytest.mark.golden("bev_render_sqa3d")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(4, id="4 samples"),
        pytest.param(BevRender.OFFICIAL_SAMPLES, id="default samples", marks=pytest.mark.slow),
        pytest.param(64, id="64 samples", marks=pytest.mark.slow),
    ],
)
def test_picture_is_the_official_one(golden, scan, samples):
    extractor = BevRender(samples=samples)
    (record,) = extractor.load()([extractor.prepare("room", scan)])

    ours = input_image(record["image"].item()).transpose(2, 0, 1)
    eighth_bit = record["image224"].transpose(2, 0, 1) / 255
    smoothed = input_image(record["image"].item(), antialias=True).transpose(2, 0, 1)
    reference = golden.arrays["rgb224_no_antialias"]
    found = {
        "224": np.abs(ours - reference).mean(),
        "224, 8 bit": np.abs(eighth_bit - reference).mean(),
        "224 antialias": np.abs(smoothed - golden.arrays["rgb224_antialias"]).mean(),
    }
    print(f"{golden.path.name}, {samples} samples, mean absolute difference: {found}")
    assert max(found.values()) <= LIMIT, found

    full = np.array(pixels(record))
    assert full.shape == (1080, 1920, 4)
    assert (full[..., 3] == 255).all()
    y, x = np.nonzero((full[..., :3] < 255).any(-1))
    # the rim, in pixels of 1920 x 1080, is where few samples differ
    np.testing.assert_allclose([x.min(), y.min(), x.max(), y.max()], golden.arrays["content_bbox_px"], atol=2)
    row = np.abs(full[540].astype(float) - golden.arrays["full_row540"]).mean()
    column = np.abs(full[:, 960].astype(float) - golden.arrays["full_col960"]).mean()
    assert max(row, column) < 1.5, f"of 255: row {row}, column {column}"


def pixels(record):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(record["image"].item()))

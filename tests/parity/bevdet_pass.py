"""BEVDet's pass over the key frame of a reference file, every tap caught."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from extractors.base import Weights
from extractors.bevdet import CAMERAS, BEVDet
from extractors.bevdet_network import HEIGHT, WIDTH, BEVDetNetwork
from extractors.center_head import CenterHead
from extractors.image_preprocess import named_views
from extractors.view_transform import frustum, ground_cells, place, splat
from tests.parity.key_frame import read_cameras


def official(state: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The reference's state_dict: four entries are constants of the configuration, not weights by the rule."""
    d, y, x = np.meshgrid(np.arange(1.0, 60), np.linspace(0, 255, 16), np.linspace(0, 703, 44), indexing="ij")
    constants = {
        "dx": np.array([0.8, 0.8, 20.0]),
        "bx": np.array([-50.8, -50.8, 0.0]),
        "nx": np.array([128, 128, 1]),
        "frustum": np.stack([x, y, d], -1),
    }
    for name, value in constants.items():
        assert state[f"img_view_transformer.{name}"].shape == value.shape
        state[f"img_view_transformer.{name}"] = value.astype(np.int64 if name == "nx" else np.float32)
    return {key: torch.from_numpy(value) for key, value in state.items()}


@dataclass(frozen=True)
class Pass:
    """What one pass gives: taps by the reference's names, and `scaled`, the head's maps of a scaled map."""

    taps: dict[str, np.ndarray]
    head: CenterHead
    scaled: dict[str, Tensor]


def run(golden: Any, data_dir: Path, folder: Path) -> Pass:
    """One key frame; the weights come from a checkpoint that is written to `folder`."""
    golden.check_recipe("mirror_images")
    checkpoint = folder / "weights.pth"
    torch.save({"state_dict": official(golden.state())}, checkpoint)
    bevdet = BEVDet(weights=Weights(str(checkpoint)))
    assert bevdet.generation == "bd1"
    network = bevdet.build().ready("cpu")

    views = named_views(read_cameras(data_dir), CAMERAS, "key frame")
    images = [Image.open(view.path) for view in views]
    if golden.recipe.get("mirror_images"):
        images = [ImageOps.mirror(image) for image in images]
    pixels = torch.from_numpy(np.stack([bevdet.fit.apply(image) for image in images]))
    arrays = golden.arrays
    fit = bevdet.fit.matrix(bevdet.image_size)
    np.testing.assert_allclose(np.diag([*np.diag(fit)[:2], 1.0]), arrays["post_rots"][0], atol=1e-6)
    np.testing.assert_allclose([*fit[:2, 2], 0.0], arrays["post_trans"][0], atol=1e-4)
    np.testing.assert_allclose(np.stack([view.to_lidar[:3, :3] for view in views]), arrays["rots"], atol=1e-5)
    np.testing.assert_allclose(np.stack([view.to_lidar[:3, 3] for view in views]), arrays["trans"], atol=1e-4)
    np.testing.assert_allclose(np.stack([view.intrinsic for view in views]), arrays["intrins"], rtol=1e-6)
    calibration = [torch.from_numpy(arrays[name]) for name in ("rots", "trans", "intrins")]
    post = torch.from_numpy(arrays["post_rots"][0]), torch.from_numpy(arrays["post_trans"][0])
    points = place(frustum(HEIGHT, WIDTH), *calibration, *post)
    cells = ground_cells(points, bevdet.ground)[None]

    taps: dict[str, Tensor] = {"geom": points[None]}
    with torch.inference_mode():
        views_taps = [see(network, pixels[i : i + 1]) for i in range(len(pixels))]
        taps |= {name: torch.cat([one[name] for one in views_taps]) for name in views_taps[0]}
        depth, context = taps["depth_prob"][None], taps["context"][None]
        taps["lift"] = splat(depth, context, cells, bevdet.ground)
        assert torch.equal(taps["lift"], network.lift(pixels[None], cells))
        soft_depth, soft_context = network.img_view_transformer(taps["neck"] * 2**-5)
        taps["lift_soft"] = splat(soft_depth[None], soft_context[None], cells, bevdet.ground)
        stages = network.img_bev_encoder_backbone(taps["lift"])
        taps |= {f"bev_stage{i}": stage for i, stage in enumerate(stages, 1)}
        taps["bev_512x64x64"] = network.encode(taps["lift"])
        taps["bev"] = network.up2(taps["bev_512x64x64"])
        head: Any = network.pts_bbox_head
        taps["head.shared"] = head.shared_conv(taps["bev"])
        scaled = head(taps["bev"] * 2**-7)
        for prefix, maps in (("head", head(taps["bev"])), ("head_scaled", scaled)):
            taps |= {f"{prefix}.{name.replace('_', '.')}": value for name, value in maps.items()}
    return Pass({name: value.numpy() for name, value in taps.items()}, head, scaled)


def see(network: BEVDetNetwork, pixels: Tensor) -> dict[str, Tensor]:
    """Taps of `BEVDetNetwork.see`, caught on their way."""
    taps: dict[str, Tensor] = {}

    def keep(name: str, before: bool = False) -> Any:
        return lambda module, inputs, output: taps.__setitem__(name, inputs[0] if before else output)

    parts = (
        (network.img_backbone, keep("img", before=True)),
        (network.img_backbone, lambda module, inputs, output: taps.update(c4=output["c4"], c5=output["c5"])),
        (network.img_neck, keep("neck")),
        (network.img_view_transformer.get_submodule("depthnet"), keep("logits")),
    )
    hooks = [part.register_forward_hook(hook) for part, hook in parts]
    taps["depth_prob"], taps["context"] = network.see(pixels)
    for hook in hooks:
        hook.remove()
    return {**taps, "depth_logits": taps.pop("logits")[:, :59]}

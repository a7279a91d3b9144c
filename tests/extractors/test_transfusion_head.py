import math

import numpy as np
import pytest
import torch

from extractors.boxes3d import CLASSES, footprint
from extractors.checkpoint import seeded_init
from extractors.transfusion_head import BRANCHES, TransFusionHead, local_peaks, raw_outputs

torch.set_num_threads(1)


def small_head(queries: int = 12) -> TransFusionHead:
    head = TransFusionHead(in_channels=6, channels=16, queries=queries, cell=0.5, origin=(-4.0, -2.0)).eval()
    seeded_init(head, 1)
    return head.requires_grad_(False)


def maps(batch: int = 1, height: int = 8, width: int = 16) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(0).standard_normal((batch, 6, height, width)).astype(np.float32))


def peaks_by_definition(heatmap: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(heatmap)
    for label, plane in enumerate(heatmap):
        for y in range(plane.shape[0]):
            for x in range(plane.shape[1]):
                inner = 0 < y < plane.shape[0] - 1 and 0 < x < plane.shape[1] - 1
                peak = inner and plane[y, x] == plane[y - 1 : y + 2, x - 1 : x + 2].max()
                if peak or CLASSES[label] in ("pedestrian", "traffic_cone"):
                    kept[label, y, x] = plane[y, x]
    return kept


def test_peaks_are_those_of_the_definition() -> None:
    heatmap = np.random.RandomState(3).randint(1, 6, (10, 9, 11)).astype(np.float32) / 10  # many ties
    assert np.array_equal(local_peaks(torch.from_numpy(heatmap)[None])[0].numpy(), peaks_by_definition(heatmap))


def test_queries_are_the_best_peaks_with_x_first() -> None:
    head, bev = small_head(), maps()
    outputs = head(bev)
    heatmap = peaks_by_definition(head.heatmap_head(head.shared_conv(bev)).sigmoid()[0].numpy())
    order = np.argsort(-heatmap.ravel(), kind="stable")[:12]
    label, row, column = np.unravel_index(order, heatmap.shape)
    assert np.array_equal(outputs["query_label"][0].numpy(), label)
    assert np.array_equal(outputs["query_heatmap_score"][0].numpy(), heatmap[:, row, column])
    silent = head.prediction_heads[0]["center"][1]
    silent.weight.zero_()
    silent.bias.zero_()
    assert np.array_equal(head(bev)["center"][0].numpy(), np.stack([column + 0.5, row + 0.5]).astype(np.float32))


def test_raw_outputs_have_the_shapes_that_are_told() -> None:
    outputs = small_head()(maps(2))
    assert {name: tuple(value.shape) for name, value in outputs.items()} == {
        name: (2, *shape) for name, shape in raw_outputs(12).items()
    }


def one_query(**values: list[float]) -> dict[str, torch.Tensor]:
    raw = {name: torch.zeros(1, channels, 1) for name, channels in BRANCHES.items()}
    raw |= {"query_heatmap_score": torch.full((1, 10, 1), 0.5), "query_label": torch.tensor([[4]])}
    return raw | {name: torch.tensor(value).reshape(1, -1, 1) for name, value in values.items()}


def test_a_box_is_decoded_by_hand() -> None:
    sizes, logits = [2.0, 5.0, 1.5], [9.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    box = {
        "center": [10.0, 6.0],
        "height": [0.25],
        "dim": np.log(sizes).tolist(),
        "rot": [1.0, 0.0],
        "vel": [3.0, -1.0],
    }
    raw = one_query(**box, heatmap=logits)
    (found,) = small_head().detect(raw)
    wanted = [10 * 0.5 - 4, 6 * 0.5 - 2, 0.25 - 0.75, *sizes, math.pi / 2, 3, -1]
    np.testing.assert_allclose(found.boxes[0], wanted, atol=1e-6)
    assert found.labels.tolist() == [4], "of the query's class alone"
    np.testing.assert_allclose(found.scores, [0.5 / (1 + math.exp(-1))], atol=1e-6)
    *_, along, across, heading = footprint(found.boxes, "mmdet3d-0.x")[0]
    np.testing.assert_allclose([along, across, math.cos(heading), math.sin(heading)], [5, 2, -1, 0], atol=1e-6)


@pytest.mark.parametrize(("height", "kept"), [(0.0, 1), (10.5, 1), (10.51, 0), (-9.5, 1), (-9.51, 0)])
def test_boxes_out_of_range_are_left_out(height: float, kept: int) -> None:
    (found,) = small_head().detect(one_query(height=[height]))
    assert len(found.boxes) == kept


def test_a_map_alone_gives_what_it_gives_in_a_batch() -> None:
    head, bev = small_head(), maps(3)
    together = head.detect(head(bev))
    for one, found in zip(bev, together, strict=True):
        (alone,) = head.detect(head(one[None]))
        np.testing.assert_allclose(alone.boxes, found.boxes, rtol=1e-5, atol=1e-5)
        assert np.array_equal(alone.labels, found.labels)


def test_kept_outputs_are_decoded_alike_as_floats() -> None:
    head = small_head()
    outputs = head(maps())
    kept = {name: value.float() for name, value in outputs.items()}
    assert np.array_equal(head.detect(kept)[0].boxes, head.detect(outputs)[0].boxes)

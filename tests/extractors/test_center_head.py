import math
from typing import Any

import numpy as np
import pytest
import torch

from extractors.bev_detector import Grid
from extractors.boxes3d import CLASSES
from extractors.center_head import TASKS, CenterHead, Suppression, output_shapes
from extractors.errors import InvalidValues

torch.set_num_threads(1)
GRID = Grid(8, 10, 12, 0.5, (-3.0, -2.5), "lidar")
CIRCLE = Suppression("circle", squared_distance=1.0)


def head(*rules: Suppression, **settings: Any) -> CenterHead:
    return CenterHead(GRID, settings.pop("convention", "mmdet3d-1.0"), rules or [CIRCLE] * 6, **settings).eval()


def nothing(batch: int = 1, tasks: Any = TASKS) -> dict[str, torch.Tensor]:
    """Raw maps in which nothing scores."""
    maps = {name: torch.zeros(batch, *shape) for name, shape in output_shapes(GRID, tasks).items()}
    for name, value in maps.items():
        if name.endswith("heatmap"):
            value.fill_(-9.0)
    return maps


def put(
    maps: dict[str, torch.Tensor], task: int, y: int, x: int, score: float, channel: int = 0, **values: Any
) -> None:
    """A peak and what is said there, in map 0."""
    maps[f"task{task}_heatmap"][0, channel, y, x] = math.log(score / (1 - score))
    for name, value in values.items():
        maps[f"task{task}_{name}"][0, :, y, x] = torch.tensor(value, dtype=torch.float32)


def test_a_peak_becomes_a_box() -> None:
    maps = nothing()
    size = (math.log(2), math.log(0.5), math.log(3))
    put(maps, 1, 4, 7, 0.8, 1, reg=(0.25, 0.5), height=[-1.0], dim=size, rot=(1.0, 0.0), vel=(3.0, -4.0))
    (found,) = head().detect(maps)
    expected = [7.25 * 0.5 - 3, 4.5 * 0.5 - 2.5, -1 - 1.5, 2, 0.5, 3, math.pi / 2, 3, -4]
    np.testing.assert_allclose(found.boxes, [expected], rtol=1e-6)
    np.testing.assert_allclose(found.scores, [0.8], rtol=1e-6)
    assert CLASSES[found.labels[0]] == "construction_vehicle"
    assert (found.boxes.dtype, found.scores.dtype, found.labels.dtype) == (np.float32, np.float32, np.int64)


def test_labels_follow_names_not_positions() -> None:
    tasks = (("pedestrian", "car"),)
    maps = nothing(tasks=tasks)
    put(maps, 0, 2, 2, 0.9, 0)
    put(maps, 0, 7, 9, 0.8, 1)
    (found,) = head(CIRCLE, tasks=tasks).detect(maps)
    assert [CLASSES[label] for label in found.labels] == ["pedestrian", "car"]


def test_results_come_task_by_task_and_by_score_inside_a_task() -> None:
    maps = nothing()
    for task, score in ((4, 0.9), (0, 0.3), (2, 0.6)):
        put(maps, task, 1, 1, score)
        put(maps, task, 8, 8, score + 0.05)
    (found,) = head().detect(maps)
    np.testing.assert_allclose(found.scores, [0.35, 0.3, 0.65, 0.6, 0.95, 0.9], rtol=1e-5)
    assert found.labels.tolist() == [0, 0, 3, 3, 6, 6]


def test_a_score_at_the_threshold_goes_and_a_centre_at_the_limit_stays() -> None:
    maps = nothing()
    put(maps, 0, 3, 3, 0.5, height=[0.0])
    found = head(score_threshold=0.5).detect(maps)[0]
    assert len(found.scores) == 0
    limits = (-1.5, -1.0, -2.0, 0.0, 0.0, 2.0)
    put(maps, 0, 3, 3, 0.5, height=[2.0])  # at x = -1.5, y = -1
    assert len(head(centre_range=limits).detect(maps)[0].scores) == 1
    put(maps, 0, 3, 3, 0.5, height=[2.001])
    assert len(head(centre_range=limits).detect(maps)[0].scores) == 0


def test_the_best_of_all_classes_are_candidates() -> None:
    maps = nothing()
    rng = np.random.RandomState(0)
    maps["task1_heatmap"][0] = torch.from_numpy(rng.randn(2, 10, 12).astype(np.float32))
    found = head(candidates=30, score_threshold=0.0).decode(maps, 1)[0]
    scores = maps["task1_heatmap"][0].sigmoid().numpy()
    np.testing.assert_array_equal(found.scores, np.sort(scores.ravel())[::-1][:30])
    np.testing.assert_array_equal(scores[found.labels, found.cells // 12, found.cells % 12], found.scores)


def test_equal_scores_come_in_the_order_of_class_and_cell() -> None:
    maps = nothing()
    maps["task1_heatmap"].fill_(0.0)
    found = head(candidates=130).decode(maps, 1)[0]
    assert found.labels.tolist() == [0] * 120 + [1] * 10
    assert found.cells.tolist() == [*range(120), *range(10)]


def test_circles_suppress_by_squared_distance_within_a_task() -> None:
    maps = nothing()
    put(maps, 1, 2, 2, 0.9, 0)
    put(maps, 1, 2, 4, 0.8, 1)  # a metre away, another class of the task
    put(maps, 1, 2, 5, 0.7, 0)
    put(maps, 2, 2, 2, 0.6, 0)
    (found,) = head().detect(maps)
    np.testing.assert_allclose(found.scores, [0.9, 0.7, 0.6], rtol=1e-5)


def test_footprints_are_those_of_the_convention() -> None:
    """Long boxes one behind the other along the diagonal; the two conventions turn them to opposite sides."""
    maps = nothing()
    for cell, score in ((2, 0.9), (4, 0.8)):
        put(maps, 0, cell, cell, score, dim=(math.log(0.2), math.log(4.0), 0.0), rot=(1.0, 1.0))
    rules = [Suppression("rotate", iou=0.2)] * 6
    assert len(head(*rules, convention="mmdet3d-1.0").detect(maps)[0].scores) == 2
    assert len(head(*rules, convention="mmdet3d-0.x").detect(maps)[0].scores) == 1


def test_extents_are_scaled_for_suppression_only() -> None:
    maps = nothing()
    size = (math.log(0.8), math.log(0.8), 0.0)
    for channel, (x, score) in enumerate(((2, 0.9), (4, 0.8))):
        put(maps, 5, 5, x, score, channel, dim=size, rot=(0.0, 1.0))
    plain = [Suppression("rotate", iou=0.2)] * 6
    scaled = [*plain[:5], Suppression("rotate", iou=0.2, scale=(4.5, 9.0))]
    assert len(head(*plain).detect(maps)[0].scores) == 2
    (found,) = head(*scaled).detect(maps)
    np.testing.assert_allclose(found.boxes[:, 3:6], [[0.8, 0.8, 1.0]], rtol=1e-5)


def test_counts_before_and_after_suppression_are_capped() -> None:
    maps = nothing()
    maps["task0_heatmap"].fill_(2.0)
    tiny = Suppression("circle", squared_distance=1e-6, post=7)
    assert len(head(tiny, *[CIRCLE] * 5).detect(maps)[0].scores) == 7
    few = Suppression("rotate", pre=5)
    assert len(head(few, *[CIRCLE] * 5).detect(maps)[0].scores) <= 5


def test_nothing_found_is_an_empty_answer() -> None:
    (found,) = head().detect(nothing())
    assert found.boxes.shape == (0, 9)
    assert found.scores.shape == found.labels.shape == (0,)
    assert len(head(*[Suppression("rotate")] * 6).detect(nothing())[0].scores) == 0


def test_maps_of_a_batch_are_decoded_on_their_own() -> None:
    torch.manual_seed(0)
    maps = {name: torch.randn(3, *shape) for name, shape in output_shapes(GRID).items()}
    together = head().detect(maps)
    for i, found in enumerate(together):
        (alone,) = head().detect({name: value[i : i + 1] for name, value in maps.items()})
        for name in ("boxes", "scores", "labels"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(found, name))
    assert len({len(found.scores) for found in together}) > 1


@pytest.mark.parametrize("name", ["task0_heatmap", "task3_reg", "task5_rot"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_no_numbers_are_refused(name: str, bad: float) -> None:
    maps = nothing()
    for task in range(6):
        put(maps, task, 5, 5, 0.9)
    maps[name][0, 0, 5, 5] = bad
    with pytest.raises(InvalidValues, match="NaN or infinity"):
        head().detect(maps)


def test_a_box_as_large_as_floats_go_does_not_disturb_the_others() -> None:
    maps = nothing()
    put(maps, 0, 5, 5, 0.9, dim=(200.0, 200.0, 200.0), rot=(0.0, 1.0))
    put(maps, 0, 1, 1, 0.8, rot=(0.0, 1.0))
    for rule in (CIRCLE, Suppression("rotate")):
        (found,) = head(*[rule] * 6).detect(maps)
        np.testing.assert_allclose(found.scores, [0.9, 0.8], rtol=1e-5)


def test_forward_gives_the_maps_that_are_declared() -> None:
    with torch.inference_mode():
        outputs = head()(torch.randn(2, 8, 10, 12))
    assert {name: tuple(value.shape[1:]) for name, value in outputs.items()} == output_shapes(GRID)
    assert list(outputs) == list(output_shapes(GRID))


def test_rows_are_y_and_columns_are_x() -> None:
    """An impulse in the map is found where it was put."""
    network = head(*[CIRCLE] * 6, score_threshold=0.6)
    for key, value in network.state_dict().items():
        if value.ndim == 4:
            value.zero_()
            value[:, :, 1, 1] = 1.0 if "heatmap" in key or "shared" in key else 0.0
        elif key.endswith("1.bias"):
            value.zero_()
    bev = torch.zeros(1, 8, 10, 12)
    bev[0, 0, 3, 9] = 1
    with torch.inference_mode():
        (found,) = network.detect(network(bev))
    assert len(found.scores) == 6
    np.testing.assert_allclose(found.boxes[:, :2], [[9 * 0.5 - 3, 3 * 0.5 - 2.5]] * 6, atol=1e-6)


def test_every_task_needs_its_rule() -> None:
    with pytest.raises(ValueError, match="2 ways of suppression for 6 tasks"):
        head(CIRCLE, CIRCLE)


@pytest.mark.parametrize("threshold", [0.1, 0.6, 1.0])
def test_looking_at_peaks_alone_finds_what_whole_maps_give(threshold: float) -> None:
    """Candidates lie in the corners and at the rim too, and maps of a batch have different numbers of them."""
    torch.manual_seed(0)
    network = head(score_threshold=threshold)
    for value in network.state_dict().values():
        if value.ndim == 1 and value.is_floating_point():
            value.uniform_(0.5, 1.5)
    bev = torch.randn(3, 8, 10, 12) * torch.tensor([0.1, 1.0, 3.0]).view(3, 1, 1, 1)
    with torch.inference_mode():
        for heads in network.task_heads:  # spread scores around the thresholds
            heatmap = heads["heatmap"]
            heatmap[1].bias.zero_()
            values = heatmap(network.shared_conv(bev))
            heatmap[1].weight.div_(values.std())
            heatmap[1].bias.sub_(values.mean() / values.std())
        whole, quick = network.detect(network(bev)), network.find(bev)
    assert len({len(one.labels) for one in whole}) > (threshold < 1)
    for one, other in zip(whole, quick, strict=True):
        np.testing.assert_array_equal(one.labels, other.labels)
        np.testing.assert_allclose(one.boxes, other.boxes, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5)

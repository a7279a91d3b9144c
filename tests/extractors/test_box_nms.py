from typing import Any

import numpy as np
import pytest

from extractors.box_nms import circle_nms, rotated_iou, rotated_nms


def corners(box: np.ndarray) -> np.ndarray:
    x, y, along, across, turn = box
    points = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) * [along / 2, across / 2]
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    return points @ rotation.T + [x, y]


def area(polygon: list[np.ndarray]) -> float:
    return 0.5 * sum(
        a[0] * b[1] - b[0] * a[1] for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True)
    )  # fmt: skip


def clipped_iou(a: np.ndarray, b: np.ndarray) -> float:
    """Sutherland and Hodgman: cut the one outline by each side of the other."""
    polygon = list(corners(a))
    fence = corners(b)
    for start, end in zip(fence, np.roll(fence, -1, 0), strict=True):
        side = [(end[0] - start[0]) * (p[1] - start[1]) - (end[1] - start[1]) * (p[0] - start[0]) for p in polygon]
        cut = []
        for i, point in enumerate(polygon):
            j = (i + 1) % len(polygon)
            if side[i] >= 0:
                cut.append(point)
            if side[i] * side[j] < 0:
                cut.append(point + (polygon[j] - point) * side[i] / (side[i] - side[j]))
        polygon = cut
    both = area(polygon) if len(polygon) > 2 else 0.0
    return both / (a[2] * a[3] + b[2] * b[3] - both)


def random_boxes(count: int, seed: int, spread: float = 3.0) -> np.ndarray:
    rng = np.random.RandomState(seed)
    return np.column_stack(
        [rng.uniform(-spread, spread, (count, 2)), rng.uniform(0.3, 5, (count, 2)), rng.uniform(-9, 9, count)]
    )


def loop_nms(conflict: np.ndarray, scores: np.ndarray) -> list[int]:
    kept: list[int] = []
    for row in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if not any(conflict[better, row] for better in kept):
            kept.append(row)
    return kept


def test_overlap_is_that_of_clipped_outlines() -> None:
    a, b = random_boxes(60, 0), random_boxes(50, 1)
    expected = np.array([[clipped_iou(one, two) for two in b] for one in a])
    assert (expected > 0).mean() > 0.3
    np.testing.assert_allclose(rotated_iou(a, b), expected, atol=1e-12)


MOVED = [((0, 0), 1.0), ((2, 0), 1 / 3), ((4, 0), 0.0), ((0, 1), 1 / 3), ((2, 1), 1 / 7)]


@pytest.mark.parametrize("turn", [0.0, 0.3, np.pi / 4, np.pi / 2, np.pi, -2.0])
@pytest.mark.parametrize(("move", "overlap"), MOVED)
def test_rectangles_that_share_sides_have_the_plain_overlap(turn: float, move: Any, overlap: float) -> None:
    cos, sin = np.cos(turn), np.sin(turn)
    box = np.array([[5.0, -7.0, 4.0, 2.0, turn]])
    step = np.array([cos * move[0] - sin * move[1], sin * move[0] + cos * move[1], 0, 0, np.pi])
    assert rotated_iou(box, box + step)[0, 0] == pytest.approx(overlap, abs=1e-9)


def test_nested_crossing_and_far_rectangles() -> None:
    big = np.array([[0.0, 0, 4, 4, 0.7]])
    others = np.array([[0.1, 0, 1, 2, -0.4], [0, 0, 8, 1, 0.7], [1e4, 0, 4, 4, 0], [0, 0, 4, 4, 0.7 + np.pi / 4]])
    octagon = 16 * (2 * np.sqrt(2) - 2)
    expected = [2 / 16, 4 / 20, 0, octagon / (32 - octagon)]
    np.testing.assert_allclose(rotated_iou(big, others)[0], expected, atol=1e-12)


def test_overlap_far_from_the_origin_keeps_its_digits() -> None:
    a, b = random_boxes(20, 2), random_boxes(20, 3)
    far = np.array([1e5, -1e5, 0, 0, 0])
    np.testing.assert_allclose(rotated_iou(a + far, b + far), rotated_iou(a, b), atol=1e-8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
@pytest.mark.parametrize("column", [2, 3])
def test_rectangles_without_an_area_overlap_with_nothing(bad: float, column: int) -> None:
    boxes = random_boxes(3, 4, 0.1)
    boxes[1, column] = bad
    overlap = rotated_iou(boxes, boxes)
    assert overlap[0, 2] > 0
    assert not overlap[1, [0, 2]].any()
    assert np.isfinite(overlap).all()


def test_no_rectangles_have_no_overlaps() -> None:
    none = np.zeros((0, 5))
    assert rotated_iou(none, random_boxes(3, 0)).shape == (0, 3)
    assert len(rotated_nms(none, np.zeros(0), 0.2)) == 0
    assert len(circle_nms(none[:, :2], np.zeros(0), 1.0)) == 0


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
def test_rotated_suppression_is_the_greedy_loop(threshold: float) -> None:
    boxes, scores = random_boxes(80, 5), np.round(np.random.RandomState(6).rand(80), 1)  # with ties
    expected = loop_nms(np.array([[clipped_iou(a, b) > threshold for b in boxes] for a in boxes]), scores)
    assert 1 < len(expected) < 80
    assert rotated_nms(boxes, scores, threshold).tolist() == expected
    assert rotated_nms(boxes, scores, threshold, post=2).tolist() == expected[:2]


def test_only_the_best_take_part() -> None:
    boxes, scores = random_boxes(50, 7), np.random.RandomState(8).rand(50)
    best = np.argsort(-scores)[:10]
    alone = best[rotated_nms(boxes[best], scores[best], 0.1)]
    np.testing.assert_array_equal(rotated_nms(boxes, scores, 0.1, pre=10), alone)


def test_a_box_at_exactly_the_threshold_stays() -> None:
    boxes = np.array([[0.0, 0, 2, 2, 0], [1, 0, 2, 2, 0]])  # share 2 of 6
    overlap = rotated_iou(boxes, boxes)[0, 1]
    assert rotated_nms(boxes, np.array([0.9, 0.8]), overlap).tolist() == [0, 1]
    assert rotated_nms(boxes, np.array([0.9, 0.8]), np.nextafter(overlap, 0)).tolist() == [0]


@pytest.mark.parametrize("threshold", [0.1, 1.0, 4.0])
def test_circle_suppression_is_the_greedy_loop_on_squared_distances(threshold: float) -> None:
    rng = np.random.RandomState(9)
    centres, scores = rng.uniform(-6, 6, (100, 2)).astype(np.float32), np.round(rng.rand(100), 1)
    squared = ((centres[:, None] - centres) ** 2).sum(2)
    expected = loop_nms(squared <= threshold, scores)
    assert len(expected) < 100
    assert circle_nms(centres, scores, threshold).tolist() == expected
    assert circle_nms(centres, scores, threshold, post=5).tolist() == expected[:5]


def test_the_circle_threshold_is_squared_and_its_rim_suppresses() -> None:
    centres, scores = np.array([[0.0, 0], [2, 0], [0, 2.1]]), np.array([0.9, 0.8, 0.7])
    assert circle_nms(centres, scores, 4.0).tolist() == [0, 2]


def test_a_suppressed_box_suppresses_nothing() -> None:
    centres, scores = np.array([[0.0, 0], [1, 0], [2, 0]]), np.array([0.9, 0.8, 0.7])
    assert circle_nms(centres, scores, 1.0).tolist() == [0, 2]

import numpy as np
import pytest

from extractors.detection import detect_mmdet3d, detect_votenet, nms, points_in_boxes, softmax
from extractors.votenet_boxes import Boxes, decode


def boxes(center: np.ndarray, size: np.ndarray, objectness: np.ndarray, label: np.ndarray) -> Boxes:
    """Boxes with given object logits and a clear class each."""
    n = len(center)
    semantics = np.zeros((n, 18), np.float32)
    semantics[np.arange(n), label] = 5
    nothing = np.zeros((n, 1), np.float32)
    return Boxes(
        center.astype(np.float32),
        size.astype(np.float32),
        size_class=np.zeros(n, np.int64),
        size_scores=np.zeros((n, 18), np.float32),
        size_residuals_normalized=np.zeros((n, 18, 3), np.float32),
        heading_score=nothing,
        heading_residual_normalized=nothing,
        objectness=np.stack([np.zeros(n), objectness], 1).astype(np.float32),
        semantics=semantics,
    )


def iou(a: np.ndarray, b: np.ndarray) -> float:
    """Of two boxes (centre, size), one by one."""
    low = np.maximum(a[:3] - a[3:] / 2, b[:3] - b[3:] / 2)
    high = np.minimum(a[:3] + a[3:] / 2, b[:3] + b[3:] / 2)
    sides = [max(0.0, float(side)) for side in high - low]
    common = float(np.prod(sides))
    return common / (float(np.prod(a[3:])) + float(np.prod(b[3:])) - common)


def test_points_in_boxes_equals_a_plain_loop() -> None:
    rng = np.random.RandomState(0)
    points = rng.rand(4000, 3).astype(np.float32) * 4
    center, size = rng.rand(60, 3).astype(np.float32) * 4, (rng.rand(60, 3).astype(np.float32) - 0.1) * 2
    expected = [int((np.abs(points - c) < s / 2).all(1).sum()) for c, s in zip(center, size, strict=True)]
    assert points_in_boxes(points, center, size).tolist() == expected
    assert min(expected) == 0 < max(expected)


def test_faces_belong_to_a_box_in_z_alone() -> None:
    points = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, -1], [0, 0, 0]], np.float32)
    assert points_in_boxes(points, np.zeros((1, 3), np.float32), np.full((1, 3), 2, np.float32)).tolist() == [3]


def test_suppression_equals_a_plain_loop() -> None:
    rng = np.random.RandomState(0)
    center, size, score, label = rng.rand(80, 3) * 2, rng.rand(80, 3) + 0.2, rng.rand(80), rng.randint(0, 3, 80)
    whole = np.concatenate([center, size], 1)
    kept: list[int] = []
    for i in np.argsort(-score):
        if all(label[i] != label[k] or iou(whole[i], whole[k]) <= 0.25 for k in kept):
            kept.append(int(i))
    assert nms(center - size / 2, center + size / 2, score, label).tolist() == kept
    assert 10 < len(kept) < 80


def test_suppression_of_nothing_is_nothing() -> None:
    assert nms(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0), np.zeros(0, int)).tolist() == []


def test_boxes_without_volume_do_not_disturb() -> None:
    low = np.zeros((3, 3))
    assert sorted(nms(low, low.copy(), np.array([0.1, 0.2, 0.3]), np.zeros(3, int)).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(("points", "mmdet3d", "votenet"), [(4, 0, 0), (5, 0, 1), (6, 1, 1)])
def test_the_families_differ_in_how_many_points_a_box_needs(points: int, mmdet3d: int, votenet: int) -> None:
    cloud = np.random.RandomState(0).rand(points, 3).astype(np.float32) * 0.5
    one = boxes(np.zeros((1, 3)), np.full((1, 3), 2), np.array([3.0]), np.array([0]))
    assert len(detect_mmdet3d(one, cloud).proposal) == mmdet3d
    assert len(detect_votenet(one, cloud).proposal) == votenet


def test_a_negative_size_is_empty_for_mmdet3d_and_counts_by_its_amount_for_votenet() -> None:
    cloud = np.random.RandomState(0).rand(50, 3).astype(np.float32) * 0.5
    one = boxes(np.zeros((1, 3)), np.array([[-2, 2, 2]]), np.array([3.0]), np.array([0]))
    assert detect_mmdet3d(one, cloud).proposal.tolist() == []
    assert detect_votenet(one, cloud).proposal.tolist() == [0]


def test_an_unlikely_object_is_dropped_and_hides_no_other() -> None:
    cloud = np.random.RandomState(0).rand(90, 3).astype(np.float32)
    two = boxes(np.array([[0.5] * 3, [0.52] * 3]), np.ones((2, 3)), np.array([-4.0, 2.0]), np.array([1, 1]))
    found = detect_mmdet3d(two, cloud)
    assert found.proposal.tolist() == [1]
    alone = boxes(np.array([[0.5] * 3]), np.ones((1, 3)), np.array([-4.0]), np.array([1]))
    assert detect_mmdet3d(alone, cloud).proposal.tolist() == []


def test_detections_carry_bottom_centre_and_scores_per_class() -> None:
    cloud = np.random.RandomState(0).rand(90, 3).astype(np.float32)
    one = boxes(np.full((1, 3), 0.5), np.ones((1, 3)), np.array([2.0]), np.array([7]))
    found = detect_votenet(one, cloud)
    assert found.bottom_center.tolist() == [[0.5, 0.5, 0.0]]
    assert found.class_scores.sum() == pytest.approx(found.objectness[0])
    assert found.class_scores.argmax() == 7


def test_head_channels_are_read_in_the_official_order() -> None:
    raw = np.zeros((1, 97), np.float32)
    raw[0, :2], raw[0, 2:5], raw[0, 5:7] = [1, 2], [0.1, 0.2, 0.3], [7, 0.5]
    raw[0, 7 + 4], raw[0, 25 + 3 * 4 : 25 + 3 * 5], raw[0, 79 + 9] = 3, [1, 0, -0.5], 2
    means = np.arange(54, dtype=np.float32).reshape(18, 3) + 1
    found = decode(raw, np.array([[1.0, 1, 1]], np.float32), means)
    assert found.mask.tolist() == [True]
    assert found.size_class.tolist() == [4]
    assert found.sem_class.tolist() == [9]
    np.testing.assert_allclose(found.center, [[1.1, 1.2, 1.3]], rtol=1e-6)
    np.testing.assert_allclose(found.size, [[26, 14, 7.5]])
    assert (found.heading_score.item(), found.heading_residual_normalized.item()) == (7, 0.5)


def test_softmax_of_large_logits_is_finite() -> None:
    np.testing.assert_allclose(softmax(np.array([[1e4, 0.0], [0.0, 0.0]])), [[1, 0], [0.5, 0.5]])

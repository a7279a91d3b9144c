"""From proposals to detections: points in boxes, non-maximum suppression, and the official post-processing; numpy only.

Boxes are axis-aligned (ScanNet's have no heading): centre and size, metres, z up, any frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extractors.votenet_boxes import Boxes

NMS_IOU = 0.25
MIN_OBJECTNESS = 0.05


@dataclass(frozen=True)
class Detections:
    """Kept boxes, in proposal order.

    Attributes:
        proposal: (kept,) int64, which proposal each is.
        bottom_center: (kept, 3) float32: x and y of the centre, z of the bottom.
        size: (kept, 3) float32, not clamped.
        objectness: (kept,) float32, probability.
        class_scores: (kept, 18) float32: objectness times class probability; the official metrics count each box once
            per class with these scores.
    """

    proposal: np.ndarray
    bottom_center: np.ndarray
    size: np.ndarray
    objectness: np.ndarray
    class_scores: np.ndarray


def detect_mmdet3d(boxes: Boxes, points: np.ndarray) -> Detections:
    """mmdetection3d: boxes with 5 points or fewer go first, then NMS within the argmax class ranked by objectness, then
    an objectness of 0.05 or less goes.

    Args:
        boxes: the proposals of one scan.
        points: (point, 3) float32, what the network saw.
    """
    keep = points_in_boxes(points, boxes.center, boxes.size) > 5
    return _detections(boxes, _suppress(boxes, keep))


def detect_votenet(boxes: Boxes, points: np.ndarray) -> Detections:
    """VoteNet and ScanQA (`parse_predictions`): likewise, but 5 points are enough, and sizes count by their amount.

    Faces of a box belong to it here in z and not in x and y, in the original all do: a matter of equal floats.
    """
    keep = points_in_boxes(points, boxes.center, np.abs(boxes.size)) >= 5
    return _detections(boxes, _suppress(boxes, keep))


def _suppress(boxes: Boxes, keep: np.ndarray) -> np.ndarray:
    """Indices of the proposals that survive NMS among those to keep, and reach the least objectness."""
    score = softmax(boxes.objectness)[:, 1]
    candidates = np.flatnonzero(keep)
    half = np.abs(boxes.size) / 2
    low, high = boxes.center - half, boxes.center + half
    kept = candidates[nms(low[keep], high[keep], score[keep], boxes.sem_class[keep])]
    return np.sort(kept[score[kept] > MIN_OBJECTNESS])


def _detections(boxes: Boxes, kept: np.ndarray) -> Detections:
    objectness = softmax(boxes.objectness[kept])[:, 1]
    bottom = boxes.center[kept].copy()
    bottom[:, 2] -= boxes.size[kept, 2] / 2
    return Detections(
        proposal=kept,
        bottom_center=bottom,
        size=boxes.size[kept],
        objectness=objectness,
        class_scores=objectness[:, None] * softmax(boxes.semantics[kept]),
    )


def nms(low: np.ndarray, high: np.ndarray, score: np.ndarray, label: np.ndarray, iou: float = NMS_IOU) -> np.ndarray:
    """Greedy non-maximum suppression within each label: a box goes if its IoU with a better, kept one is above `iou`.

    Args:
        low, high: (box, 3) opposite corners, low <= high.
        score: (box,); of equals the later box ranks first.
        label: (box,) int.
        iou: intersection over union, of volumes.

    Returns:
        Indices of the kept boxes, best first.
    """
    order = np.argsort(score, kind="stable")[::-1]
    volume = (high - low).prod(1)
    kept = []
    while len(order):
        best, rest = order[0], order[1:]
        kept.append(best)
        overlap = np.clip(np.minimum(high[best], high[rest]) - np.maximum(low[best], low[rest]), 0, None).prod(1)
        union = volume[best] + volume[rest] - overlap
        ratio = np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)
        order = rest[(ratio <= iou) | (label[rest] != label[best])]
    return np.array(kept, dtype=np.int64)


def points_in_boxes(points: np.ndarray, center: np.ndarray, size: np.ndarray) -> np.ndarray:
    """How many points each box holds: strictly inside in x and y, faces included in z (mmcv's predicate).

    Args:
        points: (point, 3) float32.
        center, size: (box, 3) float32; a box with a negative size holds none.

    Returns:
        (box,) int64.
    """
    along_x = points[np.argsort(points[:, 0], kind="stable")]
    x = np.ascontiguousarray(along_x[:, 0])
    half = size / 2
    # mmcv goes from the bottom face back to the middle, which rounds
    middle = np.append(center[:, :2], ((center[:, 2] - half[:, 2]) + half[:, 2])[:, None], axis=1)
    slack = np.abs(half[:, 0]) * 1e-3 + np.abs(center[:, 0]) * 1e-5
    begin = np.searchsorted(x, (middle[:, 0] - half[:, 0] - slack).astype(x.dtype))
    end = np.searchsorted(x, (middle[:, 0] + half[:, 0] + slack).astype(x.dtype), side="right")
    counts = np.zeros(len(center), np.int64)
    for i, (b, e) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        distance = np.abs(along_x[b:e] - middle[i])
        counts[i] = np.count_nonzero(
            (distance[:, 0] < half[i, 0]) & (distance[:, 1] < half[i, 1]) & (distance[:, 2] <= half[i, 2])
        )
    return counts


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in the logits' dtype."""
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: np.ndarray = exponential / exponential.sum(-1, keepdims=True)
    return probabilities

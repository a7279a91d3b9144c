"""What VoteNet's head says: its channels, read as boxes; numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLASSES = 18
HEAD_CHANNELS = 2 + 3 + 1 + 1 + CLASSES + 3 * CLASSES + CLASSES


@dataclass(frozen=True)
class Boxes:
    """The proposals of one scan, in the frame of its points.

    Attributes:
        center: (proposal, 3) float32, metres, middle of the box.
        size: (proposal, 3) float32, metres, of the likeliest size class; not clamped, so an untrained or unsure network
            may give negative sizes.
        size_class: (proposal,) int64.
        size_scores: (proposal, 18) float32.
        size_residuals_normalized: (proposal, 18, 3) float32, in mean sizes.
        heading_score, heading_residual_normalized: (proposal, 1) float32; one bin, and on ScanNet the angle is 0.
        objectness: (proposal, 2) float32 logits: background, object.
        semantics: (proposal, 18) float32 logits.
    """

    center: np.ndarray
    size: np.ndarray
    size_class: np.ndarray
    size_scores: np.ndarray
    size_residuals_normalized: np.ndarray
    heading_score: np.ndarray
    heading_residual_normalized: np.ndarray
    objectness: np.ndarray
    semantics: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """(proposal,) bool: more object than background (`bbox_mask` of ScanQA)."""
        return self.objectness.argmax(1) == 1

    @property
    def sem_class(self) -> np.ndarray:
        """(proposal,) int64: the likeliest semantic class."""
        return self.semantics.argmax(1)


def decode(raw: np.ndarray, centres: np.ndarray, mean_sizes: np.ndarray) -> Boxes:
    """Read the head's channels.

    Args:
        raw: (proposal, 97) float32: objectness 2, centre 3, heading score and residual, size scores 18, size residuals
            18 x 3, semantics 18.
        centres: (proposal, 3) float32: `aggregated_vote_xyz`.
        mean_sizes: (18, 3) metres.
    """
    residuals = raw[:, 25:79].reshape(-1, CLASSES, 3)
    size_class = raw[:, 7:25].argmax(1)
    means = mean_sizes.astype(np.float32)[size_class]
    chosen = residuals[np.arange(len(raw)), size_class]
    return Boxes(
        center=centres + raw[:, 2:5],
        size=means + chosen * means,
        size_class=size_class,
        size_scores=raw[:, 7:25],
        size_residuals_normalized=residuals,
        heading_score=raw[:, 5:6],
        heading_residual_normalized=raw[:, 6:7],
        objectness=raw[:, :2],
        semantics=raw[:, 79:],
    )

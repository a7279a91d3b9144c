"""Object features against those of the published helper and of the exact rule, over made-up maps and boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from extractors.crop import cells_under, crop

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def bev(golden: Any) -> torch.Tensor:
    """The map that the recipe describes."""
    golden.check_recipe("map_seed")
    noise = np.random.RandomState(golden.recipe["map_seed"]).standard_normal((512, 180, 180))
    bev = torch.from_numpy(noise.astype(np.float32))
    assert np.array_equal(bev.flatten()[golden.arrays["map.probe_index"]], golden.arrays["map.probe"])
    return bev


def _error(ours: torch.Tensor, reference: np.ndarray) -> float:
    """Largest relative error of a row."""
    ours = ours.double().numpy()
    size = np.linalg.norm(reference.astype(np.float64), axis=1)
    off = np.linalg.norm(ours - reference, axis=1)
    return float(np.max(off / np.where(size > 0, size, 1), initial=0))


@pytest.mark.golden("bev_crop")
def test_exact_cells_and_features_are_the_reference(golden: Any, bev: torch.Tensor) -> None:
    ref = golden.arrays
    cells, counts, valid = cells_under(ref["boxes"], 180, 180)
    around = cells_under(ref["boxes"], 180, 180, shape="circumscribed")[1]
    # where a cell's centre is on a border within rounding, the turned case is anyone's; rot 0 is exact
    sure = (ref["exact.margin"] > 1e-9) | (ref["boxes"][:, 4] == 0)
    assert np.array_equal(valid, ref["exact.valid"].astype(bool))
    assert np.array_equal(counts[sure], ref["exact.count"][sure])
    assert np.array_equal(around[sure], ref["exact.circumscribed_count"][sure])
    ends, theirs = np.append(0, np.cumsum(counts)), ref["exact.cells_offset"]
    for box in np.flatnonzero(sure & (np.diff(theirs) > 0)):
        mine = cells[ends[box] : ends[box + 1]]
        x, y = ref["exact.cells"][theirs[box] : theirs[box + 1]].T.astype(np.int64)
        assert np.array_equal(mine, np.sort(y * 180 + x)), f"box {box} {ref['tag'][box]}"
    for shape, prefix in (("rotated", "exact"), ("circumscribed", "exact.circumscribed")):
        for pool in ("mean", "max"):
            name = f"{prefix}.{pool}" if shape == "rotated" else f"{prefix}_{pool}"
            features, _ = crop(bev, ref["boxes"], "exact", shape, pool)
            assert _error(features[sure], ref[name][sure]) < TOLERANCE, name
            assert not features[~valid].any()


@pytest.mark.golden("bev_crop")
def test_legacy_features_are_the_published_helpers(golden: Any, bev: torch.Tensor) -> None:
    ref = golden.arrays
    judged = np.isin(ref["exact.rule"], ("inside", "centre cell"))
    assert judged.sum() > 20
    features, valid = crop(bev, ref["boxes"], "legacy")
    assert _error(features[judged], ref["legacy.mean"][judged]) < TOLERANCE
    assert valid[judged].all()
    cells, counts, _ = cells_under(ref["boxes"], 180, 180, "legacy")
    inside = judged & (ref["legacy.count"] > 0)
    assert np.array_equal(counts[inside], ref["legacy.count"][inside])
    ends, theirs = np.append(0, np.cumsum(counts)), ref["legacy.cells_offset"]
    for box in np.flatnonzero(inside & (np.diff(theirs) > 0)):
        x, y = ref["legacy.cells"][theirs[box] : theirs[box + 1]].T.astype(np.int64)
        assert np.array_equal(cells[ends[box] : ends[box + 1]], np.sort(y * 180 + x)), f"box {box} {ref['tag'][box]}"


@pytest.mark.golden("bev_crop")
def test_legacy_is_defined_where_the_helper_is_not(golden: Any, bev: torch.Tensor) -> None:
    """Off the map: the nearest border cells, flagged. Sizes or numbers that make no box: zeros, flagged."""
    ref = golden.arrays
    features, valid = crop(bev, ref["boxes"], "legacy")
    assert torch.isfinite(features).all()
    rejected = ref["exact.rule"] == "rejected"
    assert not valid[rejected].any()
    assert not features[rejected].any()
    x, y = ref["legacy.corners"].transpose(2, 0, 1)
    off = ~rejected & ((x.max(1) < 0) | (x.min(1) > 179) | (y.max(1) < 0) | (y.min(1) > 179))
    assert off.any()
    assert not valid[off].any()
    for box in np.flatnonzero(off):
        rows = slice(int(np.clip(y[box].min(), 0, 179)), int(np.clip(y[box].max(), 0, 179)) + 1)
        columns = slice(int(np.clip(x[box].min(), 0, 179)), int(np.clip(x[box].max(), 0, 179)) + 1)
        border = bev[:, rows, columns].flatten(1).double().mean(1)
        assert _error(features[box : box + 1], border.numpy()[None]) < TOLERANCE, ref["tag"][box]

import functools
from typing import Any

import numpy as np
import pytest
import torch

from extractors.checkpoint import seeded_init
from extractors.modality_fusion import STAGES, ModalityFusion, Stage, find_partners, nearest, pair_voxels
from extractors.sparse_conv import SparseTensor

torch.set_num_threads(1)


def voxels(count: int, shape: tuple[int, int, int], seed: int) -> torch.Tensor:
    """(count, 3) int64 z, y, x, none twice, in random order."""
    flat = np.random.default_rng(seed).choice(int(np.prod(shape)), count, replace=False)
    return torch.from_numpy(np.stack(np.unravel_index(flat, shape), 1))


def merged(first: list[float], second: list[float]) -> list[tuple[int, int]]:
    """Two sorted lists walked together: equal heads are paired and both are left behind."""
    a, b = sorted(range(len(first)), key=first.__getitem__), sorted(range(len(second)), key=second.__getitem__)
    i = j = 0
    pairs = []
    while i < len(a) and j < len(b):
        if first[a[i]] == second[b[j]]:
            pairs.append((a[i], b[j]))
            i, j = i + 1, j + 1
        elif first[a[i]] < second[b[j]]:
            i += 1
        else:
            j += 1
    return pairs


def test_exact_pairs_are_the_voxels_of_both() -> None:
    first, second = voxels(300, (9, 12, 12), 0), voxels(400, (9, 12, 12), 1)
    a, b = pair_voxels(first, second, "exact")
    assert torch.equal(first[a], second[b])
    both = set(map(tuple, first.tolist())) & set(map(tuple, second.tolist()))
    assert set(map(tuple, first[a].tolist())) == both
    assert len(a) == len(both)


def test_legacy_pairs_go_by_the_float_key() -> None:
    first, second = voxels(3000, (41, 1440, 1440), 2), voxels(4000, (41, 1440, 1440), 3)
    second[:1000] = first[:1000]
    second[1000:1500] = first[1000:1500] + torch.tensor([0, 1, -1000])  # keys that are the same
    first[1000:1500, 2].clamp_(min=1000)
    keys = [(z * 1e6 + y * 1e3 + x).tolist() for z, y, x in (one.int().unbind(1) for one in (first, second))]  # float32
    a, b = pair_voxels(first, second, "legacy_float")
    assert sorted(zip(a.tolist(), b.tolist(), strict=True)) == sorted(merged(*keys))
    assert (first[a] != second[b]).any(), "some pairs are of different voxels"


@pytest.mark.parametrize("pairing", ["exact", "legacy_float"])
def test_nothing_pairs_with_nothing(pairing: Any) -> None:
    some, none = voxels(5, (4, 4, 4), 0), torch.zeros(0, 3, dtype=torch.int64)
    for first, second in ((some, none), (none, some), (none, none)):
        assert [len(rows) for rows in pair_voxels(first, second, pairing)] == [0, 0]


@pytest.mark.parametrize("reach", [1.6, 3.3, 13.3])
def test_the_nearest_is_that_of_brute_force_and_ties_go_to_the_first(reach: float) -> None:
    queries, there = voxels(400, (6, 40, 40), 4), voxels(700, (6, 60, 60), 5)
    squared = ((queries[:, None] - there) ** 2).sum(2)
    best = squared.min(1).values
    wanted = torch.where(best.double().sqrt() < reach, (squared == best[:, None]).int().argmax(1), -1)
    assert torch.equal(nearest(queries, there, reach), wanted)
    assert ((squared == best[:, None]).sum(1) > 1).any()
    assert reach > 10 or (wanted < 0).any()


def test_a_distance_of_exactly_the_reach_is_too_far() -> None:
    assert nearest(torch.tensor([[0, 0, 0]]), torch.tensor([[0, 0, 3]]), 3.0).tolist() == [-1]


def test_many_voxels_inherit_the_partner_of_a_representative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extractors.modality_fusion.REPRESENTATIVES", 40)
    stage = Stage(1, 1, (1, 1, 1), (1, 1, 1), (0, 0, 0), reach=4.5, radius=3, cluster=6)
    queries, there = voxels(600, (5, 30, 30), 6), voxels(60, (5, 40, 40), 7)
    drawn = [0]
    squared = ((queries[:, None] - queries) ** 2).sum(2)
    lane = [int(f"{i % 512:09b}"[::-1], 2) for i in range(600)]
    while len(drawn) < 40:  # furthest point sampling, ties as in the kernel
        least = squared[drawn].min(0).values
        drawn.append(min(range(600), key=lambda i: (-int(least[i]), lane[i], i)))
    partner = nearest(queries[drawn], there, stage.reach)
    wanted = torch.full((600,), -1)
    for one, row in zip(drawn, partner.tolist(), strict=True):
        members = (squared[one] < stage.radius**2).nonzero()[: stage.cluster, 0]
        if row >= 0:
            wanted[members] = row
    found = find_partners(queries, there, stage)
    assert torch.equal(found, wanted)
    assert (partner < 0).any()
    assert 0 < (found >= 0).sum() < 600


Scene = tuple[list[SparseTensor], list[SparseTensor], list[torch.Tensor]]


def scene(seed: int, image_voxels: int = 50) -> Scene:
    """LiDAR and image voxels at the four scales of a small grid, ten of them (or all) at the same places."""
    shapes = ((41, 32, 32), (21, 16, 16), (11, 8, 8), (5, 4, 4))
    generator = torch.Generator().manual_seed(seed)
    lidar, image = [], []
    for number, (shape, stage) in enumerate(zip(shapes, STAGES, strict=True)):
        places = torch.nn.functional.pad(voxels(70, shape, 10 * seed + number), (1, 0))
        lidar.append(SparseTensor(torch.rand(40, stage.channels, generator=generator), places[:40], shape))
        places = places[30 : 30 + image_voxels]
        image.append(SparseTensor(torch.rand(len(places), 64, generator=generator), places, shape))
    return lidar, image, [torch.full((1, stage.channels), 0.5) for stage in STAGES]


def some(x: SparseTensor, rows: torch.Tensor | slice) -> SparseTensor:
    return SparseTensor(x.features[rows], x.coords[rows], x.shape)


@functools.cache
def fusion() -> ModalityFusion:
    module = ModalityFusion().eval().requires_grad_(False)
    seeded_init(module, 0)
    return module


def test_the_parameters_are_as_many_as_the_official() -> None:
    assert sum(parameter.numel() for parameter in ModalityFusion().parameters()) == 9_817_888


def test_the_union_has_every_voxel_once_with_both_halves_in_place() -> None:
    lidar, image, embeddings = scene(1)
    union = fusion()._unite(0, STAGES[0], lidar[0], image[0], embeddings[0], "exact")
    of_lidar, of_image, of_union = (set(map(tuple, x.coords.tolist())) for x in (lidar[0], image[0], union))
    assert of_union == of_lidar | of_image
    assert len(union.coords) == len(of_union) < len(of_lidar) + len(of_image)
    for coords, features in zip(map(tuple, union.coords.tolist()), union.features, strict=True):
        assert (features[:16] != 0).any() == (coords in of_lidar)
        assert coords in of_image or not features[16:].any()


def test_an_image_voxel_far_from_any_other_takes_the_embedding() -> None:
    lidar, image, _ = scene(2)
    far = SparseTensor(lidar[0].features, lidar[0].coords + torch.tensor([0, 0, 2000, 2000]), (41, 3200, 3200))
    alone = SparseTensor(image[0].features[:1], image[0].coords[:1], (41, 3200, 3200))
    module = fusion()
    for value in (0.5, 0.25):
        embedding = torch.full((1, 16), value)
        union = module._unite(0, STAGES[0], far, alone, embedding, "exact")
        row = (union.coords == alone.coords).all(1).nonzero().item()
        gated = module.cross_gate_control[0](embedding) * alone.features
        torch.testing.assert_close(union.features[row, 16:], gated[0])


@pytest.mark.parametrize("pairing", ["exact", "legacy_float"])
@pytest.mark.parametrize("case", ["no lidar", "one image voxel", "no image voxel alone", "none shared"])
def test_empty_groups_are_no_trouble(case: str, pairing: Any) -> None:
    lidar, image, embeddings = scene(3, image_voxels=1 if case == "one image voxel" else 50)
    if case == "no lidar":
        lidar = [some(x, slice(0)) for x in lidar]
    if case == "no image voxel alone":
        image = [some(x, slice(10)) for x in image]
    if case == "none shared":
        image = [some(x, slice(10, None)) for x in image]
    bev = fusion()(lidar, image, embeddings, pairing)
    assert bev.shape == (1, 384, 4, 4)
    assert bev.isfinite().all()
    assert bev.any()


def test_the_map_does_not_depend_on_the_order_of_rows() -> None:
    lidar, image, embeddings = scene(4)
    module = fusion()
    turned = [some(x, torch.arange(len(x.coords)).flip(0)) for x in image]
    torch.testing.assert_close(module(lidar, turned, embeddings), module(lidar, image, embeddings))

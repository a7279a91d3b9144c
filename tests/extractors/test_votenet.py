import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extractors import checkpoint, votenet_namings
from extractors.base import Weights, recipe
from extractors.checkpoint import seeded_init
from extractors.errors import EmptyInput, InvalidValues, NoColors, NoFaces, WeightsError
from extractors.inputs import Scan
from extractors.pointcloud import vertex_normals
from extractors.votenet import FAMILIES, VoteNet
from extractors.votenet_network import VoteNetwork

torch.set_num_threads(1)
NAMINGS = ("scanqa", "votenet", "mmdet3d")


def scan(vertices: int = 3000, seed: int = 0, **changes: Any) -> Scan:
    """A box-shaped room of random surface points, turned by 19 degrees."""
    rng = np.random.RandomState(seed)
    xyz = rng.rand(vertices, 3).astype(np.float32) * [4, 5, 2.5]
    xyz[::2, 2] = 0
    cos, sin = np.cos(0.33), np.sin(0.33)
    align = np.array([[cos, sin, 0, -1], [-sin, cos, 0, 2], [0, 0, 1, -0.1], [0, 0, 0, 1]])
    room = Scan(
        xyz=xyz.astype(np.float32),
        rgb=rng.randint(0, 256, (vertices, 3)).astype(np.uint8),
        faces=rng.randint(0, vertices, (2 * vertices, 3)).astype(np.int32),
        axis_align=align,
    )
    return dataclasses.replace(room, **changes)


def small(**settings: Any) -> VoteNet:
    return VoteNet(**{"weights": Weights("untrained:0"), "num_points": 2500, "proposals": 24, **settings})


def random_network(channels: int) -> VoteNetwork:
    """A network whose every parameter and running statistic matters."""
    network = VoteNetwork(channels, 24).eval()
    seeded_init(network, 3)
    generator = torch.Generator().manual_seed(0)
    for key, value in network.state_dict().items():
        if value.ndim == 1:
            noise = torch.randn(value.shape, generator=generator) * 0.2
            value.add_(noise.abs() if key.endswith("running_var") else noise)
    return network


@pytest.mark.parametrize("family", NAMINGS)
def test_records_fit_the_schema_and_are_finite(family: Any) -> None:
    extractor = small(family=family)
    record = extractor.load()([extractor.prepare("room", scan())])[0]
    checked = extractor.schema.check(record, "votenet room")
    assert extractor.schema.rows(checked) == 24
    assert all(np.isfinite(values).all() for values in checked.values())
    assert checked["feature"].std() > 0
    np.testing.assert_allclose(checked["corners"].mean(1), checked["center"], atol=1e-4)
    np.testing.assert_allclose(np.ptp(checked["corners"], axis=1), np.abs(checked["size"]), atol=1e-4)
    assert (checked["mask"] == (checked["objectness"][:, 1] > checked["objectness"][:, 0])).all()


def test_a_real_scan_gives_a_record(data_dir: Path) -> None:
    raw = np.fromfile(data_dir / "scannet" / "scene0000_00.bin", np.float32).reshape(-1, 6)
    real = Scan(raw[:, :3].copy(), raw[:, 3:].astype(np.uint8), np.zeros((0, 3), np.int32))
    extractor = VoteNet(weights=Weights("untrained:0"))
    record = extractor.schema.check(extractor.load()([extractor.prepare("scene0000_00", real)])[0], "scene0000_00")
    assert record["feature"].shape == (256, 128)
    assert all(np.isfinite(values).all() for values in record.values())
    assert len(np.unique(record["seed_index"])) > 200
    assert not record["axis_aligned"].any()


def test_seed_index_is_the_vertex_behind_the_vote() -> None:
    extractor, room = small(frame="scan"), scan()
    record = extractor.load()([extractor.prepare("room", room)])[0]
    network = VoteNetwork(4, 24).eval()
    seeded_init(network, 0)
    points = extractor.prepare("room", room)
    taps = network(torch.from_numpy(points.points)[None], "vote_fps")
    seeds = taps["sa2_xyz"][0][taps["aggregated_vote_inds"][0]].numpy()
    np.testing.assert_array_equal(room.xyz[record["seed_index"]], seeds)


def test_a_record_is_the_same_alone_and_in_a_batch() -> None:
    extractor = small()
    run = extractor.load()
    items = [extractor.prepare(f"room {i}", scan(seed=i)) for i in range(4)]
    together = run(items)
    for item, record in zip(items, together, strict=True):
        alone = run([item])[0]
        assert all(np.array_equal(alone[name], record[name]) for name in record)


def test_the_network_gives_each_scan_of_a_batch_what_it_gives_it_alone() -> None:
    network, extractor = random_network(4), small()
    points = torch.from_numpy(np.stack([extractor.prepare(f"{i}", scan(seed=i)).points for i in range(4)]))
    together = network(points, "vote_fps")
    for i in range(4):
        alone = network(points[i : i + 1], "vote_fps")
        for tap, values in alone.items():
            if values.is_floating_point():
                error = (values[0] - together[tap][i]).norm() / values.norm()
                assert error < 1e-5, tap
            else:
                assert torch.equal(values[0], together[tap][i]), tap


def test_preparation_depends_on_the_key_and_nothing_else() -> None:
    extractor, room = small(), scan()
    first, again = extractor.prepare("room", room), extractor.prepare("room", room)
    np.testing.assert_array_equal(first.points, again.points)
    assert not np.array_equal(first.vertex, extractor.prepare("other", room).vertex)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(first)).points, first.points)


def test_preparation_does_not_change_the_scan() -> None:
    room = scan()
    before = {name: np.copy(getattr(room, name)) for name in ("xyz", "rgb", "faces", "axis_align")}
    small(use_normal=True).prepare("room", room)
    assert all(np.array_equal(getattr(room, name), value) for name, value in before.items())


def test_columns_come_in_the_official_order() -> None:
    room = scan()
    prepared = small(use_normal=True, frame="scan").prepare("room", room)
    x, y, z = room.xyz[prepared.vertex].T
    floor = np.percentile(room.xyz[:, 2].astype(np.float64), 0.99)
    rgb = (room.rgb[prepared.vertex] - np.array([109.8, 97.2, 83.8])) / 256
    normals = vertex_normals(room.xyz, room.faces)[prepared.vertex]
    expected = np.column_stack([x, y, z, rgb, normals, z - floor])
    np.testing.assert_allclose(prepared.points, expected, atol=1e-6)
    assert small(family="mmdet3d").prepare("room", room).points.shape == (2500, 4)


def test_the_axis_alignment_is_applied_where_there_is_one() -> None:
    room = scan()
    raw, aligned = small(frame="scan").prepare("room", room), small().prepare("room", room)
    turned = raw.points[:, :3] @ room.axis_align[:3, :3].T + room.axis_align[:3, 3]
    np.testing.assert_allclose(aligned.points[:, :3], turned, atol=1e-5)
    np.testing.assert_allclose(aligned.points[:, -1], raw.points[:, -1], atol=1e-5)  # heights are the same
    assert aligned.aligned
    without = small().prepare("room", dataclasses.replace(room, axis_align=None))
    np.testing.assert_array_equal(without.points, raw.points)
    assert not without.aligned


def test_an_aligned_scan_is_taken_as_it_is_and_can_be_turned_back() -> None:
    room = scan()
    moved = (room.xyz @ room.axis_align[:3, :3].T + room.axis_align[:3, 3]).astype(np.float32)
    aligned = dataclasses.replace(room, xyz=moved, frame="aligned")
    np.testing.assert_allclose(small().prepare("room", aligned).points, small().prepare("room", room).points, atol=1e-5)
    np.testing.assert_allclose(
        small(frame="scan").prepare("room", aligned).points, small(frame="scan").prepare("room", room).points, atol=1e-5
    )


def test_exact_normals_turn_with_the_scan_and_legacy_ones_do_not() -> None:
    room = scan()
    settings = {"use_normal": True, "use_color": False}
    normals = {
        (mode, frame): small(normal_mode=mode, frame=frame, **settings).prepare("room", room).points[:, 3:6]
        for mode in ("exact", "legacy")
        for frame in ("scan", "aligned")
    }
    turn = room.axis_align[:3, :3].T
    np.testing.assert_allclose(normals["exact", "aligned"], normals["exact", "scan"] @ turn, atol=1e-6)
    np.testing.assert_array_equal(normals["legacy", "aligned"], normals["legacy", "scan"])


@pytest.mark.parametrize("moved", [False, True], ids=["_vert", "_aligned_vert"])
def test_stored_normals_of_scanqas_arrays_are_in_the_raw_frame(moved: bool) -> None:
    room = scan()
    stored = vertex_normals(room.xyz, room.faces, "legacy")
    no_faces = np.zeros((0, 3), np.int32)
    array = dataclasses.replace(room, normals=stored, faces=no_faces)
    if moved:  # ScanQA aligns the points and leaves the normals
        xyz = (room.xyz @ room.axis_align[:3, :3].T + room.axis_align[:3, 3]).astype(np.float32)
        array = dataclasses.replace(array, xyz=xyz, frame="aligned")

    def normals(given: Scan, **settings: Any) -> np.ndarray:
        prepared = small(use_normal=True, use_color=False, **settings).prepare("room", given)
        np.testing.assert_array_equal(prepared.vertex, small(use_color=False).prepare("room", given).vertex)
        return prepared.points[:, 3:6]

    raw = stored[small().prepare("room", array).vertex]
    turned = raw @ room.axis_align[:3, :3].T
    for frame, exact in (("scan", raw), ("aligned", turned)):
        np.testing.assert_allclose(normals(array, frame=frame), exact, atol=1e-6)
        np.testing.assert_array_equal(normals(array, frame=frame, normal_mode="legacy"), raw)
    unknown = dataclasses.replace(array, axis_align=None)
    if moved:
        with pytest.raises(InvalidValues, match="room: .*alignment is not known"):
            normals(unknown)
    else:
        np.testing.assert_array_equal(normals(unknown), raw)
    np.testing.assert_array_equal(normals(unknown, normal_mode="legacy"), raw)


def test_points_are_drawn_from_the_kept_vertices_alone() -> None:
    prepared = small(max_points=600).prepare("room", scan())
    assert len(np.unique(prepared.vertex)) <= 600
    assert len(np.unique(small(max_points=0).prepare("room", scan()).vertex)) == 2500


def test_vertices_that_are_not_finite_are_left_out() -> None:
    room = scan()
    room.xyz[::3, 1] = np.nan
    room.xyz[1, 0] = np.inf
    extractor = small()
    prepared = extractor.prepare("room", room)
    assert np.isfinite(prepared.points).all()
    assert not (prepared.vertex % 3 == 0).any()
    record = extractor.load()([prepared])[0]
    assert all(np.isfinite(values).all() for values in record.values())


def test_ten_points_give_a_record() -> None:
    extractor = small()
    record = extractor.load()([extractor.prepare("ten", scan(10))])[0]
    extractor.schema.check(record, "votenet ten")
    assert all(np.isfinite(values).all() for values in record.values())
    assert set(record["seed_index"]) <= set(range(10))


@pytest.mark.parametrize(
    ("settings", "changes", "error"),
    [
        ({}, {"xyz": np.zeros((0, 3), np.float32)}, EmptyInput),
        ({}, {"xyz": np.full((40, 3), np.nan, np.float32)}, InvalidValues),
        ({}, {"rgb": None}, NoColors),
        ({"use_normal": True}, {"faces": np.zeros((0, 3), np.int32)}, NoFaces),
    ],
)
def test_unusable_scans_are_refused_by_name(settings: Any, changes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="lobby"):
        small(**settings).prepare("lobby", scan(**changes))


def test_colours_are_not_needed_where_they_are_not_used() -> None:
    grey = scan(rgb=None)
    assert small(use_color=False).prepare("room", grey).points.shape[1] == 4
    saturated = small(color_mode="legacy_saturated").prepare("room", grey).points
    np.testing.assert_allclose(saturated[:, 3:6], np.tile([-0.430588, -0.381176, -0.328627], (2500, 1)), atol=1e-6)


def test_stored_normals_are_used_before_computed_ones() -> None:
    stored = np.tile(np.array([[0, 0, 1]], np.float32), (3000, 1))
    prepared = small(use_normal=True).prepare("room", scan(normals=stored, faces=np.zeros((0, 3), np.int32)))
    np.testing.assert_allclose(prepared.points[:, 6:9], np.tile([[0, 0, 1]], (2500, 1)), atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"proposals": 0}, {"proposals": 2000}, {"num_points": 100}, {"num_points": 10**9}, {"max_points": -1},
        {"family": "votenet2"},
        {"frame": "world"}, {"sampling": "random"}, {"color_mode": "legacy"}, {"mean_sizes": ((1.0, 1.0, 1.0),)},
        {"feature_dtype": "int8"}, {"normal_mode": "best"},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match=f"votenet: {next(iter(settings))}"):
        small(**settings)


def test_mean_sizes_of_the_family_can_be_replaced() -> None:
    means = FAMILIES["scanqa"].mean_sizes
    doubled = tuple(tuple(2 * side for side in size) for size in means)
    room = scan()
    one, two = (e.load()([e.prepare("room", room)])[0] for e in (small(), small(mean_sizes=doubled)))
    np.testing.assert_allclose(two["size"], 2 * one["size"], rtol=1e-5)
    assert recipe(small(mean_sizes=doubled)) != recipe(small())


def test_features_can_be_stored_in_half_precision() -> None:
    room = scan()
    half, full = (
        e.schema.check(e.load()([e.prepare("room", room)])[0], "room")
        for e in (small(feature_dtype="float16"), small())
    )
    assert half["feature"].dtype == np.float16
    np.testing.assert_array_equal(half["feature"], full["feature"].astype(np.float16))


def test_sampling_rules_follow_the_family_and_can_be_set() -> None:
    room = scan(vertices=3000)
    near = dataclasses.replace(room, xyz=room.xyz * 0.02)  # a doll's house: many points within 3 cm of the origin

    def vertices(**settings: Any) -> list[int]:
        extractor = small(**settings)
        record = extractor.load()([extractor.prepare("room", near)])[0]
        return record["seed_index"].tolist()

    frame = {"frame": "scan"}
    assert vertices(**frame) == vertices(fps_skip_origin=True, sampling="vote_fps", **frame)
    assert vertices(**frame) != vertices(fps_skip_origin=False, **frame)
    assert vertices(**frame) != vertices(sampling="seed_fps", **frame)


@pytest.mark.parametrize("source", NAMINGS)
@pytest.mark.parametrize("to", NAMINGS)
def test_conversion_between_namings_keeps_the_outputs(source: Any, to: Any) -> None:
    network = random_network(1)
    state = votenet_namings.convert(network.state_dict(), source)
    assert votenet_namings.detect(state) == source
    other = VoteNetwork(1, 24).eval()
    votenet_namings.load(other, votenet_namings.convert(state, to), "converted")
    points = torch.from_numpy(small(use_color=False).prepare("room", scan()).points)[None]
    expected, ours = network(points, "seed_fps")["proposal_raw"], other(points, "seed_fps")["proposal_raw"]
    assert (ours - expected).norm() / expected.norm() < 1e-5


# One key of each part, as the official code names it: ScanQA, facebookresearch, mmdet3d.
SA, FP = "mlp_module.layer2", "mlp.layer1"
OFFICIAL = [
    (f"detection_backbone.sa4.{SA}.conv.weight", f"backbone_net.sa4.{SA}.conv.weight",
     "backbone.SA_modules.3.mlps.0.layer2.conv.weight"),
    (f"detection_backbone.sa1.{SA}.bn.bn.running_var", f"backbone_net.sa1.{SA}.bn.bn.running_var",
     "backbone.SA_modules.0.mlps.0.layer2.bn.running_var"),
    (f"detection_backbone.fp2.{FP}.conv.weight", f"backbone_net.fp2.{FP}.conv.weight",
     "backbone.FP_modules.1.mlps.layer1.conv.weight"),
    ("voting_net.conv2.bias", "vgen.conv2.bias", "bbox_head.vote_module.vote_conv.1.conv.bias"),
    ("voting_net.bn1.weight", "vgen.bn1.weight", "bbox_head.vote_module.vote_conv.0.bn.weight"),
    ("voting_net.conv3.weight", "vgen.conv3.weight", "bbox_head.vote_module.conv_out.weight"),
    (f"proposal_net.vote_aggregation.{SA}.conv.weight", f"pnet.vote_aggregation.{SA}.conv.weight",
     "bbox_head.vote_aggregation.mlps.0.layer2.conv.weight"),
    ("proposal_net.proposal.0.weight", "pnet.conv1.weight",
     "bbox_head.conv_pred.shared_convs.layer0.conv.weight"),
    ("proposal_net.proposal.4.bias", "pnet.bn2.bias", "bbox_head.conv_pred.shared_convs.layer1.bn.bias"),
]  # fmt: skip


def test_parts_have_their_official_names_in_each_naming() -> None:
    network = random_network(4)
    by_naming = {naming: votenet_namings.convert(network.state_dict(), naming) for naming in NAMINGS}
    for names in OFFICIAL:
        values = [by_naming[naming][name] for naming, name in zip(NAMINGS, names, strict=True)]
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])
    facebook, mmdet3d = by_naming["votenet"], by_naming["mmdet3d"]
    last = facebook["pnet.conv3.weight"]
    assert torch.equal(by_naming["scanqa"]["proposal_net.proposal.6.weight"], last)
    assert torch.equal(mmdet3d["bbox_head.conv_pred.conv_cls.weight"], torch.cat([last[:2], last[79:]]))
    assert torch.equal(mmdet3d["bbox_head.conv_pred.conv_reg.weight"], last[2:79])
    for i, conv in ((0, "conv1"), (3, "conv2")):  # ScanQA's head has no bias there: it moves into the mean behind it
        assert f"proposal_net.proposal.{i}.bias" not in by_naming["scanqa"]
        mean = facebook[f"pnet.bn{conv[-1]}.running_mean"] - facebook[f"pnet.{conv}.bias"]
        assert torch.equal(by_naming["scanqa"][f"proposal_net.proposal.{i + 1}.running_mean"], mean)


def test_namings_have_the_official_number_of_entries() -> None:
    state = random_network(4).state_dict()
    counts = {naming: len(votenet_namings.convert(state, naming)) for naming in NAMINGS}
    assert counts == {"scanqa": 144, "votenet": 146, "mmdet3d": 148}
    assert sum(value.numel() for value in votenet_namings.convert(state, "scanqa").values()) == 961_723


def old_mmdet3d(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of mmdet3d before 0.6: one output layer, hidden layers under their number."""
    hub = votenet_namings.convert(state, "votenet")
    renamed = {
        k.replace("shared_convs.layer", ""): v for k, v in state.items() if "conv_cls" not in k and "conv_reg" not in k
    }
    return renamed | {f"bbox_head.conv_pred.conv_out.{n}": hub[f"pnet.conv3.{n}"] for n in ("weight", "bias")}


def test_mmdet3d_checkpoints_of_before_0_6_load() -> None:
    network = random_network(1)
    old = old_mmdet3d(votenet_namings.convert(network.state_dict(), "mmdet3d"))
    assert "bbox_head.conv_pred.0.conv.bias" in old
    other = VoteNetwork(1, 24)
    votenet_namings.load(other, old, "old.pth")
    assert all(torch.equal(other.state_dict()[key], value) for key, value in network.state_dict().items())


def whole_sqa3d() -> dict[str, torch.Tensor]:
    detector = votenet_namings.convert(random_network(4).state_dict(), "scanqa")
    head = {"lang_net.lstm.weight_ih_l0": (1024, 300), "dec_list.0.mhatt1.linear_v.weight": (256, 256)}
    head |= {"lang_cls.0.weight": (256, 1024), "answer_cls.3.bias": (706,)}
    return detector | {key: torch.zeros(shape) for key, shape in head.items()}


@pytest.mark.parametrize("naming", [*NAMINGS, "sqa3d"])
def test_an_extractor_runs_from_a_checkpoint_of_any_naming(naming: Any, tmp_path: Path) -> None:
    network = random_network(4)
    state = whole_sqa3d() if naming == "sqa3d" else votenet_namings.convert(network.state_dict(), naming)
    torch.save({"model_state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 9}, tmp_path / "model.tar")
    extractor = small(weights=Weights(str(tmp_path / "model.tar")))
    prepared = extractor.prepare("room", scan())
    expected = network(torch.from_numpy(prepared.points)[None], "vote_fps")["aggregated_vote_features"][0].numpy()
    np.testing.assert_allclose(extractor.load()([prepared])[0]["feature"], expected, rtol=1e-4, atol=1e-6)
    assert recipe(extractor)["weights"]["weights"].startswith("sha256:")


def test_keys_that_are_nobodys_are_listed_and_stop_the_load(tmp_path: Path) -> None:
    state = whole_sqa3d()
    state["detection_backbone.sa5.weight"] = torch.zeros(3)
    del state["voting_net.conv1.bias"]
    state["voting_net.bn1.bias"] = torch.zeros(7)
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(WeightsError) as raised:
        small(weights=Weights(str(tmp_path / "odd.pth"))).load()
    for part in ("odd.pth", "detection_backbone.sa5.weight", "voting_net.conv1.bias", "voting_net.bn1.bias is (7,)"):
        assert part in str(raised.value)
    assert "answer_cls" not in str(raised.value)


def test_another_number_of_features_says_which_settings_to_change(tmp_path: Path) -> None:
    torch.save(random_network(1).state_dict(), tmp_path / "height.pth")
    with pytest.raises(WeightsError, match=r"takes 1 features per point.*settings give 4.*use_color"):
        small(weights=Weights(str(tmp_path / "height.pth"))).load()


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"conv1.weight": torch.zeros(64, 3, 7, 7)}}, tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match=r"resnet\.pth: no VoteNet: expected"):
        small(weights=Weights(str(tmp_path / "resnet.pth"))).load()
    with pytest.raises(WeightsError, match="no file"):
        small(weights=Weights(str(tmp_path / "absent.pth"))).load()


def test_the_report_on_a_checkpoint_says_what_loads(tmp_path: Path) -> None:
    state = whole_sqa3d()
    torch.save({"model_state_dict": state, "epoch": 9}, tmp_path / "checkpoint.tar")
    report = checkpoint.describe(tmp_path / "checkpoint.tar")
    assert (report["network"], report["naming"], report["wrapper"]) == ("votenet", "scanqa", "model_state_dict")
    assert report["loads"]
    assert report["others"] == ["epoch"]
    uses = {entry["key"]: entry["use"] for entry in report["keys"]}
    assert uses["voting_net.conv1.weight"] == "loaded"
    assert uses["answer_cls.3.bias"] == "ignored"
    assert any("aux_reg" in note for note in report["notes"])
    shapes = {entry["key"]: (entry["shape"], entry["dtype"]) for entry in report["keys"]}
    assert shapes["detection_backbone.sa1.mlp_module.layer0.conv.weight"] == ([64, 7, 1, 1], "float32")


def test_the_report_lists_what_does_not_fit(tmp_path: Path) -> None:
    state = votenet_namings.convert(random_network(1).state_dict(), "mmdet3d")
    del state["bbox_head.conv_pred.conv_cls.bias"]
    state["bbox_head.conv_pred.conv_reg.bias"] = torch.zeros(5)
    state["bbox_head.extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "model.pth")
    report = checkpoint.describe(tmp_path / "model.pth")
    assert not report["loads"]
    assert report["missing"] == ["bbox_head.conv_pred.conv_cls.bias"]
    assert report["mismatched"] == [{"key": "bbox_head.conv_pred.conv_reg.bias", "shape": [5], "expected": [77]}]
    assert [entry["key"] for entry in report["keys"] if entry["use"] == "unexpected"] == ["bbox_head.extra"]


def test_the_report_on_another_network_says_so(tmp_path: Path) -> None:
    torch.save({"first.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "other.pth")
    report = checkpoint.describe(tmp_path / "other.pth")
    assert (report["network"], report["loads"]) == (None, False)
    assert report["keys"] == [{"key": "first.weight", "shape": [64, 3, 7, 7], "dtype": "float32", "use": "unexpected"}]

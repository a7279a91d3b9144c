"""scan_info and scan_objects."""

import numpy as np
import pytest

from extractors.errors import EmptyInput, InvalidValues
from extractors.inputs import Labels, ObjectGroup, Scan
from extractors.scan_info import ScanInfo
from extractors.scan_objects import ScanObjects, nyu40_to_class

QUARTER = np.array([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1.0]])
NYU40 = {"wall": 1, "floor": 2, "chair": 5, "table": 7, "lamp": 35, "trash can": 39, "strange": 50}


def scan(xyz, **how):
    return Scan(np.array(xyz, np.float32).reshape(-1, 3), None, np.empty((0, 3), np.int32), **how)


def info(*args, **how):
    extractor = ScanInfo()
    return extractor.schema.check(extractor.load()([extractor.prepare("s", scan(*args, **how))])[0], "scan_info s")


def test_the_box_is_that_of_the_raw_vertices():
    record = info([[0, 0, 0], [2, 4, 6]], axis_align=QUARTER)
    assert record["bbox_center"].tolist() == [1, 2, 3]
    assert record["bbox_max"].tolist() == [2, 4, 6]
    np.testing.assert_array_equal(record["axis_align"], QUARTER)
    assert record["has_axis_align"]
    assert record["vertices"] == 2


def test_no_alignment_is_the_identity_with_a_flag():
    record = info([[1, 1, 1]])
    np.testing.assert_array_equal(record["axis_align"], np.eye(4))
    assert not record["has_axis_align"]


def test_aligned_points_are_turned_back():
    record = info([[0, 0, 1], [-4, 2, 7]], axis_align=QUARTER, frame="aligned")
    assert str(record["frame"]) == "scan"
    np.testing.assert_allclose(record["bbox_center"], [1, 2, 3])
    assert str(info([[0, 0, 1]], frame="aligned")["frame"]) == "aligned"


def test_vertices_that_are_not_finite_are_counted_and_left_out():
    record = info([[0, 0, 0], [np.nan, 0, 0], [2, 2, np.inf]])
    assert record["bbox_max"].tolist() == [0, 0, 0]
    assert record["invalid_vertices"] == 2
    with pytest.raises(InvalidValues, match="none of the 1"):
        info([[np.nan, 0, 0]])
    with pytest.raises(EmptyInput):
        info([])


# ---------------------------------------------------------------------------------------------- objects

XYZ = np.array([[x, 2 * x, 0.5 * x] for x in range(12)], np.float32)
SEGMENT = np.repeat([40, 41, 42, 43, 44, 45], 2)


def objects(groups, rules="exact", nyu40=NYU40, segment=SEGMENT, mesh=None):
    groups = tuple(ObjectGroup(i, label, np.array(segments)) for i, label, segments in groups)
    extractor = ScanObjects(rules=rules)
    mesh = mesh or scan(XYZ, axis_align=QUARTER)
    record = extractor.load()([extractor.prepare("scene0000_00", mesh, Labels(segment, groups, nyu40))])[0]
    return extractor.schema.check(record, "scan_objects scene0000_00")


def test_boxes_are_around_all_vertices_in_both_frames():
    record = objects([(0, "chair", [41, 42]), (1, "table", [45])])
    assert record["label"].tolist() == ["chair", "table"]
    assert record["nyu40"].tolist() == [5, 7]
    np.testing.assert_allclose(record["box_scan"][0], [3.5, 7, 1.75, 3, 6, 1.5])
    np.testing.assert_allclose(record["box_aligned"][0], [-7, 3.5, 2.75, 6, 3, 1.5])
    assert record["vertices"].tolist() == [4, 2]


def test_walls_floors_and_ids_beyond_nyu40_are_left_out():
    record = objects([(0, "wall", [40]), (1, "floor", [41]), (2, "strange", [42]), (3, "lamp", [43])])
    assert record["object_id"].tolist() == [3]


def test_the_two_lineages_differ_in_class_17():
    record = objects([(0, "chair", [40]), (1, "lamp", [41]), (2, "trash can", [42])])
    assert record["class_scanqa"].tolist() == [2, 17, 17]
    assert record["class_votenet"].tolist() == [2, -1, 17]
    assert [nyu40_to_class(i, "scanqa") for i in (0, 1, 2, 22, 3, 36, 40)] == [-1, -1, -1, -1, 0, 16, 17]


def test_a_group_listed_twice_is_one_object():
    twice = [(0, "chair", [40]), (1, "table", [41]), (2, "chair", [40]), (3, "table", [41])]
    assert objects(twice)["object_id"].tolist() == [0, 1]
    assert objects(twice)["copies"].tolist() == [2, 2]
    assert objects(twice, "legacy")["object_id"].tolist() == [2, 3]


def test_one_id_for_different_objects_is_refused():
    with pytest.raises(InvalidValues, match="object id 0"):
        objects([(0, "chair", [40]), (0, "table", [41])])


def test_legacy_keeps_everything_where_there_is_one_object():
    assert objects([(0, "wall", [40])])["object_id"].tolist() == []
    assert objects([(0, "wall", [40])], "legacy")["object_id"].tolist() == [0]


def test_of_objects_that_share_a_segment_the_later_has_it():
    record = objects([(0, "chair", [40, 41]), (1, "table", [41])])
    assert record["vertices"].tolist() == [2, 2]


def test_annotation_of_the_hi_res_mesh_is_refused():
    with pytest.raises(InvalidValues, match=r"segments of 14 vertices, the mesh has 12"):
        objects([], segment=np.zeros(14, np.int64))
    with pytest.raises(InvalidValues, match=r"object 0 \(chair\) has 1 segments that the mesh lacks \(99"):
        objects([(0, "chair", [40, 99])])


def test_an_unknown_label_is_refused_by_name():
    with pytest.raises(InvalidValues, match="'sofa bed' of object 4"):
        objects([(4, "sofa bed", [40])])


def test_points_that_are_not_the_raw_mesh_are_refused():
    with pytest.raises(InvalidValues, match="need the raw mesh"):
        objects([], mesh=scan(XYZ, frame="aligned"))


def test_a_scan_without_objects_is_an_empty_record():
    record = objects([])
    assert record["box_scan"].shape == (0, 6)

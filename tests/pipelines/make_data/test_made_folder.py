"""A folder that is made again holds the new data and whatever else somebody keeps there, nothing of the old."""

import pytest

from pipelines.errors import JobError
from pipelines.make_data.folder import LIST, made_in


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {LIST}


def test_what_an_earlier_make_wrote_goes_and_what_others_wrote_stays(tmp_path):
    out = tmp_path / "not" / "yet"
    with made_in(out, "rooms"):
        write(out, "list.txt", "scans/0/mesh", "scans/1/mesh", "extra/only")
    write(out, "notes.txt", "scans/0/mine")
    with made_in(out, "rooms"):
        assert names(out) == {"notes.txt", "scans", "scans/0", "scans/0/mine"}
        write(out, "list.txt", "scans/2/mesh")
    with made_in(out, "rooms"):
        assert names(out) == {"notes.txt", "scans", "scans/0", "scans/0/mine"}


def test_an_interrupted_make_leaves_nothing_behind_in_the_next(tmp_path):
    def make():
        with made_in(tmp_path, "rooms"):
            write(tmp_path, "scans/0/mesh")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make()
    assert "scans/0/mesh" in names(tmp_path)
    with made_in(tmp_path, "rooms"):
        assert names(tmp_path) == set()


def test_a_file_that_somebody_removed_is_not_missed(tmp_path):
    with made_in(tmp_path, "rooms"):
        write(tmp_path, "a", "b/c")
    (tmp_path / "b/c").unlink()
    (tmp_path / "b").rmdir()
    with made_in(tmp_path, "rooms"):
        assert names(tmp_path) == set()


def test_a_folder_with_something_else_is_refused_untouched(tmp_path):
    write(tmp_path, "scans/0/mesh")
    with (
        pytest.raises(JobError, match="is not empty, and no make-data wrote what is there"),
        made_in(tmp_path, "rooms"),
    ):
        pytest.fail("not reached")
    assert names(tmp_path) == {"scans", "scans/0", "scans/0/mesh"}
    assert not (tmp_path / LIST).exists()


def test_a_folder_of_another_layout_is_refused_untouched(tmp_path):
    with made_in(tmp_path, "rooms"):
        write(tmp_path, "a")
    with pytest.raises(JobError, match="holds made data in rooms's layout"), made_in(tmp_path, "drive"):
        pytest.fail("not reached")
    assert names(tmp_path) == {"a"}

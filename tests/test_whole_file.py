"""Text files are replaced when they are complete, and are left as they were after an error."""

import os
import stat
import threading

import pytest

from lrl.files import write_whole


def test_a_file_is_replaced_at_the_end_with_its_permissions(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with write_whole(path) as file:
        file.write("first")
        assert not path.exists()
    path.chmod(0o640)
    with write_whole(path) as file:
        file.write("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_error_leaves_the_former_content_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("former")

    def fail():
        with write_whole(path) as file:
            file.write("half")
            raise error

    with pytest.raises(type(error)) as raised:
        fail()
    assert path.read_text() == "former" and [*tmp_path.iterdir()] == [path]
    assert not isinstance(error, OSError) or str(path) in str(raised.value)


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("former")
    link.symlink_to(target)
    with write_whole(link) as file:
        file.write("new")
    assert link.is_symlink() and target.read_text() == "new"


def test_a_pipe_is_written_directly(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with write_whole(pipe) as file:
        file.write("through")
    reader.join(timeout=10)
    assert read == ["through"]

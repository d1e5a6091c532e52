"""Files in whose place something else stands, and files of which nobody may see a half."""

import os

import pytest

from adder_flax.files import append, open_regular, write_whole

PLACES = {
    "a FIFO": os.mkfifo,
    "a directory": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_file_is_neither_read_nor_written(kind, tmp_path):
    path = tmp_path / "place"
    PLACES[kind](path)
    before = os.lstat(path)
    with pytest.raises(OSError, match=kind), open_regular(path):
        pass
    for write in (write_whole, append):
        with pytest.raises(OSError):  # noqa: PT011 - of a FIFO the system says it in its own words
            write(path, b"content")
    assert os.path.samestat(os.lstat(path), before)
    assert os.listdir(tmp_path) == ["place"]


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"one")
    append(tmp_path / "link", b", two")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"one, two"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_until_a_file_is_whole_the_one_before_is_there(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    write_whole(path, b"before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_bytes()))
    write_whole(path, b"after")
    assert (seen, path.read_bytes()) == ([b"before"], b"after")

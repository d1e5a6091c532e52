"""Files of which nobody may see a half."""

import os

import pytest

from adder_flax.files import append, write_whole


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"one")
    append(tmp_path / "link", b", two")
    assert (tmp_path / "file").read_bytes() == b"one, two"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_until_a_file_is_whole_the_one_before_is_there(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    write_whole(path, b"before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_bytes()))
    write_whole(path, b"after")
    assert (seen, path.read_bytes()) == ([b"before"], b"after")


def test_what_cannot_be_written_leaves_what_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"after")
    assert (os.listdir(tmp_path), path.read_bytes()) == (["file"], b"before")

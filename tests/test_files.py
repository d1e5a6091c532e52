"""Files of which nobody may see a half."""

import os

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

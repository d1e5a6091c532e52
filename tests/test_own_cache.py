"""The cache of compiled code: what was written comes back, and nothing that is damaged does."""

import os

import pytest

from adder_flax import own_cache

CONTENT = os.urandom(5000)


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Takes the content from the cache, or makes it; returns it and how often it was made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def take(key="k"):
        make = lambda: made.append(1) or CONTENT
        return own_cache.kept("kernels", make, bytes, key=key, owner="test"), len(made)

    assert take() == take() == (CONTENT, 1)
    return take


@pytest.fixture
def file(take):
    return own_cache.folder() / "kernels"


def test_what_was_written_is_whole_and_for_its_owner(take, file):
    assert file.parent.stat().st_mode & 0o077 == 0
    assert os.listdir(file.parent) == ["kernels"]


@pytest.mark.parametrize("position", [0, 2500, 4999, 5000, 5031])
def test_one_bit_anywhere_is_seen(take, file, position):
    damaged = bytearray(file.read_bytes())
    damaged[position] ^= 1
    file.write_bytes(damaged)
    assert take() == take() == (CONTENT, 2)


@pytest.mark.parametrize("length", [0, 31, 32, 2000, 5031])
def test_a_shortened_file_is_seen(take, file, length):
    os.truncate(file, length)
    assert take() == take() == (CONTENT, 2)


def test_what_was_written_under_another_key_is_not_taken(take):
    assert take(key="of another processor") == (CONTENT, 2)


def test_what_cannot_be_used_is_made_anew(take):
    def use(content):
        if content == b"old":
            raise OSError("no library")
        return content

    keep = lambda content: own_cache.kept("odd", lambda: content, use, key="k", owner="test")
    with pytest.raises(OSError, match="no library"):
        keep(b"old")
    assert keep(b"new") == b"new"


def test_without_a_place_to_write_to_it_goes_on(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made = own_cache.kept("kernels", lambda: CONTENT, bytes, key="k", owner="test")
    assert made == CONTENT
    assert "expected to keep compiled kernels" in caplog.text

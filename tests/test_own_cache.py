"""The cache of compiled code: what was written comes back, and nothing that may be somebody else's
does."""

import os
import stat

import pytest

from adder_flax import own_cache

CONTENT = os.urandom(5000)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a" / "adder_flax"
    assert own_cache.write(folder, "kernels", CONTENT, key="k") is None
    return folder


def refused(folder, key="k"):
    content, reason = own_cache.read(folder, "kernels", key=key)
    assert content is None
    return reason


def test_what_was_written_comes_back_and_is_for_its_owner_alone(folder):
    assert own_cache.read(folder, "kernels", key="k") == (CONTENT, None)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "kernels").stat().st_mode & 0o077
    assert [path.name for path in folder.iterdir()] == ["kernels"]
    assert (
        own_cache.read(folder, "others", key="k")
        == own_cache.read(folder / "none", "x", key="k")
        == (None, None)
    )


@pytest.mark.parametrize("position", [0, 2500, 4999, 5000, 5031])
def test_one_bit_anywhere_is_seen(folder, position):
    damaged = bytearray((folder / "kernels").read_bytes())
    damaged[position] ^= 1
    (folder / "kernels").write_bytes(damaged)
    assert "damaged" in refused(folder)


@pytest.mark.parametrize("length", [0, 31, 32, 2000, 5031])
def test_a_shortened_file_is_seen(folder, length):
    os.truncate(folder / "kernels", length)
    assert "damaged" in refused(folder)


def test_what_was_written_under_another_key_is_not_taken(folder):
    assert "damaged" in refused(folder, key="of another processor")


@pytest.mark.parametrize(
    ("where", "mode", "word"),
    [("kernels", 0o620, "write"), ("kernels", 0o602, "write"), (".", 0o770, "write")],
)
def test_what_others_may_write_to_is_not_taken(folder, where, mode, word):
    (folder / where).chmod(mode)
    assert word in refused(folder)


def test_a_sticky_folder_for_everybody_is_safe_for_files_of_ones_own(folder):
    folder.chmod(0o1777)
    assert own_cache.read(folder, "kernels", key="k") == (CONTENT, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("where", ["kernels", "."])
def test_what_belongs_to_another_user_is_neither_read_nor_written(folder, where):
    os.chown(folder / where, 12345, 12345)
    assert "another user (uid 12345)" in refused(folder)
    if where == ".":
        assert "another user" in own_cache.write(folder, "kernels", b"", key="k")


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "socket"])
def test_only_regular_files_are_read_and_nothing_waits(folder, kind, tmp_path):
    path = folder / "kernels"
    moved = path.rename(tmp_path / "moved")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(moved)
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    assert refused(folder)


def test_what_cannot_be_written_is_said_and_leaves_nothing(folder, tmp_path):
    (tmp_path / "file").write_text("")
    assert own_cache.write(tmp_path / "file" / "x", "kernels", CONTENT, key="k")
    (folder / "taken").mkdir()
    assert own_cache.write(folder, "taken", CONTENT, key="k")
    assert {path.name for path in folder.iterdir()} == {"kernels", "taken"}


def test_folders_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert next(own_cache.folders()) == tmp_path / "adder_flax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    first, second = own_cache.folders()
    assert first == tmp_path / "home" / ".cache" / "adder_flax"
    assert second.name == f"adder_flax-{os.geteuid()}"

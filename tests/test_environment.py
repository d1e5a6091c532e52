"""What the libraries take for granted is checked before they are asked."""

import os
import resource

import pytest

from adder_flax import environment
from adder_flax.errors import RunError


def test_too_little_memory_for_the_libraries_is_one_message(monkeypatch):
    environment.check_system()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**9, 10**9))
    with pytest.raises(RunError, match="at least 1536 MiB .* got 953; raise it"):
        environment.check_system()


def test_a_system_without_proc_is_one_message(monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(RunError, match="expected the system's /proc, got none; mount it"):
        environment.check_system()

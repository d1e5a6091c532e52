"""What the tests of kfac share."""

import jax
import pytest


@pytest.fixture
def x64():
    """Float64 while the test runs."""
    with jax.enable_x64(True):
        yield

import pytest

from tests.training.tiny import make_config


@pytest.fixture
def tiny_config():
    """Makes a configuration small enough that a run takes seconds."""
    return make_config

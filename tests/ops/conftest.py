import pytest

from adder_flax import ops
from tests.ops.programs import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend that is held to NumPy on the default device, in use while the test runs."""
    with ops.use_backend(request.param):
        yield request.param

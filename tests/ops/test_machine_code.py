"""Each GPU kernel against its row of the certificate: what its machine code costs, without a
GPU."""

import pytest

from adder_flax.ops._cuda import CudaBackend
from adder_flax.training.topology import compiler_folder
from benchmarks import sass

pytestmark = pytest.mark.skipif(
    compiler_folder() is None or CudaBackend().why_unavailable() is not None,
    reason='needs pip install ".[gpu-compile]"',
)


@pytest.mark.parametrize("gpu", sass.GPU_NAMES)
@pytest.mark.parametrize("name", sass.CASES)
def test_a_kernel_keeps_to_its_certificate(name, gpu):
    for row in sass.certify(name, gpu):
        assert row.instructions <= sass.CASES[name].most_instructions, row
        assert row.spilled_bytes == 0, row
        assert row.warps_per_core >= 8, row

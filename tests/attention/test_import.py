"""Borrowing one function stays light."""

import subprocess
import sys

from tests.processes import ROOT


def test_the_library_imports_nothing_heavy():
    """Beside Flax, which a borrower has already, they load jaxtyping, and kfac, which layers tell
    their curvature."""
    program = """
import sys, flax.nnx
before = {name.split(".")[0] for name in sys.modules}
import adder_flax.attention, adder_flax.layers, adder_flax.models, adder_flax.linen
print(*sorted({name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["adder_flax", "jaxtyping", "kfac"]

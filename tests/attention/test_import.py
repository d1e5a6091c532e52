"""Borrowing one function stays light."""

from tests.processes import run_code


def test_the_library_imports_nothing_heavy():
    """Beside Flax, which a borrower has already, they load jaxtyping, and kfac, which layers tell
    their curvature."""
    program = """
import sys, flax.nnx
before = {name.split(".")[0] for name in sys.modules}
import adder_flax.attention, adder_flax.layers, adder_flax.models, adder_flax.linen
print(*sorted({name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names))
"""
    assert run_code(program).split() == ["adder_flax", "jaxtyping", "kfac"]

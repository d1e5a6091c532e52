"""Holds calls of the packages against their annotations, shapes included, while tests run.

Not held: modules of Linen, whose inherited annotations cannot be checked; the registry and errors,
which stand below what checks; whether an array is JAX's or NumPy's, and whether a number is traced.
"""

import contextlib
from collections.abc import Iterator

import beartype
import jax
import jaxtyping
import numpy as np

from adder_flax.settings._use import _Number
from tests.processes import ROOT

_UNCHECKED = ("linen",)
_NUMBERS = {float: float | int | np.number | jax.Array | _Number, int: int | np.integer | jax.Array}
_CONF = beartype.BeartypeConf(hint_overrides=beartype.FrozenDict(_NUMBERS))
checked = beartype.beartype(conf=_CONF)


def hold() -> None:
    """Checks what is imported from now on."""
    jaxtyping.Array = jax.Array | np.ndarray
    modules = {path.stem for path in (ROOT / "adder_flax").iterdir()} - set(_UNCHECKED)
    names = ["kfac", *(f"adder_flax.{module}" for module in sorted(modules))]
    jaxtyping.install_import_hook(names, "tests.annotations.checked")


@contextlib.contextmanager
def held(whether: bool) -> Iterator[None]:
    """Checks calls in the block, or does not."""
    jaxtyping.config.update("jaxtyping_disable", not whether)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)

"""What backends share: dtypes of sums, orders of axes, rules that stand in for derivatives."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


class Operand(NamedTuple):
    """An array (B, ...) and the names of its axes after the batch: `i`, `j`, or `c`, the summed
    one; a single number has none.
    """

    array: jax.Array
    axes: str


def axis_lengths(operands: Sequence[Operand]) -> dict[str, int]:
    """Returns the length of each axis: `b`, `i`, `j` and `c`."""
    return {
        name: length
        for array, axes in operands
        for name, length in zip("b" + axes, array.shape, strict=True)
    }


def accumulation_dtype(dtype):  # of sums
    return jnp.promote_types(dtype, jnp.float32)


def upcast(*arrays):
    """Returns the arrays in their accumulation dtype."""
    return [array.astype(accumulation_dtype(array.dtype)) for array in arrays]


def to_nk(w, axes):
    """Returns `w`, whose axes are `axes`, as (B, N, K); also turns (B, N, K) into `axes`."""
    return w if axes == "nk" else jnp.swapaxes(w, -1, -2)


def sum_to(array, shape):
    """Returns an array summed over the axes along which something of this shape was broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    axes = tuple(i for i, length in enumerate(shape) if length == 1 and array.shape[i] != 1)
    return array.sum(axes, keepdims=True) if axes else array


def as_mask(mask) -> jax.Array:
    """Returns a mask as booleans, True for what is seen.

    Raises:
      ValueError: numbers other than 0 and 1, or floating ones under `jax.jit`: -1e9 and 0, which
        are added to scores elsewhere, would mean the opposite.

    >>> as_mask(jnp.array([1, 0])).tolist()
    [True, False]
    """
    dtype = jnp.result_type(mask)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(mask)
    floating = jnp.issubdtype(dtype, jnp.floating)
    got = f"{dtype} numbers"
    if isinstance(mask, Tracer) or not getattr(mask, "is_fully_addressable", True):
        known = not floating
    else:
        values = np.asarray(mask)
        # Floating zeros alone can mean either.
        known = bool(np.isin(values, (0, 1)).all()) and (not floating or bool((values == 1).any()))
        got = f"{got} from {values.min()} to {values.max()}" if values.size else got
    if not known:
        raise ValueError(
            f"expected a mask that is True where a query may see a key, got {got}; pass what is "
            "added to scores as bias, and a mask of 0 and 1 as mask.astype(bool)."
        )
    return jnp.asarray(mask).astype(bool)


RuleName = Literal["sign", "full", "hardtanh"]
RULE_NAMES = ("sign", "full", "hardtanh")

_exact = jax.make_user_context(default_value=False)


def exact_gradients() -> contextlib.AbstractContextManager:
    """Makes every rule the derivative itself, the sign, in what is traced inside of a `with` block.

    >>> from adder_flax import ops
    >>> slope = jax.grad(lambda w: ops.adder_matmul(jnp.ones((1, 1)), w).sum())
    >>> with ops.exact_gradients():
    ...     print(slope(jnp.full((1, 1), -2.0)))
    [[1.]]
    >>> print(slope(jnp.full((1, 1), -2.0)))  # AdderNet's rule: the difference
    [[3.]]
    """
    return _exact(True)


@dataclasses.dataclass(frozen=True)
class GradientRule:
    """The function that replaces the derivative of -|a - b| with respect to a, applied to b - a;
    see `adder_matmul`.
    """

    name: RuleName
    slope: float = 1.0  # of `"hardtanh"` at zero; the other rules ignore it

    def __post_init__(self):
        if self.name not in RULE_NAMES:
            raise ValueError(
                f"expected a gradient rule among {', '.join(RULE_NAMES)}; got {self.name!r}; "
                "pass one of these names as `gradient`, `x_gradient` or `w_gradient`"
            )
        if not self.slope > 0:
            raise ValueError(
                f"expected a positive hardtanh slope; got {self.slope}; 1.0 is AdderNet's choice"
            )
        if _exact.value:
            object.__setattr__(self, "name", "sign")

    def __call__(self, difference: jax.Array) -> jax.Array:
        if self.name == "sign":
            return jnp.sign(difference)
        if self.name == "full":
            return difference
        return jnp.clip(self.slope * difference, -1.0, 1.0)

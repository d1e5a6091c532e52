"""Gradient rules of the L1 distance: what stands in for the derivative of -|a - b|.

The exact derivative of -|a - b| with respect to a is sign(b - a). Adder networks train better when
a smoother function of the same difference takes its place (Chen et al., "AdderNet: Do We Really
Need Multiplications in Deep Learning?", CVPR 2020), so every rule here is a function of the
difference alone.
"""

import contextlib
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

RuleName = Literal["sign", "full", "hardtanh"]
RULE_NAMES = ("sign", "full", "hardtanh")


_exact = jax.make_user_context(default_value=False)


def exact_gradients() -> contextlib.AbstractContextManager:
    """Makes every rule the derivative itself, the sign, in what is traced inside of a `with` block.

    Training follows the rules that layers were given; an expansion of the loss needs its true
    derivative.

    Example:
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
    """The function that replaces the derivative of -|a - b| with respect to a, applied to b - a.

    Attributes:
      name: `"sign"` (exact, with sign(0) = 0), `"full"` (the difference itself) or `"hardtanh"`
        (the difference times `slope`, clipped to [-1, 1]).
      slope: slope of `"hardtanh"` at zero; the other rules ignore it.
    """

    name: RuleName
    slope: float = 1.0

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
        """Applies the rule to an array of differences, elementwise."""
        if self.name == "sign":
            return jnp.sign(difference)
        if self.name == "full":
            return difference
        return jnp.clip(self.slope * difference, -1.0, 1.0)

"""The adder product on a grid of few levels: one scale for inputs and weights, integer sums.

|x - w| has no factors to take out, so both operands are rounded on the same grid. What lies beyond
its ends is clamped, and what that takes from the sums is added to them again.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, UInt8

from adder_flax import ops

# Shares of the numbers that may lie beyond an end of the grid, of which `calibrate` tries each.
CLAMPED_SHARES = (0.0, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """The numbers lowest + scale · byte, for bytes from 0 to 2^bits - 1, with `bits` from 1 to 8.

    Of several grids `lowest` and `scale` are arrays, which broadcast against the numbers.
    """

    lowest: Float[ArrayLike, "..."]
    scale: Float[ArrayLike, "..."]
    bits: int = dataclasses.field(default=8, metadata={"static": True})

    @property
    def levels(self) -> int:
        """The largest byte."""
        return 2**self.bits - 1

    def clamp(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the nearest numbers between the ends of the grid."""
        return jnp.clip(x, self.lowest, self.lowest + self.scale * self.levels)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdderWeights:
    """Weights of an adder layer on a grid, made by `quantize_weights`."""

    packed: ops.SadWeights  # their bytes
    excess: Float[Array, " out_features"]  # what clamping took from the sum of each output
    grid: Grid  # of the weights and the inputs


def quantize(x: Float[ArrayLike, "..."], grid: Grid) -> UInt8[Array, "..."]:
    """Returns the bytes of the nearest numbers of a grid.

    >>> quantize(jnp.array([-9.0, 0.4, 1.6, 9.0]), Grid(lowest=-1.0, scale=1.0, bits=2)).tolist()
    [0, 1, 3, 3]
    """
    return ops.to_bytes(x, grid.lowest, grid.scale, grid.levels)


def quantize_weights(
    kernel: Float[ArrayLike, "in_features out_features"], grid: Grid
) -> AdderWeights:
    r"""Puts weights on the grid of a layer's inputs; those beyond its ends lose nothing.

    With inputs between the ends, lo ≤ x ≤ hi, and w' the weight clamped to them,

    .. math:: |x - w| = |x - w'| + |w - w'|

    exactly (Nie et al., "Redistribution of Weights and Activations for AdderNet Quantization",
    NeurIPS 2022). The second term does not depend on x: its sum over the inputs is a bias of the
    output.

    >>> weights = quantize_weights(jnp.array([[0.0], [9.0]]), Grid(lowest=0.0, scale=1.0, bits=2))
    >>> weights.packed.columns.tolist(), weights.excess.tolist()
    ([[0, 3]], [6.0])
    """
    kernel = jnp.asarray(kernel, jnp.float32)
    excess = jnp.abs(kernel - grid.clamp(kernel)).sum(0)
    return AdderWeights(ops.sad_pack(quantize(kernel, grid)), excess, grid)


def adder_linear(
    x: Float[ArrayLike, "*batch in_features"] | UInt8[ArrayLike, "*batch in_features"],
    weights: AdderWeights,
) -> Float[Array, "*batch out_features"]:
    r"""-Σ_k |x[k] - W[k, o]| from integer sums, on what remains of x and W on the grid.

    Inputs are clamped as weights are, and their excess is added likewise, one number for each row:

    .. math:: y_o = -\Big(s \sum_k |\hat x_k - \hat w_{ko}| + \sum_k |x_k - x'_k| + \sum_k
        |w_{ko} - w'_{ko}|\Big)

    with bytes x̂ and ŵ and scale s. So clamping is exact but for pairs that lie beyond the same end
    both, and all else that is lost is rounding.

    Args:
      x: floating, which is rounded here, or the bytes of `quantize`. An excess of the inputs is
        then unknown; it is the same for all outputs, and a LayerNorm behind takes it off.
      weights: from `quantize_weights`.

    >>> weights = quantize_weights(jnp.array([[0.0], [9.0]]), Grid(lowest=0.0, scale=1.0, bits=2))
    >>> adder_linear(jnp.array([-1.0, 2.0]), weights).tolist()  # |-1 - 0| + |2 - 9|
    [-8.0]
    """
    x, grid, excess = jnp.asarray(x), weights.grid, weights.excess
    if x.dtype != jnp.uint8:
        x = x.astype(jnp.float32)
        excess = excess + jnp.abs(x - grid.clamp(x)).sum(-1, keepdims=True)
        x = quantize(x, grid)
    return -(ops.sad_matmul(x, weights.packed) * grid.scale + excess)


def calibrate(
    inputs: Float[ArrayLike, "*batch in_features"],
    kernel: Float[ArrayLike, "in_features out_features"],
    *,
    bits: int = 8,
    clamped_shares: Sequence[float] = CLAMPED_SHARES,
) -> Grid:
    """Chooses the grid of a layer by the error of its sums over inputs like those it will meet.

    A grid reaches as far as inputs and weights both do: the excess of the other operand is exact. A
    narrower one has finer steps, and clamps more pairs at the same end; of those tried, the one
    with the smallest mean squared error is returned.

    Args:
      inputs, kernel: of the layer, some hundred rows or more, and its W.
      bits: from 1 to 8.
      clamped_shares: of the inputs, and of the weights, that may lie beyond either end.

    Raises:
      ValueError: other bits, no inputs, or inputs of another width or not finite.

    >>> grid = calibrate(jnp.array([[0.0, 2.0]]), jnp.array([[1.0], [9.0]]), clamped_shares=[0.0])
    >>> float(grid.lowest), float(grid.scale * grid.levels)  # from 1 to 2
    (1.0, 1.0)
    """
    check_bits(bits)
    inputs, kernel = np.asarray(inputs, np.float32), np.asarray(kernel, np.float32)
    if inputs.size == 0 or inputs.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"expected inputs of shape (..., {kernel.shape[0]}), as the kernel has rows, got "
            f"{inputs.shape}; give what the layer is called with on some training examples"
        )
    sums = ops.adder_matmul(inputs, kernel)

    def error(grid):
        return float(jnp.square(adder_linear(inputs, quantize_weights(kernel, grid)) - sums).mean())

    return min(grids_of(inputs, kernel, bits, clamped_shares), key=error)


def check_bits(bits: int) -> None:
    """Raises ValueError for bits that a byte does not have."""
    if bits not in range(1, 9):
        raise ValueError(f"expected from 1 to 8 bits, got {bits}; choose 8, 6 or 4")


def check_finite(*arrays: np.ndarray) -> None:
    """Raises ValueError for numbers that no grid has."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(
            "expected finite numbers to choose a grid by, got NaN or infinite ones; leave out the "
            "examples or weights that have them"
        )


def grids_of(a: np.ndarray, b: np.ndarray, bits: int, shares: Sequence[float]) -> list[Grid]:
    """The grids that reach as far as both arrays do, but for a share of their numbers."""
    check_finite(a, b)
    beyond = np.asarray(shares)
    lowest = np.max([np.quantile(array, beyond) for array in (a, b)], axis=0)
    highest = np.min([np.quantile(array, 1 - beyond) for array in (a, b)], axis=0)
    # Where the two do not meet, all is excess and any grid between them will do.
    steps = np.maximum(highest - lowest, np.finfo(np.float32).tiny * 2**bits) / (2**bits - 1)
    pairs = zip(jnp.float32(lowest), jnp.float32(steps), strict=True)
    return [Grid(least, step, bits) for least, step in pairs]

"""What the Pallas backends share: every function of a backend as one reduction over pairs.

All of them have the form

    out[b, i, j] = sum over c of term(operands at b, i, j, c)

and differ in the term and in what supplies its operands: a row (axes i, c), a column (c, j), one
number for each c, or something fixed during the sum (i j, i or j). `PallasBackend` states the
terms; a subclass for one kind of hardware says how to walk over the pairs, in `run_kernel`, and may
put a term in a form that suits its instructions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adder_flax.ops._arrays import Operand, axis_lengths, to_nk, upcast
from adder_flax.ops._backend import Backend
from adder_flax.ops._rules import GradientRule
from adder_flax.ops._xla import unless_empty

# Makes +-1 of any difference of two unequal floats when the product is clipped to [-1,
# 1]. Subnormal differences, below the reciprocal, are the exception: they count as almost
# equal.
_SIGN_SLOPE = 2.0**126


def _one_total(zero, *fixed):
    return (zero,), fixed


def _two_totals(zero, *fixed):
    return (zero, zero), fixed


def _unchanged(total):
    return total


class Reduction(NamedTuple):
    """One reduction over pairs, in functions of float32 blocks that broadcast to one of the output.

    Attributes:
      operands: what is read, in the order in which the functions below take it.
      step: `step(totals, held, *values)` returns the totals with one term added; `values` are the
        operands with a `c`.
      begin: `begin(zero, *fixed)` returns the first totals and what the steps hold; `fixed` are the
        operands without a `c`, and `zero` is a block of zeros of the shape of the output.
      finish: applied to each total after the last term.
    """

    operands: Sequence[Operand]
    step: Callable
    begin: Callable = _one_total
    finish: Callable = _unchanged

    def sizes(self) -> dict[str, int]:
        """Returns the length of each axis: `b`, `i`, `j` and `c`."""
        return axis_lengths(self.operands)

    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the type of each output, which varies under `jax.shard_map` over the mesh axes
        that any operand does.
        """
        arrays = [array for array, _ in self.operands]
        total = jax.eval_shape(
            lambda *arrays: sum(a.astype(jnp.float32).sum() for a in arrays), *arrays
        )
        fixed = [total] * sum("c" not in axes for _, axes in self.operands)
        totals, _ = jax.eval_shape(lambda *fixed: self.begin(jnp.zeros(()), *fixed), *fixed)
        size = self.sizes()
        return [total.update(shape=(size["b"], size["i"], size["j"]))] * len(totals)


class PallasBackend(Backend):
    """A backend of reductions over pairs, for subclasses that implement `run_kernel`.

    Args:
      interpret: run the kernels in Pallas's interpreter: anywhere, slowly, for tests.
    """

    def __init__(self, interpret: bool = False):
        self.interpret = interpret

    def supports(self, dtype):
        return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)

    def run_kernel(self, reduction: Reduction) -> list[jax.Array]:
        """Computes the reduction; returns one float32 array (B, I, J) for each of its totals."""
        raise NotImplementedError

    @unless_empty
    def l1(self, x, w, axes):
        def step(totals, _, x_c, w_c):
            return (totals[0] + jnp.abs(x_c - w_c),)

        operands = [Operand(x, "ic"), Operand(w, "cj" if axes == "kn" else "jc")]
        (y,) = self.run_kernel(Reduction(operands, step, finish=jnp.negative))
        return y

    @unless_empty
    def l1_pullback_x(self, x, w, g, rule, axes):
        return self.reduce_rule(
            Operand(g, "ic"), Operand(w, "jc" if axes == "kn" else "cj"), Operand(x, "ij"), rule
        )

    @unless_empty
    def l1_pullback_w(self, x, w, g, rule, axes):
        # The same sum with the roles of x and w exchanged.
        dw = self.reduce_rule(
            Operand(g, "ci"), Operand(x, "cj"), Operand(to_nk(w, axes), "ij"), rule
        )
        return to_nk(dw, axes)

    def reduce_rule(self, g: Operand, w: Operand, x: Operand, rule: GradientRule) -> jax.Array:
        """Computes sum over c of g[i, c] rule(w[c, j] - x[i, j])."""

        def step(totals, held, g_c, w_c):
            return (totals[0] + g_c * _apply(rule, w_c - held[0]),)

        (dx,) = self.run_kernel(Reduction([g, w, x], step))
        return dx

    @unless_empty
    def l1_pushforward(self, x, w, dx, rule, axes):
        def step(totals, _, x_c, w_c, dx_c):
            return (totals[0] + dx_c * _apply(rule, w_c - x_c),)

        operands = [Operand(x, "ic"), Operand(w, "cj" if axes == "kn" else "jc"), Operand(dx, "ic")]
        (dy,) = self.run_kernel(Reduction(operands, step))
        return dy

    @unless_empty
    def additive(self, query, key, v):
        def step(totals, _, query_c, key_c, v_c):
            return (totals[0] + v_c * jnp.tanh(query_c + key_c),)

        operands = [Operand(query, "ic"), Operand(key, "jc"), Operand(v, "c")]
        (scores,) = self.run_kernel(Reduction(operands, step))
        return scores

    @unless_empty
    def additive_pullback(self, query, key, v, g):
        def slope_step(totals, held, g_c, query_c):
            hidden = jnp.tanh(query_c + held[0])
            return (totals[0] + g_c * (1.0 - hidden * hidden),)

        def slope_and_value_step(totals, held, g_c, key_c):
            hidden = jnp.tanh(held[0] + key_c)
            return totals[0] + g_c * (1.0 - hidden * hidden), totals[1] + g_c * hidden

        (dk,) = self.run_kernel(
            Reduction([Operand(g, "ci"), Operand(query, "cj"), Operand(key, "ij")], slope_step)
        )
        operands = [Operand(g, "ic"), Operand(key, "cj"), Operand(query, "ij")]
        dq, dv = self.run_kernel(Reduction(operands, slope_and_value_step, begin=_two_totals))
        (v,) = upcast(v)
        return dq * v[:, None], dk * v[:, None], dv.sum(1)


def _apply(rule, difference):
    slope = _SIGN_SLOPE if rule.name == "sign" else rule.slope
    return jnp.clip(difference if slope == 1 else slope * difference, -1.0, 1.0)

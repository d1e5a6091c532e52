"""Blocked pure-JAX backend: runs wherever XLA does, and never holds more than a few blocks.

Every sum over a contracted axis is a `lax.scan` over blocks of `BLOCK` terms, each block written
out as one expression that XLA fuses into a single loop over the output. The block length decides
the speed on CPUs: with 8 terms a block XLA emits code eight times slower than with 16, with 32 a
fifth slower (compiling in proportion to the length).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from adder_flax.ops._arrays import to_nk, upcast
from adder_flax.ops._backend import Backend
from adder_flax.ops._partition import vary_alike

BLOCK = 16
LONGEST_RUN = 4096


def _blocked_sum(term, operands, init):
    """Returns init + sum over i of term(*[o[i] for o in operands]), `BLOCK` terms at a time.

    Terms are added in order, up to `LONGEST_RUN` of them, and longer sums are sums of such sums: in
    one run, every term after some millions would be lost in the rounding of the total. Gradients
    compute the terms of a block again.

    Args:
      term: function from one slice of each operand to an array shaped like `init`.
      operands: arrays whose first axis is the contracted one.
      init: zeros.
    """
    length = operands[0].shape[0]
    if length > LONGEST_RUN:

        def add_run(total, run):
            return total + _blocked_sum(term, run, init)

        return _scan_parts(add_run, operands, init, LONGEST_RUN)

    def add_terms(total, slices):
        for i in range(slices[0].shape[0]):
            total = total + term(*[s[i] for s in slices])
        return total

    return _scan_parts(jax.checkpoint(add_terms), operands, init, BLOCK)


def _scan_parts(add_part, operands, init, size):
    parts, remainder = divmod(operands[0].shape[0], size)
    if parts:
        init, _ = vary_alike(init, operands[0])
        split = [o[: parts * size].reshape(parts, size, *o.shape[1:]) for o in operands]
        init, _ = lax.scan(lambda total, slices: (add_part(total, slices), None), init, split)
    return add_part(init, [o[parts * size :] for o in operands]) if remainder else init


def _leading(array, axis):
    return jnp.moveaxis(array, axis, 0)


class XlaBackend(Backend):
    """Scans over the contracted axis; the result is the only array of its size."""

    name = "xla"

    def l1(self, x, w, axes):
        x, w = upcast(x, to_nk(w, axes))

        def term(x_k, w_k):
            return -jnp.abs(x_k[:, :, None] - w_k[:, None])

        init = jnp.zeros((*x.shape[:2], w.shape[1]), x.dtype)
        return _blocked_sum(term, [_leading(x, 2), _leading(w, 2)], init)

    def l1_pullback_x(self, x, w, g, rule, axes):
        x, w, g = upcast(x, to_nk(w, axes), g)

        def term(w_n, g_n):
            return g_n[..., None] * rule(w_n[:, None] - x)

        return _blocked_sum(term, [_leading(w, 1), _leading(g, 2)], jnp.zeros_like(x))

    def l1_pullback_w(self, x, w, g, rule, axes):
        # The same sum with the roles of x and w exchanged.
        g = jnp.swapaxes(g, 1, 2)
        return to_nk(self.l1_pullback_x(to_nk(w, axes), x, g, rule, "nk"), axes)

    def l1_pushforward(self, x, w, dx, rule, axes):
        x, w, dx = upcast(x, to_nk(w, axes), dx)

        def term(x_k, w_k, dx_k):
            return dx_k[:, :, None] * rule(w_k[:, None] - x_k[:, :, None])

        init = jnp.zeros((*x.shape[:2], w.shape[1]), x.dtype)
        return _blocked_sum(term, [_leading(x, 2), _leading(w, 2), _leading(dx, 2)], init)

    def sad(self, x, w):
        def term(x_k, w_k):
            x_k, w_k = x_k[:, :, None].astype(jnp.int32), w_k[:, None].astype(jnp.int32)
            return jnp.abs(x_k - w_k)

        init = jnp.zeros((*x.shape[:2], w.shape[1]), jnp.int32)
        return _blocked_sum(term, [_leading(x, 2), _leading(w, 2)], init)

    def additive(self, query, key, v):
        query, key, v = upcast(query, key, v)

        def term(q_k, k_k, v_k):
            return v_k[:, None, None] * jnp.tanh(q_k[:, :, None] + k_k[:, None])

        init = jnp.zeros((*query.shape[:2], key.shape[1]), query.dtype)
        return _blocked_sum(term, [_leading(query, 2), _leading(key, 2), _leading(v, 1)], init)

    def additive_pushforward(self, query, key, v, d_query, d_key, d_v):
        query, key, v, d_query, d_key, d_v = upcast(query, key, v, d_query, d_key, d_v)

        def term(q_k, k_k, v_k, dq_k, dk_k, dv_k):
            hidden = jnp.tanh(q_k[:, :, None] + k_k[:, None])
            slope = v_k[:, None, None] * (1 - hidden**2)
            return dv_k[:, None, None] * hidden + slope * (dq_k[:, :, None] + dk_k[:, None])

        operands = [_leading(a, 2) for a in (query, key)] + [_leading(v, 1)]
        tangents = [_leading(a, 2) for a in (d_query, d_key)] + [_leading(d_v, 1)]
        init = jnp.zeros((*query.shape[:2], key.shape[1]), query.dtype)
        return _blocked_sum(term, operands + tangents, init)

    def additive_pullback(self, query, key, v, g):
        query, key, v, g = upcast(query, key, v, g)

        @jax.checkpoint
        def one_hidden_unit(operands):
            q_k, k_k, v_k = operands
            hidden = jnp.tanh(q_k[:, :, None] + k_k[:, None])
            d_preactivation = g * v_k[:, None, None] * (1 - hidden**2)
            return d_preactivation.sum(2), d_preactivation.sum(1), (g * hidden).sum((1, 2))

        # One hidden unit at a time: its three sums reduce over both axes of g, so there is no
        # running total to block.
        units = _leading(query, 2), _leading(key, 2), _leading(v, 1)
        dq, dk, dv = lax.map(one_hidden_unit, units)
        return jnp.moveaxis(dq, 0, 2), jnp.moveaxis(dk, 0, 2), jnp.moveaxis(dv, 0, 1)


def unless_empty(method):
    """Leaves calls where an axis has no elements, so a kernel no work, to the XLA backend."""

    @functools.wraps(method)
    def checked(self, *args, **options):
        if any(a.size == 0 for a in args if hasattr(a, "size")):
            return getattr(XlaBackend(), method.__name__)(*args, **options)
        return method(self, *args, **options)

    return checked

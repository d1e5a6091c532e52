"""The formulas themselves, by broadcasting: slow, memory hungry, and the truth for the others."""

import jax.numpy as jnp

from adder_flax.ops._arrays import to_nk, upcast
from adder_flax.ops._backend import Backend


class ReferenceBackend(Backend):
    """Broadcasts every operand to (B, M, N, K) and reduces."""

    name = "reference"

    def l1(self, x, w, axes):
        x, w = upcast(x, w)
        return -jnp.abs(x[:, :, None] - to_nk(w, axes)[:, None]).sum(-1)

    def l1_pullback_x(self, x, w, g, rule, axes):
        x, w, g = upcast(x, w, g)
        slope = rule(to_nk(w, axes)[:, None] - x[:, :, None])
        return (g[..., None] * slope).sum(2)

    def l1_pullback_w(self, x, w, g, rule, axes):
        x, w, g = upcast(x, w, g)
        slope = rule(x[:, :, None] - to_nk(w, axes)[:, None])
        return to_nk((g[..., None] * slope).sum(1), axes)

    def l1_pushforward(self, x, w, dx, rule, axes):
        x, w, dx = upcast(x, w, dx)
        slope = rule(to_nk(w, axes)[:, None] - x[:, :, None])
        return (dx[:, :, None] * slope).sum(-1)

    def sad(self, x, w):
        x, w = x.astype(jnp.int32), w.astype(jnp.int32)
        return jnp.abs(x[:, :, None] - w[:, None]).sum(-1, dtype=jnp.int32)

    def additive(self, query, key, v):
        query, key, v = upcast(query, key, v)
        hidden = jnp.tanh(query[:, :, None] + key[:, None])
        return (v[:, None, None] * hidden).sum(-1)

    def additive_pullback(self, query, key, v, g):
        query, key, v, g = upcast(query, key, v, g)
        hidden = jnp.tanh(query[:, :, None] + key[:, None])
        d_preactivation = g[..., None] * v[:, None, None] * (1 - hidden**2)
        return d_preactivation.sum(2), d_preactivation.sum(1), (g[..., None] * hidden).sum((1, 2))

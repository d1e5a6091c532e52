"""LayerNorm by this package's kernels, for Linen."""

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Float

import kfac
from adder_flax.layers import is_over_last_axis, normalized


class LayerNorm(nn.LayerNorm):
    """Linen form of `adder_flax.layers.LayerNorm`.

    >>> import jax, jax.numpy as jnp
    >>> LayerNorm().init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch features"], *, mask: Array | None = None
    ) -> Float[Array, "*batch features"]:
        if mask is not None or not is_over_last_axis(self):
            return super().__call__(x, mask=mask)

        def parameter(name, initializer):
            return self.param(name, initializer, x.shape[-1:], self.param_dtype)

        scale = parameter("scale", self.scale_init) if self.use_scale else None
        bias = parameter("bias", self.bias_init) if self.use_bias else None
        x, scale, bias = promote_dtype(x, scale, bias, dtype=self.dtype)
        return normalized(x, scale, bias, self.epsilon, fast_variance=self.use_fast_variance)


kfac.register_layer(LayerNorm, kind=kfac.Scale)

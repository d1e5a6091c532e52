"""A transformer block."""

from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax import recorder
from adder_flax.attention import MultiHeadAttention
from adder_flax.layers._dropout import Dropout, DropPath
from adder_flax.layers._layer_scale import LayerScale
from adder_flax.layers._linear import linear_class
from adder_flax.layers._mlp import Mlp
from adder_flax.layers._norm import LayerNorm
from adder_flax.settings import BlockSettings, keywords_of


class Block(nnx.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)).

    With the norm behind: norm1(x + attention(x)), then norm2(x + mlp(x)).

    The second, post-LayerNorm, is the block of Vaswani et al. (2017,
    https://arxiv.org/abs/1706.03762); the first, pre-LayerNorm, trains without long warm-up (Xiong
    et al., 2020, https://arxiv.org/abs/2002.04745).

    Args:
      width: width of the tokens.
      num_heads: number of attention heads; divides `width`.
      settings: of the block; each of its fields, and of those of its attention, can be given as a
        keyword instead: mlp_ratio: hidden width of the MLP over `width`. score, score_options,
        scale, temperature, identity, key_block: see `MultiHeadAttention`. qkv_linear, proj_linear,
        mlp_linear: kind of the query/key/value projections, of the output projection and of the
        MLP's layers, each "dense" or "adder"; of the projections "identity" leaves out.
        norm_position: "pre" or "post". adder_options: options of all adder layers, see
        `AdderLinear`. layer_scale: first value of a learned factor of what each branch adds, see
        `LayerScale`; None for no factor. norm_epsilon: added to the variance in both LayerNorms.
        dropout_rate: dropout after the attention and in the MLP. attention_dropout_rate: dropout of
        attention weights. drop_path_rate: stochastic depth of both branches.
      dtype: dtype of the computation; None for the inputs' and parameters' common one.
      param_dtype: dtype of the parameters.
      rngs: initialisation keys.

    >>> block = Block(
    ...     32, 4, score="adder", qkv_linear="adder", mlp_linear="adder", rngs=nnx.Rngs(0)
    ... )
    >>> block(jnp.ones((2, 10, 32))).shape
    (2, 10, 32)
    """

    @keywords_of(BlockSettings)
    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        settings: BlockSettings = BlockSettings(),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.norm_position = settings.norm_position
        check_norm_position(settings.norm_position)
        self.norm1 = LayerNorm(width, epsilon=settings.norm_epsilon, **shared)
        self.attention = MultiHeadAttention(
            num_heads,
            width,
            settings=settings.attention,
            dropout_rate=settings.attention_dropout_rate,
            qkv_linear=linear_class(settings.qkv_linear, settings.adder_options),
            out_linear=linear_class(settings.proj_linear, settings.adder_options),
            **shared,
        )
        self.layer_scale1 = LayerScale(
            width, settings.layer_scale, dtype=dtype, param_dtype=param_dtype
        )
        self.norm2 = LayerNorm(width, epsilon=settings.norm_epsilon, **shared)
        self.mlp = Mlp(
            width,
            int(width * settings.mlp_ratio),
            linear=linear_class(settings.mlp_linear, settings.adder_options),
            dropout_rate=settings.dropout_rate,
            **shared,
        )
        self.layer_scale2 = LayerScale(
            width, settings.layer_scale, dtype=dtype, param_dtype=param_dtype
        )
        self.dropout = Dropout(settings.dropout_rate)
        self.drop_path = DropPath(settings.drop_path_rate)

    def __call__(
        self,
        tokens: Float[Array, "batch length width"],
        *,
        mask: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        drop_path_factors: Float[Array, "2 batch"] | None = None,
    ) -> Float[Array, "batch length width"]:
        """Applies the block.

        Args:
          tokens: (batch, length, width).
          mask: True where a query may see a key, broadcastable to (batch, num_heads, length,
            length).
          deterministic: no dropout, no stochastic depth.
          rngs: with a stream `dropout`, where there is any of them.
          drop_path_factors: stochastic depth of both branches where it was drawn before, see
            `adder_flax.layers.drop_path_factors`.
        """
        random: dict[str, Any] = dict(deterministic=deterministic, rngs=rngs)
        factors = (None, None) if drop_path_factors is None else drop_path_factors
        pre = self.norm_position == "pre"
        looked_at = self.norm1(tokens) if pre else tokens
        attended = self.dropout(self.attention(looked_at, mask=mask, **random), **random)
        between = tokens + self.drop_path(self.layer_scale1(attended), factors=factors[0], **random)
        between = between if pre else self.norm1(between)
        transformed = self.mlp(self.norm2(between) if pre else between, **random)
        output = between + self.drop_path(
            self.layer_scale2(transformed), factors=factors[1], **random
        )
        output = output if pre else self.norm2(output)
        report_block(tokens, looked_at, output)
        return output


def check_norm_position(position: str) -> None:
    """Raises ValueError for an unknown place of LayerNorm."""
    if position not in ("pre", "post"):
        raise ValueError(
            f"expected norm_position 'pre' or 'post', got {position!r}; choose one of these."
        )


def report_block(tokens: Array, normalized: Array, output: Array) -> None:
    """Tells the `adder_flax.recorder` what enters a block, what its attention looks at, and what
    leaves it.
    """
    arrays = {"tokens": tokens, "normalized": normalized, "output": output}
    branches = (
        ("attention", ("norm1", "attention", "layer_scale1")),
        ("mlp", ("norm2", "mlp", "layer_scale2")),
    )
    recorder.report("block", arrays, branches=branches)

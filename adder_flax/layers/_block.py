"""A transformer block and its feed-forward part."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax import recorder
from adder_flax.arrays import AnyArray
from adder_flax.attention import MultiHeadAttention
from adder_flax.layers._linear import Linear, linear_class
from adder_flax.layers._tokenwise import Dropout, DropPath, LayerNorm, LayerScale, gelu
from adder_flax.parameters import name_axis
from adder_flax.settings import BlockSettings, keywords_of


class Mlp(nnx.Module):
    """fc2(dropout(gelu(fc1(x)))) with the exact (erf) GELU, as in ViT.

    Args:
      in_features: width of input and output.
      hidden_features: width between the layers.
      linear: what makes the two layers, see `linear_class`.
      dropout_rate: dropout after the activation and after the second layer.
      dtype, param_dtype: see `Linear`.
      rngs: initialisation keys.

    >>> Mlp(8, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        linear: Callable[..., nnx.Module] = Linear,
        dropout_rate: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.fc1: Any = linear(in_features, hidden_features, **shared)
        self.fc2: Any = linear(hidden_features, in_features, **shared)
        # Columns of the one and rows of the other belong to a hidden unit: where these are split
        # over devices, one sum behind fc2 is all that they tell each other.
        name_axis(getattr(self.fc1, "kernel", None), -1, "hidden")
        name_axis(getattr(self.fc2, "kernel", None), 0, "hidden")
        self.dropout = Dropout(dropout_rate)

    def __call__(
        self,
        inputs: Float[AnyArray, "*batch in_features"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch in_features"]:
        hidden = gelu(self.fc1(inputs.reshape(-1, inputs.shape[-1])))
        hidden = self.dropout(hidden, deterministic=deterministic, rngs=rngs)
        outputs = self.dropout(self.fc2(hidden), deterministic=deterministic, rngs=rngs)
        return outputs.reshape(inputs.shape)


class Block(nnx.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)).

    With the norm behind: norm1(x + attention(x)), then norm2(x + mlp(x)), the block of Vaswani et
    al. (2017, https://arxiv.org/abs/1706.03762); the first, pre-LayerNorm, trains without long
    warm-up (Xiong et al., 2020, https://arxiv.org/abs/2002.04745).

    Args:
      width: of the tokens.
      num_heads: divides `width`.
      settings: of the block; each of its fields, and of those of its attention, can be given as a
        keyword instead: mlp_ratio: hidden width of the MLP over `width`. score, score_options,
        scale, temperature, identity, key_block: see `MultiHeadAttention`. qkv_linear, proj_linear,
        mlp_linear: kind of the query/key/value projections, of the output projection and of the
        MLP's layers, each "dense", "normed_dense" or "adder"; "identity" leaves projections out.
        norm_position: "pre" or "post". adder_options: options of all adder layers, see
        `AdderLinear`. layer_scale: first value of a learned factor of what each branch adds, see
        `LayerScale`; None for no factor. norm_epsilon: added to the variance in both LayerNorms.
        dropout_rate: dropout after the attention and in the MLP. attention_dropout_rate: dropout of
        attention weights. drop_path_rate: stochastic depth of both branches.
      dtype: dtype of the computation; None for the inputs' and parameters' common one.
      param_dtype: dtype of the parameters.
      rngs: initialisation keys.

    >>> block = Block(32, 4, score="adder", mlp_linear="adder", rngs=nnx.Rngs(0))
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
        if settings.norm_position not in ("pre", "post"):
            raise ValueError(
                f"expected norm_position 'pre' or 'post', got {settings.norm_position!r}; choose "
                "one of these."
            )
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
        kept: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.layer_scale1 = LayerScale(width, settings.layer_scale, **kept)
        self.norm2 = LayerNorm(width, epsilon=settings.norm_epsilon, **shared)
        self.mlp = Mlp(
            width,
            int(width * settings.mlp_ratio),
            linear=linear_class(settings.mlp_linear, settings.adder_options),
            dropout_rate=settings.dropout_rate,
            **shared,
        )
        self.layer_scale2 = LayerScale(width, settings.layer_scale, **kept)
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
          drop_path_factors: of both branches where drawn before, see `layers.drop_path_factors`.
        """
        random: dict[str, Any] = dict(deterministic=deterministic, rngs=rngs)
        factors = (None, None) if drop_path_factors is None else drop_path_factors
        pre = self.norm_position == "pre"
        looked_at = self.norm1(tokens) if pre else tokens
        attended = self.dropout(self.attention(looked_at, mask=mask, **random), **random)
        between = tokens + self.drop_path(self.layer_scale1(attended), factors=factors[0], **random)
        between = between if pre else self.norm1(between)
        transformed = self.mlp(self.norm2(between) if pre else between, **random)
        scaled = self.layer_scale2(transformed)
        output = between + self.drop_path(scaled, factors=factors[1], **random)
        output = output if pre else self.norm2(output)
        arrays = {"tokens": tokens, "normalized": looked_at, "output": output}
        recorder.report("block", arrays, branches=_BRANCHES)
        return output


_BRANCHES = (
    ("attention", ("norm1", "attention", "layer_scale1")),
    ("mlp", ("norm2", "mlp", "layer_scale2")),
)

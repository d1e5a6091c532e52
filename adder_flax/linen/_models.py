"""Linen: the transformer block and the vision transformer, with the parameter names of their NNX forms."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.layers import report_block
from adder_flax.linen._attention import MultiHeadAttention
from adder_flax.linen._layers import DropPath, Linear, Mlp, PatchEmbed, linear_class
from adder_flax.models import embed_positions
from adder_flax.models.settings import check_pooling, count_patches, drop_path_rates, per_block


class Block(nn.Module):
    """Linen form of `adder_flax.layers.Block`; arguments and parameters as there.

    >>> import jax
    >>> block = Block(4, score="adder", qkv_linear="adder", mlp_linear="adder")
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))[0].shape
    (2, 10, 32)
    """

    num_heads: int
    mlp_ratio: float = 4.0
    score: str = "dot"
    score_options: Mapping[str, Any] | None = None
    scale: str | float | None = None
    temperature: float | str = 1.0
    identity: bool | None = None
    qkv_linear: str = "dense"
    proj_linear: str = "dense"
    mlp_linear: str = "dense"
    adder_options: Mapping[str, Any] | None = None
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    drop_path_rate: float = 0.0
    key_block: int | str | None = "auto"
    dtype: jnp.dtype | None = None
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, "batch length width"],
        *,
        mask: Array | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch length width"]:
        """Applies the block; dropout and stochastic depth draw from the `dropout` stream."""
        shared = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        norm = lambda name: nn.LayerNorm(epsilon=LAYER_NORM_EPSILON, **shared, name=name)
        drop_path = lambda x: DropPath(self.drop_path_rate)(x, deterministic=deterministic)
        attention = MultiHeadAttention(
            self.num_heads,
            score=self.score,
            score_options=self.score_options,
            scale=self.scale,
            temperature=self.temperature,
            identity=self.identity,
            dropout_rate=self.attention_dropout_rate,
            key_block=self.key_block,
            qkv_linear=linear_class(self.qkv_linear, self.adder_options),
            out_linear=linear_class(self.proj_linear, self.adder_options),
            **shared,
            name="attention",
        )
        mlp = Mlp(
            int(tokens.shape[-1] * self.mlp_ratio),
            linear=linear_class(self.mlp_linear, self.adder_options),
            dropout_rate=self.dropout_rate,
            **shared,
            name="mlp",
        )
        normalized = norm("norm1")(tokens)
        attended = attention(normalized, mask=mask, deterministic=deterministic)
        between = tokens + drop_path(nn.Dropout(self.dropout_rate)(attended, deterministic=deterministic))
        output = between + drop_path(mlp(norm("norm2")(between), deterministic=deterministic))
        report_block(tokens, normalized, output)
        return output


class Blocks(nn.Module):
    """Blocks in turn, named by their number."""

    settings: Sequence[Mapping[str, Any]]

    @nn.compact
    def __call__(self, tokens: Array, *, deterministic: bool) -> Array:
        for i, setting in enumerate(self.settings):
            tokens = Block(**setting, name=str(i))(tokens, deterministic=deterministic)
        return tokens


class VisionTransformer(nn.Module):
    """Linen form of `adder_flax.models.VisionTransformer`; arguments and parameters as there.

    The size and channels of the images are seen at the first call, as usual in Linen.

    >>> import jax
    >>> model = VisionTransformer(patch_size=2, num_classes=10, width=16, depth=2, num_heads=2, score="adder")
    >>> model.init_with_output(jax.random.key(0), jnp.ones((3, 8, 8, 1)))[0].shape
    (3, 10)
    """

    patch_size: int = 16
    num_classes: int = 1000
    width: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    score: str | Sequence[str] = "dot"
    score_options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None
    scale: str | float | None = None
    temperature: float | str = 1.0
    identity: bool | None = None
    qkv_linear: str = "dense"
    proj_linear: str = "dense"
    mlp_linear: str = "dense"
    adder_options: Mapping[str, Any] | None = None
    pooling: str = "cls"
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    drop_path_rate: float = 0.0
    key_block: int | str | None = "auto"
    dtype: jnp.dtype | None = None
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Classifies images."""
        check_pooling(self.pooling)
        shared = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        tokens = nn.Dropout(self.dropout_rate)(self._embed(images), deterministic=deterministic)
        tokens = Blocks(self._block_settings(), name="blocks")(tokens, deterministic=deterministic)
        tokens = nn.LayerNorm(epsilon=LAYER_NORM_EPSILON, **shared, name="norm")(tokens)
        pooled = tokens[:, 0] if self.pooling == "cls" else tokens.mean(axis=1)
        logits = Linear(self.num_classes, **shared, name="head")(pooled)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _embed(self, images: Array) -> Array:
        embedding = nn.initializers.normal(0.02)
        num_tokens = count_patches(images.shape[1:], self.patch_size) + (self.pooling == "cls")
        shared = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        patches = PatchEmbed(self.patch_size, self.width, **shared, name="patch_embed")(images)
        params = {}
        if self.pooling == "cls":
            params["cls_token"] = self.param("cls_token", embedding, (1, 1, self.width), self.param_dtype)
        params["pos_embed"] = self.param("pos_embed", embedding, (1, num_tokens, self.width), self.param_dtype)
        return embed_positions(params, patches)

    def _block_settings(self) -> list[dict[str, Any]]:
        scores = per_block(self.score, self.depth, "score")
        options = per_block(self.score_options, self.depth, "score_options")
        rates = drop_path_rates(self.drop_path_rate, self.depth)
        same = (
            "num_heads mlp_ratio scale temperature identity qkv_linear proj_linear mlp_linear adder_options "
            "dropout_rate attention_dropout_rate key_block dtype param_dtype"
        )
        same = {name: getattr(self, name) for name in same.split()}
        return [
            dict(score=scores[i], score_options=options[i], drop_path_rate=rates[i], **same) for i in range(self.depth)
        ]

"""Linen: the transformer block and the vision transformer.

Parameters have the names of their NNX forms.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.layers import check_norm_position, report_block
from adder_flax.linen._attention import MultiHeadAttention
from adder_flax.linen._layers import (
    DropPath,
    LayerScale,
    Linear,
    Mlp,
    PatchEmbed,
    TakesKeywords,
    linear_class,
)
from adder_flax.linen._norm import LayerNorm
from adder_flax.models import embed_positions
from adder_flax.models.settings import block_settings, check_pooling, count_patches, prefix_tokens
from adder_flax.settings import BlockSettings, VitSettings


class Block(TakesKeywords):
    """Linen form of `adder_flax.layers.Block`; arguments and parameters as there.

    >>> import jax
    >>> block = Block(4, score="adder", qkv_linear="adder", mlp_linear="adder")
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))[0].shape
    (2, 10, 32)
    """

    num_heads: int
    settings: BlockSettings = BlockSettings()
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, "batch length width"],
        *,
        mask: Array | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch length width"]:
        """Applies the block; dropout and stochastic depth draw from the `dropout` stream."""
        shared: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        settings = self.settings
        norm = lambda name: LayerNorm(epsilon=settings.norm_epsilon, **shared, name=name)
        drop_path = lambda x: DropPath(settings.drop_path_rate)(x, deterministic=deterministic)
        layer_scale = lambda name: LayerScale(settings.layer_scale, **shared, name=name)
        attention = MultiHeadAttention(
            self.num_heads,
            settings=settings.attention,
            dropout_rate=settings.attention_dropout_rate,
            qkv_linear=linear_class(settings.qkv_linear, settings.adder_options),
            out_linear=linear_class(settings.proj_linear, settings.adder_options),
            **shared,
            name="attention",
        )
        mlp = Mlp(
            int(tokens.shape[-1] * settings.mlp_ratio),
            linear=linear_class(settings.mlp_linear, settings.adder_options),
            dropout_rate=settings.dropout_rate,
            **shared,
            name="mlp",
        )
        check_norm_position(settings.norm_position)
        pre, norm1, norm2 = settings.norm_position == "pre", norm("norm1"), norm("norm2")
        looked_at = norm1(tokens) if pre else tokens
        attended = attention(looked_at, mask=mask, deterministic=deterministic)
        attended = nn.Dropout(settings.dropout_rate)(attended, deterministic=deterministic)
        between = tokens + drop_path(layer_scale("layer_scale1")(attended))
        between = between if pre else norm1(between)
        transformed = mlp(norm2(between) if pre else between, deterministic=deterministic)
        output = between + drop_path(layer_scale("layer_scale2")(transformed))
        output = output if pre else norm2(output)
        report_block(tokens, looked_at, output)
        return output


class Blocks(nn.Module):
    """Blocks in turn, named by their number."""

    num_heads: int
    settings: Sequence[BlockSettings]
    dtype: DTypeLike | None
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens: Array, *, deterministic: bool) -> Array:
        shared: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        for i, settings in enumerate(self.settings):
            block = Block(self.num_heads, settings=settings, **shared, name=str(i))
            tokens = block(tokens, deterministic=deterministic)
        return tokens


class VisionTransformer(TakesKeywords):
    """Linen form of `adder_flax.models.VisionTransformer`; arguments and parameters as there.

    The size and channels of the images are seen at the first call, as usual in Linen.

    >>> import jax
    >>> model = VisionTransformer(
    ...     patch_size=2, num_classes=10, width=16, depth=2, num_heads=2, score="adder"
    ... )
    >>> model.init_with_output(jax.random.key(0), jnp.ones((3, 8, 8, 1)))[0].shape
    (3, 10)
    """

    settings: VitSettings = VitSettings()
    num_classes: int = 1000
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Classifies images."""
        settings = self.settings
        check_pooling(settings.pooling, settings.distilled)
        shared: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        tokens = nn.Dropout(settings.dropout_rate)(self._embed(images), deterministic=deterministic)
        blocks = Blocks(settings.num_heads, block_settings(settings), **shared, name="blocks")
        tokens = blocks(tokens, deterministic=deterministic)
        tokens = LayerNorm(epsilon=settings.norm_epsilon, **shared, name="norm")(tokens)
        pooled = tokens[:, 0] if settings.pooling == "cls" else tokens.mean(axis=1)
        logits = Linear(self.num_classes, **shared, name="head")(pooled)
        if settings.distilled:
            logits = (
                logits + Linear(self.num_classes, **shared, name="head_dist")(tokens[:, 1])
            ) / 2
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _embed(self, images: Array) -> Array:
        settings, embedding = self.settings, nn.initializers.normal(0.02)
        _, height, width, channels = images.shape
        num_tokens = count_patches((height, width, channels), settings.patch_size) + prefix_tokens(
            settings
        )
        shared: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        stem: dict[str, Any] = dict(
            stem_channels=settings.stem_channels,
            stem_strides=settings.stem_strides,
            stem_linear=linear_class(settings.stem_linear, settings.adder_options),
        )
        patches = PatchEmbed(
            settings.patch_size, settings.width, **stem, **shared, name="patch_embed"
        )(images)
        params = {}
        for name in ("cls_token", "dist_token")[: prefix_tokens(settings)]:
            params[name] = self.param(name, embedding, (1, 1, settings.width), self.param_dtype)
        params["pos_embed"] = self.param(
            "pos_embed", embedding, (1, num_tokens, settings.width), self.param_dtype
        )
        return embed_positions(params, patches)

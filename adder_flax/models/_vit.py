"""The vision transformer, with any attention mechanism and any kind of linear layer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kfac
from adder_flax.arrays import AnyArray
from adder_flax.layers import (
    Block,
    Dropout,
    LayerNorm,
    Linear,
    PatchEmbed,
    adder_layers,
    linear_class,
)
from adder_flax.models import _layout
from adder_flax.models._positions import Grid, resize_grid
from adder_flax.models._registry import Example, check_score_options, image_shape, register_model
from adder_flax.models._stack import apply_blocks
from adder_flax.settings import DEIT_SIZES, VitSettings, keywords_of


class VisionTransformer(nnx.Module):
    """ViT (Dosovitskiy et al., 2021, https://arxiv.org/abs/2010.11929) with pre-LayerNorm blocks.

    Patch embedding, class token, learned position embedding, `depth` blocks, LayerNorm, linear
    head. With dense layers, dot-product scores, 224-pixel images and patches of 16 it is DeiT. The
    patch embedding, the product of map and values and the head are multiplicative in every variant;
    convolutions in front of the patches may be dense or adder ones.

    Args:
      image_size: side of the square images, or (height, width), in pixels, that there are positions
        for; images of another size may be given, see `features`.
      channels: of the images.
      num_classes: number of logits.
      settings: of the transformer, see `VitSettings`; each of its fields can be given as a keyword
        instead. Score, score_options, qkv_linear, proj_linear and mlp_linear are one for all blocks
        or a sequence with one per block. Registers are tokens that no head reads (Darcet et al.,
        2024, https://arxiv.org/abs/2309.16588). A distillation token has a head of its own; what
        the model says is the mean of both (Touvron et al., 2021, section 3).
      dtype: of the computation; parameters stay `param_dtype`, logits are float32 or wider.
      scan_blocks: compile one block and loop over the stacked parameters of all, which have to be
        alike. On a CPU a training step runs 10 to 20 % slower in the loop; compiling takes half the
        time where adder layers run on plain XLA, and is no shorter elsewhere.

    >>> sizes = dict(image_size=8, patch_size=2, channels=1, width=16, depth=2, num_heads=2)
    >>> model = VisionTransformer(**sizes, num_classes=10, score="adder", rngs=nnx.Rngs(0))
    >>> model(jnp.ones((3, 8, 8, 1))).shape
    (3, 10)
    """

    part_names: ClassVar[Mapping[str, str]] = {
        "patch_embed": "patch embedding",
        "pos_embed": "position, class token",
        "cls_token": "position, class token",
        "dist_token": "position, class token",
        "reg_token": "position, class token",
        "": "position, class token",
        "blocks.*.attention.query": "blocks: query, key, value",
        "blocks.*.attention.key": "blocks: query, key, value",
        "blocks.*.attention.value": "blocks: query, key, value",
        "blocks.*.attention.out": "blocks: projection",
        "blocks.*.attention": "blocks: attention map",
        "blocks.*.mlp": "blocks: MLP",
        "blocks": "blocks: norms, residuals",
        "norm": "final norm",
        "fc_norm": "final norm",
        "head": "head",
        "head_dist": "head",
    }
    """What a table calls its parts, see `adder_flax.report.summary_rows`."""

    @keywords_of(VitSettings, but=("name",))
    def __init__(
        self,
        *,
        settings: VitSettings = VitSettings(),
        image_size: int | tuple[int, int] = 224,
        channels: int = 3,
        num_classes: int = 1000,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        width = settings.width
        sides = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.image_shape = (*sides, channels)
        _layout.check_pooling(settings)
        self.prefix_tokens = (settings.pooling == "cls") + settings.distilled + settings.registers
        self.grid = _layout.grid_of(self.image_shape, settings.patch_size)
        blocks = _layout.block_settings(settings)
        self.annealing = _layout.Annealing(
            settings.depth, settings.anneal_start, settings.anneal_end, settings.anneal_blocks
        )
        self.alike = _layout.are_alike(blocks)
        if scan_blocks and not self.alike:
            given = [(block.score, block.score_options, block.mlp_linear) for block in blocks]
            raise ValueError(
                f"scan_blocks expects blocks that are alike, got scores, options and layers "
                f"{given}; give all blocks one score and one kind of layers, or pass "
                "scan_blocks=False."
            )
        self.pooling = settings.pooling
        self.remat = settings.remat
        self.scan_blocks = scan_blocks
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        stem: dict[str, Any] = {**shared, "stem_channels": settings.stem_channels}
        stem["stem_linear"] = linear_class(settings.stem_linear, settings.adder_options)
        stem["stem_strides"] = settings.stem_strides
        self.patch_embed = PatchEmbed(settings.patch_size, channels, width, **stem)
        normal, none = nnx.initializers.normal(0.02), nnx.data(None)
        made = lambda count: nnx.Param(normal(rngs.params(), (1, count, width), param_dtype))
        tokens = lambda count: made(count) if count else none
        self.cls_token = tokens(int(settings.pooling == "cls"))
        self.dist_token = tokens(int(settings.distilled))
        self.reg_token = tokens(settings.registers)
        self.pos_embed = tokens(math.prod(self.grid) + self.prefix_tokens)
        self.dropout = Dropout(settings.dropout_rate)
        self.blocks = nnx.List(
            Block(width, settings.num_heads, settings=block, **shared) for block in blocks
        )
        norm = LayerNorm(width, epsilon=settings.norm_epsilon, **shared)
        # One of both is there, the other None.
        self.norm: LayerNorm | Any = none if settings.fc_norm else norm
        self.fc_norm: LayerNorm | Any = norm if settings.fc_norm else none
        self.head = Linear(width, num_classes, **shared)
        self.head_dist = Linear(width, num_classes, **shared) if settings.distilled else none

    def __call__(
        self,
        images: Float[AnyArray, "batch height width channels"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch classes"]:
        """Returns the logits of images in float32 or wider.

        Args:
          images: float NHWC, normalised as in training; of any size, see `features`.
          deterministic: no dropout, no stochastic depth; else `rngs` has a stream `dropout`.
        """
        logits = self.heads(images, deterministic=deterministic, rngs=rngs)
        return logits[:, 0] if self.head_dist is None else logits.mean(axis=1)

    def heads(
        self,
        images: Float[AnyArray, "batch height width channels"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch heads classes"]:
        """Logits of each head: of the class token (or the mean), and of the distillation token."""
        last = len(self.blocks) - 1
        (tokens,) = self._after(images, [last], deterministic=deterministic, rngs=rngs)
        tokens = tokens if self.norm is None else self.norm(tokens)
        pooled = tokens[:, 0] if self.pooling == "cls" else self._patches(tokens).mean(axis=1)
        logits = self.head(pooled if self.fc_norm is None else self.fc_norm(pooled))[:, None]
        if self.head_dist is not None:
            logits = jnp.concatenate([logits, self.head_dist(tokens[:, 1])[:, None]], axis=1)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def features(
        self,
        images: Float[AnyArray, "batch height width channels"],
        *,
        blocks: Sequence[int] = (-1,),
        normalised: bool = False,
        as_grid: bool = False,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "batch *tokens features"], ...]:
        """Returns the tokens that come out of some of the blocks.

        Args:
          images: as of a call. Their sides are multiples of a patch; where they are others than
            those of the model, its positions are resized, as timm's ``dynamic_img_size`` does.
          blocks: which, counted from 0, or from the last by -1; those behind are not computed.
          normalised: by the last norm, where that does not stand behind the pooling.
          as_grid: the patches alone, as (batch, rows, columns, width); else all tokens, of which
            the first ``model.prefix_tokens`` are no patches.

        >>> sizes = dict(image_size=8, patch_size=2, width=16, depth=4, num_heads=2)
        >>> model = VisionTransformer(**sizes, registers=2, rngs=nnx.Rngs(0))
        >>> [x.shape for x in model.features(jnp.ones((3, 8, 8, 3)), blocks=(1, 3))]
        [(3, 19, 16), (3, 19, 16)]
        >>> model.features(jnp.ones((3, 12, 8, 3)), as_grid=True, normalised=True)[0].shape
        (3, 6, 4, 16)
        """
        depth = len(self.blocks)
        if not blocks or not all(-depth <= block < depth for block in blocks):
            raise ValueError(
                f"expected blocks from {-depth} to {depth - 1}, one at least, got {tuple(blocks)}; "
                "name some of these."
            )
        if normalised and self.norm is None:
            raise ValueError(
                "expected a norm of tokens to normalise them by, got fc_norm, which is one of "
                "their mean; pass normalised=False."
            )
        wanted = [range(depth)[block] for block in blocks]
        found = self._after(images, wanted, deterministic=deterministic, rngs=rngs)
        found = [self.norm(tokens) for tokens in found] if normalised else found
        if as_grid:
            batch, rows, columns = images.shape[0], *self._grid_of(images)
            found = [self._patches(x).reshape(batch, rows, columns, -1) for x in found]
        return tuple(found)

    def _after(
        self,
        images: Float[AnyArray, "batch height width channels"],
        wanted: Sequence[int],
        *,
        deterministic: bool,
        rngs: nnx.Rngs | None,
    ) -> list[Float[Array, "batch tokens features"]]:
        """The tokens behind each of the blocks of these numbers."""
        grid, patches = self._grid_of(images), self.patch_embed(images)
        if grid != self.grid:
            patches = patches.reshape(patches.shape[0], *grid, -1)
        tokens = self.dropout(self.embed_positions(patches), deterministic=deterministic, rngs=rngs)
        after, start = {}, 0
        for block in sorted(set(wanted)):
            tokens = after[block] = apply_blocks(
                list(self.blocks)[start : block + 1],
                tokens,
                deterministic=deterministic,
                rngs=rngs,
                remat=self.remat,
                scan=self.scan_blocks,
            )
            start = block + 1
        return [after[block] for block in wanted]

    def _grid_of(self, images: Float[AnyArray, "batch height width channels"]) -> Grid:
        """Rows and columns of patches of images."""
        *_, channels = self.image_shape
        side = self.image_shape[0] // self.grid[0]
        sides = images.shape[1:3]
        if images.ndim != 4 or images.shape[3] != channels or any(x % side or not x for x in sides):
            raise ValueError(
                f"expected images (batch, height, width, {channels}) whose sides are multiples of "
                f"{side}, got {images.shape}; resize them, or build the model with their channels."
            )
        return sides[0] // side, sides[1] // side

    def _patches(
        self, tokens: Float[Array, "batch tokens width"]
    ) -> Float[Array, "batch patches width"]:
        return tokens[:, self.prefix_tokens :] if self.prefix_tokens else tokens

    def set_data(self, settings: Any) -> None:
        """Takes the rates of dropout and of stochastic depth, perhaps traced, where they are on."""
        self.dropout.set_rate(settings.dropout_rate)
        rates = _layout.drop_path_rates(settings.drop_path_rate, len(self.blocks))
        for block, rate in zip(self.blocks, rates, strict=True):
            block.attention.set_dropout_rate(settings.attention_dropout_rate)
            block.dropout.set_rate(settings.dropout_rate)
            block.mlp.dropout.set_rate(settings.dropout_rate)
            block.drop_path.set_rate(rate)

    def anneal(self, progress: float | Array) -> None:
        """Gives adder layers the share of the squared distance due at this share of the steps,
        which may be traced. Without a call they have L1 distances, so evaluation always does.
        """
        if not self.annealing.end:
            return
        # Numbers are part of a block's program, of which a loop has one for all.
        progress = jnp.asarray(progress) if self.scan_blocks else progress
        shares = self.annealing.squared_shares(progress)
        # Convolutions in front of the patches go with the first block.
        parts = [(self.patch_embed, shares[0]), *zip(self.blocks, shares, strict=True)]
        for part, share in parts:
            for layer in adder_layers(part):
                layer.set_squared_share(share)

    def stages(self) -> list[float]:
        """Returns the shares of the steps at which `anneal` changes what is computed."""
        return self.annealing.stages()

    def loop_over_blocks(self) -> None:
        """Turns `scan_blocks` on where it can: quicker to compile in second derivatives."""
        self.scan_blocks = self.alike

    def embed_positions(
        self, patches: Float[Array, "batch *patches width"]
    ) -> Float[Array, "batch tokens width"]:
        """`embed_positions` with the model's own parameters."""
        parameters = {name: getattr(self, name) for name in (*_IN_FRONT, "pos_embed")}
        given = {name: p[...] for name, p in parameters.items() if p is not None}
        return embed_positions(given, patches, grid=self.grid)


_IN_FRONT = ("cls_token", "dist_token", "reg_token")


def embed_positions(
    params: Mapping[str, AnyArray],
    patches: Float[AnyArray, "batch *patches width"],
    *,
    grid: Grid | None = None,
) -> Float[Array, "batch tokens width"]:
    """The patches behind the other tokens, if there are any, plus positions, in the patches' dtype.

    Args:
      params: `pos_embed` (1, tokens, width), and `cls_token`, `dist_token` (1, 1, width) and
        `reg_token` (1, registers, width) for so many tokens more than there are patches.
      patches: embedded patches, (batch, patches, width), or (batch, rows, columns, width) of
        another grid than the positions are of.
      grid: rows and columns that the positions are of; needed for another one.

    >>> params = {"pos_embed": jnp.zeros((1, 5, 8)), "cls_token": jnp.ones((1, 1, 8))}
    >>> embed_positions(params, jnp.zeros((2, 4, 8)))[:, :, 0].tolist()
    [[1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
    """
    front = [params[name].astype(patches.dtype) for name in _IN_FRONT if name in params]
    positions = params["pos_embed"]
    if grid is not None and patches.ndim == 4:
        first = sum(token.shape[1] for token in front)
        new = (patches.shape[1], patches.shape[2])
        resized = resize_grid(jnp.asarray(positions[:, first:]), grid, new)
        positions = jnp.concatenate([positions[:, :first], resized], axis=1)
        patches = patches.reshape(patches.shape[0], -1, patches.shape[-1])
    front = [_of_each(token, patches) for token in front]
    tokens = jnp.concatenate([*front, patches], axis=1) if front else patches
    return jnp.add(tokens, positions.astype(tokens.dtype))


def _of_each(token: AnyArray, patches: AnyArray) -> Array:
    """A token of each image, split over explicit axes of a mesh as the images' patches are."""
    place, shape = jax.typeof(patches).sharding, (patches.shape[0], *token.shape[1:])
    explicit = AxisType.Explicit in place.mesh.axis_types
    of_images = place.update(spec=P(place.spec[0])) if explicit else None
    return jnp.broadcast_to(token, shape, out_sharding=of_images)


# Tokens in front and position embedding are one layer with curvature.
kfac.register_layer(
    VisionTransformer,
    "embed_positions",
    lambda model: kfac.Generic(embed_positions, (("grid", model.grid),)),
)


def deit_tiny(*, rngs: nnx.Rngs, **overrides: Any) -> VisionTransformer:
    """DeiT-Tiny: width 192, 12 blocks, 3 heads; overrides are arguments of `VisionTransformer`.

    Source: Touvron et al., 2021, https://arxiv.org/abs/2012.12877.
    """
    return _deit("tiny", overrides, rngs)


def deit_small(*, rngs: nnx.Rngs, **overrides: Any) -> VisionTransformer:
    """DeiT-Small: width 384, 12 blocks, 6 heads. Arguments as for `deit_tiny`."""
    return _deit("small", overrides, rngs)


def deit_base(*, rngs: nnx.Rngs, **overrides: Any) -> VisionTransformer:
    """DeiT-Base: width 768, 12 blocks, 12 heads. Arguments as for `deit_tiny`."""
    return _deit("base", overrides, rngs)


def _deit(size: str, overrides: Mapping[str, Any], rngs: nnx.Rngs) -> VisionTransformer:
    width, num_heads = DEIT_SIZES[size]
    sizes = {"width": width, "depth": 12, "num_heads": num_heads}
    return VisionTransformer(**{**sizes, **overrides}, rngs=rngs)


@register_model("vit", VitSettings)
def build_vit(settings: VitSettings, example: Example, *, rngs: nnx.Rngs) -> VisionTransformer:
    """Builds a vision transformer for images and ``classes``."""
    height, width, channels = image_shape(example, "vit")
    check_score_options(settings.attention)
    return VisionTransformer(
        settings=settings,
        image_size=(height, width),
        channels=channels,
        num_classes=example.sizes["classes"],
        dtype=jnp.dtype(settings.dtype),
        rngs=rngs,
    )

"""A small residual convolutional network: a teacher of what transformers lack on few images."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.models._registry import Example, image_shape, register_model
from adder_flax.settings import setting


@dataclasses.dataclass(frozen=True)
class ConvNetSettings:
    """A residual convolutional network."""

    name: str = setting(
        "conv_net", "the model, whose own fields follow", expected="the name of a model"
    )
    channels: tuple[int, ...] = setting(
        "32,64,128",
        "of each stage; every stage but the first halves the image",
        commas=int,
        ge=1,
        le=8192,
        max_length=8,
    )
    blocks: int = setting(1, "residual blocks of each stage", ge=1, le=100)
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of the computation")


class ConvNet(nnx.Module):
    """Stages of residual blocks of two 3 × 3 convolutions, GroupNorm and ReLU; the mean; a linear
    head.

    He et al., "Identity mappings in deep residual networks", 2016 (norms in front), with GroupNorm
    (Wu and He, 2018) in place of BatchNorm: an image's logits depend on it alone.

    Args:
      channels: of each stage; every stage but the first halves the image.
      blocks: residual blocks of each stage.
      dtype: of the computation; logits are float32 or wider.

    >>> net = ConvNet((8, 16), in_channels=1, num_classes=10, rngs=nnx.Rngs(0))
    >>> net(jnp.ones((2, 8, 8, 1))).shape
    (2, 10)
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 64, 128),
        blocks: int = 1,
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.stem = nnx.Conv(in_channels, channels[0], (3, 3), **shared)
        self.blocks, before = nnx.List(), channels[0]
        for stage, width in enumerate(channels):
            for block in range(blocks):
                stride = 2 if stage and block == 0 else 1
                self.blocks.append(_Residual(before, width, stride, **shared))
                before = width
        self.norm = _norm(channels[-1], **shared)
        self.head = nnx.Linear(channels[-1], num_classes, **shared)

    def __call__(
        self,
        images: Float[AnyArray, "batch height width channels"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch classes"]:
        """Classifies images; there is no dropout, so `deterministic` and `rngs` change nothing."""
        features = self.stem(jnp.asarray(images))
        for block in self.blocks:
            features = block(features)
        logits = self.head(jax.nn.relu(self.norm(features)).mean((1, 2)))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


class _Residual(nnx.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))).

    Where shapes differ, a 1 × 1 convolution of relu(norm(x)) stands in for the first x.
    """

    def __init__(self, before: int, width: int, stride: int, **shared):
        self.norm1 = _norm(before, **shared)
        self.conv1 = nnx.Conv(before, width, (3, 3), strides=stride, use_bias=False, **shared)
        self.norm2 = _norm(width, **shared)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, **shared)
        self.shortcut = nnx.data(None)
        if stride > 1 or before != width:
            shared |= dict(strides=stride, use_bias=False)
            self.shortcut = nnx.Conv(before, width, (1, 1), **shared)

    def __call__(self, features: Float[Array, "batch height width channels"]) -> Array:
        active = jax.nn.relu(self.norm1(features))
        skipped = features if self.shortcut is None else self.shortcut(active)
        return skipped + self.conv2(jax.nn.relu(self.norm2(self.conv1(active))))


def _norm(channels: int, **shared) -> nnx.GroupNorm:
    most = max(n for n in range(1, 9) if channels % n == 0)
    return nnx.GroupNorm(channels, num_groups=most, **shared)


@register_model("conv_net", ConvNetSettings)
def build_conv_net(settings: ConvNetSettings, example: Example, *, rngs: nnx.Rngs) -> ConvNet:
    """Builds a convolutional network for images and ``classes``."""
    *_, channels = image_shape(example, "conv_net")
    sizes: dict[str, Any] = dict(in_channels=channels, num_classes=example.sizes["classes"])
    sizes["dtype"] = jnp.dtype(settings.dtype)
    return ConvNet(settings.channels or (32,), settings.blocks, **sizes, rngs=rngs)

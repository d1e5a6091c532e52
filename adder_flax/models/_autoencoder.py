"""An autoencoder of images: linear layers to a code of few numbers, and back."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.layers import Linear, linear_class
from adder_flax.models._registry import Example, register_model
from adder_flax.settings import AdderSettings, section, setting


@dataclasses.dataclass(frozen=True)
class AutoencoderSettings:
    """Linear layers to a code and back."""

    name: str = setting(
        "autoencoder", "the model, whose own fields follow", expected="the name of a model"
    )
    widths: tuple[int, ...] = setting(
        "48,24,8",
        "of the encoder's layers, the code last; the decoder has them in reverse",
        commas=int,
        ge=1,
        le=65536,
        max_length=16,
    )
    linear: Literal["dense", "adder"] = setting("dense", "all layers but the last")
    adder_options: AdderSettings = section(AdderSettings)
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of the computation")

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if not self.widths:
            yield f"{where}.widths: expected at least that of the code, got none"


class Autoencoder(nnx.Module):
    """Logits of an image's values from a code of few numbers.

    Linear layers with tanh between them; the code and the logits are linear. Hinton and
    Salakhutdinov, "Reducing the dimensionality of data with neural networks", 2006, the problem on
    which second-order optimizers are compared since Martens, "Deep learning via Hessian-free
    optimization", 2010; with tanh for the logistic function, and all layers trained at once from
    weights N(0, 1/fan-in).

    Args:
      widths, linear, adder_options: see `AutoencoderSettings` and `adder_flax.layers.AdderLinear`.
      image_shape: height, width and channels.
      dtype: of the computation; logits are float32 or wider.

    >>> model = Autoencoder((48, 24, 8), image_shape=(8, 8, 1), rngs=nnx.Rngs(0))
    >>> model.encode(jnp.ones((2, 8, 8, 1))).shape, model(jnp.ones((2, 8, 8, 1))).shape
    ((2, 8), (2, 8, 8, 1))
    """

    def __init__(
        self,
        widths: Sequence[int] = (48, 24, 8),
        *,
        image_shape: tuple[int, int, int],
        linear: str = "dense",
        adder_options: AdderSettings | Mapping[str, Any] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.image_shape = tuple(image_shape)
        initialise = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
        dense = functools.partial(Linear, kernel_init=initialise)
        hidden = dense if linear == "dense" else linear_class(linear, adder_options)
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        down = (math.prod(image_shape), *widths)
        pairs = itertools.pairwise(down)
        self.encoder = nnx.List(hidden(before, after, **shared) for before, after in pairs)
        *pairs, last = itertools.pairwise(down[::-1])
        self.decoder = nnx.List(hidden(before, after, **shared) for before, after in pairs)
        self.decoder.append(dense(*last, **shared))

    def __call__(
        self,
        images: Float[AnyArray, "batch height width channels"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch height width channels"]:
        """Encodes and decodes images in [0, 1]; there is no dropout to be told of."""
        return self.decode(self.encode(images))

    def encode(
        self, images: Float[AnyArray, "batch height width channels"]
    ) -> Float[Array, "batch code"]:
        """Returns the code of each image."""
        return _in_turn(self.encoder, jnp.asarray(images).reshape(images.shape[0], -1))

    def decode(
        self, code: Float[AnyArray, "batch code"]
    ) -> Float[Array, "batch height width channels"]:
        """Returns the logits of an image's values for each code."""
        logits = _in_turn(self.decoder, jnp.asarray(code))
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return logits.reshape(logits.shape[0], *self.image_shape)


def _in_turn(
    layers: Sequence[Any], features: Float[Array, "batch features"]
) -> Float[Array, "batch new_features"]:
    first, *others = layers
    features = first(features)
    for layer in others:
        features = layer(jax.nn.tanh(features))
    return features


@register_model("autoencoder", AutoencoderSettings)
def build_autoencoder(
    settings: AutoencoderSettings, example: Example, *, rngs: nnx.Rngs
) -> Autoencoder:
    """Builds an autoencoder for images and ``logits``, one for each of an image's values."""
    shape = example.inputs[0].shape[1:]
    if len(example.inputs) != 1 or len(shape) != 3 or "logits" not in example.sizes:
        raise ValueError(
            "expected images whose values are to be told for config.model.name=autoencoder, got "
            f"{example}; set --config.model.name or --config.task.name"
        )
    kinds: dict[str, Any] = dict(linear=settings.linear, adder_options=settings.adder_options)
    dtype = jnp.dtype(settings.dtype)
    return Autoencoder(settings.widths, image_shape=shape, dtype=dtype, rngs=rngs, **kinds)

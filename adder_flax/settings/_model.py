"""Settings of the models."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from adder_flax.registry import Registry
from adder_flax.settings._fields import section, setting
from adder_flax.settings._rules import (
    Choice,
    EachBlock,
    Flag,
    Integer,
    Integers,
    Names,
    Number,
    Or,
    Text,
)

MAX_DEPTH = 1000
DEIT_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
"""Width and number of heads; all have 12 blocks, MLP ratio 4, heads of 64 (Touvron et al., 2021,
DeiT)."""
_DROP_RATE = Number(0, 1, "[)")
_GRADIENT = Choice("sign", "full", "hardtanh")
_LINEAR = EachBlock(Choice("dense", "adder"), MAX_DEPTH)
_PROJECTION = EachBlock(Choice("dense", "adder", "identity"), MAX_DEPTH)


@dataclasses.dataclass(frozen=True)
class AdditiveOptions:
    """Of additive scores."""

    hidden_dim: int | None = setting(
        0,
        Or({0: None}, Integer(1, 65536)),
        "additive: its hidden width; 0 for as many parameters as bilinear",
    )
    layer_norm: bool = setting(
        False, Flag(), "additive: LayerNorm before tanh, against its saturation"
    )


@dataclasses.dataclass(frozen=True)
class AdderOptions:
    """Of adder scores."""

    gradient: str = setting("sign", _GRADIENT, "adder: the rule of its derivative")


SCORE_OPTIONS: Registry[type] = Registry("score", "adder_flax.attention.register_score")
"""Options of the scores that have any, by the score's name; together they are the section
``score_options``."""
SCORE_OPTIONS.register("additive", AdditiveOptions)
SCORE_OPTIONS.register("adder", AdderOptions)


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """How queries look at keys.

    These are settings of a module of attention, and keywords of
    `adder_flax.attention.attend`.
    """

    # A name, or a tuple with one for each block; modules also take an
    # `adder_flax.attention.Score`.
    score: Any = setting(
        "dot",
        Names("score", MAX_DEPTH),
        "dot, bilinear, additive, adder, gaussian or a registered one; for each block: "
        '"adder,dot,adder,…"',
    )
    # Of all scores, since blocks may have different ones. Modules also take a mapping with those of
    # one score.
    score_options: Any = section(joined=SCORE_OPTIONS)
    identity: bool | None = setting(
        "auto",
        Choice(auto=None, on=True, off=False),
        "add I to the map; auto: with adder scores only",
    )
    scale: str | float | None = setting(
        "auto",
        Or(
            {"auto": None, "sqrt_dim": "sqrt_dim", "variance_matched": "variance_matched"},
            Number(1e-6, 1e6),
        ),
        "of scores; auto: 1 for additive ones, sqrt_dim (1/√head width) for the others",
    )
    temperature: float | str = setting(1.0, Number(1e-3, 1e3), "divides the scores")
    key_block: int | str | None = setting(
        "auto",
        Or({"auto": "auto", "off": None}, Integer(1, 2**20)),
        "attention in blocks of so many keys, in memory linear in the tokens; off builds the maps",
    )

    def options(self, log_temperature: Any = None) -> dict[str, Any]:
        """Options of `attend`, with the module's own parameter where the temperature is "learned".

        >>> AttentionSettings(temperature="learned").options(0.5)["temperature"]
        1.0
        """
        temperature = 1.0 if self.temperature == "learned" else self.temperature
        return vars(self) | {"temperature": temperature, "log_temperature": log_temperature}


@dataclasses.dataclass(frozen=True)
class AdderSettings:
    """Options of all adder layers."""

    x_gradient: str = setting("hardtanh", _GRADIENT, "rule of the derivative by the inputs")
    w_gradient: str = setting("full", _GRADIENT, "rule of the derivative by the weights")
    hardtanh_slope: float = setting(1.0, Number(1e-3, 1e3), "c of clip(c (w - x), -1, 1)")
    norm: str | None = setting("layernorm", Choice("layernorm", none=None), "of their outputs")
    initial_scale: float = setting(
        1.0, Number(1e-6, 1e6), "standard deviation of their weights' first values"
    )


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """A transformer block."""

    mlp_ratio: float = setting(4.0, Number(0, 64, "(]"), "hidden width of the MLPs over the width")
    attention: AttentionSettings = section(AttentionSettings, inline=True)
    qkv_linear: str | tuple[str, ...] = setting(
        "dense",
        _PROJECTION,
        "layers that make queries, keys and values; identity: all three are what comes in",
    )
    proj_linear: str | tuple[str, ...] = setting(
        "dense", _PROJECTION, "layers behind the attention; identity: none"
    )
    mlp_linear: str | tuple[str, ...] = setting(
        "dense",
        _LINEAR,
        'layers of the MLPs; for each block: "adder,dense,adder,…", as the two above',
    )
    adder_options: AdderSettings | Mapping[str, Any] = section(AdderSettings)
    layer_scale: float | None = setting(
        0.0,
        Or({0: None}, Number(0, 100, "(]")),
        "first value of a learned factor of each feature that attention and MLP add; 0 is off",
    )
    norm_epsilon: float = setting(
        1e-6,
        Number(1e-12, 1e-2),
        "of the LayerNorms in front of attention, MLP and head; Hugging Face's have 1e-12",
    )
    norm_position: str = setting(
        "pre",
        Choice("pre", "post"),
        "LayerNorm in front of attention and MLP, or behind the sum of each with what goes in",
    )
    dropout_rate: float = setting(
        0.0, _DROP_RATE, "of embeddings, after attention and in the MLPs", data="if on"
    )
    attention_dropout_rate: float = setting(0.0, _DROP_RATE, "of attention weights", data="if on")
    drop_path_rate: float = setting(
        0.0, _DROP_RATE, "stochastic depth of the last block, rising from 0", data="if on"
    )


@dataclasses.dataclass(frozen=True)
class VitSettings(BlockSettings):
    """The vision transformer: what its blocks share, and its own."""

    name: str = setting("vit", Text("the name of a model"), "the model, whose own fields follow")
    width: int = setting(192, Integer(1, 65536), "of the tokens")
    depth: int = setting(12, Integer(1, MAX_DEPTH), "number of blocks")
    num_heads: int = setting(3, Integer(1, 65536), "attention heads of a block; divides the width")
    patch_size: int = setting(
        16, Integer(1, 8192), "side of a patch, pixels; divides the images' sides"
    )
    stem_channels: tuple[int, ...] = setting(
        "",
        Integers(Integer(1, 65536), 12),
        'of 3 × 3 convolutions in front of the patches: "32,64"',
    )
    stem_strides: tuple[int, ...] = setting(
        "",
        Integers(Integer(1, 2), 12),
        "of these convolutions; empty: 2, each halves the image",
    )
    stem_linear: str = setting("dense", Choice("dense", "adder"), "layers of these convolutions")
    pooling: str = setting(
        "cls", Choice("cls", "mean"), "the class token, or the mean of the patches"
    )
    distilled: bool = setting(
        False,
        Flag(),
        "a second token, with a head of its own that learns from a teacher; needs the class token",
    )
    dtype: str = setting("float32", Choice("float32", "bfloat16", "float16"), "of the computation")
    anneal_start: float = setting(
        0.0,
        Number(0, 1, "[)"),
        "share of the training after which adder layers begin to leave the squared distance",
    )
    anneal_end: float = setting(
        0.0,
        Number(0, 1),
        "share of it after which all have the L1 distance; 0: they have it from the start",
    )
    anneal_blocks: str = setting(
        "together", Choice("together", "in_turn"), "whether blocks do so at once or in turn"
    )
    remat: bool = setting(
        False, Flag(), "compute activations again in the backward pass: less memory, more time"
    )
    registers: int = setting(
        0, Integer(0, 1024), "further learned tokens behind the class token, which no head reads"
    )
    fc_norm: bool = setting(
        False, Flag(), "the last norm stands behind the pooling, in place of in front of it"
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        scores = self.attention.score
        if self.width % self.num_heads:
            yield (
                f"{where}.num_heads: expected a number that divides {where}.width = {self.width}, "
                f"got {self.num_heads}"
            )
        if int(self.width * self.mlp_ratio) < 1:
            yield (
                f"{where}.mlp_ratio: expected an MLP of at least 1 unit, got {self.mlp_ratio} × "
                f"width {self.width}"
            )
        if self.distilled and self.pooling != "cls":
            yield (
                f"{where}.distilled: expected False without a class token, got True with "
                f"{where}.pooling = 'mean'"
            )
        if self.distilled and self.fc_norm:
            yield (
                f"{where}.fc_norm: expected False with a distillation token, got True with "
                f"{where}.distilled = True"
            )
        if self.stem_strides and len(self.stem_strides) != len(self.stem_channels):
            yield (
                f"{where}.stem_strides: expected one for each of {len(self.stem_channels)} "
                f"convolutions of {where}.stem_channels, or none, got {len(self.stem_strides)}"
            )
        reduction = math.prod(self.stem_strides or (2,) * len(self.stem_channels))
        if self.patch_size % reduction:
            yield (
                f"{where}.patch_size: expected a multiple of {reduction}, as the stem's "
                f"{len(self.stem_channels)} convolutions make the image so many times smaller, got "
                f"{self.patch_size}"
            )
        if isinstance(scores, tuple) and len(scores) != self.depth:
            yield (
                f"{where}.score: expected one score or {where}.depth = {self.depth} of them, got "
                f"{len(scores)}"
            )
        for name in ("qkv_linear", "proj_linear", "mlp_linear"):
            kinds = getattr(self, name)
            if isinstance(kinds, tuple) and len(kinds) != self.depth:
                yield (
                    f"{where}.{name}: expected one kind or {where}.depth = {self.depth} of them, "
                    f"got {len(kinds)}"
                )
        if self.anneal_end and self.anneal_start >= self.anneal_end:
            yield (
                f"{where}.anneal_start: expected less than {where}.anneal_end = {self.anneal_end}, "
                f"got {self.anneal_start}"
            )


MODEL_SETTINGS: Registry[type] = Registry("model", "adder_flax.models.register_model")
MODEL_SETTINGS.register("vit", VitSettings)

"""Settings of the models."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from adder_flax.registry import Registry
from adder_flax.settings._declare import fault, section, setting

MAX_DEPTH = 1000
_BITS: dict[str, Any] = dict(words={0: None}, ge=1, le=8)
_ATTENTION_LINEAR: dict[str, Any] = dict(
    commas=Literal["dense", "normed_dense", "adder", "identity"], max_length=MAX_DEPTH
)
_STEM: dict[str, Any] = dict(commas=int, ge=1, max_length=12)
_Gradient = Literal["sign", "full", "hardtanh"]
DEIT_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
"""Width and number of heads; all have 12 blocks, MLP ratio 4, heads of 64 (Touvron et al., 2021,
DeiT)."""


@dataclasses.dataclass(frozen=True)
class AdditiveOptions:
    """Of additive scores."""

    hidden_dim: int | None = setting(
        0,
        "additive: its hidden width; 0 for as many parameters as bilinear",
        words={0: None},
        ge=1,
        le=65536,
    )
    layer_norm: bool = setting(False, "additive: LayerNorm before tanh, against its saturation")


@dataclasses.dataclass(frozen=True)
class AdderOptions:
    """Of adder scores."""

    gradient: _Gradient = setting("sign", "adder: the rule of its derivative")
    bits: int | None = setting(
        0, "adder: queries and keys are rounded to so many, straight through; 0: not", **_BITS
    )


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
        "dot, bilinear, additive, adder, gaussian or a registered one; for each block: "
        '"adder,dot,adder,…"',
        commas=str,
        expected="the name of a score, or one for each block with commas between them",
        max_length=MAX_DEPTH,
    )
    # Of all scores, since blocks may have different ones. Modules also take a mapping with those of
    # one score.
    score_options: Any = section(joined=SCORE_OPTIONS)
    identity: bool | None = setting(
        "auto",
        "add I to the map; auto: with adder scores only",
        words={"auto": None, "on": True, "off": False},
    )
    scale: str | float | None = setting(
        "auto",
        "of scores; auto: 1 for additive ones, sqrt_dim (1/√head width) for the others",
        words={"auto": None, "sqrt_dim": "sqrt_dim", "variance_matched": "variance_matched"},
        ge=1e-6,
        le=1e6,
    )
    temperature: float | str = setting(1.0, "divides the scores", ge=1e-3, le=1e3)
    key_block: int | str | None = setting(
        "auto",
        "attention in blocks of so many keys, in linear memory; off builds the maps",
        words={"auto": "auto", "off": None},
        ge=1,
        le=2**20,
    )

    @property
    def attention(self) -> "AttentionSettings":
        """These fields alone, of settings that have more."""
        fields = dataclasses.fields(AttentionSettings)
        return AttentionSettings(**{field.name: getattr(self, field.name) for field in fields})

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

    x_gradient: _Gradient = setting("hardtanh", "rule of the derivative by the inputs")
    w_gradient: _Gradient = setting("full", "rule of the derivative by the weights")
    hardtanh_slope: float = setting(1.0, "c of clip(c (w - x), -1, 1)", ge=1e-3, le=1e3)
    norm: str | None = setting(
        "layernorm", "of their outputs", words={"layernorm": "layernorm", "none": None}
    )
    initial_scale: float = setting(
        1.0, "standard deviation of their weights' first values", ge=1e-6, le=1e6
    )
    bits: int | None = setting(
        0, "their inputs and weights are rounded to so many, straight through; 0: not", **_BITS
    )


@dataclasses.dataclass(frozen=True)
class BlockSettings(AttentionSettings):
    """A transformer block."""

    mlp_ratio: float = setting(4.0, "hidden width of the MLPs over the width", gt=0, le=64)
    qkv_linear: str | tuple[str, ...] = setting(
        "dense",
        "layers that make queries, keys and values; identity: all three are what comes in",
        **_ATTENTION_LINEAR,
    )
    proj_linear: str | tuple[str, ...] = setting(
        "dense", "layers behind the attention; identity: none", **_ATTENTION_LINEAR
    )
    mlp_linear: str | tuple[str, ...] = setting(
        "dense",
        'layers of the MLPs; for each block: "adder,dense,adder,…", as the two above',
        commas=Literal["dense", "normed_dense", "adder"],
        max_length=MAX_DEPTH,
    )
    adder_options: AdderSettings | Mapping[str, Any] = section(AdderSettings)
    layer_scale: float | None = setting(
        0.0,
        "first value of a learned factor of what attention and MLP add; 0 is off",
        words={0: None},
        gt=0,
        le=100,
    )
    norm_epsilon: float = setting(
        1e-6,
        "of the LayerNorms in front of attention, MLP and head; Hugging Face's have 1e-12",
        ge=1e-12,
        le=0.01,
    )
    norm_position: Literal["pre", "post"] = setting(
        "pre", "LayerNorm in front of attention and MLP, or behind their sums"
    )
    dropout_rate: float = setting(
        0.0, "of embeddings, after attention and in the MLPs", data="if on", ge=0, lt=1
    )
    attention_dropout_rate: float = setting(0.0, "of attention weights", data="if on", ge=0, lt=1)
    drop_path_rate: float = setting(
        0.0, "stochastic depth of the last block, rising from 0", data="if on", ge=0, lt=1
    )


@dataclasses.dataclass(frozen=True)
class VitSettings(BlockSettings):
    """The vision transformer: what its blocks share, and its own."""

    name: str = setting("vit", "the model, whose own fields follow", expected="the name of a model")
    width: int = setting(192, "of the tokens", ge=1, le=65536)
    depth: int = setting(12, "number of blocks", ge=1, le=MAX_DEPTH)
    num_heads: int = setting(3, "attention heads of a block; divides the width", ge=1, le=65536)
    patch_size: int = setting(
        16, "side of a patch, pixels; divides the images' sides", ge=1, le=8192
    )
    stem_channels: tuple[int, ...] = setting(
        "", 'of 3 × 3 convolutions in front of the patches: "32,64"', **_STEM, le=65536
    )
    stem_strides: tuple[int, ...] = setting(
        "", "of these convolutions; empty: 2, each halves the image", **_STEM, le=2
    )
    stem_linear: Literal["dense", "adder"] = setting("dense", "layers of these convolutions")
    pooling: Literal["cls", "mean"] = setting("cls", "the class token, or the mean of the patches")
    distilled: bool = setting(
        False, "a second token whose head learns from a teacher; needs the class token"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of the computation")
    anneal_start: float = setting(
        0.0,
        "share of the training after which adder layers begin to leave the squared distance",
        ge=0,
        lt=1,
    )
    anneal_end: float = setting(
        0.0, "share after which all have the L1 distance; 0: from the start", ge=0, le=1
    )
    anneal_blocks: Literal["together", "in_turn"] = setting(
        "together", "whether blocks do so at once or in turn"
    )
    remat: bool = setting(
        False, "compute activations again in the backward pass: less memory, more time"
    )
    registers: int = setting(
        0, "further learned tokens behind the class token, which no head reads", ge=0, le=1024
    )
    fc_norm: bool = setting(
        False, "the last norm stands behind the pooling, in place of in front of it"
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.width % self.num_heads:
            divides = f"a number that divides {where}.width = {self.width}"
            yield fault(f"{where}.num_heads", divides, self.num_heads)
        if int(self.width * self.mlp_ratio) < 1:
            got = f"{self.mlp_ratio} × width {self.width}"
            yield fault(f"{where}.mlp_ratio", "an MLP of at least 1 unit", got)
        if self.distilled and self.pooling != "cls":
            got = f"True with {where}.pooling = 'mean'"
            yield fault(f"{where}.distilled", "False without a class token", got)
        if self.distilled and self.fc_norm:
            got = f"True with {where}.distilled = True"
            yield fault(f"{where}.fc_norm", "False with a distillation token", got)
        convolutions = len(self.stem_channels)
        if self.stem_strides and len(self.stem_strides) != convolutions:
            expected = (
                f"one for each of {convolutions} convolutions of {where}.stem_channels, or none"
            )
            yield fault(f"{where}.stem_strides", expected, len(self.stem_strides))
        reduction = math.prod(self.stem_strides or (2,) * convolutions)
        if self.patch_size % reduction:
            expected = (
                f"a multiple of {reduction}, as the stem's {convolutions} convolutions make the "
                "image so many times smaller"
            )
            yield fault(f"{where}.patch_size", expected, self.patch_size)
        for name in ("score", "qkv_linear", "proj_linear", "mlp_linear"):
            kinds = getattr(self, name)
            if isinstance(kinds, tuple) and len(kinds) != self.depth:
                expected = f"one or {where}.depth = {self.depth} of them"
                yield fault(f"{where}.{name}", expected, len(kinds))
        if self.anneal_end and self.anneal_start >= self.anneal_end:
            expected = f"less than {where}.anneal_end = {self.anneal_end}"
            yield fault(f"{where}.anneal_start", expected, self.anneal_start)


MODEL_SETTINGS: Registry[type] = Registry("model", "adder_flax.models.register_model")
MODEL_SETTINGS.register("vit", VitSettings)

"""A transformer in few bits as one file of C and one of weights."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax import quantized
from adder_flax.attention import LAYER_NORM_EPSILON, resolve_scale
from adder_flax.files import write_whole
from adder_flax.models import VisionTransformer

_MAGIC = b"ADDER8C1"


def save_c(
    model: Any, folder: str | Path, *, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Writes `model.c`, C99 that needs libm alone, and `model.bin`, its weights, into a folder.

    `cc -O3 -o classify model.c -lm` makes a command of it; the file says how to use it. From the
    same bytes its integer sums are those of JAX. Between them it computes in double: where JAX's
    rounding to float32 makes a byte of an activation the next one, logits differ by some hundredth.

    Args:
      model: a vision transformer that `adder_flax.quantized.quantize_model` made, of adder layers
        with LayerNorm and adder scores in all blocks.
      folder: which is made.
      mean, std: of each channel, or of all, by which images are normalised.

    Raises:
      ValueError: another model.
    """
    source, weights = program(model, mean=mean, std=std)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "model.bin", weights)
    write_whole(folder / "model.c", source.encode())


def program(model: Any, *, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[str, bytes]:
    """Returns what `save_c` writes, the program's text and the weights."""
    model = _checked(model)
    rows, columns, channels = model.image_shape
    first = model.blocks[0]
    bits = first.mlp.fc1.weights.grid.bits
    sizes = {
        "ROWS": rows,
        "COLUMNS": columns,
        "CHANNELS": channels,
        "PATCH": rows // model.grid[0],
        "PREFIX": model.prefix_tokens,
        "WIDTH": model.pos_embed.shape[-1],
        "DEPTH": len(model.blocks),
        "HEADS": first.attention.num_heads,
        "HIDDEN": first.mlp.fc2.weights.packed.columns.shape[1],
        "CLASSES": model.head.bias.shape[0],
        "LEVELS": 2**bits - 1,
        "IDENTITY": int(first.attention.settings.identity in (None, True)),
        "MEAN_POOLING": int(model.pooling == "mean"),
        "FC_NORM": int(model.fc_norm is not None),
    }
    over = lambda values: np.broadcast_to(np.float32(values), channels)
    parts = [over(mean), over(std), *_parts(model)]
    payload = b"".join(part.tobytes() for part in parts)
    numbers = np.array([*sizes.values(), zlib.crc32(payload)], "<u4")
    content = _MAGIC + numbers.tobytes() + payload
    norm = first.norm1
    told = sizes | {
        "EPSILON": norm.epsilon,
        "ADDER_EPSILON": LAYER_NORM_EPSILON,
        "SIZES_COUNT": len(sizes),
        "SIZES_LIST": ", ".join(sizes),
        "MODEL_BYTES": len(content),
    }
    source = Path(__file__).with_name("model.c").read_text()
    defined = "\n".join(f"#define {name} {value}" for name, value in told.items())
    return source.replace("/* SIZES */", defined), content


def _parts(model: Any) -> list[np.ndarray]:
    """The arrays of the struct `Model` behind the statistics, in its order."""
    front = [getattr(model, name) for name in ("cls_token", "dist_token", "reg_token")]
    prefix = [_floats(token)[0] for token in front if token is not None]
    width = model.pos_embed.shape[-1]
    parts = [_floats(model.patch_embed.proj.kernel), _floats(model.patch_embed.proj.bias)]
    parts += prefix or [np.zeros((1, width), np.float32)]
    parts.append(_floats(model.pos_embed))
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        parts += _norm(block.norm1)
        for layer in (attention.query, attention.key, attention.value):
            parts += _layer(layer)
        parts += _layer(attention.out, block.layer_scale1)
        ends = (_floats(attention.score[name]) for name in ("lowest", "step"))
        parts += [np.stack([*ends], axis=-1), score_factors(attention)]
        parts += [*_norm(block.norm2), *_layer(mlp.fc1), *_layer(mlp.fc2, block.layer_scale2)]
    norm = model.norm if model.fc_norm is None else model.fc_norm
    return [*parts, *_norm(norm), _floats(model.head.kernel), _floats(model.head.bias)]


def _floats(parameter: Any) -> np.ndarray:
    return np.asarray(parameter[...], "<f4")


def _norm(norm: Any, factor: Any = 1.0) -> list[np.ndarray]:
    return [np.asarray(_floats(part) * factor, "<f4") for part in (norm.scale, norm.bias)]


def _layer(layer: quantized.AdderLinear, layer_scale: Any = None) -> list[np.ndarray]:
    """An `ADDER_LAYER`, whose outputs are multiplied by the factors of a LayerScale."""
    weights = layer.weights
    ends = np.array([weights.grid.lowest, weights.grid.scale], "<f4")
    factor = 1.0 if getattr(layer_scale, "scale", None) is None else _floats(layer_scale.scale)
    columns = np.asarray(weights.packed.columns).ravel()
    filled = np.pad(columns, (0, -len(columns) % 4))
    return [ends, np.asarray(weights.excess, "<f4"), *_norm(layer.norm, factor), filled]


def score_factors(attention: Any) -> np.ndarray:
    """What each head's scores are multiplied by."""
    settings = attention.settings
    scale = resolve_scale(settings.score, settings.scale, attention.head_dim)
    if settings.temperature != "learned":
        return np.full(attention.num_heads, scale / settings.temperature, "<f4")
    return np.asarray(scale * np.exp(-_floats(attention.log_temperature)), "<f4")


def _checked(model: Any) -> Any:
    """Refuses what the C file does not compute."""
    if got := unlike(model):
        pass
    elif any(
        not isinstance(layer, quantized.AdderLinear) or layer.norm is None
        for block in model.blocks
        for layer in _linear_layers(block)
    ):
        got = "other layers in its blocks"
    elif any("lowest" not in block.attention.score for block in model.blocks):
        got = "other scores in its blocks"
    elif any(
        layer.dtype is not None and layer.dtype != np.float32
        for block in model.blocks
        for layer in _linear_layers(block)
    ):
        got = "a narrower dtype"
    else:
        return model
    raise ValueError(
        "expected a vision transformer in few bits, of adder layers with LayerNorm and adder "
        f"scores in all blocks, patches cut from the image and float32 between, got {got}; export "
        "a program (--names=stablehlo)"
    )


def unlike(model: Any) -> str | None:
    """What tells a model from a vision transformer of patches and blocks with norms in front."""
    if not isinstance(model, VisionTransformer):
        return f"a {type(model).__name__}"
    if model.dist_token is not None or len(model.patch_embed.stem):
        return "a distillation token or convolutions in front of the patches"
    if any(block.norm_position != "pre" for block in model.blocks):
        return "norm_position 'post'"
    return None


def _linear_layers(block: Any) -> list[Any]:
    attention, mlp = block.attention, block.mlp
    return [attention.query, attention.key, attention.value, attention.out, mlp.fc1, mlp.fc2]

"""Reads and writes the weights of a model in safetensors files.

They hold arrays and no code.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from adder_flax.arrays import AnyArray
from adder_flax.attention import resolve_scale
from adder_flax.extras import needs
from adder_flax.files import write_whole
from adder_flax.interop._names import FORMATS, Match, format_of, sizes_of, to_arrays
from adder_flax.interop._network import (
    Statistics,
    as_metadata,
    check_network,
    check_scores,
    image_statistics,
    read_network,
)
from adder_flax.interop._safetensors import open_weights
from adder_flax.layers import Block, Identity, NormedLinear
from adder_flax.models import VisionTransformer
from adder_flax.parameters import has_prototypes
from adder_flax.quantized import AdderLinear
from adder_flax.text import printable

with needs("interop"):
    import safetensors.numpy


def save_weights(
    model: nnx.Module,
    path: str | Path,
    *,
    names: str = "adder_flax",
    statistics: Statistics | None = None,
) -> None:
    """Writes the parameters of a model to a safetensors file.

    Args:
      model: the model.
      path: of the file; one that is there is replaced in one step, once the new one is whole.
      names: whose names and layouts: `"adder_flax"`, `"timm"`, `"hugging_face"`, as the files of
        its `ViTForImageClassification` have them, or `"transformers_5"`, as the model has them in
        memory from version 5 on.
      statistics: mean and deviation of each channel by which the images are normalised, which go
        into the header.

    >>> import tempfile
    >>> sizes = dict(image_size=8, patch_size=2, width=8, depth=1, num_heads=2)
    >>> model = VisionTransformer(**sizes, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(model, f"{folder}/model.safetensors", names="timm")
    ...     load_weights(model, f"{folder}/model.safetensors")
    ()
    """
    content = weights_of(model, names, statistics)
    try:
        write_whole(path, content)
    except OSError as error:
        raise type(error)(
            f"expected to write {len(content)} bytes to {printable(path)}, got: "
            f"{error.strerror or error}; what was there is still there; make room, or choose "
            "another path"
        ) from error


def weights_of(model: nnx.Module, names: str, statistics: Statistics | None = None) -> bytes:
    """Returns the content of a safetensors file, see `save_weights`."""
    if names not in FORMATS:
        raise ValueError(
            f"expected names of {', '.join(FORMATS)}, got {names!r}; choose one of these"
        )
    network = _checked(model, names)
    params = _flat(_parameters(network))
    if names != "adder_flax":
        _check_attention(network, names)
        params = _with_plain_scores(network, params)
    arrays = to_arrays(params, names, channels=network.image_shape[-1])
    # Hugging Face's reader insists on the first entry.
    metadata = {"format": "pt"} | as_metadata(network, names, statistics)
    return safetensors.numpy.save(arrays, metadata=metadata)


def load_weights(model: VisionTransformer, path: str | Path) -> tuple[str, ...]:
    """Reads weights of timm, Hugging Face or `save_weights` into a model.

    Attention may be of another kind than that of the weights, as long as its projections are dense:
    what its score has learned parameters for stays as it is. So does the head where there is none,
    or one for another number of classes. The position embedding is resized where the grid of
    patches differs, in the way of the project whose names the file has; LayerScale (DeiT III)
    becomes part of the layers that it scales; scale and temperature of dot products are taken up by
    the queries. In this project's own names they, and the identity map, have to be the model's
    where the score is.

    Names and shapes are compared before any data are read, and so is what they do not tell: the
    number of heads, the activation, the norms, the pooling and the grid of patches, which stand in
    the ``config.json`` beside files of timm and Hugging Face, and in the header of those of
    `save_weights`. Numbers in 16, 32 or 64 bits are converted.

    Args:
      model: changed in place.
      path: of a safetensors file, of the index of several, or of a folder that has one of both.

    Returns:
      Paths of the parameters that stayed as they were.

    Raises:
      ValueError: no safetensors file, or weights that do not fit or of an unknown network.
    """
    found, _ = _read(model, path)
    like = _parameters(model)
    params = _flat(like)
    nnx.update(model, _nested(params | found, like=like))
    return tuple(name for name in params if name not in found)


def read_statistics(path: str | Path) -> Statistics | None:
    """Returns mean and deviation of each channel by which the images of weights are normalised.

    None where neither the file nor what lies beside it, see `load_weights`, says so.
    """
    with open_weights(path) as weights:
        return image_statistics(weights)


def read_model(
    path: str | Path, *, image_shape: tuple[int, int, int], num_classes: int
) -> tuple[VisionTransformer, Statistics | None]:
    """Builds the vision transformer that a file of timm or Hugging Face is of, with its weights.

    Its sizes are those of the arrays, and what they do not show stands beside them, see
    `load_weights`.

    Args:
      path: as for `load_weights`.
      image_shape: height, width and channels of the images that it is to see.
      num_classes: that its head must have.

    Returns:
      The model, and what `read_statistics` does.
    """
    with open_weights(path) as weights:
        names = format_of(weights.shapes)
        if names == "adder_flax":
            raise ValueError(
                "expected weights of timm or Hugging Face to build their model from, got those of "
                f"this project in {printable(path)}, which do not tell the attention; take the "
                "directory of the run that they are of"
            )
        sizes = sizes_of(weights.shapes, names)
        network = read_network(weights, names, sizes["patch_size"])
        if network.pooling == "mean" and "cls_token" in weights.shapes:
            sizes["registers"] += 1  # which no head reads
        statistics = image_statistics(weights)
    options: dict[str, Any] = dict(num_heads=network.num_heads, norm_epsilon=network.epsilon)
    options |= sizes | dict(image_size=image_shape[:2], channels=image_shape[2])
    options |= dict(num_classes=num_classes, pooling=network.pooling)
    model = nnx.eval_shape(lambda: VisionTransformer(**options, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    like = nnx.to_pure_dict(params)
    found, _ = _read(model, path)
    if missing := [name for name in _flat(like) if name not in found]:
        raise ValueError(
            f"expected a head for {num_classes} classes in {printable(path)}, got none or one for "
            f"others: {', '.join(missing)}; choose weights for the same classes"
        )
    return nnx.merge(graphdef, _nested(found, like=like)), statistics


def start_from(run: Any, path: str | Path) -> tuple[Any, tuple[str, ...], str]:
    """Returns a run with weights of a file at its first step, see `load_weights`.

    The file is read and checked at once. Beside the run stand the paths of the parameters that
    still start at random, and in words what of it is not as in the file.
    """
    like = run.abstract_state["params"]
    found, words = _read(run.model(like), path)
    kept = tuple(name for name in _flat(like) if name not in found)

    def init() -> Any:
        state = run.init()
        flat: dict[Any, Any] = flatten_dict(state["params"])
        flat |= flatten_dict(state.get("model_state", {}))
        for path, leaf in flat.items():
            if (name := ".".join(map(str, path))) in found:
                flat[path] = jax.device_put(found[name], leaf.sharding)
        # The optimizer may keep parameters, too, as an average.
        return run.program.initial_state(unflatten_dict(flat), run.hyper)

    return dataclasses.replace(run, init=init), kept, "; ".join(words)


def _read(model: VisionTransformer, path: str | Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the parameters of a model that a file has, by path, and in words what was changed."""
    params = _flat(_parameters(model))
    shapes = {name: leaf.shape for name, leaf in params.items()}
    with open_weights(path) as weights:
        names = format_of(weights.shapes)
        channels = _checked(model, names).image_shape[-1]
        match = Match(weights.shapes, shapes, channels=channels)
        grid = check_network(model, weights, names, model.image_shape[0] // model.grid[0])
        match.check_positions(grid)  # before anything large is read
        if names == "adder_flax":
            check_scores(model, weights)
        arrays = {name: weights.read(name) for name in match.arrays}
        like = "torch" if names in ("hugging_face", "transformers_5") else "timm"
        found = match.parameters(arrays, grids=(grid, model.grid), like=like)
        if names != "adder_flax":
            found |= _with_own_scores(model, found)
        as_type = lambda name, array: _as_type(array, params[name].dtype, match.places[name].name)
        converted = {name: as_type(name, array) for name, array in found.items()}
    return converted, match.changes(grid, model.grid)


def _with_own_scores(
    model: VisionTransformer, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the layers of queries that give the scores q·k/√d whatever scale the model has."""
    return {
        path: _scaled(params[path], 1 / _query_factors(block))
        for number, block in enumerate(model.blocks)
        if str(block.attention.settings.score) == "dot"
        for path in (f"blocks.{number}.attention.query.{part}" for part in ("kernel", "bias"))
        if path in params
    }


def _as_type(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if not np.isfinite(converted).all():
        largest = np.abs(array).max()
        raise ValueError(
            f"expected numbers in {name} that {np.dtype(dtype).name} holds, got {largest:.3g} in "
            f"{array.dtype.name}; save them within its range"
        )
    return converted


def _checked(model: nnx.Module, names: str) -> VisionTransformer:
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            "expected a vision transformer, whose weights have names that others know, got a "
            f"{type(model).__name__}; keep its checkpoints"
        )
    if any(isinstance(module, AdderLinear) for _, module in nnx.iter_modules(model)):
        raise ValueError(
            "expected a model in floating point, got one with layers in few bits, whose weights "
            "are no parameters; take the model that it was made of, or interop.save_integers"
        )
    if names != "adder_flax" and has_prototypes(model):
        raise ValueError(
            f"expected dense layers for weights in the names of {names}, got adder layers, whose "
            "weights mean something else; choose qkv_linear, proj_linear and mlp_linear 'dense', "
            "or the names of adder_flax"
        )
    if names != "adder_flax" and not all(map(_is_published, model.blocks)):
        raise ValueError(
            "expected dense layers, and LayerNorm in front of attention and MLP, for weights in "
            f"the names of {names}, got other blocks; choose norm_position 'pre', qkv_linear, "
            "proj_linear and mlp_linear 'dense', or the names of adder_flax"
        )
    plain = model.pooling == "cls" and model.reg_token is None and model.norm is not None
    if names in ("hugging_face", "transformers_5") and not plain:
        raise ValueError(
            "expected a vision transformer that reads its class token behind the last norm, "
            f"without registers, for weights in the names of {names}, got pooling "
            f"{model.pooling!r}, {model.prefix_tokens} tokens in front of the patches; choose "
            "other names, or export a program (--names=stablehlo)"
        )
    if names != "adder_flax" and len(model.patch_embed.stem):
        raise ValueError(
            f"expected patches cut from the image for weights in the names of {names}, got "
            "convolutions in front of them; leave out stem_channels, or choose the names of "
            "adder_flax"
        )
    return model


def _check_attention(model: VisionTransformer, names: str) -> None:
    """Refuses to write what others would compute another function with."""
    for block in model.blocks:
        settings = block.attention.settings
        got = "the identity map beside it" if settings.identity else str(settings.score)
        if got != "dot":
            raise ValueError(
                f"expected dot-product attention for weights in the names of {names}, got {got}; "
                "write in the names of adder_flax, or export a program (--names=stablehlo)"
            )


def _with_plain_scores(
    model: VisionTransformer, params: Mapping[str, AnyArray]
) -> dict[str, AnyArray]:
    """Returns parameters of the same function with scores of q·k/√d, scaled by their queries."""
    folded = dict(params)
    for number, block in enumerate(model.blocks):
        factors = _query_factors(block)
        path = f"blocks.{number}.attention"
        learned = folded.pop(f"{path}.log_temperature", None)
        if learned is not None:
            factors = factors * np.exp(-np.repeat(np.float64(learned), block.attention.head_dim))
        for name in (f"{path}.query.kernel", f"{path}.query.bias"):
            folded[name] = _scaled(np.asarray(folded[name]), factors)
    return folded


def _query_factors(block: Block) -> np.ndarray:
    """Returns what makes queries of a block of q·k/√d, without a learned temperature."""
    attention = block.attention
    settings, head_dim = attention.settings, attention.head_dim
    scale = resolve_scale(settings.score, settings.scale, head_dim) * head_dim**0.5
    temperature = 1.0 if settings.temperature == "learned" else settings.temperature
    return np.full(attention.num_heads * head_dim, scale / temperature)


def _scaled(array: np.ndarray, factors: np.ndarray) -> np.ndarray:
    if (factors == 1).all():
        return array
    return (array * factors).astype(np.result_type(array, np.float32))


def _is_published(block: Block) -> bool:
    """Whether it is a block of ViT, whatever its score."""
    return block.norm_position == "pre" and not any(
        isinstance(layer, Identity | NormedLinear) for _, layer in nnx.iter_modules(block)
    )


def _parameters(model: VisionTransformer) -> dict[str, Any]:
    """And the statistics of batch normalisation, which a model of one's own may have."""
    return nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
    named = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {named(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _nested(flat: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in _flat(like)])

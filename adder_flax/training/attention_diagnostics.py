"""How attention and adder layers are doing during a run: a few numbers for each block, at logging steps only.

``--config.attention_diagnostics=True`` turns them on. A logging step then costs a second forward and backward pass;
the other steps cost nothing, and what is trained stays the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from adder_flax.attention import MultiHeadAttention, get_score, resolve_scale
from adder_flax.layers import AdderLinear
from adder_flax.models.instrument import instrument
from adder_flax.training.step import Augmentation, Batch, Metrics, make_loss_fn, step_keys

_RANK_LEVEL = 0.9


def make_attention_diagnostics(
    graphdef: nnx.GraphDef,
    augment: Augmentation,
    *,
    seed: int,
    accumulation_steps: int = 1,
    num_images: int = 8,
) -> Callable[[Any, Batch, int], Metrics]:
    """Returns ``diagnostics(params, batch, step) → {name: scalar}`` for the step that is about to be taken.

    Names end in the block, ``block_01`` …, with the branch where there are two:

    - ``attention_entropy``: of the rows of the map, in nats, mean; ln(tokens) is uniform attention.
    - ``attention_max_logit``: largest scaled score; distances are at most 0.
    - ``attention_logit_std``: standard deviation of a row's scaled scores, mean.
    - ``attention_rank``: number of singular values that make up 0.9 of their sum, mean over maps.
    - ``hardtanh_saturation``: share of the differences w − x that the HardTanh rule clips, |c (w − x)| ≥ 1.
    - ``adder_output_mean``: mean of the raw sums over K, the number of inputs; −1.13 for unit-normal x and w.
    - ``adder_output_std``: standard deviation of the raw sums of one row over √K, mean; 0.85 for the same.
    - ``gradient_norm``: of the branch's parameters, its LayerNorm included; and of the parts outside the blocks.

    The first four leave the identity map out. All but the gradient norms are of the first images of the batch, without
    dropout. The gradient is that of the step itself, with accumulation that of its first microbatch.

    Args:
      graphdef: the model without its parameters.
      augment: as of the training step.
      seed: as of the training step.
      accumulation_steps: as of the training step.
      num_images: how many images the maps are taken from.
    """
    loss_fn = make_loss_fn(graphdef)

    def diagnostics(params: Any, batch: Batch, step: int) -> Metrics:
        augment_key, key = step_keys(seed, step)
        images, targets = augment(augment_key, batch["image"], batch["label"])
        if accumulation_steps > 1:
            key = jax.random.split(key, accumulation_steps)[0]
        first = (images[::accumulation_steps], targets[::accumulation_steps])
        gradient = jax.grad(lambda params: loss_fn(params, *first, key)[0])(params)
        return _gradient_norms(gradient) | _forward_numbers(nnx.merge(graphdef, params), images[:num_images])

    return diagnostics


def _gradient_norms(gradient: dict[str, Any]) -> Metrics:
    numbers = {f"gradient_norm/{part}": optax.tree.norm(g) for part, g in gradient.items() if part != "blocks"}
    for index, block in gradient["blocks"].items():
        for branch, parts in {"attention": ("norm1", "attention"), "mlp": ("norm2", "mlp")}.items():
            norm = optax.tree.norm([block[part] for part in parts])
            numbers[f"gradient_norm/{_block_name(index)}.{branch}"] = norm
    return numbers


def _forward_numbers(model: nnx.Module, images: Array) -> Metrics:
    """Runs the model and looks at its maps, queries, keys and adder layers."""
    seen: dict[str, tuple[Array, Array]] = {}

    def watch(path: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if path.startswith("blocks.") and args:
            seen[path] = (args[0], out)
        return out

    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    _, maps = instrument(model, watch)(images, return_weights=True)
    numbers: Metrics = {}
    for index, weights in enumerate(maps):
        path = f"blocks.{index}.attention"
        query, key = (seen[f"{path}.{name}"][1] for name in ("query", "key"))
        for name, value in _map_numbers(modules[path], query, key, weights).items():
            numbers[f"{name}/{_block_name(index)}"] = value
        for branch in ("attention", "mlp"):
            inside = f"blocks.{index}.{branch}."
            layers = [
                (m, seen[p][0]) for p, m in modules.items() if p.startswith(inside) and isinstance(m, AdderLinear)
            ]
            for name, value in _adder_numbers(layers).items():
                numbers[f"{name}/{_block_name(index)}.{branch}"] = value
    return numbers


def _map_numbers(
    attention: MultiHeadAttention, query: Array, key: Array, weights: Float[Array, "batch heads token token"]
) -> Metrics:
    contract = get_score(attention.score_name)
    heads = lambda x: jnp.swapaxes(x.reshape(len(weights), weights.shape[-1], -1, attention.head_dim), 1, 2)
    parameters = {name: parameter[...] for name, parameter in attention.score.items()}
    scores = contract.raw_scores(heads(query), heads(key), parameters, dict(attention.score_options))
    temperature = attention.temperature
    if attention.log_temperature is not None:
        temperature = jnp.exp(attention.log_temperature[...])[:, None, None]
    logits = scores * resolve_scale(contract, attention.scale, attention.head_dim) / temperature
    if attention.identity if attention.identity is not None else contract.identity:
        weights = weights - jnp.eye(weights.shape[-1])
    weights = jnp.maximum(weights.astype(jnp.float32), 0.0)
    sigma = jnp.linalg.svd(weights, compute_uv=False)
    share = jnp.cumsum(sigma, -1) / sigma.sum(-1, keepdims=True)
    return {
        "attention_entropy": -jax.scipy.special.xlogy(weights, weights).sum(-1).mean(),
        "attention_max_logit": logits.max(),
        "attention_logit_std": logits.std(-1).mean(),
        "attention_rank": (1 + (share < _RANK_LEVEL).sum(-1)).mean(),
    }


def _adder_numbers(layers: list[tuple[AdderLinear, Array]]) -> Metrics:
    """Means over the adder layers of one branch; nothing where there are none."""
    columns: dict[str, list[Array]] = {}
    for layer, inputs in layers:
        rows = inputs.reshape(-1, layer.in_features)
        sums = layer.sums(rows).astype(jnp.float32)
        numbers = {
            "adder_output_mean": sums.mean() / layer.in_features,
            "adder_output_std": sums.std(-1).mean() / layer.in_features**0.5,
        }
        if "hardtanh" in (layer.x_gradient, layer.w_gradient):
            numbers["hardtanh_saturation"] = hardtanh_saturation(rows, layer.kernel[...], layer.hardtanh_slope)
        for name, value in numbers.items():
            columns.setdefault(name, []).append(value)
    return {name: jnp.stack(values).mean() for name, values in columns.items()}


def hardtanh_saturation(
    x: Float[Array, "rows inputs"], w: Float[Array, "inputs outputs"], slope: float = 1.0
) -> Float[Array, ""]:
    """Share of all differences w − x with |slope · (w − x)| ≥ 1, where the HardTanh rule is flat.

    Each input's weights are sorted once, so that a row finds its neighbours by bisection: rows · inputs · log(outputs)
    comparisons and no array of all differences.

    Args:
      x: inputs of an adder layer.
      w: its weights.
      slope: c of clip(c (w − x), −1, 1).

    Example:
      >>> float(hardtanh_saturation(jnp.zeros((1, 2)), jnp.array([[0.5, 1.0], [-3.0, 0.0]])))
      0.5
    """

    def inside(values: Array, weights: Array) -> Array:
        low, high = (jnp.searchsorted(weights, values + side / slope, side=name) for side, name in _ENDS)
        return high - low

    x, w = x.astype(jnp.float32), jnp.sort(w.astype(jnp.float32), axis=-1)
    count = jax.vmap(inside, in_axes=(1, 0))(x, w)
    return 1.0 - (count / w.shape[-1]).mean()


# Weights in the open interval (x − 1/c, x + 1/c): after all that are ≤ its low end, before all that are ≥ its high one.
_ENDS = ((-1.0, "right"), (1.0, "left"))


def _block_name(index: int) -> str:
    return f"block_{index + 1:02}"

"""Rates of parts of a network: smaller towards the images, and none where parameters are frozen."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from adder_flax.errors import RunError
from adder_flax.settings import OptimizerSettings
from adder_flax.training.sharding import tree_path

_FIRST = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed")


def rate_factors(params: Any, settings: OptimizerSettings) -> Any:
    """Returns what the rate of each parameter is multiplied by, 0 where it is frozen.

    With ``layer_decay`` d and n blocks that of the head is 1, of block i (from 0) d^(n - i), of the
    norm behind them that of the last, of the embeddings d^(n + 1): the rule of BEiT (Bao et al.,
    2022, https://arxiv.org/abs/2106.08254), as timm's `param_groups_layer_decay` has it.

    Args:
      params: a tree with a leaf for each parameter.
      settings: ``layer_decay`` and ``freeze``.

    Raises:
      RunError: ``freeze`` names what is not there, or no block is.

    >>> params = {"blocks": {"0": 1, "1": 1}, "head": 1, "patch_embed": 1}
    >>> rate_factors(params, OptimizerSettings(layer_decay=0.5, freeze="blocks.1"))
    {'blocks': {'0': 0.25, '1': 0.0}, 'head': 1.0, 'patch_embed': 0.125}
    """
    paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    numbers = [int(found[1]) for path in paths if (found := re.match(r"blocks\.(\d+)", path))]
    if settings.layer_decay != 1 and not numbers:
        raise RunError(
            "expected a model with blocks for config.optimizer.layer_decay, got "
            f"{', '.join(paths[:3])} and more; set it to 1.0"
        )
    frozen = [name.strip() for name in settings.freeze.split(",") if name.strip()]
    for name in frozen:
        if not any(_is_in(path, name) for path in paths):
            raise RunError(
                f"expected config.optimizer.freeze to name parameters, got {name}, which is none "
                f"of {', '.join(dict.fromkeys(path.split('.')[0] for path in paths))} and what is "
                "in them; correct it"
            )
    last = max(numbers, default=0) + 2

    def factor(path: Any, _: Any) -> float:
        name = _name(path)
        if any(_is_in(name, other) for other in frozen):
            return 0.0
        block = re.match(r"blocks\.(\d+)", name)
        if block:
            layer = int(block[1]) + 1
        else:
            layer = 0 if name.startswith(_FIRST) else last - _is_in(name, "norm")
        return float(settings.layer_decay) ** (last - layer)

    return jax.tree_util.tree_map_with_path(factor, params)


def with_rate_factors(optimizer: Any, params: Any, settings: OptimizerSettings) -> Any:
    """Returns an optimizer whose steps are multiplied by `rate_factors`.

    Frozen parameters have no gradient either: they do not count in the norm that is clipped.

    Args:
      optimizer: with ``init`` and ``update``, a named tuple.
      params, settings: of `rate_factors`.
    """
    if settings.layer_decay == 1 and not settings.freeze:
        return optimizer
    factors = rate_factors(params, settings)

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        gradients = jax.tree.map(
            lambda gradient, factor: gradient if factor else jnp.zeros_like(gradient),
            gradients,
            factors,
        )
        updates, state = optimizer.update(gradients, state, params, **more)
        return jax.tree.map(lambda step, factor: step * factor, updates, factors), state

    return optimizer._replace(update=update)


def _name(path: Any) -> str:
    return tree_path(path).replace("/", ".")


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")

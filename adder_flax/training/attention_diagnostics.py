"""How attention and adder layers are doing during a run: a few numbers for each block.

``--config.attention_diagnostics=True`` turns them on. A logging step then costs a second forward
and backward pass; the other steps cost nothing, and what is trained stays the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from adder_flax import measures, recorder
from adder_flax.recorder import Record
from adder_flax.training.sharding import tree_path
from adder_flax.training.skeleton import Skeleton
from adder_flax.training.step import Batch, Hyper, Metrics, Parts, step_keys

_WANTED = {"attention": ["scores", "weights"], "adder": ["rows", "kernel", "sums"], "block": []}


def make_attention_diagnostics(
    skeleton: Skeleton,
    make_parts: Callable[[Hyper], Parts],
    *,
    accumulation_steps: int = 1,
    num_examples: int = 8,
) -> Callable[[Any, Batch, int, Hyper], Metrics]:
    """Returns ``diagnostics(variables, batch, step, hyper) → {name: scalar}``.

    It is for the step that is about to be taken; the variables are the parameters and what the
    model carries beside them.

    Names end in the block, ``block_01`` …, with the branch where there are two:

    - ``attention_entropy``: of the rows of the map, in nats, mean; ln(tokens) is uniform attention.
    - ``attention_max_logit``: largest scaled score; distances are at most 0.
    - ``attention_logit_std``: standard deviation of a row's scaled scores, mean.
    - ``attention_rank``: fewest singular values that make up 0.9 of their sum, mean over maps.
    - ``hardtanh_saturation``: share of the differences w − x that the HardTanh rule clips, |c (w −
      x)| ≥ 1.
    - ``adder_output_mean``: mean of the raw sums over K, the number of inputs; −1.13 for
      unit-normal x and w.
    - ``adder_output_std``: standard deviation of the raw sums of one row over √K, mean; 0.85 for
      the same.
    - ``gradient_norm``: of the branch's parameters, its LayerNorm included; and of the parts
      outside the blocks.

    Attention and adder layers outside of blocks go by the path of their module. The first four
    leave the identity map out. All but the gradient norms are of the first examples of the batch,
    without dropout. The gradient is that of the step itself, with accumulation that of its first
    microbatch.

    Args:
      skeleton: the model without its arrays.
      make_parts, accumulation_steps: as of the training step.
      num_examples: how many examples the maps are taken from.
    """

    def diagnostics(variables: Any, batch: Batch, step: int | Array, hyper: Hyper) -> Metrics:
        params, carried = skeleton.separate(variables)
        parts = make_parts({**hyper, "step": step})
        augment_key, key = step_keys(parts.seed, step)
        examples = parts.examples(augment_key, batch)
        if accumulation_steps > 1:
            key = jax.random.split(key, accumulation_steps)[0]
        first = jax.tree.map(lambda x: x[::accumulation_steps], examples)
        gradient = jax.grad(lambda params: parts.loss(params, first, key, carried).loss)(params)
        arguments = jax.tree.map(lambda x: x[:num_examples], parts.arguments(examples))
        _, records = recorder.record(_WANTED, skeleton.merge(variables), *arguments)
        places = _Places(records)
        return _gradient_norms(gradient, places) | _forward_numbers(records, places)

    return diagnostics


def _gradient_norms(gradient: dict[str, Any], places: "_Places") -> Metrics:
    leaves = {
        tree_path(path).replace("/", "."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
    }
    groups = {
        place: [name for part in parts for name in leaves if _is_inside(name, part)]
        for place, parts in places.branches.items()
    }
    for name in leaves.keys() - {name for group in groups.values() for name in group}:
        groups.setdefault(name.split(".")[0], []).append(name)
    return {
        f"gradient_norm/{place}": optax.tree.norm([leaves[n] for n in group])
        for place, group in groups.items()
    }


def _forward_numbers(records: Sequence[Record], places: "_Places") -> Metrics:
    """What the attention and adder layers reported, means over those that share a place."""
    columns: dict[str, list[Array]] = {}
    for record in records:
        if record.kind == "attention":
            place, numbers = places.block(record.path), measures.attention_numbers(**record.arrays)
        elif record.kind == "adder":
            place = places.branch(record.path)
            numbers = measures.adder_numbers(**record.arrays, **record.facts)
        else:
            continue
        for name, value in numbers.items():
            columns.setdefault(f"{name}/{place}", []).append(value)
    return {name: jnp.stack(values).mean() for name, values in columns.items()}


class _Places:
    """What the parts of a model are called: by block and branch, or by path outside of blocks.

    Attributes:
      branches: paths of the modules that make up a branch, by the name of block and branch:
        ``block_01.mlp``.
    """

    def __init__(self, records: Sequence[Record]):
        blocks: dict[tuple[str, Any], None] = dict.fromkeys(
            (r.path, r.facts["branches"]) for r in records if r.kind == "block"
        )
        self._blocks = {path: f"block_{index + 1:02}" for index, (path, _) in enumerate(blocks)}
        self.branches = {
            f"{self._blocks[path]}.{branch}": [f"{path}.{part}" for part in parts]
            for path, branches in blocks
            for branch, parts in branches
        }

    def block(self, path: str) -> str:
        """The block that a module is inside of."""
        return next((name for block, name in self._blocks.items() if _is_inside(path, block)), path)

    def branch(self, path: str) -> str:
        """The branch that a module is inside of."""
        for name, parts in self.branches.items():
            if any(_is_inside(path, part) for part in parts):
                return name
        return self.block(path)


def _is_inside(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")

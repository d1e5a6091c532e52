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

_Blocks = list[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]]
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
        blocks = list(
            dict.fromkeys((r.path, r.facts["branches"]) for r in records if r.kind == "block")
        )
        return _gradient_norms(gradient, blocks) | _forward_numbers(records, blocks)

    return diagnostics


def _gradient_norms(gradient: dict[str, Any], blocks: _Blocks) -> Metrics:
    leaves = {
        tree_path(path).replace("/", "."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
    }
    groups = {
        f"block_{number:02}.{branch}": [
            name for part in parts for name in leaves if _is_inside(name, f"{block}.{part}")
        ]
        for number, (block, branches) in enumerate(blocks, 1)
        for branch, parts in branches
    }
    in_branches = {name for group in groups.values() for name in group}
    for name in leaves:
        if name not in in_branches:
            groups.setdefault(name.split(".")[0], []).append(name)
    return {
        f"gradient_norm/{place}": optax.tree.norm([leaves[name] for name in group])
        for place, group in groups.items()
    }


def _forward_numbers(records: Sequence[Record], blocks: _Blocks) -> Metrics:
    """What the attention and adder layers reported, means over those that share a place."""
    columns: dict[str, list[Array]] = {}
    for record in records:
        place, branch = _place(record.path, blocks)
        if record.kind == "attention":
            numbers = measures.attention_numbers(**record.arrays)
        elif record.kind == "adder":
            place = f"{place}.{branch}" if branch else place
            numbers = measures.adder_numbers(**record.arrays, **record.facts)
        else:
            continue
        for name, value in numbers.items():
            columns.setdefault(f"{name}/{place}", []).append(value)
    return {name: jnp.stack(values).mean() for name, values in columns.items()}


def _place(path: str, blocks: _Blocks) -> tuple[str, str | None]:
    """The names of the block and the branch that a module is inside of, or its own path."""
    for number, (block, branches) in enumerate(blocks, 1):
        if _is_inside(path, block):
            within = (
                name
                for name, parts in branches
                if any(_is_inside(path, f"{block}.{part}") for part in parts)
            )
            return f"block_{number:02}", next(within, None)
    return path, None


def _is_inside(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")

"""What curvature costs, layer by layer, and how to stay within a budget.

Budgets are in gradient-equivalents per step.

Counts multiply-adds as two operations. For a dense layer with i inputs, o outputs and R = N T rows:
the gradient takes 6 R i o, one product F v through the Jacobian 4 R i o, one through formed factors
2 i o (i + o), forming them 2 R (i² + o²). A norm, dense behind a diagonal, has one input an output
where rows are multiplied. Other layers are cheap beside these and are left out, but not of the
gradient's total.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from kfac._blocks import Block
from kfac._coverage import Layers, find_layers
from kfac._step import STEPS
from kfac._tracing import without_modules

if TYPE_CHECKING:
    from jaxtyping import PyTree

MAX_INTERVAL = 50


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations of one block, all lanes and uses together.

    Attributes:
      weight_gradient: of the weight gradient alone, a third of the layer's training cost.
      product: of F v through the Jacobian (``"exact"``, ``"token"``).
      kron_product: of K v through the Jacobian, with the right factor formed.
      form_factors: of forming both factors from a batch.
      form_right: of forming the right factor.
      factor_product: of K v through both factors.
    """

    weight_gradient: float
    product: float
    kron_product: float
    form_factors: float
    form_right: float
    factor_product: float


def curvature_stride(layers: Layers, num_examples: int, interval: int = 5) -> int:
    """Of how many examples one need give curvature: a power of two, 1 where all need.

    A batch of many tokens has far more rows than the sides of its factors, and forming these costs
    more than the gradient. The stride leaves every block that has them two rows of a fresh batch
    for each side of its wider factor, and fewer where curvature is renewed more often than every
    fourth step: an eighth of a row at every step, times the square of the interval. Averages hold
    as many batches at any interval; but a long one leaves the first steps, while the network
    changes fastest, with what few batches gave. Blocks that have fewer with all examples, as a
    head that reads one token of each, are not asked: their factors fill up over several batches as
    it is. Where no block has so many, all examples give curvature.

    Args:
      layers: as the whole batch gives them, see ``find_layers``.
      num_examples: what the stride has to divide: examples of a batch, or those of one device.
      interval: steps from one curvature batch to the next.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((4, 8))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> layers = kfac.find_layers(loss_fn, params, jnp.ones((16, 5, 4)))
    >>> kfac.curvature_stride(layers, 16)  # of 80 rows a quarter, for 8 outputs
    4
    """
    rows_a_side = min(2.0, interval**2 / 8)
    asked = [
        _num_rows(block) / (rows_a_side * max(block.lifted_shape(block.uses[0])))
        for block in layers.blocks.values()
        if block.factored
    ]
    spare = min((share for share in asked if share >= 1), default=1)
    stride = 2 ** math.floor(math.log2(spare))
    return math.gcd(stride, num_examples)


def _num_rows(block: Block) -> int:
    return sum(use.num_examples * use.num_tokens for use in block.uses)


def cost(block: Block) -> Cost:
    """The cost of a block that has factors; zeros for others."""
    if not block.factored:
        return Cost(0, 0, 0, 0, 0, 0)
    i, o = block.lifted_shape(block.uses[0])
    rows = _num_rows(block)
    inputs = 1 if block.uses[0].dense.elementwise else i
    matmul, lanes = 2 * rows * inputs * o, block.lanes
    return Cost(
        weight_gradient=lanes * matmul,
        product=lanes * 2 * matmul,
        kron_product=lanes * (2 * matmul + 2 * rows * o * o),
        form_factors=lanes * 2 * rows * (i * i + o * o),
        form_right=lanes * 2 * rows * o * o,
        factor_product=lanes * 2 * i * o * (i + o),
    )


def prefers_factors(block: Block, max_iterations: int) -> bool:
    """Whether forming both factors of a batch is cheaper than products through the Jacobian."""
    c = cost(block)
    return (
        c.form_factors + max_iterations * c.factor_product
        < c.form_right + max_iterations * c.kron_product
    )


def prefers_dual(block: Block, max_iterations: int, num_columns: int) -> bool:
    """Whether the Woodbury solution of the exact block is cheaper than CG.

    It is for few examples, or many iterations.
    """
    rows = num_columns * block.uses[0].num_examples
    gram = 2 * rows**2 * block.size + rows**3 / 3 + 4 * rows * block.size
    form = (
        cost(block).product
        or 4 * block.size * block.uses[0].num_examples * block.uses[0].num_tokens
    )
    return block.lanes * gram + form < max_iterations * form


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings that keep a step within a budget, see ``plan``.

    Attributes:
      curvature_interval: steps from one curvature batch to the next: pass ``refresh=step % interval
        == 0`` if not 1.
      curvature_batch_size: examples that give the curvature. Fewer than the batch: call
        ``value_grad_and_curvature``'s function on so many for the curvature, and ``jax.grad`` on
        all for the gradient.
      max_iterations: for ``cg_fac``.
      overhead: predicted cost of a step in gradients, 1 being no curvature at all.
      parts: predicted cost in gradients, for the whole batch, of the ``pullback``, the ``factors``
        and the step's ``model`` at each refresh, and of one ``iteration``.
    """

    curvature_interval: int
    curvature_batch_size: int
    max_iterations: int
    overhead: float
    parts: dict[str, float]


def plan(
    loss_fn: Callable,
    params: PyTree,
    *args: Any,
    overhead: float = 1.5,
    max_iterations: int = 10,
    has_aux: bool = False,
    fisher: str = "mc",
    step: str = "fixed",
    batch_size: int | None = None,
) -> Plan:
    """Chooses curvature interval, CG iterations and curvature batch.

    For ``curvature="kron"`` with averaged factors.

    The gradient's cost is XLA's count for ``loss_fn``; nothing is run. The interval is the shortest
    that fits the budget with ``max_iterations`` and the whole batch. Where none does, iterations
    are given up next, down to two; and last examples, to a half, a quarter or an eighth of the
    batch, which loses most (the factors lose rank) and saves little, since the part needs a forward
    and backward pass of its own.

    Args:
      loss_fn, params, *args: as for ``find_layers``; shapes are enough.
      overhead: budget of a step in gradient-equivalents, more than 1.
      max_iterations: the most that are wanted.
      has_aux, fisher, batch_size: as for ``value_grad_and_curvature``.
      step: as for ``cg_fac``; ``"quadratic"`` needs fresh curvature at every step: its interval is
        1.

    Returns:
      The plan.

    Raises:
      ValueError: a budget that leaves nothing for curvature; an unknown ``step``; a loss without
        layers.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((32, 32))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> kfac.plan(loss_fn, params, jnp.ones((256, 32)), overhead=1.5).overhead <= 1.5
    True
    """
    if overhead <= 1:
        raise ValueError(
            f"expected an overhead above 1, the gradient itself, got {overhead}; 1.5 adds half a "
            "gradient."
        )
    if step not in STEPS:
        raise ValueError(f"expected step to be one of {', '.join(STEPS)}, got {step!r}.")
    if (of_arrays := without_modules(loss_fn, params, args, has_aux)) is not None:
        loss_fn, params, args, has_aux = of_arrays.loss_fn, of_arrays.params, of_arrays.args, True
    layers = find_layers(loss_fn, params, *args, batch_size=batch_size)
    if not layers.blocks:
        raise ValueError(
            "expected a loss with layers to plan for, got none; see kfac.register_layer and "
            "kfac.tap."
        )
    parts = _parts(layers, _gradient_flops(loss_fn, params, args, has_aux), fisher, step)
    examples = max(block.uses[0].num_examples for block in layers.blocks.values())
    longest = 1 if step == "quadratic" else MAX_INTERVAL
    whole = parts["pullback"] + parts["factors"] + parts["model"]
    refreshes = {examples: whole} | {
        examples // n: (whole + 1) / n for n in (2, 4, 8) if examples >= n
    }
    for size, refresh in refreshes.items():
        for iterations in range(max_iterations, 1, -1):
            room = overhead - 1 - iterations * parts["iteration"]
            interval = max(math.ceil(refresh / room), 1) if room > 0 else longest + 1
            if interval <= longest:
                predicted = 1 + refresh / interval + iterations * parts["iteration"]
                return Plan(interval, size, iterations, predicted, parts)
    least = 1 + min(refreshes.values()) / longest + 2 * parts["iteration"]
    raise ValueError(
        f"expected an overhead of at least {least:.2f} for this model, batch and step={step!r}, "
        f"got {overhead}; allow more, or use a larger batch or step='fixed'."
    )


def _parts(layers: Layers, gradient: float, fisher: str, step: str) -> dict[str, float]:
    costs = [cost(block) for block in layers.blocks.values()]

    def total(name: str) -> float:
        return sum(getattr(c, name) for c in costs)

    # XLA counts nothing of a kernel that it did not write: of the layers it is at least
    # the three products of each.
    gradient = max(gradient, 3 * total("weight_gradient"), 1)
    # A gradient is a forward pass, the same again backwards, and the weight gradients.
    # The pull-back is the second.
    pullback = 0 if fisher == "empirical" else (gradient - total("weight_gradient")) / 2
    return {
        "pullback": pullback / gradient,
        "factors": total("form_factors") / gradient,
        "model": (2 * total("weight_gradient") if step == "quadratic" else 0) / gradient,
        "iteration": total("factor_product") / gradient,
    }


def _gradient_flops(loss_fn: Callable, params: PyTree, args: tuple, has_aux: bool) -> float:
    analysis = jax.jit(jax.grad(loss_fn, has_aux=has_aux)).lower(params, *args).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))

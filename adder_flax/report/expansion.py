"""The second-order term of the loss against the first, along an optimizer's real steps.

    L(θ + δ) − L(θ) = ∇L·δ + ½ δᵀ H δ + …

Source: "The Brownian motion in the transformer model" (Chen, 2021), sections 2.4 and 3.3. It argues
that tokens move as in Brownian motion, for which Itō's lemma keeps the second-order term, and that
training should therefore use curvature. How large that term is for the steps of training can be
measured.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from adder_flax import ops

if TYPE_CHECKING:
    from adder_flax.training import Run
    from adder_flax.training.program import Program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SecondOrderTerms:
    """What a loss does along an update δ, by differences and by derivatives.

    Attributes:
      loss: L(θ).
      change: L(θ + δ) − L(θ) = odd + even.
      odd: (L(θ + δ) − L(θ − δ)) / 2, the first-order term and all higher odd ones.
      even: (L(θ + δ) + L(θ − δ)) / 2 − L(θ), the second-order term and all higher even ones. It has
        the change of slope at a kink, as those of |x − w|, which ``second`` has not.
      first: ∇L·δ, nan if derivatives were not asked for.
      second: ½ δᵀ H δ with H the Hessian where the loss has one, nan likewise.
    """

    loss: Float[Array, ""]
    change: Float[Array, ""]
    odd: Float[Array, ""]
    even: Float[Array, ""]
    first: Float[Array, ""] | float
    second: Float[Array, ""] | float


def second_order_terms(
    loss: Callable[[Any], Float[Array, ""]], params: Any, update: Any, *, derivatives: bool = True
) -> SecondOrderTerms:
    """Expands a loss along an update δ of the parameters θ.

    The Hessian-vector product is the derivative of the gradient along δ (``jax.jvp`` of
    ``jax.grad``; Pearlmutter, 1994): two to three gradients' work and no matrix. For ``first`` and
    ``second``, the ``derivatives``, ``jax.grad`` of the loss has to be its derivative, see
    `adder_flax.ops.exact_gradients`.

    >>> terms = second_order_terms(lambda x: x**3, 1.0, 0.1)  # 1.331 = 1 + 0.3 + 0.03 + 0.001
    >>> [round(float(term), 4) for term in (terms.first, terms.second, terms.odd, terms.change)]
    [0.3, 0.03, 0.301, 0.331]
    """
    # One after the other, so that the loss is compiled once.
    behind, here, ahead = jax.lax.map(
        lambda side: loss(optax.tree.add_scale(params, side, update)), jnp.array([-1.0, 0.0, 1.0])
    )
    first = second = jnp.nan
    if derivatives:
        # The kernels of the other backends have no second derivative.
        with ops.use_backend("xla"):
            gradient, curvature = jax.jvp(jax.grad(loss), (params,), (update,))
        first, second = optax.tree.vdot(gradient, update), optax.tree.vdot(curvature, update) / 2
    # In this order the large parts cancel before they are rounded.
    even = ((ahead - here) + (behind - here)) / 2
    return SecondOrderTerms(here, ahead - here, (ahead - behind) / 2, even, first, second)


@dataclasses.dataclass(frozen=True)
class SecondOrderStep:
    """The expansion of the loss of one batch along the training step taken on it.

    Attributes:
      step: number of steps before it.
      learning_rate: of the step.
      loss, change, odd, even, first, second: as in :class:`SecondOrderTerms`, of the step's batch
        with its augmentation and dropout.
      kl: mean KL divergence in nats of the predicted classes from those before the step; nan where
        the loss is no softmax cross-entropy.
    """

    step: int
    learning_rate: float
    loss: float
    change: float
    odd: float
    even: float
    first: float
    second: float
    kl: float = math.nan

    def ratio(self, learning_rate: float | None = None) -> float:
        """|even| / |odd|; in the same direction at another learning rate in proportion to it."""
        factor = 1.0 if learning_rate is None else learning_rate / self.learning_rate
        return factor * abs(self.even / self.odd)


def second_order_along(
    run: "Run", state: dict[str, Any], *, num_steps: int, every: int = 1, derivatives: bool = True
) -> Iterator[SecondOrderStep]:
    """Trains on from a state, by the run's own optimizer, and expands the loss along the steps.

    Args:
      run: from :func:`adder_flax.training.build_run`.
      state: of that run, e.g. from ``run.init()`` or a checkpoint; it stays as it is.
      num_steps: how many steps to take.
      every: steps whose number is a multiple of this are measured, if their learning rate is not 0.
      derivatives: whether to compute ``first`` and ``second``. With adder layers, which need plain
        XLA for it, that takes minutes to compile and ten steps' time for each step; without, a
        step's time.
    """
    # Training loads libraries (checkpoints, TensorBoard) that the rest of the report does without.
    from adder_flax.training.sharding import put_batch

    model: Any = run.model(state["params"])
    if hasattr(model, "loop_over_blocks"):  # there are then second derivatives of one to compile
        model.loop_over_blocks()
    looped, batches = nnx.split(model, nnx.Param)[0], run.batches()
    for _ in range(num_steps):
        step = int(state["step"])
        batch = put_batch(batches[step], run.mesh)
        learning_rate = float(run.parts.learning_rate(step))
        with jax.set_mesh(run.mesh):  # as the trainer does, so that its compiled step serves
            new_state, _ = run.train_step(jax.tree.map(jnp.copy, state), batch, run.hyper)
        if step % every == 0 and learning_rate > 0:
            terms, kl = _terms_along(
                state["params"],
                new_state["params"],
                batch,
                jnp.int32(step),
                run.hyper,
                graphdef=looped,
                program=run.program,
                derivatives=derivatives,
                categorical=run.task.likelihood == "categorical",
            )
            numbers = {name: float(term) for name, term in (vars(terms) | {"kl": kl}).items()}
            yield SecondOrderStep(step=step, learning_rate=learning_rate, **numbers)
        state = new_state


@functools.partial(jax.jit, static_argnames=("graphdef", "program", "derivatives", "categorical"))
def _terms_along(
    params: Any,
    new_params: Any,
    batch: Mapping[str, Array],
    step: Int[Array, ""],
    hyper: Mapping[str, Any],
    *,
    graphdef: nnx.GraphDef,
    program: "Program",
    derivatives: bool,
    categorical: bool,
) -> tuple[SecondOrderTerms, Float[Array, ""]]:
    from adder_flax.training.step import step_keys

    parts = program.parts(hyper, graphdef)
    augment_key, key = step_keys(parts.seed, step)
    examples = parts.examples(augment_key, batch)
    outcome = lambda params: parts.loss(params, examples, key)
    kl = jnp.float32(jnp.nan)
    if categorical:
        before, after = (jax.nn.log_softmax(outcome(p).outputs) for p in (params, new_params))
        kl = (jnp.exp(before) * (before - after)).sum(-1).mean()
    with ops.exact_gradients():
        update = optax.tree.sub(new_params, params)
        loss = lambda params: outcome(params).loss
        return second_order_terms(loss, params, update, derivatives=derivatives), kl

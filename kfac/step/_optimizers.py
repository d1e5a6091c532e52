"""``kfac`` and ``cg_fac``, alone or ready-made: another optimizer for the rest, weight decay."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac._arrays import all_finite
from kfac.curvature._coverage import Layers
from kfac.step._state import CgFacOptions, KfacOptions, Options, is_zero
from kfac.step._transform import scale_by

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree

    from kfac.step._state import Scalar


def kfac(
    learning_rate: Scalar | optax.Schedule,
    layers: Layers,
    *,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = None,
    fallback: optax.GradientTransformation | None = None,
    fallback_learning_rate: Scalar | optax.Schedule = 1e-3,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """K-FAC: solves (A ⊗ G + γI) x = ∇L for every layer, Δθ ∝ −x, with averaged factors A and G.

    By their damped inverses, and CG behind these. A is the second moment of the layer's inputs and
    G that of its cotangents, as if they were independent. Source: Martens & Grosse, 2015,
    arXiv:1503.05671.

    It is ``scale_by_kfac`` for the parameters that layers cover, ``fallback`` for the others, and
    decoupled weight decay; ``optax.inject_hyperparams`` takes it with
    ``static_args=kfac.KfacOptions.STATIC_ARGUMENTS``. A gradient that is not finite anywhere
    changes nothing but the momentum, which it ends.

    Args:
      learning_rate: what the step measures, or a schedule of it.
      layers: from ``find_layers``, all or those that ``Layers.select`` keeps.
      weight_decay: decoupled, at the rate of ``fallback_learning_rate``, so that it means what it
        does in AdamW.
      weight_decay_mask: tree of booleans or function of the parameters, as in ``optax.adamw``.
      fallback: optimizer of the parameters without a block; AdamW by default.
      fallback_learning_rate: its learning rate, and the rate of ``weight_decay``.
      **options: fields of ``kfac.KfacOptions`` by name. Rates and decay may be arrays as those may.

    Returns:
      A transformation whose ``update`` takes ``(grads, state, params, *, curvature, sound=None)``,
      the curvature of ``value_grad_and_curvature``; where ``sound`` is not true nothing moves, by
      default where the gradient is not finite.

    Raises:
      ValueError: as of ``KfacOptions`` and ``scale_by_kfac``.

    >>> import jax, jax.numpy as jnp, kfac, optax
    >>> params, x = {"kernel": jnp.zeros((3, 2))}, jax.random.normal(jax.random.key(0), (16, 3))
    >>> def loss_fn(params, x):
    ...     y = kfac.tap(kfac.Dense(), params, x, path="")
    ...     return 0.5 * ((y - x[:, :2]) ** 2).sum(-1).mean()
    >>> optimizer = kfac.kfac(0.1, kfac.find_layers(loss_fn, params, x))
    >>> function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")
    >>> @jax.jit
    ... def step(params, state):
    ...     loss, grads, curvature = function(params, x)
    ...     updates, state = optimizer.update(grads, state, params, curvature=curvature)
    ...     return optax.apply_updates(params, updates), state, loss
    >>> state = optimizer.init(params)
    >>> for _ in range(9):
    ...     params, state, loss = step(params, state)
    >>> bool(loss < 0.5)
    True
    """
    rest = (fallback, fallback_learning_rate, weight_decay, weight_decay_mask)
    return _with_fallback(layers, KfacOptions(learning_rate=learning_rate, **options), *rest)


def cg_fac(
    learning_rate: Scalar | optax.Schedule,
    layers: Layers,
    *,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = None,
    fallback: optax.GradientTransformation | None = None,
    fallback_learning_rate: Scalar | optax.Schedule = 1e-3,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """CG-FAC: solves (F̂ + γI) x = ∇L for every layer, Δθ ∝ −x, F̂ and its factors never formed.

    By conjugate gradients from the last solution, rescaled so that the step descends; F̂ v is
    made of the inputs and cotangents of this batch. Source: Algorithm 1 of Chen, "The Brownian
    motion in the transformer model" (2021); ``algorithm_1`` is it to the letter.

    Args:
      learning_rate, layers, weight_decay, weight_decay_mask, fallback, fallback_learning_rate: as
        of ``kfac.kfac``, and so is what is returned and raised.
      **options: fields of ``kfac.CgFacOptions`` by name.

    >>> import jax.numpy as jnp, kfac
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> layers = kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, jnp.ones((4, 3)))
    >>> optimizer = kfac.cg_fac(1.0, layers, iterations=4)
    """
    rest = (fallback, fallback_learning_rate, weight_decay, weight_decay_mask)
    return _with_fallback(layers, CgFacOptions(learning_rate=learning_rate, **options), *rest)


def algorithm_1(
    learning_rate: Scalar | optax.Schedule,
    layers: Layers,
    *,
    damping: Scalar,
    max_iterations: int,
    tolerance: Scalar = 1e-2,
    fallback: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Algorithm 1 of the paper to the letter: empirical Fisher, exact block, warm start.

    At most ``max_iterations`` plain CG steps on (F̂ + γI) x = ∇L from x₀, the previous batch's x,
    stopping when ‖r‖ ≤ ``tolerance``·‖∇L‖ ("sufficiently small" in the paper); then θ ← θ − η x,
    with η = ``learning_rate`` and γ = ``damping`` the same for all layers. Where the paper is
    silent: the product is averaged over the batch, W and b of a layer are one block, and parameters
    without a block go to ``fallback``, as of ``kfac.kfac``.

    >>> import jax.numpy as jnp, kfac
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> layers = kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, jnp.ones((4, 3)))
    >>> optimizer = kfac.algorithm_1(0.1, layers, damping=0.1, max_iterations=10)
    """
    options = CgFacOptions(
        learning_rate=learning_rate,
        step="algorithm_1",
        damping=damping,
        iterations=max_iterations,
        tolerance=tolerance,
    )
    return _with_fallback(layers, options, fallback)


def scale_by_kfac(
    layers: Layers, options: KfacOptions | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradient ∇L of every layer by −Δ, Δ the step of ``kfac``.

    To be followed by ``optax.scale(-1)`` or ``optax.scale_by_learning_rate``. It takes covered
    parameters alone: ``layers.labels`` says to ``optax.partition`` which these are.

    Args:
      layers: from ``find_layers``, all or those that ``Layers.select`` keeps.
      options: ``KfacOptions()`` by default.

    Returns:
      A transformation whose ``update`` takes ``(grads, state, params, *, curvature, sound=None)``.
      Averages change where ``sound`` is true, by default where the gradient is finite: who refuses
      steps for other reasons too need not choose between all of the old state and the new.

    Raises:
      ValueError: no layer has a block; in ``init``, parameters without a layer, or layers of which
        only a part is here; in ``update``, missing or foreign curvature.

    >>> import jax.numpy as jnp, kfac, optax
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}, "scale": jnp.ones(())}
    >>> loss_fn = lambda p, x: (p["scale"] * kfac.tap(kfac.Dense(), p["fc"], x, path="fc")).mean()
    >>> layers = kfac.find_layers(loss_fn, params, jnp.ones((4, 3)))
    >>> second_order = optax.chain(scale_by_kfac(layers), optax.scale_by_learning_rate(0.5))
    >>> parts = {"covered": second_order, "fallback": optax.sgd(0.1)}
    >>> state = optax.partition(parts, layers.labels).init(params)
    """
    return scale_by(layers, options or KfacOptions())


def scale_by_cg_fac(
    layers: Layers, options: CgFacOptions | None = None
) -> optax.GradientTransformationExtraArgs:
    """``scale_by_kfac`` for ``cg_fac``, with ``CgFacOptions()`` by default."""
    return scale_by(layers, options or CgFacOptions())


def _with_fallback(
    layers: Layers,
    options: Options,
    fallback: optax.GradientTransformation | None,
    rate: Scalar | optax.Schedule = 1e-3,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    stages = [scale_by(layers, options)]
    if not is_zero(weight_decay):
        # Decoupled: shrunk at the pace of the schedule, not along the natural gradient.
        if callable(rate):
            decay = lambda count: rate(count) * weight_decay  # pyright: ignore[reportOperatorIssue]
        else:
            decay = rate * weight_decay
        stages.append(optax.add_decayed_weights(decay, weight_decay_mask))
    if fallback is None:
        fallback = optax.adamw(rate, weight_decay=weight_decay, mask=weight_decay_mask)
    shares = {"covered": optax.chain(*stages, optax.scale(-1)), "fallback": fallback}
    return _whole_steps(optax.partition(shares, layers.labels))


def _show_options_in_signature(function: Callable, options: type[Options]) -> None:
    """Hands the options on as their class has them, for ``help`` and ``optax``."""
    own, fields = inspect.signature(function), inspect.signature(options).parameters.values()
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [p for p in fields if p.name != "learning_rate"]
    function.__signature__ = own.replace(parameters=[*kept, *more])  # pyright: ignore[reportFunctionMemberAccess]


_show_options_in_signature(kfac, KfacOptions)
_show_options_in_signature(cg_fac, CgFacOptions)


def _whole_steps(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """A partition whose shares take a step together or not at all."""

    def update(
        grads: PyTree[Array],
        state: optax.OptState,
        params: PyTree[Array] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree[Array], optax.OptState]:
        sound = extra_args.get("sound")
        finite = all_finite(jax.tree.leaves(grads)) if sound is None else sound
        extra_args["sound"] = finite
        # What is not finite for one share has to be so for the other.
        shared = jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grads)
        updates, new = inner.update(shared, state, params, **extra_args)
        # The covered share looks after its own state; other optimizers would keep NaN in their
        # moments for ever.
        kept = [s.inner_states["fallback"] for s in (new, state)]
        fallback = jax.tree.map(lambda n, o: jnp.where(finite, n, o), *kept)
        shares = new.inner_states | {"fallback": fallback}
        # The cast: rates are float32, and must not widen the updates of narrower parameters.
        updates = jax.tree.map(lambda u, g: jnp.where(finite, u, 0).astype(g.dtype), updates, grads)
        return updates, new._replace(inner_states=shares)

    return optax.GradientTransformationExtraArgs(inner.init, update)

"""CG-FAC ready-made.

Layers with curvature, another optimizer for the rest, weight decay for both.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac._coverage import Layers
from kfac._options import STATIC, Options, is_zero
from kfac._transform import scale_by_cg_fac
from kfac._trees import all_finite, chosen

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree

    from kfac._options import Scalar


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
    r"""CG-FAC: solves (F̂ + γI) x = ∇L for every layer, Δθ ∝ −x.

    By conjugate gradients, F̂ never formed.

    Source: Algorithm 1 of Chen, "The Brownian motion in the transformer model" (2021), see
    ``algorithm_1`` for it to the letter. The paper's product g (gᵀ v a) aᵀ has two readings for a
    batch of more than one example, and both are here: ``curvature="exact"`` is the Fisher block of
    the layer; ``"kron"`` takes all pairs of inputs and cotangents instead of matching ones, which
    is K-FAC's operator, and is the better optimizer of the two (Benzing, 2022, arXiv:2201.12250).

    It is ``scale_by_cg_fac`` for the parameters that layers cover, ``fallback`` for the others
    (``optax.partition`` by ``layers.labels``), and decoupled weight decay. It goes under the
    caller's own ``jax.jit`` and sharding, and composes with ``optax.chain``, ``optax.masked``,
    ``optax.partition``, ``optax.MultiSteps`` and ``optax.inject_hyperparams`` (with
    ``static_args=kfac.STATIC_ARGUMENTS``). ``update`` takes, beside the gradient, the curvature
    that ``value_grad_and_curvature`` returns; without it, it raises. A gradient that is not finite
    anywhere changes nothing but λ, which it raises fourfold, and the momentum, which it ends.

    Args:
      learning_rate: factor of the whole step, or a schedule. 1 for ``step="quadratic"``, which
        finds the length itself.
      layers: from ``find_layers``, all or those that ``Layers.select`` keeps.
      weight_decay: decoupled, at the rate of ``fallback_learning_rate``, so that it means what it
        does in AdamW.
      weight_decay_mask: tree of booleans or function of the parameters, as in ``optax.adamw``.
      fallback: optimizer of the parameters without a block; AdamW by default.
      fallback_learning_rate: its learning rate, and the rate of ``weight_decay``.
      **options: fields of ``kfac.Options`` by name. These and the rates and the decay may be arrays
        where they are hyper-parameters, traced ones included.

    Returns:
      A transformation whose ``update`` takes ``(grads, state, params, *, curvature, value=None,
      value_fn=None, sound=None)``; where ``sound`` is not true nothing moves, by default where the
      gradient is not finite, which a caller who passes it has to have looked at.

    Raises:
      ValueError: no layer has a block; unknown names, or choices that exclude each other; in
        ``init``, layers of which only a part is here; in ``update``, missing or foreign curvature.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"kernel": jnp.zeros((3, 2))}
    >>> x = jax.random.normal(jax.random.key(0), (16, 3))
    >>> def loss_fn(params, x):
    ...     y = kfac.tap(kfac.Dense(), params, x, path="")
    ...     return 0.5 * ((y - x[:, :2]) ** 2).sum(-1).mean(), y
    >>> optimizer = kfac.cg_fac(1.0, kfac.find_layers(loss_fn, params, x))
    >>> function = kfac.value_grad_and_curvature(
    ...     loss_fn, fisher="ggn", likelihood="gaussian", has_aux=True
    ... )
    >>> @jax.jit
    ... def train_step(params, state, x, key):
    ...     (loss, _), grads, curvature = function(params, x, key=key)
    ...     updates, state = optimizer.update(grads, state, params, curvature=curvature)
    ...     return optax.apply_updates(params, updates), state, loss
    >>> state = optimizer.init(params)
    >>> for i in range(5):
    ...     params, state, loss = train_step(params, state, x, jax.random.key(i))
    >>> bool(loss < 1e-2)
    True
    """
    rate = fallback_learning_rate
    stages = [scale_by_cg_fac(layers, Options(learning_rate=learning_rate, **options))]
    if not is_zero(weight_decay):
        # Decoupled: shrunk at the pace of the schedule, not along the natural gradient.
        if callable(rate):
            decay = lambda count: rate(count) * weight_decay  # pyright: ignore[reportOperatorIssue]
        else:
            decay = rate * weight_decay
        stages.append(optax.add_decayed_weights(decay, weight_decay_mask))
    if fallback is None:
        fallback = optax.adamw(rate, weight_decay=weight_decay, mask=weight_decay_mask)
    shares = {"cg_fac": optax.chain(*stages, optax.scale(-1)), "fallback": fallback}
    return _whole_steps(optax.partition(shares, layers.labels))


def _show_options_in_signature() -> None:
    """Hands the options on as ``Options``, where they are written once.

    ``help`` and ``optax.inject_hyperparams`` find them here too.
    """
    own, fields = inspect.signature(cg_fac), inspect.signature(Options).parameters.values()
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    cg_fac.__signature__ = own.replace(
        parameters=[*kept, *(p for p in fields if p.name != "learning_rate")]
    )


_show_options_in_signature()

STATIC_ARGUMENTS = ("weight_decay_mask", *sorted(STATIC))
"""Arguments of ``cg_fac`` that shape the program: ``static_args`` for
``optax.inject_hyperparams(kfac.cg_fac, …)``."""


def _whole_steps(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """A partition whose shares take a step together or not at all.

    Its ``value_fn`` sees all parameters.
    """

    def update(
        grads: PyTree[Array],
        state: optax.OptState,
        params: PyTree[Array] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree[Array], optax.OptState]:
        sound = extra_args.get("sound")
        finite = all_finite(jax.tree.leaves(grads)) if sound is None else sound
        extra_args["sound"] = finite
        if extra_args.get("value_fn") is not None:
            value_fn = extra_args["value_fn"]
            extra_args["value_fn"] = lambda share: value_fn(_completed(share, params))
        # What is not finite for one share has to be so for the other.
        shared = jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grads)
        updates, new = inner.update(shared, state, params, **extra_args)
        # CG-FAC looks after its own state; other optimizers would keep NaN in their
        # moments for ever.
        fallback = chosen(finite, new.inner_states["fallback"], state.inner_states["fallback"])
        shares = new.inner_states | {"fallback": fallback}
        # The cast: rates are float32, and must not widen the updates of narrower
        # parameters.
        updates = jax.tree.map(lambda u, g: jnp.where(finite, u, 0).astype(g.dtype), updates, grads)
        return updates, new._replace(inner_states=shares)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _completed(share: PyTree[Array], params: PyTree[Array]) -> PyTree[Array]:
    """The share of a partition with the other parameters in their places."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(
        lambda own, p: p if is_masked(own) else own, share, params, is_leaf=is_masked
    )


def algorithm_1(
    learning_rate: Scalar | optax.Schedule,
    layers: Layers,
    *,
    damping: Scalar,
    max_iterations: int,
    tolerance: Scalar = 1e-2,
    fallback: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Algorithm 1 of the paper to the letter.

    Empirical Fisher, exact block, warm start from the previous batch.

    At most ``max_iterations`` plain CG steps on (F̂ + γI) x = ∇L from x₀, the previous batch's x, γ
    the same for all layers, stopping when ‖r‖ ≤ ``tolerance``·‖∇L‖ ("sufficiently small" in the
    paper); then θ ← θ − η x. Where the paper is silent: the product is averaged over the batch, W
    and b of a layer are one block, and parameters without a block go to ``fallback``.

    Args:
      learning_rate: η.
      layers: from ``find_layers``.
      damping: γ.
      max_iterations: m.
      tolerance: relative residual.
      fallback: AdamW by default.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> layers = kfac.find_layers(loss_fn, params, jnp.ones((4, 3)))
    >>> optimizer = kfac.algorithm_1(0.1, layers, damping=0.1, max_iterations=10)
    """
    return cg_fac(
        learning_rate,
        layers,
        curvature="exact",
        fisher="empirical",
        max_iterations=max_iterations,
        tolerance=tolerance,
        preconditioner_interval=0,
        warm_start=True,
        safeguard=False,
        damping=damping,
        damping_scale="absolute",
        step="fixed",
        momentum=0.0,
        kl_clip=None,
        fallback=fallback,
    )

"""The optimizer's state: arrays only, so that any checkpoint library stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kfac import _blocks as blocks
from kfac._blocks import Block
from kfac._options import Options
from kfac._stats import Stats, empty_stats
from kfac._systems import Form
from kfac._trees import flatten, nodes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, PyTree


class CGFacState(NamedTuple):
    """State of ``scale_by_cg_fac``.

    Attributes:
      count: steps so far, refused ones included.
      damping_factor: what adaptation and refused steps have made of λ, as a factor of
        ``Options.damping``.
      averages: running averages of the curvature.
      velocity: the last step; with ``step="rms"`` the running sum of gradients.
      solution: last solution of the linear systems, where it is the warm start.
      stats: telemetry of the last step, see ``telemetry``.
    """

    count: Int[Array, ""]
    damping_factor: Float[Array, ""]
    averages: Averages
    velocity: PyTree[Array]
    solution: PyTree[Array]
    stats: Stats


class Averages(NamedTuple):
    """Exponential running sums; divided by ``weight`` they are averages.

    Attributes:
      factors: block → Kronecker factors.
      traces: block → tr F of each lane, for relative damping, where no factors give it.
      weight: sum of the weights, 0 before the first step.
      coherence: Δᵀ F Δ of the network over its sum over the layers, where ``Options.kl_scope`` asks
        for it; else 0.
      inverses: block → inverses of the damped factors that precondition CG (no sums), refreshed now
        and then.
    """

    factors: dict[str, tuple[Array, ...]]
    traces: dict[str, Array]
    weight: Float[Array, ""]
    coherence: Float[Array, ""]
    inverses: dict[str, tuple[Array, ...]]


def init_state(params: PyTree[Array], owned: dict[str, Block], options: Options) -> CGFacState:
    """The state before the first step.

    Args:
      params: the parameters, all of them covered.
      owned: their blocks by name.
      options: of the optimizer.
    """
    # float32 for bfloat16 parameters too: an average that takes a twentieth of each batch
    # moves by less than those resolve.
    dtype = jnp.result_type(jnp.float32, *flatten(params).values())
    scalar = jnp.zeros((), dtype)
    lanes = {name: jnp.zeros((block.lanes,), dtype) for name, block in owned.items()}
    factors = {
        name: _empty_factors(block, options.form(block), dtype) for name, block in owned.items()
    }
    inverses = {
        n: _empty_inverses(block, factors[n], options)
        for n, block in owned.items()
        if options.preconditions(block)
    }
    traces = {
        name: zeros
        for name, zeros in lanes.items()
        if options.damping_scale != "absolute" and options.form(owned[name]).name != "factors"
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    return CGFacState(
        count=jnp.zeros((), jnp.int32),
        damping_factor=jnp.ones_like(scalar),
        # Two zeros: a step that donates its state may give no buffer away twice.
        averages=Averages(factors, traces, scalar, jnp.zeros_like(scalar), inverses),
        velocity=velocity,
        solution=jax.tree.map(jnp.zeros_like, params) if options.warm_start else (),
        stats=empty_stats(owned, scalar, options),
    )


def _empty_factors(block: Block, form: Form, dtype: Any) -> tuple[Array, ...]:
    sizes: tuple[int, ...] = ()
    if form.name == "factors":
        sizes = block.lifted_shape(block.uses[0])
    elif form.name == "kron":
        sizes = tuple(blocks.output_groups(block.program))
    shapes = [(n, n) if n <= form.max_size else (n,) for n in sizes]  # else its diagonal alone
    return tuple(jnp.zeros((block.lanes, *shape), dtype) for shape in shapes)


def _empty_inverses(
    block: Block, factors: tuple[Array, ...], options: Options
) -> tuple[Array, Array]:
    use, right = block.uses[0], factors[1]
    lane = tuple(jax.ShapeDtypeStruct(p.shape, right.dtype) for p in block.params)
    rows = jax.eval_shape(lambda params: use.dense.matrix(use.own(params)), lane).shape[0]
    dtype = jnp.bfloat16 if options.product_dtype == "bfloat16" else right.dtype
    return jnp.zeros((block.lanes, rows, rows), dtype), jnp.zeros_like(right, dtype)


def find_state(opt_state: PyTree[Array]) -> CGFacState:
    """The state of CG-FAC, wherever it stands in that of an optax chain or partition.

    Raises:
      ValueError: there is none, or more than one.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> optimizer = kfac.cg_fac(1.0, kfac.find_layers(loss_fn, params, jnp.ones((4, 3))))
    >>> int(kfac.find_state(optimizer.init(params)).count)
    0
    """
    states = nodes(opt_state, CGFacState)
    if len(states) != 1:
        raise ValueError(
            f"expected the state of an optimizer with one cg_fac, got {len(states)}; pass what its "
            "init and update return."
        )
    return states[0]

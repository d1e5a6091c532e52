"""The optimizer's state: arrays only, so that any checkpoint library stores it; and telemetry."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kfac._trees import flatten, nodes
from kfac.curvature import _blocks as blocks
from kfac.curvature._blocks import Block
from kfac.solve._systems import Form
from kfac.step._options import Options

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, PyTree


class State(NamedTuple):
    """State of ``scale_by_kfac`` and ``scale_by_cg_fac``.

    Attributes:
      count: steps so far, refused ones included.
      averages: running averages of the curvature.
      velocity: the last step; with ``step="rms"`` the running sum of gradients.
      solution: last solution of the linear systems, where it is the warm start.
      stats: telemetry of the last step, see ``telemetry``.
    """

    count: Int[Array, ""]
    averages: Averages
    velocity: PyTree[Array]
    solution: PyTree[Array]
    stats: Stats


class Averages(NamedTuple):
    """Exponential running sums; divided by ``weight`` they are averages.

    Attributes:
      factors: block → Kronecker factors.
      traces: block → tr F of each lane and its own weight, for relative damping, where no factors
        give it.
      weight: sum of the weights, 0 before the first step.
      coherence: Δᵀ F Δ of the network over its sum over the layers, where a clip needs it; else 0.
      inverses: block → inverses of the damped factors (no sums), refreshed now and then.
    """

    factors: dict[str, tuple[Array, ...]]
    traces: dict[str, Array]
    weight: Float[Array, ""]
    coherence: Float[Array, ""]
    inverses: dict[str, tuple[Array, ...]]


def init_state(params: PyTree[Array], owned: dict[str, Block], options: Options) -> State:
    """The state before the first step, for parameters all of which these blocks cover."""
    # float32 for bfloat16 parameters too: an average that takes a twentieth of each batch moves by
    # less than those resolve.
    dtype = jnp.result_type(jnp.float32, *flatten(params).values())
    scalar = jnp.zeros((), dtype)
    forms = options.forms(owned)
    factors, traces, inverses = {}, {}, {}
    for name, block in owned.items():
        factors[name] = _empty_factors(block, forms[name], dtype)
        if forms[name] == "factors":
            inverses[name] = _empty_inverses(block, factors[name], options)
        elif not options.literal:
            traces[name] = jnp.zeros((block.lanes, 2), dtype)
    return State(
        count=jnp.zeros((), jnp.int32),
        # Two zeros: a step that donates its state may give no buffer away twice.
        averages=Averages(factors, traces, scalar, jnp.zeros_like(scalar), inverses),
        velocity=jax.tree.map(jnp.zeros_like, params),
        solution=jax.tree.map(jnp.zeros_like, params) if options.exact else (),
        stats=_empty_stats(owned, forms, scalar, options),
    )


def _empty_factors(block: Block, form: Form, dtype: Any) -> tuple[Array, ...]:
    sizes: tuple[int, ...] = ()
    if form == "factors":
        sizes = block.lifted_shape
    elif form == "kron":
        sizes = tuple(blocks.output_groups(block.program))
    shapes = [(n, n) if n <= blocks.MOST_ROWS else (n,) for n in sizes]  # else its diagonal alone
    return tuple(jnp.zeros((block.lanes, *shape), dtype) for shape in shapes)


def _empty_inverses(block: Block, factors: tuple, options: Options) -> tuple[Array, Array]:
    use, right = block.uses[0], factors[1]
    lane = tuple(jax.ShapeDtypeStruct(p.shape, right.dtype) for p in block.params)
    rows = jax.eval_shape(lambda params: use.layer.matrix(use.own(params)), lane).shape[0]
    dtype = options.narrow or right.dtype
    return jnp.zeros((block.lanes, rows, rows), dtype), jnp.zeros_like(right, dtype)


def find_state(opt_state: PyTree[Array]) -> State:
    """The state of ``kfac`` or ``cg_fac``, wherever it stands in that of a chain or partition.

    Raises:
      ValueError: there is none, or more than one.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> optimizer = kfac.kfac(1.0, kfac.find_layers(loss_fn, params, jnp.ones((4, 3))))
    >>> int(kfac.find_state(optimizer.init(params)).count)
    0
    """
    states = nodes(opt_state, State)
    if len(states) != 1:
        raise ValueError(
            f"expected the state of an optimizer with one kfac or cg_fac, got {len(states)}; pass "
            "what its init and update return."
        )
    return states[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """What a step tells of itself, see ``telemetry``: of all blocks in one array.

    On a GPU an array for each would be as many small kernels at every step.

    Attributes:
      damping: λ.
      step, momentum: α and β.
      kl_scale: factor by which the KL clip shortened the step.
      coherence: of the network's Δᵀ F Δ over the layers', 1 where it is not measured.
      model: predicted change of the loss by the new direction, without the last step's part.
      rejected: 1 where the step was refused.
      iterations: of CG in each of ``blocks``, means over their lanes; None where there are none,
        since Orbax stores no empty arrays.
      residual: of CG in each of ``measured``, likewise.
      blocks: names of the blocks.
      measured: names of those whose residual a product tells.
      optimizer: ``"kfac"`` or ``"cg_fac"``.
    """

    damping: Float[Array, ""]
    step: Float[Array, ""]
    momentum: Float[Array, ""]
    kl_scale: Float[Array, ""]
    coherence: Float[Array, ""]
    model: Float[Array, ""]
    rejected: Float[Array, ""]
    iterations: Float[Array, " block"] | None
    residual: Float[Array, " measured"] | None
    blocks: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    measured: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    optimizer: str = dataclasses.field(metadata={"static": True})

    @property
    def arrays(self) -> list[str]:
        """Names of the fields that are no names themselves."""
        return [f.name for f in dataclasses.fields(self) if not f.metadata.get("static")]


_SCALARS = ("damping", "step", "momentum", "kl_scale", "coherence", "model", "rejected")


def _empty_stats(owned: dict[str, Block], forms: dict, zero: Array, options: Options) -> Stats:
    # No product tells how far the inverses alone solve a system.
    measured = tuple(n for n in owned if options.iterations or forms[n] != "factors")
    return Stats(
        **{name: jnp.zeros_like(zero) for name in _SCALARS},
        iterations=jnp.zeros(len(owned), zero.dtype) if owned else None,
        residual=jnp.zeros(len(measured), zero.dtype) if measured else None,
        blocks=tuple(owned),
        measured=measured,
        optimizer="cg_fac" if options.exact else "kfac",
    )


def find_stats(opt_state: PyTree[Array]) -> list[Stats]:
    """What the last steps tell: what a compiled step hands out, for ``telemetry`` to name.

    >>> find_stats({"of": "another optimizer"})
    []
    """
    return nodes(opt_state, Stats)


def telemetry(opt_state: PyTree[Array]) -> dict[str, Array]:
    """Scalars of the last step of ``kfac`` or ``cg_fac``, wherever it stands in an optax chain.

    ``kfac/damping`` and so on, as ``kfac.Stats`` has them; for each block ``iterations/<block>``
    and, where CG runs, ``residual/<block>``. Empty for other optimizers.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> optimizer = kfac.kfac(1.0, kfac.find_layers(loss_fn, params, jnp.ones((4, 3))))
    >>> sorted(telemetry(optimizer.init(params)))[:3]
    ['kfac/coherence', 'kfac/damping', 'kfac/iterations/fc']
    """
    named = {}
    for stats in find_stats(opt_state):
        scalars = {name: getattr(stats, name) for name in _SCALARS}
        for name, of in (("iterations", stats.blocks), ("residual", stats.measured)):
            means = zip(of, getattr(stats, name) if of else (), strict=True)
            scalars |= {f"{name}/{block}": mean for block, mean in means}
        named |= {f"{stats.optimizer}/{name}": scalar for name, scalar in scalars.items()}
    return named

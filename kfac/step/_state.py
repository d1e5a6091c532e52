"""What the two optimizers are told, and what they keep: options, state, telemetry.

What shapes the program is static, other options may be traced. The state is arrays only, so that
any checkpoint library stores it.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kfac._arrays import flatten, nodes
from kfac.curvature import _blocks as blocks
from kfac.curvature._blocks import Block
from kfac.solve._systems import Form

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, PyTree

    Scalar = float | Float[Array, ""]

_CHOICES = {"solver": ("cg", "dual"), "product_dtype": ("float32", "bfloat16")}
_AT_LEAST_0 = ("damping", "tolerance", "momentum", "iterations", "kl_clip")
_RANGES = dict.fromkeys(_AT_LEAST_0, (0, float("inf")))
_RANGES |= {"factor_decay": (0, 1), "inverse_interval": (1, float("inf"))}
_PRESET = {"iterations": 2, "inverse_interval": 10}
_CG = {"iterations": 10, "tolerance": 0.0}
_TRACED = {"learning_rate", "momentum", "damping", "kl_clip", "factor_decay", "tolerance"}


class Options:
    """What the two optimizers differ in, as the code that they share reads it."""

    # Whether F is the layer's own, of this batch, and CG starts from the last solution; else it is
    # made of averaged Kronecker factors.
    exact: ClassVar[bool]
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]]  # step → what fields of None stand for
    STATIC_ARGUMENTS: ClassVar[tuple[str, ...]]  # that shape the program, for inject_hyperparams

    learning_rate: Any
    step: str
    momentum: Any
    damping: Any
    iterations: Any
    kl_clip: Any
    fisher: str | None
    factor_decay: Any = 0.95
    inverse_interval: Any = None
    product_dtype: str = "float32"
    solver: str = "cg"
    tolerance: Any = 0.0

    @property
    def literal(self) -> bool:
        """Whether γ = λ for all layers and CG starts from the last solution as it is."""
        return self.step == "algorithm_1"

    def __post_init__(self):
        for name, allowed in ({"step": tuple(self.PRESETS)} | _CHOICES).items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"expected {name} to be one of {allowed}, got {getattr(self, name)!r}."
                )
        for name, value in self.PRESETS[self.step].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        static = [n for n in self.STATIC_ARGUMENTS if isinstance(getattr(self, n), jax.Array)]
        if static:
            raise ValueError(
                f"expected {', '.join(static)} to be known when the step is compiled, got an "
                "array; under optax.inject_hyperparams pass "
                f"static_args=kfac.{type(self).__name__}.STATIC_ARGUMENTS."
            )
        schedules = [n for n in sorted(_TRACED - {"learning_rate"}) if callable(getattr(self, n))]
        if schedules:
            raise ValueError(
                f"expected {', '.join(schedules)} to be a number or an array, got a function; give "
                "schedules of it to optax.inject_hyperparams around the optimizer."
            )
        for name, (least, bound) in _RANGES.items():
            value: Any = getattr(self, name)
            is_number = isinstance(value, numbers.Real)
            if is_number and not least <= value < bound:
                raise ValueError(
                    f"expected {name} to be from {least} to below {bound}, got {value}."
                )
        if is_zero(self.kl_clip):
            raise ValueError(f"expected kl_clip to be above 0, got {self.kl_clip}.")
        if self.iterations == 0 and (self.exact or self.step == "clip"):
            raise ValueError(
                "expected at least one of iterations, or kfac with step 'rms' or 'share', whose "
                f"inverses give a direction without any, got 0 and step={self.step!r}."
            )

    @property
    def narrow(self) -> str | None:
        """The dtype that operands are rounded to, if they are."""
        return None if self.product_dtype == "float32" else self.product_dtype

    @property
    def measures_coherence(self) -> bool:
        """Whether what the layers do together is measured beside what each does alone."""
        return self.step == "clip" and self.kl_clip is not None

    def forms(self, owned: Mapping[str, Block]) -> dict[str, Form]:
        forms: dict[str, Form] = {}
        for name, block in owned.items():
            fits = not self.exact and block.factored
            fits = fits and max(block.lifted_shape) <= blocks.MOST_ROWS
            forms[name] = "exact" if self.exact else "factors" if fits else "kron"
        return forms


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacOptions(Options):
    """What ``kfac`` is told; None stands for what suits the step: ``KfacOptions.PRESETS[step]``.

    ``learning_rate``, ``momentum``, ``damping``, ``factor_decay`` and ``kl_clip`` may be arrays,
    traced ones included.

    Attributes:
      learning_rate: what the step measures, or a schedule of it. It is inside, since momentum is
        of steps as they were taken.
      step: ``"rms"``: each layer moves by a root mean square of ``learning_rate``, as with Muon,
        and momentum is Nesterov's, of gradients. ``"share"``: by the share ``learning_rate`` of its
        own size, and new directions count 1 - momentum. ``"clip"``: by ``learning_rate`` times the
        solution, within ``kl_clip``.
      momentum: as the step says.
      damping: λ; γ is λ times the mean eigenvalue of the layer.
      iterations: of CG, preconditioned by the inverses of the factors; 0: the inverses alone, as
        K-FAC has it, for ``"rms"`` and ``"share"``.
      inverse_interval: steps from one inverse to the next. CG makes up for their age.
      factor_decay: of the running averages of the factors.
      kl_clip: κ; shortens steps with Δᵀ F Δ > κ, twice the change of the predictions in nats,
        before the learning rate scales them. F is that of all layers together. None for no bound.
      product_dtype: ``"bfloat16"``: of the operands of products that form factors, of the inverses,
        and of what these multiply; sums are float32. Rounding hides inverse eigenvalues that are a
        thousandth of the largest.
      fisher: the name that ``value_grad_and_curvature`` must have been given; None accepts any.

    Raises:
      ValueError: unknown names, numbers out of range, choices that exclude each other, an array
        that shapes the program.

    >>> KfacOptions(step="share").damping
    0.1
    """

    learning_rate: Scalar | optax.Schedule | None = None
    step: str = "rms"
    momentum: Scalar | None = None
    damping: Scalar | None = None
    iterations: int | None = None
    inverse_interval: int | None = None
    factor_decay: Scalar = 0.95
    kl_clip: Scalar | None = 3e-3
    product_dtype: str = "float32"
    fisher: str | None = None

    exact: ClassVar[bool] = False
    # docs/cg_fac_measured.md has what they are worth.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rms": dict(_PRESET, learning_rate=2e-3, momentum=0.95, damping=0.03, inverse_interval=5),
        "share": dict(_PRESET, learning_rate=0.1, momentum=0.9, damping=0.1),
        "clip": dict(_PRESET, learning_rate=1.0, momentum=0.9, damping=10.0, iterations=1),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CgFacOptions(Options):
    """What ``cg_fac`` is told; None stands for what suits the step: ``CgFacOptions.PRESETS[step]``.

    ``learning_rate``, ``momentum``, ``damping``, ``tolerance`` and ``kl_clip`` may be arrays,
    traced ones included.

    Attributes:
      learning_rate, momentum, damping, kl_clip, fisher: as of ``KfacOptions``.
      step: as of ``KfacOptions``, or ``"algorithm_1"``, see ``kfac.algorithm_1``: γ is λ, and
        ``kl_clip`` is not read.
      iterations: of CG at most, one product with F each.
      tolerance: relative residual at which a layer stops; the number 0 for a fixed number of
        iterations, which costs no test.
      solver: ``"cg"``, or ``"dual"``: by Woodbury's identity in the space of the examples, exact,
        for few of these.

    >>> CgFacOptions().step, CgFacOptions().iterations
    ('clip', 4)
    """

    learning_rate: Scalar | optax.Schedule | None = None
    step: str = "clip"
    momentum: Scalar | None = None
    damping: Scalar | None = None
    iterations: int | None = None
    tolerance: Scalar | None = None
    solver: str = "cg"
    kl_clip: Scalar | None = 1.5e-3
    fisher: str | None = None

    exact: ClassVar[bool] = True
    # Single runs on digits in batches of 64.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "clip": dict(_CG, learning_rate=1.0, momentum=0.9, damping=100.0, iterations=4),
        "share": dict(_CG, learning_rate=0.03, momentum=0.9, damping=1.0),
        "rms": dict(_CG, learning_rate=4e-4, momentum=0.95, damping=1.0),
        "algorithm_1": {
            **{"learning_rate": 0.1, "momentum": 0.0, "damping": 0.1, "iterations": 10},
            **{"tolerance": 1e-2, "fisher": "empirical"},
        },
    }


def is_zero(value: Any) -> bool:
    """Whether a hyper-parameter is off: the number 0, no array, which may hold another later."""
    return isinstance(value, numbers.Real) and value == 0


for _options in (KfacOptions, CgFacOptions):
    _options.STATIC_ARGUMENTS = tuple(
        field.name for field in dataclasses.fields(_options) if field.name not in _TRACED
    )


class State(NamedTuple):
    """State of ``scale_by_kfac`` and ``scale_by_cg_fac``.

    Attributes:
      count: steps so far, refused ones included.
      velocity: the last step; with ``step="rms"`` the running sum of gradients.
      solution: last solution x of the linear systems, where it is the warm start.
      seen: the sum over layers of its xᵀF x, by the batch it was solved for, where a clip asks.
    """

    count: Int[Array, ""]
    averages: Averages
    velocity: PyTree[Array]
    solution: PyTree[Array]
    seen: PyTree[Array]
    stats: Stats


class Averages(NamedTuple):
    """Exponential running sums; divided by ``weight`` they are averages.

    Attributes:
      factors: block → Kronecker factors.
      traces: block → tr F of each lane and its own weight, where no factors give it.
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
    # float32 for bfloat16 parameters too, which do not resolve a twentieth of a batch.
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
        seen=jnp.zeros_like(scalar) if options.exact and options.measures_coherence else (),
        stats=_empty_stats(owned, forms, scalar, options),
    )


def _empty_factors(block: Block, form: Form, dtype: Any) -> tuple[Array, ...]:
    if form == "exact":
        return ()
    sizes = block.lifted_shape if form == "factors" else blocks.output_groups(block.program)
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
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> optimizer = kfac.kfac(1.0, kfac.find_layers(loss_fn, params, jnp.ones((4, 3))))
    >>> int(find_state(optimizer.init(params)).count)
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
    """What a step tells of itself, see ``telemetry``.

    Of all blocks in one array: on a GPU an array for each would be as many kernels at every step.

    Attributes:
      damping: λ.
      step, momentum: of the solution and of the last step in this one.
      kl_scale: factor by which the KL clip shortened the step.
      coherence: of the network's Δᵀ F Δ over the layers', 1 where it is not measured.
      model: predicted change of the loss by the new direction, without the last step's part.
      rejected: 1 where the step was refused.
      iterations, residual: of CG in each of ``blocks`` and of ``measured``, whose residual a
        product tells, means over lanes; None without any, since Orbax stores no empty arrays.
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


_SCALARS = ("damping", "step", "momentum", "kl_scale", "coherence", "model", "rejected")
ARRAYS = (*_SCALARS, "iterations", "residual")  # the fields that are no names


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

    >>> telemetry({"of": "another optimizer"})
    {}
    """
    named = {}
    for stats in find_stats(opt_state):
        scalars = {name: getattr(stats, name) for name in _SCALARS}
        for name, of in (("iterations", stats.blocks), ("residual", stats.measured)):
            means = zip(of, getattr(stats, name) if of else (), strict=True)
            scalars |= {f"{name}/{block}": mean for block, mean in means}
        named |= {f"{stats.optimizer}/{name}": scalar for name, scalar in scalars.items()}
    return named

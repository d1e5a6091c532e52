"""CG-FAC as an optax gradient transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kfac import _blocks as blocks
from kfac import _solver as solver
from kfac import _systems as systems
from kfac._blocks import CURVATURES, Block
from kfac._capture import path_name
from kfac._costs import prefers_dual, prefers_factors
from kfac._curvature import Curvature, Layers
from kfac._fisher import FISHERS
from kfac._solver import Solution
from kfac._step import STEPS, Proposal, Verdict, fixed_step, judge, quadratic_step
from kfac._systems import Form, System

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, PyTree

    from kfac._step import Vectors

    Flat = dict[str, Array]  # path → array

SOLVERS = ("cg", "dense", "dual", "eigh", "auto")


class CGFacState(NamedTuple):
    """State of ``cg_fac``: arrays only, so that any checkpoint library stores it.

    Attributes:
      count: steps taken.
      damping: λ.
      averages: running averages of the curvature.
      velocity: last update of the covered parameters.
      solution: last solution of the linear systems, where it is the warm start.
      fallback: state of the optimizer of the other parameters.
      stats: telemetry of the last step, see ``telemetry``.
    """

    count: Int[Array, ""]
    damping: Float[Array, ""]
    averages: Averages
    velocity: PyTree[Array]
    solution: PyTree[Array]
    fallback: PyTree[Array]
    stats: dict[str, Any]


class Averages(NamedTuple):
    """Exponential running sums; divided by ``weight`` they are averages.

    Attributes:
      factors: block → Kronecker factors.
      traces: block → tr F of each lane, for relative damping.
      weight: sum of the weights, 0 before the first step.
      inverses: block → inverses of the damped factors that precondition CG (no sums), refreshed now and then.
    """

    factors: dict[str, tuple[Array, ...]]
    traces: dict[str, Array]
    weight: Float[Array, ""]
    inverses: dict[str, tuple[Array, ...]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of ``cg_fac`` by the same names."""

    curvature: str
    fisher: str | None
    token_sharing: str
    solver: str
    damping: float
    damping_scale: str
    min_damping: float
    damping_interval: int
    max_iterations: int
    tolerance: float
    warm_start: bool
    safeguard: bool
    preconditioner_interval: int
    factor_decay: float
    max_factor_size: int
    step: str
    momentum: float
    kl_clip: float | None
    reject: bool
    weight_decay: float

    def check(self) -> None:
        """Raises ValueError for a name that is none of the choices, or choices that exclude each other."""
        choices = {
            "curvature": CURVATURES,
            "fisher": (*FISHERS, None),
            "token_sharing": ("expand", "reduce"),
            "solver": SOLVERS,
            "damping_scale": ("relative", "absolute"),
            "step": STEPS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} to be one of {allowed}, got {getattr(self, name)!r}.")
        if self.solver == "dual" and self.curvature != "exact":
            raise ValueError(f"solver='dual' expects curvature='exact', got {self.curvature!r}; use solver='cg'.")
        if self.damping_interval and self.step != "quadratic":
            raise ValueError(
                f"damping_interval={self.damping_interval} adapts the damping to the quadratic model: expected "
                f"step='quadratic', got {self.step!r}; set damping_interval=0 or that step."
            )

    @property
    def measures_loss(self) -> bool:
        """Whether the loss is evaluated again after a step."""
        return self.reject or self.damping_interval > 0

    def preconditions(self, block: Block) -> bool:
        """Whether CG on this block is preconditioned."""
        return self.preconditioner_interval > 0 and self.form(block).name == "factors"

    def form(self, block: Block) -> Form:
        """Which products serve a block."""
        if self.curvature != "kron":
            return Form(self.curvature)
        factored = block.factored and max(block.lifted_shape(block.uses[0])) <= self.max_factor_size
        if self.factor_decay == 0:  # nothing to average: no need to form what the Jacobian gives cheaper
            factored = factored and prefers_factors(block, self.max_iterations)
        return Form("factors" if factored else "kron", self.token_sharing == "reduce", self.max_factor_size)


class _Problem(NamedTuple):
    """The linear systems of one step."""

    owned: dict[str, Block]
    b: Vectors
    groups: list[System]
    gamma: dict[str, Array]
    averages: Averages


def _flat(tree: PyTree[Array]) -> Flat:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _unflat(flat: Flat, like: PyTree[Array]) -> PyTree[Array]:
    """A tree like ``like`` with the arrays of ``flat``, and ``optax.MaskedNode`` where it has none."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat.get(path_name(path), optax.MaskedNode()), like)


def _vectors(owned: dict[str, Block], tree: PyTree[Array]) -> Vectors:
    flat = _flat(tree)
    return {name: systems.lanes_of(block, flat) for name, block in owned.items()}


def _from_vectors(owned: dict[str, Block], vectors: Vectors, like: Flat) -> Flat:
    flat: Flat = {}
    for name, block in owned.items():
        flat |= systems.to_flat(block, vectors[name], like)
    return flat


def _at(rate: optax.ScalarOrSchedule, count: Array, dtype: Any) -> Array:
    return jnp.asarray(rate(count) if callable(rate) else rate, dtype)


class _CGFac:
    """``init`` and ``update`` of the transformation; the arguments are those of ``cg_fac``."""

    def __init__(
        self,
        learning_rate: optax.ScalarOrSchedule,
        layers: Layers,
        options: Options,
        fallback: optax.GradientTransformation,
        fallback_learning_rate: optax.ScalarOrSchedule,
        weight_decay_mask: Any,
    ):
        options.check()
        self.learning_rate = learning_rate
        self.layers = layers
        self.options = options
        self.fallback = optax.with_extra_args_support(fallback)
        self.fallback_learning_rate = fallback_learning_rate
        self.weight_decay_mask = weight_decay_mask

    def owned(self, flat: Flat, layers: Layers) -> dict[str, Block]:
        """The optimizer's blocks, as ``layers`` has them, whose parameters this tree holds (others may be masked)."""
        blocks = {name: layers.blocks[name] for name in self.layers.blocks}
        return {n: b for n, b in blocks.items() if all(p.path in flat for p in b.params)}

    def init(self, params: PyTree[Array]) -> CGFacState:
        flat, options = _flat(params), self.options
        owned = self.owned(flat, self.layers)
        dtype = jnp.promote_types(jnp.result_type(*flat.values()), jnp.float32)
        covered = {p.path for b in owned.values() for p in b.params}
        velocity = _unflat({path: jnp.zeros_like(flat[path]) for path in covered}, params)
        lanes = {name: jnp.zeros((block.lanes,), dtype) for name, block in owned.items()}
        scalar = jnp.zeros((), dtype)
        factors = {name: _empty_factors(block, options.form(block), dtype) for name, block in owned.items()}
        averages = Averages(
            factors,
            lanes if options.damping_scale == "relative" else {},
            scalar,
            {
                name: _empty_inverses(block, factors[name])
                for name, block in owned.items()
                if options.preconditions(block)
            },
        )
        per_block = {n: {"iterations": zero.astype(jnp.int32), "residual": zero} for n, zero in lanes.items()}
        summary = dict.fromkeys(("damping", "step", "momentum", "kl_scale", "model", "rejected"), scalar)
        summary["ratio"] = jnp.ones_like(scalar)
        return CGFacState(
            count=jnp.zeros((), jnp.int32),
            damping=jnp.asarray(options.damping, dtype),
            averages=averages,
            velocity=velocity,
            solution=jax.tree.map(jnp.zeros_like, velocity) if options.warm_start else (),
            fallback=self.fallback.init(_unflat({k: v for k, v in flat.items() if k not in covered}, params)),
            stats={"blocks": per_block, **summary},
        )

    def update(
        self,
        grads: PyTree[Array],
        state: CGFacState,
        params: PyTree[Array] | None = None,
        *,
        curvature: Curvature | None = None,
        value: Array | None = None,
        value_fn: Callable[[PyTree[Array]], Array] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree[Array], CGFacState]:
        self.check_arguments(params, curvature, value, value_fn)
        problem = self.problem(grads, state, params, curvature)
        solved = self.solve(problem, state)
        proposal = self.propose(problem, solved, state, params, curvature)
        delta = _from_vectors(problem.owned, proposal.delta, _flat(grads))
        finite = jnp.all(jnp.stack([jnp.isfinite(d).all() for d in delta.values()]))
        change = None
        if self.options.measures_loss:
            change = lambda: value_fn(_add(params, delta)) - value
        verdict = judge(
            finite,
            proposal.model,
            state.damping,
            state.count,
            change=change,
            interval=self.options.damping_interval,
            reject=self.options.reject,
            min_damping=self.options.min_damping,
        )
        delta = {path: jnp.where(verdict.accept, d, 0) for path, d in delta.items()}
        solution = state.solution
        if self.options.warm_start:
            x = _from_vectors(problem.owned, {n: s.x for n, s in solved.items()}, _flat(grads))
            solution = _unflat({path: jnp.where(finite, new, 0) for path, new in x.items()}, grads)
        updates, fallback = self.complete(delta, grads, state, params, extra_args)
        return updates, CGFacState(
            count=state.count + 1,
            damping=verdict.damping,
            # One batch that is not finite would stay in the averages for ever.
            averages=jax.tree.map(lambda new, old: jnp.where(finite, new, old), problem.averages, state.averages),
            velocity=_unflat(delta, grads),
            solution=solution,
            fallback=fallback,
            stats=_stats(solved, proposal, verdict, state),
        )

    def check_arguments(self, params: Any, curvature: Any, value: Any, value_fn: Any) -> None:
        """Raises ValueError unless ``update`` got what these options need."""
        options = self.options
        if curvature is None or params is None:
            raise ValueError(
                "cg_fac expects update(grads, state, params, curvature=…), got none; compute the gradient with "
                "kfac.value_grad_and_curvature and pass its third result on."
            )
        if options.fisher is not None and curvature.fisher != options.fisher:
            raise ValueError(
                f"expected curvature of fisher={options.fisher!r}, got {curvature.fisher!r}; pass the same name to "
                "cg_fac and value_grad_and_curvature."
            )
        missing = sorted(set(self.layers.blocks) - set(curvature.layers.blocks))
        if missing:
            raise ValueError(
                f"expected curvature of the layers that cg_fac was made with, got none of {', '.join(missing[:4])}; "
                "call kfac.find_layers with the loss function that is differentiated."
            )
        if curvature.fresh is not None and options.curvature != "kron":
            raise ValueError(
                f"curvature={options.curvature!r} is not averaged over steps: expected fresh curvature at "
                "every step, got refresh=; use curvature='kron' or drop refresh."
            )
        if curvature.fresh is not None and options.step == "quadratic":
            raise ValueError(
                "step='quadratic' measures the curvature along each step: expected fresh curvature at every step, got "
                "refresh=; use step='fixed' or drop refresh."
            )
        if options.measures_loss and (value is None or value_fn is None):
            raise ValueError(
                "reject and damping_interval compare losses: expected update(…, value=loss, value_fn=params → loss on "
                "the same batch), got none; pass them, or set reject=False and damping_interval=0."
            )

    def problem(self, grads: PyTree, state: CGFacState, params: PyTree, curvature: Curvature) -> _Problem:
        """The systems (F + γI) x = b of this step."""
        options, flat = self.options, _flat(params)
        owned = self.owned(_flat(grads), curvature.layers)
        forms = {name: options.form(block) for name, block in owned.items()}
        decay = jnp.asarray(options.factor_decay, state.damping.dtype)

        def update_factors() -> tuple[dict, Array]:
            factors = {}
            for name, block in owned.items():
                old = state.averages.factors[name]
                new = systems.new_factors(block, curvature, systems.lanes_of(block, flat), forms[name]) if old else ()
                factors[name] = jax.tree.map(lambda o, n: decay * o + (1 - decay) * n.astype(o.dtype), old, new)
            return factors, decay * state.averages.weight + (1 - decay)

        if curvature.fresh is None:
            factors, weight = update_factors()
        else:
            old = state.averages
            factors, weight = jax.lax.cond(curvature.fresh, update_factors, lambda: (old.factors, old.weight))
        tiny = jnp.finfo(weight.dtype).tiny  # the weight is 0 until the first curvature is in
        ready = {name: jax.tree.map(lambda f: f / jnp.maximum(weight, tiny), f) for name, f in factors.items()}
        groups = systems.build(curvature, flat, forms, ready)
        traces, gamma = self.damp(groups, state, weight)
        inverses = state.averages.inverses
        if inverses:
            preconditioned = [system for system in groups if system.blocks[0].name in inverses]
            due = state.count % options.preconditioner_interval == 0
            invert = lambda: {n: i for system in preconditioned for n, i in system.damped_inverses(gamma).items()}
            inverses = jax.lax.cond(due, invert, lambda: state.averages.inverses)
            groups = [system.preconditioned(inverses) for system in groups]
        averages = Averages(factors, traces, weight, inverses)
        return _Problem(owned, _vectors(owned, grads), groups, gamma, averages)

    def damp(self, groups: list[System], state: CGFacState, weight: Array) -> tuple[dict, dict[str, Array]]:
        """Running traces, and γ of each block: λ, or λ tr F / (number of parameters)."""
        if self.options.damping_scale == "absolute":
            return {}, {b.name: jnp.broadcast_to(state.damping, (b.lanes,)) for s in groups for b in s.blocks}
        traces, gamma = {}, {}
        for i, system in enumerate(groups):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), i), state.count)
            for block, trace in zip(system.blocks, system.split(system.trace(key)), strict=True):
                if system.form.name == "factors":
                    average = trace  # of averaged factors
                    traces[block.name] = trace
                else:
                    decay = self.options.factor_decay
                    traces[block.name] = decay * state.averages.traces[block.name] + (1 - decay) * trace
                    average = traces[block.name] / (1 - decay ** (state.count + 1))
                gamma[block.name] = state.damping * average.astype(state.damping.dtype) / block.size
        return traces, gamma

    def solve(self, problem: _Problem, state: CGFacState) -> dict[str, Solution]:
        """Solves all systems."""
        warm = _vectors(problem.owned, state.solution) if self.options.warm_start else None
        solved: dict[str, Solution] = {}
        for system in problem.groups:
            names = [block.name for block in system.blocks]
            stack = lambda vectors, names=names: jax.tree.map(
                lambda *a: jnp.concatenate(a), *(vectors[n] for n in names)
            )
            x0 = None if warm is None else stack(warm)
            solution = solve_system(system, stack(problem.b), stack(problem.gamma), x0, self.options)
            solved |= dict(zip(names, system.split(solution), strict=True))
        return solved

    def propose(
        self, problem: _Problem, solved: dict[str, Solution], state: CGFacState, params: PyTree, curvature: Curvature
    ) -> Proposal:
        """The step that the options name."""
        options = self.options
        rate = _at(self.learning_rate, state.count, state.damping.dtype)
        shared = (solved, problem.b, problem.gamma, _vectors(problem.owned, state.velocity))
        if options.step == "fixed":
            return fixed_step(*shared, rate=rate, momentum=options.momentum, kl_clip=options.kl_clip)
        exact = systems.build(curvature, _flat(params), {name: Form("exact") for name in problem.owned})
        return quadratic_step(
            *shared,
            groups=exact,
            num_examples=curvature.num_examples,
            rate=rate,
            kl_clip=options.kl_clip,
        )

    def complete(
        self, delta: Flat, grads: PyTree, state: CGFacState, params: PyTree, extra_args: dict
    ) -> tuple[PyTree, PyTree]:
        """Adds decoupled weight decay, and the fallback's updates of the parameters without a block."""
        flat_grads, flat_params = _flat(grads), _flat(params)
        if self.options.weight_decay:
            mask = self.weight_decay_mask
            mask = mask(params) if callable(mask) else mask
            decayed = set(flat_params) if mask is None else {path for path, keep in _flat(mask).items() if keep}
            rate = _at(self.fallback_learning_rate, state.count, jnp.float32) * self.options.weight_decay
            delta = {k: d - (rate * flat_params[k]).astype(d.dtype) if k in decayed else d for k, d in delta.items()}
        rest = lambda flat: _unflat({k: v for k, v in flat.items() if k in flat_grads and k not in delta}, grads)
        others, fallback = self.fallback.update(rest(flat_grads), state.fallback, rest(flat_params), **extra_args)
        return _unflat(delta | _flat(others), grads), fallback


def solve_system(system: System, b: tuple, gamma: Array, x0: tuple | None, options: Options) -> Solution:
    """Solves (F + γI) x = b of every lane of a system by the solver that the options name."""
    packed, name = system.pack(b), options.solver
    if name == "auto" and system.form.name == "exact":
        block, num_columns = system.blocks[0], system.g[0].shape[1]
        name = "dual" if prefers_dual(block, options.max_iterations, num_columns) else "cg"
    if name == "dense":
        solution = solver.solve_dense(system.matvec, packed, gamma)
    elif name == "dual":
        solution = solver.solve_dual(system.example_gradients(), packed, gamma, system.program[0].num_examples)
    elif name == "eigh" and system.form.name == "factors" and system.program[0].layer.isometric:
        x = system.solve_by_eigenvectors(packed, gamma)
        solution = solver.direct_solution(system.matvec, packed, gamma, x)
    else:
        solution = solver.cg(
            system.matvec,
            packed,
            gamma,
            max_iterations=options.max_iterations,
            tolerance=options.tolerance,
            x0=None if x0 is None else system.pack(x0),
            safeguard=options.safeguard,
            precondition=system.precondition,
        )
    return solution._replace(x=system.unpack(solution.x))


def _empty_factors(block: Block, form: Form, dtype: Any) -> tuple[Array, ...]:
    sizes: tuple[int, ...] = ()
    if form.name == "factors":
        sizes = block.lifted_shape(block.uses[0])
    elif form.name == "kron":
        sizes = tuple(blocks.output_groups(block.program))
    shape = lambda n: (n, n) if n <= form.max_size else (n,)
    return tuple(jnp.zeros((block.lanes, *shape(n)), dtype) for n in sizes)


def _empty_inverses(block: Block, factors: tuple[Array, ...]) -> tuple[Array, Array]:
    use = block.uses[0]
    own = use.own(tuple(jax.ShapeDtypeStruct(p.shape, factors[1].dtype) for p in block.params))
    rows = jax.eval_shape(use.layer.matrix, own).shape[0]
    return jnp.zeros((block.lanes, rows, rows), factors[1].dtype), jnp.zeros_like(factors[1])


def _add(params: PyTree[Array], delta: Flat) -> PyTree[Array]:
    add = lambda path, p: p + delta[path_name(path)].astype(p.dtype) if path_name(path) in delta else p
    return jax.tree_util.tree_map_with_path(add, params)


def _stats(solved: dict[str, Solution], proposal: Proposal, verdict: Verdict, state: CGFacState) -> dict[str, Any]:
    scalar = lambda a: jnp.asarray(a, state.damping.dtype)
    return {
        "blocks": {n: {"iterations": s.iterations, "residual": scalar(s.residual)} for n, s in solved.items()},
        "damping": state.damping,
        "step": scalar(proposal.coefficients[0]),
        "momentum": scalar(proposal.coefficients[1]),
        "kl_scale": scalar(proposal.kl_scale),
        "model": scalar(proposal.model),
        "ratio": jnp.where(jnp.isnan(verdict.ratio), state.stats["ratio"], scalar(verdict.ratio)),
        "rejected": scalar(~verdict.accept),
    }


def cg_fac(
    learning_rate: optax.ScalarOrSchedule,
    layers: Layers,
    *,
    curvature: str = "kron",
    fisher: str | None = None,
    token_sharing: str = "expand",
    solver: str = "cg",
    max_iterations: int = 5,
    tolerance: float = 0.0,
    preconditioner_interval: int = 10,
    warm_start: bool = False,
    safeguard: bool = True,
    damping: float = 1e-2,
    damping_scale: str = "relative",
    min_damping: float = 1e-8,
    damping_interval: int = 0,
    factor_decay: float = 0.95,
    max_factor_size: int = 8192,
    step: str = "quadratic",
    momentum: float = 0.9,
    kl_clip: float | None = 0.1,
    reject: bool = False,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    fallback: optax.GradientTransformation | None = None,
    fallback_learning_rate: optax.ScalarOrSchedule = 1e-3,
) -> optax.GradientTransformationExtraArgs:
    r"""CG-FAC: solves (F̂ + γI) x = ∇L for every layer by conjugate gradients, F̂ never formed; Δθ ∝ −x.

    Source: Algorithm 1 of Chen, "The Brownian motion in the transformer model" (2021), see ``algorithm_1`` for it to
    the letter. The paper's product g (gᵀ v a) aᵀ has two readings for a batch of more than one example, and both are
    here: ``curvature="exact"`` is the Fisher block of the layer; ``"kron"`` takes all pairs of inputs and cotangents
    instead of matching ones, which is K-FAC's operator, and is the better optimizer of the two (Benzing, 2022,
    arXiv:2201.12250).

    The transformation goes under the caller's own ``jax.jit`` and sharding, and composes with ``optax.chain``,
    ``optax.partition`` and ``optax.MultiSteps``. ``update`` takes, beside the gradient, the curvature that
    ``value_grad_and_curvature`` returns; without it, it raises. Parameters that no layer covers, and biases and norms
    left out by hand, go to ``fallback``.

    Args:
      learning_rate: factor of the whole step, or a schedule. 1 for ``step="quadratic"``, which finds the length itself.
      layers: from ``find_layers``, all or those that ``Layers.select`` keeps.
      curvature: ``"kron"``, ``"exact"`` or ``"token"`` (exact, without products of different tokens).
      fisher: the name that ``value_grad_and_curvature`` must have been given; None accepts any.
      token_sharing: ``"expand"`` or ``"reduce"``, for ``"kron"``.
      solver: ``"cg"``; ``"eigh"`` (for ``"kron"``, by eigenvectors of the factors); ``"dual"`` (for ``"exact"``, by
        Woodbury's identity in example space); ``"dense"``, for checks; ``"auto"``: for each exact block the cheaper of
        ``"cg"`` and ``"dual"``.
      max_iterations: products per layer and step.
      tolerance: relative residual at which a layer stops; 0 for a fixed number of iterations, which costs no test.
      preconditioner_interval: steps between inversions of the damped Kronecker factors that precondition CG, for
        ``"kron"``; CG makes up for their age. 0 for none.
      warm_start: start CG from the last solution.
      safeguard: rescale the warm start so that it cannot cause an ascent direction.
      damping: λ. ``"relative"``: γ = λ tr F / size of each layer, free of its scale; ``"absolute"``: γ = λ.
      damping_scale: ``"relative"`` or ``"absolute"``.
      min_damping: adaptation lowers λ no further.
      damping_interval: steps between Levenberg-Marquardt adaptations of λ to the quadratic model; 0 for none. Needs
        ``value`` and ``value_fn``, and one evaluation of the loss each time.
      factor_decay: of the running averages of Kronecker factors; 0 for this batch alone.
      max_factor_size: layers with larger factors use their Jacobian, and diagonal right factors.
      step: ``"quadratic"``: step length and momentum from a quadratic model in the new direction and the last step;
        ``"fixed"``: momentum and learning rate as given.
      momentum: for ``step="fixed"``.
      kl_clip: κ; shortens steps with Δᵀ F Δ > κ, twice the change of the predictions in nats, before the learning
        rate scales them. None for none, which is for batches much larger than the layers: the curvature of a small
        one leaves directions in which it sees nothing, and the quadratic model then asks for steps of any length.
      reject: refuse a step that raises the loss on its own batch, and raise λ fourfold. Needs ``value`` and
        ``value_fn``, and one evaluation of the loss per step. Steps that are not finite are always refused.
      weight_decay: decoupled, at the rate of ``fallback_learning_rate``, so that it means what it does in AdamW.
      weight_decay_mask: tree of booleans or function of the parameters, as in ``optax.adamw``.
      fallback: optimizer of the parameters without a block; AdamW by default.
      fallback_learning_rate: its learning rate, and the rate of ``weight_decay``.

    Returns:
      A transformation whose ``update`` takes ``(grads, state, params, *, curvature, value=None, value_fn=None)``.

    Raises:
      ValueError: unknown names, or choices that exclude each other; in ``update``, missing or foreign curvature.

    >>> import jax, jax.numpy as jnp, kfac, optax
    >>> params = {"kernel": jnp.zeros((3, 2))}
    >>> x = jax.random.normal(jax.random.key(0), (16, 3))
    >>> def loss_fn(params, x):
    ...     y = kfac.tap(kfac.Dense(), params, x, path="")
    ...     return 0.5 * ((y - x[:, :2]) ** 2).sum(-1).mean(), y
    >>> optimizer = kfac.cg_fac(1.0, kfac.find_layers(loss_fn, params, x))
    >>> function = kfac.value_grad_and_curvature(loss_fn, fisher="ggn", likelihood="gaussian", has_aux=True)
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
    options = Options(
        curvature=curvature,
        fisher=fisher,
        token_sharing=token_sharing,
        solver=solver,
        damping=damping,
        damping_scale=damping_scale,
        min_damping=min_damping,
        damping_interval=damping_interval,
        max_iterations=max_iterations,
        tolerance=tolerance,
        warm_start=warm_start,
        safeguard=safeguard,
        preconditioner_interval=preconditioner_interval if solver == "cg" else 0,
        factor_decay=factor_decay,
        max_factor_size=max_factor_size,
        step=step,
        momentum=momentum,
        kl_clip=kl_clip,
        reject=reject,
        weight_decay=weight_decay,
    )
    if fallback is None:
        fallback = optax.adamw(fallback_learning_rate, weight_decay=weight_decay, mask=weight_decay_mask)
    transformation = _CGFac(learning_rate, layers, options, fallback, fallback_learning_rate, weight_decay_mask)
    return optax.GradientTransformationExtraArgs(transformation.init, transformation.update)


def algorithm_1(
    learning_rate: optax.ScalarOrSchedule,
    layers: Layers,
    *,
    damping: float,
    max_iterations: int,
    tolerance: float = 1e-2,
    fallback: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Algorithm 1 of the paper to the letter: empirical Fisher, exact block, warm start from the previous batch.

    At most ``max_iterations`` plain CG steps on (F̂ + γI) x = ∇L from x₀, the previous batch's x, γ the same for all
    layers, stopping when ‖r‖ ≤ ``tolerance``·‖∇L‖ ("sufficiently small" in the paper); then θ ← θ − η x. Where the
    paper is silent: the product is averaged over the batch, W and b of a layer are one block, and parameters without a
    block go to ``fallback``.

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


def telemetry(opt_state: PyTree[Array]) -> dict[str, Array]:
    """Scalars of the last step of ``cg_fac``, wherever it stands in an optax chain, by name.

    ``cg_fac/damping`` λ, ``step`` and ``momentum`` (α, β), ``kl_scale``, ``model`` (predicted change of the loss),
    ``ratio`` (actual over predicted, when last measured), ``rejected``; and for each block ``iterations/<block>``
    and ``residual/<block>`` (mean over its lanes).

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> optimizer = kfac.cg_fac(1.0, kfac.find_layers(loss_fn, params, jnp.ones((4, 3))))
    >>> sorted(telemetry(optimizer.init(params)))[:3]
    ['cg_fac/damping', 'cg_fac/iterations/fc', 'cg_fac/kl_scale']
    """
    is_state = lambda node: isinstance(node, CGFacState)
    scalars: dict[str, Array] = {}
    for state in filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)):
        for name, value in state.stats.items():
            if name != "blocks":
                scalars[f"cg_fac/{name}"] = value
        for block, values in state.stats["blocks"].items():
            for name, value in values.items():
                scalars[f"cg_fac/{name}/{block}"] = value.mean()
    return scalars

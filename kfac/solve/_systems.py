"""Linear systems (F + γI) x = b of the blocks, blocks of equal form stacked into one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from kfac._sharing import mean_over, names_of, over_devices, own_along
from kfac._trees import concatenated
from kfac.curvature import _blocks as blocks
from kfac.curvature._blocks import Block
from kfac.curvature._gather import Curvature
from kfac.solve import _solvers as solver

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    from kfac._sharing import AxisName

    Lanes = tuple[Float[Array, "lane ..."], ...]
    Factors = dict[str, tuple[Array, ...]]

_NO_OUTPUT = jax.ShapeDtypeStruct((), jnp.float32)


Form = Literal["exact", "kron", "factors"]
"""Which matrix a block's F is, and by which products: the layer's own Fisher matrix, through its
Jacobian; that of independent inputs and cotangents, through the Jacobian; that by both factors."""


@dataclasses.dataclass(frozen=True)
class System:
    """One or several blocks whose products are computed together, lane by lane.

    Attributes:
      blocks: the blocks, in the order of their lanes.
      form: of F.
      program: the calls of one lane.
      params: current parameters, with leading lane axis.
      state: what the products need: local Jacobians, factors.
      g: cotangents per use, or () where F does not depend on them.
      inputs: captured inputs per use, of exact blocks.
      inverses: of the damped factors, that precondition CG: pairs for some lanes each, or ().
      parts: the systems of single blocks that were stacked, or ().
      axis_name: manual axes along which devices have a part of the batch each, where F is made of
        the batch.
      weights: of examples, see ``_example_weights``, likewise.
    """

    blocks: tuple[Block, ...]
    form: Form
    program: tuple[Any, ...]
    params: Lanes
    state: PyTree[Array]
    g: tuple[Array, ...] = ()
    inputs: tuple[Any, ...] = ()
    inverses: tuple[tuple[Array, ...], ...] = ()
    parts: tuple[System, ...] = ()
    axis_name: AxisName = None
    weights: Array | None = None

    @property
    def arrays(self) -> tuple:
        """Everything that a system is built from, with a lane axis."""
        return self.params, self.state, self.g

    @property
    def packs(self) -> bool:
        """Whether vectors are single matrices [V; v_b].

        Then the solver's loop has fewer, larger operations.
        """
        return (
            all(u.layer.factored for u in self.program)
            and len({(u.layer, u.roles) for u in self.program}) == 1
        )

    def pack(self, v: Lanes) -> PyTree[Array]:
        """A vector as the solver sees it.

        One matrix per lane for dense blocks, the parameters for others.
        """
        return jax.vmap(self.program[0].as_matrix)(v) if self.packs else v

    def unpack(self, packed: PyTree[Array]) -> Lanes:
        """The inverse of ``pack``."""
        if not self.packs:
            return packed
        use = self.program[0]
        parts = jax.vmap(use.from_matrix)(self.params, packed)
        roles = {i: role for role, i in use.roles}
        return tuple(parts[roles[i]] for i in range(len(roles)))

    def product(self, v: Lanes) -> Lanes:
        """F v of every lane."""
        if self.form == "factors":
            return self.unpack(self.matvec(self.pack(v)))
        product = jax.vmap(functools.partial(_product, self.program, self.form, self.weights))
        return mean_over(self.axis_name, product(self.state, self.g, self._own(v)))

    def matvec(self, v: PyTree[Array]) -> PyTree[Array]:
        """F v of every lane, for packed v."""
        if self.form == "factors":
            left, right = self.state
            return jax.vmap(functools.partial(blocks.factor_product, self.program[0]))(
                self.params, left, right, v
            )
        return self.pack(self.product(self.unpack(v)))

    def precondition(self, r: PyTree[Array]) -> PyTree[Array]:
        """M⁻¹ r for packed r, by the inverses of the factors; r itself where there are none."""
        if not self.inverses:
            return r
        # Stacked they are one product of a batch, which fills a GPU. On CPUs each lane's product
        # fills the cores, and the stack would be a copy of all inverses at every step.
        return jax.lax.platform_dependent(
            self.inverses, r, cpu=_preconditioned_in_parts, default=_preconditioned
        )

    def squared_weights(self) -> Float[Array, " lane"]:
        """‖θ‖² of every lane."""
        parts = [part.params for part in self.parts or [self]]
        # As in `precondition`: few kernels on a GPU, and no copy of all parameters on a CPU.
        return jax.lax.platform_dependent(parts, cpu=_squares_in_parts, default=_squares)

    def derivatives(self, v: Lanes) -> Float[Array, "column example"]:
        """Each example's derivative of its loss along v, summed over the lanes.

        For systems that keep cotangents.
        """

        def one(state: Any, g: Any, v: Lanes) -> Array:
            return blocks.example_derivatives(g, blocks.pushforward(self.program, state, v))

        return jax.vmap(one)(self.state, self.g, self._own(v)).sum(0)

    def preconditioned(self, inverses: Factors) -> System:
        """This system with the inverses of its blocks' damped factors, where there are any."""
        parts = [inverses[block.name] for block in self.blocks if block.name in inverses]
        return dataclasses.replace(self, inverses=tuple(parts))

    def damped_factors(self, gamma: dict[str, Array]) -> dict[str, tuple[Lanes, Lanes]]:
        """By block, 𝒜 with π√γ and 𝒢 with √γ/π, where π² = (tr 𝒜 / rows) / (tr 𝒢 / columns).

        Source: Martens & Grosse (2015), section 6.3.
        """
        left, right = self.state
        if not self.program[0].layer.isometric:
            # Rows of a factor may lie on different devices: sliced there, they would be sent around
            # one by one.
            mean = jax.vmap(self.program[0].mean_left)
            left = over_devices(mean, self.params, kept=(left,), whole=False)
        # Not those of zeros, see `Dense.features`.
        columns = right.shape[-1]
        rows = self.blocks[0].size // columns
        root = jnp.sqrt(jnp.concatenate([gamma[block.name] for block in self.blocks]))
        tiny = jnp.finfo(left.dtype).tiny
        # (𝒜 + π√γ I) ⊗ (𝒢 + √γ/π I) has γI and two terms too many, whose trace norm is
        # least for this π. The factors may differ by many orders of magnitude: one √γ for
        # both would drown the smaller and not reach the larger.
        of_left = jnp.maximum(diagonal(left).sum(-1) / rows, tiny)
        of_right = jnp.maximum(diagonal(right).sum(-1) / columns, tiny)
        pi = jnp.sqrt(of_left / of_right)
        parts = self.split(((left, root * pi), (right, root / pi)))
        return {block.name: part for block, part in zip(self.blocks, parts, strict=True)}

    def trace(self, key: Array) -> Float[Array, " lane"]:
        """tr F of every lane.

        An unbiased estimate from random signs (Hutchinson) where there is no closed form.
        """
        if self.form == "factors":
            one = jax.vmap(functools.partial(blocks.factored_trace, self.program[0]))
            # Of each part, since they read diagonals: a stack would be a copy of all factors.
            return jnp.concatenate([one(part.params, *part.state) for part in self.parts or [self]])
        if self.form == "exact":
            exact = jax.vmap(functools.partial(blocks.exact_trace, self.program))
            own = exact(self._own(self.params), self.inputs, self.state, self.g)
            return mean_over(self.axis_name, own)
        like, treedef = jax.tree.flatten(self.pack(self.params))
        keys = jax.random.split(key, len(like))
        signs = [
            jax.random.rademacher(k, p.shape, p.dtype) for k, p in zip(keys, like, strict=True)
        ]
        signs = jax.tree.unflatten(treedef, signs)
        return solver.lane_dot(signs, self.matvec(signs))

    def example_gradients(self) -> Float[Array, "lane row size"]:
        """Every example's own gradient of every lane: U of F = UᵀU/N.

        For systems that keep cotangents.
        """
        one = functools.partial(blocks.example_gradients, self.program)
        rows = jax.vmap(one)(self.params, self.inputs, self.state, self.g)
        packed = jax.vmap(self.pack, in_axes=1, out_axes=1)(rows)
        flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(packed)]
        return jnp.concatenate(flat, axis=2)

    def _own(self, lanes: Lanes) -> Lanes:
        return own_along(names_of(self.axis_name), lanes)

    def split(self, lanes: PyTree[Array]) -> list[PyTree[Array]]:
        """Per block, its part of arrays with a leading lane axis."""
        parts, start = [], 0
        for block in self.blocks:
            end = start + block.lanes
            parts.append(jax.tree.map(lambda a, s=start, e=end: a[s:e], lanes))
            start = end
        return parts


def _preconditioned(inverses: tuple[tuple[Array, ...], ...], r: Array) -> Array:
    left, right = concatenated(inverses)
    return _between(left, r, right)


def _preconditioned_in_parts(inverses: tuple[tuple[Array, ...], ...], r: Array) -> Array:
    ends = list(itertools.accumulate(len(left) for left, _ in inverses))
    parts = zip(inverses, jnp.split(r, ends[:-1]), strict=True)
    return jnp.concatenate([_between(left, part, right) for (left, right), part in parts])


def _between(
    left: Float[Array, "lane n n"], r: Float[Array, "lane n m"], right: Float[Array, "lane m m"]
) -> Float[Array, "lane n m"]:
    """left · r · right of every lane; operands as narrow as the outer ones, sums as wide as r."""
    product = functools.partial(jnp.matmul, preferred_element_type=r.dtype)
    return product(product(left, r.astype(left.dtype)).astype(right.dtype), right)


def _squares(parts: list[Lanes]) -> Float[Array, " lane"]:
    lanes = concatenated(parts)
    return solver.lane_dot(lanes, lanes)


def _squares_in_parts(parts: list[Lanes]) -> Float[Array, " lane"]:
    return jnp.concatenate([solver.lane_dot(lanes, lanes) for lanes in parts])


def _product(program: tuple, form: Form, weights: Array | None, state: Any, g: Any, v: Any) -> Any:
    if form == "kron":
        linearized, right = state
        return blocks.kron_product(program, linearized, right, v, weights)
    return blocks.exact_product(program, state, g, v)


def lanes_of(block: Block, flat: dict[str, Array]) -> Lanes:
    """A block's part of a flat tree {path: array}, with a leading lane axis.

    In float32 or better.
    """
    lanes = tuple(param.to_lanes(flat[param.path]) for param in block.params)
    return tuple(a.astype(_float(a)) for a in lanes)


def to_flat(block: Block, lanes: Lanes, like: dict[str, Array]) -> dict[str, Array]:
    """The inverse of ``lanes_of``, with the shapes and dtypes of ``like``."""
    whole = {}
    for param, array in zip(block.params, lanes, strict=True):
        target = like[param.path]
        whole[param.path] = param.from_lanes(array, target.shape).astype(target.dtype)
    return whole


def captured_of(block: Block, curvature: Curvature) -> tuple[tuple, tuple[Array, ...]]:
    """A block's captured inputs and cotangents (lane, column, example, token, output), per use."""
    inputs, g = [], []
    for use in block.uses:
        x, dy = curvature.captured[use.name]
        inputs.append(use.inputs(x))
        dy = use.cotangents(dy)
        g.append(dy.astype(_float(dy)))
    return tuple(inputs), tuple(g)


def new_factors(
    block: Block, curvature: Curvature, params: Lanes, form: Form, narrow: str | None = None
) -> tuple[Array, ...]:
    """This batch's Kronecker factors: (left, right).

    For ``"factors"``; for ``"kron"`` the right ones are by output width. Operands are rounded to
    ``narrow``, if given.
    """
    inputs, g = captured_of(block, curvature)
    right = jax.vmap(functools.partial(blocks.right_factors, block.program, narrow=narrow))(g)
    if form == "kron":
        return mean_over(curvature.axis_name, right)
    of_examples = {"narrow": narrow, "weights": _example_weights(curvature)}
    left_factor = functools.partial(blocks.left_factor, block.program, **of_examples)
    left = jax.vmap(left_factor)(params, inputs)
    return mean_over(curvature.axis_name, (left, right[0]))


def _example_weights(curvature: Curvature) -> Float[Array, " example"] | None:
    """Weights of the examples, of mean 1: inputs count in a factor as much as their losses do.

    Of examples and not of positions: those of a layer need not be those of the outputs.
    """
    if curvature.weights is None:
        return None
    mean = (examples := curvature.weights.examples).mean()
    return examples / jnp.where(mean > 0, mean, 1)


def diagonal(factor: Float[Array, "lane n *n"]) -> Float[Array, "lane n"]:
    """The diagonal of a factor, which may hold nothing else."""
    return factor if factor.ndim == 2 else jnp.diagonal(factor, axis1=1, axis2=2)


def build(
    curvature: Curvature,
    params: dict[str, Array],
    forms: dict[str, Form],
    factors: Factors | None = None,
) -> list[System]:
    """The systems of all blocks named in ``forms``.

    Args:
      curvature: of this step.
      params: path → parameter.
      forms: block name → form.
      factors: block name → factors, for the forms that have them.
    """
    groups: dict[Any, list[System]] = {}
    for name, form in forms.items():
        system = _one(
            curvature.layers.blocks[name], curvature, params, form, (factors or {}).get(name, ())
        )
        # Layers of one shape become one system: fewer and larger products, and one loop
        # to compile for all of them.
        shapes = jax.tree.map(lambda a: (a.shape[1:], str(a.dtype)), system.arrays)
        key = (system.program, form, jax.tree.structure(shapes), str(shapes))
        groups.setdefault(key, []).append(system)
    return [_linearized(_stack(systems)) for systems in groups.values()]


def _one(block: Block, curvature: Curvature, params: dict, form: Form, factors: tuple) -> System:
    """One block's system, before linearisation.

    The captured inputs stand for the local Jacobians.
    """
    lanes = lanes_of(block, params)
    if form == "factors":
        # Factors know nothing of the batch: what is the batch's in the program would keep
        # layers of one shape apart.
        any_batch = {"output": _NO_OUTPUT, "input_dtypes": (), "num_examples": 0, "example_axis": 0}
        program = (dataclasses.replace(block.program[0], **any_batch),)
        return System((block,), form, program, lanes, factors)
    inputs, g = captured_of(block, curvature)
    state, g = ((inputs, factors), ()) if form == "kron" else (inputs, g)
    of_batch = {"axis_name": curvature.axis_name, "weights": _example_weights(curvature)}
    return System((block,), form, block.program, lanes, state, g, **of_batch)


def _stack(systems: list[System]) -> System:
    first = systems[0]
    if len(systems) == 1:
        return first
    arrays = concatenated(s.arrays for s in systems)
    stacked = tuple(b for s in systems for b in s.blocks)
    of_batch = {"axis_name": first.axis_name, "weights": first.weights}
    return System(stacked, first.form, first.program, *arrays, parts=tuple(systems), **of_batch)


def _linearized(system: System) -> System:
    if system.form == "factors":
        return system
    # Once for all products of a solve: each of its iterations would pass through the
    # layer again otherwise.
    linearize = jax.vmap(functools.partial(blocks.linearize, system.program))
    params = own_along(names_of(system.axis_name), system.params)
    if system.form == "kron":
        inputs, right = system.state
        return dataclasses.replace(system, state=(linearize(params, inputs), right))
    return dataclasses.replace(system, state=linearize(params, system.state), inputs=system.state)


def _float(array: Array) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)

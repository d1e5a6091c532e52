"""Linear systems (F + γI) x = b of the blocks, blocks of equal form stacked into one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from kfac._arrays import concatenated, mean_over, names_of, over_devices, own_along
from kfac.curvature import _blocks as blocks
from kfac.curvature._blocks import Block
from kfac.curvature._gather import Curvature
from kfac.solve import _solvers as solver

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    from kfac._arrays import AxisName
    from kfac.curvature._blocks import Lane

    Lanes = tuple[Float[Array, "lane ..."], ...]
    Factors = dict[str, tuple[Array, ...]]

_NO_OUTPUT = jax.ShapeDtypeStruct((), jnp.float32)


Form = Literal["exact", "kron", "factors"]
"""Which matrix a block's F is, and by which products: the layer's own Fisher matrix, through its
Jacobian; that of independent inputs and cotangents, through the Jacobian; that by both factors."""


@dataclasses.dataclass(frozen=True)
class System:
    """One or several blocks whose products are computed together, lane by lane."""

    blocks: tuple[Block, ...]  # in the order of their lanes
    form: Form  # of F
    program: tuple[Any, ...]  # the calls of one lane
    params: Lanes  # current parameters
    state: PyTree[Array]  # what the products need: local Jacobians, factors
    g: tuple[Array, ...] = ()  # cotangents per use, of exact blocks
    inputs: tuple[Any, ...] = ()  # captured inputs per use, likewise
    # of the damped factors, that precondition CG: pairs for some lanes each, or ()
    inverses: tuple[tuple[Array, ...], ...] = ()
    parts: tuple[System, ...] = ()  # the systems of single blocks that were stacked, or ()
    # manual axes along which devices have a part of the batch each, where F is made of the batch
    axis_name: AxisName = None
    weights: Array | None = None  # of examples, see ``_example_weights``, likewise

    def pack(self, v: Lanes) -> PyTree[Array]:
        """A vector as the solver sees it, so that its operations are fewer and larger.

        A matrix [V; v_b] for factored blocks, else the parameters.
        """
        use = self.program[0]
        return jax.vmap(lambda v: use.layer.matrix(use.own(v)))(v) if self.blocks[0].factored else v

    def unpack(self, packed: PyTree[Array]) -> Lanes:
        if not self.blocks[0].factored:
            return packed
        use = self.program[0]
        parts = jax.vmap(lambda p, v: use.layer.unmatrix(use.own(p), v))(self.params, packed)
        roles = {i: role for role, i in use.roles}
        return tuple([parts[roles[i]] for i in range(len(roles))])

    def product(self, v: Lanes) -> Lanes:
        if self.form == "factors":
            return self.unpack(self.matvec(self.pack(v)))

        def one(state: Any, g: Any, v: Lane) -> Lane:
            if self.form == "kron":
                return blocks.kron_product(self.program, state[0], state[1], v, self.weights)
            return blocks.exact_product(self.program, state, g, v)

        return mean_over(self.axis_name, jax.vmap(one)(self.state, self.g, self._own(v)))

    def matvec(self, v: PyTree[Array]) -> PyTree[Array]:
        """F v of every lane, for packed v."""
        if self.form != "factors":
            return self.pack(self.product(self.unpack(v)))

        def one(params: Lane, left: Array, right: Array, matrix: Array) -> Array:
            """Lᵀ(𝒜 L(v) 𝒢) with L the lift of the layer."""
            layer, own = self.program[0].layer, self.program[0].own(params)
            lifted = layer.lift(own, layer.unmatrix(own, matrix))
            return layer.matrix(layer.project(own, left @ lifted @ right))

        left, right = self.state
        return jax.vmap(one)(self.params, left, right, v)

    def precondition(self, r: PyTree[Array]) -> PyTree[Array]:
        """M⁻¹ r for packed r, by the inverses of the factors; r itself where there are none."""
        if not self.inverses:
            return r

        def stacked(inverses: tuple, r: Array) -> Array:
            left, right = concatenated(inverses)
            return _between(left, r, right)

        def in_parts(inverses: tuple, r: Array) -> Array:
            ends = list(itertools.accumulate(len(left) for left, _ in inverses))
            parts = zip(inverses, jnp.split(r, ends[:-1]), strict=True)
            return jnp.concatenate([_between(left, part, right) for (left, right), part in parts])

        # Stacked they are one product of a batch, which fills a GPU. On CPUs each lane's product
        # fills the cores, and the stack would be a copy of all inverses at every step.
        return jax.lax.platform_dependent(self.inverses, r, cpu=in_parts, default=stacked)

    def squared_weights(self) -> Float[Array, " lane"]:
        """‖θ‖² of every lane; of each part, since a stack would be a copy of all parameters."""
        parts = [part.params for part in self.parts or [self]]
        return jnp.concatenate([solver.lane_dot(lanes, lanes) for lanes in parts])

    def derivatives(self, v: Lanes) -> Float[Array, "column example"]:
        """Each example's derivative of its loss along v, summed over an exact system's lanes."""

        def one(state: Any, g: Any, v: Lanes) -> Array:
            return blocks.example_derivatives(g, blocks.pushforward(self.program, state, v))

        return jax.vmap(one)(self.state, self.g, self._own(v)).sum(0)

    def damped_factors(self, gamma: dict[str, Array]) -> dict[str, tuple[Lanes, Lanes]]:
        """By block, 𝒜 with π√γ and 𝒢 with √γ/π, π² = (tr 𝒜 / rows) / (tr 𝒢 / columns).

        Martens & Grosse (2015), section 6.3.
        """
        left, right = self.state
        if not self.program[0].layer.isometric:
            # Rows of a factor may lie on different devices, and would be sent around one by one.
            use = self.program[0]
            mean = jax.vmap(lambda p, left: use.layer.mean_left(use.own(p), left))
            left = over_devices(mean, self.params, kept=(left,), whole=False)
        # Not those of zeros, see `Dense.features`.
        columns = right.shape[-1]
        rows = self.blocks[0].size // columns
        root = jnp.sqrt(jnp.concatenate([gamma[block.name] for block in self.blocks]))
        tiny = jnp.finfo(left.dtype).tiny
        # (𝒜 + π√γ I) ⊗ (𝒢 + √γ/π I) has two terms too many, whose trace norm is least for this π.
        of_left = jnp.maximum(diagonal(left).sum(-1) / rows, tiny)
        of_right = jnp.maximum(diagonal(right).sum(-1) / columns, tiny)
        pi = jnp.sqrt(of_left / of_right)
        return self.by_block(((left, root * pi), (right, root / pi)))

    def trace(self, key: Array) -> Float[Array, " lane"]:
        """tr F of every lane, by random signs (Hutchinson) where there is no closed form."""
        if self.form == "factors":
            use = self.program[0]
            # tr Lᵀ(𝒜 ⊗ 𝒢)L: one trace for each output.
            one = jax.vmap(lambda p, a, g: use.layer.left_traces(use.own(p), a) @ jnp.diagonal(g))
            # Of each part, since they read diagonals: a stack would be a copy of all factors.
            return jnp.concatenate([one(part.params, *part.state) for part in self.parts or [self]])
        if self.form == "exact":
            exact = jax.vmap(functools.partial(blocks.exact_trace, self.program))
            own = exact(self._own(self.params), self.inputs, self.state, self.g)
            return mean_over(self.axis_name, own)
        like, treedef = jax.tree.flatten(self.pack(self.params))
        keys = jax.random.split(key, len(like))
        pairs = zip(keys, like, strict=True)
        signs = [jax.random.rademacher(key, p.shape, p.dtype) for key, p in pairs]
        signs = jax.tree.unflatten(treedef, signs)
        return solver.lane_dot(signs, self.matvec(signs))

    def example_gradients(self) -> Float[Array, "lane row size"]:
        """U of F = UᵀU/N of every lane of an exact system: every example's own gradient."""
        one = functools.partial(blocks.example_gradients, self.program)
        rows = jax.vmap(one)(self.params, self.inputs, self.state, self.g)
        packed = jax.vmap(self.pack, in_axes=1, out_axes=1)(rows)
        flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(packed)]
        return jnp.concatenate(flat, axis=2)

    def _own(self, lanes: Lanes) -> Lanes:
        return own_along(names_of(self.axis_name), lanes)

    def by_block(self, lanes: PyTree[Array]) -> dict[str, PyTree[Array]]:
        """Each block's part of arrays with a leading lane axis."""
        arrays, structure = jax.tree.flatten(lanes)
        parts, start = {}, 0
        for block in self.blocks:
            end = start + block.lanes
            parts[block.name] = structure.unflatten([array[start:end] for array in arrays])
            start = end
        return parts


def _between(
    left: Float[Array, "lane n n"], r: Float[Array, "lane n m"], right: Float[Array, "lane m m"]
) -> Float[Array, "lane n m"]:
    """left · r · right of every lane; operands as narrow as the outer ones, sums as wide as r."""
    product = functools.partial(jnp.matmul, preferred_element_type=r.dtype)
    return product(product(left, r.astype(left.dtype)).astype(right.dtype), right)


def lanes_of(block: Block, flat: dict[str, Array]) -> Lanes:
    """A block's part of a flat tree {path: array}, lanes first, in float32 or better."""
    lanes = [param.to_lanes(flat[param.path]) for param in block.params]
    return tuple([a.astype(blocks.accumulator(a)) for a in lanes])


def captured_of(block: Block, curvature: Curvature) -> tuple[tuple, tuple[Array, ...]]:
    """A block's captured inputs and cotangents (lane, column, example, token, output), per use."""
    inputs, g = [], []
    for use in block.uses:
        x, dy = curvature.captured[use.name]
        inputs.append(use.inputs(x))
        dy = use.cotangents(dy)
        g.append(dy.astype(blocks.accumulator(dy)))
    return tuple(inputs), tuple(g)


def new_factors(
    block: Block, curvature: Curvature, params: Lanes, form: Form, narrow: str | None = None
) -> tuple[Array, ...]:
    """This batch's (left, right), of ``"kron"`` the right ones by output width.

    Operands are rounded to ``narrow``, if given.
    """
    inputs, g = captured_of(block, curvature)
    right = jax.vmap(functools.partial(blocks.right_factors, block.program, narrow=narrow))(g)
    if form == "kron":
        return mean_over(curvature.axis_name, right)
    of_examples = {"narrow": narrow, "weights": _example_weights(curvature)}
    left = functools.partial(blocks.left_factor, block.program, **of_examples)
    left = jax.vmap(left)(params, inputs)
    return mean_over(curvature.axis_name, (left, right[0]))


def _example_weights(curvature: Curvature) -> Float[Array, " example"] | None:
    """Weights of the examples, of mean 1: inputs count in a factor as much as their losses do.

    Not of positions: those of a layer need not be those of the outputs. One of all devices may have
    few real examples.
    """
    if curvature.weights is None:
        return None
    shares = curvature.weights.shares().reshape(curvature.num_examples, -1).sum(1)
    mean = mean_over(curvature.axis_name, shares.mean())
    return shares / jnp.where(mean > 0, mean, 1)


def diagonal(factor: Float[Array, "lane n *n"]) -> Float[Array, "lane n"]:
    return factor if factor.ndim == 2 else jnp.diagonal(factor, axis1=1, axis2=2)


def build(
    curvature: Curvature,
    params: dict[str, Array],
    forms: dict[str, Form],
    factors: Factors | None = None,
) -> list[System]:
    """The systems of the blocks named in ``forms``, with their factors where the form has any."""
    groups: dict[Any, list[System]] = {}
    for name, form in forms.items():
        block, own = curvature.layers.blocks[name], (factors or {}).get(name, ())
        system = _one(block, curvature, params, form, own)
        # Layers of one shape become one system: fewer and larger products, and one loop.
        arrays, structure = jax.tree.flatten((system.params, system.state, system.g))
        shapes = tuple([(a.shape[1:], a.dtype) for a in arrays])
        key = (system.program, form, structure, shapes)
        groups.setdefault(key, []).append(system)
    return [_linearized(_stack(systems)) for systems in groups.values()]


def _one(block: Block, curvature: Curvature, params: dict, form: Form, factors: tuple) -> System:
    """One block's system; the captured inputs stand for the local Jacobians until it is stacked."""
    lanes = lanes_of(block, params)
    if form == "factors":
        # Factors know nothing of the batch: what is the batch's in the program would keep layers of
        # one shape apart.
        any_batch = {"output": _NO_OUTPUT, "input_dtypes": (), "num_examples": 0, "example_axis": 0}
        program = (dataclasses.replace(block.program[0], **any_batch),)
        return System((block,), form, program, lanes, factors)
    inputs, g = captured_of(block, curvature)
    state, g = ((inputs, factors), ()) if form == "kron" else (inputs, g)
    of_batch = {"axis_name": curvature.axis_name, "weights": _example_weights(curvature)}
    return System((block,), form, block.program, lanes, state, g, **of_batch)


def _stack(systems: list[System]) -> System:
    if len(systems) == 1:
        return systems[0]
    params, state, g = concatenated([(s.params, s.state, s.g) for s in systems])
    names = {"blocks": tuple([b for s in systems for b in s.blocks]), "parts": tuple(systems)}
    return dataclasses.replace(systems[0], params=params, state=state, g=g, **names)


def _linearized(system: System) -> System:
    if system.form == "factors":
        return system
    # Once for all products of a solve, whose iterations would pass through the layer again.
    linearize = jax.vmap(functools.partial(blocks.linearize, system.program))
    params = own_along(names_of(system.axis_name), system.params)
    if system.form == "kron":
        inputs, right = system.state
        return dataclasses.replace(system, state=(linearize(params, inputs), right))
    return dataclasses.replace(system, state=linearize(params, system.state), inputs=system.state)

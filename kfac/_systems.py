"""Linear systems (F + γI) x = b of the blocks, blocks of equal form stacked into one."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac import _blocks as blocks
from kfac import _solver as solver
from kfac._blocks import Block
from kfac._curvature import Curvature

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    Lanes = tuple[Float[Array, "lane ..."], ...]
    Factors = dict[str, tuple[Array, ...]]

FORMS = ("exact", "token", "kron", "factors")


@dataclasses.dataclass(frozen=True)
class Form:
    """Which matrix a block's F is, and by which products.

    Attributes:
      name: ``"exact"``, ``"token"``, ``"kron"`` (through the layer's Jacobian) or ``"factors"`` (both factors formed).
      reduce: token sharing of the last two: mean input and summed cotangent instead of all tokens.
      max_size: the right factor of ``"kron"`` is diagonal where it would have more rows.
    """

    name: str
    reduce: bool = False
    max_size: int = 8192


@dataclasses.dataclass(frozen=True)
class System:
    """One or several blocks whose products are computed together, lane by lane.

    Attributes:
      blocks: the blocks, in the order of their lanes.
      form: of F.
      program: the calls of one lane.
      params: current parameters, with leading lane axis.
      state: what the products need: local Jacobians, factors.
      g: cotangents per use, or None where F does not depend on them.
    """

    blocks: tuple[Block, ...]
    form: Form
    program: tuple[Any, ...]
    params: Lanes
    state: PyTree[Array]
    g: tuple[Array, ...] | None

    def matvec(self, v: Lanes) -> Lanes:
        """F v of every lane."""
        return jax.vmap(functools.partial(_product, self.program, self.form))(self.params, self.state, self.g, v)

    def derivatives(self, v: Lanes) -> Float[Array, "column example"]:
        """Each example's derivative of its loss along v, summed over the lanes; for systems that keep cotangents."""

        def one(state: Any, g: Any, v: Lanes) -> Array:
            return blocks.example_derivatives(g, blocks.pushforward(self.program, state, v))

        return jax.vmap(one)(self.state, self.g, v).sum(0)

    def trace(self, key: Array, num_probes: int = 1) -> Float[Array, " lane"]:
        """tr F of every lane; unbiased estimate from random signs (Hutchinson) where there is no closed form."""
        layer = self.program[0].layer
        if self.form.name == "factors" and layer.isometric:
            left, right = (jnp.trace(m, axis1=1, axis2=2) for m in self.state)
            return left * right
        leaves, treedef = jax.tree.flatten(self.params)

        def probe(key: Array) -> Array:
            keys = jax.random.split(key, len(leaves))
            signs = [jax.random.rademacher(k, p.shape, _float(p)) for k, p in zip(keys, leaves, strict=True)]
            signs = jax.tree.unflatten(treedef, signs)
            return solver.lane_dot(signs, self.matvec(signs))

        return jax.vmap(probe)(jax.random.split(key, num_probes)).mean(0)

    def example_gradients(self) -> Float[Array, "lane row size"]:
        """Every example's own gradient of every lane: U of F = UᵀU/N; for systems that keep cotangents."""

        def one(params: Lanes, state: Any, g: Any) -> Array:
            rows = blocks.example_gradients(self.program, state, g, params)
            return jnp.concatenate([r.reshape(r.shape[0], -1) for r in rows], axis=1)

        return jax.vmap(one)(self.params, self.state, self.g)

    def solve_by_eigenvectors(self, b: Lanes, gamma: Float[Array, " lane"]) -> Lanes:
        """The exact solution of (F + γI) x = b where F is given by factors and the lift keeps lengths."""
        use = self.program[0]
        lifted = jax.vmap(lambda p, v: use.layer.lift(use.own(p), use.own(v)))(self.params, b)
        solved = solver.solve_kronecker(*self.state, lifted, gamma)
        parts = jax.vmap(lambda p, m: use.layer.project(use.own(p), m))(self.params, solved)
        roles = {i: role for role, i in use.roles}
        return tuple(parts[roles[i]] for i in range(len(b)))

    def split(self, lanes: PyTree[Array]) -> list[PyTree[Array]]:
        """Per block, its part of arrays with a leading lane axis."""
        parts, start = [], 0
        for block in self.blocks:
            end = start + block.lanes
            parts.append(jax.tree.map(lambda a, s=start, e=end: a[s:e], lanes))
            start = end
        return parts


def _product(program: tuple, form: Form, params: Any, state: Any, g: Any, v: Any) -> Any:
    if form.name == "factors":
        return blocks.factor_product(program, params, *state, v)
    if form.name == "kron":
        return blocks.kron_product(program, *state, v, form.reduce)
    if form.name == "exact":
        return blocks.exact_product(program, state, g, v)
    return blocks.token_product(program, state, g, v)


def lanes_of(block: Block, flat: dict[str, Array]) -> Lanes:
    """A block's part of a flat tree {path: array}, with a leading lane axis, in float32 or better."""
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


def new_factors(block: Block, curvature: Curvature, params: Lanes, form: Form) -> tuple[Array, ...]:
    """This batch's Kronecker factors: (left, right) for ``"factors"``, right ones by output width for ``"kron"``."""
    inputs, g = captured_of(block, curvature)
    right = jax.vmap(lambda g: blocks.right_factors(block.program, g, form.reduce, form.max_size))(g)
    if form.name == "kron":
        return right
    left = jax.vmap(lambda p, x: blocks.left_factor(block.program, p, x, form.reduce))(params, inputs)
    return left, right[0]


def build(curvature: Curvature, params: dict[str, Array], forms: dict[str, Form], factors: Factors) -> list[System]:
    """The systems of all blocks named in ``forms``.

    Args:
      curvature: of this step.
      params: path → parameter.
      forms: block name → form.
      factors: block name → factors, for the forms that have them.
    """
    groups: dict[Any, list[System]] = {}
    for name, form in forms.items():
        system = _one(curvature.layers.blocks[name], curvature, params, form, factors.get(name, ()))
        shapes = jax.tree.map(lambda a: (a.shape[1:], str(a.dtype)), (system.params, system.state, system.g))
        key = (system.program, form, jax.tree.structure(shapes), str(shapes))
        groups.setdefault(key, []).append(system)
    return [_linearized(_stack(systems)) for systems in groups.values()]


def _one(block: Block, curvature: Curvature, params: dict, form: Form, factors: tuple) -> System:
    """One block's system, before linearisation: the captured inputs stand for the local Jacobians."""
    lanes = lanes_of(block, params)
    if form.name == "factors":
        program = (dataclasses.replace(block.program[0], output=None, input_dtypes=(), num_examples=0, example_axis=0),)
        return System((block,), form, program, lanes, factors, None)
    inputs, g = captured_of(block, curvature)
    state = (inputs, factors) if form.name == "kron" else inputs
    return System((block,), form, block.program, lanes, state, None if form.name == "kron" else g)


def _stack(systems: list[System]) -> System:
    first = systems[0]
    if len(systems) == 1:
        return first
    arrays = [(s.params, s.state, s.g) for s in systems]
    params, state, g = jax.tree.map(lambda *a: jnp.concatenate(a), *arrays)
    return System(tuple(b for s in systems for b in s.blocks), first.form, first.program, params, state, g)


def _linearized(system: System) -> System:
    if system.form.name == "factors":
        return system
    linearize = jax.vmap(lambda p, x: blocks.linearize(system.program, p, x))
    if system.form.name == "kron":
        inputs, right = system.state
        return dataclasses.replace(system, state=(linearize(system.params, inputs), right))
    return dataclasses.replace(system, state=linearize(system.params, system.state))


def _float(array: Array) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)

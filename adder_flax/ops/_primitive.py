"""The functions of a backend as one JAX primitive; what runs is chosen when a program is lowered.

The primitive is closed under differentiation. Its functions are the two sums over pairs, `l1` and
`additive`, `layer_norm`, and what their derivatives consist of: pushforwards, linear in the
tangents, and pullbacks, linear in the cotangent. Either is the transpose of the other, so forward
mode, reverse mode and any mixture of both follow the declared gradient rules, on every backend,
from the inputs alone. Second derivatives differentiate the rules, almost everywhere (1 for `full`,
the slope or 0 for `hardtanh`, 0 for `sign`), by the blocked formulas of the XLA backend, which run
on all platforms.

Operands have any number of leading axes, of which an operand's may have length one where others'
are longer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import use_abstract_mesh

from adder_flax.arrays import AnyArray
from adder_flax.ops import _partition
from adder_flax.ops._arrays import accumulation_dtype
from adder_flax.ops._backend import Backend, get_backend

try:  # JAX has no public name for this, and may give it another
    from jax._src.dispatch import prim_requires_devices_during_lowering as _with_devices
except ImportError:
    _with_devices = None

# The axes of operands and results after any leading ones: m rows, n columns or keys, k
# the width, C the width where all of a row is needed at once. `w` has the axes kn or nk.
_FORMULAS = {
    "l1": "mk,w->mn",
    "l1_pushforward": "mk,w,mk->mn",
    "l1_pushforward_w": "mk,w,w->mn",
    "l1_pushforward_both": "mk,w,mk,w->mn",
    "l1_pullback_x": "mk,w,mn->mk",
    "l1_pullback_w": "mk,w,mn->w",
    "l1_pullback": "mk,w,mn->mk,w",
    "sad": "mk,nk->mn",
    "additive": "mk,nk,k->mn",
    "additive_pushforward": "mk,nk,k,mk,nk,k->mn",
    "additive_pullback": "mk,nk,k,mn->mk,nk,k",
    "layer_norm": "mC,C,C->mC",
    "layer_norm_pushforward": "mC,C,C,mC,C,C->mC",
    "layer_norm_pullback": "mC,C,C,mC->mC,C,C",
}
_TRANSPOSES = {
    "l1_pushforward": "l1_pullback_x",
    "l1_pushforward_w": "l1_pullback_w",
    "l1_pushforward_both": "l1_pullback",
    "additive_pushforward": "additive_pullback",
    "layer_norm_pushforward": "layer_norm_pullback",
}
# Functions of three operands, any of which may have a tangent.
_OF_THREE = ("additive", "layer_norm")
_TRANSPOSES |= {pullback: pushforward for pushforward, pullback in _TRANSPOSES.items()}

_pairs = Primitive("adder_flax_pairs")
_pairs.multiple_results = True


def call(backend: Backend, method: str, *operands: AnyArray, **options) -> Any:
    """Calls a function of a backend, as a primitive of JAX.

    Args:
      backend: what computes.
      method: the name of the function, or of one of those that are made of a backend's, see
        `_function`.
      *operands: its arrays, with the same number of leading axes, none to many, where the function
        expects one.
      **options: its other arguments, hashable; for `l1` itself, beside `axes`, the rules of both
        gradients.

    Returns:
      What the function returns, with those leading axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    results = _pairs.bind(
        *_partition.vary_alike(*operands),
        backend=backend,
        method=method,
        options=tuple(options.items()),
        mesh=mesh,
    )
    return results[0] if len(results) == 1 else tuple(results)


def formula(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Returns, for those who read programs, what an equation of one computes, as the plain formula.

    Args:
      equation: of a jaxpr. The functions of this package are one primitive there, whatever kernel
        will run.

    Returns:
      The program of the reference backend; None for equations that are not of this package.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from adder_flax import ops
      >>> traced = jax.make_jaxpr(ops.l1_scores)(jnp.ones((2, 3)), jnp.ones((4, 3)))
      >>> [
      ...     str(equation.primitive)
      ...     for equation in ops.formula(traced.eqns[-1]).eqns
      ...     if "reduce" in str(equation)
      ... ]
      ['reduce_sum']
    """
    if equation.primitive is not _pairs:
        return None
    method, options = equation.params["method"], dict(equation.params["options"])
    avals: list[Any] = [variable.aval for variable in equation.invars]
    function = _on_leading_axes(
        _function(get_backend("reference"), method, options),
        _own_axes(method, options.get("axes", ""))[0],
    )
    return jax.make_jaxpr(function)(
        *[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    )


# -------------------------------------------------------------------------------------------------
# Shapes
# -------------------------------------------------------------------------------------------------


@functools.cache
def _own_axes(method: str, axes: str = "") -> list[list[str]]:
    """Returns the axes of the operands and of the results of a function, without leading ones.

    Args:
      method: the function's name.
      axes: those of `w`.
    """
    sides = _FORMULAS[method].replace("w", axes).split("->")
    return [side.split(",") for side in sides]


def _leading(operands: Sequence, axes: Sequence[str]) -> list[tuple[int, ...]]:
    return [a.shape[: a.ndim - len(own)] for a, own in zip(operands, axes, strict=True)]


def _abstract_eval(*operands, backend, method, options, mesh):
    operand_axes, result_axes = _own_axes(method, dict(options).get("axes", ""))
    leading, lengths, alike = [], {}, {}
    for a, axes in zip(operands, operand_axes, strict=True):
        num_leading = a.ndim - len(axes)
        leading.append(a.shape[:num_leading])
        lengths.update(zip(axes, a.shape[num_leading:], strict=True))
        alike.setdefault(a.ndim, a)
    batch = jnp.broadcast_shapes(*leading)
    dtype, results = _sum_dtype(method, operands), []
    for axes in result_axes:
        shape = (*batch, *map(lengths.__getitem__, axes))
        results.append(alike[len(shape)].update(shape=shape, dtype=dtype, weak_type=False))
    return results


def _sum_dtype(method: str, operands: Sequence):
    return jnp.int32 if method == "sad" else accumulation_dtype(jnp.result_type(*operands))


_pairs.def_abstract_eval(_abstract_eval)


# -------------------------------------------------------------------------------------------------
# What runs
# -------------------------------------------------------------------------------------------------


def _function(backend: Backend, method: str, options: dict) -> Callable:
    """Returns a function of a backend, on operands with one leading axis."""
    options = dict(options)
    if method == "l1":
        return functools.partial(backend.l1, axes=options["axes"])
    if "rule" in options and options["rule"].name == "full":
        return functools.partial(
            getattr(backend, method.replace("l1", "full")), axes=options["axes"]
        )
    return functools.partial(getattr(backend, method), **options)


def _on_leading_axes(function: Callable, operand_axes: Sequence[str]) -> Callable:
    """Returns a function on operands with any leading axes from one on operands with one."""

    def apply(*operands):
        leading = _leading(operands, operand_axes)
        if len(set(leading)) == 1:
            (batch,) = set(leading)
            joined = [a.reshape(math.prod(batch), *a.shape[len(batch) :]) for a in operands]
            return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), function(*joined))
        # Backends and their kernels know how not to repeat what is shared along a mapped
        # axis.
        shared = [axes[0] == 1 for axes in leading]
        operands = [
            jnp.squeeze(a, 0) if one else a for a, one in zip(operands, shared, strict=True)
        ]
        if all(shared):
            return jax.tree.map(lambda a: a[None], apply(*operands))
        return jax.vmap(apply, [None if one else 0 for one in shared])(*operands)

    return apply


def _split(backend: Backend, method: str, options: dict, operands: Sequence, how: str) -> Callable:
    """Returns a function of a backend, on operands of these shapes, split by a rule or over the
    mesh.
    """
    operand_axes, result_axes = _own_axes(method, options.get("axes", ""))
    function = _on_leading_axes(_function(backend, method, options), operand_axes)
    if how == "compiler":
        return function
    leading = _leading(operands, operand_axes)
    batch = jnp.broadcast_shapes(*leading)
    # Leading axes of length one that others do not have are left away where the function
    # is split.
    lacking = [
        tuple(i for i, length in enumerate(axes) if length == 1 and batch[i] != 1)
        for axes in leading
    ]
    named = [
        [f"b{i}" for i in range(len(batch)) if i not in without] + list(own)
        for without, own in zip(lacking, operand_axes, strict=True)
    ]
    results = [[f"b{i}" for i in range(len(batch))] + list(own) for own in result_axes]

    def on_parts(*parts):
        return function(
            *[jnp.expand_dims(a, without) for a, without in zip(parts, lacking, strict=True)]
        )

    split = (_partition.split_by_rule if how == "rule" else _partition.split_over_mesh)(
        on_parts, named, results
    )

    def on_wholes(*arrays):
        return split(*[jnp.squeeze(a, without) for a, without in zip(arrays, lacking, strict=True)])

    return on_wholes


def _lower(
    platform: str, context: mlir.LoweringRuleContext, *operands, backend, method, options, mesh
):
    module, options = context.module_context, dict(options)
    for_export = module.lowering_parameters.for_export
    num_devices, all_manual = _devices(module.axis_context)
    # Bytes are for all that have kernels; whoever has none for bytes has XLA's.
    dtype = "float32" if method == "sad" else jnp.result_type(*context.avals_in)
    backend = backend.lowered_for(platform, dtype, for_export=for_export, num_devices=num_devices)
    how = backend.split_by
    if getattr(_function(backend, method, options).func, "left_to_compiler", False):
        how = "compiler"
    if how == "rule" and (num_devices == 1 or all_manual or _with_devices is None):
        how = "compiler"
    function = _split(backend, method, options, context.avals_in, how)

    def results(*arrays):
        return jax.tree.leaves(function(*arrays))

    with use_abstract_mesh(mesh):
        return mlir.lower_fun(results)(context, *operands)


def _devices(axis_context) -> tuple[int, bool]:
    """Returns on how many devices a program being lowered runs, and if it is written for each."""
    if isinstance(axis_context, mlir.ShardingContext):
        return axis_context.num_devices, False
    mesh = axis_context.mesh
    return mesh.size, axis_context.manual_axes == frozenset(mesh.axis_names)


for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_pairs, functools.partial(_lower, _platform), platform=_platform)
mlir.register_lowering(_pairs, functools.partial(_lower, "other"))
# Rules for the partitioner need them. Without, devices gather all operands, for the same numbers.
if _with_devices is not None:
    _with_devices.add(_pairs)


@functools.cache
def _compiled(**static):
    return jax.jit(functools.partial(_pairs.bind, **static))


_pairs.def_impl(lambda *operands, **static: _compiled(**static)(*operands))


# -------------------------------------------------------------------------------------------------
# Transformations
# -------------------------------------------------------------------------------------------------


def _batch(operands, dims, **static):
    def to_front(a, dim):
        return a[None] if dim is None else jnp.moveaxis(a, dim, 0)

    results = _pairs.bind(*map(to_front, operands, dims), **static)
    return results, [0] * len(results)


batching.primitive_batchers[_pairs] = _batch


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero


def _jvp(operands, tangents, *, backend, method, options, mesh):
    bind = functools.partial(_pairs.bind, backend=backend, mesh=mesh)
    results = bind(*operands, method=method, options=options)
    if method == "l1":
        parts = [_l1_tangents(bind, operands, tangents, dict(options))]
    elif method in _OF_THREE:
        tangents = map(ad.instantiate_zeros, tangents)
        parts = [bind(*operands, *tangents, method=f"{method}_pushforward", options=options)]
    else:
        linear = _linear_operands(method)
        parts = []
        if not all(_is_zero(tangents[i]) for i in linear):
            parts.append(_linear_tangents(bind, operands, tangents, method, options))
        if not all(_is_zero(tangent) for i, tangent in enumerate(tangents) if i not in linear):
            parts.append(_second_order_tangents(operands, tangents, method, dict(options)))
    return results, functools.reduce(lambda *sides: list(map(jnp.add, *sides)), parts)


ad.primitive_jvps[_pairs] = _jvp


def _linear_operands(method: str) -> list[int]:
    """Returns which operands a pushforward or pullback is linear in: tangents, or the cotangent."""
    count = len(_FORMULAS[method].split("->")[0].split(","))
    return list(range(3 if method.startswith(_OF_THREE) else 2, count))


def _l1_tangents(bind, operands, tangents, options):
    """The derivative of the L1 sum by the declared rules."""
    (x, w), (dx, dw), axes = operands, tangents, options["axes"]
    x_rule, w_rule = options["x_rule"], options["w_rule"]

    def bind_side(method, d, rule):
        return bind(x, w, *d, method=method, options=(("rule", rule), ("axes", axes)))

    if not _is_zero(dx) and not _is_zero(dw) and x_rule == w_rule and x_rule.name != "full":
        return bind_side("l1_pushforward_both", (dx, dw), x_rule)
    parts = []
    if not _is_zero(dx):
        parts.append(bind_side("l1_pushforward", (dx,), x_rule))
    if not _is_zero(dw):
        parts.append(bind_side("l1_pushforward_w", (dw,), w_rule))
    return parts[0] if len(parts) == 1 else list(map(jnp.add, *parts))


def _linear_tangents(bind, operands, tangents, method, options):
    """The derivative of a pushforward or pullback with respect to what it is linear in."""
    linear = _linear_operands(method)
    present = [i for i in linear if not _is_zero(tangents[i])]
    if method == "l1_pushforward_both" and len(present) == 1:
        method = {2: "l1_pushforward", 3: "l1_pushforward_w"}[present[0]]
        return bind(*operands[:2], tangents[present[0]], method=method, options=options)
    moved = list(operands)
    for i in linear:
        moved[i] = ad.instantiate_zeros(tangents[i])
    return bind(*moved, method=method, options=options)


def _second_order_tangents(operands, tangents, method, options):
    """The derivative of a pushforward or pullback, by its blocked formula, with respect to the
    other operands.
    """
    linear, axes = _linear_operands(method), _own_axes(method, options.get("axes", ""))[0]
    function = _on_leading_axes(_function(get_backend("xla"), method, options), axes)
    others = [i for i in range(len(operands)) if i not in linear]

    def of_others(*moved):
        at = dict(zip(others, moved, strict=True))
        return function(*[at.get(i, a) for i, a in enumerate(operands)])

    primals, moves = (
        [operands[i] for i in others],
        [ad.instantiate_zeros(tangents[i]) for i in others],
    )
    return jax.tree.leaves(jax.jvp(of_others, primals, moves)[1])


def _transpose(cotangents, *operands, backend, method, options, mesh):
    present = [i for i, a in enumerate(operands) if ad.is_undefined_primal(a)]
    results = [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in operands]
    given = [i for i, g in enumerate(cotangents) if not _is_zero(g)]
    if not given:
        return results
    transposed = _TRANSPOSES[method]
    held = [a for a in operands if not ad.is_undefined_primal(a)][
        : 3 if method.startswith(_OF_THREE) else 2
    ]
    if method == "l1_pullback" and len(given) == 1:
        transposed, cotangents = (
            ("l1_pushforward", "l1_pushforward_w")[given[0]],
            [cotangents[given[0]]],
        )
    if method == "l1_pushforward_both" and len(present) == 1:
        transposed = {2: "l1_pullback_x", 3: "l1_pullback_w"}[present[0]]
    cotangents = map(ad.instantiate_zeros, cotangents)
    gradients = _pairs.bind(
        *held, *cotangents, backend=backend, method=transposed, options=options, mesh=mesh
    )
    if method.startswith(_OF_THREE) and method.endswith("pushforward"):
        gradients = [gradients[i - 3] for i in present]
    for i, gradient in zip(present, gradients, strict=True):
        results[i] = _sum_to(gradient, operands[i].aval)
    return results


ad.primitive_transposes[_pairs] = _transpose


def _sum_to(gradient, aval):
    """Sums over the axes along which an operand was repeated."""
    if gradient.shape == aval.shape:
        return gradient.astype(aval.dtype)
    repeated = tuple(
        i
        for i, (length, own) in enumerate(zip(gradient.shape, aval.shape, strict=True))
        if own == 1 and length != 1
    )
    return gradient.sum(repeated, keepdims=True).astype(aval.dtype)

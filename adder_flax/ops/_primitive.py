"""The functions of a backend as one JAX primitive; what runs is chosen when a program is lowered.

The primitive is closed under differentiation. Its functions are the two sums over pairs, `l1` and
`additive`, `layer_norm`, sums of bytes, and what their derivatives consist of: pushforwards, linear
in the tangents, and pullbacks, linear in the cotangent. Either is the transpose of the other, so
forward mode, reverse mode and any mixture of both follow the declared gradient rules, on every
backend, from the inputs alone. Second derivatives differentiate the rules, almost everywhere (1 for
`full`, the slope or 0 for `hardtanh`, 0 for `sign`), by the blocked formulas of the XLA backend,
which run on all platforms.

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
from adder_flax.ops._arrays import sum_to
from adder_flax.ops._backend import Backend, get_backend

try:  # JAX has no public name for this, and may give it another
    from jax._src.dispatch import prim_requires_devices_during_lowering as _with_devices
except ImportError:
    _with_devices = None

# The axes of operands and results after any leading ones: m rows, n columns or keys, k the width, C
# the width where all of a row is needed at once. `w` has the axes kn or nk.
_FORMULAS = {
    "l1": "mk,w->mn",
    "l1_pushforward": "mk,w,mk->mn",
    "l1_pushforward_w": "mk,w,w->mn",
    "l1_pushforward_both": "mk,w,mk,w->mn",
    "l1_pullback_x": "mk,w,mn->mk",
    "l1_pullback_w": "mk,w,mn->w",
    "l1_pullback": "mk,w,mn->mk,w",
    "sad": "mk,nk->mn",
    "sad_norm": "mK,CK,TC,E->mC",
    "sad_attention": "bmhD,bNhD,bNhV,hE->bmhV",
    "additive": "mk,nk,k->mn",
    "additive_pushforward": "mk,nk,k,mk,nk,k->mn",
    "additive_pullback": "mk,nk,k,mn->mk,nk,k",
    "layer_norm": "mC,C,C->mC",
    "layer_norm_pushforward": "mC,C,C,mC,C,C->mC",
    "layer_norm_pullback": "mC,C,C,mC->mC,C,C",
}
# What these two are to one of both operands alone.
_SIDES = {
    "l1_pushforward_both": ("l1_pushforward", "l1_pushforward_w"),
    "l1_pullback": ("l1_pullback_x", "l1_pullback_w"),
}
_TRANSPOSES = {
    "l1_pushforward": "l1_pullback_x",
    "l1_pushforward_w": "l1_pullback_w",
    "l1_pushforward_both": "l1_pullback",
    "additive_pushforward": "additive_pullback",
    "layer_norm_pushforward": "layer_norm_pullback",
}
_TRANSPOSES |= {pullback: pushforward for pushforward, pullback in _TRANSPOSES.items()}
# What other functions are a part of, by name: `formula(backend, *operands, **options)`, for
# backends without a kernel of their own for all of it. Derivatives are those of the formula.
composed: dict[str, Callable] = {}
# Functions of three operands, any of which may have a tangent.
_OF_THREE = ("additive", "layer_norm")

_pairs = Primitive("adder_flax_pairs")
_pairs.multiple_results = True


def call(backend: Backend, method: str, *operands: AnyArray, **options) -> Any:
    """Calls a function of a backend, as a primitive of JAX.

    Operands and results have any number of leading axes where the function has one. Options are its
    other arguments, hashable; for `l1` itself, beside `axes`, the rules of both gradients.
    """
    mesh = jax.sharding.get_abstract_mesh()
    given, static = tuple(options.items()), dict(backend=backend, method=method, mesh=mesh)
    results = _pairs.bind(*_partition.vary_alike(*operands), options=given, **static)
    return results[0] if len(results) == 1 else tuple(results)


def formula(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Returns what an equation of a jaxpr computes, whatever kernel will run, as the plain formula:
    the program of the reference backend, or None for what is not of this package.

    >>> from adder_flax import ops
    >>> traced = jax.make_jaxpr(ops.l1_scores)(jnp.ones((2, 3)), jnp.ones((4, 3)))
    >>> found = [str(equation.primitive) for equation in ops.formula(traced.eqns[-1]).eqns]
    >>> [name for name in found if "reduce" in name]
    ['reduce_sum']
    """
    if equation.primitive is not _pairs:
        return None
    method, options = equation.params["method"], dict(equation.params["options"])
    avals: list[Any] = [variable.aval for variable in equation.invars]
    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return jax.make_jaxpr(_on_leading_axes(get_backend("reference"), method, options))(*operands)


def byte_terms(equation: JaxprEqn) -> int | None:
    """Returns how many differences of bytes an equation of a jaxpr sums up, or None if it is no
    such sum.

    >>> from adder_flax import ops
    >>> x = jnp.ones((2, 3), jnp.uint8)
    >>> traced = jax.make_jaxpr(ops.sad_scores)(x, x)
    >>> ops.byte_terms(traced.eqns[-1])
    12
    """
    if equation.primitive is not _pairs or equation.params["method"] != "sad":
        return None
    sums: Any = equation.outvars[0].aval
    rows: Any = equation.invars[0].aval
    return math.prod(sums.shape) * rows.shape[-1]


@functools.cache
def _own_axes(method: str, axes: str = "") -> list[list[str]]:  # of operands, and of results
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
    dtype, results = _sum_dtype(method, operands, dict(options)), []
    for axes in result_axes:
        shape = (*batch, *map(lengths.__getitem__, axes))
        results.append(alike[len(shape)].update(shape=shape, dtype=dtype, weak_type=False))
    return results


def _sum_dtype(method: str, operands: Sequence, options: dict):
    if method == "sad":
        return jnp.int32
    if options.get("y_levels"):
        return jnp.uint8
    return jnp.promote_types(jnp.result_type(*operands), jnp.float32)


_pairs.def_abstract_eval(_abstract_eval)


def _function(backend: Backend, method: str, options: dict) -> Callable:
    if method == "l1":
        return functools.partial(backend.l1, axes=options["axes"])
    if "rule" in options and options["rule"].name == "full":
        method, options = method.replace("l1", "full"), {"axes": options["axes"]}
    if method in composed and not hasattr(backend, method):
        return functools.partial(composed[method], backend, **options)
    return functools.partial(getattr(backend, method), **options)


def _on_leading_axes(backend: Backend, method: str, options: dict) -> Callable:
    """Returns a function of a backend, on operands with any leading axes."""
    function = _function(backend, method, options)
    operand_axes = _own_axes(method, options.get("axes", ""))[0]

    def apply(*operands):
        leading = _leading(operands, operand_axes)
        if len(set(leading)) == 1:
            (batch,) = set(leading)
            joined = [a.reshape(math.prod(batch), *a.shape[len(batch) :]) for a in operands]
            return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), function(*joined))
        # Backends and their kernels know how not to repeat what is shared along a mapped axis.
        shared = [axes[0] == 1 for axes in leading]
        given = zip(operands, shared, strict=True)
        operands = [jnp.squeeze(a, 0) if one else a for a, one in given]
        if all(shared):
            return jax.tree.map(lambda a: a[None], apply(*operands))
        return jax.vmap(apply, [None if one else 0 for one in shared])(*operands)

    return apply


def _split(backend: Backend, method: str, options: dict, operands: Sequence, how: str) -> Callable:
    function = _on_leading_axes(backend, method, options)
    if how == "compiler":
        return function
    operand_axes, result_axes = _own_axes(method, options.get("axes", ""))
    leading = _leading(operands, operand_axes)
    batch = jnp.broadcast_shapes(*leading)
    # Leading axes of length one that others do not have are left away where the function is split.
    lacking = [
        tuple(i for i, length in enumerate(axes) if length == 1 and batch[i] != 1)
        for axes in leading
    ]

    def named(own, without=()):
        return [f"b{i}" for i in range(len(batch)) if i not in without] + list(own)

    def on_parts(*parts):
        return function(*map(jnp.expand_dims, parts, lacking))

    split_by = _partition.split_by_rule if how == "rule" else _partition.split_over_mesh
    split = split_by(
        on_parts, list(map(named, operand_axes, lacking)), list(map(named, result_axes))
    )
    return lambda *arrays: split(*map(jnp.squeeze, arrays, lacking))


def _lower(
    platform: str, context: mlir.LoweringRuleContext, *operands, backend, method, options, mesh
):
    module, options = context.module_context, dict(options)
    for_export = module.lowering_parameters.for_export
    num_devices, all_manual = _devices(module.axis_context)
    # Bytes are for all that have kernels; whoever has none for bytes has XLA's.
    dtype = "float32" if method.startswith("sad") else jnp.result_type(*context.avals_in)
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


def _devices(axis_context) -> tuple[int, bool]:  # how many, and if it is written for each
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


# Transformations


def _batch(operands, dims, **static):
    def to_front(a, dim):
        return a[None] if dim is None else jnp.moveaxis(a, dim, 0)

    results = _pairs.bind(*map(to_front, operands, dims), **static)
    return results, [0] * len(results)


batching.primitive_batchers[_pairs] = _batch


def _present(tangents) -> list[int]:
    return [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]


def _jvp(operands, tangents, *, backend, method, options, mesh):
    bind = functools.partial(_pairs.bind, backend=backend, mesh=mesh)
    results, present = bind(*operands, method=method, options=options), _present(tangents)
    if method in composed:
        options, first = dict(options), len(operands)
        parts = [_second_order_tangents(operands, tangents, method, options, first)]
    elif method == "l1":
        parts = _l1_tangents(bind, operands, tangents, present, dict(options))
    elif method in _OF_THREE:
        tangents = map(ad.instantiate_zeros, tangents)
        parts = [bind(*operands, *tangents, method=f"{method}_pushforward", options=options)]
    else:
        first = 3 if method.startswith(_OF_THREE) else 2
        parts = []
        if present[-1] >= first:
            parts.append(_linear_tangents(bind, operands, tangents, method, options, first))
        if present[0] < first:
            parts.append(_second_order_tangents(operands, tangents, method, dict(options), first))
    return results, functools.reduce(lambda *sides: list(map(jnp.add, *sides)), parts)


ad.primitive_jvps[_pairs] = _jvp


def _l1_tangents(bind, operands, tangents, present, options):
    axes, rules = ("axes", options["axes"]), (options["x_rule"], options["w_rule"])
    if present == [0, 1] and rules[0] == rules[1] and rules[0].name != "full":
        given = ("rule", rules[0]), axes
        return [bind(*operands, *tangents, method="l1_pushforward_both", options=given)]
    return [
        bind(
            *operands,
            tangents[i],
            method=("l1_pushforward", "l1_pushforward_w")[i],
            options=(("rule", rules[i]), axes),
        )
        for i in present
    ]


def _linear_tangents(bind, operands, tangents, method, options, first):
    """The derivative of a pushforward or pullback with respect to what it is linear in: tangents,
    or the cotangent, from the operand `first` on.
    """
    present = [i for i in _present(tangents) if i >= first]
    if method == "l1_pushforward_both" and len(present) == 1:
        method = _SIDES[method][present[0] - first]
        moved = [tangents[present[0]]]
    else:
        moved = map(ad.instantiate_zeros, tangents[first:])
    return bind(*operands[:first], *moved, method=method, options=options)


def _second_order_tangents(operands, tangents, method, options, first):
    """The derivative of a pushforward or pullback, by its blocked formula, with respect to the
    other operands.
    """
    function = _on_leading_axes(get_backend("xla"), method, options)
    of_others = lambda *others: function(*others, *operands[first:])
    moves = [ad.instantiate_zeros(tangent) for tangent in tangents[:first]]
    return jax.tree.leaves(jax.jvp(of_others, list(operands[:first]), moves)[1])


def _transpose(cotangents, *operands, backend, method, options, mesh):
    first = 3 if method.startswith(_OF_THREE) else 2
    present = [i for i, a in enumerate(operands) if ad.is_undefined_primal(a)]
    results: list[Any] = [None] * len(operands)
    for i in present:
        results[i] = ad.Zero(operands[i].aval)
    given, transposed = _present(cotangents), _TRANSPOSES[method]
    if not given:
        return results
    sides = given if method == "l1_pullback" else [i - first for i in present]
    if method in _SIDES and len(sides) == 1:
        transposed = _TRANSPOSES[_SIDES[method][sides[0]]]
        cotangents = [cotangents[i] for i in given]
    cotangents = map(ad.instantiate_zeros, cotangents)
    static = dict(backend=backend, method=transposed, options=options, mesh=mesh)
    gradients = _pairs.bind(*operands[:first], *cotangents, **static)
    if method.startswith(_OF_THREE) and method.endswith("pushforward"):
        gradients = [gradients[i - first] for i in present]
    for i, gradient in zip(present, gradients, strict=True):
        aval = operands[i].aval
        results[i] = sum_to(gradient, aval.shape).astype(aval.dtype)
    return results


ad.primitive_transposes[_pairs] = _transpose

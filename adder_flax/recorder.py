"""How arrays leave a model: its layers report what they have at hand, and whoever listens gets it.

    output, records = record({"attention": ["weights"]}, model, images)

A report is an equation of the traced program, put there only while someone listens. The listener
runs the program and keeps what the equations carry: out of ``jax.jit``, ``jax.checkpoint``,
``jax.vmap`` and ``jax.lax.scan`` as well, in anybody's model, NNX or Linen. Nobody listens: nothing
is traced, computed or kept.
"""

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from adder_flax import jaxprs
from adder_flax.arrays import AnyArray


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["kind", "path", "items", "loops"],
)
@dataclasses.dataclass(frozen=True)
class Record:
    """What one layer reported in one call.

    Attributes:
      kind: what reports: "attention", "adder", "block", ….
      path: the module's, joined by dots: "blocks.0.attention"; "" where nothing with a name was
        called.
      arrays: by name, with `loops` as leading axes; of `describe` their shapes alone.
      items: the facts as pairs.
      loops: lengths of the loops (and vmaps) that the call is inside of, outermost first.
    """

    kind: str
    path: str
    arrays: Mapping[str, Any]
    items: tuple[tuple[str, Any], ...] = ()
    loops: tuple[int, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What the layer says of itself: the name of its score, …."""
        return dict(self.items)


# The (kind, array) that are listened to, and (kind, ""); None where modules are not told apart
# either. A user context is part of the key of JAX's caches: an inner function that was traced
# before is traced anew for a listener.
_LISTENED = jax.make_user_context(None)
_Wanted = frozenset[tuple[str, str]]


def listening(kind: str) -> bool:
    """Whether someone wants reports of this kind: ask before computing what is only for one."""
    return any(kind == wanted for wanted, _ in _LISTENED.value or ())


def told_apart() -> bool:
    """Whether someone looks at each module by its path: loops over layers are then written out."""
    return _LISTENED.value is not None


def report(kind: str, arrays: Mapping[str, AnyArray], **facts: Hashable) -> None:
    """Hands arrays to whoever listens to this kind; nothing happens where nobody does.

    Args:
      kind: what reports.
      arrays: by name.
      **facts: what a reader has to know of the layer.
    """
    if listening(kind):
        arrays = {name: array for name, array in arrays.items() if (kind, name) in _LISTENED.value}
        _report_p.bind(
            *arrays.values(), kind=kind, names=tuple(arrays), items=tuple(facts.items()), batches=()
        )


def record(
    wanted: Mapping[str, Collection[str]], fn: Callable, *args: Any
) -> tuple[Any, tuple[Record, ...]]:
    """Calls a model and keeps what its layers report; the model stays as it is.

    Record the forward pass: the derivative of a function with ``jax.checkpoint`` inside drops its
    reports.

    Args:
      wanted: names of the arrays to keep, by the kind that reports them; without names, path and
        facts are kept.
      fn: an NNX module or any function, such as ``lambda x: model.apply(variables, x)`` of a Linen
        module.
      *args: its arguments: arrays, trees of them, NNX modules.

    Returns:
      The output, and the records in the order of the calls.

    Raises:
      ValueError: a report inside of ``jax.lax.while_loop``, ``jax.lax.cond`` or ``jax.shard_map``.

    Example:
      >>> def layer(x):
      ...     report("layer", {"input": x}, name="double")
      ...     return 2 * x
      >>> loop = lambda x: jax.lax.scan(lambda x, _: (layer(x), None), x, length=3)[0]
      >>> output, [seen] = record({"layer": ["input"]}, loop, 1.0)
      >>> float(output), seen.facts, seen.arrays["input"].tolist()
      (8.0, {'name': 'double'}, [1.0, 2.0, 4.0])
    """
    if isinstance(fn, nnx.Module):
        graphdefs, states = _split((fn, *args))
        return _record_modules(_pairs(wanted), graphdefs, *states)
    return jax.jit(functools.partial(_record, _pairs(wanted), fn))(*args)


def describe(wanted: Mapping[str, Collection[str]], fn: Callable, *args: Any) -> tuple[Record, ...]:
    """The records of a call with shapes for arrays; nothing is computed, all may be abstract."""
    if isinstance(fn, nnx.Module):
        graphdefs, states = _split((fn, *args))
        recorded = functools.partial(_record_modules, _pairs(wanted), graphdefs)
        return jax.eval_shape(recorded, *states)[1]
    return jax.eval_shape(functools.partial(_record, _pairs(wanted), fn), *args)[1]


def trace(fn: Callable, *args: Any, wanted: _Wanted = frozenset()) -> tuple[core.ClosedJaxpr, Any]:
    """The program of a call, with each module's path among its named scopes, and output shapes.

    Args:
      fn, *args: as for `record`; arrays may be ``jax.ShapeDtypeStruct``, modules abstract.
      wanted: the (kind, array) whose reports are to be equations of the program.
    """
    if isinstance(fn, nnx.Module):
        return trace(lambda model, *rest: model(*rest), fn, *args, wanted=wanted)
    graphdefs, states = _split(args)

    def pure(*states: Any) -> Any:
        pairs = zip(graphdefs, states, strict=True)
        out = fn(*(s if g is None else in_scopes(nnx.merge(g, s)) for g, s in pairs))
        return nnx.state(out) if isinstance(out, nnx.Module) else out

    with _LISTENED(wanted), _linen_scopes():
        return jax.make_jaxpr(pure, return_shape=True)(*states)


def module_path(scopes: str) -> tuple[str, str]:
    """The path of the innermost module in an equation's named scopes, and the scopes inside it.

    Example:
      >>> module_path("jvp(<blocks.0>/<blocks.0.attention>)/softmax")
      ('blocks.0.attention', 'softmax')
    """
    # jvp(...), transpose(...): the backward pass belongs to its layer.
    *_, inside = pieces = _PATH.split(re.sub(r"\w+\(|\)", "", scopes))
    path = pieces[-2] if len(pieces) > 1 else ""
    return path, ".".join(filter(None, inside.split("/")))


# A module's path is put into the named scopes between these, so that a layer is known by its path
# whether or not its parents were called on the way to it.
_PATH = re.compile(r"<([^<>]*)>")


def _pairs(wanted: Mapping[str, Collection[str]]) -> _Wanted:
    return frozenset((kind, name) for kind, names in wanted.items() for name in ("", *names))


def _split(args: Sequence[Any]) -> tuple[tuple[nnx.GraphDef | None, ...], tuple[Any, ...]]:
    parts = [nnx.split(arg) if isinstance(arg, nnx.Module) else (None, arg) for arg in args]
    return tuple(graphdef for graphdef, _ in parts), tuple(state for _, state in parts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _record_modules(
    wanted: _Wanted, graphdefs: tuple[nnx.GraphDef | None, ...], *states: Any
) -> tuple[Any, tuple[Record, ...]]:
    pairs = zip(graphdefs, states, strict=True)
    return _record(wanted, *(s if g is None else nnx.merge(g, s) for g, s in pairs))


def _record(wanted: _Wanted, fn: Callable, *args: Any) -> tuple[Any, tuple[Record, ...]]:
    closed, shapes = trace(fn, *args, wanted=wanted)
    modules = (fn, *args) if isinstance(fn, nnx.Module) else args
    leaves, records = jax.tree.leaves(_split(modules)[1]), []
    outputs = _run(closed, leaves, "", records)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), tuple(records)


# The equation: arrays in, nothing out.
_report_p = core.Primitive("report")
_report_p.multiple_results = True
_report_p.def_impl(lambda *arrays, **_: [])
_report_p.def_abstract_eval(lambda *arrays, **_: [])
mlir.register_lowering(_report_p, lambda context, *arrays, **_: [])
ad.primitive_jvps[_report_p] = lambda primals, tangents, **params: (
    _report_p.bind(*primals, **params),
    [],
)


def _batch(arrays: Sequence[Array], axes: Sequence[int | None], **params: Any) -> tuple[list, list]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    rows = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    _report_p.bind(*rows, **params | {"batches": (size, *params["batches"])})
    return [], []


batching.primitive_batchers[_report_p] = _batch


def _run(
    closed: core.ClosedJaxpr, args: Sequence[Any], outer: str, records: list[Record]
) -> list[Any]:
    """Runs a program and appends what it reports."""

    def run_equation(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        if not _reports(equation):
            return jaxprs.apply(closed.jaxpr, equation, inputs)
        here = jaxprs.scope(outer, equation)
        params = equation.params
        if equation.primitive.name == "scan":
            return _run_scan(params, inputs, here, records)
        if (called := jaxprs.callee(equation)) is not None:
            return _run(called, inputs, here, records)
        if equation.primitive is not _report_p:
            raise ValueError(
                "expected what is recorded outside of conditionals, while loops and shard_map, got "
                f"a report inside of {equation.primitive.name!r}; record the function that is "
                "called there."
            )
        arrays = dict(zip(params["names"], inputs, strict=True))
        records.append(
            Record(params["kind"], module_path(here)[0], arrays, params["items"], params["batches"])
        )
        return ()

    return jaxprs.evaluate(closed, args, run_equation)


def _reports(equation: core.JaxprEqn) -> bool:
    inner = [e for program in jaxprs.inner_programs(equation) for e in program.eqns]
    return equation.primitive is _report_p or any(map(_reports, inner))


def _run_scan(
    params: Mapping[str, Any], inputs: Sequence[Any], here: str, records: list[Record]
) -> list[Any]:
    num_consts, num_carry = jaxprs.scan_parts(params)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]

    def body(carry: Sequence[Any], row: Sequence[Any]) -> tuple[list, tuple[list, list[Record]]]:
        inner: list[Record] = []
        outputs = _run(params["jaxpr"], [*consts, *carry, *row], here, inner)
        return outputs[:num_carry], (outputs[num_carry:], inner)

    rows = inputs[num_consts + num_carry :]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (outputs, inner) = jax.lax.scan(body, list(carry), list(rows), **options)
    records += [dataclasses.replace(r, loops=(params["length"], *r.loops)) for r in inner]
    return [*carry, *outputs]


def in_scopes(model: nnx.Module, inside: Sequence[str] = ()) -> nnx.Module:
    """Puts the path of each submodule, inside of one of Linen, around its calls.

    The model, a copy, changes their classes.
    """
    for path, module in nnx.iter_modules(model):
        module.__class__ = _scoped(type(module), ".".join(map(str, (*inside, *path))))
    return model


def _scoped(cls: type, path: str) -> type:
    if not hasattr(cls, "__call__"):  # noqa: B004 - whether instances can be called, not the class
        return cls

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(f"<{path}>"):
            return cls.__call__(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})


@contextlib.contextmanager
def _linen_scopes() -> Iterator[None]:
    """The same for the modules of Linen, if anyone uses it."""
    if "flax.linen" not in sys.modules:
        yield
        return
    from flax import linen

    def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        with jax.named_scope(f"<{'.'.join(context.module.path)}>"):
            return call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield

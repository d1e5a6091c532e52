"""Where the arrays that layers are called with come from, read off the traced loss function.

A tap leaves a *mark* in the program: the identity on the layer's output, with the layer's
parameters as further inputs. The program says, through every scan, vmap, checkpoint and jit, which
of these are arrays of the differentiated tree, cast and sliced by scans and vmaps at most, and
which taps the loss depends on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

if TYPE_CHECKING:
    from jaxtyping import Array


class Source(NamedTuple):
    """An array of the differentiated tree."""

    input: int  # which of the arrays of the tree
    axes: tuple[int, ...]  # of each axis of the array, which one of the parameter it is
    # (depth of the scan, axis of the parameter) for each scan that slices it
    scans: tuple[tuple[int, int], ...] = ()


class Derived(NamedTuple):
    """What was computed from arrays of the differentiated tree, not by way of a tapped layer."""

    inputs: int  # a bit for each of these, by its place among the arrays of the tree
    by: str  # the operation
    moves: bool  # whether a gradient flows back to them


Origin = Source | Derived | None  # None: of other arrays alone


class Call(NamedTuple):
    """A mark in the program."""

    origins: tuple[Origin, ...]  # of the layer's parameters
    # lengths of the loops around it, outermost first; None for a loop without one
    scans: tuple[int | None, ...]
    # (size, mapped axis of each parameter) of the vmaps around it, innermost first
    vmaps: tuple[tuple[int, tuple[int | None, ...]], ...]


Calls = dict[str, list[Call]]  # every mark, as often as it is met


def mark(key: str, y: Array, x: Sequence[Array], params: Sequence[Array]) -> Array:
    """Returns y, the output of a layer, marked as what it makes of x with its parameters."""
    # Nothing of each input: enough to be batched where any of them is.
    nothing = jnp.concatenate([jnp.zeros(0), *[a.reshape(-1)[:0].astype(float) for a in x]])
    return _mark.bind(y, nothing, *params, key=key, vmaps=())


_mark = core.Primitive("kfac_mark")
_mark.def_impl(lambda y, *_, **__: y)
_mark.def_abstract_eval(lambda y, *_, **__: y)


def _differentiate(primals: tuple, tangents: tuple, **params: Any) -> tuple:
    return _mark.bind(*primals, **params), tangents[0]


def _batch(args: tuple, axes: tuple, *, key: str, vmaps: tuple) -> tuple:
    size = next(a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)
    y = batching.bdim_at_front(args[0], axes[0], size)
    vmaps = (*vmaps, (size, tuple(axes[2:])))
    return _mark.bind(y, *args[1:], key=key, vmaps=vmaps), 0


ad.primitive_jvps[_mark] = _differentiate
batching.primitive_batchers[_mark] = _batch


class _Node(NamedTuple):
    """Where a value comes from, and a bit for each mark whose output moves it."""

    origin: Origin
    marks: int


_NOTHING = _Node(None, 0)


def read(program: core.ClosedJaxpr, num_params: int) -> tuple[Calls, frozenset[str]]:
    """The marks of a program of so many parameters, then other inputs; those its result sees."""
    reader, calls = _Reader(), {}
    inputs = [
        _Node(Source(i, tuple(range(len(var.aval.shape)))), 0) if i < num_params else _NOTHING
        for i, var in enumerate(program.jaxpr.invars)
    ]
    outputs = reader.run(program.jaxpr, inputs, (), calls)
    seen = frozenset(key for key, bit in reader.bits.items() if outputs and bit & outputs[0].marks)
    return calls, seen


class _Reader:
    """One pass through a program, from its inputs to its outputs."""

    def __init__(self):
        self.bits: dict[str, int] = {}

    def run(
        self,
        jaxpr: core.Jaxpr,
        inputs: Sequence[_Node],
        scans: tuple[int | None, ...],
        calls: Calls,
    ) -> list[_Node]:
        """The outputs' nodes; writes the marks that are met to ``calls``."""
        nodes = dict.fromkeys(jaxpr.constvars, _NOTHING)
        nodes.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            into = [_NOTHING if isinstance(v, core.Literal) else nodes[v] for v in eqn.invars]
            if rule := _RULES.get(eqn.primitive.name):
                outputs = rule(self, eqn, into, scans, calls)
            else:
                outputs = [_mixed(into, eqn.primitive.name)] * len(eqn.outvars)
            for v, output in zip(eqn.outvars, outputs, strict=True):
                # No gradient flows through whole numbers.
                moves = jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.inexact)
                nodes[v] = output if moves else output._replace(marks=0)
        return [_NOTHING if isinstance(v, core.Literal) else nodes[v] for v in jaxpr.outvars]

    def _marked(self, eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
        key, origins = eqn.params["key"], tuple([n.origin for n in inputs[2:]])
        calls.setdefault(key, []).append(Call(origins, scans, eqn.params["vmaps"]))
        bit = self.bits.setdefault(key, 1 << len(self.bits))
        return [_Node(None, inputs[0].marks | bit)]

    def _passed(self, eqn: Any, inputs: list[_Node], *_: Any) -> list[_Node]:
        return inputs[: len(eqn.outvars)]

    def _transposed(self, eqn: Any, inputs: list[_Node], *_: Any) -> list[_Node]:
        origin = inputs[0].origin
        if not isinstance(origin, Source):
            return inputs
        axes = tuple(origin.axes[axis] for axis in eqn.params["permutation"])
        return [inputs[0]._replace(origin=origin._replace(axes=axes))]

    def _stopped(self, eqn: Any, inputs: list[_Node], *_: Any) -> list[_Node]:
        origin = _mixed(inputs, "stop_gradient").origin
        return [_Node(origin and Derived(_bits(origin), "stop_gradient", moves=False), 0)]

    def _called(self, eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
        names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
        jaxpr = next(eqn.params[name] for name in names if name in eqn.params)
        return self.run(_open(jaxpr), inputs, scans, calls)

    def _with_own_rule(
        self, eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls
    ) -> list[_Node]:
        # Whatever stands inside, its gradient is what the rule says.
        inner = self._called(eqn, inputs, scans, calls)
        return [_mixed([*inputs, *inner], eqn.primitive.name)] * len(eqn.outvars)

    def _branched(self, eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
        outputs = [self.run(_open(b), inputs[1:], scans, calls) for b in eqn.params["branches"]]
        return [functools.reduce(_agreed, nodes) for nodes in zip(*outputs, strict=True)]

    def _scanned(self, eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
        num_consts, num_carry = _scan_parts(eqn.params)
        consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
        xs = [_sliced(n, len(scans)) for n in inputs[num_consts + num_carry :]]
        inside = (*scans, eqn.params["length"])
        while True:  # what the carry holds after any number of rounds
            met: Calls = {}
            outputs = self.run(_open(eqn.params["jaxpr"]), [*consts, *carry, *xs], inside, met)
            after = [_agreed(old, new) for old, new in zip(carry, outputs, strict=False)]
            if after == carry:
                break
            carry = after
        for key, found in met.items():
            calls.setdefault(key, []).extend(found)
        return [*carry, *[_mixed([n], "scan") for n in outputs[num_carry:]]]

    def _looped(self, eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
        body, skipped = _open(eqn.params["body_jaxpr"]), eqn.params["cond_nconsts"]
        into = [_mixed([n], "while_loop") for n in inputs[skipped:]]
        outputs = self.run(body, into, (*scans, None), calls)
        return [_mixed([*inputs, *outputs], "while_loop")] * len(eqn.outvars)


_RULES: dict[str, Callable[[_Reader, Any, list[_Node], tuple, Calls], list[_Node]]] = {
    "kfac_mark": _Reader._marked,
    "transpose": _Reader._transposed,
    "stop_gradient": _Reader._stopped,
    "cond": _Reader._branched,
    "scan": _Reader._scanned,
    "while": _Reader._looped,
}
_PASSES = (
    "convert_element_type copy copy_p device_put layout_constraint mesh_cast name "
    "optimization_barrier pcast pvary reduce_precision reshard sharding_constraint"
)
_RULES |= dict.fromkeys(_PASSES.split(), _Reader._passed)
_CALLS = "checkpoint closed_call core_call custom_vmap_call jit pjit remat remat2 shard_map"
_RULES |= dict.fromkeys(_CALLS.split(), _Reader._called)
_RULES |= dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _Reader._with_own_rule)


def _open(jaxpr: Any) -> Any:
    """A program without its constants; JAX 0.11 and later keep no other."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _scan_parts(params: Any) -> tuple[int, int]:
    """How many inputs of a scan are the same at each turn, and how many it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from JAX 0.11 on
    return len(consts), len(carry)


def _sliced(node: _Node, depth: int) -> _Node:
    """A node of what a scan goes through, inside of it."""
    origin = node.origin
    if not isinstance(origin, Source):
        return node
    scans = (*origin.scans, (depth, origin.axes[0]))
    return node._replace(origin=Source(origin.input, origin.axes[1:], scans))


def _agreed(one: _Node, other: _Node) -> _Node:
    """The node of a value that is one or the other."""
    if one.origin == other.origin:
        return one._replace(marks=one.marks | other.marks)
    return _mixed([one, other], "cond or scan")


def _mixed(nodes: Sequence[_Node], by: str) -> _Node:
    marks, known = 0, []
    for node in nodes:
        marks |= node.marks
        if node.origin is not None:
            known.append(node.origin)
    if not known:
        return _Node(None, marks)
    if len(known) == 1 and isinstance(known[0], Derived):
        return _Node(known[0], marks)  # the first operation says more than the last
    moves = any([not isinstance(origin, Derived) or origin.moves for origin in known])
    return _Node(Derived(functools.reduce(operator.or_, map(_bits, known)), by, moves), marks)


def _bits(origin: Source | Derived) -> int:
    return origin.inputs if isinstance(origin, Derived) else 1 << origin.input


def paths_of(origins: Sequence[Origin], paths: list[str]) -> frozenset[str]:
    """The parameters that arrays of these origins are made of."""
    bits = functools.reduce(operator.or_, [_bits(o) for o in origins if o is not None], 0)
    return frozenset([path for i, path in enumerate(paths) if bits >> i & 1])

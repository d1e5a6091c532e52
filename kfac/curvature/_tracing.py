"""Traces of a loss function in which layers report to a capture, however the model is written.

A tap leaves a *mark* in the traced program, with the layer's parameters as inputs. The program
says, through every scan, vmap, checkpoint and jit, which of these are arrays of the differentiated
tree, cast and sliced by scans and vmaps at most, and which taps the loss depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import posixpath
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from kfac._arrays import flatten
from kfac.curvature._capture import Capture, Param, Tap, scan
from kfac.curvature._examples import (
    LOST,
    NOWHERE,
    SCATTERED,
    UNKNOWN,
    Place,
    joined,
    place_after,
    place_of,
)

if TYPE_CHECKING:
    from jaxtyping import PyTree


class OfArrays(NamedTuple):
    """A loss function of Flax NNX modules as one of arrays, with its arguments."""

    loss_fn: Callable  # ``(params, *args) → (loss, (aux, state))``
    params: PyTree  # of a module of parameters an ``nnx.State``
    args: tuple
    write: Callable[[Any], None]  # puts the state after the call into the modules


def without_modules(
    loss_fn: Callable, params: PyTree, args: tuple, has_aux: bool = False
) -> OfArrays | None:
    """The loss function without the modules among its arguments; None if there are none."""
    if "flax.nnx" not in sys.modules:
        return None
    return importlib.import_module("kfac.curvature._nnx").split(loss_fn, params, args, has_aux)


def record_taps(
    loss_fn: Callable, params: PyTree, args: tuple, num_examples: int | None = None
) -> dict[str, Tap]:
    """The tapped calls of ``loss_fn(params, *args)`` by name, in their order; nothing is run."""
    met: dict[str, Tap] = {}
    # What is no array, such as a flag or a function, the loss gets as it is, as under `jax.grad`.
    leaves, structure = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def traced(params: PyTree, arrays: dict[int, Any]) -> list:
        own = structure.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        with _watched(Capture(params, met)):
            loss, *aux = jax.tree.leaves(loss_fn(params, *own))
            return [loss, *[leaf for leaf in aux if isinstance(leaf, jax.Array)]]

    program, paths = jax.make_jaxpr(traced)(params, arrays).jaxpr, list(flatten(params))
    calls = Calls(num_examples)
    inputs = [
        _Node(Source(i, tuple(range(v.aval.ndim))))
        if i < len(paths)
        else _Node(examples=place_of(v.aval, num_examples))
        for i, v in enumerate(program.invars)
    ]
    outputs = _read(program, inputs, (), calls)
    seen = outputs[0].marks if outputs else frozenset()
    # What the network gives, not what is added to its loss: parameters that move it, or a layer in
    # it, where no layer is met.
    given = zip(outputs[1:], program.outvars[1:], strict=True)
    given = [n.origin for n, v in given if v.aval.ndim > 1 and n.examples != NOWHERE]
    passing = _moved_by([o for o in given if isinstance(o, Derived)])
    for key in calls.keys() & seen:
        for call in calls[key]:
            passing |= call.made - _inputs_of([o for o in call.origins if o is not None])
    taps: dict[str, Tap] = {}
    for key, tap in met.items():
        if key in calls:
            tap = _located(tap, calls[key], key in seen, paths)
            tap = _with_examples(tap, calls, key, passing, paths)
        else:  # `nn.scan` traces its body once to find constants, and throws that trace away
            tap = dataclasses.replace(tap, layer=None, reason=None)
        name = base = _name(tap)
        count = 1
        while name in taps:
            count += 1
            name = f"{base}#{count}"
        taps[name] = tap
    return taps


def _located(tap: Tap, calls: list[Call], seen: bool, paths: list[str]) -> Tap:
    call = calls[0]
    params: dict[str, Param] = {}
    found: set[tuple[bool, ...]] = set()
    reasons = [tap.reason]
    for i, (role, origin) in enumerate(zip(tap.shapes, call.origins, strict=True)):
        if isinstance(origin, Derived):
            how = f"computed inside the loss, by {origin.by}"
            how = how if origin.moving else "under stop_gradient"
            reasons.append(f"parameter {role!r} is {how}")
        elif origin is None:
            reasons.append(f"parameter {role!r} is not an array of the differentiated tree")
        else:
            mapped = [axes[i] for _, axes in reversed(call.vmaps)]
            stacked, stack_axes, rest = _frames(origin, call.scans, mapped)
            found.add(stacked)
            params[role] = Param(paths[origin.input], tap.shapes[role], stack_axes)
            if rest != sorted(rest):
                reasons.append(f"parameter {role!r} is transposed inside the loss")
    if not seen:
        reasons.append("the loss does not depend on its output, or only under stop_gradient")
    if len(calls) > 1:
        reasons.append(
            f"a function that jax.jit or jax.checkpoint keeps calls it once and is used "
            f"{len(calls)} times; give each use a function of its own"
        )
    if call.scans != tap.scans:
        reasons.append(
            "it stands in a loop that kfac does not see, such as jax.lax.map or fori_loop; use "
            "kfac.scan"
        )
    if len(found) != 1:
        reasons.append("some of its parameters are stacked and others shared")
    origins = [origin for call in calls for origin in call.origins if origin is not None]
    return dataclasses.replace(
        tap,
        vmaps=tuple([size for size, _ in reversed(call.vmaps)]),
        params=params,
        stacked=next(iter(found), ()),
        reason=next(filter(None, reasons), None),
        touched=frozenset([paths[i] for i in _inputs_of(origins)]),
        moved=frozenset([paths[i] for i in _moved_by(origins if seen else [])]),
    )


def _with_examples(
    tap: Tap, calls: Calls, key: str, passing: frozenset[int], paths: list[str]
) -> Tap:
    """The tap with the axis of its examples, where that is known, or why it can have no block."""
    call, reasons = calls[key][0], [tap.reason]
    place = call.examples
    if inside := call.inside:
        reasons.append(f"it stands in a function with a gradient of its own, {inside}")
    # A bias may be added behind the tapped call, for which the layer's formula stands.
    own = {origin.input for origin in call.origins if isinstance(origin, Source)}
    if by_hand := sorted(own & call.made & passing):
        name = paths[by_hand[0]]
        reasons.append(f"{name} is also used where no layer is met")
    if any(
        jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves((tap.x, tap.y))
    ):
        reasons.append("it takes or gives complex numbers")
    if key in calls.wrong:
        reasons.append(
            "it depends on no example or on all, and its first axis does not number them"
        )
    if place == LOST:
        reasons.append("it gets rows by computed indices, which do not say whose they are")
    if place == SCATTERED or place.axis == len(tap.vmaps) + len(tap.y.shape) - 1:
        reasons.append("the rows of an example are not neighbours in its output; examples go first")
    axis = place.axis if place.known and not place.taken else None
    return dataclasses.replace(tap, examples=axis, reason=next(filter(None, reasons), None))


def _frames(
    origin: Source, scans: tuple, mapped: list[int | None]
) -> tuple[tuple[bool, ...], tuple[int, ...], list[int]]:
    """Which frames number layers, along which axes of the parameter, and the parameter's others."""
    along, rest = dict(origin.scans), list(origin.axes)
    frames = [along.get(depth) for depth in range(len(scans))]
    frames += [None if axis is None else rest.pop(axis) for axis in mapped]
    chosen = tuple([axis for axis in frames if axis is not None])
    return tuple([axis is not None for axis in frames]), chosen, rest


def _name(tap: Tap) -> str:
    """Where its parameters stand, if that is known and the call has no name of its own."""
    base = tap.base or "model"
    if tap.params and not tap.named:
        parents = [posixpath.dirname(role.path) for role in tap.params.values()]
        parent = posixpath.commonpath(parents)
        own = parent in (tap.base, f"params/{tap.base}".rstrip("/"))
        base = base if own else parent or "model"
    return base if tap.captured else f"({base})"


def tapped(loss_fn: Callable, taps: dict[str, Tap]) -> Callable:
    """``(params, slots, *args) → loss_fn(params, *args)``.

    Its gradient in ``slots`` is what the taps captured.
    """

    def with_slots(params, slots, *args):
        with _watched(Capture(params, taps, slots)):
            return loss_fn(params, *args)

    return with_slots


# ---- While a capture runs, functions of other libraries are replaced by ones that look for it.


@contextlib.contextmanager
def _watched(capture: Capture) -> Iterator[None]:
    """Within it, layers and scans on this thread report to this capture."""
    with _replaced(), capture.active(), contextlib.ExitStack() as stack:
        for adapter in _adapters():
            stack.enter_context(adapter.watch())
        yield


def _adapters() -> list[Any]:
    libraries = {"flax.linen": "kfac.curvature._linen", "flax.nnx": "kfac.curvature._nnx"}
    return [importlib.import_module(a) for name, a in libraries.items() if name in sys.modules]


_lock, _undo = threading.Lock(), contextlib.ExitStack()
_captures = 0  # that run, on all threads


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    global _captures
    with _lock:
        if _captures == 0:
            with contextlib.ExitStack() as stack:  # undoes what is done if one of them fails
                _replace(stack, jax.lax, "scan", lambda original: scan)
                for adapter in _adapters():
                    for replacement in adapter.replacements():
                        _replace(stack, *replacement)
                _undo.push(stack.pop_all())
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if _captures == 0:
                _undo.close()


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable) -> None:
    if name not in vars(owner):
        raise RuntimeError(
            f"expected {owner.__name__} to define {name!r}, where kfac finds layers; install a "
            "version of this library that kfac is tested with."
        )
    original = vars(owner)[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    stack.callback(setattr, owner, name, original)


# ---- The program of a loss, read from its inputs to its outputs.


class Source(NamedTuple):
    """An array of the differentiated tree."""

    input: int  # which of the arrays of the tree
    axes: tuple[int, ...]  # of each axis of the array, which one of the parameter it is
    # (depth of the scan, axis of the parameter) for each scan that slices it
    scans: tuple[tuple[int, int], ...] = ()


class Derived(NamedTuple):
    """What was computed from arrays of the differentiated tree, not by way of a tapped layer."""

    inputs: frozenset[int]  # which of these
    by: str  # the operation
    moving: frozenset[int]  # those of them that a gradient flows back to


Origin = Source | Derived | None  # None: of other arrays alone


class Call(NamedTuple):
    """A mark in the program."""

    origins: tuple[Origin, ...]  # of the layer's parameters
    # lengths of the loops around it, outermost first; None for a loop without one
    scans: tuple[int | None, ...]
    # (size, mapped axis of each parameter) of the vmaps around it, innermost first
    vmaps: tuple[tuple[int, tuple[int | None, ...]], ...]
    examples: Place  # in the output, vmaps first
    made: frozenset[int]  # which arrays of the tree the output was computed from
    inside: str = ""  # of a function with a gradient of its own


class Calls(dict[str, list[Call]]):
    """Every mark, as often as it is met."""

    def __init__(self, num_examples: int | None):
        super().__init__()
        self.num_examples = num_examples
        self.wrong: set[str] = set()  # those whose first axis turned out to be no examples

    def add(self, other: Calls, inside: str = "") -> None:
        for key, found in other.items():
            found = [call._replace(inside=inside or call.inside) for call in found]
            self.setdefault(key, []).extend(found)
        self.wrong |= other.wrong


class _Node(NamedTuple):
    """Where a value comes from, the marks whose output moves it, and where its examples are."""

    origin: Origin = None
    marks: frozenset[str] = frozenset()
    examples: Place = NOWHERE


_NOTHING = _Node()


def _read(
    jaxpr: core.Jaxpr, inputs: Sequence[_Node], scans: tuple[int | None, ...], calls: Calls
) -> list[_Node]:
    """The outputs' nodes; writes the marks that are met to ``calls``."""
    nodes = dict.fromkeys(jaxpr.constvars, _NOTHING)
    nodes.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        into = [_NOTHING if isinstance(v, core.Literal) else nodes[v] for v in eqn.invars]
        if rule := _RULES.get(eqn.primitive.name):
            outputs = rule(eqn, into, scans, calls)
        else:
            mixed = _mixed(into, eqn.primitive.name)
            outputs = [mixed._replace(examples=_place(eqn, into, calls))] * len(eqn.outvars)
        for v, output in zip(eqn.outvars, outputs, strict=True):
            # No gradient flows through whole numbers.
            moves = jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.inexact)
            nodes[v] = output if moves else _still(output, eqn.primitive.name)
    return [_NOTHING if isinstance(v, core.Literal) else nodes[v] for v in jaxpr.outvars]


def _still(node: _Node, by: str) -> _Node:
    """A node of a value that no gradient flows through."""
    origin = node.origin and Derived(_inputs_of([node.origin]), by, frozenset())
    return _Node(origin, examples=node.examples)


def _marked(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    key, origins = eqn.params["key"], tuple([n.origin for n in inputs[2:]])
    place, vmaps, shape = inputs[0].examples, eqn.params["vmaps"], eqn.outvars[0].aval.shape
    made = _moved_by([inputs[0].origin])
    calls.setdefault(key, []).append(Call(origins, scans, vmaps, place, made))
    if place == NOWHERE and len(shape) > len(vmaps) + 1:
        by_vmap = calls.num_examples in [size for size, _ in vmaps]
        place = UNKNOWN if by_vmap else Place(len(vmaps), frozenset({key}))
    elif place == NOWHERE:
        place = UNKNOWN
    elif place.taken:
        place = place._replace(taken=place.taken | {key})
    return [_Node(None, inputs[0].marks | {key}, place)]


def _place(eqn: Any, inputs: Sequence[_Node], calls: Calls) -> Place:
    places = [node.examples for node in inputs]
    return place_after(eqn, places, calls.num_examples, calls.wrong)


def _passed(eqn: Any, inputs: list[_Node], *_: Any) -> list[_Node]:
    return inputs[: len(eqn.outvars)]


def _transposed(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    node = inputs[0]._replace(examples=_place(eqn, inputs, calls))
    if not isinstance(node.origin, Source):
        return [node]
    axes = tuple(node.origin.axes[axis] for axis in eqn.params["permutation"])
    return [node._replace(origin=node.origin._replace(axes=axes))]


def _stopped(eqn: Any, inputs: list[_Node], *_: Any) -> list[_Node]:
    return [_still(inputs[0], "stop_gradient")]


def _called(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    jaxpr = next(eqn.params[name] for name in names if name in eqn.params)
    return _read(_open(jaxpr), inputs, scans, calls)


def _with_own_rule(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    # Whatever stands inside, its gradient is what the rule says.
    met = Calls(calls.num_examples)
    inner = _called(eqn, inputs, scans, met)
    calls.add(met, inside=eqn.primitive.name.removesuffix("_call"))
    mixed = _mixed([*inputs, *inner], eqn.primitive.name)
    return [mixed._replace(examples=node.examples) for node in inner]


def _branched(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    outputs = [_read(_open(b), inputs[1:], scans, calls) for b in eqn.params["branches"]]
    return [functools.reduce(_agreed, nodes) for nodes in zip(*outputs, strict=True)]


def _scanned(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    num_consts, num_carry = _scan_parts(eqn.params)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    xs = [_sliced(n, len(scans)) for n in inputs[num_consts + num_carry :]]
    inside = (*scans, eqn.params["length"])
    while True:  # what the carry holds after any number of rounds
        met = Calls(calls.num_examples)
        outputs = _read(_open(eqn.params["jaxpr"]), [*consts, *carry, *xs], inside, met)
        after = [_agreed(old, new) for old, new in zip(carry, outputs, strict=False)]
        if after == carry:
            break
        carry = after
    calls.add(met)
    stacked = [
        _mixed([n], "scan")._replace(examples=_behind(n.examples, 1)) for n in outputs[num_carry:]
    ]
    return [*carry, *stacked]


def _behind(place: Place, axes: int) -> Place:
    """With so many axes more in front, or fewer."""
    if not place.known:
        return place
    return place._replace(axis=place.axis + axes) if place.axis + axes >= 0 else UNKNOWN


def _looped(eqn: Any, inputs: list[_Node], scans: tuple, calls: Calls) -> list[_Node]:
    body, skipped = _open(eqn.params["body_jaxpr"]), eqn.params["cond_nconsts"]
    into = [_mixed([n], "while_loop") for n in inputs[skipped:]]
    outputs = _read(body, into, (*scans, None), calls)
    mixed = _mixed([*inputs, *outputs], "while_loop")
    return [mixed._replace(examples=UNKNOWN)] * len(eqn.outvars)


_PASSES = (
    "convert_element_type copy copy_p device_put layout_constraint mesh_cast name "
    "optimization_barrier pcast pvary reduce_precision reshard sharding_constraint"
)
_CALLS = "checkpoint closed_call core_call custom_vmap_call jit pjit remat remat2 shard_map"
_RULES: dict[str, Callable[[Any, list[_Node], tuple, Calls], list[_Node]]] = {
    "kfac_mark": _marked,
    "transpose": _transposed,
    "stop_gradient": _stopped,
    "cond": _branched,
    "scan": _scanned,
    "while": _looped,
    **dict.fromkeys(("ceil", "floor", "round", "sign"), _stopped),
    **dict.fromkeys(_PASSES.split(), _passed),
    **dict.fromkeys(_CALLS.split(), _called),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _with_own_rule),
}


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
    origin, node = node.origin, node._replace(examples=_behind(node.examples, -1))
    if not isinstance(origin, Source):
        return node
    scans = (*origin.scans, (depth, origin.axes[0]))
    return node._replace(origin=Source(origin.input, origin.axes[1:], scans))


def _agreed(one: _Node, other: _Node) -> _Node:
    place = joined([one.examples, other.examples], set())
    if one.origin == other.origin:
        return one._replace(marks=one.marks | other.marks, examples=place)
    return _mixed([one, other], "cond or scan")._replace(examples=place)


def _mixed(nodes: Sequence[_Node], by: str) -> _Node:
    marks = frozenset().union(*[node.marks for node in nodes])
    known = [node.origin for node in nodes if node.origin is not None]
    if not known:
        return _Node(None, marks)
    if len(known) == 1 and isinstance(known[0], Derived):
        return _Node(known[0], marks)  # the first operation says more than the last
    return _Node(Derived(_inputs_of(known), by, _moved_by(known)), marks)


def _moved_by(origins: Sequence[Origin]) -> frozenset[int]:
    derived = [origin.moving for origin in origins if isinstance(origin, Derived)]
    sources = [origin.input for origin in origins if isinstance(origin, Source)]
    return frozenset(sources).union(*derived)


def _inputs_of(origins: Sequence[Source | Derived]) -> frozenset[int]:
    made = [o.inputs if isinstance(o, Derived) else frozenset([o.input]) for o in origins]
    return frozenset().union(*made)

"""Which axis of every value in a program numbers the examples of a batch, if the program says so.

The arguments' axes are followed through what JAX's primitives do to them. What is not known here is
unknown, never guessed: layers are then taken to have the examples first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where the examples are in a value: the axis that numbers them, each with all of its rows."""

    axis: int
    # Layers whose output depends on no example, and is taken to have this axis for them until
    # something that does says otherwise: zeros that a recurrence begins with do, positions do not.
    taken: frozenset[str] = frozenset()

    @property
    def known(self) -> bool:
        return self.axis >= 0


NOWHERE = Place(-1)  # the value depends on no example, or on all together
SCATTERED = Place(-2)  # along an axis on which the rows of an example are not neighbours
UNKNOWN = Place(-3)
LOST = Place(-4)  # rows chosen by what was computed, as an expert gets them, until they are back
_SUMMED = -5


def place_of(array: Any, num_examples: int | None) -> Place:
    """That of an argument: the first axis of that size, or the only one."""
    shape = getattr(array, "shape", ())
    axes = [axis for axis, size in enumerate(shape) if size == num_examples]
    if not shape or num_examples in (None, 1):
        return UNKNOWN if shape else NOWHERE
    return Place(axes[0]) if axes and (axes[0] == 0 or len(axes) == 1) else UNKNOWN


def joined(places: Sequence[Place], wrong: set[str]) -> Place:
    """That of a value made from others element by element; adds to ``wrong`` what they refute."""
    found = [place for place in places if place != NOWHERE]
    if LOST in found:
        return LOST
    certain = {place.axis for place in found if place.known and not place.taken}
    if UNKNOWN in found and certain != {0}:
        return UNKNOWN  # what is known may be no example: as many steps have a table as long
    if len(certain) == 1:
        (axis,) = certain
        for place in found:
            if place.taken and place.axis != axis:
                wrong |= place.taken
        return Place(axis)
    if not found or certain:
        return UNKNOWN if found else NOWHERE
    taken = [place for place in found if place.known]
    if len({place.axis for place in taken}) == 1 and SCATTERED not in found:
        return Place(taken[0].axis, frozenset().union(*[place.taken for place in taken]))
    return UNKNOWN if taken else SCATTERED


def place_after(eqn: Any, places: Sequence[Place], num_examples: int | None, wrong: set) -> Place:
    """That of the outputs of an equation, of one shape up to axes without examples."""
    if all(place == NOWHERE for place in places):
        return NOWHERE
    name = eqn.primitive.name
    if name in _ALIKE:
        return joined(places, wrong)
    if name == "dot_general":
        return _product(eqn, places, wrong)
    first, shape = places[0], eqn.invars[0].aval.shape
    if name == "concatenate":
        first = joined(places, wrong)
        if first.axis == eqn.params["dimension"]:
            return UNKNOWN if first.taken else SCATTERED
        return first
    if name == "gather" and first == NOWHERE:
        return _looked_up(eqn, places[1])
    if any(place != NOWHERE for place in places[1:]):
        return _dealt(eqn, places, num_examples, wrong)
    if first == LOST:
        return LOST
    if not first.known:
        return first if name in _REDUCTIONS.split() else UNKNOWN
    axis = _MOVES.get(name, _nowhere_known)(eqn, first.axis, shape, num_examples)
    return axis if isinstance(axis, Place) else Place(axis, first.taken)


def _product(eqn: Any, places: Sequence[Place], wrong: set[str]) -> Place:
    contracted, batch = eqn.params["dimension_numbers"]
    sizes = [len(v.aval.shape) for v in eqn.invars[:2]]
    after: list[Place] = []
    start = len(batch[0])
    for place, along, together, size in zip(places, contracted, batch, sizes, strict=True):
        free = [axis for axis in range(size) if axis not in (*along, *together)]
        if place.axis in along:
            after.append(Place(_SUMMED, place.taken))
        elif place.axis in together:
            after.append(place._replace(axis=list(together).index(place.axis)))
        else:
            after.append(
                place._replace(axis=start + free.index(place.axis)) if place.known else place
            )
        start += len(free)
    summed = [place for place in after if place.axis == _SUMMED]
    others = [place for place in after if place.axis != _SUMMED]
    if len(summed) == 2:
        return NOWHERE
    if summed and summed[0].taken and others[0].known and not others[0].taken:
        wrong |= summed[0].taken
        return others[0]
    return UNKNOWN if summed else joined(others, wrong)


def _dealt(eqn: Any, places: Sequence[Place], num_examples: int | None, wrong: set) -> Place:
    """Where computed indices pick rows or place them; whose they are is known no more.

    Not where they sort all examples, or where each example has its own.
    """
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if not name.startswith(("gather", "scatter")) or places[1] == NOWHERE:
        return UNKNOWN
    numbers = eqn.params["dimension_numbers"]
    if name == "gather":
        rows, kept = places[0], numbers.offset_dims
        count = math.prod([size for axis, size in enumerate(shape) if axis not in kept])
        along = rows.axis in numbers.start_index_map and (rows.taken or not places[1].known)
    else:
        rows, count = places[2], shape[0]
        along = rows.known and places[0] == NOWHERE
    wrong |= rows.taken if along else set()
    return LOST if along and count != num_examples and not rows.taken else UNKNOWN


def _looked_up(eqn: Any, indices: Place) -> Place:
    numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    outer = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    if not indices.known or indices.axis >= len(outer):
        return UNKNOWN
    return indices._replace(axis=outer[indices.axis])


# ---- Of primitives with one operand that matters: (equation, axis, shape, examples) → axis.


def _nowhere_known(*_: Any) -> Place:
    return UNKNOWN


def _reshaped(eqn: Any, axis: int, shape: tuple, num_examples: int) -> int | Place:
    before, new = math.prod(shape[:axis]), eqn.params["new_sizes"]
    starts = [i for i, n in enumerate(new) if math.prod(new[:i]) == before and n > 1]
    if not starts:
        return SCATTERED
    return starts[0] if new[starts[0]] % num_examples == 0 else UNKNOWN


def _reduced(eqn: Any, axis: int, *_: Any) -> int | Place:
    axes = eqn.params["axes"]
    return NOWHERE if axis in axes else axis - sum(a < axis for a in axes)


def _squeezed(eqn: Any, axis: int, *_: Any) -> int | Place:
    axes = eqn.params["dimensions"]
    return UNKNOWN if axis in axes else axis - sum(a < axis for a in axes)


def _broadcast(eqn: Any, axis: int, shape: tuple, _: int) -> int | Place:
    to = eqn.params["broadcast_dimensions"][axis]
    return to if eqn.params["shape"][to] == shape[axis] else UNKNOWN


def _whole(eqn: Any, axis: int, shape: tuple, _: int) -> int | Place:
    return axis if eqn.outvars[0].aval.shape[axis] == shape[axis] else UNKNOWN


def _beside(field: str) -> Callable:
    """Where the operation goes along one axis, or some, and leaves the others alone."""

    def moved(eqn: Any, axis: int, *_: Any) -> int | Place:
        along = eqn.params[field]
        return UNKNOWN if axis in (along if isinstance(along, tuple) else (along,)) else axis

    return moved


def _convolved(eqn: Any, axis: int, *_: Any) -> int | Place:
    numbers = eqn.params["dimension_numbers"]
    alone = axis == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1
    return numbers.out_spec[0] if alone else UNKNOWN


_REDUCTIONS = "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
_ALONG_AN_AXIS = "cumlogsumexp cummax cummin cumprod cumsum split top_k"
_MOVES: dict[str, Callable[..., int | Place]] = {
    "reshape": _reshaped,
    "transpose": lambda eqn, axis, *_: eqn.params["permutation"].index(axis),
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "conv_general_dilated": _convolved,
    "rev": _beside("dimensions"),
    "sort": _beside("dimension"),
    **dict.fromkeys(("dynamic_slice", "pad", "slice"), _whole),
    **dict.fromkeys(_REDUCTIONS.split(), _reduced),
    **dict.fromkeys(_ALONG_AN_AXIS.split(), _beside("axis")),
}
_ELEMENTWISE = """
    abs add add_any and atan2 cbrt ceil clamp cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem round
    rsqrt select_n sign sin sinh sqrt square sub tan tanh xor
"""
_ALIKE = frozenset(_ELEMENTWISE.split())

"""Additions, multiplications, comparisons and exponentials of JAX functions.

The usual counters know one number, the FLOP or the multiply-accumulate, in which an addition weighs
as much as a multiplication. Here every kind is counted by itself, layer by layer and number type by
number type.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adder_flax import recorder
from adder_flax.counting import _walk


@dataclasses.dataclass(frozen=True)
class Operations:
    """What one call of a function computes and moves.

    Conventions: a sum over K terms is K additions (the accumulator starts empty, as in published
    counts of multiply-accumulates); a term |x − w| of an L1 distance is two additions, its
    difference and its accumulation, and the absolute value is free, being one bit of the operand.
    Of bytes the difference is one of uint8, and what it is added to int32.
    :meth:`with_one_addition_per_l1_element` gives the other convention in use. Sign changes,
    selections, conversions and moves are not arithmetic. Taps on padding are not counted.

    Attributes:
      counts: {(kind, dtype): number}, e.g. {("additions", "float32"): 12}.
      bytes_moved: bytes that all equations read and write if each one goes through memory, an upper
        bound: views (reshapes, broadcasts, transposes) move nothing and an L1 distance is one
        equation.
      bytes_at_boundary: bytes of the arguments, constants and results, each touched once: a lower
        bound, reached only when everything between stays on the chip. None for a single layer,
        which has no boundary of its own.
      layers: {layer: Operations}, from NNX module paths ("blocks.0.attention") and
        ``jax.named_scope``; "" is what lies outside all of them. The layers sum to the whole.
      uncounted: {primitive or kernel: occurrences} of which the counter knows nothing.
    """

    counts: Mapping[tuple[str, str], int]
    bytes_moved: int = 0
    bytes_at_boundary: int | None = None
    layers: Mapping[str, "Operations"] = dataclasses.field(default_factory=dict)
    uncounted: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def total(parts: Sequence["Operations"]) -> "Operations":
        """Sum of the counts and of the bytes moved; the parts' layers and boundaries are gone."""
        counts: Counter = Counter()
        for part in parts:
            counts.update(part.counts)
        return Operations(counts=dict(counts), bytes_moved=sum(part.bytes_moved for part in parts))

    def _sum(self, kind: str) -> int:
        return sum(number for (this, _), number in self.counts.items() if this == kind)

    @property
    def additions(self) -> int:
        """Additions and subtractions."""
        return self._sum(_walk.ADD)

    @property
    def multiplications(self) -> int:
        """Multiplications; of matrix products and convolutions their multiply-accumulates."""
        return self._sum(_walk.MULTIPLY)

    @property
    def comparisons(self) -> int:
        """Maxima, minima, orderings, signs and roundings; clipping to an interval is two."""
        return self._sum(_walk.COMPARE)

    @property
    def exponentials(self) -> int:
        """Exponentials and what is computed like them: logarithms, tanh, erf, sines, powers."""
        return self._sum(_walk.EXPONENTIAL)

    @property
    def divisions(self) -> int:
        """Divisions and remainders."""
        return self._sum(_walk.DIVIDE)

    @property
    def roots(self) -> int:
        """Square roots, reciprocal square roots and cube roots."""
        return self._sum(_walk.ROOT)

    @property
    def l1_elements(self) -> int:
        """Terms |x − w| summed into L1 distances, the adder's multiply-accumulates."""
        return self._sum(_walk.L1)

    def with_one_addition_per_l1_element(self) -> "Operations":
        """The same counts if only the accumulation of |x − w| is an addition, as published adder
        networks count.
        """
        counts = Counter(self.counts)
        counts.subtract({(_walk.ADD, d): n for (k, d), n in self.counts.items() if k == _walk.L1})
        layers = {n: layer.with_one_addition_per_l1_element() for n, layer in self.layers.items()}
        return dataclasses.replace(self, counts=dict(counts), layers=layers)


def count_operations(fn: Callable, *args: Any) -> Operations:
    """Counts the operations of ``fn(*args)`` by walking its jaxpr; nothing is computed.

    The adder and additive operators are counted in their reference form, so an adder layer shows
    the additions of its formula whatever kernel would run. Loops (``scan``, ``fori_loop`` with
    known bounds) count as often as they run, a conditional as its dearest branch, a sharded map on
    all its devices. A ``while`` loop counts once, and says so in ``uncounted``.

    Args:
      fn: any JAX function, or an NNX module. Bind keyword arguments with a lambda.
      *args: arrays, ``jax.ShapeDtypeStruct``, pytrees of them, or NNX modules, which may be
        abstract (``nnx.eval_shape``).

    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((3, 5), "float32")
    >>> counted = count_operations(jnp.matmul, x, w)
    >>> counted.multiplications, counted.additions
    (30, 30)
    >>> from adder_flax.ops import adder_matmul
    >>> counted = count_operations(adder_matmul, x, w)
    >>> counted.additions, counted.with_one_addition_per_l1_element().additions
    (60, 30)
    """
    closed, _ = recorder.trace(fn, *args)
    tally = _walk.Tally()
    # Innermost module path among an equation's named scopes, and the scopes inside of it.
    name_of = lambda scopes: ".".join(filter(None, recorder.module_path(scopes)))
    _walk.walk(closed.jaxpr, tally, name_of)
    layers = {
        name: Operations(dict(tally.counts.get(name, {})), moved)
        for name, moved in tally.bytes_moved.items()
    }
    whole = Operations.total(list(layers.values()))
    variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars, *closed.jaxpr.outvars]
    boundary = sum(map(_walk.nbytes, variables))
    return Operations(whole.counts, whole.bytes_moved, boundary, layers, dict(tally.uncounted))


def declare_operations(kernel: str, count: Callable[[Any], Mapping[str, int]]) -> None:
    """Declares what a custom kernel computes, for the cases in which it is met in a jaxpr.

    Args:
      kernel: the FFI target, the name of the Pallas kernel, or the name of the primitive.
      count: from the jaxpr's equation to {kind: number}, kinds as in :attr:`Operations.counts`.

    Raises:
      ValueError: another function counts this kernel.

    >>> count = lambda equation: {"additions": equation.outvars[0].aval.size}
    >>> with _walk.KERNELS.temporary():
    ...     declare_operations("my_kernel", count)
    """
    _walk.KERNELS.register(kernel, count)

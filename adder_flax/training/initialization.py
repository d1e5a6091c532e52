"""The weights that a seed gives when each is drawn by its path: models that differ in part pair."""

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core
from jaxtyping import PRNGKeyArray

from adder_flax.training.sharding import tree_path
from adder_flax.training.skeleton import take_apart


def params_by_path(build: Callable[[nnx.Rngs], nnx.Module], seed: int) -> Any:
    """Returns a nested dict of what a model carries, each drawn by the seed and its path alone.

    Two models then begin alike wherever they have parameters of one path, shape and initial
    distribution, whatever else they are made of. What is drawn for which parameter is read from the
    traced program.

    Example:
      >>> def build(rngs, first=3):
      ...     return nnx.Sequential(nnx.Linear(2, first, rngs=rngs), nnx.Linear(3, 2, rngs=rngs))
      >>> one, other = params_by_path(build, 0), params_by_path(lambda rngs: build(rngs, 4), 0)
      >>> bool((one["layers"][1]["kernel"] == other["layers"][1]["kernel"]).all())
      True
    """

    def make(keys: Iterator[PRNGKeyArray]) -> Any:
        return take_apart(built_from(build, keys))[1]

    used = itertools.count()
    key = jax.random.key(seed)
    shapes = jax.eval_shape(lambda: make(key for _ in iter(lambda: next(used), None)))
    keys = [key] * next(used)
    closed = jax.make_jaxpr(lambda *keys: make(iter(keys)))(*keys)
    paths = [tree_path(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    for path, drawn in zip(paths, _inputs_of_outputs(closed.jaxpr), strict=True):
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        for i, index in enumerate(sorted(drawn)):
            keys[index] = jax.random.fold_in(own, i)
    # Eager: one program of all parameters compiles for longer than it saves.
    return jax.tree.unflatten(jax.tree.structure(shapes), core.jaxpr_as_fun(closed)(*keys))


def built_from(build: Callable[[nnx.Rngs], nnx.Module], keys: Iterator[PRNGKeyArray]) -> nnx.Module:
    """Returns the model that is made from given keys; streams that it keeps are Flax's own."""
    rngs = nnx.Rngs(0)
    setattr(rngs, "default", _Given(keys))  # noqa: B010  streams are no declared attributes
    model, stream = build(rngs), rngs["default"]
    del stream._take
    stream.__class__ = nnx.RngStream
    return model


class _Given(nnx.RngStream):
    """A stream of given keys; what is made from it is a stream of Flax's own."""

    def __init__(self, keys: Iterator[PRNGKeyArray]):
        super().__init__(0, tag="default")
        self._take = keys.__next__

    def __call__(self) -> PRNGKeyArray:
        return self._take()

    def fork(self, **options: Any) -> nnx.RngStream:
        """A stream, as ``nnx.Dropout`` keeps one."""
        return nnx.RngStream(self(), tag=self.tag).fork(**options)

    def split(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        """Returns a stack of streams."""
        return nnx.RngStream(self(), tag=self.tag).split(k)


def _inputs_of_outputs(program: core.Jaxpr) -> list[set[int]]:
    """For each result of a program the numbers of the arguments that it depends on."""
    known = {variable: {i} for i, variable in enumerate(program.invars)}
    of = lambda atom: set() if isinstance(atom, core.Literal) else known.get(atom, set())
    for equation in program.eqns:
        needed = set().union(*map(of, equation.invars))
        known |= dict.fromkeys(equation.outvars, needed)
    return [of(atom) for atom in program.outvars]

"""Which layers of a model have curvature, and which parameters they cover."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac._arrays import flatten, masked_paths, path_name
from kfac.curvature._blocks import Block, find_blocks
from kfac.curvature._capture import Tap
from kfac.curvature._tracing import record_taps, without_modules

if TYPE_CHECKING:
    from jaxtyping import PyTree


LEFT_OUT = "left out"
LOW_COVERAGE = 0.5


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layers:
    """The layers of a model that have curvature; printing it gives the coverage table.

    Layers of equal blocks are equal, so that a compiled step serves curvature of any trace.

    Attributes:
      blocks: by name, in the order of the calls.
      skipped: name → why a layer that was met has no block.
      shapes: path → shape of every parameter.
      reasons: path → why the parameter has no block, where a layer with it was met.
    """

    blocks: dict[str, Block]
    skipped: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    reasons: dict[str, str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layers) and [*self.blocks.items()] == [*other.blocks.items()]

    def __hash__(self) -> int:
        return hash(tuple(self.blocks.items()))

    @functools.cached_property
    def block_of(self) -> dict[str, str]:
        """Path → name of the block."""
        return {param.path: name for name, block in self.blocks.items() for param in block.params}

    @property
    def coverage(self) -> float:
        """Share of the parameters (counted as numbers) that some block covers."""
        sizes = {path: math.prod(shape) for path, shape in self.shapes.items()}
        return sum([sizes[path] for path in self.block_of]) / max(sum(sizes.values()), 1)

    def uncovered(self) -> str:
        """The largest parameters without a block, and why they have none."""
        paths = sorted(self.shapes.keys() - self.block_of, key=lambda p: -math.prod(self.shapes[p]))
        return "; ".join(f"{p}: {self.reasons.get(p, _NOT_MET)}" for p in paths[:3])

    def select(self, predicate: Callable[[Block], bool]) -> Layers:
        """These layers without the blocks that a predicate refuses, for the fallback to train.

        >>> import jax.numpy as jnp, kfac
        >>> loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p, x, path="").mean()
        >>> layers = kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, jnp.ones((4, 3)))
        >>> layers.select(lambda block: not block.factored).coverage
        0.0
        """
        kept = {name: block for name, block in self.blocks.items() if predicate(block)}
        refused = dict.fromkeys(self.blocks.keys() - kept.keys(), LEFT_OUT)
        paths = {path: LEFT_OUT for path, name in self.block_of.items() if name in refused}
        return Layers(kept, self.skipped | refused, self.shapes, self.reasons | paths)

    def whole_blocks(self, tree: PyTree) -> dict[str, Block]:
        """The blocks whose parameters a tree like the parameters holds; some may be masked.

        Raises:
          ValueError: a block of which only a part is there; or this is another tree.
        """
        present = flatten(tree)
        if not present and not masked_paths(tree):  # `optax.tree_map_params` asks with nothing
            return dict(self.blocks)
        missing = {
            name: [param.path for param in block.params if param.path not in present]
            for name, block in self.blocks.items()
        }
        absent = [path for paths in missing.values() for path in paths]
        # Of a branch that is masked as a whole, and of a tree that is, what is in it is, too.
        masked = tuple([f"{branch}/" if branch else "" for branch in masked_paths(tree)])
        if foreign := [path for path in absent if not f"{path}/".startswith(masked)]:
            raise ValueError(
                "expected the parameter tree that kfac.find_layers was given, got one without "
                f"{', '.join(foreign[:4])}; it has {', '.join(list(present)[:4]) or 'no arrays'}; "
                "find the layers of the tree that is trained."
            )
        broken = [
            f"{name} (without {', '.join(paths)})"
            for name, paths in missing.items()
            if 0 < len(paths) < len(self.blocks[name].params)
        ]
        if broken:
            raise ValueError(
                f"expected all parameters of a layer or none, got a part of {'; '.join(broken)}: a "
                "layer's parameters are one block of curvature; mask or label them alike, or leave "
                "the layer out by layers.select."
            )
        return {name: block for name, block in self.blocks.items() if not missing[name]}

    def labels(self, tree: PyTree) -> PyTree[str]:
        """``"covered"`` or ``"fallback"`` for each parameter, for ``optax.partition``.

        The tree is that of the parameters or like it; raises as ``whole_blocks`` does.

        >>> import jax.numpy as jnp, kfac
        >>> params = {"fc": {"kernel": jnp.ones((3, 2))}, "free": jnp.ones(2)}
        >>> loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p["fc"], x, path="fc").mean()
        >>> find_layers(loss_fn, params, jnp.ones((4, 3))).labels(params)
        {'fc': {'kernel': 'covered'}, 'free': 'fallback'}
        """
        covered = {p.path for block in self.whole_blocks(tree).values() for p in block.params}
        label = lambda path, _: "covered" if path_name(path) in covered else "fallback"
        return jax.tree_util.tree_map_with_path(label, tree)

    def __str__(self) -> str:
        # Layers that differ only in the numbers of their paths share a row.
        groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for path, shape in self.shapes.items():
            key = _starred(path), shape, _starred(self._served_by(path))
            groups.setdefault(key, []).append(path)
        rows = [("parameter", "shape", "block")]
        for (path, shape, text), paths in groups.items():
            if len(paths) == 1:
                path, text = paths[0], self._served_by(paths[0])
            else:
                path = f"{path} ({len(paths)}×)"
            rows.append((path, "×".join(map(str, shape)) or "scalar", text))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{path:<{widths[0]}}  {shape:>{widths[1]}}  {text}" for path, shape, text in rows]
        covered = f"{100 * self.coverage:.1f} % of the parameters"
        return "\n".join([*lines, f"{len(self.blocks)} blocks cover {covered}"])

    def _served_by(self, path: str) -> str:
        if path not in self.block_of:
            return f"fallback ({self.reasons.get(path, _NOT_MET)})"
        block = self.blocks[self.block_of[path]]
        kinds = " + ".join(dict.fromkeys([use.layer.kind for use in block.uses]))
        return f"{kinds}, {block.name}" + (f" × {block.lanes}" if block.lanes > 1 else "")


_NOT_MET = "no layer met"


def _starred(text: str) -> str:
    return re.sub(r"(^|/)\d+(?=/|$)", r"\1*", text)


def find_layers(
    loss_fn: Callable, params: PyTree, *args: Any, batch_size: int | None = None
) -> Layers:
    """The layers whose curvature can be captured, by a trace of ``loss_fn(params, *args)``.

    Args:
      loss_fn: as for ``value_grad_and_curvature``.
      params: the tree that will be differentiated; arrays or ``jax.ShapeDtypeStruct``.
      *args: the loss function's further arguments, likewise.
      batch_size: number of examples; by default the leading size of all arrays in ``args``.

    Raises:
      ValueError: leading sizes that disagree, without ``batch_size``.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}, "scale": jnp.ones(())}
    >>> loss_fn = lambda p, x: (p["scale"] * kfac.tap(kfac.Dense(), p["fc"], x, path="fc")).mean()
    >>> print(find_layers(loss_fn, params, jnp.ones((4, 3))))
    parameter   shape  block
    fc/kernel     3×2  dense, fc
    scale      scalar  fallback (no layer met)
    1 blocks cover 85.7 % of the parameters
    """
    if (of_arrays := without_modules(loss_fn, params, args)) is not None:
        loss_fn, params, args = of_arrays.loss_fn, of_arrays.params, of_arrays.args
    taps = record_taps(loss_fn, params, args, leading_size(args, batch_size))
    layers = layers_of(taps, params, count_examples(args, batch_size))
    if layers.coverage < LOW_COVERAGE:
        warnings.warn(
            f"kfac's layers cover {100 * layers.coverage:.1f} % of the parameters; the rest is "
            f"trained by the fallback optimizer ({layers.uncovered()}); print(layers) shows all.",
            stacklevel=2,
        )
    return layers


def curvature_stride(layers: Layers, num_examples: int, interval: int = 5) -> int:
    """Of how many examples one need give curvature: a power of two, 1 where all need.

    A batch of many tokens has far more rows than the sides of its factors, and forming these costs
    more than the gradient. The stride leaves every block two rows of a fresh batch for each side of
    its wider factor, or where that is fewer an eighth of a row times the square of the interval: a
    long interval leaves the first steps, while the network changes fastest, with what few batches
    gave. Blocks that have fewer rows with all examples, as a head that reads one token of each, are
    not asked. Where no block has so many, all examples give curvature.

    Args:
      layers: as the whole batch gives them, see ``find_layers``.
      num_examples: what the stride has to divide: examples of a batch, or those of one device.
      interval: steps from one curvature batch to the next.

    >>> import jax.numpy as jnp, kfac
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> layers = kfac.find_layers(loss_fn, {"kernel": jnp.ones((4, 8))}, jnp.ones((16, 5, 4)))
    >>> kfac.curvature_stride(layers, 16)  # of 80 rows a quarter, for 8 outputs
    4
    """
    rows_a_side = min(2.0, interval**2 / 8)
    asked = [
        sum(use.num_examples * use.num_tokens for use in block.uses)
        / (rows_a_side * max(block.lifted_shape))
        for block in layers.blocks.values()
        if block.factored
    ]
    spare = min((share for share in asked if share >= 1), default=1)
    return math.gcd(2 ** math.floor(math.log2(spare)), num_examples)


def layers_of(taps: dict[str, Tap], params: PyTree, num_examples: int) -> Layers:
    shapes = {path: jnp.shape(leaf) for path, leaf in flatten(params).items()}
    blocks, skipped = find_blocks(taps, num_examples)
    reasons: dict[str, str] = {}
    for name, reason in skipped.items():
        for path in sorted(taps[name].touched):
            reasons.setdefault(path, reason)
    return Layers(blocks, skipped, shapes, reasons)


def leading_size(args: tuple, batch_size: int | None) -> int | None:
    """The number of examples, None where the arguments alone do not say it."""
    if batch_size is not None:
        return batch_size
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(args) if getattr(leaf, "shape", ())}
    return sizes.pop() if len(sizes) == 1 else None


def count_examples(args: tuple, batch_size: int | None, outputs: Any = None) -> int:
    """The leading size of outputs, if known, or of a loss function's arguments."""
    known = leading_size(args, batch_size)
    if outputs is not None:
        if known not in (None, outputs.shape[0]):
            raise ValueError(
                f"expected outputs of shape (batch, *positions, classes) of {known} examples, "
                f"got {outputs.shape}; reshape them, as by outputs=lambda aux: aux.reshape(batch, "
                "-1, classes), or pass batch_size= if that is the size of the batch."
            )
        return outputs.shape[0]
    if known is None:
        found: dict[int, str] = {}  # leading size → the first array that has it
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            if shape := getattr(leaf, "shape", ()):
                found.setdefault(shape[0], f"{tuple(shape)} at args{jax.tree_util.keystr(path)}")
        raise ValueError(
            "expected arrays whose first axes number the examples among the loss function's "
            f"arguments, got {'; '.join(found.values()) or 'none'}; pass batch_size=."
        )
    return known

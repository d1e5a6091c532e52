"""One call that gives loss, gradient and the captured curvature of every layer."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac._blocks import Block, find_blocks
from kfac._capture import Tap
from kfac._fisher import FISHERS, Likelihood, get_likelihood, output_cotangents
from kfac._tracing import record_taps, tapped
from kfac._trees import concatenated, flatten, is_inside, masked_paths, path_name

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Key, PyTree


class Layers:
    """The layers of a model that have curvature; printing it gives the coverage table.

    They are found by tracing the model's loss.

    Attributes:
      blocks: name → block, in the order of the calls.
      skipped: name → why a layer that was met has no block.
      shapes: path → shape of every parameter.
    """

    def __init__(
        self, blocks: Sequence[Block], skipped: dict[str, str], shapes: dict[str, tuple[int, ...]]
    ):
        self.blocks = {block.name: block for block in blocks}
        self.skipped = dict(skipped)
        self.shapes = dict(shapes)

    @property
    def block_of(self) -> dict[str, str]:
        """Path → name of the block of every covered parameter."""
        return {param.path: name for name, block in self.blocks.items() for param in block.params}

    @property
    def coverage(self) -> float:
        """Share of the parameters (counted as numbers) that some block covers."""
        sizes = {path: math.prod(shape) for path, shape in self.shapes.items()}
        return sum(sizes[path] for path in self.block_of) / max(sum(sizes.values()), 1)

    def select(self, predicate: Callable[[Block], bool]) -> Layers:
        """These layers without the blocks that a predicate refuses.

        Their parameters go to the fallback.

        >>> import jax.numpy as jnp, kfac
        >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
        >>> loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p["fc"], x, path="fc").mean()
        >>> find_layers(loss_fn, params, jnp.ones((4, 3))).select(
        ...     lambda block: not block.factored
        ... ).coverage
        0.0
        """
        kept = {name: block for name, block in self.blocks.items() if predicate(block)}
        refused = dict.fromkeys(set(self.blocks) - set(kept), "left out")
        return Layers(list(kept.values()), self.skipped | refused, self.shapes)

    def whole_blocks(self, tree: PyTree) -> dict[str, Block]:
        """The blocks whose parameters a tree like the parameters holds.

        Some of these may be masked.

        Raises:
          ValueError: a block of which only a part is there; or this is another tree.
        """
        present, masked = flatten(tree), masked_paths(tree)
        whole, broken, foreign = {}, [], []
        for name, block in self.blocks.items():
            missing = [param.path for param in block.params if param.path not in present]
            foreign += [
                path for path in missing if not any(is_inside(path, branch) for branch in masked)
            ]
            if not missing:
                whole[name] = block
            elif len(missing) < len(block.params):
                broken.append(f"{name} (without {', '.join(missing)})")
        if foreign:
            raise ValueError(
                "expected the parameter tree that kfac.find_layers was given, got one without "
                f"{', '.join(foreign[:4])}; it has {', '.join(list(present)[:4]) or 'no arrays'}; "
                "find the layers of the tree that is trained."
            )
        if broken:
            raise ValueError(
                f"expected all parameters of a layer or none, got a part of {'; '.join(broken)}: a "
                "layer's parameters are one block of curvature; mask or label them alike, or leave "
                "the layer out by layers.select."
            )
        return whole

    def labels(self, tree: PyTree) -> PyTree[str]:
        """``"cg_fac"`` for each covered parameter, ``"fallback"`` for the others.

        It is for ``optax.partition``.

        Args:
          tree: the parameters, or a tree like them; some may be masked.

        Raises:
          ValueError: a block of which only a part is there; or this is another tree.

        >>> import jax.numpy as jnp, kfac
        >>> params = {"fc": {"kernel": jnp.ones((3, 2))}, "free": jnp.ones(2)}
        >>> loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p["fc"], x, path="fc").mean()
        >>> find_layers(loss_fn, params, jnp.ones((4, 3))).labels(params)
        {'fc': {'kernel': 'cg_fac'}, 'free': 'fallback'}
        """
        covered = {
            param.path for block in self.whole_blocks(tree).values() for param in block.params
        }

        def label(path: tuple, _: Any) -> str:
            return "cg_fac" if path_name(path) in covered else "fallback"

        return jax.tree_util.tree_map_with_path(label, tree)

    def __str__(self) -> str:
        owner = self.block_of
        # Layers that differ only in the numbers of their paths share a row.
        groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for path, shape in self.shapes.items():
            key = _starred(path), shape, _starred(self._served_by(path, owner))
            groups.setdefault(key, []).append(path)
        rows = [("parameter", "shape", "block")]
        for (path, shape, text), paths in groups.items():
            if len(paths) == 1:
                path, text = paths[0], self._served_by(paths[0], owner)
            else:
                path = f"{path} ({len(paths)}×)"
            rows.append((path, "×".join(map(str, shape)) or "scalar", text))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{path:<{widths[0]}}  {shape:>{widths[1]}}  {text}" for path, shape, text in rows]
        return "\n".join(
            [
                *lines,
                f"{len(self.blocks)} blocks cover {100 * self.coverage:.1f} % of the parameters",
            ]
        )

    def _served_by(self, path: str, owner: dict[str, str]) -> str:
        if path not in owner:
            name = next((n for n in self.skipped if is_inside(path, n.split("#")[0])), None)
            return f"fallback ({self.skipped[name] if name else 'no layer met'})"
        block = self.blocks[owner[path]]
        kinds = dict.fromkeys(use.layer.kind for use in block.uses)
        return f"{' + '.join(kinds)}, {block.name}" + (
            f" × {block.lanes}" if block.lanes > 1 else ""
        )


def _starred(text: str) -> str:
    """The text with stars in place of path components that are numbers."""
    return re.sub(r"(^|/)\d+(?=/|$)", r"\1*", text)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["captured", "fresh"],
    meta_fields=["layers", "num_examples", "fisher"],
)
@dataclasses.dataclass(frozen=True)
class Curvature:
    """What the optimizer needs beside the gradient; made by ``value_grad_and_curvature``.

    Attributes:
      captured: tap name → (layer inputs, cotangents of its output with a leading axis for the
        columns). Cotangents are those of each example's own loss, not of the mean.
      fresh: None where every step computes curvature, else whether this one did (see ``refresh``);
        if it did not, the cotangents are zeros.
      layers: the layers of this trace.
      num_examples: N.
      fisher: which Fisher matrix the cotangents stand for.
    """

    captured: dict[str, tuple[PyTree[Array], Array]]
    fresh: Bool[Array, ""] | None
    layers: Layers
    num_examples: int
    fisher: str


def find_layers(
    loss_fn: Callable, params: PyTree, *args: Any, batch_size: int | None = None
) -> Layers:
    """Traces ``loss_fn(params, *args)`` and returns the layers that can be captured.

    It is not run. Captured is what curvature is made of.

    Args:
      loss_fn: as for ``value_grad_and_curvature``.
      params: the tree that will be differentiated; arrays or ``jax.ShapeDtypeStruct``.
      *args: the loss function's further arguments, likewise.
      batch_size: number of examples; by default the length of the first array in ``args``.

    Returns:
      The layers; ``print`` shows for each parameter its block or its fallback, and the share
      covered.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, "scale": jnp.ones(())}
    >>> loss_fn = lambda p, x: (p["scale"] * kfac.tap(kfac.Dense(), p["fc"], x, path="fc")).mean()
    >>> print(find_layers(loss_fn, params, jnp.ones((4, 3))))
    parameter   shape  block
    fc/bias         2  dense, fc
    fc/kernel     3×2  dense, fc
    scale      scalar  fallback (no layer met)
    1 blocks cover 88.9 % of the parameters
    """
    taps = record_taps(loss_fn, params, args)
    return _layers(taps, params, _count_examples(args, batch_size))


def value_grad_and_curvature(
    loss_fn: Callable,
    *,
    fisher: str = "mc",
    likelihood: str | Likelihood = "categorical",
    outputs: Callable[[Any], Array] | None = None,
    has_aux: bool = False,
    num_samples: int = 1,
    batch_size: int | None = None,
) -> Callable:
    """Like ``jax.value_and_grad``, with the curvature of every layer beside the gradient.

    The loss must be the mean over examples (and positions) of the negative log-likelihood, plus
    anything that does not depend on the data. The gradient is that of ``jax.value_and_grad``; the
    curvature costs one more pull-back over the same forward pass, without weight gradients (none
    for ``"empirical"``).

    Args:
      loss_fn: ``loss_fn(params, *args) → loss`` or ``(loss, aux)``.
      fisher: ``"empirical"``: cotangents of the loss itself, the paper's choice; ``"mc"``: of the
        loss under labels drawn from the model, an unbiased estimate of the Fisher matrix;
        ``"ggn"``: the generalised Gauss-Newton matrix by random signs; ``"enumerate"``: the same
        exactly, one pull-back per class.
      likelihood: what ``loss_fn`` averages the negative logarithm of: ``"categorical"``,
        ``"bernoulli"``, ``"gaussian"`` or a ``kfac.Likelihood``. Not used by ``"empirical"``.
      outputs: aux → the likelihood's outputs (logits) of shape (batch, *positions, classes), which
        ``loss_fn`` must return in its aux for every Fisher matrix but ``"empirical"``; by default
        aux itself.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      num_samples: draws per example, for ``"mc"`` and ``"ggn"``.
      batch_size: number of examples; by default the length of the first array in ``args``.

    Returns:
      ``(params, *args, key=None, refresh=True) → (value, grads, Curvature)`` where ``value`` is
      ``loss`` or ``(loss, aux)``. ``key`` feeds the draws. With ``refresh`` (a bool, traced or not)
      False the extra pull-back is left out and the curvature is marked as not fresh. What the
      pull-back needs is kept all the same: where most steps do without, ``curvature`` beside
      ``jax.grad`` takes less.

    Raises:
      ValueError: an unknown Fisher matrix or likelihood, or one that needs outputs without
        ``has_aux``.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> def loss_fn(params, x, labels):
    ...     logits = kfac.tap(kfac.Dense(), params, x, path="")
    ...     return -jnp.take_along_axis(
    ...         jax.nn.log_softmax(logits), labels[:, None], axis=1
    ...     ).mean(), logits
    >>> (loss, logits), grads, curvature = value_grad_and_curvature(loss_fn, has_aux=True)(
    ...     params, jnp.ones((4, 3)), jnp.array([0, 1, 1, 1]), key=jax.random.key(0)
    ... )
    >>> grads["kernel"].shape, curvature.num_examples
    ((3, 2), 4)
    """
    _check_fisher(fisher, has_aux)
    likelihood = get_likelihood(likelihood)

    def function(
        params: PyTree, *args: Any, key: Key | None = None, refresh: bool | Array = True
    ) -> tuple:
        taps = record_taps(loss_fn, params, args)
        slots = {name: tap.slot() for name, tap in taps.items()}
        inner = tapped(loss_fn, taps)

        def forward(params: PyTree, slots: PyTree) -> tuple[tuple[Array, Any], Any]:
            result = inner(params, slots, *args)
            loss, aux = result if has_aux else (result, None)
            z = () if fisher == "empirical" else aux if outputs is None else outputs(aux)
            return (loss, z), aux

        # One forward pass and several pull-backs of it: of the loss, and of the columns
        # through the same outputs.
        (loss, z), pullback, aux = jax.vjp(forward, params, slots, has_aux=True)
        examples = _count_examples(args, batch_size)
        ones, fresh = jnp.ones_like(loss), None if refresh is True else jnp.asarray(refresh)
        if fisher == "empirical":
            grads, captured = pullback((ones, ()))
            # The loss is a mean: its cotangents are those of single examples over N, and
            # γ would be off by N².
            captured = {name: (x, g[None] * examples) for name, (x, g) in captured.items()}
        else:
            grads, captured = pullback((ones, jnp.zeros_like(z)))
            # Labels that the model draws are data, for whoever differentiates through
            # this call.
            columns = output_cotangents(
                fisher, likelihood, jax.lax.stop_gradient(z), key, num_samples
            ).astype(z.dtype)

            def pull(column: Array) -> dict[str, Array]:
                # The parameters' share of this pull-back is dropped, and XLA never
                # computes it.
                _, slots = pullback((jnp.zeros_like(loss), column))
                return {name: g for name, (_, g) in slots.items()}

            cotangents = _pull_columns(pull, columns, fresh)
            captured = {name: (x, cotangents[name]) for name, (x, _) in captured.items()}
        curvature = Curvature(captured, fresh, _layers(taps, params, examples), examples, fisher)
        return ((loss, aux) if has_aux else loss), grads, curvature

    return function


def curvature(loss_fn: Callable, **options: Any) -> Callable:
    """The curvature alone, of examples of its own.

    A sample of the batch is enough for factors that are averaged over steps.

    What it costs is a forward and a backward pass over the sample, without weight gradients, and
    nothing of it is held while the gradient of the whole batch is computed.

    Args:
      loss_fn, **options: as for ``value_grad_and_curvature``.

    Returns:
      ``(params, *args, key=None, refresh=True) → Curvature``. With ``refresh`` False nothing is
      computed and the curvature is marked as not fresh.

    Raises:
      ValueError: as ``value_grad_and_curvature`` does.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> examples = jnp.ones((8, 3))
    >>> kfac.curvature(loss_fn, fisher="empirical")(params, examples[::4]).num_examples
    2
    """
    with_gradient = value_grad_and_curvature(loss_fn, **options)

    def function(
        params: PyTree, *args: Any, key: Key | None = None, refresh: bool | Array = True
    ) -> Curvature:
        def compute() -> Curvature:
            return with_gradient(params, *args, key=key)[2]

        if refresh is True:
            return compute()
        like, fresh = jax.eval_shape(compute), jnp.asarray(refresh)
        captured = jax.lax.cond(
            fresh, lambda: compute().captured, lambda: optax.tree.zeros_like(like.captured)
        )
        return dataclasses.replace(like, captured=captured, fresh=fresh)

    return function


def _check_fisher(fisher: str, has_aux: bool) -> None:
    """Raises ValueError unless there is such a Fisher matrix, and what it is made of."""
    if fisher not in FISHERS:
        raise ValueError(f"expected fisher to be one of {', '.join(FISHERS)}, got {fisher!r}.")
    if fisher != "empirical" and not has_aux:
        raise ValueError(
            f"fisher={fisher!r} needs the network's outputs: expected has_aux=True and a loss_fn "
            "returning (loss, outputs), got has_aux=False; return them, or use fisher='empirical'."
        )


def _pull_columns(
    pull: Callable, columns: Float[Array, "column ..."], fresh: Bool[Array, ""] | None
) -> dict:
    """``pull`` of every column, or zeros where ``fresh`` is False."""

    def compute() -> dict:
        # Without vmap, under which custom rules and kernels take their batched forms.
        if len(columns) == 1:
            return jax.tree.map(lambda g: g[None], pull(columns[0]))
        return jax.vmap(pull)(columns)

    if fresh is None:
        return compute()
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), jax.eval_shape(compute))
    return jax.lax.cond(fresh, compute, lambda: zeros)


def _layers(taps: dict[str, Tap], params: PyTree, num_examples: int) -> Layers:
    shapes = {path: jnp.shape(leaf) for path, leaf in flatten(params).items()}
    blocks, skipped = find_blocks(taps, shapes, num_examples)
    return Layers(blocks, skipped, shapes)


def _count_examples(args: tuple, batch_size: int | None) -> int:
    if batch_size is not None:
        return batch_size
    for leaf in jax.tree.leaves(args):
        if len(getattr(leaf, "shape", ())) > 0:
            return leaf.shape[0]
    raise ValueError(
        "expected an array with an example axis among the loss function's arguments, got none; "
        "pass batch_size=."
    )


def concatenate_curvature(parts: Sequence[Curvature]) -> Curvature:
    """The curvature of several microbatches as one: what their union would have given.

    Args:
      parts: curvature of the same loss function and parameters on different examples.

    Raises:
      ValueError: parts of different layers, shapes or Fisher matrices.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")
    >>> parts = [function(params, jnp.ones((n, 3)))[2] for n in (2, 4)]
    >>> concatenate_curvature(parts).num_examples
    6
    """
    first = parts[0]
    names = [list(part.layers.blocks) for part in parts]
    if any(n != names[0] for n in names) or len({part.fisher for part in parts}) > 1:
        raise ValueError(
            "expected curvature of the same layers and Fisher matrix in all parts; use one loss "
            "function."
        )
    captured = {}
    for block in first.layers.blocks.values():
        for use in block.uses:
            # Axis of the examples in captured arrays: their frames that number lanes come
            # on top of the output's axes.
            axis = use.captured_example_axis
            pairs = [part.captured[use.name] for part in parts]
            captured[use.name] = (
                concatenated((x for x, _ in pairs), axis),
                jnp.concatenate([g for _, g in pairs], axis + 1),  # behind the axis of the columns
            )
    total = sum(part.num_examples for part in parts)
    layers = Layers(
        [b.with_examples(total) for b in first.layers.blocks.values()],
        first.layers.skipped,
        first.layers.shapes,
    )
    return Curvature(captured, first.fresh, layers, total, first.fisher)

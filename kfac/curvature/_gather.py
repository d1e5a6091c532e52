"""One call that gives loss, gradient and the captured curvature of every layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac._arrays import axes_of, concatenated, mean_over, names_of, own_along
from kfac.curvature import _fisher as fishers
from kfac.curvature._coverage import Layers, count_examples, layers_of, leading_size
from kfac.curvature._fisher import Likelihood, Weights
from kfac.curvature._tracing import record_taps, tapped, without_modules

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Key, PyTree

    from kfac._arrays import AxisName


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["captured", "fresh", "weights"],
    meta_fields=["layers", "num_examples", "fisher", "axis_name"],
)
@dataclasses.dataclass(frozen=True)
class Curvature:
    """What the optimizer needs beside the gradient; made by ``value_grad_and_curvature``.

    Attributes:
      captured: tap name → (layer inputs, cotangents of its output with a leading axis for the
        columns), of each example's own loss. ``Deferred`` where they may not be needed.
      fresh: None where every step computes curvature, else whether this one did; if it did not,
        the cotangents are zeros.
    """

    captured: Mapping[str, tuple[PyTree[Array], Array]]
    fresh: Bool[Array, ""] | None
    layers: Layers  # of this trace
    num_examples: int
    fisher: str
    weights: Weights | None = None  # of the losses
    axis_name: AxisName = None  # manual axes along which devices have a part of the batch each

    def in_branch(self) -> Curvature:
        """This curvature where it is known to be fresh."""
        if not isinstance(self.captured, Deferred):
            return self
        return dataclasses.replace(self, captured=self.captured.capture(True))

    def at_every_step(self, inputs_of: Container[str] = ()) -> Curvature:
        """This curvature with arrays for steps of both kinds, see ``Deferred.at_every_step``."""
        if not isinstance(self.captured, Deferred):
            return self
        return dataclasses.replace(self, captured=self.captured.at_every_step(inputs_of))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Deferred(Mapping):
    """Captured arrays that are computed where they are asked for.

    In a branch where curvature is fresh, if that is where: no zeros are written in their place at
    the other steps. Elsewhere, and as a tree, they are the mapping of ``at_every_step``.
    """

    capture: Callable[[bool], dict]  # refresh → the arrays; where it is False, cotangents are 0
    fresh: Bool[Array, ""]  # whether they are wanted

    def at_every_step(self, inputs_of: Container[str] = ()) -> dict:
        """The arrays where they are wanted, else zeros but for the inputs of these taps."""

        def inputs() -> dict:  # which takes a forward pass
            return {
                name: pair if name in inputs_of else optax.tree.zeros_like(pair)
                for name, pair in self.capture(False).items()
            }

        return jax.lax.cond(self.fresh, lambda: self.capture(True), inputs)

    def __getitem__(self, name: str) -> tuple[PyTree[Array], Array]:
        return self.at_every_step()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(jax.eval_shape(lambda: self.capture(True)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def tree_flatten(self) -> tuple[tuple, None]:
        return (self.at_every_step(),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> Any:
        return children[0]


def value_grad_and_curvature(
    loss_fn: Callable,
    *,
    fisher: str = "mc",
    likelihood: str | Likelihood = "categorical",
    outputs: Callable[[Any], Array] | None = None,
    weights: Callable[[Any], Any] | None = None,
    has_aux: bool = False,
    num_samples: int = 1,
    batch_size: int | None = None,
    axis_name: AxisName = None,
) -> Callable:
    """Like ``jax.value_and_grad``, with the curvature of every layer beside the gradient.

    The loss must be the mean over examples (and positions) of the negative log-likelihood, weighted
    if ``weights`` are given, plus anything that does not depend on the data. Curvature costs one
    more pull-back over the same forward pass, without weight gradients; none if empirical.

    Args:
      loss_fn: ``loss_fn(params, *args) → loss`` or ``(loss, aux)``. Flax NNX modules are changed as
        under ``nnx.value_and_grad``, and the gradients of one are an ``nnx.State``.
      fisher: whose cotangents: ``"empirical"``: the loss's, as in the paper; ``"mc"``: those under
        labels drawn from the model, an unbiased estimate of the Fisher matrix; ``"ggn"``: the
        Gauss-Newton matrix by random signs; ``"enumerate"``: exactly, a pull-back per class.
      likelihood: what ``loss_fn`` averages the negative logarithm of: ``"categorical"``,
        ``"bernoulli"``, ``"gaussian"`` or a ``kfac.Likelihood``. Not used by ``"empirical"``.
      outputs: aux → the likelihood's outputs (logits), (batch, *positions, classes), of which all
        but ``"empirical"`` is made; by default aux itself.
      weights: aux → weights w of the losses ℓ, not negative, (batch, *positions), such as a mask,
        where the loss is ``jnp.average(ℓ, weights=w)``; the pair (w, T) where it is ``(w *
        ℓ).sum() / T``; None for a plain mean.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      num_samples: draws per example, for ``"mc"`` and ``"ggn"``.
      batch_size: number of examples; by default the leading size of the outputs, or of all arrays
        in ``args`` where ``"empirical"`` is given no ``outputs``.
      axis_name: under ``jax.shard_map`` or ``jax.pmap``, the axes along which each device has a
        part of the batch, of equal size, that ``loss_fn`` is of. Value, gradient and curvature are
        then means over the axes: all devices take one step.

    Returns:
      ``(params, *args, key=None, refresh=True) → (value, grads, Curvature)`` where ``value`` is
      ``loss`` or ``(loss, aux)``. ``key`` feeds the draws. With ``refresh`` (a bool, traced or not)
      False the extra pull-back is left out and the curvature is not fresh. What it needs is kept
      all the same: where most steps do without, ``curvature`` beside ``jax.grad`` takes less.

    Raises:
      ValueError: an unknown Fisher matrix or likelihood, or one that needs outputs without
        ``has_aux``; a loss that is no number; outputs of another shape; a number of examples that
        arguments and outputs do not agree on; manual axes that ``axis_name`` leaves out.

    >>> import jax, jax.numpy as jnp, kfac
    >>> def loss_fn(params, x):
    ...     logits = kfac.tap(kfac.Dense(), params, x, path="")
    ...     return -jax.nn.log_softmax(logits)[:, 0].mean(), logits
    >>> function = kfac.value_grad_and_curvature(loss_fn, has_aux=True)
    >>> params, x = {"kernel": jnp.ones((3, 2))}, jnp.ones((4, 3))
    >>> (loss, logits), grads, curvature = function(params, x, key=jax.random.key(0))
    """
    options = {"fisher": fisher, "likelihood": likelihood, "outputs": outputs}
    options |= {"num_samples": num_samples, "batch_size": batch_size}
    options |= {"weights": weights, "axis_name": axis_name}
    _check(fisher, has_aux, weights)
    likelihood = fishers.get_likelihood(likelihood)

    def function(
        params: PyTree, *args: Any, key: Key | None = None, refresh: bool | Array = True
    ) -> tuple:
        if (of_arrays := without_modules(loss_fn, params, args, has_aux)) is not None:
            inner = value_grad_and_curvature(of_arrays.loss_fn, **_behind_state(options))
            (loss, (aux, state)), grads, found = inner(
                of_arrays.params, *of_arrays.args, key=key, refresh=refresh
            )
            of_arrays.write(state)
            return ((loss, aux) if has_aux else loss), grads, found
        axes = _checked_axes(axis_name)
        params = own_along(axes, params)
        size = leading_size(args, batch_size)
        if size is None and has_aux and (outputs is not None or fisher != "empirical"):
            size = _leading_size_of_outputs(loss_fn, params, args, outputs)
        taps = record_taps(loss_fn, params, args, size)
        slots = {name: tap.slot() for name, tap in taps.items() if tap.captured}
        inner = tapped(loss_fn, taps)

        def forward(params: PyTree, slots: PyTree) -> tuple[tuple[Array, Any], Any]:
            result = inner(params, slots, *args)
            loss, aux = result if has_aux else (result, None)
            if fisher == "empirical":
                return (loss, ()), aux
            return (loss, fishers.require_outputs(outputs(aux) if outputs else aux)), aux

        # One forward pass and several pull-backs of it: of the loss, and of the columns.
        slots = own_along(axes, slots)
        (loss, z), pullback, aux = jax.vjp(forward, params, slots, has_aux=True)
        if jax.tree.map(jnp.shape, loss) != ():
            raise ValueError(
                "expected loss_fn to return a number, with has_aux=True beside an aux, got arrays "
                f"of shape {jax.tree.map(jnp.shape, loss)}; return the mean over the examples."
            )
        of_all = z if fisher != "empirical" else outputs(aux) if outputs is not None else None
        examples = count_examples(args, batch_size, of_all)
        weighted = None if weights is None else weights(aux)
        if weighted is not None:
            weighted = fishers.read_weights(weighted, examples, loss.dtype)
        share = None if weighted is None else weighted.shares()
        layers = layers_of(taps, params, examples)
        ones = _cotangent_of_own(loss, params, axes)
        fresh = None if refresh is True else jnp.asarray(refresh)
        if fisher == "empirical":
            grads, captured = pullback((ones, ()))
            # The loss is a mean: its cotangents are those of single examples over N.
            captured = {name: (x, g[None] * examples) for name, (x, g) in captured.items()}
            if share is not None:
                # That of an example's loss times its share in the mean, where only a root is to be.
                share = share.reshape(examples, -1).sum(1)
                root = jnp.where(share > 0, jax.lax.rsqrt(jnp.where(share > 0, share, 1)), 0)
                captured = _times(captured, layers, root)
        else:
            grads, captured = pullback((ones, jnp.zeros_like(z)))
            if key is not None and axes:  # the parts of a batch are drawn for independently
                key = jax.random.fold_in(key, jax.lax.axis_index(axes))
            # Labels that the model draws are data, for whoever differentiates through this call.
            columns = fishers.output_cotangents(
                fisher, likelihood, jax.lax.stop_gradient(z), key, num_samples, share
            ).astype(z.dtype)

            def pull(column: Array) -> dict[str, Array]:
                # The parameters' share of this pull-back is dropped, and XLA never computes it.
                _, slots = pullback((jnp.zeros_like(loss), column))
                return {name: g for name, (_, g) in slots.items()}

            cotangents = _pull_columns(pull, columns, fresh)
            captured = {name: (x, cotangents[name]) for name, (x, _) in captured.items()}
        loss, grads = mean_over(axis_name, (loss, grads))
        found = Curvature(captured, fresh, layers, examples, fisher, weighted, axis_name)
        return ((loss, aux) if has_aux else loss), grads, found

    return function


def _leading_size_of_outputs(
    loss_fn: Callable, params: PyTree, args: tuple, outputs: Callable[[Any], Array] | None
) -> int | None:
    of_aux = outputs or (lambda aux: aux)
    z = jax.eval_shape(lambda params: of_aux(loss_fn(params, *args)[1]), params)
    return z.shape[0] if getattr(z, "shape", ()) else None


def _checked_axes(axis_name: AxisName) -> tuple[str, ...]:
    axes = names_of(axis_name)
    others = [n for n in jax.sharding.get_abstract_mesh().manual_axes if n not in axes]
    if others:
        raise ValueError(
            "expected axis_name= to name the axes of the shard_map or pmap around, got "
            f"{axis_name!r} under {', '.join(map(repr, others))}: each device would take a step of "
            "its own; pass it, or leave it to jax.jit to divide a batch that has a NamedSharding."
        )
    return axes


def _cotangent_of_own(loss: Array, params: PyTree, axes: tuple[str, ...]) -> Array:
    """The cotangent of a loss with which each device pulls back what its own part gives."""
    accounted = any(axes_of(leaf) for leaf in jax.tree.leaves(params))
    # Where JAX knows that it is a mean over the devices already, a device's share is 1 over their
    # number; where it does not, it pulls back as if it were no mean.
    reduced = tuple([n for n in axes if accounted and n not in axes_of(loss)])
    ones = jnp.ones_like(loss)
    return ones * jax.lax.axis_size(reduced) if reduced else ones


def _times(captured: dict, layers: Layers, factor: Float[Array, " example"]) -> dict:
    scaled = dict(captured)
    for block in layers.blocks.values():
        for use in block.uses:
            x, g = captured[use.name]
            axis = use.captured_example_axis + 1  # behind the axis of the columns
            rows = jnp.repeat(factor, g.shape[axis] // len(factor))
            scaled[use.name] = (x, g * rows.reshape(-1, *[1] * (g.ndim - axis - 1)).astype(g.dtype))
    return scaled


def curvature(loss_fn: Callable, **options: Any) -> Callable:
    """The curvature alone, of a sample of the batch: enough for factors that are averaged.

    It costs a forward and a backward pass over the sample, without weight gradients, of which
    nothing is held while the gradient of the whole batch is computed.

    Args:
      loss_fn, **options: as for ``value_grad_and_curvature``, and so is what is raised.

    Returns:
      ``(params, *args, key=None, refresh=True) → Curvature``. With ``refresh`` (a bool, traced or
      not) False it is not fresh, and nothing is computed but the inputs of layers whose Jacobian
      the optimizer takes at every step.

    >>> import jax.numpy as jnp, kfac
    >>> params, x = {"kernel": jnp.ones((3, 2))}, jnp.ones((8, 3))
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> kfac.curvature(loss_fn, fisher="empirical")(params, x[::4]).num_examples
    2
    """
    with_gradient = value_grad_and_curvature(loss_fn, **options)

    def function(
        params: PyTree, *args: Any, key: Key | None = None, refresh: bool | Array = True
    ) -> Curvature:
        has_aux = options.get("has_aux", False)
        if (of_arrays := without_modules(loss_fn, params, args, has_aux)) is not None:
            # The state is left as it is: the gradient's pass changes it.
            alone = curvature(of_arrays.loss_fn, **_behind_state(options))
            return alone(of_arrays.params, *of_arrays.args, key=key, refresh=refresh)

        def capture(refresh: bool) -> Curvature:
            return with_gradient(params, *args, key=key, refresh=refresh)[2]

        if refresh is True:
            return capture(True)
        fresh = jnp.asarray(refresh)
        captured = Deferred(lambda refresh: dict(capture(refresh).captured), fresh)
        shapes = jax.eval_shape(functools.partial(capture, True))
        weights = None if shapes.weights is None else capture(False).weights
        return dataclasses.replace(shapes, captured=captured, fresh=fresh, weights=weights)

    return function


def _behind_state(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a loss function whose aux comes with the state of modules."""
    outputs, weights = options.get("outputs") or (lambda aux: aux), options.get("weights")
    behind = {"has_aux": True, "outputs": lambda aux: outputs(aux[0])}
    return options | behind | {"weights": weights and (lambda aux: weights(aux[0]))}


def _check(fisher: str, has_aux: bool, weights: Callable | None) -> None:
    if fisher not in fishers.FISHERS:
        raise ValueError(
            f"expected fisher to be one of {', '.join(fishers.FISHERS)}, got {fisher!r}."
        )
    if fisher != "empirical" and not has_aux:
        raise ValueError(
            f"fisher={fisher!r} needs the network's outputs: expected has_aux=True and a loss_fn "
            "returning (loss, outputs), got has_aux=False; return them, or use fisher='empirical'."
        )
    if weights is not None and not has_aux:
        raise ValueError(
            "expected has_aux=True and a loss_fn returning (loss, aux) that weights= finds them "
            "in, got has_aux=False; return them."
        )


def _pull_columns(
    pull: Callable, columns: Float[Array, "column ..."], fresh: Bool[Array, ""] | None
) -> dict:
    def compute() -> dict:
        # Without vmap, under which custom rules and kernels take their batched forms.
        if len(columns) == 1:
            return jax.tree.map(lambda g: g[None], pull(columns[0]))
        return jax.vmap(pull)(columns)

    if fresh is None:
        return compute()
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), jax.eval_shape(compute))
    zeros = own_along(axes_of(columns), zeros)
    return jax.lax.cond(fresh, compute, lambda: zeros)


def concatenate_curvature(parts: Sequence[Curvature]) -> Curvature:
    """The curvature of several microbatches, of one loss function, as that of their union.

    Of weighted losses: of the one whose T is the sum of theirs (see ``value_grad_and_curvature``).

    Raises:
      ValueError: parts of different layers, shapes or Fisher matrices.

    >>> import jax.numpy as jnp, kfac
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> function = kfac.curvature(loss_fn, fisher="empirical")
    >>> parts = [function({"kernel": jnp.ones((3, 2))}, jnp.ones((n, 3))) for n in (2, 4)]
    >>> concatenate_curvature(parts).num_examples
    6
    """
    parts = [part.at_every_step() for part in parts]
    first = parts[0]
    names = [list(part.layers.blocks) for part in parts]
    if any(n != names[0] for n in names) or len({part.fisher for part in parts}) > 1:
        raise ValueError(
            "expected curvature of the same layers and Fisher matrix in all parts; use one loss "
            "function."
        )
    examples = sum([part.num_examples for part in parts])
    weights = None
    if of_parts := [part.weights for part in parts if part.weights is not None]:
        positions, totals = zip(*of_parts, strict=True)
        weights = Weights(jnp.concatenate(positions), jnp.stack(totals).sum())
        parts = [_within(*pair, weights) for pair in zip(parts, of_parts, strict=True)]
    captured = {}
    for use in [use for block in first.layers.blocks.values() for use in block.uses]:
        axis = use.captured_example_axis
        pairs = [part.captured[use.name] for part in parts]
        captured[use.name] = (
            concatenated((x for x, _ in pairs), axis),
            jnp.concatenate([g for _, g in pairs], axis + 1),  # behind the axis of the columns
        )
    blocks = {n: block.with_examples(examples) for n, block in first.layers.blocks.items()}
    whole = {"layers": dataclasses.replace(first.layers, blocks=blocks), "num_examples": examples}
    return dataclasses.replace(first, captured=captured, weights=weights, **whole)


def _within(part: Curvature, own: Weights, whole: Weights) -> Curvature:
    """A part of a weighted batch, whose positions have other shares in the mean of all of it."""
    size = len(whole.positions) / part.num_examples
    root = jnp.sqrt(size * own.total / jnp.where(whole.total > 0, whole.total, 1))
    captured = {n: (x, g * root.astype(g.dtype)) for n, (x, g) in part.captured.items()}
    return dataclasses.replace(part, captured=captured)

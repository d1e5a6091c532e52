"""The truth of the tests here: one gradient per example, by JAX, on batches of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kfac
from kfac._arrays import path_name
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems


def normal(seed, *shape):
    """Normal numbers in float64, inside and outside of ``jax.enable_x64``."""
    with jax.enable_x64(True):
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def flatten(tree):
    """{path: array}."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


WIDTH = 4
F64 = {"param_dtype": jnp.float64}  # of Flax's layers


def attention_in_float64(query, key, value, **unused):
    """Flax's own softmax runs in float32."""
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def close(found, expected, rtol=1e-7, atol=0.0):
    """Asserts that the arrays of two trees are near each other."""
    equal = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(equal, found, expected)


def cross_entropy(logits, labels):
    """Mean cross-entropy, and the logits as aux."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1).mean(), logits


def per_example_gradients(loss_fn, params, x, y):
    """{path: (N, *shape)} of the loss of each example alone."""
    one = lambda pair: jax.grad(loss_fn, has_aux=True)(params, pair[0][None], pair[1][None])[0]
    return flatten(jax.lax.map(one, (x, y)))


def dense_fisher(block, gradients):
    """(lane, size, size): Σ_n u_n u_nᵀ / N of the block's own parameters, in the order of
    ``block.params``."""
    rows = []
    for param in block.params:
        lanes = jax.vmap(param.to_lanes)(gradients[param.path])
        rows.append(lanes.reshape(*lanes.shape[:2], -1))
    u = jnp.concatenate(rows, axis=2)
    return jnp.einsum("nlp,nlq->lpq", u, u) / len(u)


def system_of(name, form, curvature, params):
    """The system of one block, with factors of this batch alone where the form has them."""
    factors = {}
    if form in ("kron", "factors"):
        block = curvature.layers.blocks[name]
        factors[name] = systems.new_factors(
            block, curvature, systems.lanes_of(block, flatten(params)), form
        )
    (system,) = systems.build(curvature, flatten(params), {name: form}, factors)
    return system


def matrices(loss_fn, params, x, y, requests, *, key=None, **options):
    """The dense matrices of requested blocks, compiled together.

    Args:
      loss_fn: ``(params, x, y) → (loss, aux)``.
      requests: pairs of block name and form.
      key, **options: of ``value_grad_and_curvature``, which is given ``fisher="empirical"`` by
        default.

    Returns:
      The matrices (lane, size, size) in the order of the requests, in the order of
      ``block.params``; and the curvature.
    """
    function = kfac.value_grad_and_curvature(
        loss_fn, has_aux=True, **{"fisher": "empirical", **options}
    )

    def compute(params, x, y):
        curvature = function(params, x, y, key=key)[2]
        return [
            matrix_of(system_of(name, form, curvature, params)) for name, form in requests
        ], curvature

    found, curvature = jax.jit(compute)(params, x, y)
    return [np.asarray(m) for m in found], curvature


def matrix_of(system):
    """The dense matrix of a system's products, in the order of ``block.params``."""
    return dense_matrix(system.product, system.params)


def dense_matrix(matvec, like):
    """The matrix of ``matvec`` for every lane, from one product per unit vector."""
    flat, unflatten = solver.lane_flatten(like)

    def column(unit):
        return solver.lane_flatten(matvec(unflatten(jnp.broadcast_to(unit, flat.shape))))[0]

    return jnp.moveaxis(jax.lax.map(column, jnp.eye(flat.shape[1], dtype=flat.dtype)), 0, 2)


def check_exact_blocks(
    loss_fn, params, x, y, *, rtol=1e-11, blocks=None, traces=False, grad_rtol=1e-12
):
    """Asserts that taps leave the gradient alone and that every block's exact product is the dense
    Fisher block.

    Args:
      loss_fn: ``(params, x, y) → (loss, aux)``, a mean over examples that act independently.
      blocks: name → lanes of the blocks that must have been found, or None.
      traces: compare the traces too.
      grad_rtol: XLA may order sums differently with and without taps.

    Returns:
      The layers.
    """
    found = {}

    def everything(params, x, y):
        (loss, _), grads, curvature = kfac.value_grad_and_curvature(
            loss_fn, fisher="empirical", has_aux=True
        )(params, x, y)
        found["layers"] = curvature.layers
        gradients = per_example_gradients(loss_fn, params, x, y)
        pairs = {}
        for name, block in curvature.layers.blocks.items():
            (system,) = systems.build(curvature, flatten(params), {name: "exact"})
            trace = system.trace(jax.random.key(0)) if traces else None
            pairs[name] = (matrix_of(system), dense_fisher(block, gradients), trace)
        return loss, grads, pairs

    loss, grads, pairs = jax.jit(everything)(params, x, y)
    expected_loss, expected = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, x, y)[0]))(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-14)
    equal = functools.partial(np.testing.assert_allclose, rtol=grad_rtol, atol=0)
    jax.tree.map(equal, grads, expected)
    layers = found["layers"]
    if blocks is not None:
        assert {name: block.lanes for name, block in layers.blocks.items()} == blocks
    assert pairs
    for name, (product, dense, trace) in pairs.items():
        scale = np.abs(dense).max()
        assert scale > 0, f"{name} has no curvature to compare"
        np.testing.assert_allclose(product, dense, rtol=0, atol=rtol * scale, err_msg=name)
        if traces:
            np.testing.assert_allclose(
                trace, np.trace(dense, axis1=1, axis2=2), rtol=10 * rtol, err_msg=name
            )
    return layers

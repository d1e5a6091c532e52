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


DENSE = kfac.Dense()


def tap(params, x, name, layer=DENSE):
    """A tapped layer whose parameters stand under its name."""
    return kfac.tap(layer, params[name], x, path=name)


def empirical(loss_fn, **options):
    """``value_grad_and_curvature`` with aux, of the empirical Fisher matrix by default."""
    options = {"fisher": "empirical", "has_aux": True} | options
    return kfac.value_grad_and_curvature(loss_fn, **options)


def close(found, expected, rtol=1e-7, atol=0.0):
    """Asserts that the arrays of two trees are near each other."""
    equal = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(equal, found, expected)


def random(shapes):
    """Normal numbers for a tree of shapes, each leaf with a seed of its own."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    return jax.tree.unflatten(treedef, [normal(i, *shape) for i, shape in enumerate(leaves)])


def losses(logits, labels):
    """Cross-entropies."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]


def cross_entropy(logits, labels):
    """Mean cross-entropy, and the logits as aux."""
    return losses(logits, labels).mean(), logits


def dense_loss(params, x, labels, layer=DENSE):
    """Two layers on tokens, averaged."""
    x = jnp.tanh(tap(params, x, "a", layer))
    return cross_entropy(tap(params, x, "b").mean(1), labels)


DENSE_SHAPES = {"a": {"kernel": (3, 4), "bias": (4,)}, "b": {"kernel": (4, 3)}}


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


def matrices(requests, loss_fn, params, *args, key=None, **options):
    """The dense matrices (lane, size, size) of pairs of block name and form, in the order of
    ``block.params``, compiled together; and the curvature."""
    function = empirical(loss_fn, **options)

    @jax.jit
    def compute(params, *args):
        *_, curvature = function(params, *args, key=key)
        systems = [system_of(name, form, curvature, params) for name, form in requests]
        return [matrix_of(system) for system in systems], curvature

    found, curvature = compute(params, *args)
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


def check_exact_blocks(loss_fn, params, x, y, *, rtol=1e-11, blocks=None):
    """Asserts that taps leave the gradient alone and that every block's exact product is the dense
    Fisher block of a mean over examples that act independently, and so its trace; that these are
    the blocks, with so many lanes each, where they are given; returns the layers."""

    @jax.jit
    def compute(params, x, y):
        (loss, _), grads, curvature = empirical(loss_fn)(params, x, y)
        gradients = per_example_gradients(loss_fn, params, x, y)
        found = {}
        for name, block in curvature.layers.blocks.items():
            system = system_of(name, "exact", curvature, params)
            trace = system.trace(jax.random.key(0))
            found[name] = matrix_of(system), trace, dense_fisher(block, gradients)
        return (loss, grads), curvature, found

    values, curvature, found = compute(params, x, y)
    expected = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, x, y)[0]))(params)
    close(values, expected, rtol=1e-12)  # XLA may order sums differently with and without taps
    layers = curvature.layers
    if blocks is not None:
        assert {name: block.lanes for name, block in layers.blocks.items()} == blocks
    assert found
    for name, (product, trace, dense) in found.items():
        scale = np.abs(dense).max()
        assert scale > 0, f"{name} has no curvature to compare"
        np.testing.assert_allclose(product, dense, rtol=0, atol=rtol * scale, err_msg=name)
        np.testing.assert_allclose(
            trace, np.trace(dense, axis1=1, axis2=2), rtol=10 * rtol, err_msg=name
        )
    return layers

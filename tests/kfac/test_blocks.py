"""Products of every kind of layer against dense matrices made of per-example gradients or Kronecker
products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from adder_flax import ops
from kfac.curvature import _blocks, _layers
from kfac.solve import _systems as systems
from tests.kfac.reference import (
    DENSE_SHAPES,
    check_exact_blocks,
    close,
    cross_entropy,
    dense_fisher,
    dense_loss,
    empirical,
    flatten,
    matrices,
    matrix_of,
    normal,
    per_example_gradients,
    random,
    system_of,
    tap,
)

pytestmark = pytest.mark.usefixtures("x64")


def lookup(params, tokens):
    return params["table"][tokens]


def scale(params, x):
    return x * params["scale"] + params["bias"]


def rms_norm(params, x):
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True))
    return x * params.get("scale", 1) + params.get("bias", 0)


def convolution(params, x):
    return jax.lax.conv_general_dilated(
        x, params["kernel"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )


def l1(params, x, rule):
    return ops.adder_matmul(x, params["kernel"], w_gradient=rule)


def l1_pushforward(params, x, v, rule):
    return ops.adder_matmul_jvp(x, params["kernel"], None, v["kernel"], w_gradient=rule)


L1_FULL = kfac.L1Dense(distances=ops.adder_matmul)
L1_SIGN = kfac.Generic(l1, (("rule", "sign"),), l1_pushforward)
L1_HARDTANH = kfac.Generic(l1, (("rule", "hardtanh"),), l1_pushforward)


def every_layer(params, tokens, labels):
    """A network of tokens with one layer of each kind, and a layer used twice."""
    x = tap(params, tokens, "embedding", kfac.Generic(lookup))
    x = tap(params, x, "dense")
    x = tap(params, jnp.tanh(x), "scale", kfac.Generic(scale))
    x = tap(params, jnp.tanh(x), "norm", kfac.Scale(fn=rms_norm))
    x = tap(params, x, "conv", kfac.Generic(convolution))
    for _ in range(2):
        x = jnp.tanh(tap(params, x, "tied"))
    x = x.reshape(-1, 4)
    for name, layer in (("l1_full", L1_FULL), ("l1_sign", L1_SIGN), ("l1_hardtanh", L1_HARDTANH)):
        x = tap(params, x, name, layer) / 4
    x = x.reshape(len(tokens), -1, 4).mean(1)
    return cross_entropy(tap(params, x, "output", kfac.Dense(transpose=True)), labels)


EVERY_PARAMS = {
    "embedding": {"table": (6, 3)},
    "dense": {"kernel": (3, 4), "bias": (4,)},
    "scale": {"scale": (4,), "bias": (4,)},
    "norm": {"scale": (4,), "bias": (4,)},
    "conv": {"kernel": (3, 4, 4)},
    "tied": {"kernel": (4, 4), "bias": (4,)},
    "l1_full": {"kernel": (4, 4)},
    "l1_sign": {"kernel": (4, 4)},
    "l1_hardtanh": {"kernel": (4, 4)},
    "output": {"kernel": (5, 4)},
}


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 6, (5, 6)))


def test_every_kind_of_layer_has_the_exact_fisher_block():
    blocks = dict.fromkeys(EVERY_PARAMS, 1)
    args = random(EVERY_PARAMS), TOKENS, jnp.arange(5)
    layers = check_exact_blocks(every_layer, *args, blocks=blocks)
    assert layers.coverage == 1.0
    assert len(layers.blocks["tied"].uses) == 2


@pytest.mark.parametrize("rule", ["sign", "full", "hardtanh"])
def test_the_transpose_of_the_pullback_is_the_layers_own_pushforward(rule):
    layer = kfac.Generic(l1, (("rule", rule),))  # JAX transposes the backward pass
    params, x, v = {"kernel": normal(0, 4, 3)}, normal(1, 5, 4), {"kernel": normal(2, 4, 3)}
    with ops.use_backend("reference"):
        pushed = layer.jvp(layer.linearize(params, x), v, jax.ShapeDtypeStruct((5, 3), jnp.float64))
        close(pushed, l1_pushforward(params, x, v, rule), rtol=1e-12)


EXACT, FACTORS, KRON = "exact", "factors", "kron"
LAYERS = {  # and the gradient of one token, of its input and its cotangent
    "dense": (kfac.Dense(), lambda p, a, h: {"bias": h, "kernel": np.outer(a, h)}),
    "adder": (L1_FULL, lambda p, a, h: {"bias": h, "kernel": (a[:, None] - p["kernel"]) * h}),
    "norm": (
        kfac.Scale(fn=rms_norm),
        lambda p, a, h: {"bias": h, "scale": a / np.sqrt((a**2).mean()) * h},
    ),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "roles", "num_examples", "num_tokens"),
    [
        ("adder", ["bias", "kernel"], 5, 2),
        *(("dense", ["bias", "kernel"], *sizes) for sizes in ((1, 1), (6, 1), (5, 3))),
        *(("norm", roles, 5, 2) for roles in (["scale"], ["bias"], ["bias", "scale"])),
    ],
)
def test_kron_pairs_the_inputs_and_cotangents_of_all_tokens(name, roles, num_examples, num_tokens):
    """Which for a dense layer is the Kronecker product of second moments."""
    layer, gradient = LAYERS[name]
    width = 3 if name == "norm" else 4
    shapes = {"bias": (width,), "scale": (width,), "kernel": (3, width)}
    params = random({"a": {role: shapes[role] for role in roles}, "b": {"kernel": (width, 4)}})
    x, labels = normal(3, num_examples, num_tokens, 3), jnp.arange(num_examples) % 3
    requests = [("a", form) for form in (EXACT, FACTORS, KRON)]
    loss_fn = functools.partial(dense_loss, layer=layer)
    (exact, *found), curvature = matrices(requests, loss_fn, params, x, labels)
    assert [p.path for p in curvature.layers.blocks["a"].params] == [f"a/{role}" for role in roles]
    x, own = np.asarray(x), jax.tree.map(np.asarray, params["a"])
    g = np.asarray(curvature.captured["a"][1])[0].reshape(*x.shape[:2], width)

    def of_token(a, h):
        return np.concatenate([np.ravel(gradient(own, a, h)[role]) for role in roles])

    pairs = np.stack([of_token(a, h) for a in x.reshape(-1, 3) for h in g.reshape(-1, width)])
    for matrix in found:
        close(matrix[0], pairs.T @ pairs / (x[..., 0].size * len(x)), rtol=1e-10, atol=1e-14)
    u = np.stack([sum(map(of_token, *example)) for example in zip(x, g, strict=True)])
    close(exact[0], u.T @ u / len(x), rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (kfac.Dense(), {"kernel": (3, 4), "bias": (4,)}),
        (L1_FULL, {"kernel": (3, 4), "bias": (4,)}),
        (L1_FULL, {"kernel": (3, 4)}),
        (kfac.Scale(fn=rms_norm), {"scale": (4,), "bias": (4,)}),
        (kfac.Scale(fn=rms_norm), {"scale": (4,)}),
        (kfac.Scale(fn=rms_norm), {"bias": (4,)}),
    ],
)
def test_left_factors_seen_through_the_lift(layer, shapes):
    params = random(shapes)
    lift = lambda matrix: layer.lift(params, layer.unmatrix(params, matrix))
    matrix = layer.matrix(params)
    jacobian = np.asarray(jax.jacobian(lift)(matrix))  # lifted row, output, row, output
    half = np.asarray(normal(9, len(jacobian), len(jacobian)))
    left = half @ half.T
    seen = [jacobian[:, o, :, o].T @ left @ jacobian[:, o, :, o] for o in range(4)]
    close(layer.mean_left(params, left), np.mean(seen, axis=0), rtol=1e-12)
    close(layer.left_traces(params, left), [np.trace(m) for m in seen], rtol=1e-12)
    pulled = layer.matrix(layer.project(params, lift(matrix)))
    close(pulled, np.einsum("ijkl,ij->kl", jacobian, lift(matrix)), rtol=1e-12)


def test_factors_with_too_many_rows_are_diagonal(monkeypatch):
    monkeypatch.setattr(_blocks, "MOST_ROWS", 2)
    params, x, labels = random(DENSE_SHAPES), normal(3, 4, 3, 3), jnp.arange(4) % 3
    (found,), curvature = matrices([("b", KRON)], dense_loss, params, x, labels)
    a, g = (np.asarray(v) for v in curvature.captured["b"])
    left = np.einsum("nti,ntj->ij", a, a) / 12
    wide = np.kron(left, np.diag(np.einsum("nto,nto->o", g[0], g[0]) / 4))
    close(found[0], wide, rtol=1e-11, atol=1e-15)


def test_kron_is_the_gauss_newton_block_of_a_deep_linear_network():
    # Squared error and no nonlinearity: the output's Jacobian is the same for all examples, so
    # K-FAC is exact.
    params = random({"a": {"kernel": (3, 4)}, "b": {"kernel": (4, 2)}})

    def loss_fn(params, x, y):
        x = tap(params, tap(params, x, "a"), "b")
        return 0.5 * ((x - y) ** 2).sum(-1).mean(), x

    x, y = normal(1, 6, 3), normal(2, 6, 2)
    requests = [("a", form) for form in (EXACT, FACTORS)]
    found, _ = matrices(requests, loss_fn, params, x, y, fisher="enumerate", likelihood="gaussian")
    # ∂(x A B)_c / ∂A_ij = x_i B_jc
    jacobian = np.einsum("ni,jc->ncij", x, params["b"]["kernel"]).reshape(12, 12)
    for matrix in found:
        close(matrix[0], jacobian.T @ jacobian / 6, rtol=1e-10, atol=1e-13)


def test_the_left_factor_of_tied_weights_is_a_mean_over_the_tokens_of_all_uses():
    def twice(params, x, labels):
        x = jnp.tanh(tap(params, x, "a"))
        return cross_entropy(tap(params, x.mean(1), "a"), labels)

    params, x = {"a": {"kernel": normal(0, 4, 4)}}, normal(1, 5, 3, 4)  # three tokens, then one
    *_, curvature = empirical(twice)(params, x, jnp.arange(5) % 4)
    left = np.asarray(system_of("a", FACTORS, curvature, params).state[0])
    first = np.asarray(x).reshape(-1, 4)
    second = np.tanh(np.asarray(x) @ np.asarray(params["a"]["kernel"])).mean(1)
    expected = (first.T @ first + second.T @ second) / (5 * (3 + 1))
    close(left[0, :4, :4], expected, rtol=1e-12)


@pytest.mark.slow
def test_products_are_symmetric_and_positive():
    args = random(EVERY_PARAMS), TOKENS[:4], jnp.arange(4)
    blocks = kfac.find_layers(every_layer, *args).blocks
    requests = [(name, FACTORS if block.factored else KRON) for name, block in blocks.items()]
    factored = {name for name, form in requests if form == FACTORS}
    assert factored == {"dense", "norm", "tied", "l1_full", "output"}
    for request, matrix in zip(requests, matrices(requests, every_layer, *args)[0], strict=True):
        scale = np.abs(matrix).max()
        assert scale > 0, request
        np.testing.assert_allclose(matrix, matrix.mT, rtol=0, atol=1e-12 * scale, err_msg=request)
        assert np.linalg.eigvalsh(matrix).min() > -1e-12 * scale * len(matrix[0]), request


def test_blocks_of_equal_form_are_solved_together():
    shapes = {f"l{i}": {"kernel": (4, 4), "bias": (4,)} for i in range(3)}

    def loss_fn(params, x, labels):
        for name in shapes:
            x = jnp.tanh(tap(params, x, name))
        return cross_entropy(x, labels)

    @jax.jit
    def compute(*args):
        *_, curvature = empirical(loss_fn)(*args)
        (together,) = systems.build(curvature, flatten(args[0]), dict.fromkeys(shapes, EXACT))
        gradients = per_example_gradients(loss_fn, *args)
        dense = [dense_fisher(block, gradients)[0] for block in together.blocks]
        return matrix_of(together), jnp.stack(dense)

    found, expected = compute(random(shapes), normal(5, 6, 4), jnp.arange(6) % 4)
    close(found, expected, rtol=1e-10, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [kfac.Dense(), L1_FULL], ids=["dense", "adder"])
def test_traces_and_their_estimates(layer):
    function = empirical(functools.partial(dense_loss, layer=layer))

    @jax.jit
    def compute(params, x, labels):
        *_, curvature = function(params, x, labels)
        kron, factors = (system_of("a", form, curvature, params) for form in (KRON, FACTORS))
        estimates = jax.lax.map(kron.trace, jax.random.split(jax.random.key(0), 2000))
        closed_form = factors.trace(jax.random.key(0))[0]
        return estimates, matrix_of(kron)[0], closed_form, matrix_of(factors)[0]

    args = random(DENSE_SHAPES), normal(3, 5, 2, 3), jnp.arange(5) % 3
    estimates, kron, closed_form, factors = compute(*args)
    assert abs(estimates.mean() - np.trace(kron)) < 4 * estimates.std() / 2000**0.5
    close(closed_form, np.trace(factors), rtol=1e-12)


def test_bfloat16_layers_keep_their_curvature():
    def in_bfloat16(params, x, labels):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss, aux = dense_loss(half, x.astype(jnp.bfloat16), labels)
        return loss.astype(jnp.float32), aux

    with jax.enable_x64(False):
        single = lambda tree: jax.tree.map(lambda p: p.astype(jnp.float32), tree)
        args = single(random(DENSE_SHAPES)), single(normal(3, 6, 2, 3)), jnp.arange(6) % 3
        (half,), curvature = matrices([("a", EXACT)], in_bfloat16, *args)
        (full,), _ = matrices([("a", EXACT)], dense_loss, *args)
    assert curvature.captured["a"][0].dtype == jnp.bfloat16
    assert half.dtype == np.float32
    assert np.linalg.norm(half - full) < 0.05 * np.linalg.norm(full)


def test_an_adder_layer_that_is_called_wants_its_distances():
    layer, params = kfac.L1Dense(), {"kernel": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match=r"expected distances=.*got none; give kfac.L1Dense"):
        kfac.tap(layer, params, jnp.ones((4, 3)), path="")


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [0, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [kfac.Dense(), L1_FULL])
def test_rows_of_zeros_change_no_step(layer, bias, iterations, monkeypatch):
    params = {"kernel": normal(0, 6, 4)} | ({"bias": normal(1, 4)} if bias else {})
    x, labels = normal(2, 9, 6), jnp.arange(9) % 4
    loss_fn = lambda params, x: cross_entropy(kfac.tap(layer, params, x, path=""), labels)

    def step():
        _, grads, curvature = empirical(loss_fn)(params, x)
        optimizer = kfac.kfac(1.0, curvature.layers, step="share", iterations=iterations)
        state = optimizer.init(params)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        ((left, _),) = kfac.find_state(state).averages.factors.values()
        return updates, left.shape[-1]

    expected, rows = step()
    monkeypatch.setattr(_layers, "_filled", lambda rows: rows + 5)
    updates, filled = step()
    assert filled == rows + (5 if bias or layer is L1_FULL else 0)
    close(updates, expected, rtol=1e-9)


def test_a_kernel_with_two_biases():
    """[x, 1, 0] and [x, 0, 1] of its two uses, which no one lift makes."""
    params = random({"w": (3, 2), "b": (2,), "c": (2,)})
    x, rows = normal(3, 5, 3), normal(4, 2, 5, 2)

    def loss_fn(params, x, rows):
        y = 0
        for name, inputs, row in zip("bc", (x, jnp.tanh(x)), rows.swapaxes(0, 1), strict=True):
            paths = {"kernel": "w", "bias": name}
            own = {role: params[path] for role, path in paths.items()}
            y += kfac.tap(kfac.Dense(), own, inputs, path=paths) * row
        return y.sum(-1).mean(), None

    (found,), curvature = matrices([("w", KRON)], loss_fn, params, x, rows.swapaxes(0, 1))
    ones = np.repeat(np.eye(2), 5, axis=0)
    features = np.concatenate([np.concatenate([x, np.tanh(x)]), ones], axis=1)
    right = sum(g.T @ g for g in np.asarray(rows)) / 5
    close(found[0], np.kron(features.T @ features / (5 * 2), right), rtol=1e-12, atol=1e-14)
    assert not curvature.layers.blocks["w"].factored
    kfac.kfac(1e-3, curvature.layers).init(params)

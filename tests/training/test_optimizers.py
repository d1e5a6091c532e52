"""Optimizers: what is decayed, the schedule, AdderNet's rate, and AdamW against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from adder_flax.data import load_source
from adder_flax.errors import RunError
from adder_flax.layers import AdderLinear, Linear
from adder_flax.parameters import Axis, Facts, parameter_facts
from adder_flax.settings import OptimizerSettings, RunSettings, read
from adder_flax.tasks import Outcome
from adder_flax.training import build_run, optimizers, scale_by_adder_rate
from adder_flax.training.step import Parts, init_state, make_train_step
from adder_flax.training.whitening import scale_by_kl_shampoo, scale_by_soap
from tests.training.pieces import optimizer_of, vit


class _Pair(nnx.Module):
    def __init__(self, rngs):
        self.adder = AdderLinear(3, 4, rngs=rngs)
        self.dense = Linear(4, 2, rngs=rngs)


@pytest.fixture
def pair():
    model = _Pair(nnx.Rngs(0))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), parameter_facts(model)


@pytest.fixture
def settings(tiny_config):
    return functools.partial(
        dataclasses.replace, read(RunSettings, tiny_config()).optimizer, clip_norm=None
    )


@pytest.fixture
def update(pair, settings):
    """``update(gradients, rate=1.0, **settings)``: what the first step adds to the parameters."""
    params, facts = pair

    def first(gradients, rate=1.0, **chosen):
        optimizer = optimizer_of(settings(**chosen), lambda _: rate, facts)
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    return first


def test_facts_of_every_kind_of_parameter(tiny_config):
    settings = read(RunSettings, tiny_config()).model
    model = nnx.eval_shape(lambda: vit(settings, load_source("digits", "train")))
    facts = parameter_facts(nnx.merge(*nnx.split(model)))
    plain, heads, hidden = Facts(), Axis("heads", 2), Axis("hidden", 32)
    others = facts["cls_token"], facts["pos_embed"], facts["norm"]["scale"], facts["head"]["bias"]
    assert set(others) == {plain}
    assert facts["head"]["kernel"] == Facts("weight", decay=True)
    block = facts["blocks"][0]
    assert block["norm1"]["scale"] == plain
    layers = block["attention"] | block["mlp"]
    axes = dict.fromkeys(("query", "key", "value"), (None, heads)) | {"out": (heads, None)}
    axes |= {"fc1": (None, hidden), "fc2": (hidden, None)}
    for name, expected in axes.items():
        assert layers[name]["kernel"] == Facts("prototype", decay=False, axes=expected)
        assert set(jax.tree.leaves(layers[name]["norm"])) == {plain}


@pytest.mark.cases(1)
@pytest.mark.parametrize("prototypes", [False, True])
@pytest.mark.parametrize("name", ["adamw", "kl_shampoo", "muon", "nadamw", "sgd", "soap"])
def test_weight_decay_reaches_multiplicative_weights_and_prototypes_on_demand(
    name, prototypes, pair, update
):
    params, _ = pair
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = update(zeros, 0.1, name=name, weight_decay=0.5, decay_prototypes=prototypes)
    for layer, decay in (("dense", 0.05), ("adder", 0.05 * prototypes)):
        kernel = params[layer]["kernel"]
        np.testing.assert_allclose(updates[layer]["kernel"], -decay * kernel, rtol=1e-6)
    rest = [updates["adder"]["norm"], updates["dense"]["bias"]]
    assert all(not leaf.any() for leaf in jax.tree.leaves(rest))


def test_muon_turns_matrices_and_leaves_the_rest_to_adamw(pair, update):
    """The step of a matrix is U Vᵀ of its gradient, as Newton-Schulz finds it (singular values 0.5
    to 1.5, Jordan says), as large as AdamW's: a root mean square of 0.2 times the rate."""
    gradients = jax.tree.map(lambda p: jnp.cos(3.0 * p) + 0.1, pair[0])
    updates = update(gradients, 0.1, name="muon", weight_decay=0.0, b2=0.999)
    left, _, right = np.linalg.svd(gradients["dense"]["kernel"], full_matrices=False)
    turned = left.T @ np.asarray(updates["dense"]["kernel"]) @ right.T / (-0.1 * 0.2 * np.sqrt(4))
    assert np.all((np.diag(turned) > 0.5) & (np.diag(turned) < 1.5))
    np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-4)
    signs = jax.tree.map(lambda g: -0.1 * np.sign(g), gradients["adder"])  # of Adam the first step
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3)
    jax.tree.map(close, updates["adder"], signs)


def _adamw(moments, g, x, step, decay):
    """The direction of Adam in NumPy, whose moments it changes, and the decay."""
    moments[0] = 0.9 * moments[0] + 0.1 * g
    moments[1] = 0.999 * moments[1] + 0.001 * g**2
    root = np.sqrt(moments[1] / (1 - 0.999 ** (step + 1)))
    return moments[0] / (1 - 0.9 ** (step + 1)) / (root + 1e-8) + decay * x


def _lamb(moments, g, x, step, decay):
    """Algorithm 2 of You et al. (2020); what is not decayed takes the step as it is."""
    r = _adamw(moments, g, x, step, decay)
    return r * (np.linalg.norm(x) / np.linalg.norm(r) if decay else 1.0)


def _sgd(moments, g, x, step, decay):
    """Momentum, with the decay beside it."""
    moments[0] = 0.8 * moments[0] + g
    return moments[0] + decay * x


@pytest.mark.parametrize(("name", "direction"), [("adamw", _adamw), ("lamb", _lamb), ("sgd", _sgd)])
def test_steps_against_numpy(name, direction, pair, settings):
    params, facts = pair
    chosen = settings(name=name, weight_decay=0.05, momentum=0.8)
    optimizer = optimizer_of(chosen, lambda step: 0.01 / (1 + step), facts)
    state, current = optimizer.init(params), params
    leaves = {("dense", "kernel"): 0.05, ("dense", "bias"): 0.0, ("adder", "kernel"): 0.0}
    expected = {path: np.asarray(params[path[0]][path[1]], np.float64) for path in leaves}
    moments = {path: [0.0, 0.0] for path in leaves}
    for step in range(4):
        gradient = jax.tree.map(lambda p, step=step: jnp.cos(3.0 * p + step), params)
        updates, state = optimizer.update(gradient, state, current)
        current = optax.apply_updates(current, updates)
        for path, decay in leaves.items():
            g, x = np.asarray(gradient[path[0]][path[1]], np.float64), expected[path]
            rate = 0.01 / (1 + step)
            expected[path] = x - rate * direction(moments[path], g, x, step, decay)
    for (layer, leaf), value in expected.items():
        np.testing.assert_allclose(current[layer][leaf], value, rtol=1e-5, atol=1e-6)


def test_schedule_free_adamw_against_numpy(pair, settings):
    """The algorithm of Defazio et al., 2024: steps move z, y is trained, x evaluated."""
    params, facts = pair
    c = settings(name="schedule_free_adamw", schedule="constant", b1=0.8, b2=0.9, weight_decay=0.3)
    rates = [0.0, 0.02, 0.05, 0.1, 0.1, 0.1]
    # Optax weighs a step by the rate of the next one, so that a rate of 0 has no weight of 0.
    optimizer = optimizer_of(c, lambda count: jnp.asarray(rates)[count], facts)
    update, rng = jax.jit(optimizer.update), np.random.default_rng(0)
    kernel = lambda tree: np.asarray(tree["dense"]["kernel"], np.float64)
    state = init_state(params, optimizer=optimizer, ema=False)["opt_state"]
    x = z = y = kernel(params)
    second, total = np.zeros_like(x), 0.0
    for step in range(5):
        gradients = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        g = kernel(gradients)
        second = 0.9 * second + 0.1 * g**2
        direction = g / (np.sqrt(second / (1 - 0.9 ** (step + 1))) + 1e-8)
        z = z - rates[step] * (direction + 0.3 * y)
        weight = max(rates[: step + 2]) ** 2
        total += weight
        x = x + weight / total * (z - x)
        y = 0.8 * x + 0.2 * z
        np.testing.assert_allclose(kernel(params), y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ema_decay": 0.9, "optimizer.schedule": "constant"}, "ema_decay: expected 0"),
        ({}, "schedule: expected 'constant' with schedule_free_adamw.*got 'cosine'"),
    ],
)
def test_schedule_free_has_one_average_and_no_decay(tiny_config, fields, message):
    with pytest.raises(RunError, match=message):
        build_run(tiny_config(**fields, **{"optimizer.name": "schedule_free_adamw"}))


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_line_searches_see_the_loss_of_the_whole_batch(accumulation_steps):
    """L-BFGS in the training step against optax's own loop on the same least squares."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    squares = lambda params, x, y: ((x @ params["w"] - y) ** 2).mean()
    parts = Parts(
        seed=0,
        examples=lambda key, batch: (batch["x"], batch["y"]),
        loss=lambda params, examples, key, model_state: Outcome(
            squares(params, *examples), jnp.zeros((8, 1)), {}, model_state=model_state
        ),
        optimizer=optimizers.OPTIMIZERS.get("lbfgs")(None),
        learning_rate=lambda step: 0.0,
    )
    params = {"w": jnp.zeros(3)}
    state = init_state(params, optimizer=parts.optimizer, ema=False)
    step = jax.jit(make_train_step(lambda hyper: parts, accumulation_steps=accumulation_steps))
    optimizer = optax.lbfgs()
    expected, own = params, optimizer.init(params)
    value_fn = lambda params: squares(params, x, y)
    for _ in range(15):
        value, grad = jax.value_and_grad(value_fn)(expected)
        search = dict(value=value, grad=grad, value_fn=value_fn)
        updates, own = optimizer.update(grad, own, expected, **search)
        expected = optax.apply_updates(expected, updates)
        state, _ = step(state, {"x": x, "y": y}, {})
    np.testing.assert_allclose(state["params"]["w"], expected["w"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["params"]["w"], np.linalg.lstsq(x, y)[0], rtol=1e-3, atol=1e-4)


_PLAIN = dict(name="sgd", weight_decay=0.0, momentum=0.0)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_adder_rate_gives_each_adder_weight_the_norm_eta_root_k(pair, update, clip_norm):
    """Whatever the clip leaves of its gradient; all others are clipped by the norm of all."""
    gradients = jax.tree.map(lambda p: 100.0 * jnp.sin(p + 1), pair[0])
    updates = update(gradients, adder_rate=0.2, clip_norm=clip_norm, **_PLAIN)
    length = np.linalg.norm(updates["adder"]["kernel"])
    assert length == pytest.approx(0.2 * np.sqrt(12), rel=1e-6)
    whole = np.concatenate([np.ravel(gradient) for gradient in jax.tree.leaves(gradients)])
    factor = 1.0 if clip_norm is None else clip_norm / np.linalg.norm(whole.astype(np.float64))
    expected = -factor * gradients["dense"]["kernel"]
    np.testing.assert_allclose(updates["dense"]["kernel"], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30, "largest"])
def test_adder_rate_does_not_depend_on_the_scale_of_the_gradient(dtype, scale):
    with jax.enable_x64(True):
        scale = float(jnp.finfo(dtype).max) if scale == "largest" else scale
        gradient = (np.array([[1.0, -0.5], [0.25, 0.125]]) * scale).astype(dtype)
        updates, _ = scale_by_adder_rate(0.2).update({"w": jnp.asarray(gradient)}, None)
    exact = np.array([[1.0, -0.5], [0.25, 0.125]])
    expected = 0.2 * 2 * exact / np.linalg.norm(exact) * (scale > 0)
    assert updates["w"].dtype == dtype
    rtol = 4 * max(float(jnp.finfo(dtype).eps), 1e-15)
    np.testing.assert_allclose(np.asarray(updates["w"]).astype(np.float64), expected, rtol=rtol)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(20, 100), (0, 7), (6, 7)])
def test_every_step_has_the_rate_of_optax_s_schedule(warmup, steps, schedule, settings):
    """The default rates of the last step and of the first are those that the words say."""
    end = 1e-5 if schedule == "cosine" else 1e-3
    settings = settings(learning_rate=1e-3, final_learning_rate=1e-5, schedule=schedule)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup, steps, end)
    lengths = dict(warmup_steps=warmup, num_steps=steps)
    ours = functools.partial(optimizers.learning_rate, settings, **lengths)
    rates = [float(ours(step)) for step in range(steps + 1)]
    np.testing.assert_allclose(rates, [theirs(step) for step in range(steps + 1)], rtol=1e-5)
    assert rates[0] == (0.0 if warmup else pytest.approx(1e-3))
    assert rates[-1] == pytest.approx(end)
    assert schedule == "constant" or rates[-2] > end


def test_clipping_each_leaves_small_gradients_alone(pair, update):
    params, _ = pair
    gradients = jax.tree.map(lambda p: jnp.full_like(p, 0.01), params)
    gradients["adder"]["kernel"] = jnp.full_like(params["adder"]["kernel"], 100.0)
    gradients["dense"]["bias"] = jnp.zeros_like(params["dense"]["bias"])
    updates = update(gradients, clip_norm=0.5, clip_scope="each", **_PLAIN)
    kernel = updates["adder"].pop("kernel")
    assert np.linalg.norm(kernel) == pytest.approx(0.5, rel=1e-5)
    del gradients["adder"]["kernel"]
    close = lambda found, given: np.testing.assert_allclose(found, -given, rtol=1e-6)
    jax.tree.map(close, updates, gradients)


def _orthogonal(factor, basis):
    return np.linalg.qr(factor @ basis)[0]


def _soap_in_numpy(gradients, interval, b1=0.9, b2=0.98, eps=1e-8):
    """Vyas et al. (2024), algorithm 3, as the authors' code has it: the first step only begins the
    factors."""
    first, mean, squares, updates = gradients[0], 0.0, 0.0, [np.zeros_like(gradients[0])]
    factors = [(1 - b2) * first @ first.T, (1 - b2) * first.T @ first]
    bases = [np.linalg.eigh(factor)[1][:, ::-1] for factor in factors]
    for step, g in enumerate(gradients[1:], 1):
        rotated = lambda matrix, left=bases[0], right=bases[1]: left.T @ matrix @ right
        mean = b1 * mean + (1 - b1) * g
        squares = b2 * squares + (1 - b2) * rotated(g) ** 2
        root = np.sqrt(squares / (1 - b2**step)) + eps
        updates.append(bases[0] @ (rotated(mean) / (1 - b1**step) / root) @ bases[1].T)
        found = g @ g.T, g.T @ g
        factors = [b2 * f + (1 - b2) * new for f, new in zip(factors, found, strict=True)]
        if step % interval == 0:
            pairs = list(zip(factors, bases, strict=True))
            orders = [np.argsort(-np.diag(q.T @ f @ q)) for f, q in pairs]
            bases = [_orthogonal(f, q[:, o]) for (f, q), o in zip(pairs, orders, strict=True)]
            squares = squares[np.ix_(*orders)]
    return updates


def _kl_shampoo_in_numpy(gradients, interval, b1=0.9, b2=0.98, eps=1e-8):
    """Lin et al. (2025) with dense inverses of the factors' estimates Q diag(λ) Qᵀ."""
    first, mean, updates = gradients[0], 0.0, [np.zeros_like(gradients[0])]
    m, n = first.shape
    factors = [(1 - b2) * first @ first.T / n, (1 - b2) * first.T @ first / m]
    bases = [np.linalg.eigh(f)[1][:, ::-1] for f in factors]
    values = [np.full(side, np.sqrt((first**2).mean())) for side in (m, n)]
    for step, g in enumerate(gradients[1:], 1):
        mean = b1 * mean + (1 - b1) * g
        scale = np.sqrt(np.outer(*values)) + eps
        updates.append(bases[0] @ (bases[0].T @ mean @ bases[1] / scale) @ bases[1].T)
        inverses = [q @ np.diag(1 / v) @ q.T for q, v in zip(bases, values, strict=True)]
        found = g @ inverses[1] @ g.T / n, g.T @ inverses[0] @ g / m
        values = [
            b2 * v + (1 - b2) * np.diag(q.T @ new @ q)
            for v, q, new in zip(values, bases, found, strict=True)
        ]
        values = [np.maximum(v, v.max() / max(10, v.size) ** 2) for v in values]
        factors = [b2 * f + (1 - b2) * new for f, new in zip(factors, found, strict=True)]
        if step % interval == 0:
            bases = [_orthogonal(*pair) for pair in zip(factors, bases, strict=True)]
    return updates


@pytest.mark.parametrize(
    ("stage", "in_numpy"),
    [(scale_by_soap, _soap_in_numpy), (scale_by_kl_shampoo, _kl_shampoo_in_numpy)],
)
def test_whitened_steps_against_numpy(stage, in_numpy):
    """In float64, of a matrix and of a stack of two; bases are renewed at every second step."""
    rng = np.random.default_rng(0)
    spread = np.geomspace(1, 20, 4)[:, None] * np.geomspace(1, 9, 3)
    gradients = rng.normal(size=(9, 2, 4, 3)) * spread
    with jax.enable_x64(True):
        transform = stage(0.9, 0.98, 1e-8, 2)
        state = transform.init({"one": jnp.zeros((4, 3)), "two": jnp.zeros((2, 4, 3))})
        update, found = jax.jit(transform.update), []
        for gradient in gradients:
            updates, state = update(
                {"one": jnp.asarray(gradient[0]), "two": jnp.asarray(gradient)}, state
            )
            found.append(updates)
    expected = np.stack([in_numpy(list(gradients[:, place]), 2) for place in (0, 1)], 1)
    for step, updates in enumerate(found):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-9)
        jax.tree.map(close, updates, {"one": expected[step, 0], "two": expected[step]})


@pytest.mark.parametrize("stage", [scale_by_soap, scale_by_kl_shampoo])
def test_wide_numbers_do_not_widen_what_is_kept(stage):
    with jax.enable_x64(True):
        transform = stage(*jnp.array([0.9, 0.98, 1e-8]), 2)
        gradient = jnp.ones((4, 3), jnp.float32)
        state = transform.init(gradient)
        for _ in range(3):
            update, state = transform.update(gradient, state)
    assert {leaf.dtype for leaf in jax.tree.leaves((update, state.matrices))} == {
        np.dtype("float32")
    }


@pytest.mark.slow
@pytest.mark.parametrize("stage", [scale_by_soap, scale_by_kl_shampoo])
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e5])
def test_whitened_steps_do_not_depend_on_the_scale_of_gradients(stage, scale):
    gradients = np.random.default_rng(0).normal(size=(12, 4, 3))
    gradients[0] = 0  # as in front of a head that begins at zero
    with jax.enable_x64(True):
        transform = stage(0.9, 0.98, 0.0, 2)
        states = [transform.init(jnp.zeros((4, 3)))] * 2
        for gradient in gradients:
            (plain, states[0]), (scaled, states[1]) = (
                transform.update(jnp.asarray(factor * gradient), state)
                for factor, state in zip((1.0, scale), states, strict=True)
            )
        assert 0.1 < np.abs(plain).max() < 10
        np.testing.assert_allclose(scaled, plain, rtol=1e-6)


def test_layer_decay_knows_what_comes_first_or_says_that_it_does_not():
    settings = OptimizerSettings(layer_decay=0.5)
    found = optimizers.rate_factors({"stem": 1, "blocks": {"0": 1}, "norm": 1, "head": 1}, settings)
    assert found == {"stem": 0.25, "blocks": {"0": 0.5}, "norm": 0.5, "head": 1.0}
    with pytest.raises(RunError, match="got embed, whose depth"):
        optimizers.rate_factors({"embed": 1, "blocks": {"0": 1}, "head": 1}, settings)


class _Shaped(nnx.Module):
    """Layers of Flax whose kernels have several axes of inputs or outputs; or their matrices."""

    def __init__(self, as_matrices, rngs):
        linear = lambda rows, columns: nnx.Linear(rows, columns, rngs=rngs)
        self.conv = linear(18, 5) if as_matrices else nnx.Conv(2, 5, (3, 3), rngs=rngs)
        self.heads = linear(6, 8) if as_matrices else nnx.LinearGeneral(6, (2, 4), rngs=rngs)
        out = lambda: nnx.LinearGeneral((2, 4), 6, axis=(-2, -1), rngs=rngs)
        self.out = linear(8, 6) if as_matrices else out()


@pytest.mark.parametrize("name", ["muon", "soap", "kl_shampoo"])
def test_a_kernel_of_several_axes_is_the_matrix_that_its_layer_multiplies_by(name, settings):
    rng = np.random.default_rng(0)
    found = []
    gradients = [rng.normal(size=(3, *shape)) for shape in ((18, 5), (6, 8), (8, 6))]
    for as_matrices in (True, False):
        model = _Shaped(as_matrices, nnx.Rngs(0))
        params = jax.tree.map(jnp.ones_like, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        optimizer = optimizer_of(settings(name=name), lambda _: 1.0, parameter_facts(model))
        state = optimizer.init(params)
        for step in range(3):
            given = jax.tree.map(jnp.zeros_like, params)
            for layer, gradient in zip(("conv", "heads", "out"), gradients, strict=True):
                shape = params[layer]["kernel"].shape
                given[layer]["kernel"] = jnp.asarray(gradient[step].reshape(shape), jnp.float32)
            updates, state = optimizer.update(given, state, params)
        found.append([np.ravel(updates[layer]["kernel"]) for layer in ("conv", "heads", "out")])
    for matrix, kernel in zip(*found, strict=True):
        np.testing.assert_array_equal(kernel, matrix)

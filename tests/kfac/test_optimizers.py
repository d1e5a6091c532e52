"""The optimizer: Algorithm 1 against NumPy, exactness on problems with a known answer, safe steps,
optax manners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from kfac.curvature import _blocks
from kfac.step import _optimizers
from tests.kfac.reference import close, cross_entropy, normal

pytestmark = pytest.mark.usefixtures("x64")


def network(params, x, labels):
    x = jnp.tanh(kfac.tap(kfac.Dense(), params["a"], x, path="a"))
    return cross_entropy(kfac.tap(kfac.Dense(), params["b"], x, path="b"), labels)


PARAMS = {"a": {"kernel": normal(0, 3, 4), "bias": normal(1, 4)}, "b": {"kernel": normal(2, 4, 3)}}
X, LABELS = normal(3, 8, 3), jnp.arange(8) % 3


def with_free_parameter(params, x, labels):
    """The network and a temperature that no layer covers."""
    loss, logits = network(params, x, labels)
    return loss + 0.1 * (params["free"] ** 2).sum(), logits


def make_step(optimizer, loss_fn=network, **options):
    function = kfac.value_grad_and_curvature(
        loss_fn, has_aux=True, **{"fisher": "empirical", **options}
    )

    @jax.jit
    def step(params, state, x, labels, key=None):
        (loss, _), grads, curvature = function(params, x, labels, key=key)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        return updates, state, loss

    return step


def found(loss_fn=network, params=PARAMS):
    return kfac.find_layers(loss_fn, params, X, LABELS)


def first(optimizer, loss_fn=network, params=PARAMS, x=X):
    """The updates of a first step, and the state after it."""
    return make_step(optimizer, loss_fn)(params, optimizer.init(params), x, LABELS)[:2]


def joined(tree):
    """The matrices of both layers, [W; b] and W."""
    a, b = tree["a"], tree["b"]
    return [np.vstack([a["kernel"], a["bias"]]), np.asarray(b["kernel"])]


def pairs_of(params=PARAMS, x=X, labels=LABELS):
    arrays = (params["a"]["kernel"], params["a"]["bias"], params["b"]["kernel"], x, labels)
    return numpy_gradients(*map(np.asarray, arrays))


WHOLE = {"step": "clip", "momentum": 0.0, "kl_clip": None}


def fixed(layers, make=kfac.kfac, **options):
    """Steps that are the solutions."""
    return make(1.0, layers, **WHOLE, **options)


class Absolute(kfac.CgFacOptions):
    """With γ = λ, as in Algorithm 1, for systems that depend on no earlier batch."""

    literal = True


def absolute(rate, layers, **options):
    options = Absolute(learning_rate=rate, solver="dual", **options)
    return _optimizers._with_fallback(layers, options, None)


# ---- Algorithm 1


def numpy_gradients(w, bias, u, x, labels):
    """Inputs and cotangents (of each example's own loss) of both layers of ``network``."""
    hidden = np.tanh(x @ w + bias)
    logits = hidden @ u
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    g2 = p - np.eye(3)[labels]
    g1 = (g2 @ u.T) * (1 - hidden**2)
    return (np.hstack([x, np.ones((len(x), 1))]), g1), (hidden, g2)


def numpy_algorithm_1(a, g, b, gamma, x0, m, tolerance):
    """Lines 1-17 of the paper's Algorithm 1 with v as (in, out); the product is the mean over the
    batch."""

    def fv(v):
        out = np.zeros_like(v)
        for a_n, g_n in zip(a, g, strict=True):
            theta = g_n @ v.T @ a_n
            out += np.outer(a_n, g_n) * theta / len(a)
        return out + gamma * v

    x = x0
    p = r = b - fv(x0)
    rho = (r * r).sum()
    for _ in range(m):
        if rho <= tolerance**2 * (b * b).sum():
            break
        u = fv(p)
        alpha = rho / (p * u).sum()
        x, r = x + alpha * p, r - alpha * u
        new = (r * r).sum()
        p, rho = r + new / rho * p, new
    return x


@pytest.mark.parametrize(("m", "tolerance"), [(2, 0.0), (6, 1e-3)])
def test_algorithm_1_is_the_papers_to_the_letter(m, tolerance):
    rate, gamma = 0.3, 0.05
    optimizer = kfac.algorithm_1(
        rate, found(), damping=gamma, max_iterations=m, tolerance=tolerance
    )
    step, params, state = make_step(optimizer), PARAMS, optimizer.init(PARAMS)
    starts = [np.zeros((4, 4)), np.zeros((4, 3))]
    for batch in range(4):  # batches differ: the warm start matters
        x, labels = normal(10 + batch, 8, 3), (np.arange(8) + batch) % 3
        pairs = pairs_of(params, x, labels)
        updates, state, _ = step(params, state, x, jnp.asarray(labels))
        params = optax.apply_updates(params, updates)
        starts = [
            numpy_algorithm_1(a, g, a.T @ g / len(a), gamma, x0, m, tolerance)
            for (a, g), x0 in zip(pairs, starts, strict=True)
        ]
        for update, solution in zip(joined(updates), starts, strict=True):
            # CG amplifies rounding, in all components alike.
            np.testing.assert_allclose(
                update, -rate * solution, rtol=0, atol=1e-9 * rate * np.abs(solution).max()
            )


# ---- Known answers


def regression(params, x, y):
    outputs = kfac.tap(kfac.Dense(), params, x, path="")
    return 0.5 * ((outputs - y) ** 2).sum(-1).mean(), outputs


@pytest.mark.parametrize(
    ("make", "options"), [(kfac.cg_fac, {}), (kfac.kfac, {"factor_decay": 0.0})]
)
def test_linear_regression_is_solved_in_one_step(make, options):
    params, x, y = (
        {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)},
        normal(0, 20, 3),
        normal(1, 20, 2),
    )
    optimizer = fixed(
        kfac.find_layers(regression, params, x, y), make, damping=1e-13, iterations=40, **options
    )
    step = make_step(optimizer, regression, fisher="enumerate", likelihood="gaussian")
    updates, _, _ = step(params, optimizer.init(params), x, y)
    optimum, *_ = np.linalg.lstsq(np.hstack([x, np.ones((20, 1))]), np.asarray(y))
    np.testing.assert_allclose(updates["kernel"], optimum[:3], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(updates["bias"], optimum[3], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (kfac.kfac, {"iterations": 60}),
        pytest.param(kfac.cg_fac, {"iterations": 60}, marks=pytest.mark.slow),
        (kfac.cg_fac, {"solver": "dual"}),
    ],
)
def test_solutions_are_numpys(make, options):
    layers = found()
    optimizer = fixed(layers, make, damping=0.1, **options)
    step, state = make_step(optimizer), optimizer.init(PARAMS)
    for x in (X * jnp.nan, X * jnp.nan, X):  # refused steps say nothing of curvature
        updates, state, _ = step(PARAMS, state, x, LABELS)
    for update, (a, g) in zip(joined(updates), pairs_of(), strict=True):
        if make is kfac.kfac:
            fisher = np.kron(a.T @ a / 8, g.T @ g / 8)
        else:
            rows = np.einsum("ni,no->nio", a, g).reshape(8, -1)
            fisher = rows.T @ rows / 8
        damped = fisher + 0.1 * np.trace(fisher) / len(fisher) * np.eye(len(fisher))
        solution = np.linalg.solve(damped, (a.T @ g / 8).ravel())
        np.testing.assert_allclose(np.ravel(update), -solution, rtol=1e-7, atol=1e-11)


# ---- Safe steps


def test_a_step_that_is_not_finite_changes_nothing():
    params = {**PARAMS, "free": jnp.ones(2)}
    layers = found(with_free_parameter, params)
    optimizer = kfac.kfac(1.0, layers, step="clip", damping=0.1)
    step = make_step(optimizer, with_free_parameter)
    _, state, _ = step(params, optimizer.init(params), X, LABELS)
    assert any(np.any(v != 0) for v in jax.tree.leaves(kfac.find_state(state).velocity))
    averages = kfac.find_state(state).averages
    updates, state, _ = step(params, state, X.at[0, 0].set(jnp.nan), LABELS)
    jax.tree.map(np.testing.assert_array_equal, kfac.find_state(state).averages, averages)
    assert all(np.all(updates[name][p] == 0) for name in ("a", "b") for p in PARAMS[name])
    assert all(np.all(v == 0) for v in jax.tree.leaves(kfac.find_state(state).velocity))
    assert float(kfac.find_state(state).stats.rejected) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "refused"), [(1.0, False), (1e7, True)])
def test_a_step_that_a_narrow_dtype_cannot_hold_is_refused(rate, refused):
    """float16 ends at 65,504, and the solution is of float32."""
    params = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    layers = kfac.find_layers(network, params, X, LABELS)
    optimizer = kfac.kfac(rate, layers, step="clip", damping=0.1, kl_clip=None)
    updates, state, _ = make_step(optimizer)(params, optimizer.init(params), X, LABELS)
    assert all(u.dtype == jnp.float16 for u in jax.tree.leaves(updates))
    factors = jax.tree.leaves(kfac.find_state(state).averages.factors)
    assert all(factor.dtype == jnp.float32 for factor in factors)
    assert any(np.any(u) for u in jax.tree.leaves(updates)) != refused
    assert bool(kfac.find_state(state).stats.rejected) == refused


def test_a_warm_start_that_a_narrow_dtype_cannot_hold_is_none():
    """A small share of a solution fits where the solution does not."""

    def faint(params, x, labels):
        loss, logits = network(params, x, labels)
        return 1e-5 * loss, logits

    params = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    layers = kfac.find_layers(faint, params, X, LABELS)
    optimizer = kfac.algorithm_1(1e-6, layers, damping=1e-12, max_iterations=4)
    step, state = make_step(optimizer, faint), optimizer.init(params)
    for _ in range(2):
        updates, state, _ = step(params, state, X, LABELS)
        assert any(np.any(u) for u in jax.tree.leaves(updates))
        assert not any(np.any(x) for x in jax.tree.leaves(kfac.find_state(state).solution))


def test_kl_clip_bounds_the_step_in_the_metric():
    layers = found()

    def kl(make, kl_clip):
        options = dict(step="clip", momentum=0.0, damping=0.1, iterations=60)
        optimizer = make(1.0, layers, kl_clip=kl_clip, **options)
        updates, state = first(optimizer)
        derivative = lambda x, y: jax.jvp(
            lambda p: network(p, x[None], y[None])[0], (PARAMS,), (updates,)
        )[1]
        return float((jax.jit(jax.vmap(derivative))(X, LABELS) ** 2).mean()), float(
            kfac.find_state(state).stats.kl_scale
        )

    for make in (kfac.cg_fac, kfac.kfac):
        free, scale = kl(make, None)
        assert scale == 1.0
        clipped, scale = kl(make, free / 9)
        np.testing.assert_allclose([clipped, scale], [free / 9, 1 / 3], rtol=1e-6)


def test_a_share_step_is_a_share_of_each_layers_own_size():
    start = {**PARAMS, "b": {"kernel": jnp.zeros((4, 3))}}  # which is taken for one of 0.01
    layers = kfac.find_layers(network, start, X, LABELS)
    plain = absolute(1.0, layers, damping=0.05, **WHOLE)
    optimizer = absolute(0.03, layers, step="share", momentum=0.75, damping=0.05)
    solve_, step, state = make_step(plain), make_step(optimizer), optimizer.init(start)

    sizes = [np.linalg.norm(joined(start)[0]), 0.01 * np.sqrt(12)]
    last = [np.zeros((4, 4)), np.zeros((4, 3))]
    for batch in range(2):
        x = normal(20 + batch, 8, 3)
        directions = joined(solve_(start, plain.init(start), x, LABELS)[0])
        updates, state, _ = step(start, state, x, LABELS)
        last = [
            0.75 * before + 0.25 * 0.03 * size * direction / (np.linalg.norm(direction) or 1)
            for before, size, direction in zip(last, sizes, directions, strict=True)
        ]
        for got, expected in zip(joined(updates), last, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)
    # The hidden layer gets no gradient through a kernel of zeros.
    assert not np.any(updates["a"]["kernel"])
    # What the model promises for the new part: with (F + γ) x = ∇L, −s ∇L·x + s² ∇L·x / 2.
    gradient = joined(jax.grad(lambda p: network(p, x, LABELS)[0])(start))[1]
    taken = 0.25 * 0.03 * sizes[1] / np.linalg.norm(directions[1])
    along = -(gradient * directions[1]).sum()
    np.testing.assert_allclose(
        kfac.find_state(state).stats.model, -taken * along + taken**2 * along / 2, rtol=1e-9
    )


def test_layers_of_a_scan_have_the_length_that_each_would_have_alone():
    stack = {"kernel": normal(0, 2, 3, 3) * jnp.array([1.0, 30.0])[:, None, None]}

    def scanned(params, x, labels):
        body = lambda x, p: (jnp.tanh(kfac.tap(kfac.Dense(), p, x, path="stack")), None)
        return cross_entropy(jax.lax.scan(body, x, params["stack"])[0], labels)

    params = {"stack": stack}
    layers = found(scanned, params)
    for step, sizes in (("rms", [3, 3]), ("share", np.linalg.norm(stack["kernel"], axis=(1, 2)))):
        optimizer = absolute(0.02, layers, step=step, momentum=0.0, damping=0.05)
        updates, _ = first(optimizer, scanned, params)
        lengths = np.linalg.norm(updates["stack"]["kernel"], axis=(1, 2))
        np.testing.assert_allclose(lengths, 0.02 * np.asarray(sizes), rtol=1e-9)


@pytest.mark.slow
def test_an_rms_step_has_the_root_mean_square_that_was_asked_for():
    """Along the solution for a gradient with Nesterov's momentum, in float64 NumPy."""
    layers = found()
    optimizer = absolute(0.03, layers, step="rms", momentum=0.75, damping=0.05)
    plain, function = (
        absolute(1.0, layers, damping=0.05, **WHOLE),
        kfac.value_grad_and_curvature(network, has_aux=True, fisher="empirical"),
    )
    params, state = PARAMS, optimizer.init(PARAMS)

    sizes = [np.sqrt(part.size) for part in joined(PARAMS)]
    total = jax.tree.map(np.zeros_like, PARAMS)
    for batch in range(3):
        x = normal(20 + batch, 8, 3)
        _, grads, curvature = function(params, x, LABELS)
        total = jax.tree.map(lambda v, g: 0.75 * v + g, total, grads)
        ahead = jax.tree.map(lambda v, g: 0.75 * v + g, total, grads)
        solution, _ = plain.update(ahead, plain.init(params), params, curvature=curvature)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        directions = zip(joined(updates), sizes, joined(solution), strict=True)
        for got, size, direction in directions:
            expected = 0.03 * size * direction / np.linalg.norm(direction)
            np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-12)
        params = optax.apply_updates(params, updates)
    broken = jax.tree.map(lambda g: g * jnp.nan, grads)
    updates, state = optimizer.update(broken, state, params, curvature=curvature)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    velocity = kfac.find_state(state).velocity
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(velocity))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["rms", "share"])
def test_the_inverses_alone_are_k_facs_step_as_old_as_their_interval_has_them(step):
    """Averages, inverses and directions in float64 NumPy; Martens & Grosse (2015), section 6.3."""
    layers = found()
    options = dict(damping=0.3, factor_decay=0.8, inverse_interval=2, momentum=0.0)
    optimizer = kfac.kfac(0.03, layers, step=step, iterations=0, **options)
    advance = make_step(optimizer)
    first_of_cg = kfac.kfac(0.03, layers, step=step, iterations=1, **options)
    with_cg = make_step(first_of_cg)
    params, state, other = PARAMS, optimizer.init(PARAMS), first_of_cg.init(PARAMS)
    shape = jax.tree.structure(state)
    sums, inverses = [0.0, 0.0], []
    for batch in range(4):
        x = normal(20 + batch, 8, 3)
        pairs = pairs_of(params, x)
        moments = [np.array([a.T @ a / 8, g.T @ g / 8], object) for a, g in pairs]
        sums = [0.8 * kept + 0.2 * new for kept, new in zip(sums, moments, strict=True)]
        if batch % 2 == 0:
            inverses = [numpy_inverses(*of / (1 - 0.8 ** (batch + 1))) for of in sums]
        updates, state, _ = advance(params, state, x, LABELS)
        expected, other, _ = with_cg(params, other, x, LABELS)
        close(updates, expected, rtol=1e-7, atol=1e-12)
        both = zip(joined(updates), joined(params), inverses, pairs, strict=True)
        for change, weight, (left, right), (a, g) in both:
            direction = left @ (a.T @ g / 8) @ right
            length = np.sqrt(weight.size) if step == "rms" else np.linalg.norm(weight)
            direction *= 0.03 * length / np.linalg.norm(direction)
            np.testing.assert_allclose(change, -direction, rtol=1e-7, atol=1e-12)
        params = optax.apply_updates(params, updates)
    assert jax.tree.structure(state) == shape
    names = kfac.telemetry(state)
    assert not any("residual" in name for name in names), "no product measures it"
    assert np.isfinite(list(names.values())).all()


def numpy_inverses(a, g):
    """(A + π√γ I)⁻¹ and (G + √γ/π I)⁻¹ with γ of 0.3 mean eigenvalues of A ⊗ G."""
    a, g = np.asarray(a, float), np.asarray(g, float)
    means = np.trace(a) / len(a), np.trace(g) / len(g)
    root, pi = np.sqrt(0.3 * means[0] * means[1]), np.sqrt(means[0] / means[1])
    return np.linalg.inv(a + root * pi * np.eye(len(a))), np.linalg.inv(
        g + root / pi * np.eye(len(g))
    )


@pytest.mark.slow
def test_narrow_products_round_what_they_multiply_and_nothing_else():
    options = dict(step="rms", momentum=0.0, damping=0.3, iterations=0)
    layers = found()
    optimizer = kfac.kfac(0.03, layers, product_dtype="bfloat16", **options)
    updates, state = first(optimizer)
    averages = kfac.find_state(state).averages
    rounded = lambda a: np.asarray(a).astype(jnp.bfloat16).astype(np.float64)
    for name, (a, g) in zip("ab", pairs_of(), strict=True):
        moments = [rounded(v).T @ rounded(v) / 8 for v in (a, g)]
        for factor, moment in zip(averages.factors[name], moments, strict=True):
            np.testing.assert_allclose(factor[0] / averages.weight, moment, rtol=1e-6, atol=1e-7)
        narrow = averages.inverses[name]
        assert {v.dtype for v in narrow} == {jnp.dtype(jnp.bfloat16)}
        for inverse, expected in zip(narrow, numpy_inverses(*moments), strict=True):
            np.testing.assert_allclose(
                inverse[0].astype(float), expected, rtol=2**-8, atol=2**-8 * abs(expected).max()
            )
        left, right = (v[0].astype(float) for v in narrow)
        direction = rounded(left @ rounded(a.T @ g / 8)) @ right
        change = updates[name]["kernel"]
        expected = -0.03 * direction * np.sqrt(direction.size) / np.linalg.norm(direction)
        np.testing.assert_allclose(change, expected[: len(change)], rtol=1e-5, atol=1e-7)


def test_no_state_holds_empty_arrays():  # which Orbax does not store
    layers = found()
    for kept in (layers, layers.select(lambda block: False)):
        for optimizer in (kfac.kfac(0.1, kept, iterations=0), kfac.kfac(0.1, kept)):
            state = optimizer.init(PARAMS)
            assert all(jnp.size(leaf) for leaf in jax.tree.leaves(state))
            kfac.telemetry(state)


@pytest.mark.slow
def test_cg_makes_up_for_narrow_inverses():
    layers = found()
    options = dict(step="rms", momentum=0.0, damping=0.1, iterations=12)
    optimizer = kfac.kfac(0.03, layers, product_dtype="bfloat16", **options)
    _, state = first(optimizer)
    assert all(kfac.find_stats(state)[0].residual < 1e-6)


def test_devices_with_few_real_examples_count_for_as_few():
    def loss_fn(params, x, y, mask, total):
        z = kfac.tap(kfac.Dense(), params, x, path="")
        losses = optax.softmax_cross_entropy_with_integer_labels(z, y)
        return (mask * losses).sum() / total, (z, (mask, total))

    params = {"kernel": normal(0, 4, 3)}
    x, y, mask = normal(1, 16, 4), jnp.arange(16) % 3, (jnp.arange(16) < 6).astype(float)
    options = dict(has_aux=True, fisher="enumerate", outputs=lambda aux: aux[0])

    def step(x, y, mask, total, axis_name=None):
        function = kfac.value_grad_and_curvature(
            loss_fn, **options, weights=lambda aux: aux[1], axis_name=axis_name
        )
        optimizer = kfac.kfac(
            *(1.0, kfac.find_layers(loss_fn, params, x, y, mask, total)),
            **dict(step="clip", kl_clip=None, momentum=0.0),
        )
        _, grads, curvature = function(params, x, y, mask, total)
        state = optimizer.init(params)
        return optimizer.update(grads, state, params, curvature=curvature)[0]["kernel"]

    parts = [a.reshape(4, 4, *a.shape[1:]) for a in (x, y, mask)]
    on_each = jax.vmap(lambda *part: step(*part, 6 / 4, "device"), axis_name="device")
    expected = np.broadcast_to(step(x, y, mask, 6.0), (4, 4, 3))
    np.testing.assert_allclose(on_each(*parts), expected, rtol=1e-9)


@pytest.mark.slow
def test_inverses_are_those_of_the_first_curvature_however_late_it_comes():
    layers = found()
    optimizer = kfac.kfac(0.1, layers, step="rms", iterations=0, momentum=0.0)
    function = kfac.value_grad_and_curvature(network, fisher="mc", has_aux=True)

    @jax.jit
    def step(state, refresh):
        _, grads, curvature = function(PARAMS, X, LABELS, key=jax.random.key(1), refresh=refresh)
        return optimizer.update(grads, state, PARAMS, curvature=curvature)

    expected, _ = step(optimizer.init(PARAMS), True)
    without, state = step(optimizer.init(PARAMS), False)
    late, _ = step(state, True)
    close(late, expected, rtol=1e-9)
    assert not np.allclose(without["b"]["kernel"], expected["b"]["kernel"], rtol=1e-2)


@pytest.mark.slow
def test_blocks_without_inverses_are_solved_by_cg_beside_those_that_have_them(monkeypatch):
    monkeypatch.setattr(_blocks, "MOST_ROWS", 4)  # a has nine
    params, x = {**PARAMS, "a": {"kernel": normal(0, 8, 4), "bias": normal(1, 4)}}, normal(3, 8, 8)
    layers = kfac.find_layers(network, params, x, LABELS)
    inverse = kfac.kfac(0.1, layers, damping=0.1, iterations=0)
    plain = kfac.kfac(0.1, layers, damping=0.1)
    updates, state, _ = make_step(inverse)(params, inverse.init(params), x, LABELS)
    expected, _, _ = make_step(plain)(params, plain.init(params), x, LABELS)
    np.testing.assert_allclose(updates["a"]["kernel"], expected["a"]["kernel"], rtol=1e-9)
    assert not np.allclose(updates["b"]["kernel"], expected["b"]["kernel"], rtol=1e-3)
    names = [name for name in kfac.telemetry(state) if "residual" in name]
    assert names == ["kfac/residual/a"]


@pytest.mark.parametrize(("make", "step"), [(kfac.KfacOptions, "clip"), (kfac.CgFacOptions, "rms")])
def test_inverses_alone_are_for_steps_that_take_a_direction(make, step):
    with pytest.raises(ValueError, match="expected at least one of iterations, or kfac with"):
        make(iterations=0, step=step)


@pytest.mark.slow
def test_how_layers_add_up_is_averaged_and_kept_between_curvature_batches():
    layers = found()
    function = kfac.value_grad_and_curvature(network, has_aux=True, fisher="empirical")

    def stepper(optimizer):

        @functools.partial(jax.jit, static_argnames="refresh")
        @jax.jit
        def step(state, x, scale=1.0, **refresh):
            _, grads, curvature = function(PARAMS, x, LABELS, **refresh)
            grads = jax.tree.map(lambda g: scale * g, grads)
            return optimizer.update(grads, state, PARAMS, curvature=curvature)[1]

        return step, optimizer.init(PARAMS)

    def coherence(state):
        return float(kfac.find_state(state).stats.coherence)

    other = normal(4, 8, 3)
    step, empty = stepper(kfac.kfac(1.0, layers, step="clip"))
    first = step(empty, X, refresh=True)
    assert coherence(first) > 1  # two layers of one network pull together
    assert coherence(step(first, other, refresh=False)) == coherence(first)
    # No gradient, no direction to measure along.
    for before, known in ((empty, 1.0), (first, coherence(first))):
        still = step(before, other, scale=0.0, refresh=True)
        np.testing.assert_allclose(coherence(still), known, rtol=1e-6)

    # What a batch gives does not depend on the ones before it here.
    step, empty = stepper(absolute(1.0, layers, damping=0.1))
    first, second = coherence(step(empty, X)), coherence(step(empty, other))
    both = coherence(step(step(empty, X), other))
    np.testing.assert_allclose(both, (0.95 * first + second) / 1.95, rtol=1e-6)


def test_the_learning_rate_scales_a_clipped_step():
    # Clipped after the rate, all steps would have one length, and a schedule would decay nothing.
    layers = found()

    def updates(rate):
        options = dict(damping=0.1, momentum=0.0, kl_clip=1e-6)
        optimizer = kfac.kfac(rate, layers, step="clip", **options)
        updates, state = first(optimizer)
        assert kfac.find_state(state).stats.kl_scale < 1
        return updates

    whole, tenth = updates(1.0), updates(0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, 0.1 * a, rtol=1e-6), whole, tenth)


@pytest.mark.slow
def test_refresh_keeps_averages():
    layers = found()
    optimizer = kfac.kfac(1.0, layers, damping=0.1, step="clip")
    function = kfac.value_grad_and_curvature(network, has_aux=True)

    @jax.jit
    def step(state, refresh):
        _, grads, curvature = function(PARAMS, X, LABELS, key=jax.random.key(0), refresh=refresh)
        return optimizer.update(grads, state, PARAMS, curvature=curvature)

    updates, state = step(optimizer.init(PARAMS), True)
    stale_updates, stale = step(state, False)
    jax.tree.map(
        np.testing.assert_array_equal,
        kfac.find_state(stale).averages.factors,
        kfac.find_state(state).averages.factors,
    )
    # The same gradient, factors and inverses: the second step is the first and what momentum keeps
    # of it.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, 1.9 * a, rtol=1e-5, atol=1e-9),
        updates,
        stale_updates,
    )


def test_what_needs_fresh_curvature_refuses_old():
    layers = found()
    optimizer = kfac.cg_fac(1.0, layers)
    function = kfac.value_grad_and_curvature(network, has_aux=True)
    _, grads, curvature = function(
        PARAMS, X, LABELS, key=jax.random.key(0), refresh=jnp.array(True)
    )
    with pytest.raises(ValueError, match="expected fresh curvature at every step"):
        optimizer.update(grads, optimizer.init(PARAMS), PARAMS, curvature=curvature)


# ---- Optax manners


def test_it_raises_rather_than_fall_back_to_gradient_descent():
    layers = found()
    optimizer = kfac.kfac(1.0, layers)
    state, zeros = optimizer.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
    with pytest.raises(ValueError, match="kfac.value_grad_and_curvature"):
        optimizer.update(zeros, state, PARAMS)
    curvature = kfac.value_grad_and_curvature(network, fisher="empirical", has_aux=True)(
        PARAMS, X, LABELS
    )[2]
    with pytest.raises(ValueError, match="expected curvature of fisher='mc', got 'empirical'"):
        kfac.kfac(1.0, layers, fisher="mc").update(zeros, state, PARAMS, curvature=curvature)
    fewer = kfac.value_grad_and_curvature(
        lambda p, x: kfac.tap(kfac.Dense(), p["b"], x, path="b").sum(), fisher="empirical"
    )(PARAMS, normal(0, 8, 4))[2]
    with pytest.raises(ValueError, match="got none of a"):
        optimizer.update(zeros, state, PARAMS, curvature=fewer)
    for make, wrong in (
        (kfac.kfac, dict(product_dtype="float16")),
        (kfac.cg_fac, dict(solver="lu")),
        (kfac.kfac, dict(step="adam")),
    ):
        with pytest.raises(ValueError, match="to be one of"):
            make(1.0, layers, **wrong)


@pytest.mark.slow
def test_uncovered_parameters_get_adamw_and_weight_decay_means_what_it_does_there():
    params = {**PARAMS, "free": normal(8, 2)}
    layers = found(with_free_parameter, params)
    mask = {"a": {"kernel": True, "bias": False}, "b": {"kernel": True}, "free": False}
    options = dict(damping=0.1, fallback_learning_rate=0.01)
    plain = kfac.kfac(1.0, layers, **options)
    decayed = kfac.kfac(1.0, layers, **options, weight_decay=0.5, weight_decay_mask=mask)
    updates, with_decay = (first(o, with_free_parameter, params)[0] for o in (plain, decayed))
    grads = jax.grad(lambda p: with_free_parameter(p, X, LABELS)[0])(params)
    adamw = optax.adamw(0.01, weight_decay=0.0)
    expected = adamw.update(grads["free"], adamw.init(params["free"]), params["free"])[0]
    np.testing.assert_allclose(updates["free"], expected, rtol=1e-10)
    difference = jax.tree.map(jnp.subtract, with_decay, updates)
    decay = jax.tree.map(lambda p, m: -0.01 * 0.5 * p * m, params, mask)
    jax.tree.map(lambda d, e: np.testing.assert_allclose(d, e, atol=1e-14), difference, decay)


def test_layers_left_out_go_to_the_fallback():
    layers = found()
    some = layers.select(lambda block: block.name == "b")
    assert "fallback (left out)" in str(some)
    updates = {}
    for name, chosen in (("all", layers), ("some", some)):
        optimizer = fixed(chosen, damping=0.1, fallback=optax.sgd(0.1))
        updates[name] = first(optimizer)[0]
    np.testing.assert_allclose(
        updates["some"]["b"]["kernel"], updates["all"]["b"]["kernel"], rtol=1e-10
    )
    grads = jax.grad(lambda p: network(p, X, LABELS)[0])(PARAMS)
    jax.tree.map(
        lambda u, g: np.testing.assert_allclose(u, -0.1 * g, rtol=1e-10),
        updates["some"]["a"],
        grads["a"],
    )


@pytest.mark.slow
def test_chain_schedule_partition_and_masks():
    layers = found()
    reference = fixed(layers, damping=0.1)
    expected = first(reference)[0]

    options = dict(damping=0.1, **WHOLE)
    halved = optax.chain(kfac.kfac(lambda count: 0.5, layers, **options), optax.scale(4.0))
    updates, state = first(halved)
    close(updates, jax.tree.map(lambda e: 2 * e, expected), rtol=1e-10)
    assert "kfac/residual/a" in kfac.telemetry(state)

    split = optax.partition(
        {"second": reference, "first": optax.sgd(0.1)}, {"a": "first", "b": "second"}
    )
    updates, _ = first(split)
    grads = jax.grad(lambda p: network(p, X, LABELS)[0])(PARAMS)
    np.testing.assert_allclose(updates["a"]["kernel"], -0.1 * grads["a"]["kernel"], rtol=1e-10)
    np.testing.assert_allclose(updates["b"]["kernel"], expected["b"]["kernel"], rtol=1e-10)


HYPERPARAMETERS = dict(
    learning_rate=0.5,
    momentum=0.7,
    damping=0.2,
    kl_clip=0.01,
    weight_decay=0.3,
    fallback_learning_rate=0.02,
)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (kfac.kfac, dict(step="clip", factor_decay=0.8)),
        pytest.param(kfac.cg_fac, dict(tolerance=0.1), marks=pytest.mark.slow),
    ],
)
def test_hyperparameters_are_data(make, options):
    """One compiled step for other values of all of them, by optax's own wrapper."""
    params = {**PARAMS, "free": normal(8, 2)}
    layers = found(with_free_parameter, params)
    values = {n: v for n, v in (HYPERPARAMETERS | options).items() if isinstance(v, float)}
    static = {n: v for n, v in options.items() if n not in values}
    expected = make(layers=layers, **values, **static)
    of = {kfac.kfac: kfac.KfacOptions, kfac.cg_fac: kfac.CgFacOptions}[make]
    inject = optax.inject_hyperparams(make, static_args=of.STATIC_ARGUMENTS)
    optimizer = inject(layers=layers, **{n: 0.5 * v for n, v in values.items()}, **static)
    step, reference = (
        make_step(optimizer, with_free_parameter),
        make_step(expected, with_free_parameter),
    )
    step(params, optimizer.init(params), X, LABELS)
    state, other = optimizer.init(params), expected.init(params)
    state.hyperparams.update({n: jnp.asarray(v, jnp.float64) for n, v in values.items()})
    for x in (X, X[::-1]):
        updates, state, _ = step(params, state, x, LABELS)
        wanted, other, _ = reference(params, other, x, LABELS)
        close(updates, wanted, rtol=1e-9, atol=1e-14)
    assert step._cache_size() == 1
    np.testing.assert_allclose(
        list(kfac.telemetry(state).values()), list(kfac.telemetry(other).values()), rtol=1e-9
    )


def test_what_shapes_the_program_is_not_data():
    layers = found()
    message = "iterations.*pass static_args=kfac.KfacOptions.STATIC_ARGUMENTS"
    with pytest.raises(ValueError, match=message):
        optax.inject_hyperparams(kfac.kfac)(1.0, layers, iterations=2).init(PARAMS)
    with pytest.raises(TypeError, match="dampin"):
        kfac.kfac(1.0, layers, dampin=0.1)


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (kfac.KfacOptions, "damping", -1.0),
        (kfac.KfacOptions, "factor_decay", 1.0),
        (kfac.KfacOptions, "kl_clip", 0.0),
        (kfac.KfacOptions, "iterations", -1),
        (kfac.KfacOptions, "inverse_interval", 0),
        (kfac.CgFacOptions, "tolerance", float("nan")),
    ],
)
def test_numbers_out_of_range_are_refused(make, option, value):
    with pytest.raises(ValueError, match=f"expected {option} to be"):
        make(**{option: value})


def test_schedules_of_other_numbers_than_the_rate_are_for_inject_hyperparams():
    with pytest.raises(ValueError, match="expected damping to be a number.*inject_hyperparams"):
        kfac.KfacOptions(damping=optax.exponential_decay(1.0, 10, 0.5))


def test_masks_that_leave_no_block_and_masks_that_break_one():
    params = {**PARAMS, "free": normal(8, 2)}
    layers = found(with_free_parameter, params)
    grads = jax.grad(lambda p: with_free_parameter(p, X, LABELS)[0])(params)
    expected = optax.adamw(0.01, weight_decay=0.0)
    expected, _ = expected.update(grads["free"], expected.init(params["free"]), params["free"])
    optimizer = kfac.kfac(1.0, layers, fallback_learning_rate=0.01)
    for mask in (
        {"a": False, "b": False, "free": True},
        jax.tree.map(lambda p: p.shape == (2,), params),
    ):
        masked = optax.masked(optimizer, mask)
        updates, state = masked.update(grads, masked.init(params), params)
        np.testing.assert_allclose(updates["free"], expected, rtol=1e-12)
        np.testing.assert_array_equal(
            updates["a"]["kernel"], grads["a"]["kernel"]
        )  # optax leaves it to others
        assert int(kfac.find_state(state).count) == 1
    nothing = kfac.kfac(1.0, layers.select(lambda block: False), fallback=optax.sgd(0.1))
    updates, _ = nothing.update(grads, nothing.init(params), params)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -0.1 * g, rtol=1e-12), updates, grads)

    without_bias = {"a": {"kernel": True, "bias": False}, "b": True, "free": True}
    with pytest.raises(ValueError, match=r"got a part of a \(without a/bias\): .* layers.select"):
        optax.masked(optimizer, without_bias).init(params)
    labels = {"a": {"kernel": "first", "bias": "second"}, "b": "first", "free": "second"}
    with pytest.raises(ValueError, match=r"got a part of a \(without a/bias\)"):
        optax.partition({"first": optimizer, "second": optax.sgd(0.1)}, labels).init(params)


def test_another_tree_is_refused_and_so_are_parameters_without_a_layer():
    params = {**PARAMS, "free": normal(8, 2)}
    layers = found(with_free_parameter, params)
    with pytest.raises(ValueError, match="got one without a/bias, a/kernel.*it has params/a/bias"):
        kfac.kfac(1.0, layers).init({"params": params})
    with pytest.raises(ValueError, match="expected parameters that layers cover, got free"):
        kfac.scale_by_kfac(layers).init(params)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["free", "a"])
def test_a_gradient_that_is_not_finite_anywhere_moves_no_share(where):
    params = {**PARAMS, "free": normal(8, 2)}
    layers = found(with_free_parameter, params)
    optimizer = kfac.kfac(1.0, layers, damping=0.1, weight_decay=0.1)
    function = kfac.value_grad_and_curvature(with_free_parameter, fisher="empirical", has_aux=True)

    @jax.jit
    def step(state, poison):
        _, grads, curvature = function(params, X, LABELS)
        grads = {**grads, where: jax.tree.map(lambda g: g + poison, grads[where])}
        return optimizer.update(grads, state, params, curvature=curvature)

    _, state = step(optimizer.init(params), 0.0)
    refused, after = step(state, jnp.nan)
    assert all(np.all(u == 0) for u in jax.tree.leaves(refused))
    jax.tree.map(
        np.testing.assert_array_equal,
        after.inner_states["fallback"],
        state.inner_states["fallback"],
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step(after, 0.0)))


@pytest.mark.slow
def test_multi_steps_applies_the_mean_gradient():
    layers = kfac.find_layers(network, PARAMS, X[:4], LABELS[:4])
    optimizer = optax.MultiSteps(absolute(1.0, layers, damping=1e9, **WHOLE), 2)
    step, state = make_step(optimizer), optimizer.init(PARAMS)
    first, state, _ = step(PARAMS, state, X[:4], LABELS[:4])
    assert all(np.all(u == 0) for u in jax.tree.leaves(first))
    second, state, _ = step(PARAMS, state, X[4:], LABELS[4:])
    grads = jax.grad(lambda p: network(p, X, LABELS)[0])(PARAMS)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -g / 1e9, rtol=1e-5), second, grads)


def test_the_step_compiles_once_and_its_state_survives_a_checkpoint(tmp_path):
    from orbax.checkpoint import v1 as ocp

    with jax.enable_x64(False):  # Orbax reads on threads of its own, where a context does not reach
        params, x = jax.tree.map(
            lambda p: p.astype(jnp.float32), ({**PARAMS, "free": normal(8, 2)}, X)
        )
        layers = kfac.find_layers(with_free_parameter, params, x, LABELS)
        optimizer = kfac.cg_fac(1.0, layers, damping=0.1)
        step = make_step(optimizer, with_free_parameter)
        _, state, _ = step(params, optimizer.init(params), x, LABELS)
        expected = step(params, state, x, LABELS)
        assert step._cache_size() == 1  # the state that comes out is like the one that went in
        ocp.save(tmp_path / "state", state)
        got = step(params, ocp.load(tmp_path / "state", jax.eval_shape(lambda: state)), x, LABELS)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_curvature_of_another_trace_needs_no_other_program():
    """A gradient that is not compiled is traced at every step."""
    optimizer, traces = kfac.kfac(1e-3, found()), []
    function = kfac.value_grad_and_curvature(network, fisher="empirical", has_aux=True)

    @jax.jit
    def update(grads, state, curvature):
        traces.append(curvature)
        return optimizer.update(grads, state, PARAMS, curvature=curvature)

    state = optimizer.init(PARAMS)
    for _ in range(2):
        _, grads, curvature = function(PARAMS, X, LABELS)
        _, state = update(grads, state, curvature)
    assert len(traces) == 1


def test_optax_finds_what_of_the_state_is_like_the_parameters():
    optimizer = kfac.kfac(1e-3, found())
    state = optax.tree_map_params(optimizer, lambda leaf: leaf + 1, optimizer.init(PARAMS))
    found_state = kfac.find_state(state)
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(found_state.velocity))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found_state.averages))


@pytest.mark.slow
@pytest.mark.parametrize("make", [kfac.kfac, kfac.cg_fac])
def test_no_array_stands_in_two_places_of_the_state(make):
    """A step that donates its state hands each buffer over once."""
    optimizer = make(1.0, found())
    function = kfac.value_grad_and_curvature(network, has_aux=True, fisher="empirical")

    def step(state):
        _, grads, curvature = function(PARAMS, X, LABELS)
        return optimizer.update(grads, state, PARAMS, curvature=curvature)[1]

    states = [optimizer.init(PARAMS)]
    states.append(step(states[0]))  # without jit, which makes arrays of its own
    for state in states:
        buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        assert len(set(buffers)) == len(buffers)
    assert int(kfac.find_state(jax.jit(step, donate_argnums=0)(states[1])).count) == 2


def product(params, x):
    return x @ params["kernel"] + params["bias"]


def with_jacobian(params, x, labels):
    """The network with a first layer that has no factors: its product passes through the layer."""
    x = jnp.tanh(kfac.tap(kfac.Generic(product), params["a"], x, path="a"))
    return cross_entropy(kfac.tap(kfac.Dense(), params["b"], x, path="b"), labels)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [network, with_jacobian])
@pytest.mark.parametrize("options", [{"step": "share"}, {"step": "clip"}])
def test_curvature_in_a_pass_of_its_own_is_that_of_the_gradients_pass(loss_fn, options):
    """Of the same examples, at steps that renew it and at those that do not."""
    layers = kfac.find_layers(loss_fn, PARAMS, X, LABELS)
    optimizer = kfac.kfac(0.1, layers, damping=0.1, inverse_interval=2, **options)
    together = kfac.value_grad_and_curvature(loss_fn, has_aux=True)
    apart = kfac.curvature(loss_fn, has_aux=True)

    @functools.partial(jax.jit, static_argnames="alone")
    def step(params, state, key, refresh, alone):
        _, grads, curvature = together(params, X, LABELS, key=key, refresh=refresh)
        if alone:
            curvature = apart(params, X, LABELS, key=key, refresh=refresh)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        return optax.apply_updates(params, updates), state

    ends = []
    for alone in (False, True):
        params, state = PARAMS, optimizer.init(PARAMS)
        for i in range(5):
            params, state = step(params, state, jax.random.key(i), i % 3 == 0, alone)
        ends.append((params, state))
    close(*ends, rtol=1e-9, atol=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(
    ("make", "step"), [(kfac.kfac, "rms"), (kfac.kfac, "clip"), (kfac.cg_fac, "clip")]
)
def test_curvature_that_is_not_finite_stays_in_no_average(make, step, poison):
    """As an overflow in half precision leaves it, with a gradient that is finite."""
    layers = found()
    optimizer = make(1.0, layers, step=step, damping=0.1)
    function = kfac.value_grad_and_curvature(network, fisher="empirical", has_aux=True)

    @jax.jit
    def step(state, factor):
        _, grads, curvature = function(PARAMS, X, LABELS)
        captured = jax.tree.map(
            lambda a: a * factor if jnp.issubdtype(a.dtype, jnp.inexact) else a, curvature
        )
        return optimizer.update(grads, state, PARAMS, curvature=captured)

    _, state = step(optimizer.init(PARAMS), 1.0)
    _, after = step(state, poison)
    averages = [kfac.find_state(s).averages for s in (state, after)]
    ready = [(jax.tree.map(lambda f, a=a: f / a.weight, a.factors), a.traces) for a in averages]
    close(*ready, rtol=1e-12, atol=0)
    updates, _ = step(after, 1.0)
    assert all(np.any(u) and np.isfinite(u).all() for u in jax.tree.leaves(updates))

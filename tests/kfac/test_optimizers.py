"""The optimizer: Algorithm 1 against NumPy, exactness on problems with a known answer, safe steps,
optax manners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import softmax

import kfac
from kfac._arrays import flatten
from kfac.curvature import _blocks
from kfac.step import _optimizers
from tests.kfac.reference import (
    close,
    cross_entropy,
    empirical,
    losses,
    normal,
    per_example_gradients,
    tap,
)

pytestmark = pytest.mark.usefixtures("x64")


def network(params, x, labels):
    x = jnp.tanh(tap(params, x, "a"))
    return cross_entropy(tap(params, x, "b"), labels)


PARAMS = {"a": {"kernel": normal(0, 3, 4), "bias": normal(1, 4)}, "b": {"kernel": normal(2, 4, 3)}}
HALF = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
FREE = {**PARAMS, "free": normal(8, 2)}
X, LABELS = normal(3, 8, 3), jnp.arange(8) % 3


def with_free_parameter(params, x, labels):
    """The network and parameters that no layer covers."""
    loss, logits = network(params, x, labels)
    return loss + 0.1 * (params["free"] ** 2).sum(), logits


def make_step(
    optimizer, loss_fn=network, change=lambda grads, curvature, by: (grads, curvature), **options
):
    """A step whose gradient and curvature are changed by a number on their way."""
    function = empirical(loss_fn, **options)

    @jax.jit
    def step(params, state, x=X, labels=LABELS, key=None, by=1.0, **refresh):
        _, grads, curvature = function(params, x, labels, key=key, **refresh)
        grads, curvature = change(grads, curvature, by)
        return optimizer.update(grads, state, params, curvature=curvature)

    return step


def all_zero(tree):
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def found(loss_fn=network, params=PARAMS):
    return kfac.find_layers(loss_fn, params, X, LABELS)


def first(optimizer, loss_fn=network, params=PARAMS, x=X):
    """The updates of a first step, and the state after it."""
    return make_step(optimizer, loss_fn)(params, optimizer.init(params), x)


def joined(tree):
    """The matrices of both layers, [W; b] and W."""
    a, b = tree["a"], tree["b"]
    return [np.vstack([a["kernel"], a["bias"]]), np.asarray(b["kernel"])]


def pairs_of(params=PARAMS, x=X, labels=LABELS):
    """Inputs and cotangents (of each example's own loss) of both layers of ``network``."""
    (w, u), x = joined(params), np.hstack([x, np.ones((len(x), 1))])
    hidden = np.tanh(x @ w)
    g2 = softmax(hidden @ u, axis=1) - np.eye(3)[np.asarray(labels)]
    g1 = (g2 @ u.T) * (1 - hidden**2)
    return (x, g1), (hidden, g2)


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


def numpy_algorithm_1(a, g, b, gamma, x0, m, tolerance):
    """Lines 1-17 of the paper's Algorithm 1 with v as (in, out); the product is the mean over the
    batch."""

    def fv(v):
        theta = np.einsum("ni,io,no->n", a, v, g)
        return (a * theta[:, None]).T @ g / len(a) + gamma * v

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
    options = dict(damping=0.05, max_iterations=m, tolerance=tolerance)
    optimizer = kfac.algorithm_1(0.3, found(), **options)
    step, params, state = make_step(optimizer), PARAMS, optimizer.init(PARAMS)
    starts = [np.zeros((4, 4)), np.zeros((4, 3))]
    for batch in range(4):  # batches differ: the warm start matters
        x, labels = normal(10 + batch, 8, 3), (np.arange(8) + batch) % 3
        pairs = pairs_of(params, x, labels)
        updates, state = step(params, state, x, jnp.asarray(labels))
        params = optax.apply_updates(params, updates)
        starts = [
            numpy_algorithm_1(a, g, a.T @ g / len(a), 0.05, x0, m, tolerance)
            for (a, g), x0 in zip(pairs, starts, strict=True)
        ]
        for update, solution in zip(joined(updates), starts, strict=True):
            # CG amplifies rounding, in all components alike.
            close(update, -0.3 * solution, rtol=0, atol=3e-10 * np.abs(solution).max())


# ---- Known answers


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (kfac.kfac, {"iterations": 60}),
        pytest.param(kfac.cg_fac, {"iterations": 60}, marks=pytest.mark.slow),
        (kfac.cg_fac, {"solver": "dual"}),
    ],
)
def test_solutions_are_numpys(make, options):
    optimizer = fixed(found(), make, damping=0.1, **options)
    step, state = make_step(optimizer), optimizer.init(PARAMS)
    for x in (X * jnp.nan, X * jnp.nan, X):  # refused steps say nothing of curvature
        updates, state = step(PARAMS, state, x)
    for update, (a, g) in zip(joined(updates), pairs_of(), strict=True):
        if make is kfac.kfac:
            fisher = np.kron(a.T @ a / 8, g.T @ g / 8)
        else:
            rows = np.einsum("ni,no->nio", a, g).reshape(8, -1)
            fisher = rows.T @ rows / 8
        damped = fisher + 0.1 * np.trace(fisher) / len(fisher) * np.eye(len(fisher))
        solution = np.linalg.solve(damped, (a.T @ g / 8).ravel())
        close(np.ravel(update), -solution, rtol=1e-7, atol=1e-11)


# ---- Safe steps


def test_a_step_that_is_not_finite_changes_nothing():
    optimizer = kfac.kfac(1.0, found(with_free_parameter, FREE), step="clip", damping=0.1)
    step = make_step(optimizer, with_free_parameter)
    _, state = step(FREE, optimizer.init(FREE))
    before = kfac.find_state(state)
    assert not all_zero(before.velocity)
    updates, state = step(FREE, state, X.at[0, 0].set(jnp.nan))
    after = kfac.find_state(state)
    jax.tree.map(np.testing.assert_array_equal, after.averages, before.averages)
    assert all_zero([updates["a"], updates["b"], after.velocity])
    assert float(after.stats.rejected) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "refused"), [(1.0, False), (1e7, True)])
def test_a_step_that_a_narrow_dtype_cannot_hold_is_refused(rate, refused):
    """float16 ends at 65,504, and the solution is of float32."""
    layers = found(params=HALF)
    optimizer = kfac.kfac(rate, layers, step="clip", damping=0.1, kl_clip=None)
    updates, state = first(optimizer, params=HALF)
    assert all(u.dtype == jnp.float16 for u in jax.tree.leaves(updates))
    factors = jax.tree.leaves(kfac.find_state(state).averages.factors)
    assert all(factor.dtype == jnp.float32 for factor in factors)
    assert all_zero(updates) == refused
    assert bool(kfac.find_state(state).stats.rejected) == refused


def test_a_warm_start_that_a_narrow_dtype_cannot_hold_is_none():
    """A small share of a solution fits where the solution does not."""

    def faint(params, x, labels):
        loss, logits = network(params, x, labels)
        return 1e-5 * loss, logits

    optimizer = kfac.algorithm_1(1e-6, found(faint, HALF), damping=1e-12, max_iterations=4)
    step, state = make_step(optimizer, faint), optimizer.init(HALF)
    for _ in range(2):
        updates, state = step(HALF, state)
        assert not all_zero(updates)
        assert all_zero(kfac.find_state(state).solution)


@pytest.mark.parametrize("make", [kfac.cg_fac, kfac.kfac])
def test_kl_clip_bounds_the_step_in_the_metric(make):
    def kl(kl_clip):
        options = dict(step="clip", momentum=0.0, damping=0.1, iterations=60)
        updates, state = first(make(1.0, found(), kl_clip=kl_clip, **options))
        of_each = lambda params: losses(network(params, X, LABELS)[1], LABELS)
        _, derivatives = jax.jvp(of_each, (PARAMS,), (updates,))
        return float((derivatives**2).mean()), float(kfac.find_state(state).stats.kl_scale)

    free, scale = kl(None)
    assert scale == 1.0
    close(kl(free / 9), (free / 9, 1 / 3), rtol=1e-6)


def test_a_share_step_is_a_share_of_each_layers_own_size():
    start = {**PARAMS, "b": {"kernel": jnp.zeros((4, 3))}}  # which is taken for one of 0.01
    layers = found(params=start)
    plain = absolute(1.0, layers, damping=0.05, **WHOLE)
    optimizer = absolute(0.03, layers, step="share", momentum=0.75, damping=0.05)
    solve_, step, state = make_step(plain), make_step(optimizer), optimizer.init(start)

    sizes = [np.linalg.norm(joined(start)[0]), 0.01 * np.sqrt(12)]
    last = [np.zeros((4, 4)), np.zeros((4, 3))]
    for batch in range(2):
        x = normal(20 + batch, 8, 3)
        directions = joined(solve_(start, plain.init(start), x)[0])
        updates, state = step(start, state, x)
        last = [
            0.75 * before + 0.25 * 0.03 * size * direction / (np.linalg.norm(direction) or 1)
            for before, size, direction in zip(last, sizes, directions, strict=True)
        ]
        close(joined(updates), last, rtol=1e-9, atol=1e-15)
    # The hidden layer gets no gradient through a kernel of zeros.
    assert not np.any(updates["a"]["kernel"])
    # What the model promises for the new part: with (F + γ) x = ∇L, −s ∇L·x + s² ∇L·x / 2.
    gradient = joined(jax.grad(lambda p: network(p, x, LABELS)[0])(start))[1]
    taken = 0.25 * 0.03 * sizes[1] / np.linalg.norm(directions[1])
    along = -(gradient * directions[1]).sum()
    model = kfac.find_state(state).stats.model
    close(model, -taken * along + taken**2 * along / 2, rtol=1e-9)


@pytest.mark.parametrize("step", ["rms", "share"])
def test_layers_of_a_scan_have_the_length_that_each_would_have_alone(step):
    kernel = normal(0, 2, 3, 3) * jnp.array([1.0, 30.0])[:, None, None]
    params = {"stack": {"kernel": kernel}}

    def scanned(params, x, labels):
        body = lambda x, p: (jnp.tanh(kfac.tap(kfac.Dense(), p, x, path="stack")), None)
        return cross_entropy(jax.lax.scan(body, x, params["stack"])[0], labels)

    layers = found(scanned, params)
    optimizer = absolute(0.02, layers, step=step, momentum=0.0, damping=0.05)
    updates, _ = first(optimizer, scanned, params)
    sizes = np.array([3, 3]) if step == "rms" else np.linalg.norm(kernel, axis=(1, 2))
    lengths = np.linalg.norm(updates["stack"]["kernel"], axis=(1, 2))
    close(lengths, 0.02 * sizes, rtol=1e-9)


@pytest.mark.slow
def test_an_rms_step_has_the_root_mean_square_that_was_asked_for():
    """Along the solution for a gradient with Nesterov's momentum, in float64 NumPy."""
    layers = found()
    optimizer = absolute(0.03, layers, step="rms", momentum=0.75, damping=0.05)
    plain, function = absolute(1.0, layers, damping=0.05, **WHOLE), empirical(network)
    params, state = PARAMS, optimizer.init(PARAMS)
    total = jax.tree.map(np.zeros_like, PARAMS)
    for batch in range(3):
        _, grads, curvature = function(params, normal(20 + batch, 8, 3), LABELS)
        total = jax.tree.map(lambda v, g: 0.75 * v + g, total, grads)
        ahead = jax.tree.map(lambda v, g: 0.75 * v + g, total, grads)
        solution, _ = plain.update(ahead, plain.init(params), params, curvature=curvature)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        for got, direction in zip(joined(updates), joined(solution), strict=True):
            expected = 0.03 * np.sqrt(got.size) * direction / np.linalg.norm(direction)
            close(got, expected, rtol=1e-7, atol=1e-12)
        params = optax.apply_updates(params, updates)
    broken = jax.tree.map(lambda g: g * jnp.nan, grads)
    updates, state = optimizer.update(broken, state, params, curvature=curvature)
    assert all_zero([updates, kfac.find_state(state).velocity])


@pytest.mark.slow
@pytest.mark.parametrize("step", ["rms", "share"])
def test_the_inverses_alone_are_k_facs_step_as_old_as_their_interval_has_them(step):
    """Averages, inverses and directions in float64 NumPy; Martens & Grosse (2015), section 6.3."""
    options = dict(damping=0.3, factor_decay=0.8, inverse_interval=2, momentum=0.0, step=step)
    optimizer, first_of_cg = (kfac.kfac(0.03, found(), iterations=i, **options) for i in (0, 1))
    advance, with_cg = make_step(optimizer), make_step(first_of_cg)
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
        updates, state = advance(params, state, x)
        expected, other = with_cg(params, other, x)
        close(updates, expected, rtol=1e-7, atol=1e-12)
        both = zip(joined(updates), joined(params), inverses, pairs, strict=True)
        for change, weight, (left, right), (a, g) in both:
            direction = left @ (a.T @ g / 8) @ right
            length = np.sqrt(weight.size) if step == "rms" else np.linalg.norm(weight)
            direction *= 0.03 * length / np.linalg.norm(direction)
            close(change, -direction, rtol=1e-7, atol=1e-12)
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
    shifted = a + root * pi * np.eye(len(a)), g + root / pi * np.eye(len(g))
    return [np.linalg.inv(matrix) for matrix in shifted]


@pytest.mark.slow
def test_narrow_products_round_what_they_multiply_and_nothing_else():
    options = dict(step="rms", momentum=0.0, damping=0.3, iterations=0)
    optimizer = kfac.kfac(0.03, found(), product_dtype="bfloat16", **options)
    updates, state = first(optimizer)
    averages = kfac.find_state(state).averages
    rounded = lambda a: np.asarray(a).astype(jnp.bfloat16).astype(np.float64)
    for name, (a, g) in zip("ab", pairs_of(), strict=True):
        moments = [rounded(v).T @ rounded(v) / 8 for v in (a, g)]
        for factor, moment in zip(averages.factors[name], moments, strict=True):
            close(factor[0] / averages.weight, moment, rtol=1e-6, atol=1e-7)
        narrow = averages.inverses[name]
        assert {v.dtype for v in narrow} == {jnp.dtype(jnp.bfloat16)}
        left, right = (v[0].astype(float) for v in narrow)
        for inverse, expected in zip((left, right), numpy_inverses(*moments), strict=True):
            close(inverse, expected, rtol=2**-8, atol=2**-8 * abs(expected).max())
        direction = rounded(left @ rounded(a.T @ g / 8)) @ right
        change = updates[name]["kernel"]
        expected = -0.03 * direction * np.sqrt(direction.size) / np.linalg.norm(direction)
        close(change, expected[: len(change)], rtol=1e-5, atol=1e-7)


def test_no_state_holds_empty_arrays():  # which Orbax does not store
    for kept in (found(), found().select(lambda block: False)):
        for optimizer in (kfac.kfac(0.1, kept, iterations=0), kfac.kfac(0.1, kept)):
            state = optimizer.init(PARAMS)
            assert all(jnp.size(leaf) for leaf in jax.tree.leaves(state))
            kfac.telemetry(state)


@pytest.mark.slow
def test_cg_makes_up_for_narrow_inverses():
    options = dict(step="rms", momentum=0.0, damping=0.1, iterations=12)
    _, state = first(kfac.kfac(0.03, found(), product_dtype="bfloat16", **options))
    assert all(kfac.find_stats(state)[0].residual < 1e-6)


def test_devices_with_few_real_examples_count_for_as_few():
    def loss_fn(params, x, y, mask, total):
        z = kfac.tap(kfac.Dense(), params, x, path="")
        return (mask * losses(z, y)).sum() / total, (z, (mask, total))

    params = {"kernel": normal(0, 4, 3)}
    batch = normal(1, 16, 4), jnp.arange(16) % 3, (jnp.arange(16) < 6).astype(float)
    options = dict(fisher="enumerate", outputs=lambda aux: aux[0], weights=lambda aux: aux[1])

    def step(*args, axis_name=None):
        optimizer = kfac.kfac(1.0, kfac.find_layers(loss_fn, params, *args), **WHOLE)
        function = empirical(loss_fn, **options, axis_name=axis_name)
        _, grads, curvature = function(params, *args)
        updates, _ = optimizer.update(grads, optimizer.init(params), params, curvature=curvature)
        return updates["kernel"]

    parts = [a.reshape(4, 4, *a.shape[1:]) for a in batch]
    on_each = jax.vmap(lambda *part: step(*part, 6 / 4, axis_name="device"), axis_name="device")
    expected = np.broadcast_to(step(*batch, 6.0), (4, 4, 3))
    close(on_each(*parts), expected, rtol=1e-9)


@pytest.mark.slow
def test_inverses_are_those_of_the_first_curvature_however_late_it_comes():
    optimizer = kfac.kfac(0.1, found(), step="rms", iterations=0, momentum=0.0)
    step = functools.partial(make_step(optimizer, fisher="mc"), key=jax.random.key(1))
    expected, _ = step(PARAMS, optimizer.init(PARAMS), refresh=True)
    without, state = step(PARAMS, optimizer.init(PARAMS), refresh=False)
    late, _ = step(PARAMS, state, refresh=True)
    close(late, expected, rtol=1e-9)
    assert not np.allclose(without["b"]["kernel"], expected["b"]["kernel"], rtol=1e-2)


@pytest.mark.slow
def test_blocks_without_inverses_are_solved_by_cg_beside_those_that_have_them(monkeypatch):
    monkeypatch.setattr(_blocks, "MOST_ROWS", 4)  # a has nine
    params, x = {**PARAMS, "a": {"kernel": normal(0, 8, 4), "bias": normal(1, 4)}}, normal(3, 8, 8)
    layers = kfac.find_layers(network, params, x, LABELS)
    inverse = kfac.kfac(0.1, layers, damping=0.1, iterations=0)
    updates, state = first(inverse, params=params, x=x)
    expected, _ = first(kfac.kfac(0.1, layers, damping=0.1), params=params, x=x)
    close(updates["a"]["kernel"], expected["a"]["kernel"], rtol=1e-9)
    assert not np.allclose(updates["b"]["kernel"], expected["b"]["kernel"], rtol=1e-3)
    names = [name for name in kfac.telemetry(state) if "residual" in name]
    assert names == ["kfac/residual/a"]


@pytest.mark.slow
def test_how_layers_add_up_is_averaged_and_kept_between_curvature_batches():
    def stepper(optimizer):
        scaled = lambda grads, curvature, by: (jax.tree.map(lambda g: by * g, grads), curvature)
        step = make_step(optimizer, change=scaled)
        advance = lambda state, x, **options: step(PARAMS, state, x, **options)[1]
        return advance, optimizer.init(PARAMS)

    def coherence(state):
        return float(kfac.find_state(state).stats.coherence)

    other = normal(4, 8, 3)
    step, empty = stepper(kfac.kfac(1.0, found(), step="clip"))
    first = step(empty, X, refresh=True)
    assert coherence(first) > 1  # two layers of one network pull together
    assert coherence(step(first, other, refresh=False)) == coherence(first)
    # No gradient, no direction to measure along.
    for before, known in ((empty, 1.0), (first, coherence(first))):
        still = step(before, other, by=0.0, refresh=True)
        close(coherence(still), known, rtol=1e-6)


def test_cg_fac_is_clipped_by_a_batch_that_its_solution_does_not_know():
    """The second batch measures the first one's solution: Σ_n (Σ_layers θ_n)² / N, densely."""
    optimizer, other = absolute(1.0, found(), damping=1e-3), normal(4, 8, 3)
    step = make_step(optimizer)
    _, after = step(PARAMS, optimizer.init(PARAMS))
    state = kfac.find_state(after)

    def derivatives(x):
        gradients = per_example_gradients(network, PARAMS, x, LABELS)
        along = {
            path: (gradients[path] * v).reshape(len(x), -1).sum(1)
            for path, v in flatten(state.solution).items()
        }
        return [along["a/kernel"] + along["a/bias"], along["b/kernel"]]

    own, new = derivatives(X), derivatives(other)
    layers = sum((theta**2).mean() for theta in own)
    close(state.seen, layers, rtol=1e-9)
    ratios = [(sum(thetas) ** 2).mean() / layers for thetas in (own, new)]
    assert ratios[1] > 2 * ratios[0]
    _, after = step(PARAMS, after, other)
    close(kfac.find_state(after).stats.coherence, (0.95 * ratios[0] + ratios[1]) / 1.95, rtol=1e-9)


def test_the_learning_rate_scales_a_clipped_step():
    # Clipped after the rate, all steps would have one length, and a schedule would decay nothing.
    def updates(rate):
        options = dict(damping=0.1, momentum=0.0, kl_clip=1e-6)
        updates, state = first(kfac.kfac(rate, found(), step="clip", **options))
        assert kfac.find_state(state).stats.kl_scale < 1
        return updates

    close(updates(0.1), jax.tree.map(lambda u: 0.1 * u, updates(1.0)), rtol=1e-6)


@pytest.mark.slow
def test_refresh_keeps_averages():
    optimizer = kfac.kfac(1.0, found(), damping=0.1, step="clip")
    step = functools.partial(make_step(optimizer, fisher="mc"), key=jax.random.key(0))
    updates, state = step(PARAMS, optimizer.init(PARAMS), refresh=True)
    stale_updates, stale = step(PARAMS, state, refresh=False)
    close(*(kfac.find_state(s).averages.factors for s in (stale, state)), rtol=0)
    # The same gradient, factors and inverses: the second step is the first and what momentum keeps
    # of it.
    close(stale_updates, jax.tree.map(lambda u: 1.9 * u, updates), rtol=1e-5, atol=1e-9)


def test_what_needs_fresh_curvature_refuses_old():
    optimizer = kfac.cg_fac(1.0, found())
    with pytest.raises(ValueError, match="expected fresh curvature at every step"):
        make_step(optimizer)(PARAMS, optimizer.init(PARAMS), refresh=True)


# ---- Optax manners


def test_it_raises_rather_than_fall_back_to_gradient_descent():
    layers = found()
    optimizer = kfac.kfac(1.0, layers)
    state, zeros = optimizer.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
    with pytest.raises(ValueError, match="kfac.value_grad_and_curvature"):
        optimizer.update(zeros, state, PARAMS)
    *_, curvature = empirical(network)(PARAMS, X, LABELS)
    with pytest.raises(ValueError, match="expected curvature of fisher='mc', got 'empirical'"):
        kfac.kfac(1.0, layers, fisher="mc").update(zeros, state, PARAMS, curvature=curvature)
    *_, fewer = empirical(lambda p, x: (tap(p, x, "b").sum(), None))(PARAMS, normal(0, 8, 4))
    with pytest.raises(ValueError, match="got none of a"):
        optimizer.update(zeros, state, PARAMS, curvature=fewer)


def adamw_of_free():
    """optax's own update of the parameter that no layer covers, and all gradients."""
    grads = jax.grad(lambda p: with_free_parameter(p, X, LABELS)[0])(FREE)
    adamw = optax.adamw(0.01, weight_decay=0.0)
    return adamw.update(grads["free"], adamw.init(FREE["free"]), FREE["free"])[0], grads


@pytest.mark.slow
def test_uncovered_parameters_get_adamw_and_weight_decay_means_what_it_does_there():
    layers = found(with_free_parameter, FREE)
    mask = {"a": {"kernel": True, "bias": False}, "b": {"kernel": True}, "free": False}
    options = dict(damping=0.1, fallback_learning_rate=0.01)
    plain = kfac.kfac(1.0, layers, **options)
    decayed = kfac.kfac(1.0, layers, **options, weight_decay=0.5, weight_decay_mask=mask)
    updates, with_decay = (first(o, with_free_parameter, FREE)[0] for o in (plain, decayed))
    close(updates["free"], adamw_of_free()[0], rtol=1e-10)
    difference = jax.tree.map(jnp.subtract, with_decay, updates)
    decay = jax.tree.map(lambda p, m: -0.01 * 0.5 * p * m, FREE, mask)
    close(difference, decay, atol=1e-14)


def test_layers_left_out_go_to_the_fallback():
    some = found().select(lambda block: block.name == "b")
    assert "fallback (left out)" in str(some)
    of_all, of_some = (
        first(fixed(layers, damping=0.1, fallback=optax.sgd(0.1)))[0] for layers in (found(), some)
    )
    close(of_some["b"], of_all["b"], rtol=1e-10)
    grads = jax.grad(lambda p: network(p, X, LABELS)[0])(PARAMS)
    close(of_some["a"], jax.tree.map(lambda g: -0.1 * g, grads["a"]), rtol=1e-10)


@pytest.mark.slow
def test_chain_schedule_and_partition():
    reference = fixed(found(), damping=0.1)
    expected = first(reference)[0]

    options = dict(damping=0.1, **WHOLE)
    halved = optax.chain(kfac.kfac(lambda count: 0.5, found(), **options), optax.scale(4.0))
    updates, state = first(halved)
    close(updates, jax.tree.map(lambda e: 2 * e, expected), rtol=1e-10)
    assert "kfac/residual/a" in kfac.telemetry(state)

    each = {"second": reference, "first": optax.sgd(0.1)}
    updates, _ = first(optax.partition(each, {"a": "first", "b": "second"}))
    grads = jax.grad(lambda p: network(p, X, LABELS)[0])(PARAMS)
    close(updates["a"]["kernel"], -0.1 * grads["a"]["kernel"], rtol=1e-10)
    close(updates["b"], expected["b"], rtol=1e-10)


HYPERPARAMETERS = dict(learning_rate=0.5, momentum=0.7, damping=0.2, kl_clip=0.01)
HYPERPARAMETERS |= dict(weight_decay=0.3, fallback_learning_rate=0.02)


@pytest.mark.parametrize(
    ("make", "of", "values", "static"),
    [
        (kfac.kfac, kfac.KfacOptions, {"factor_decay": 0.8}, {"step": "clip"}),
        pytest.param(
            *(kfac.cg_fac, kfac.CgFacOptions, {"tolerance": 0.1}, {}), marks=pytest.mark.slow
        ),
    ],
)
def test_hyperparameters_are_data(make, of, values, static):
    """One compiled step for other values of all of them, by optax's own wrapper."""
    static, values = (
        {"layers": found(with_free_parameter, FREE), **static},
        HYPERPARAMETERS | values,
    )
    expected = make(**values, **static)
    inject = optax.inject_hyperparams(make, static_args=of.STATIC_ARGUMENTS)
    optimizer = inject(**{n: 0.5 * v for n, v in values.items()}, **static)
    step, reference = (make_step(o, with_free_parameter) for o in (optimizer, expected))
    step(FREE, optimizer.init(FREE), X)
    state, other = optimizer.init(FREE), expected.init(FREE)
    state.hyperparams.update({n: jnp.asarray(v, jnp.float64) for n, v in values.items()})
    for x in (X, X[::-1]):
        updates, state = step(FREE, state, x)
        wanted, other = reference(FREE, other, x)
        close(updates, wanted, rtol=1e-9, atol=1e-14)
    assert step._cache_size() == 1
    close(kfac.telemetry(state), kfac.telemetry(other), rtol=1e-9)


def test_what_shapes_the_program_is_not_data():
    message = "iterations.*pass static_args=kfac.KfacOptions.STATIC_ARGUMENTS"
    with pytest.raises(ValueError, match=message):
        optax.inject_hyperparams(kfac.kfac)(1.0, found(), iterations=2).init(PARAMS)
    with pytest.raises(TypeError, match="dampin"):
        kfac.kfac(1.0, found(), dampin=0.1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (kfac.KfacOptions, {"damping": -1.0}, "expected damping to be"),
        (kfac.KfacOptions, {"factor_decay": 1.0}, "expected factor_decay to be"),
        (kfac.KfacOptions, {"kl_clip": 0.0}, "expected kl_clip to be"),
        (kfac.KfacOptions, {"iterations": -1}, "expected iterations to be"),
        (kfac.KfacOptions, {"inverse_interval": 0}, "expected inverse_interval to be"),
        (kfac.CgFacOptions, {"tolerance": float("nan")}, "expected tolerance to be"),
        (kfac.KfacOptions, {"damping": lambda count: 1.0}, "damping to be a .*inject_hyperparams"),
        (kfac.KfacOptions, {"product_dtype": "float16"}, "to be one of"),
        (kfac.CgFacOptions, {"solver": "lu"}, "to be one of"),
        (kfac.KfacOptions, {"step": "adam"}, "to be one of"),
        (kfac.KfacOptions, {"iterations": 0, "step": "clip"}, "one of iterations, or kfac with"),
        (kfac.CgFacOptions, {"iterations": 0, "step": "rms"}, "one of iterations, or kfac with"),
    ],
)
def test_options_out_of_range_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_masks_that_leave_no_block_and_masks_that_break_one():
    layers, (expected, grads) = found(with_free_parameter, FREE), adamw_of_free()
    optimizer = kfac.kfac(1.0, layers, fallback_learning_rate=0.01)
    for mask in (
        {"a": False, "b": False, "free": True},
        jax.tree.map(lambda p: p.shape == (2,), FREE),
    ):
        masked = optax.masked(optimizer, mask)
        updates, state = masked.update(grads, masked.init(FREE), FREE)
        close(updates["free"], expected, rtol=1e-12)
        close(updates["a"], grads["a"], rtol=0)  # optax leaves it to others
        assert int(kfac.find_state(state).count) == 1
    nothing = kfac.kfac(1.0, layers.select(lambda block: False), fallback=optax.sgd(0.1))
    updates, _ = nothing.update(grads, nothing.init(FREE), FREE)
    close(updates, jax.tree.map(lambda g: -0.1 * g, grads), rtol=1e-12)

    without_bias = {"a": {"kernel": True, "bias": False}, "b": True, "free": True}
    with pytest.raises(ValueError, match=r"got a part of a \(without a/bias\): .* layers.select"):
        optax.masked(optimizer, without_bias).init(FREE)
    labels = {"a": {"kernel": "first", "bias": "second"}, "b": "first", "free": "second"}
    with pytest.raises(ValueError, match=r"got a part of a \(without a/bias\)"):
        optax.partition({"first": optimizer, "second": optax.sgd(0.1)}, labels).init(FREE)


def test_another_tree_is_refused_and_so_are_parameters_without_a_layer():
    layers = found(with_free_parameter, FREE)
    with pytest.raises(ValueError, match="got one without a/bias, a/kernel.*it has params/a/bias"):
        kfac.kfac(1.0, layers).init({"params": FREE})
    with pytest.raises(ValueError, match="expected parameters that layers cover, got free"):
        kfac.scale_by_kfac(layers).init(FREE)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["free", "a"])
def test_a_gradient_that_is_not_finite_anywhere_moves_no_share(where):
    def poison(grads, curvature, by):
        return {**grads, where: jax.tree.map(lambda g: by * g, grads[where])}, curvature

    layers = found(with_free_parameter, FREE)
    optimizer = kfac.kfac(1.0, layers, damping=0.1, weight_decay=0.1)
    step = make_step(optimizer, with_free_parameter, poison)
    _, state = step(FREE, optimizer.init(FREE))
    refused, after = step(FREE, state, by=jnp.nan)
    assert all_zero(refused)
    close(*(s.inner_states["fallback"] for s in (after, state)), rtol=0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step(FREE, after)))


@pytest.mark.slow
def test_multi_steps_applies_the_mean_gradient():
    layers = kfac.find_layers(network, PARAMS, X[:4], LABELS[:4])
    optimizer = optax.MultiSteps(absolute(1.0, layers, damping=1e9, **WHOLE), 2)
    step, state = make_step(optimizer), optimizer.init(PARAMS)
    first, state = step(PARAMS, state, X[:4], LABELS[:4])
    assert all_zero(first)
    second, state = step(PARAMS, state, X[4:], LABELS[4:])
    grads = jax.grad(lambda p: network(p, X, LABELS)[0])(PARAMS)
    close(second, jax.tree.map(lambda g: -g / 1e9, grads), rtol=1e-5)


def test_the_step_compiles_once_and_its_state_survives_a_checkpoint(tmp_path):
    from orbax.checkpoint import v1 as ocp

    with jax.enable_x64(False):  # Orbax reads on threads of its own, where a context does not reach
        params, x = jax.tree.map(lambda p: p.astype(jnp.float32), (FREE, X))
        layers = kfac.find_layers(with_free_parameter, params, x, LABELS)
        optimizer = kfac.cg_fac(1.0, layers, damping=0.1)
        step = make_step(optimizer, with_free_parameter)
        _, state = step(params, optimizer.init(params), x)
        expected = step(params, state, x)
        assert step._cache_size() == 1  # the state that comes out is like the one that went in
        ocp.save(tmp_path / "state", state)
        got = step(params, ocp.load(tmp_path / "state", jax.eval_shape(lambda: state)), x)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_curvature_of_another_trace_needs_no_other_program():
    """A gradient that is not compiled is traced at every step."""
    optimizer = kfac.kfac(1e-3, found())
    update = jax.jit(lambda g, state, c: optimizer.update(g, state, PARAMS, curvature=c))
    state = optimizer.init(PARAMS)
    for _ in range(2):
        _, grads, curvature = empirical(network)(PARAMS, X, LABELS)
        _, state = update(grads, state, curvature)
    assert update._cache_size() == 1


def test_optax_finds_what_of_the_state_is_like_the_parameters():
    optimizer = kfac.kfac(1e-3, found())
    state = optax.tree_map_params(optimizer, lambda leaf: leaf + 1, optimizer.init(PARAMS))
    found_state = kfac.find_state(state)
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(found_state.velocity))
    assert all_zero(found_state.averages)


@pytest.mark.slow
@pytest.mark.parametrize("make", [kfac.kfac, kfac.cg_fac])
def test_no_array_stands_in_two_places_of_the_state(make):
    """A step that donates its state hands each buffer over once."""
    optimizer = make(1.0, found())

    def step(state):
        _, grads, curvature = empirical(network)(PARAMS, X, LABELS)
        return optimizer.update(grads, state, PARAMS, curvature=curvature)[1]

    states = [optimizer.init(PARAMS)]
    states.append(step(states[0]))  # without jit, which makes arrays of its own
    for state in states:
        buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        assert len(set(buffers)) == len(buffers)
    assert int(kfac.find_state(jax.jit(step, donate_argnums=0)(states[1])).count) == 2


def with_jacobian(params, x, labels):
    """The network with a first layer that has no factors: its product passes through the layer."""
    layer = kfac.Generic(lambda p, x: x @ p["kernel"] + p["bias"])
    x = jnp.tanh(tap(params, x, "a", layer))
    return cross_entropy(tap(params, x, "b"), labels)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [network, with_jacobian])
@pytest.mark.parametrize("step", ["share", "clip"])
def test_curvature_in_a_pass_of_its_own_is_that_of_the_gradients_pass(loss_fn, step):
    """Of the same examples, at steps that renew it and at those that do not."""
    optimizer = kfac.kfac(0.1, found(loss_fn), damping=0.1, inverse_interval=2, step=step)
    together = kfac.value_grad_and_curvature(loss_fn, has_aux=True)
    apart = kfac.curvature(loss_fn, has_aux=True)

    @functools.partial(jax.jit, static_argnames="alone")
    def advance(params, state, key, refresh, alone):
        _, grads, curvature = together(params, X, LABELS, key=key, refresh=refresh)
        if alone:
            curvature = apart(params, X, LABELS, key=key, refresh=refresh)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        return optax.apply_updates(params, updates), state

    ends = []
    for alone in (False, True):
        params, state = PARAMS, optimizer.init(PARAMS)
        for i in range(5):
            params, state = advance(params, state, jax.random.key(i), i % 3 == 0, alone)
        ends.append((params, state))
    close(*ends, rtol=1e-9, atol=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(
    ("make", "step"), [(kfac.kfac, "rms"), (kfac.kfac, "clip"), (kfac.cg_fac, "clip")]
)
def test_curvature_that_is_not_finite_stays_in_no_average(make, step, poison):
    """As an overflow in half precision leaves it, with a gradient that is finite."""

    def poisoned(grads, curvature, by):
        times = lambda a: a * by if jnp.issubdtype(a.dtype, jnp.inexact) else a
        return grads, jax.tree.map(times, curvature)

    optimizer = make(1.0, found(), step=step, damping=0.1)
    advance = make_step(optimizer, change=poisoned)
    _, state = advance(PARAMS, optimizer.init(PARAMS))
    _, after = advance(PARAMS, state, by=poison)
    averages = [kfac.find_state(s).averages for s in (state, after)]
    ready = [(jax.tree.map(lambda f, a=a: f / a.weight, a.factors), a.traces) for a in averages]
    close(*ready, rtol=1e-12, atol=0)
    updates, _ = advance(PARAMS, after)
    assert all(np.any(u) and np.isfinite(u).all() for u in jax.tree.leaves(updates))

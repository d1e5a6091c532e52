"""The report of ``kfac.verify``, and the costs that plans are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from kfac import _costs as costs
from tests.kfac.reference import cross_entropy, normal

pytestmark = pytest.mark.usefixtures("x64")


def network(params, x, labels):
    x = jnp.tanh(kfac.tap(kfac.Dense(), params["a"], x, path="a"))
    return cross_entropy(kfac.tap(kfac.Dense(), params["b"], x, path="b").mean(1), labels)


def with_a_hidden_use(params, x, labels):
    loss, logits = network(params, x, labels)
    return loss + (params["b"]["kernel"] ** 2).sum(), logits


SHAPES = {"a": {"kernel": (3, 4), "bias": (4,)}, "b": {"kernel": (4, 3)}}


def make():
    params = {
        k: {n: normal(i, *s) for n, s in layer.items()}
        for i, (k, layer) in enumerate(SHAPES.items())
    }
    return params, normal(3, 5, 2, 3), jnp.arange(5) % 3


def test_a_sound_model_passes_and_a_missed_use_shows():
    with jax.enable_x64(True):
        params, x, labels = make()
        report = kfac.verify(network, params, x, labels, has_aux=True)
        missed = kfac.verify(with_a_hidden_use, params, x, labels, has_aux=True)
    for row in report.rows:
        assert max(row.capture_error, row.product_error) < 1e-12
        assert row.cg_error < 1e-6
        assert 0 < row.kron_cosine <= 1
        assert row.rank == 5  # of five examples
        assert row.condition > 1
    errors = {row.name: row.capture_error for row in missed.rows}
    assert errors["a"] < 1e-12
    assert errors["b"] > 0.1
    assert "100.0 % of the parameters covered" in str(report)
    assert len(str(report).splitlines()) == 4


def test_costs_are_those_xla_counts():
    params, x, labels = make()
    (block, _) = kfac.find_layers(network, params, x, labels).blocks.values()
    c = costs.cost(block)
    features, g = jnp.ones((10, 4)), jnp.ones((10, 4))
    count = lambda f, *args: jax.jit(f).lower(*args).cost_analysis()["flops"]
    assert c.weight_gradient == count(lambda a, g: a.T @ g, features, g)
    assert c.product == pytest.approx(
        count(lambda a, v, g: a.T @ ((a @ v) + g), features, features[:4], g), rel=0.2
    )
    assert c.form_factors == count(lambda a, g: (a.T @ a, g.T @ g), features, g)
    assert c.factor_product == count(
        lambda a, v, g: a @ v @ g, jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((4, 4))
    )


def test_cheaper_forms_are_chosen():
    params = {"kernel": jnp.ones((64, 64))}
    loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    few, many = (
        kfac.find_layers(loss_fn, params, jnp.ones((n, 64))).blocks["model"] for n in (4, 4096)
    )
    assert costs.prefers_factors(many, 10)
    assert not costs.prefers_factors(few, 10)
    assert costs.prefers_dual(few, 10, 1)
    assert not costs.prefers_dual(many, 10, 1)


@pytest.mark.parametrize(
    ("tokens", "interval", "num_examples", "expected"),
    [
        (32, 5, 64, 32),  # 2048 rows, 2 · 32 of them wanted for the wider of two layers
        (32, 100, 64, 32),
        (31, 5, 64, 16),
        (8, 2, 64, 1),  # half a row at every second step: 50 of the head, which has 64
        (8, 1, 64, 4),  # an eighth at every step: 12.5 of the head's 64
        (32, 5, 24, 8),  # what divides the examples of a device
        (1, 5, 64, 1),
        (0, 5, 64, 1),
    ],
)
def test_examples_that_the_factors_can_spare(tokens, interval, num_examples, expected):
    """A readout of one token of each example is not asked; without tokens there is nothing else."""
    params = {"fc": {"kernel": jnp.ones((8, 32))}, "head": {"kernel": jnp.ones((32, 100))}}

    def loss_fn(p, x):
        hidden = (
            kfac.tap(kfac.Dense(), p["fc"], x, path="fc")
            if tokens
            else x[:, None] @ p["fc"]["kernel"]
        )
        return (kfac.tap(kfac.Dense(), p["head"], hidden.mean(1), path="head") ** 2).mean()

    x = jnp.ones((64, tokens, 8) if tokens else (64, 8))
    layers = kfac.find_layers(loss_fn, params, x)
    assert kfac.curvature_stride(layers, num_examples, interval) == expected


def test_plans_stay_within_their_budget():
    params = {"kernel": jnp.ones((64, 64))}
    loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    plans = [
        kfac.plan(loss_fn, params, jnp.ones((512, 64)), overhead=budget)
        for budget in (1.4, 2.0, 5.0)
    ]
    for plan, budget in zip(plans, (1.4, 2.0, 5.0), strict=True):
        parts = plan.parts["pullback"] + plan.parts["factors"] + plan.parts["model"]
        expected = (
            1 + parts / plan.curvature_interval + plan.max_iterations * plan.parts["iteration"]
        )
        assert plan.overhead == pytest.approx(expected)
        assert plan.overhead <= budget
        assert plan.curvature_batch_size == 512
    assert (
        plans[0].curvature_interval > plans[1].curvature_interval > plans[2].curvature_interval == 1
    )
    fresh = kfac.plan(loss_fn, params, jnp.ones((512, 64)), overhead=5.0, step="quadratic")
    assert fresh.curvature_interval == 1
    assert fresh.parts["model"] > 0 == plans[0].parts["model"]
    assert fresh.curvature_batch_size == 512
    part = kfac.plan(loss_fn, params, jnp.ones((512, 64)), overhead=1.6, step="quadratic")
    assert part.curvature_batch_size < 512
    share = part.curvature_batch_size / 512
    refresh = share * (1 + part.parts["pullback"] + part.parts["factors"] + part.parts["model"])
    assert part.overhead == pytest.approx(
        1 + refresh + part.max_iterations * part.parts["iteration"]
    )
    assert part.overhead <= 1.6
    with pytest.raises(
        ValueError, match="expected an overhead of at least .* step='quadratic', got 1.2"
    ):
        kfac.plan(loss_fn, params, jnp.ones((512, 64)), overhead=1.2, step="quadratic")
    with pytest.raises(
        ValueError, match="expected step to be one of quadratic, fixed, trust_ratio, .*got 'newton'"
    ):
        kfac.plan(loss_fn, params, jnp.ones((512, 64)), step="newton")
    with pytest.raises(ValueError, match="expected a loss with layers"):
        kfac.plan(
            lambda p, x: (x @ p["kernel"]).mean(), params, jnp.ones((512, 64)), batch_size=512
        )
    with pytest.raises(ValueError, match="expected an overhead above 1"):
        kfac.plan(loss_fn, params, jnp.ones((512, 64)), overhead=1.0)
    with pytest.raises(ValueError, match="expected an overhead of at least"):
        kfac.plan(loss_fn, params, jnp.ones((2, 64)), overhead=1.01)


def test_a_part_of_the_batch_gives_the_curvature_of_a_step():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=(12, 2))
    params = {"kernel": jnp.asarray(rng.normal(size=(3, 2)))}
    loss_fn = lambda p, x, y: (
        0.5 * ((kfac.tap(kfac.Dense(), p, x, path="") - y) ** 2).sum(-1)
    ).mean()
    options = dict(curvature="exact", damping=0.1, damping_scale="absolute", max_iterations=20)
    fixed = dict(step="fixed", momentum=0.0, kl_clip=None)
    optimizer = kfac.cg_fac(1.0, kfac.find_layers(loss_fn, params, x, y), **options, **fixed)
    _, _, curvature = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")(
        params, x[:5], y[:5]
    )
    grads = jax.grad(loss_fn)(params, x, y)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, curvature=curvature)

    residual = x @ np.asarray(params["kernel"]) - y
    per_example = np.einsum("ni,no->nio", x, residual).reshape(12, -1)
    fisher = per_example[:5].T @ per_example[:5] / 5
    expected = -np.linalg.solve(fisher + 0.1 * np.eye(6), per_example.mean(0))
    np.testing.assert_allclose(np.ravel(updates["kernel"]), expected, rtol=1e-9)

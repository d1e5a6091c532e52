"""Which rows of a layer are whose: found in the program, or the layer is left to the fallback."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kfac

N, GAMMA = 4, 0.05


def dense(p, name, x):
    return kfac.tap(kfac.Dense(), p[name], x, path=name)


def time_major(p, x):
    return dense(p, "h", jnp.tanh(dense(p, "a", x.swapaxes(0, 1)))).swapaxes(0, 1)


def rows_of_all_at_each_time(p, x):
    hidden = jnp.tanh(dense(p, "a", x.swapaxes(0, 1).reshape(-1, 2)))
    return dense(p, "h", hidden.reshape(x.shape[1], N, 3).swapaxes(0, 1))


def two_views(p, x):
    one, other = jnp.split(jnp.tanh(dense(p, "a", jnp.concatenate([x[:, 0], x[:, 1]]))), 2)
    return dense(p, "h", one * other)


def positions(p, x):
    places = jnp.linspace(-1, 1, 2 * x.shape[1]).reshape(-1, 2)
    return dense(p, "h", jnp.tanh(dense(p, "a", places)) * x.sum(-1, keepdims=True))


def positions_in_two_layers(p, x):
    places = jnp.linspace(-1, 1, 2 * x.shape[1]).reshape(-1, 2)
    hidden = jnp.tanh(dense(p, "h", jnp.tanh(dense(p, "a", places))))
    return hidden * x.sum(-1, keepdims=True)


def over_positions(p, x):
    return dense(p, "h", jax.vmap(lambda u: jnp.tanh(dense(p, "a", u)), 1, 1)(x))


def recurrent(p, x):
    """Its first state depends on no example, and has a row of each."""
    step = lambda h, u: (jnp.tanh(dense(p, "h", h) + dense(p, "a", u)), None)
    return kfac.scan(step, jnp.zeros((N, 3)), x.swapaxes(0, 1))[0]


def recurrent_by_hand(p, x):
    h = jnp.zeros((N, 3))
    for t in range(2):
        h = jnp.tanh(dense(p, "h", h) + dense(p, "a", x[:, t]))
    return h


def queries(p, x):
    scores = jnp.einsum(
        "ld,ntd->nlt",
        dense(p, "a", jnp.ones((N, 2))),
        jnp.tanh(dense(p, "h", x @ jnp.ones((2, 3)))),
    )
    return jax.nn.softmax(scores).max(-1)[:, :3]


# Two experts, which get some of the tokens each.


def experts(p, rows):
    return jax.vmap(lambda w, r: kfac.tap(kfac.Dense(), {"kernel": w}, r, path="a"))(
        p["a"]["kernel"], rows
    )


def routed(x):
    """Tokens, their scores, and of each which expert has it and in which row."""
    tokens = x.reshape(-1, 2)
    scores = jax.nn.softmax(tokens @ jnp.array([[1.0, -1.0], [0.5, 2.0]]))
    own = jax.nn.one_hot(scores.argmax(-1), 2)
    row = (((jnp.cumsum(own, 0) - 1) * own).sum(-1)).astype(int)
    return tokens, scores, scores.argmax(-1), row


def experts_choose(p, x):
    tokens, scores, *_ = routed(x)
    gates, chosen = jax.lax.top_k(scores.T, 2 * N)
    given = gates[..., None] * experts(p, tokens[chosen])
    mixed = jnp.zeros((len(tokens), 3)).at[chosen.reshape(-1)].add(given.reshape(-1, 3))
    return dense(p, "h", mixed.reshape(N, -1, 3))


def sorted_to_experts(p, x):
    tokens, _, expert, _ = routed(x)
    order = jnp.argsort(expert)
    given = experts(p, tokens[order].reshape(2, -1, 2)).reshape(-1, 3)
    return dense(p, "h", jnp.zeros_like(given).at[order].set(given).reshape(N, -1, 3))


def written_to_experts(p, x):
    tokens, _, expert, row = routed(x)
    given = experts(p, jnp.zeros((2, 3 * N, 2)).at[expert, row].set(tokens))
    return dense(p, "h", given[expert, row].reshape(N, -1, 3))


def dealt_by_products(p, x):
    tokens, scores, expert, row = routed(x)
    dealt = jax.nn.one_hot(expert, 2)[:, :, None] * jax.nn.one_hot(row, 3 * N)[:, None]
    given = jnp.tanh(experts(p, jnp.einsum("td,tec->ecd", tokens, dealt)))
    mixed = jnp.einsum("eco,tec->to", given, dealt * scores[..., None])
    return dense(p, "h", mixed.reshape(N, -1, 3))


def dealt_and_looked_up(p, x):
    tokens, _, expert, row = routed(x)
    dealt = jax.nn.one_hot(expert, 2)[:, :, None] * jax.nn.one_hot(row, 3 * N)[:, None]
    given = experts(p, jnp.einsum("td,tec->ecd", tokens, dealt))
    return dense(p, "h", given[expert, row].reshape(N, -1, 3))


def own_rows(p, x):
    """Each example's own number, as of its last token, leaves the rows where they are."""
    last = (x[..., 0] > -1).sum(1) - 1
    return dense(p, "h", jnp.tanh(dense(p, "a", x))[jnp.arange(N), last])


def pruned(p, x):
    """So do the tokens of each that score highest."""
    hidden = jnp.tanh(dense(p, "a", x))
    _, kept = jax.lax.top_k(hidden.sum(-1), 2)
    return dense(p, "h", hidden[jnp.arange(N)[:, None], kept])


DEALT = "it gets rows by computed indices"
NOT_NEIGHBOURS, NO_EXAMPLE = "rows of an example are not neighbours", "it depends on no example"
NETWORKS = [
    (time_major, {}),
    (rows_of_all_at_each_time, {"a": NOT_NEIGHBOURS}),
    (two_views, {"a": NOT_NEIGHBOURS}),
    (positions, {"a": NO_EXAMPLE}),
    (positions_in_two_layers, {"a": NO_EXAMPLE, "h": NO_EXAMPLE}),
    (over_positions, {}),
    (recurrent, {}),
    (recurrent_by_hand, {}),
    (queries, {"a": NO_EXAMPLE}),
    (own_rows, {}),
    (pruned, {}),
]
WITH_EXPERTS = [
    (experts_choose, {"a": DEALT}),
    (sorted_to_experts, {"a": DEALT}),
    (written_to_experts, {"a": DEALT}),
    (dealt_by_products, {"a": NO_EXAMPLE}),
    (dealt_and_looked_up, {"a": NO_EXAMPLE}),
]


def make(network):
    rng = np.random.default_rng(0)
    of_experts = network in dict(WITH_EXPERTS)
    shapes = {"a": (2, 2, 3) if of_experts else (2, 3), "h": (3, 3)}
    params = {name: {"kernel": jnp.asarray(rng.normal(size=s))} for name, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(N, 4, 2)))
    labels = jnp.asarray(rng.integers(0, 3, size=network(params, x).shape[:-1]))
    losses = lambda p: optax.softmax_cross_entropy_with_integer_labels(network(p, x), labels)

    def loss_fn(p, x, labels):
        logits = network(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    return loss_fn, params, x, labels, lambda p: losses(p).reshape(N, -1).mean(1)


@pytest.mark.filterwarnings("ignore:kfac's layers cover")
@pytest.mark.parametrize(("network", "refused"), NETWORKS + WITH_EXPERTS)
def test_a_block_is_that_of_the_examples_or_there_is_none(network, refused):
    with jax.enable_x64(True):
        loss_fn, params, *batch, losses = make(network)
        layers = kfac.find_layers(loss_fn, params, *batch)
        assert set(layers.blocks) == {"a", "h"} - refused.keys()
        for name, reason in refused.items():
            assert reason in layers.reasons[f"{name}/kernel"]
        gradients = jax.jacrev(losses)(params)
        function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical", has_aux=True)
        _, grads, curvature = function(params, *batch)
        if layers.blocks:
            options = dict(step="algorithm_1", solver="dual", damping=GAMMA)
            optimizer = kfac.cg_fac(1.0, layers, **options)
            updates, _ = optimizer.update(
                grads, optimizer.init(params), params, curvature=curvature
            )
        for name in layers.blocks:
            rows = np.asarray(gradients[name]["kernel"]).reshape(N, -1)
            matrix = rows.T @ rows / N + GAMMA * np.eye(rows.shape[1])
            expected = -np.linalg.solve(matrix, np.ravel(grads[name]["kernel"]))
            found = np.ravel(updates[name]["kernel"])
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("steps", [3, N, 2 * N])
def test_arguments_may_have_the_examples_second(steps):
    def loss_fn(p, x, labels):
        logits = dense(p, "h", jnp.tanh(dense(p, "a", x))).mean(0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    with jax.enable_x64(True):
        _, params, *_ = make(time_major)
        rng = np.random.default_rng(1)
        x, labels = jnp.asarray(rng.normal(size=(steps, N, 2))), jnp.arange(N) % 3
        function = kfac.value_grad_and_curvature(loss_fn, fisher="ggn", has_aux=True)
        layers = kfac.find_layers(loss_fn, params, x, labels, batch_size=N)
        _, grads, curvature = function(params, x, labels, key=jax.random.key(0))
        optimizer = kfac.cg_fac(1.0, layers)
        optimizer.update(grads, optimizer.init(params), params, curvature=curvature)
        if steps != N:  # else the first axis may as well number them
            for block in curvature.layers.blocks.values():
                assert [use.example_axis for use in block.uses] == [1]


def test_a_table_as_long_as_the_batch_is_no_example():
    """After what is not followed, here a gather, it would be the only sign of where they are."""

    def loss_fn(p, x, table, labels):
        picked = jnp.take_along_axis(x, jnp.argsort(x, 1), 1) * table[None, :, None]
        logits = dense(p, "h", jnp.tanh(dense(p, "a", picked))).mean(1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    _, params, x, *_ = make(time_major)
    function = kfac.value_grad_and_curvature(loss_fn, fisher="ggn", has_aux=True)
    batch = x, jnp.linspace(0, 1, N), jnp.arange(N) % 3
    _, _, curvature = function(params, *batch, key=jax.random.key(0))
    for block in curvature.layers.blocks.values():
        assert [use.example_axis for use in block.uses] == [0]


class Tied(nnx.Module):
    def __init__(self):
        self.a, self.h = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))

    def __call__(self, x):
        return jnp.tanh(self.h(self.a(x))) @ self.a.kernel.T


class TiedInside(Tied):
    def __call__(self, x):
        return self.h(jnp.tanh(self.a(x)) @ self.a.kernel.T)


class Force(Tied):
    def __call__(self, x):
        return -jax.grad(lambda x: jnp.tanh(self.h(jnp.tanh(self.a(x)))).sum())(x)


class ForwardForce(Tied):
    def __call__(self, x):
        of_one = lambda x: jnp.tanh(self.h(jnp.tanh(self.a(x)))).sum()
        return jax.vmap(jax.jacfwd(of_one))(x)


class OwnGradient(Tied):
    def __call__(self, x):
        graphdef, state = nnx.split(self.a)
        plain = lambda state, x: nnx.merge(graphdef, state)(x)
        first = jax.custom_vjp(plain)
        first.defvjp(lambda *args: jax.vjp(plain, *args), lambda pull, g: pull(g))
        return self.h(first(state, x))


class Complex(Tied):
    def __call__(self, x):
        return self.h(jnp.abs(self.a(x.astype(jnp.complex64))))


DERIVATIVE = "a derivative of it is taken inside the loss"
MODELS = [
    (Tied, {"a": "a/kernel is also used where no layer is met"}),
    (TiedInside, {"a": "a/kernel is also used where no layer is met"}),
    (Force, {"a": DERIVATIVE, "h": DERIVATIVE}),
    (ForwardForce, {"a": DERIVATIVE, "h": DERIVATIVE}),
    (OwnGradient, {"a": "a function with a gradient of its own, custom_vjp"}),
    (Complex, {"a": "complex numbers"}),
]


@pytest.mark.filterwarnings("ignore:kfac's layers cover")
@pytest.mark.parametrize(("model", "refused"), MODELS)
def test_what_the_cotangent_of_a_layer_does_not_say_leaves_it_to_the_fallback(model, refused):
    def loss_fn(model, x, y):
        outputs = model(x)
        return 0.5 * ((outputs - y) ** 2).sum(-1).mean(), outputs

    x, y = (jax.random.normal(jax.random.key(seed), (N, 2)) for seed in (0, 1))
    network = model()
    layers = kfac.find_layers(loss_fn, network, x, y)
    assert set(layers.blocks) == {"a", "h"} - refused.keys()
    for name, reason in refused.items():
        assert reason in layers.reasons[f"{name}/kernel"]
    function = kfac.value_grad_and_curvature(loss_fn, likelihood="gaussian", has_aux=True)
    function(network, x, y, key=jax.random.key(2))

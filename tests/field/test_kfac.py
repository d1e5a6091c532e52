"""Second-order optimization as users of the field run into it; each test names its public source.

The truth is JAX's own Hessian of the loss, or one gradient per example, in float64.
"""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kfac
from tests.kfac.reference import (
    close,
    empirical,
    losses,
    matrices,
    matrix_of,
    normal,
    random,
    system_of,
    tap,
)
from tests.processes import run_code

pytestmark = pytest.mark.usefixtures("x64")
PARAMS = {"l": {"kernel": normal(1, 3, 4)}}
X = normal(7, 6, 3)
LABELS = jnp.arange(6) % 4
WEIGHTS = jnp.array([0.0, 1.0, 0.5, 3.0, 0.0, 0.2])


def outputs(params, x):
    return tap(params, x, "l")


# Of a loss that returns its outputs and their weights beside it.
FOUND = {"outputs": lambda aux: aux[0], "weights": lambda aux: aux[1]}


def block_of(loss_fn, *args, form="exact", fisher="enumerate", **options):
    """The block of the layer, and the curvature that it is made of."""
    options = FOUND | options
    (block,), curvature = matrices([("l", form)], loss_fn, PARAMS, *args, fisher=fisher, **options)
    return block[0], curvature


def hessian(loss_fn, *args):
    """Of a loss whose outputs are linear in the kernel: the Gauss-Newton matrix itself."""
    found = jax.hessian(lambda kernel: loss_fn({"l": {"kernel": kernel}}, *args)[0])
    return jax.jit(found)(PARAMS["l"]["kernel"]).reshape(12, 12)


# ---- Weights of positions and examples


def averaged(params, x, labels, weights):
    logits = outputs(params, x)
    return jnp.average(losses(logits, labels), weights=weights), (logits, weights)


def divided_by_examples(params, x, labels, weights):
    logits = outputs(params, x)
    loss = (weights * losses(logits, labels)).mean()
    return loss, (logits, (weights, len(weights)))


@pytest.mark.cases(2)
@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS > 0], ids=["numbers", "mask"])
@pytest.mark.parametrize("loss_fn", [averaged, divided_by_examples])
def test_weighted_examples_have_the_hessian_of_their_loss(loss_fn, weights):
    """f-dangel/curvlinops#107 and #108: the scale of a mean over fewer terms than there are."""
    block, _ = block_of(loss_fn, X, LABELS, weights)
    close(block, hessian(loss_fn, X, LABELS, weights), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("fisher", ["mc", "ggn"])
def test_positions_without_a_target_have_no_curvature(fisher):
    """f-dangel/curvlinops#107: 8 of 20 positions are real, and logits elsewhere are not zeroed."""
    x, labels = normal(2, 4, 5, 3), jnp.arange(20).reshape(4, 5) % 4
    real = jnp.arange(20).reshape(4, 5) % 5 < 2
    options = dict(num_samples=4000, key=jax.random.key(0))
    block, _ = block_of(averaged, x, labels, real, fisher=fisher, **options)
    expected = hessian(averaged, x[real], labels[real], jnp.ones(8))
    assert np.linalg.norm(block - expected) < 0.05 * np.linalg.norm(expected)


def test_a_batch_without_any_target_is_flat_and_finite():
    def guarded(params, x, labels, real):
        logits = outputs(params, x)
        return (losses(logits, labels) * real).sum() / jnp.maximum(real.sum(), 1), (logits, real)

    block, _ = block_of(guarded, X, LABELS, jnp.zeros(6))
    np.testing.assert_array_equal(block, 0)


STACK = {"stack": {"kernel": normal(3, 2, 3, 3)}}


def tokens(params, x):
    return jnp.tanh(outputs(params, x)) @ normal(5, 4, 4)


def scanned_in_vmap(params, x):
    layer = lambda x, p: (jnp.tanh(kfac.tap(kfac.Dense(), p, x, path="stack")), None)
    return jax.vmap(lambda x: jax.lax.scan(layer, x, params["stack"])[0])(x)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("params", "network", "name"), [(PARAMS, tokens, "l"), (STACK, scanned_in_vmap, "stack")]
)
def test_the_empirical_matrix_counts_each_example_by_its_weight(params, network, name):
    """Σ_n s_n u_n u_nᵀ, u_n the gradient of example n's own mean, s_n its share in the loss."""
    x, labels = normal(2, 4, 5, 3), jnp.arange(20).reshape(4, 5) % 3
    weights = jnp.arange(20.0).reshape(4, 5) % 7

    def loss_fn(params, x, labels, weights):
        logits = network(params, x)
        return jnp.average(losses(logits, labels), weights=weights), (logits, weights)

    def gradient(*example):
        one = lambda p: loss_fn(p, *(a[None] for a in example))[0]
        return jax.grad(one)(params)[name]["kernel"]

    args, options = (params, x, labels, weights), {"weights": FOUND["weights"]}
    (found,), _ = matrices([(name, "exact")], loss_fn, *args, **options)
    u = jax.vmap(gradient)(x, labels, weights).reshape(4, len(found), -1)
    expected = np.einsum("n,nlp,nlq->lpq", weights.sum(1) / weights.sum(), u, u)
    close(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.cases(1)
@pytest.mark.parametrize("fisher", ["empirical", "enumerate"])
def test_parts_of_a_masked_batch_are_joined_by_what_their_means_are_over(fisher):
    """meta-pytorch/torchtune#1875: parts with 1 and 4 real examples do not count alike."""
    function = kfac.curvature(averaged, fisher=fisher, has_aux=True, **FOUND)

    def both(curvature):
        forms = ("exact", "factors")
        return [matrix_of(system_of("l", form, curvature, PARAMS)) for form in forms]

    @jax.jit
    def whole_and_joined(weights, refresh):
        cut = [(X[part], LABELS[part], weights[part]) for part in (slice(0, 2), slice(2, 6))]
        parts = [function(PARAMS, *args, refresh=refresh) for args in cut]
        whole = function(PARAMS, X, LABELS, weights)
        return both(whole), both(kfac.concatenate_curvature(parts))

    whole, joined = whole_and_joined(WEIGHTS, True)
    close(joined, whole, rtol=1e-10, atol=1e-14)


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["factors", "kron"])
def test_examples_without_weight_are_no_examples(form):
    """f-dangel/curvlinops#107: rows that only fill a batch up, in the factors too."""
    real = jnp.array([True, True, False, True, False, True])
    matrix = lambda *args: block_of(averaged, *args, form=form)[0]
    alone = matrix(X[real], LABELS[real], jnp.ones(4))
    close(matrix(X, LABELS, real), alone, rtol=1e-10, atol=1e-14)
    twice = matrix(X, LABELS, jnp.array([1, 2, 0, 1, 0, 1]))
    index = jnp.array([0, 1, 1, 3, 5])
    close(twice, matrix(X[index], LABELS[index], jnp.ones(5)), rtol=1e-10)


def test_weights_of_another_shape_are_refused():
    x, labels = normal(2, 4, 5, 3), jnp.zeros((4, 5), int)
    with_weights = lambda weights: lambda p: (outputs(p, x).sum(), (outputs(p, x), weights))
    options = dict(batch_size=4, fisher="mc", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"of the shape of the losses, \(4, 5\)"):
        block_of(with_weights(jnp.ones(4)), **options)
    with pytest.raises(ValueError, match="of 4 examples"):
        block_of(with_weights(jnp.ones((5, 4))), **options)
    with pytest.raises(ValueError, match="that weights= finds them in"):
        empirical(lambda p: outputs(p, x).sum(), has_aux=False, weights=lambda aux: labels)


# ---- How many examples there are


def with_old_key(params, key, x, labels):
    del key
    return averaged(params, x, labels, jnp.ones(len(x)))


def with_statistics(params, statistics, x, labels):
    return with_old_key(params, None, x - statistics["mean"], labels)


def with_class_weights(params, batch):
    return with_old_key(params, None, batch["x"], batch["y"])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("loss_fn", "args"),
    [
        (with_old_key, (jax.random.PRNGKey(0), X, LABELS)),
        (with_statistics, ({"mean": jnp.zeros(3)}, X, LABELS)),
        (with_class_weights, ({"class_weights": jnp.ones(4), "x": X, "y": LABELS},)),
    ],
    ids=["key", "statistics", "class weights"],
)
def test_the_number_of_examples_is_not_the_length_of_the_first_argument(loss_fn, args):
    """google-deepmind/kfac-jax#114: arguments in front of the batch."""
    alone = empirical(lambda *a: loss_fn(*a)[0], has_aux=False)
    for function in (functools.partial(kfac.find_layers, loss_fn), alone):
        with pytest.raises(ValueError, match=r"number the examples .*pass batch_size="):
            function(PARAMS, *args)
    assert kfac.find_layers(loss_fn, PARAMS, *args, batch_size=6).coverage == 1.0
    block, curvature = block_of(loss_fn, *args, weights=None)
    assert curvature.num_examples == 6
    close(block, hessian(loss_fn, *args), rtol=1e-9, atol=1e-14)


def test_outputs_of_another_number_of_examples_are_refused():
    flat = lambda p, x: (0.0, outputs(p, x).reshape(-1, 4))
    with pytest.raises(ValueError, match=r"of 6 examples, got \(12, 4\)"):
        empirical(flat, fisher="enumerate")(PARAMS, normal(2, 6, 2, 3))


# ---- Devices whose programs are their own


def small(params, x, labels):
    hidden = jnp.tanh(tap(params, x, "a"))
    gain = kfac.Generic(lambda params, x: jnp.tanh(x * params["scale"]))
    logits = tap(params, tap(params, hidden, "n", gain), "b")
    same = jnp.ones((len(x), 3))  # an input that all devices share
    logits = logits + tap(params, same, "c")
    return losses(logits, labels).mean(), logits


SMALL = random(
    {
        "a": {"kernel": (3, 4), "bias": (4,)},
        "n": {"scale": (4,)},
        "b": {"kernel": (4, 4)},
        "c": {"kernel": (3, 4)},
    }
)


def averaged_over_devices(params, x, labels):
    loss, logits = small(params, x, labels)
    return jax.lax.pmean(loss, "data"), logits


def step_of(axis_name, fisher="enumerate", loss_fn=small, make=kfac.kfac, **options):
    optimizer = make(1.0, kfac.find_layers(small, SMALL, X, LABELS), **options)
    function = empirical(loss_fn, fisher=fisher, axis_name=axis_name)

    def step(params, x, labels, key=None, refresh=True):
        (loss, _), grads, curvature = function(params, x, labels, key=key, refresh=refresh)
        state = optimizer.init(params)
        for _ in range(2):  # the second has the state of the first
            updates, state = optimizer.update(grads, state, params, curvature=curvature)
        return loss, updates

    return step


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options", [{}, dict(make=kfac.cg_fac, tolerance=1e-3)], ids=["factors", "exact"]
)
def test_parts_of_a_batch_take_the_step_of_the_whole(options):
    """google-deepmind/kfac-jax's multi-device mode; a vmap has the collectives of many devices."""
    halves = X.reshape(2, 3, 3), LABELS.reshape(2, 3)
    step = jax.vmap(step_of("data", **options), in_axes=(None, 0, 0), axis_name="data")
    found = jax.jit(step)(SMALL, *halves)
    expected = jax.jit(step_of(None, **options))(SMALL, X, LABELS)
    for device in range(2):
        close(jax.tree.map(lambda a, i=device: a[i], found), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
def test_parts_of_a_batch_are_drawn_for_independently():
    function = kfac.value_grad_and_curvature(small, has_aux=True, axis_name="data")
    labels_of = lambda x: function(SMALL, x, LABELS, key=jax.random.key(0))[2].captured["b"][1]
    drawn = jax.jit(jax.vmap(labels_of, axis_name="data"))(jnp.stack([X, X]))
    assert np.abs(drawn[0] - drawn[1]).max() > 0.5  # of probabilities and one-hot labels


def on_one_device(step, **options):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    all_have, parts = PartitionSpec(), PartitionSpec("data")
    specs = {"in_specs": (all_have, parts, parts, all_have, all_have), "out_specs": all_have}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kfac", "cg_fac"])
def test_shard_map_keeps_account_of_what_devices_share(name):
    """jax.shard_map as it is by default: out_specs=P() is refused unless all devices agree."""
    if name == "kfac":
        step = step_of("data", "mc", step="rms")
    else:  # which has no refresh
        one = step_of("data", "mc", make=kfac.cg_fac)
        step = lambda *args: one(*args[:-1])
    args = SMALL, X, LABELS, jax.random.key(0), jnp.array(True)
    close(on_one_device(step)(*args), on_one_device(step, check_vma=False)(*args), rtol=1e-9)


def test_axes_that_are_not_named_are_refused():
    for step in (step_of(None), step_of("data", make=kfac.cg_fac, solver="dual")):
        with pytest.raises(ValueError, match="axis_name="):
            on_one_device(step)(SMALL, X, LABELS, None, True)
    with pytest.raises(ValueError, match=r"axis_name=.* under 'i'"):
        jax.pmap(step_of(None), axis_name="i", in_axes=(None, 0, 0))(SMALL, X[None], LABELS[None])


TWO_DEVICES = textwrap.dedent(
    """
    import jax
    jax.config.update("jax_enable_x64", True)
    from jax.sharding import AxisType, PartitionSpec as P
    from tests.field.test_kfac import LABELS, SMALL, X, averaged_over_devices, step_of
    from tests.kfac.reference import close

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    options = dict(step="clip", kl_clip=None)  # whose length is that of the gradient
    expected = jax.jit(step_of(None, **options))(SMALL, X, LABELS)
    near = lambda found: close(found, expected, rtol=1e-9, atol=1e-13)

    step = step_of("data", **options)
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    for own in (step, step_of("data", loss_fn=averaged_over_devices, **options)):
        for check in (True, False):
            near(jax.jit(jax.shard_map(own, mesh=mesh, check_vma=check, **specs))(SMALL, X, LABELS))
    halves = X.reshape(2, 3, 3), LABELS.reshape(2, 3)
    found = jax.pmap(step, axis_name="data", in_axes=(None, 0, 0))(SMALL, *halves)
    for device in range(2):
        near(jax.tree.map(lambda a: a[device], found))
    """
)


@pytest.mark.slow
def test_two_devices_take_the_step_of_one():
    run_code(TWO_DEVICES, devices=2)

"""Layers that are found, or not, in programs of the kinds that public reports tell of.

The truth is each example's own gradient, in float64, by JAX on the function without taps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import kfac
from tests.kfac.reference import (
    F64,
    check_exact_blocks,
    close,
    cross_entropy,
    empirical,
    normal,
    system_of,
)

pytestmark = pytest.mark.usefixtures("x64")

X, LABELS = normal(0, 4, 3), jnp.arange(4) % 3
KERNEL, BIAS = normal(1, 3, 3), normal(2, 3)
PARAMS = {"Dense_0": {"kernel": KERNEL, "bias": BIAS}}
FROZEN = {"Dense_0": {"kernel": normal(3, 3, 3), "bias": normal(4, 3)}}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, **F64)(x)


def apply(params, x):
    return Net().apply({"params": params}, x)


def frozen_backbone(params, x, labels):
    return cross_entropy(apply(params, jnp.tanh(apply(FROZEN, x))), labels)


def with_teacher(teacher):
    def loss_fn(params, x, labels):
        loss, logits = cross_entropy(apply(params, x), labels)
        return loss + ((logits - teacher(params, 3 * x)) ** 2).mean(), logits

    return loss_fn


teacher_parameters = with_teacher(lambda params, x: apply(jax.lax.stop_gradient(params), x))
teacher_outputs = with_teacher(lambda params, x: jax.lax.stop_gradient(apply(params, x)))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "loss_fn",
    [frozen_backbone, teacher_parameters, teacher_outputs, jax.checkpoint(teacher_outputs)],
)
def test_a_twin_of_the_same_name_is_no_second_use(loss_fn):
    layers = check_exact_blocks(loss_fn, PARAMS, X, LABELS, blocks={"Dense_0": 1})
    assert len(layers.blocks["Dense_0"].uses) == 1
    assert len(layers.skipped) == 1


@pytest.mark.slow
def test_a_teacher_adds_nothing_to_the_factor_of_inputs():
    *_, curvature = empirical(teacher_outputs)(PARAMS, X, LABELS)
    left, _ = system_of("Dense_0", "factors", curvature, PARAMS).state
    x = np.concatenate([X, np.ones((4, 1))], axis=1)
    close(left[0, :4, :4], x.T @ x / 4, rtol=1e-12)


def linen(model, x=X):
    variables = model.init(jax.random.key(0), x)
    state = {name: v for name, v in variables.items() if name != "params"}
    return lambda p, x: model.apply({"params": p, **state}, x), variables["params"]


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(3, **F64))(x, update_stats=False)


def mapped_variables():
    twice = lambda v: jax.tree.map(lambda p: 2 * p, v)
    return nn.map_variables(nn.Dense, "params", twice, init=True)(3, **F64)


def nnx_weight_norm():
    layer = nnx.Linear(3, 3, **F64, rngs=nnx.Rngs(0))
    graphdef, state, rest = nnx.split(
        nnx.WeightNorm(layer, **F64, rngs=nnx.Rngs(0)), nnx.Param, ...
    )
    return lambda p, x: nnx.merge(graphdef, p, rest)(x), nnx.to_pure_dict(state)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: linen(nn.WeightNorm(nn.Dense(3, **F64))),
        lambda: linen(Spectral()),
        lambda: linen(mapped_variables()),
        nnx_weight_norm,
    ],
)
def test_a_derived_kernel_is_not_the_parameter(make):
    """google/flax#3351, google/flax#3400 and google/flax#4426."""
    apply, params = make()
    layers = kfac.find_layers(lambda p, x, y: cross_entropy(apply(p, x), y), params, X, LABELS)
    assert not layers.blocks
    assert "computed inside the loss" in str(layers)
    assert "no layer met" not in str(layers)


class Two(nnx.Module):
    def __init__(self):
        self.first, self.second = (nnx.Linear(3, 3, **F64, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


with jax.enable_x64(True):
    GRAPHDEF, STATE = nnx.split(Two(), nnx.Param)
    TWO = nnx.to_pure_dict(STATE)


def cast(params):
    return jax.tree.map(lambda p: p.astype(jnp.float32).astype(jnp.float64), params)


def cast_linen(params, x, labels):
    return cross_entropy(apply(cast(params), x), labels)


def cast_nnx(params, x, labels):
    return cross_entropy(nnx.merge(GRAPHDEF, cast(params))(x), labels)


def updated_nnx(params, x, labels):
    model = Two()
    nnx.update(model, params)
    return cross_entropy(model(x), labels)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("loss_fn", "params", "blocks"),
    [
        (cast_linen, PARAMS, {"Dense_0": 1}),
        (cast_nnx, TWO, {"first": 1, "second": 1}),
        (updated_nnx, TWO, {"first": 1, "second": 1}),
    ],
)
def test_casts_are_no_other_parameters(loss_fn, params, blocks):
    layers = check_exact_blocks(loss_fn, params, X, LABELS, blocks=blocks, rtol=1e-6)
    assert layers.coverage == 1.0


def test_modules_of_one_tree_applied_apart():
    params = {"encoder": PARAMS, "decoder": FROZEN}

    def loss_fn(p, x, y, apply=apply):
        return cross_entropy(apply(p["decoder"], jnp.tanh(apply(p["encoder"], x))), y)

    blocks = {"encoder/Dense_0": 1, "decoder/Dense_0": 1}
    check_exact_blocks(loss_fn, params, X, LABELS, blocks=blocks)
    variables = {name: {"params": p} for name, p in params.items()}
    loss_of_variables = functools.partial(loss_fn, apply=Net().apply)
    assert kfac.find_layers(loss_of_variables, variables, X, LABELS).coverage == 1.0


LAYER = jax.jit(lambda p, x: jnp.tanh(apply(p, x)))
REMAT = jax.checkpoint(LAYER)


@pytest.mark.parametrize(
    ("twice", "reason"),
    [
        (lambda p, x: LAYER(p, LAYER(p, x)), "is used 2 times"),
        (lambda p, x: REMAT(p, REMAT(p, x)), "is used 2 times"),
        (lambda p, x: jax.lax.map(lambda x: apply(p, x), x), "use kfac.scan"),
        (lambda p, x: jax.lax.fori_loop(0, 2, lambda _, x: apply(p, x), x), "use kfac.scan"),
    ],
    ids=["jit", "checkpoint", "map", "fori_loop"],
)
def test_a_layer_in_a_function_that_is_kept_or_a_loop_that_is_not_seen_is_refused(twice, reason):
    loss_fn = lambda p, x, y: cross_entropy(twice(p, x), y)
    layers = kfac.find_layers(loss_fn, PARAMS, X, LABELS)
    assert not layers.blocks
    assert reason in str(layers)


def test_stacks_of_equal_sizes_are_not_mixed_up():
    layer = lambda w, x: kfac.tap(kfac.Dense(), {"kernel": w}, x, path={"kernel": "stack"})

    def loss_fn(params, x, labels):
        body = lambda x, stack: (jax.vmap(lambda w: jnp.tanh(layer(w, x)))(stack).sum(0), None)
        stack = jnp.swapaxes(params["stack"], 0, 1)  # the scan is over axis 1
        return cross_entropy(jax.lax.scan(body, x, stack)[0], labels)

    params = {"stack": normal(6, 2, 2, 3, 3)}
    (block,) = check_exact_blocks(loss_fn, params, X, LABELS).blocks.values()
    assert (block.lanes, block.params[0].stack_axes) == (4, (1, 0))


def test_a_use_that_is_not_captured_takes_the_other_with_it():
    def loss_fn(params, x, labels):
        learned = jnp.tanh(apply(params, jnp.ones((1, 3))))  # of no example
        return cross_entropy(apply(params, x) + learned, labels)

    layers = kfac.find_layers(loss_fn, PARAMS, X, LABELS)
    assert not layers.blocks
    assert "numbers the 4 examples" in str(layers)


# ---- No layer without a word.


def recurrent(cell):
    network = nnx.RNN(cell(3, 3, **F64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(2))
    graphdef, state, rest = nnx.split(network, nnx.Param, ...)
    rest = nnx.as_pure(rest)
    return lambda params, x: nnx.merge(graphdef, params, rest)(x), nnx.to_pure_dict(state)


def overridden(base):
    """A subclass whose call goes through its parent's."""

    class Doubled(base):
        def __call__(self, x):
            return 2 * super().__call__(x)

    return Doubled


LAYERS = {
    "dense": (nn.Dense, nnx.Linear, (3,), {}),
    "convolution": (nn.Conv, nnx.Conv, (3,), {"kernel_size": (2,)}),
    "norm": (nn.LayerNorm, nnx.LayerNorm, (), {}),
}


def report_of(module, x):
    """``kfac.verify`` of a module's outputs, averaged over positions."""
    if isinstance(module, nn.Module):
        params, apply = module.init(jax.random.key(0), x), module.apply
    else:
        graphdef, state = nnx.split(module)
        params, apply = nnx.to_pure_dict(state), lambda p, x: nnx.merge(graphdef, p)(x)
    return kfac.verify(lambda p, x: cross_entropy(apply(p, x).sum(1), LABELS)[0], params, x)


def made_of_nnx(base, outputs, options):
    return base(3, *outputs, **options, **F64, rngs=nnx.Rngs(0))


@pytest.mark.cases(2)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("name", "twice"), [("dense", False), ("convolution", False), ("norm", False), ("dense", True)]
)
def test_a_call_through_super_counts_once(framework, name, twice):
    of_linen, of_nnx, outputs, options = LAYERS[name]
    if framework == "linen":
        base = overridden(of_linen)
        module = (nn.remat(base) if twice else base)(*outputs, **options, **F64)
    else:
        base = overridden(of_nnx)
        module = made_of_nnx(overridden(base) if twice else base, outputs, options)
    report = report_of(module, normal(5, 4, 2, 3))
    assert report.layers.coverage == 1.0
    assert max(max(row.capture_error, row.product_error) for row in report.rows) < 1e-12


class Gained:
    """A parameter of a subclass's own, behind what its parent does."""

    def __call__(self, x):
        return super().__call__(x) * self.gain[...]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYERS))
def test_parameters_of_a_subclass_are_not_its_parents(name):
    _, base, outputs, options = LAYERS[name]
    module = made_of_nnx(type("Own", (Gained, base), {}), outputs, options)
    module.gain = nnx.Param(normal(6, 3))
    report = report_of(module, normal(5, 4, 2, 3))
    assert [row.capture_error < 1e-12 for row in report.rows] == [True]
    assert 0 < report.layers.coverage < 1
    assert "gain" in report.layers.reasons or "gain" in str(report.layers)


# google-deepmind/kfac-jax#188
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda x: recurrent(nnx.GRUCell),
        lambda x: recurrent(nnx.OptimizedLSTMCell),
        lambda x: linen(nn.RNN(nn.GRUCell(3, **F64)), x),
        lambda x: linen(nn.RNN(nn.LSTMCell(3, **F64)), x),
    ],
)
def test_recurrent_cells(make):
    x = normal(5, 4, 2, 3)
    apply, params = make(x)
    loss_fn = lambda params, x, labels: cross_entropy(apply(params, x)[:, -1], labels)
    layers = check_exact_blocks(loss_fn, params, x, LABELS)
    assert layers.coverage == 1.0
    assert {use.num_tokens for b in layers.blocks.values() for use in b.uses} == {2}


class Adapted(nnx.Module):
    def __init__(self):
        options = dict(lora_rank=2, lora_param_dtype=jnp.float64, **F64, rngs=nnx.Rngs(0))
        self.fc = nnx.LoRALinear(3, 3, **options)
        base = nnx.Linear(3, 3, **F64, rngs=nnx.Rngs(1))
        self.head = nnx.LoRA(3, 2, 3, base_module=base, **F64, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.head(jnp.tanh(self.fc(x)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("wrt", [nnx.LoRAParam, nnx.Param])
def test_low_rank_adapters(wrt):
    graphdef, state, rest = nnx.split(Adapted(), wrt, ...)
    params = jax.tree.map(lambda p: normal(p.size, *p.shape), nnx.to_pure_dict(state))
    loss_fn = lambda p, x, y: cross_entropy(nnx.merge(graphdef, p, rest)(x), y)
    layers = check_exact_blocks(loss_fn, params, X, LABELS)
    assert layers.coverage == 1.0
    assert len(layers.blocks) == (2 if wrt is nnx.LoRAParam else 4)


def test_no_block_is_an_error_and_few_are_a_warning():
    params = {"w": KERNEL, "fc": PARAMS, "more": normal(0, 5, 5)}
    loss_fn = lambda p, x: (x @ p["w"]).mean() + p["more"].sum()
    with pytest.warns(UserWarning, match="cover 0.0 % .* no layer met"):
        layers = kfac.find_layers(loss_fn, params, X)
    with pytest.raises(ValueError, match="expected layers with curvature.*kfac.tap"):
        kfac.kfac(1.0, layers)
    with pytest.raises(ValueError, match="expected layers with curvature"):
        kfac.scale_by_kfac(layers)
    some = lambda p, x: (apply(p["fc"], x) @ p["w"]).mean() + p["more"].sum()
    with pytest.warns(UserWarning, match=r"cover 26.1 % of the parameters; .*more"):
        layers = kfac.find_layers(some, params, X)
    kfac.kfac(1.0, layers)

"""Layers that are found, or not, in programs of the kinds that public reports tell of.

The truth is each example's own gradient, in float64, by JAX on the function without taps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import kfac
from kfac.solve import _systems as systems
from tests.kfac.reference import F64, check_exact_blocks, cross_entropy, flatten, normal

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


def teacher_parameters(params, x, labels):
    loss, logits = cross_entropy(apply(params, x), labels)
    teacher = apply(jax.lax.stop_gradient(params), 3 * x)
    return loss + ((logits - teacher) ** 2).mean(), logits


def teacher_outputs(params, x, labels):
    loss, logits = cross_entropy(apply(params, x), labels)
    return loss + ((logits - jax.lax.stop_gradient(apply(params, 3 * x))) ** 2).mean(), logits


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
    function = kfac.value_grad_and_curvature(teacher_outputs, fisher="empirical", has_aux=True)
    _, _, curvature = function(PARAMS, X, LABELS)
    (block,) = curvature.layers.blocks.values()
    form = "factors"
    left, _ = systems.new_factors(block, curvature, systems.lanes_of(block, flatten(PARAMS)), form)
    x = np.concatenate([X, np.ones((4, 1))], axis=1)
    np.testing.assert_allclose(left[0], x.T @ x / 4, rtol=1e-12)


def weight_norm():
    return nn.WeightNorm(nn.Dense(3, **F64))


def spectral_norm():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.SpectralNorm(nn.Dense(3, **F64))(x, update_stats=False)

    return Model()


def mapped_variables():
    doubled = nn.map_variables(
        nn.Dense, "params", lambda v: jax.tree.map(lambda p: 2 * p, v), init=True
    )
    return doubled(3, **F64)


# google/flax#3351, google/flax#3400
@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [weight_norm, spectral_norm, mapped_variables])
def test_a_derived_kernel_is_not_the_parameter(make):
    model = make()
    variables = model.init(jax.random.key(0), X)
    state = {name: v for name, v in variables.items() if name != "params"}

    def loss_fn(params, x, labels):
        return cross_entropy(model.apply({"params": params, **state}, x), labels)

    layers = kfac.find_layers(loss_fn, variables["params"], X, LABELS)
    assert not layers.blocks
    assert "computed inside the loss" in str(layers)
    assert "no layer met" not in str(layers)


# google/flax#4426
def test_a_derived_kernel_of_nnx_is_not_the_parameter():
    model = nnx.WeightNorm(nnx.Linear(3, 3, **F64, rngs=nnx.Rngs(0)), **F64, rngs=nnx.Rngs(0))
    graphdef, state, rest = nnx.split(model, nnx.Param, ...)
    loss_fn = lambda p, x, y: cross_entropy(nnx.merge(graphdef, p, rest)(x), y)
    layers = kfac.find_layers(loss_fn, nnx.to_pure_dict(state), X, LABELS)
    assert not layers.blocks
    assert "computed inside the loss" in str(layers)


class Two(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 3, **F64, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(3, 3, **F64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


with jax.enable_x64(True):
    GRAPHDEF, STATE = nnx.split(Two(), nnx.Param)
    TWO = nnx.to_pure_dict(STATE)


def cast_linen(params, x, labels):
    narrow = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return cross_entropy(apply(jax.tree.map(lambda p: p.astype(jnp.float64), narrow), x), labels)


def cast_nnx(params, x, labels):
    narrow = jax.tree.map(lambda p: p.astype(jnp.float32).astype(jnp.float64), params)
    return cross_entropy(nnx.merge(GRAPHDEF, narrow)(x), labels)


def updated_nnx(params, x, labels):
    model = Two()
    nnx.update(model, params)
    return cross_entropy(model(x), labels)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("loss_fn", "params", "blocks"),
    [
        (cast_linen, PARAMS, ["Dense_0"]),
        (cast_nnx, TWO, ["first", "second"]),
        (updated_nnx, TWO, ["first", "second"]),
    ],
)
def test_casts_are_no_other_parameters(loss_fn, params, blocks):
    layers = check_exact_blocks(
        loss_fn, params, X, LABELS, blocks=dict.fromkeys(blocks, 1), rtol=1e-6
    )
    assert layers.coverage == 1.0


def test_modules_of_one_tree_applied_apart():
    params = {"encoder": PARAMS, "decoder": FROZEN}
    loss_fn = lambda p, x, y: cross_entropy(
        apply(p["decoder"], jnp.tanh(apply(p["encoder"], x))), y
    )
    blocks = {"encoder/Dense_0": 1, "decoder/Dense_0": 1}
    check_exact_blocks(loss_fn, params, X, LABELS, blocks=blocks)
    variables = {name: {"params": p} for name, p in params.items()}
    loss_fn = lambda v, x, y: cross_entropy(
        Net().apply(v["decoder"], jnp.tanh(Net().apply(v["encoder"], x))), y
    )
    assert kfac.find_layers(loss_fn, variables, X, LABELS).coverage == 1.0


def test_a_layer_inside_a_kept_function_that_is_used_twice_is_refused():
    layer = jax.jit(lambda p, x: jnp.tanh(apply(p, x)))
    loss_fn = lambda p, x, y: cross_entropy(layer(p, layer(p, x)), y)
    layers = kfac.find_layers(loss_fn, PARAMS, X, LABELS)
    assert not layers.blocks
    assert "is used 2 times" in str(layers)
    twice = jax.checkpoint(layer)
    loss_fn = lambda p, x, y: cross_entropy(twice(p, twice(p, x)), y)
    assert not kfac.find_layers(loss_fn, PARAMS, X, LABELS).blocks


@pytest.mark.parametrize(
    "loop",
    [
        lambda f, x: jax.lax.map(f, x),
        lambda f, x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    ],
    ids=["map", "fori_loop"],
)
def test_a_layer_in_a_loop_that_is_not_seen_is_refused(loop):
    loss_fn = lambda p, x, y: cross_entropy(loop(lambda x: jnp.tanh(apply(p, x)), x), y)
    layers = kfac.find_layers(loss_fn, PARAMS, X, LABELS)
    assert not layers.blocks
    assert "use kfac.scan" in str(layers)


def test_stacks_of_equal_sizes_are_not_mixed_up():
    def loss_fn(params, x, labels):
        def body(x, stack):
            layer = lambda w: jnp.tanh(kfac.tap(kfac.Dense(), {"kernel": w}, x, path=PATH))
            return jax.vmap(layer)(stack).sum(0), None

        stack = jnp.swapaxes(params["stack"], 0, 1)  # the scan is over axis 1
        return cross_entropy(jax.lax.scan(body, x, stack)[0], labels)

    params = {"stack": normal(6, 2, 2, 3, 3)}
    layers = check_exact_blocks(loss_fn, params, X, LABELS)
    (block,) = layers.blocks.values()
    assert (block.lanes, block.params[0].stack_axes) == (4, (1, 0))


PATH = {"kernel": "stack"}


def test_a_use_that_is_not_captured_takes_the_other_with_it():
    def loss_fn(params, x, labels):
        learned = jnp.tanh(apply(params, jnp.ones((1, 3))))  # of no example
        return cross_entropy(apply(params, x) + learned, labels)

    layers = kfac.find_layers(loss_fn, PARAMS, X, LABELS)
    assert not layers.blocks
    assert "numbers the 4 examples" in str(layers)


# ---- No layer without a word.


def recurrent(cell):
    cell = cell(3, 3, **F64, rngs=nnx.Rngs(0))
    graphdef, state, rest = nnx.split(nnx.RNN(cell, rngs=nnx.Rngs(2)), nnx.Param, ...)
    rest = nnx.as_pure(rest)

    def loss_fn(params, x, labels):
        return cross_entropy(nnx.merge(graphdef, params, rest)(x)[:, -1], labels)

    return loss_fn, nnx.to_pure_dict(state)


def overridden(base):
    """A subclass whose call goes through its parent's."""

    class Doubled(base):
        def __call__(self, x):
            return 2 * super().__call__(x)

    return Doubled


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("linen_layer", "nnx_layer"),
    [
        (
            lambda: overridden(nn.Dense)(3, **F64),
            lambda: overridden(nnx.Linear)(3, 3, **F64, rngs=nnx.Rngs(0)),
        ),
        (
            lambda: nn.remat(overridden(nn.Dense))(3, **F64),
            lambda: overridden(overridden(nnx.Linear))(3, 3, **F64, rngs=nnx.Rngs(0)),
        ),
        (
            lambda: overridden(nn.Conv)(3, (2,), **F64),
            lambda: overridden(nnx.Conv)(3, 3, (2,), **F64, rngs=nnx.Rngs(0)),
        ),
        (
            lambda: overridden(nn.LayerNorm)(**F64),
            lambda: overridden(nnx.LayerNorm)(3, **F64, rngs=nnx.Rngs(0)),
        ),
    ],
    ids=["dense", "dense, twice", "convolution", "norm"],
)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_call_through_super_counts_once(framework, linen_layer, nnx_layer):
    x = normal(5, 4, 2, 3)
    if framework == "linen":
        module = linen_layer()
        params, apply = module.init(jax.random.key(0), x), module.apply
    else:
        graphdef, state = nnx.split(nnx_layer())
        params, apply = nnx.to_pure_dict(state), lambda p, x: nnx.merge(graphdef, p)(x)

    def loss_fn(params, x):
        return cross_entropy(apply(params, x).sum(1), LABELS)[0]

    report = kfac.verify(loss_fn, params, x)
    assert report.layers.coverage == 1.0
    assert max(max(row.capture_error, row.product_error) for row in report.rows) < 1e-12


def recurrent_linen(cell):
    network = nn.RNN(cell(3, **F64))
    loss_fn = lambda params, x, labels: cross_entropy(network.apply(params, x)[:, -1], labels)
    return loss_fn, network.init(jax.random.key(0), normal(5, 4, 2, 3))


class Gained:
    """A parameter of a subclass's own, behind what its parent does."""

    def __call__(self, x):
        return super().__call__(x) * self.gain[...]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "sizes"), [(nnx.Linear, (3, 3)), (nnx.Conv, (3, 3, (2,))), (nnx.LayerNorm, (3,))]
)
def test_parameters_of_a_subclass_are_not_its_parents(base, sizes):
    module = type("Own", (Gained, base), {})(*sizes, **F64, rngs=nnx.Rngs(0))
    module.gain = nnx.Param(normal(6, 3))
    graphdef, state = nnx.split(module)

    def loss_fn(params, x):
        return cross_entropy(nnx.merge(graphdef, params)(x).sum(1), LABELS)[0]

    report = kfac.verify(loss_fn, nnx.to_pure_dict(state), normal(5, 4, 2, 3))
    assert [row.capture_error < 1e-12 for row in report.rows] == [True]
    assert 0 < report.layers.coverage < 1
    assert "gain" in report.layers.reasons or "gain" in str(report.layers)


# google-deepmind/kfac-jax#188
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "cell"),
    [
        (recurrent, nnx.GRUCell),
        (recurrent, nnx.OptimizedLSTMCell),
        (recurrent_linen, nn.GRUCell),
        (recurrent_linen, nn.LSTMCell),
    ],
)
def test_recurrent_cells(make, cell):
    loss_fn, params = make(cell)
    x = normal(5, 4, 2, 3)
    layers = check_exact_blocks(loss_fn, params, x, LABELS)
    assert layers.coverage == 1.0
    assert {use.num_tokens for b in layers.blocks.values() for use in b.uses} == {2}


class Adapted(nnx.Module):
    def __init__(self):
        self.fc = nnx.LoRALinear(3, 3, lora_rank=2, **F64, lora_param_dtype=jnp.float64,
                                 rngs=nnx.Rngs(0))  # fmt: skip
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

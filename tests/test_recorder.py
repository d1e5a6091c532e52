"""What layers report, taken out of every transformation, against the same computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from adder_flax import ops
from adder_flax.recorder import describe, listening, record, report
from tests.modules import tiny_vit

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def layer(x):
    report("layer", {"input": x, "square": x * x}, name="sine")
    return jnp.sin(x)


@jax.custom_vjp
def own_derivative(x):
    return layer(x)


own_derivative.defvjp(lambda x: (layer(x), x), lambda x, g: (g * jnp.cos(x),))
WAYS = {
    "plain": layer,
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "checkpoint of jit": jax.checkpoint(jax.jit(layer)),
    "own derivative": own_derivative,
    "vmap": jax.vmap(layer),
    "vmap of columns": jax.vmap(layer, in_axes=1, out_axes=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_transformation_lets_reports_out(way):
    WAYS[way](X)  # fills the caches of inner transformations
    output, [seen] = record({"layer": ["input"]}, WAYS[way], X)
    np.testing.assert_allclose(output, np.sin(X), rtol=1e-6)
    assert (seen.kind, seen.path, seen.facts) == ("layer", "", {"name": "sine"})
    expected = X.T if way == "vmap of columns" else X
    np.testing.assert_array_equal(seen.arrays["input"], expected)
    assert list(seen.arrays) == ["input"]
    assert seen.loops == ((len(expected),) if "vmap" in way else ())


@pytest.mark.parametrize("reverse", [False, True])
def test_loops_within_loops(reverse):
    inner = lambda x, row: (jax.checkpoint(layer)(x + row), None)
    outer = lambda x, rows: (jax.lax.scan(inner, x, rows, reverse=reverse)[0], x.sum())
    rows = np.random.default_rng(1).standard_normal((2, 5, 4)).astype(np.float32)
    loop = lambda x: jax.lax.scan(outer, x, rows)
    (output, sums), [seen] = record({"layer": ["input"]}, loop, X[0])
    x, expected, totals = np.float64(X[0]), np.zeros((2, 5, 4)), []
    for i in range(2):
        totals.append(x.sum())
        for j in reversed(range(5)) if reverse else range(5):
            expected[i, j] = x + rows[i, j]
            x = np.sin(expected[i, j])
    np.testing.assert_allclose(output, x, rtol=1e-5)
    np.testing.assert_allclose(sums, totals, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.arrays["input"], expected, rtol=1e-5, atol=1e-6)
    assert seen.loops == (2, 5)


def test_what_is_recorded_beside_a_gradient_is_the_forward_pass():
    loss = lambda x: layer(x).sum()
    (value, gradient), [seen] = record({"layer": ["input"]}, jax.value_and_grad(loss), X)
    np.testing.assert_allclose(gradient, np.cos(X), rtol=1e-5)
    np.testing.assert_allclose(value, np.sin(X).sum(), rtol=1e-5)
    np.testing.assert_array_equal(seen.arrays["input"], X)


def test_nobody_listens_nobody_pays():
    plain = str(jax.make_jaxpr(jnp.sin)(X))
    curious = lambda x: (listening("layer"), listening("other"))
    assert record({"layer": []}, curious, X)[0] == (True, False)
    without = lambda x: (report("layer", {"input": x}), jnp.sin(x))[1]
    assert str(jax.make_jaxpr(without)(X)) == plain
    record({"other": []}, without, X)
    assert str(jax.make_jaxpr(without)(X)) == plain


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"scan_blocks": True, "remat": True}])
def test_a_vision_transformer_names_its_layers(options):
    model = tiny_vit(score="adder", mlp_linear="adder", **options)
    images = np.random.default_rng(0).standard_normal((3, 4, 4, 1)).astype(np.float32)
    wanted = {"adder": ["rows", "kernel", "sums"], "attention": [], "block": ["output"]}
    logits, records = record(wanted, model, images)
    np.testing.assert_allclose(logits, model(images), rtol=1e-5, atol=1e-5)
    paths = ["attention", "mlp.fc1", "mlp.fc2", ""]
    expected = [f"blocks.{i}.{path}".rstrip(".") for i in range(2) for path in paths]
    assert [r.path for r in records] == expected
    for seen in (r for r in records if r.kind == "adder"):
        with ops.use_backend("reference"):
            expected = ops.adder_matmul(seen.arrays["rows"], seen.arrays["kernel"])
        np.testing.assert_allclose(seen.arrays["sums"], expected, rtol=1e-5)
        assert seen.facts == {"hardtanh_slope": 1.0}
    abstract = jax.ShapeDtypeStruct(images.shape, images.dtype)
    described = describe(wanted, nnx.eval_shape(lambda: model), abstract)
    shapes = lambda r: (r.kind, r.path, r.facts, {name: a.shape for name, a in r.arrays.items()})
    assert [shapes(r) for r in described] == [shapes(r) for r in records]
    assert type(model.blocks[0]).__call__ is type(model.blocks[1]).__call__

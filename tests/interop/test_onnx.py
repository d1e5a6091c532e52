"""Models for ONNX Runtime: the same logits for any number of images; needs the extra ``onnx`` and
jax2onnx."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import interop, ops
from adder_flax.extras import MissingExtraError
from adder_flax.interop._program import as_formulas
from tests.interop.test_program import SIZES, largest_difference
from tests.interop.test_weights import ADDER, close, make


def test_functions_become_formulas_inside_of_loops_and_calls_too():
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 4))

    @jax.jit
    def repeated(x, w):
        more = lambda _, total: total + ops.adder_matmul(x, w)
        return jax.lax.fori_loop(0, 3, more, jnp.zeros((2, 4)))

    assert "adder_flax_pairs" in str(jax.make_jaxpr(repeated)(x, w))
    assert "adder_flax_pairs" not in str(jax.make_jaxpr(as_formulas(repeated))(x, w))
    np.testing.assert_allclose(as_formulas(repeated)(x, w)[0], repeated(x, w), rtol=1e-6)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "options",
    [
        ADDER | dict(stem_channels=(5,), stem_linear="adder"),
        dict(score="additive", layer_scale=0.1),
        dict(score=("bilinear", "gaussian"), temperature="learned", pooling="mean"),
        dict(distilled=True),
    ],
)
def test_onnx_runtime_gives_the_same_logits(options, tmp_path):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make(**SIZES | options)
    classify = lambda images: model(images / 127.5 - 1.0)
    place, shape, names = tmp_path / "model.onnx", (8, 8, 3), ["a", "b", "ü", "d"]
    interop.save_onnx(classify, place, image_shape=shape, label_names=names, notes={"step": 7})
    images = np.random.default_rng(0).integers(0, 256, (64, *shape), np.uint8)
    expected = np.asarray(jax.jit(classify)(images))
    session = onnxruntime.InferenceSession(place)
    for count in (1, 3, 64):
        (logits,) = session.run(["logits"], {"images": images[:count]})
        print(f"{count} images: {largest_difference(logits, expected[:count])}")
        close(logits, expected[:count])
    facts = session.get_modelmeta().custom_metadata_map
    assert (facts["classes"].split("\n"), facts["step"]) == (names, "7")


def test_what_jax2onnx_does_not_know_is_one_message(tmp_path):
    pytest.importorskip("jax2onnx")
    said = "expected a model of operations that jax2onnx knows, got .*key_block=off"
    with pytest.raises(ValueError, match=said):
        interop.save_onnx(jnp.linalg.svd, tmp_path / "x", image_shape=(4, 4, 3), label_names="ab")
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps jax2onnx.*\[onnx\]"):
        interop.save_onnx(jnp.sin, tmp_path / "x", image_shape=(4, 4, 3), label_names="ab")

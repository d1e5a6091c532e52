"""Models as programs: the same logits for any number of images, in a process that knows JAX
alone and in ONNX Runtime, which needs the extra ``onnx`` and jax2onnx.

``ADDER_FLAX_TEST_PYTHON`` names another interpreter for that process (``nox -s program``): of
another version of Python and JAX, say, without anything else.
"""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from adder_flax import interop, ops, training
from adder_flax.app import modes
from adder_flax.experiments import g2p
from adder_flax.extras import MissingExtraError
from adder_flax.interop._program import as_formulas
from tests.data.files import write_dictionary
from tests.interop.test_weights import ADDER, close, make

SIZES = dict(image_size=8, patch_size=2, channels=3, num_classes=4, width=16, depth=2, num_heads=2)
STEM = ADDER | dict(stem_channels=(5,), stem_linear="adder")

PYTHON = os.environ.get("ADDER_FLAX_TEST_PYTHON", sys.executable)

RUN = """
import json, sys
import jax, numpy as np
about = json.load(open(sys.argv[1] + ".json"))
images = np.load(sys.argv[2])
exec("\\n".join(about["load"]))
found = [np.asarray(classify(images[:count])) for count in (1, 3, 64)]
for platform in ("cpu", "cuda", "tpu"):
    export.export(jax.jit(classify), platforms=[platform])(images)
assert not [name for name in sys.modules if name.split(".")[0] in ("adder_flax", "flax", "kfac")]
np.savez(sys.argv[3], *found)
print("Python", sys.version.split()[0], "jax", jax.__version__)
"""


NAMES = ["a", "b", "ü", "d"]
IMAGES = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), np.uint8)
FACTS = dict(image_shape=(8, 8, 3), label_names=NAMES, notes={"step": 7})


def classifier(options):
    model = make(**SIZES | options)
    return lambda images: model(images / 127.5 - 1.0)


def check(found, classify):
    """Logits of the first 1, 3 and 64 images; differences are for those who run this with -rP."""
    expected = np.asarray(jax.jit(classify)(IMAGES))
    for logits, count in zip(found, (1, 3, 64), strict=True):
        print(f"{count} images: largest difference {np.abs(logits - expected[:count]).max():.1e}")
        close(logits, expected[:count])
    print(f"largest logit {np.abs(expected).max():.1f}")


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.parametrize("options", [STEM, dict(score="additive"), dict(pooling="mean")])
def test_jax_alone_gives_the_same_logits(options, tmp_path):
    classify = classifier(options)
    interop.save_program(classify, tmp_path / "program", **FACTS)
    np.save(tmp_path / "images.npy", IMAGES)
    places = [tmp_path / name for name in ("program", "images.npy", "found.npz")]
    subprocess.run([PYTHON, "-c", RUN, *places], check=True, cwd=tmp_path)
    check(np.load(places[-1]).values(), classify)
    about = json.loads((tmp_path / "program.json").read_text())
    assert (about["classes"], about["step"]) == (NAMES, 7)
    assert about["input"]["shape"] == ["batch", 8, 8, 3]
    exported = export.deserialize((tmp_path / "program").read_bytes())
    assert exported.platforms == ("cpu", "cuda", "rocm", "tpu")
    calls = r"stablehlo.custom_call @(?!Sharding|shape_assertion)\w+"
    assert not re.findall(calls, exported.mlir_module())


def test_a_sequence_model_is_refused_in_one_message(tmp_path):
    write_dictionary(tmp_path / "dictionary")
    config = g2p.transduction("dot")
    config.data.data_dir = str(tmp_path / "dictionary")
    said = "expected a run of config.task.name=classification for --names=stab"
    with pytest.raises(training.RunError, match=said):
        modes.export(config, tmp_path / "run", "last", "stablehlo")


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
        STEM,
        dict(score="additive", layer_scale=0.1),
        dict(score=("bilinear", "gaussian"), temperature="learned", pooling="mean"),
        dict(distilled=True),
    ],
)
def test_onnx_runtime_gives_the_same_logits(options, tmp_path):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    classify = classifier(options)
    interop.save_onnx(classify, tmp_path / "model.onnx", **FACTS)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    run = lambda count: session.run(["logits"], {"images": IMAGES[:count]})[0]
    check(map(run, (1, 3, 64)), classify)
    facts = session.get_modelmeta().custom_metadata_map
    assert (facts["classes"].split("\n"), facts["step"]) == (NAMES, "7")


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

"""Models as programs: the same logits for any number of images, in a process that knows JAX
alone.

``ADDER_FLAX_TEST_PYTHON`` names another interpreter for that process (``nox -s program``): of
another version of Python and JAX, say, without anything else.
"""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

from adder_flax import interop, training
from adder_flax.app import modes
from adder_flax.experiments import g2p
from tests.data.files import write_dictionary
from tests.interop.test_weights import ADDER, close, make

SIZES = dict(image_size=8, patch_size=2, channels=3, num_classes=4, width=16, depth=2, num_heads=2)

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


def largest_difference(logits, expected):
    """In words, for those who run these tests with -rP."""
    difference = np.abs(logits - expected).max()
    return f"largest difference {difference:.1e}, largest logit {np.abs(expected).max():.1f}"


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ADDER | dict(stem_channels=(5,), stem_linear="adder"),
        dict(score="additive"),
        dict(score="dot", pooling="mean"),
    ],
)
def test_jax_alone_gives_the_same_logits(options, tmp_path):
    model = make(**SIZES | options)
    classify = lambda images: model(images / 127.5 - 1.0)
    shape, names = (8, 8, 3), ["a", "b", "ü", "d"]
    facts = dict(image_shape=shape, label_names=names, notes={"step": 7})
    interop.save_program(classify, tmp_path / "program", **facts)
    images = np.random.default_rng(0).integers(0, 256, (64, *shape), np.uint8)
    np.save(tmp_path / "images.npy", images)
    places = [tmp_path / name for name in ("program", "images.npy", "found.npz")]
    subprocess.run([PYTHON, "-c", RUN, *places], check=True, cwd=tmp_path)
    found, expected = np.load(places[-1]), np.asarray(jax.jit(classify)(images))
    for logits, count in zip(found.values(), (1, 3, 64), strict=True):
        print(f"{count} images: {largest_difference(logits, expected[:count])}")
        close(logits, expected[:count])
    about = json.loads((tmp_path / "program.json").read_text())
    assert (about["classes"], about["step"]) == (names, 7)
    assert about["input"]["shape"] == ["batch", *shape]
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

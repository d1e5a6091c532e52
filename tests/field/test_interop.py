"""What users of other projects ran into with weights and exported models, tried here.

Names and formulas of timm and transformers are transcribed; `tests/interop/reference.py` is timm's
transformer in float64.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from adder_flax import cli, interop
from adder_flax.interop import _folder
from tests.interop.reference import timm_forward
from tests.interop.test_weights import close, images, load, make, timm_arrays


def of_timm(path):
    """Logits of timm's formulas for a file in timm's names."""
    return timm_forward(load_file(path), images(), patch_size=3, depth=2, num_heads=4)


SCORES = [
    {"scale": 0.5},
    {"scale": "sqrt_dim", "temperature": 3.0},
    {"scale": "variance_matched"},
    {"temperature": "learned"},
    {"scale": 0.3, "temperature": "learned"},
]


@pytest.mark.parametrize("options", SCORES, ids=str)
@pytest.mark.parametrize("names", ["timm", "hugging_face", "transformers_5"])
def test_scale_and_temperature_become_part_of_the_queries(names, options, tmp_path):
    """Others have q·k/√d and no field for anything else."""
    model = make(**options)
    interop.save_weights(model, tmp_path / "w", names=names)
    plain = make(seed=1)
    assert interop.load_weights(plain, tmp_path / "w") == ()
    interop.save_weights(plain, tmp_path / "timm", names="timm")
    close(of_timm(tmp_path / "timm"), model(images()))


@pytest.mark.parametrize("options", SCORES[:3], ids=str)
def test_weights_of_timm_give_timms_logits_whatever_scale_the_model_has(options, tmp_path):
    save_file(timm_arrays(), tmp_path / "w")
    model = make(**options)
    assert load(model, tmp_path / "w") == ()
    close(model(images()), of_timm(tmp_path / "w"))


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"identity": True}, "the identity map"),
        ({"score": "adder"}, "adder"),
        ({"score": "gaussian"}, "gaussian"),
        ({"score": ("dot", "adder"), "identity": False}, "adder"),
    ],
)
def test_attention_that_others_do_not_have_is_not_written_in_their_names(options, got, tmp_path):
    model = make(**options)
    for names in ("timm", "hugging_face", "transformers_5"):
        with pytest.raises(ValueError, match=f"names of {names}, got {got}"):
            interop.save_weights(model, tmp_path / "w", names=names)
    with pytest.raises(ValueError, match=f"got {got}"):
        interop.save_folder(model, tmp_path / "f", label_names="abcde", mean=[0.5], std=[0.5])
    assert not list(tmp_path.iterdir())


@pytest.mark.unchecked
def test_the_shorter_side_is_truncated_wherever_it_is_said():
    """timm computes floor(size / crop_pct), DeiT int((256 / 224) * size)."""
    for size in (32, 64, 96, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512, 518):
        for ratio in (0.8, 0.85, 0.875, 0.888, 0.9, 0.95, 0.965):
            shorter = math.floor(size / ratio)
            found = _folder._preprocessing((size, size, 3), [0.5] * 3, [0.5] * 3, ratio)
            assert found["size"] == {"shortest_edge": shorter}
            source = SimpleNamespace(
                image_shape=(size, size, 3), eval_crop_ratio=ratio, crops_on_host=True
            )
            assert f"resized to {shorter} pixels" in cli._preparation(source)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("gamma", [1e-4, 1e-6])
def test_layer_scale_is_folded_in_32_bits(gamma, dtype, tmp_path):
    """DeiT III and CaiT start at γ = 1e-4 to 1e-6: in 16 bits the product is rounded, or 0."""
    arrays = {name: array.astype(dtype) for name, array in timm_arrays().items()}
    scale = gamma * np.random.default_rng(5).uniform(0.5, 1.5, 16)
    arrays |= {f"blocks.{i}.ls{n}.gamma": scale.astype(dtype) for i in (0, 1) for n in (1, 2)}
    save_file(arrays, tmp_path / "w")
    model = make()
    assert load(model, tmp_path / "w") == ()
    exact = arrays["blocks.1.mlp.fc2.weight"].astype(np.float64) * scale.astype(dtype).astype(
        np.float64
    ).reshape(-1, 1)
    np.testing.assert_allclose(model.blocks[1].mlp.fc2.kernel[...].T, exact, rtol=1e-6)
    exact = arrays["blocks.0.attn.proj.bias"].astype(np.float64) * scale.astype(dtype).astype(
        np.float64
    )
    np.testing.assert_allclose(model.blocks[0].attention.out.bias[...], exact, rtol=1e-6)


def test_layer_scale_of_16_bit_parameters_is_folded_in_32_bits(tmp_path):
    graphdef, params = nnx.split(make(layer_scale=1e-4))
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    block = model.blocks[0]
    interop.save_weights(model, tmp_path / "w", names="hugging_face")
    kernel, scale = (
        np.asarray(x[...]).astype(np.float64)
        for x in (block.mlp.fc2.kernel, block.layer_scale2.scale)
    )
    written = load_file(tmp_path / "w")["vit.encoder.layer.0.output.dense.weight"]
    np.testing.assert_allclose(written, (kernel * scale).T, rtol=1e-6)

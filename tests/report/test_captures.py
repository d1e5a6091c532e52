"""Captured tensors against the model's own layers, called by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from adder_flax import layers
from adder_flax.attention import capture_attention
from adder_flax.models import VisionTransformer
from adder_flax.report import capture
from tests.report.small import model_of


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"score": "adder", "qkv_linear": "adder"}, marks=pytest.mark.slow),
        {"score": "adder", "remat": True, "scan_blocks": True},
    ],
)
def test_captured_blocks_reproduce_the_forward_pass(options):
    model = model_of(**options)
    images = np.random.default_rng(0).standard_normal((3, 8, 8, 1)).astype(np.float32)
    captured = capture(model, images)
    np.testing.assert_allclose(captured.logits, model(images), atol=1e-5)

    block, seen = model.blocks[1], captured.blocks[1]
    normalized = block.norm1(jnp.asarray(seen.tokens))
    np.testing.assert_allclose(seen.normalized, normalized, atol=1e-5)
    for name, heads in (("query", seen.query), ("key", seen.key)):
        projected = getattr(block.attention, name)(normalized.reshape(-1, 16)).reshape(3, 17, 2, 8)
        np.testing.assert_allclose(heads, np.swapaxes(projected, 1, 2), atol=1e-4)
    after = block(jnp.asarray(seen.tokens))
    (weights,) = capture_attention(block.attention, normalized)
    np.testing.assert_allclose(seen.map, weights, atol=1e-5)
    np.testing.assert_allclose(captured.path[2], after, atol=1e-4)
    np.testing.assert_allclose(captured.path[1], seen.tokens)


def test_each_call_of_a_shared_block_has_its_own_tokens():
    class Again(nnx.Module):
        def __init__(self):
            self.block = layers.Block(16, 2, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            for _ in range(3):
                tokens = self.block(tokens)
            return tokens

    model, path = Again(), [np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)]
    for _ in range(3):
        path.append(np.asarray(model.block(jnp.asarray(path[-1]))))
    captured = capture(model, path[0])
    np.testing.assert_allclose(captured.path, path, atol=1e-5)
    for seen, tokens in zip(captured.blocks, path[:3], strict=True):
        normalized = model.block.norm1(jnp.asarray(tokens))
        np.testing.assert_allclose(seen.normalized, normalized, atol=1e-5)


def test_capture_leaves_the_model_as_it_was_and_gives_arrays_that_linear_algebra_takes():
    model = model_of(remat=True, dtype=jnp.bfloat16)
    captured = capture(model, np.zeros((1, 8, 8, 1), np.float32))
    assert type(model) is VisionTransformer
    assert model.remat
    assert captured.blocks[0].query.dtype == captured.path.dtype == np.float32

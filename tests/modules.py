"""NNX modules with random parameters, made and called without the cost of eager initialisation."""

import flax.nnx as nnx
import jax
import numpy as np

from adder_flax import attention, recorder
from adder_flax.models import VisionTransformer


def randomised(make, seed=1):
    """The module that `make` builds, every parameter random, so that none is forgotten unseen."""
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(nnx.eval_shape(make))
    fill = lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(leaf.dtype)
    return nnx.merge(graphdef, jax.tree.map(fill, nnx.to_pure_dict(state)))


def moved(model, seed=0, scale=0.2):
    """The model with normal numbers of this size added to every parameter."""
    graphdef, params = nnx.split(model, nnx.Param)
    rng = np.random.default_rng(seed)
    add = lambda x: x + scale * rng.normal(size=x.shape).astype(x.dtype)
    return nnx.merge(graphdef, jax.tree.map(add, params))


def tiny_vit(**options):
    """For images of 4 x 4 gray pixels: five tokens of eight numbers, two blocks of two heads."""
    sizes = dict(image_size=4, patch_size=2, channels=1, num_classes=3)
    sizes |= dict(width=8, depth=2, num_heads=2)
    return VisionTransformer(**sizes | options, rngs=nnx.Rngs(0))


def run(module, *inputs, **options):
    """The module's call, jitted."""
    graphdef, state = nnx.split(module)
    call = lambda state, *inputs: nnx.merge(graphdef, state)(*inputs, **options)
    return jax.jit(call)(nnx.to_pure_dict(state), *inputs)


def parameters(module):
    """The module's parameters as nested dicts of float64 arrays."""
    wide = lambda leaf: np.asarray(leaf, np.float64)
    return jax.tree.map(wide, nnx.to_pure_dict(nnx.state(module)))


def run_with_map(call, *args, **kwargs):
    """The output of a module or function that attends once, and what multiplies its values."""
    if isinstance(call, nnx.Module):
        call, args = (lambda module, *args: module(*args, **kwargs)), (call, *args)
    output, [seen] = recorder.record({"attention": ["weights"]}, call, *args)
    return output, attention.attention_map(seen)

"""Transformers so small that looking at them takes no time."""

from flax import nnx

from adder_flax.models import VisionTransformer

SIZES = dict(image_size=8, patch_size=2, channels=1, num_classes=10, width=16, num_heads=2)


def model_of(seed=0, **options):
    return VisionTransformer(rngs=nnx.Rngs(seed), **SIZES, depth=3, **options)

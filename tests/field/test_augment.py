"""What users of other augmentations ran into."""

import jax
import numpy as np

from adder_flax.data.operations import rand_augment
from adder_flax.settings import AugmentSettings

PHOTOGRAPHS = np.random.default_rng(0).integers(100, 256, (512, 2, 2, 1), np.uint8)


def test_no_image_goes_black_at_small_magnitudes():
    """huggingface/pytorch-image-models#178; brightness and contrast keep a tenth."""
    settings = AugmentSettings(rand_augment_magnitude=1.0, rand_augment_std=0.1)
    out = np.asarray(rand_augment(jax.random.key(0), PHOTOGRAPHS, settings, (200,)))
    assert (out.max((1, 2, 3)) > 0).all()

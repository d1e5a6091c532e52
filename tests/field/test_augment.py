"""What users of other augmentations ran into."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from adder_flax.data.operations import OPERATIONS, choose_operation
from adder_flax.data.policies import operation_arguments, rand_augment
from adder_flax.settings import AugmentSettings

PHOTOGRAPHS = np.random.default_rng(0).integers(100, 256, (512, 2, 2, 1), np.uint8)


@pytest.mark.parametrize("magnitude", [0.0, 1.0, 2.4, 5.0, 9.99, 10.0])
def test_posterize_in_the_ranges_of_the_paper_keeps_four_bits_and_more(magnitude):
    """tensorflow/tpu#495, ildoonet/pytorch-randaugment#13: 4 to 8 bits by the paper's table; 0 to 4
    of them blacken images of small magnitudes. timm calls it PosterizeOriginal."""
    bits = int(magnitude / 10 * 4) + 4
    argument = operation_arguments(jnp.array([magnitude]), jnp.ones(1), increasing=False)
    place = OPERATIONS.index("posterize")
    got = choose_operation(jnp.array([place]), jnp.array(PHOTOGRAPHS[:1]), argument[place])
    expected = np.asarray(ImageOps.posterize(Image.fromarray(PHOTOGRAPHS[0, ..., 0]), bits))
    np.testing.assert_array_equal(got[0, ..., 0], expected)


def test_no_image_goes_black_at_small_magnitudes():
    """huggingface/pytorch-image-models#178; brightness and contrast keep a tenth."""
    numbers = dict(rand_augment_magnitude=1.0, rand_augment_std=0.1)
    for increasing in (False, True):
        settings = AugmentSettings(**numbers, rand_augment_increasing=increasing)
        out = np.asarray(rand_augment(jax.random.key(0), PHOTOGRAPHS, settings, (200,)))
        assert (out.max((1, 2, 3)) > 0).all()

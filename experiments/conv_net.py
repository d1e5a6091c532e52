"""A small residual convolutional network: a teacher for transformers on few images.

Source: He et al., "Identity mappings in deep residual networks", 2016, with GroupNorm in place of
BatchNorm.
Command: python main.py --config=experiments/conv_net.py
The argument after the colon is the data set, as of every experiment:
experiments/conv_net.py:cifar10.
"""

import ml_collections

from adder_flax import models, settings
from adder_flax.experiments import common


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration on a data set, ``digits`` unless given."""
    config = common.deit("multiplicative", "tiny", data)
    config.model = ml_collections.ConfigDict(settings.defaults(models.ConvNetSettings))
    config.optimizer.learning_rate = 2e-3
    return config

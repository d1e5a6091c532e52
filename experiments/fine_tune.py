"""DeiT-Tiny from weights of timm or Hugging Face, on a folder of images with a few hundred of them.

Sources: Touvron et al., 2021 (DeiT), section 5.3, for the short training without mixing; rates that
fall towards the images, Bao et al., 2022 (BEiT).
Command: python main.py --config=experiments/fine_tune.py --config.data.data_dir=DIR
--config.init_from=WEIGHTS
Expected: 320 images are 10 steps an epoch, 32 the fewest; docs/fine_tune.md goes through it.
"""

import ml_collections

from adder_flax.experiments import common


def get_config(data: str = "folder") -> ml_collections.ConfigDict:
    """Returns the configuration for a data set, by default a folder of images."""
    config = common.deit("multiplicative", "tiny", data)
    config.update(batch_size=32, num_epochs=20.0, eval_batch_size=64)
    config.optimizer.update(
        learning_rate=5e-4, final_learning_rate=1e-6, warmup_epochs=1.0, layer_decay=0.75
    )
    # Few images: weaker noise than for a training from nothing, and no mixtures.
    config.task.update(
        resized_crop_scale=(0.5, 1.0), mixup_alpha=0.0, cutmix_alpha=0.0, erase_probability=0.0
    )
    return config

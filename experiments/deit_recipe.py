"""DeiT with its whole recipe, all augmentation on the device.

By default DeiT-Tiny on ImageNet-1k at 224 pixels.

Source: Touvron et al., "Training data-efficient image transformers", 2021 (DeiT), table 9, and the
defaults of https://github.com/facebookresearch/deit (main.py).
Published: ImageNet top-1 without distillation 72.2 % (tiny), 79.9 % (small) and 81.8 % (base); the
base one takes 53 hours on a node of 8 V100 GPUs, 37 hours on two. Not measured here: neither the
accuracy nor the hours.
Command: python main.py --config=experiments/deit_recipe.py --config.data.data_dir=PLACE
Score on ImageNet-V2: the same command with --mode=eval --data=imagenet_v2; with ImageNet ReaL's
labels: --mode=eval --labels=real.json.
Others: --config=experiments/deit_recipe.py:adder,small,folder (multiplicative, additive or adder;
tiny, small or base; a data set of images larger than 64 pixels). The defaults are those of this
framework where the paper has none.
What differs from DeiT's code: the averaged weights, which are evaluated here and not there, forget
faster at first, by min(0.99996, (1 + t)/(10 + t)) at step t; the rate warms up from 0, not from
1e-6, and moves at every step, there at every epoch, on a cosine that begins behind the warm-up,
there at the first step.
"""

import ml_collections

from adder_flax.errors import RunError
from adder_flax.experiments import common


def read_choice(choice: str, file: str) -> list[str]:
    """Returns the mechanism, the size and the data set that stand behind the name of a file.

    Raises:
      RunError: they are not three.
    """
    parts = choice.split(",")
    if len(parts) != 3 or not all(parts):
        raise RunError(
            f"expected mechanism,size,data behind the colon of --config, got {choice!r}; write "
            f"--config={file}:adder,tiny,imagenet2012"
        )
    return parts


def get_config(choice: str = "multiplicative,tiny,imagenet2012") -> ml_collections.ConfigDict:
    """Returns the configuration of a mechanism, a size and a data set, with commas between them.

    Raises:
      RunError: they are not three, or there is no such mechanism or size.
    """
    config = common.deit(*read_choice(choice, "experiments/deit_recipe.py"))
    config.update(batch_size=1024, num_epochs=300.0, ema_decay=0.99996)
    config.optimizer.update(
        learning_rate=5e-4 * config.batch_size / 512, final_learning_rate=1e-5, warmup_epochs=5.0
    )
    config.optimizer.update(weight_decay=0.05, clip_norm=0.0)
    config.model.drop_path_rate = 0.1
    config.data.repeats = 3
    config.task.update(rand_augment_magnitude=9.0, rand_augment_std=0.5)
    # With RandAugment timm jitters no colours.
    config.task.update(color_jitter=0.0)
    config.task.update(
        mixup_alpha=0.8, cutmix_alpha=1.0, erase_probability=0.25, label_smoothing=0.1
    )
    return config

"""DeiT III: the recipe for plain vision transformers on ImageNet-1k.

All augmentation is on the device.

Source: Touvron et al., "DeiT III: Revenge of the ViT", 2022, table 1, and the commands of
https://github.com/facebookresearch/deit (README_revenge.md), for ImageNet-1k alone.
Published: ImageNet top-1 81.4 % (small, at 224 pixels) and 83.8 % (base, 800 epochs at 192 pixels,
then 20 at 224), ImageNet-V2 70.5 % and 73.6 %, on a node of 8 GPUs with 256 images each; the
commands state no hours. Not measured here: neither the accuracy nor the hours.
Score on ImageNet-V2: the same command with --mode=eval --data=imagenet_v2; with ImageNet ReaL's
labels: --mode=eval --labels=real.json.
Command: python main.py --config=experiments/deit3_recipe.py --config.data.data_dir=PLACE
Others: --config=experiments/deit3_recipe.py:adder,base,folder (multiplicative, additive or adder;
tiny, small or base; a data set of images larger than 64 pixels). The paper has no tiny one: it is
trained as the small one is.
What differs from DeiT's code: the class token has a position of its own; the rate warms up from 0,
not from 1e-6, and moves at every step, there at every epoch, on a cosine that begins behind the
warm-up, there at the first step. Prototypes of adder layers have no weight decay, and LAMB takes
their steps as they are.
"""

import ml_collections

from adder_flax.experiments import common, deit_recipe

_LEARNING_RATE = {"tiny": 4e-3, "small": 4e-3, "base": 3e-3}
_DROP_PATH_RATE = {"tiny": 0.05, "small": 0.05, "base": 0.2}
_IMAGE_SIZE = {"tiny": 224, "small": 224, "base": 192}


def get_config(choice: str = "multiplicative,small,imagenet2012") -> ml_collections.ConfigDict:
    """Returns the configuration of a mechanism, a size and a data set, with commas between them.

    Raises:
      RunError: they are not three, or there is no such mechanism or size.
    """
    mechanism, size, data = deit_recipe.read_choice(choice, "experiments/deit3_recipe.py")
    config = common.deit(mechanism, size, data)
    config.update(batch_size=2048, num_epochs=800.0)
    config.optimizer.update(
        name="lamb", learning_rate=_LEARNING_RATE[size], final_learning_rate=1e-5
    )
    # NVIDIA's LAMB clips by itself.
    config.optimizer.update(warmup_epochs=5.0, weight_decay=0.05, clip_norm=1.0)
    config.model.update(layer_scale=1e-4, drop_path_rate=_DROP_PATH_RATE[size])
    config.data.update(repeats=3, image_size=_IMAGE_SIZE[size], eval_crop_ratio=1.0)
    config.task.update(
        loss="sigmoid", label_smoothing=0.0, three_augment=True, erase_probability=0.0
    )
    config.task.update(color_jitter=0.3, mixup_alpha=0.8, cutmix_alpha=1.0)
    return config

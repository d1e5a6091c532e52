"""DeiT-Tiny with a distillation token.

Taught by the convolutional network of experiments/conv_net.py.

Source: Touvron et al., "Training data-efficient image transformers", 2021 (DeiT), section 3: hard
labels of a convolutional teacher, which sees the same augmented images, have half of the loss.
Commands:
    python main.py --config=experiments/conv_net.py
    python main.py --config=experiments/distilled.py
Another teacher: --config.task.teacher=PLACE, the directory of a run, or a safetensors file of timm
or Hugging Face with its config.json beside it.
Soft targets: --config.task.distillation=soft --config.task.distillation_share=0.1.
"""

import ml_collections

from adder_flax import settings, tasks
from adder_flax.experiments import common


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration on a data set, ``digits`` unless given."""
    config = common.deit("multiplicative", "tiny", data)
    config.model.distilled = True
    fields = settings.defaults(tasks.DistillationSettings) | config.task.to_dict()
    fields |= {"name": "distillation", "teacher": "runs/conv_net" + (f"-{data}" if data else "")}
    config.task = ml_collections.ConfigDict(fields)
    return config

"""CIFAR-10 in minutes of two CPU cores with adder attention and adder layers.

The twin of experiments/cifar10_fast.py, made of it: its attention and its layers are replaced by
adder ones, fitted to what they do, and healed while it says what is right
(``adder_flax.tasks.Healing``), first with squared distances, then block by block with L1 distances.
The convolutions of the stem, the last projection to tokens, the product of map and values, and the
head stay multiplicative, as AdderNet leaves its first and last layers; the identity map stays off,
since the twin has none.
Commands:
    python main.py --config=experiments/cifar10_fast.py
    python main.py --config=experiments/adder_cifar10_fast.py
Cost: 80.4 % of the test images, 0.2 points below its teacher, in 459 seconds of two cores of an AMD
EPYC without AVX-512 that did nothing else, 1,074 with the teacher's (one seed); 81 % of its
modelled energy an image, of which the stem is four fifths. With twice the epochs 80.9 %. With a
stem of adder convolutions (``--config.model.stem_linear=adder --config.num_epochs=3.5``) it is 43 %
of the energy, and 75.3 % of the test images.
"""

import ml_collections

from adder_flax import settings, tasks
from adder_flax.experiments import cifar10_fast, healing


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration on ``cifar10`` or another set of small photographs."""
    config = cifar10_fast.get_config(data)
    config.model.update(healing.ALL)
    config.model.update(anneal_end=0.5, anneal_blocks="in_turn")
    config.model.adder_options.hardtanh_slope = 4.0
    config.task = ml_collections.ConfigDict(
        settings.defaults(tasks.HealingSettings)
        | config.task.to_dict()
        | {
            "name": "healing",
            "teacher": f"runs/cifar10_fast{f'-{data}' if data else ''}",
            "distillation": "soft",
            "distillation_share": 0.9,
            "distillation_temperature": 2.0,
            "output_weight": 8.0,
            "layers_until": 1.0,
        }
    )
    config.optimizer.update(name="adamw", learning_rate=8e-3, weight_decay=0.0, warmup_epochs=0.05)
    config.update(batch_size=32, num_epochs=2.5, ema_decay=0.0, eval_every_steps=0)
    return config

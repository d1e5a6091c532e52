"""What the experiments on swapping and healing share.

A small multiplicative transformer, and what becomes of it.

Six blocks of width 96 with three heads of 32 learn for 300 epochs, DeiT's length (on Fashion-MNIST
for 6 and on CIFAR-10 for 7, with 16 patches and 64 images a step: some 5,000 steps on each set).
Then their attention, or everything, is replaced by adder parts, fitted to them, and healed for a
few epochs (``adder_flax.tasks.Healing``): each block's maps and outputs and the logits, while the
layers' distance goes from p = 2 to p = 1 block by block. The identity map stays off, since the
teacher has none.

    python main.py --config=experiments/heal_teacher.py --config.seed=0
    python main.py --config=experiments/heal_attention.py --config.seed=0
    python main.py --config=experiments/heal_all.py --config.seed=0
    python -m adder_flax.experiments.healed runs/heal_attention,seed=0 runs/heal_all,seed=0
"""

from typing import Any

import ml_collections

from adder_flax import settings, tasks
from adder_flax.experiments import common

TEACHER_EPOCHS = 300.0
SHORT_EPOCHS = {"fashion_mnist": 6.0, "cifar10": 7.0}
HEALING_SHARE = {"attention": 0.03, "all": 0.029}
"""Of the teacher's epochs. Meant to take less than 5 % of the operations of the teacher's training,
with the teacher's part in every step and both distances while they are mixed; ``healed`` prints the
share."""
ATTENTION = {"score": "adder", "identity": "off"}
ALL = ATTENTION | {"qkv_linear": "adder", "proj_linear": "adder", "mlp_linear": "adder"}
DEPTH = 6


def teacher(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration of the multiplicative transformer on a data set.

    It is ``digits`` unless given.
    """
    config = common.deit("multiplicative", "tiny", data)
    config.model.update(width=96, depth=DEPTH)
    config.num_epochs = TEACHER_EPOCHS
    if data in SHORT_EPOCHS:
        common.shorten(config, SHORT_EPOCHS[data])
    config.data.update(train_split=f"train[:{100 - validation_percent(data)}%]", eval_split="test")
    return config


def validation_percent(data: str | None) -> int:
    """Returns what is held out of the training split.

    So that comparisons have something to look at.
    """
    return 20 if data in (None, "digits") else 10


def num_seeds(data: str | None) -> int:
    """Returns how many teachers, and networks healed of them, comparisons take."""
    return 3 if data == "cifar10" else 6


def healed(parts: str, data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration of a swapped transformer that heals.

    Args:
      parts: ``attention`` or ``all``.
      data: as of ``teacher``.
    """
    config = teacher(data)
    config.model.update(ALL if parts == "all" else ATTENTION)
    warmup_epochs = config.num_epochs / 600
    share = common.chosen(HEALING_SHARE, parts)
    if parts == "all" and data in (None, "digits"):
        share *= 1088 / 1136  # images in batches of 64, as the teacher's, and of 16 in an epoch
    config.num_epochs = round(share * config.num_epochs, 4)
    config.optimizer.update(learning_rate=1e-3, warmup_epochs=warmup_epochs, weight_decay=0.0)
    config.task = ml_collections.ConfigDict(
        settings.defaults(tasks.HealingSettings)
        | config.task.to_dict()
        | {
            "name": "healing",
            "teacher": f"runs/heal_teacher{f'-{data}' if data else ''},seed={{seed}}",
            "distillation": "soft",
            "distillation_share": 0.9,
            "distillation_temperature": 2.0,
            "layers_until": 0.8,
        }
    )
    if parts == "all":
        config.model.update(anneal_start=0.0, anneal_end=0.5, anneal_blocks="in_turn")
        # Chosen on validation images of CIFAR-10, seeds 0 to 2. What counts most there are many
        # small steps, weight on the blocks' outputs, and inputs' gradients that clip late.
        config.batch_size = 16
        config.optimizer.learning_rate = 8e-3
        config.task.update(output_weight=8.0, layers_until=1.0)
        config.model.adder_options.hardtanh_slope = 4.0
    return config


def compared(parts: str, data: str | None) -> dict[str, Any]:
    """Returns what comparisons of healed transformers have in common, as of ``healed``."""
    base, percent = healed(parts, data), validation_percent(data)
    # What validation takes, the teacher did not see either. Epochs are of the share that is left,
    # and fewer by it: arms take that share of the steps of heal_attention.py and heal_all.py.
    base.data.train_split = "train"
    base.num_epochs = round((1 - percent / 100) * base.num_epochs, 4)
    return {"base": base, "seeds": num_seeds(data), "validation_percent": percent}

"""Healing beside training from scratch for as many steps, on paired seeds.

With attention or everything replaced.

Each arm's learning rate is tuned by the same budget. The teachers come first, one for each seed and
for the tuning.
Commands:
    for s in 0 1 2 3 4 5 1000000; do
      python main.py --config=experiments/heal_teacher.py --config.seed=$s; done
    python main.py --mode=compare --config=experiments/compare_healing.py [--workers=2]
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import healing

_SCRATCH = {"begin": "random", "distillation_share": 0.0, "map_weight": 0.0, "output_weight": 0.0}


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    base = healing.healed("all", data)
    base.data.train_split = "train"  # what validation takes, the teacher did not see either
    share = 1 - healing.validation_percent(data) / 100
    base.num_epochs = round(share * base.num_epochs, 4)  # as many steps on more images
    attention = {
        "qkv_linear": "dense",
        "proj_linear": "dense",
        "mlp_linear": "dense",
        "anneal_start": 0.0,
    }
    attention |= {"anneal_end": 0.0}
    fields = {
        "title": f"Healing on {base.data.name}",
        "base": base,
        "factors": {
            "swapped": {"attention": {"model": attention}, "everything": {}},
            "begin": {"healed": {}, "from scratch": {"task": _SCRATCH}},
        },
        "baseline": {"begin": "from scratch"},
        "search": {"optimizer": {"learning_rate": ("log", 3e-4, 1e-2)}},
        "trials": 4,
        "seeds": 6 if base.data.name in ("digits", "fashion_mnist") else 3,
        "validation_percent": healing.validation_percent(data),
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

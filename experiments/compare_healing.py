"""Healing beside training from scratch for as many steps, on paired seeds.

With attention or everything replaced. The healed arm has the settings of its experiment
(heal_attention.py, heal_all.py) and nine tenths of its steps, four fifths on digits; the other one
begins with random weights, nothing of the teacher reaches it, and its learning rate is tuned by
four trials.

The argument after the colon is what is replaced and a data set: ``all,digits`` where nothing is
given. The teachers come first, one for each seed.
Commands:
    for s in 0 1 2 3 4 5; do
      python main.py --config=experiments/heal_teacher.py:fashion_mnist --config.seed=$s; done
    python main.py --mode=compare --config=experiments/compare_healing.py:all,fashion_mnist
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import healing


def get_config(what: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison, of ``all`` parts on ``digits`` unless given."""
    parts, _, data = (what or "all").partition(",")
    fields = healing.compared(parts, data or None)
    base = fields["base"]
    scratch = {
        "task": {
            "begin": "random",
            "distillation_share": 0.0,
            "map_weight": 0.0,
            "output_weight": 0.0,
            # Which one is all the same, and tuning has a seed of its own.
            "teacher": base.task.teacher.replace("{seed}", "0"),
        },
        "optimizer": {"learning_rate": ("log", 3e-4, 1e-2)},
    }
    fields |= {
        "title": f"Healing of {parts} on {base.data.name}",
        "factors": {"begin": {"healed": {}, "from scratch": scratch}},
        "baseline": {"begin": "from scratch"},
        "trials": 4,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

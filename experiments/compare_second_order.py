"""The second-order optimizers beside AdamW and its rivals, in trainings of hundreds of steps.

``cg_fac`` is matrix-free, ``algorithm_1`` is the paper's to the letter, ``kfac`` forms factors;
each with the defaults of its name. Every arm has as many trials of one number: the rate of the
first order and of ``kfac``, the bound on the step of ``cg_fac``, the η of ``algorithm_1``. The
target of steps and seconds is the median of AdamW's validation scores at its end.

| argument after the colon | attention | training of a run | trials | seeds |
|---|---|---|---|---|
| none: scikit-learn's digits | dot product | 850 steps of 64 images | 4 | 10 |
| fashion_mnist | dot product | 888 steps of 256 images | 6 | 6 |
| cifar10 | adder | 740 steps of 256 images | 6 | 6 |

The network has four blocks of width 64, two for digits. The last two workloads are those of
experiments/compare_optimizers.py for four times as many steps. AdamW has not ended on digits: twice
as many steps bring it 0.008 (results/second_order_digits_twice).
Command: python main.py --mode=compare --config=experiments/compare_second_order.py
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common, compare_optimizers, compare_trained

_RATE = ("log", 3e-4, 1e-2)
_OPTIMIZERS = {
    "adamw": {"learning_rate": _RATE},
    "cg_fac": {"name": "cg_fac", "cg_fac": {"kl_clip": ("log", 3e-4, 1e-2)}},
    "algorithm_1": {
        "name": "cg_fac",
        "cg_fac": {"step": "algorithm_1", "learning_rate": ("log", 3e-2, 1.0)},
    },
    "kfac": {"name": "kfac", "learning_rate": _RATE},
    "muon": {"name": "muon", "learning_rate": _RATE},
    "soap": {"name": "soap", "learning_rate": _RATE, "b1": 0.95, "b2": 0.95},
    "kl_shampoo": {"name": "kl_shampoo", "learning_rate": _RATE, "b2": 0.98},
}
_WORKLOADS = {"fashion_mnist": "multiplicative,fashion_mnist", "cifar10": "adder,cifar10"}
# Points of the curves in which the target is looked for.
_EVALUATIONS = 25


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on ``digits``, ``fashion_mnist`` or ``cifar10``."""
    data = data or "digits"
    if data == "digits":
        config, steps, trials = compare_trained.get_config(), 850, 4
        config.base.model.update(compare_optimizers.SMALL | {"depth": 2})
    else:
        workload = common.chosen(_WORKLOADS, data)
        config, trials = compare_optimizers.get_config(workload), 6
        config.base.num_epochs *= 4
        steps = 4 * config.base.eval_every_steps * compare_optimizers.EVALUATIONS
    arms = {name: {"optimizer": fields} for name, fields in _OPTIMIZERS.items()}
    with config.unlocked():
        config.base.eval_every_steps = steps // _EVALUATIONS
        config.title = f"Second order beside first, on {data}"
        config.factors = ml_collections.ConfigDict({"optimizer": arms})
        config.baseline = ml_collections.ConfigDict({"optimizer": "adamw"})
        config.search = ml_collections.ConfigDict()
        config.trials = trials
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | config.to_dict())

"""Optimizers side by side on one network: what each reaches, and what it takes to the baseline.

AdamW, NAdamW, schedule-free AdamW, Muon, SOAP, KL-Shampoo, SGD with momentum, and CG-FAC. Each is
tuned by 20 quasirandom trials of two numbers, its rate and its weight decay, or CG-FAC's damping
and clip, on validation images; each is judged at the end of its own schedule, on the same batches
and first weights, over six paired seeds. The target that steps, seconds and operations are counted
to is the median of AdamW's validation scores at its end.

The argument after the colon is a mechanism and a data set, ``multiplicative,digits`` where nothing
is given: the networks, steps and validation splits of experiments/compare_mechanisms.py; or
``g2p``, the dot product of experiments/compare_g2p.py on spelling to phonemes.
Sources of what is fair: Dahl et al., "Benchmarking Neural Network Training Algorithms", 2023, for
spaces, budgets and targets on validation data; Choi et al., "On Empirical Comparisons of Optimizers
for Deep Learning", 2019, for what an untuned rival is worth.
Commands:
    python main.py --mode=compare --config=experiments/compare_optimizers.py --workers=2
    python main.py --mode=compare --config=experiments/compare_optimizers.py:adder,fashion_mnist
Seconds are to be compared where a machine did nothing else: --workers=1.
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common, compare_g2p, compare_mechanisms

_TRIALS = 20
_DECAY = ("log", 1e-3, 1.0)
# Steps of the first five are of one size (Muon's are scaled to Adam's); SGD's have the gradient's.
_ADAM_LIKE = {"learning_rate": ("log", 2e-4, 2e-2), "weight_decay": _DECAY}
_OPTIMIZERS = {
    "adamw": _ADAM_LIKE,
    "nadamw": _ADAM_LIKE,
    "schedule_free_adamw": _ADAM_LIKE | {"schedule": "constant"},
    "muon": _ADAM_LIKE,
    "soap": _ADAM_LIKE,
    "kl_shampoo": _ADAM_LIKE,
    "sgd": {"learning_rate": ("log", 1e-2, 1.0), "weight_decay": ("log", 1e-5, 1e-2)},
    "cg_fac": {
        "cg_fac": {
            "damping": ("log", 0.3, 30.0),
            "kl_clip": ("log", 3e-4, 3e-2),
        }
    },
}
# Points of the curves in which the target is looked for.
_EVALUATIONS = 12


def get_config(workload: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a workload, ``multiplicative,digits`` unless given."""
    if workload == "g2p":
        config, mechanism, steps = compare_g2p.get_config(), "dot product", 946
    else:
        mechanism, _, data = (workload or "multiplicative").partition(",")
        config = compare_mechanisms.get_config(data or None)
        config.base.model.update(common.MECHANISMS[mechanism])
        steps = {"fashion_mnist": 843, "cifar10": 1406}.get(config.base.data.name, 170)
    with config.unlocked():
        config.base.eval_every_steps = steps // _EVALUATIONS
        config.title = f"Optimizers, {mechanism} attention on {config.base.data.name}"
        config.factors = ml_collections.ConfigDict(
            {
                "optimizer": {
                    name: {"optimizer": {"name": name} | space}
                    for name, space in _OPTIMIZERS.items()
                }
            }
        )
        config.baseline = ml_collections.ConfigDict({"optimizer": "adamw"})
        config.search = ml_collections.ConfigDict()
        config.trials, config.seeds = _TRIALS, 6
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | config.to_dict())

"""Optimizers side by side on one network: what each reaches, and what it takes to the baseline.

AdamW, NAdamW, schedule-free AdamW, Muon, SOAP, KL-Shampoo, SGD with momentum, and K-FAC, its
steps a share of each layer's size, of one root mean square, or bounded by the change of
predictions. Each is tuned by 20 quasirandom trials of two numbers on validation images: its rate
and its weight decay, or, of K-FAC's share or bound, that and the rate of what has no curvature.
Each is judged at the end of its own schedule, on the same batches and first weights, over six
paired seeds. SOAP's and KL-Shampoo's decays are those of their papers. The target that steps,
seconds and operations are counted to is the median of AdamW's validation scores at its end.

The argument after the colon is a mechanism and a data set, ``multiplicative,digits`` where nothing
is given: the network, steps and validation split of experiments/compare_mechanisms.py; on
Fashion-MNIST and CIFAR-10 four blocks of width 64, one epoch in batches of 256 images, 5 % of them
for validation. Or ``autoencoder``, that of experiments/autoencoder.py for 600 steps; or ``g2p``,
the dot product of experiments/compare_g2p.py on spelling to phonemes, at half its width for one
epoch.
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
from adder_flax.experiments import autoencoder, common, compare_g2p, compare_mechanisms

_TRIALS = 20
# Steps of those that take it are of one size, Muon's and K-FAC's scaled to Adam's; SGD's have the
# gradient's.
_RATE = ("log", 2e-4, 2e-2)
_ADAM_LIKE = {"learning_rate": _RATE, "weight_decay": ("log", 1e-3, 1.0)}
_OPTIMIZERS = {
    "adamw": _ADAM_LIKE,
    "nadamw": _ADAM_LIKE,
    "schedule_free_adamw": _ADAM_LIKE | {"schedule": "constant"},
    "muon": _ADAM_LIKE,
    "soap": _ADAM_LIKE | {"b1": 0.95, "b2": 0.95},
    "kl_shampoo": _ADAM_LIKE | {"b2": 0.98},
    "sgd": {"learning_rate": ("log", 1e-2, 1.0), "weight_decay": ("log", 1e-5, 1e-2)},
    "kfac_share": {
        "name": "kfac",
        "learning_rate": _RATE,
        "kfac": {"step": "share", "learning_rate": ("log", 3e-3, 0.3)},
    },
    "kfac_rms": _ADAM_LIKE | {"name": "kfac", "kfac": {"step": "rms"}},
    "kfac_clip": {
        "name": "kfac",
        "learning_rate": _RATE,
        "kfac": {"step": "clip", "kl_clip": ("log", 3e-4, 3e-2)},
    },
}
# Points of the curves in which the target is looked for.
EVALUATIONS = 12
# Of what trains on more than digits, so that the 260 trainings of a workload take hours, not days.
SMALL = {"width": 64, "depth": 4, "num_heads": 2}
_LARGE = {"batch_size": 256, "eval_batch_size": 500, "num_epochs": 1.0}


def get_config(workload: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a workload, ``multiplicative,digits`` unless given."""
    if workload == "g2p":
        config, network, steps = compare_g2p.get_config(), "dot product attention", 473
        config.base.model.width = 64
        config.base.update(num_epochs=1.0)
    elif workload == "autoencoder":
        config, network, steps = compare_mechanisms.get_config(), "autoencoder", 600
        config.base = autoencoder.get_config()
        config.base.num_epochs = 150.0
    else:
        mechanism, _, data = (workload or "multiplicative").partition(",")
        network, config = f"{mechanism} attention", compare_mechanisms.get_config(data or None)
        config.base.model.update(common.chosen(common.MECHANISMS, mechanism))
        steps = {"fashion_mnist": 222, "cifar10": 185}.get(config.base.data.name, 170)
        if config.base.data.name != "digits":
            config.base.update(_LARGE)
            config.base.model.update(SMALL)
            config.base.optimizer.warmup_epochs = 0.1
            config.validation_percent = 5
    with config.unlocked():
        config.base.eval_every_steps = steps // EVALUATIONS
        config.title = f"Optimizers, {network} on {config.base.data.name}"
        config.factors = ml_collections.ConfigDict(
            {
                "optimizer": {
                    name: {"optimizer": {"name": name} | fields}
                    for name, fields in _OPTIMIZERS.items()
                }
            }
        )
        config.baseline = ml_collections.ConfigDict({"optimizer": "adamw"})
        config.search = ml_collections.ConfigDict()
        config.trials, config.seeds = _TRIALS, 6
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | config.to_dict())

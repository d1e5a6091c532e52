"""K-FAC's presets, at half and at twice each, beside AdamW: what settings cost untuned.

Steps are a share of each layer's size (``step=share``, the arm ``defaults`` and those of its
fields), or, in the arms of the clip, bounded by the change of the network's predictions.

In the last arm norms and embeddings, which take AdamW's steps, have one rate in all workloads.
Nothing is tuned but AdamW, whose rate and decay are those that trials of
experiments/compare_optimizers.py found for the workload; where there were none, its experiment's.
Six paired seeds.

The argument after the colon is a workload of experiments/compare_optimizers.py, a mechanism and a
data set, ``autoencoder`` or ``g2p``: ``multiplicative,digits`` where nothing is given.
Commands:
    python main.py --mode=compare --config=experiments/compare_kfac.py [--workers=2]
    python main.py --mode=compare --config=experiments/compare_kfac.py:autoencoder
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common, compare_optimizers

_TUNED_ADAMW = {
    "multiplicative,digits": {"learning_rate": 6.325e-4, "weight_decay": 0.1},
    "multiplicative,fashion_mnist": {"learning_rate": 8.434e-3, "weight_decay": 0.1292},
    "adder,cifar10": {"learning_rate": 1.861e-2, "weight_decay": 7.743e-3},
    "autoencoder": {"learning_rate": 5.886e-2, "weight_decay": 7.743e-2},
    "g2p": {"learning_rate": 3.822e-2, "weight_decay": 3.594e-2},
}


def _times(factor: float, field: str, step: str = "share") -> dict:
    return {"step": step, field: factor * getattr(settings.KfacSettings(step=step), field)}


_ARMS = {
    "defaults": {"step": "share"},
    "half the share": _times(0.5, "learning_rate"),
    "twice the share": _times(2.0, "learning_rate"),
    "half the damping": _times(0.5, "damping"),
    "twice the damping": _times(2.0, "damping"),
    "clip": {"step": "clip"},
    "half the clip": _times(0.5, "kl_clip", "clip"),
    "twice the clip": _times(2.0, "kl_clip", "clip"),
    "clip at half its damping": _times(0.5, "damping", "clip"),
    "clip at twice its damping": _times(2.0, "damping", "clip"),
}


def get_config(workload: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a workload, ``multiplicative,digits`` unless given."""
    workload = workload or "multiplicative"
    workload += ",digits" if workload in common.MECHANISMS else ""
    config = compare_optimizers.get_config(workload)
    arms = {"AdamW": _TUNED_ADAMW.get(workload, {})}
    arms |= {name: {"name": "kfac", "kfac": fields} for name, fields in _ARMS.items()}
    # In all other arms it is that of the workload's experiment.
    arms["one rate of the others"] = {
        "name": "kfac",
        "learning_rate": 5e-3,
        "kfac": {"step": "share"},
    }
    with config.unlocked():
        config.title = config.title.replace("Optimizers", "K-FAC untuned", 1)
        config.factors = ml_collections.ConfigDict(
            {"settings": {name: {"optimizer": fields} for name, fields in arms.items()}}
        )
        config.baseline = ml_collections.ConfigDict({"settings": "AdamW"})
    return config

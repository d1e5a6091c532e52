"""CG-FAC by a share of each layer's own size, beside its defaults and AdamW, on digits.

Every arm has the learning rate that experiments/compare_mechanisms.py found for AdamW on digits;
for CG-FAC it is the rate of what has no block. Nothing else is tuned. Six paired seeds.

The argument after the colon is a mechanism, ``adder`` where nothing is given: the networks and
steps of experiments/compare_mechanisms.py.
Command: python main.py --mode=compare --config=experiments/compare_trust_ratio.py [--workers=2]
"""

import ml_collections

from adder_flax.experiments import compare_optimizers

_RATES = {"multiplicative": 6.325e-4, "additive": 6.325e-4, "adder": 1.125e-2}
_TRUST_RATIO = {"step": "trust_ratio", "learning_rate": 0.03, "damping": 0.1, "max_iterations": 2}
_ARMS = {
    "AdamW": {},
    "defaults": {"name": "cg_fac"},
    "trust ratio": {"name": "cg_fac", "cg_fac": _TRUST_RATIO},
}


def get_config(mechanism: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison for a mechanism, ``adder`` unless given."""
    mechanism = mechanism or "adder"
    config = compare_optimizers.get_config(mechanism)
    with config.unlocked():
        config.title = f"CG-FAC's steps, {mechanism} attention on {config.base.data.name}"
        config.base.optimizer.learning_rate = _RATES[mechanism]
        config.factors = ml_collections.ConfigDict(
            {"optimizer": {name: {"optimizer": fields} for name, fields in _ARMS.items()}}
        )
        config.baseline = ml_collections.ConfigDict({"optimizer": "AdamW"})
    return config

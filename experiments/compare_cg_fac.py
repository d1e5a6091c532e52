"""CG-FAC at its defaults, at half and at twice each, beside AdamW: what settings cost untuned.

Nothing is tuned but AdamW, whose rate and decay are those that twenty trials of
experiments/compare_optimizers.py found for multiplicative attention, or its experiment's own rate
for the others. Six paired seeds.

The argument after the colon is a mechanism and a data set, as in experiments/compare_optimizers.py:
``multiplicative,digits`` where nothing is given.
Command: python main.py --mode=compare --config=experiments/compare_cg_fac.py [--workers=2]
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import compare_optimizers

_DEFAULTS = settings.CgFacSettings()
_TUNED_ADAMW = {"multiplicative": {"learning_rate": 6.325e-4, "weight_decay": 0.1}}


def _times(factor: float, field: str) -> dict:
    return {field: factor * getattr(_DEFAULTS, field)}


_ARMS = {
    "defaults": {},
    "half the clip": _times(0.5, "kl_clip"),
    "twice the clip": _times(2.0, "kl_clip"),
    "half the damping": _times(0.5, "damping"),
    "twice the damping": _times(2.0, "damping"),
}


def get_config(workload: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a workload, ``multiplicative,digits`` unless given."""
    config = compare_optimizers.get_config(workload)
    mechanism = (workload or "multiplicative").partition(",")[0]
    arms = {"AdamW": _TUNED_ADAMW.get(mechanism, {})}
    arms |= {name: {"name": "cg_fac", "cg_fac": fields} for name, fields in _ARMS.items()}
    with config.unlocked():
        config.title = config.title.replace("Optimizers", "CG-FAC without trials", 1)
        config.factors = ml_collections.ConfigDict(
            {"settings": {name: {"optimizer": fields} for name, fields in arms.items()}}
        )
        config.baseline = ml_collections.ConfigDict({"settings": "AdamW"})
    return config

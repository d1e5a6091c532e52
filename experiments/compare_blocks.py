"""Accuracy against energy while a transformer becomes an adder one, block by block.

k of its blocks are replaced.

The first k blocks have adder attention and adder layers, fitted to a trained multiplicative
transformer and healed for equal steps (experiments/healing.py). Teachers first, one for each seed,
as for experiments/compare_healing.py.
Command: python main.py --mode=compare --config=experiments/compare_blocks.py [--workers=2]
"""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import healing


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    fields = healing.compared("all", data)
    fields |= {
        "title": f"Adder blocks in the place of multiplicative ones, on {data or 'digits'}",
        "factors": {
            "replaced": {f"{k} of {healing.DEPTH}": _first(k) for k in range(healing.DEPTH + 1)}
        },
        "baseline": {"replaced": f"0 of {healing.DEPTH}"},
    }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)


def _first(k: int) -> dict:
    """Returns the fields of a transformer whose first k blocks are adder ones."""
    each = lambda adder, other: ",".join([adder] * k + [other] * (healing.DEPTH - k))
    linear = each("adder", "dense")
    model = {
        "score": each("adder", "dot"),
        "qkv_linear": linear,
        "proj_linear": linear,
        "mlp_linear": linear,
    }
    return {"model": model if k else model | {"anneal_start": 0.0, "anneal_end": 0.0}}

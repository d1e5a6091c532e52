"""Attention mechanisms side by side as DeiT-Tiny on CIFAR-10, for a GPU.

12 blocks of width 192, 65 tokens, 100 epochs.

Dot product, additive, and adder attention with and without the identity map, with the whole recipe
of experiments/common.py; each tuned by the same budget, three paired seeds. What
experiments/compare_mechanisms.py:cifar10 is to two cores, this is to a GPU.
Command: python main.py --mode=compare --config=experiments/compare_deit_tiny.py --workers=8
(as many workers as there are GPUs)
Expected: 35,100 steps of 128 images a run, 10 PFLOP with dense layers, forward and backward. At 10
steps a second to 40 a run takes 15 to 60 minutes, the 36 runs of the grid 9 to 36 hours of one GPU:
estimated, not measured.
"""

import ml_collections

from adder_flax.experiments import common, compare_mechanisms

_ARMS = ("dot", "additive", "adder", "adder without identity")


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``cifar10`` unless given."""
    config = compare_mechanisms.get_config(data or "cifar10")
    with config.unlocked():
        config.title = f"Attention mechanisms in DeiT-Tiny, on {config.base.data.name}"
        config.base = common.deit("multiplicative", "tiny", data or "cifar10")
        mechanisms = config.factors.mechanism
        config.factors = ml_collections.ConfigDict(
            {"mechanism": {name: mechanisms[name] for name in _ARMS}}
        )
        config.seeds = 3
    return config

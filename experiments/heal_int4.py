"""A trained adder transformer that learns on with inputs, weights, queries and keys of four bits.

Source: rounding straight through, Bengio et al., 2013, https://arxiv.org/abs/1308.3432.
Commands:
    python main.py --config=experiments/adder_deit_tiny.py
    python main.py --mode=export --workdir=runs/adder_deit_tiny
    python main.py --config=experiments/heal_int4.py
    python main.py --mode=quantize --weights=int4 --workdir=runs/heal_int4
Measured: digits, seed 0: test accuracy 0.9778 in four bits, which the network has without as well
(0.9833 in float32); with four blocks of width 96 0.9556 for 0.9472 (0.9667).
"""

import ml_collections

from adder_flax.experiments import common


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration on a data set, ``digits`` unless given."""
    config = common.deit("adder", "tiny", data)
    of_data = f"-{data}" if data else ""
    config.init_from = f"runs/adder_deit_tiny{of_data}/adder_flax.safetensors"
    config.model.adder_options.bits = config.model.score_options.bits = 4
    config.num_epochs /= 4
    config.optimizer.learning_rate /= 4
    config.optimizer.warmup_epochs /= 4
    return config

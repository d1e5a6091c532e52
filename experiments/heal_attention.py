"""A trained multiplicative transformer whose attention becomes adder attention, and healed.

Source: after LoLCATs (Zhang et al., 2024), which heals language models of linear attention;
experiments/healing.py says what is done, docs/healing.md what it gave.
Commands:
    python main.py --config=experiments/heal_teacher.py --config.seed=0
    python main.py --config=experiments/heal_attention.py --config.seed=0
"""

import functools

from adder_flax.experiments import healing

get_config = functools.partial(healing.healed, "attention")

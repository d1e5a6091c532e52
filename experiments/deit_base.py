"""DeiT-Base with dot-product attention, dense layers; 86.6 M parameters at 224 pixels.

Source: Touvron et al., "Training data-efficient image transformers", 2021 (DeiT).
Command: python main.py --config=experiments/deit_base.py
Measured: not yet.
"""

import functools

from experiments import common

get_config = functools.partial(common.deit, "multiplicative", "base")

"""DeiT-Small with dot-product attention, dense layers; 22.1 M parameters at 224 pixels.

Source: Touvron et al., "Training data-efficient image transformers", 2021 (DeiT).
Command: python main.py --config=experiments/deit_small.py
Measured: not yet.
"""

import functools

from experiments import common

get_config = functools.partial(common.deit, "multiplicative", "small")

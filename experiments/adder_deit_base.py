"""DeiT-Base with adder (L1) attention with the identity map, adder layers; 86.7 M parameters at 224 pixels.

Source: "Adder Attention for Vision Transformer", NeurIPS 2021; sizes of Touvron et al., 2021 (DeiT).
Command: python main.py --config=experiments/adder_deit_base.py
Measured: not yet.
"""

import functools

from experiments import common

get_config = functools.partial(common.deit, "adder", "base")

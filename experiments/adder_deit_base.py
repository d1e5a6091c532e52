"""DeiT-Base with adder (L1) attention with the identity map, and adder layers.

86.7 M parameters at 224 pixels.

Source: "Adder Attention for Vision Transformer", NeurIPS 2021; sizes of Touvron et al., 2021
(DeiT).
Command: python main.py --config=experiments/adder_deit_base.py
Measured: digits, 6 steps in place of 440 (--config.num_epochs=0.25), too few to learn (test
accuracy 0.10): 4.4 images/s and 8.2 GiB at the peak on two threads of an Intel Xeon (AVX-512, 2.5
GHz), in 187 s with the start.
"""

import functools

from adder_flax.experiments import common

get_config = functools.partial(common.deit, "adder", "base")

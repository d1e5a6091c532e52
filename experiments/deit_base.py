"""DeiT-Base with dot-product attention, dense layers; 86.6 M parameters at 224 pixels.

Source: Touvron et al., "Training data-efficient image transformers", 2021 (DeiT).
Command: python main.py --config=experiments/deit_base.py
Measured: digits, 6 steps in place of 440 (--config.num_epochs=0.25), too few to learn (test
accuracy 0.10): 11.7 images/s and 5.3 GiB at the peak on two threads of an Intel Xeon (AVX-512, 2.5
GHz), in 92 s with the start.
"""

import functools

from adder_flax.experiments import common

get_config = functools.partial(common.deit, "multiplicative", "base")

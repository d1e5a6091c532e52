"""DeiT-Base with additive (Bahdanau) attention, dense layers; 87.2 M parameters at 224 pixels.

Source: Bahdanau et al., 2015, for the score; Touvron et al., 2021 (DeiT), for the rest.
Command: python main.py --config=experiments/additive_deit_base.py
Measured: digits, 6 steps in place of 440 (--config.num_epochs=0.25), too few to learn (test
accuracy 0.10): 9.8 images/s and 5.3 GiB at the peak on two threads of an Intel Xeon (AVX-512, 2.5
GHz), in 108 s with the start.
"""

import functools

from adder_flax.experiments import common

get_config = functools.partial(common.deit, "additive", "base")

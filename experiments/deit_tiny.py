"""DeiT-Tiny with dot-product attention, dense layers; 5.7 M parameters at 224 pixels.

Source: Touvron et al., "Training data-efficient image transformers", 2021 (DeiT).
Command: python main.py --config=experiments/deit_tiny.py
Measured: digits, 20 epochs, seeds 0, 1, 2: test accuracy 0.9889, 0.9750, 0.9778 (mean 0.9806) on a
CPU core of an Intel Xeon (AVX-512, 2.5 GHz) whose twin was busy, in 7 to 9 minutes each.
"""

import functools

from adder_flax.experiments import common

get_config = functools.partial(common.deit, "multiplicative", "tiny")

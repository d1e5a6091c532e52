"""DeiT-Tiny with additive (Bahdanau) attention, dense layers; 5.9 M parameters at 224 pixels.

Source: Bahdanau et al., 2015, for the score; Touvron et al., 2021 (DeiT), for the rest.
Command: python main.py --config=experiments/additive_deit_tiny.py
Measured: not yet.
"""

import functools

from experiments import common

get_config = functools.partial(common.deit, "additive", "tiny")

"""DeiT-Small with additive (Bahdanau) attention, dense layers; 22.4 M parameters at 224 pixels.

Source: Bahdanau et al., 2015, for the score; Touvron et al., 2021 (DeiT), for the rest.
Command: python main.py --config=experiments/additive_deit_small.py
Measured: not yet.
"""

import functools

from experiments import common

get_config = functools.partial(common.deit, "additive", "small")

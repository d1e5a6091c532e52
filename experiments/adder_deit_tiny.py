"""DeiT-Tiny with adder (L1) attention with the identity map, and adder layers.

5.7 M parameters at 224 pixels.

Source: "Adder Attention for Vision Transformer", NeurIPS 2021; sizes of Touvron et al., 2021
(DeiT).
Command: python main.py --config=experiments/adder_deit_tiny.py
Measured: digits, 20 epochs, seeds 0, 1, 2: test accuracy 0.9778, 0.9889, 0.9861 (mean 0.9843) on
two threads of an Intel Xeon (AVX-512, 2.5 GHz), in 10 to 13 minutes each; on two cores of an AMD
EPYC (Zen 5) seed 0 gives 0.9833 in 2 min 33 s. Without the identity map
(--config.model.identity=off): 0.9917, 0.9861, 0.9889 (mean 0.9889), so digits do not need it.
"""

import functools

from adder_flax.experiments import common

get_config = functools.partial(common.deit, "adder", "tiny")

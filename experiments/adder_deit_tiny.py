"""DeiT-Tiny with adder attention."""

import functools

from experiments import common

get_config = functools.partial(common.deit, "adder", "tiny")

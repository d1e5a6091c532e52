"""DeiT-Base with adder attention."""

import functools

from experiments import common

get_config = functools.partial(common.deit, "adder", "base")

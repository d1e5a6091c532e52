"""DeiT-Tiny with additive attention."""

import functools

from experiments import common

get_config = functools.partial(common.deit, "additive", "tiny")

"""DeiT-Base with multiplicative attention."""

import functools

from experiments import common

get_config = functools.partial(common.deit, "multiplicative", "base")

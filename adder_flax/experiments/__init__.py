"""The experiments that come with the package: ``from adder_flax.experiments import common``.

In a checkout they stand beside the package, in ``experiments/``; a wheel has them in this folder.
"""

from pathlib import Path

_HERE = Path(__file__).parent

FOLDER = _HERE if (_HERE / "common.py").is_file() else _HERE.parents[1] / "experiments"
"""Where they are."""

__path__ = [str(_HERE), str(FOLDER)]

"""Attention mechanisms and second-order optimizers for vision transformers, in JAX and Flax."""

from pathlib import Path

__version__ = "0.1.0"

# kfac refuses this too, see kfac/_distribution.py; where the other one was installed last, its own
# code is run instead.
if list(Path(__file__).parents[1].glob("kfac-*.dist-info")):
    raise ImportError(
        "expected adder-flax alone to bring the package kfac, got PyPI's kfac in "
        f"{Path(__file__).parents[1]} too; pip uninstall kfac, then pip install --force-reinstall "
        "--no-deps adder-flax"
    )

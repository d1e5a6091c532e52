"""Trains and studies vision transformers.

``python main.py --config=experiments/adder_deit_tiny.py``.

See README.md for the experiments, overrides (``--config.field=value``) and modes. Where the package
is installed, the command ``adder-flax`` is the same.
"""

from adder_flax import app

if __name__ == "__main__":
    app.main()

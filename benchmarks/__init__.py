"""Every speed and count that this project quotes, printed by ``python -m benchmarks.<name>``."""

import sys

from adder_flax import app

# As main.py does, and only where a benchmark is what this process is for.
if sys.argv[0] == "-m":
    app.prepare_process()

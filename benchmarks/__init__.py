"""Every speed and count that this project quotes, printed by ``python -m benchmarks.<name>``."""

import sys

from adder_flax import host

# As main.py does, and only where a benchmark is what this process is for.
if sys.argv[0] == "-m":
    host.leave_cores_to_xla()
    host.use_huge_pages()

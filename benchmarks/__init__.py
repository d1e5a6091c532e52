"""Every speed and count that this project quotes, printed by ``python -m benchmarks.<name>``."""

from adder_flax import host_memory

# As main.py does, and before an import brings a second thread.
host_memory.keep_freed_memory()

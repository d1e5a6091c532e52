"""State, step, loop, checkpoints, metrics and sharding."""

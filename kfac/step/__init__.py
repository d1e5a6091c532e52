"""From solutions to steps: options, state and the optimizers."""

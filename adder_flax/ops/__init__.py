"""Arrays only: pairwise reductions of adder and additive layers, their gradients, one file per backend."""

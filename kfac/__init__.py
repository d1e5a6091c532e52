"""Matrix-free second-order optimizers for JAX (CG-FAC)."""

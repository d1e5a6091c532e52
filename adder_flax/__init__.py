"""Attention mechanisms and second-order optimizers for vision transformers, in JAX and Flax."""

__version__ = "0.1.0"

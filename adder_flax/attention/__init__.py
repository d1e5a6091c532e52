"""Attention: scores, normaliser, values, as pure functions; then NNX modules."""

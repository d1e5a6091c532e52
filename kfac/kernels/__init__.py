"""Kernels for GPUs: ``.cu`` is their source, ``.ptx`` is generated from it."""

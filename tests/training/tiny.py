"""A configuration so small that a run takes seconds."""

from adder_flax.experiments import common

TINY = {
    "model.width": 16,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.mlp_ratio": 2.0,
    "batch_size": 32,
    "eval_batch_size": 128,
    "num_epochs": 0.2,  # 8 steps
    "optimizer.warmup_epochs": 0.0,
    "log_every_steps": 1,
}
TINY_FLAGS = [f"--config.{field}={value}" for field, value in TINY.items()]


def make_config(mechanism="adder", **fields):
    """One block of width 16 on the handwritten digits."""
    config = common.deit(mechanism, "tiny")
    config.update_from_flattened_dict(TINY | fields)
    return config

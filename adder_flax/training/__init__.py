"""Training: from a configuration to a run, its steps, checkpoints and numbers.

``build_run(config)`` checks a configuration, ``Trainer(run, workdir).fit()`` trains or resumes,
``Evaluator(run)`` scores parameters on the whole evaluation split.
"""

from adder_flax.errors import NonFiniteLossError, RunError, user_errors
from adder_flax.training.checkpoints import Checkpoints, SavedCheckpoints
from adder_flax.training.estimate import Estimate, advise, estimate, step_operations
from adder_flax.training.loop import Evaluator, Result, Trainer
from adder_flax.training.metrics import peak_memory, read_metrics
from adder_flax.training.optimizers import (
    OPTIMIZERS,
    CurvatureOptimizer,
    OptimizerSpec,
    register_optimizer,
    scale_by_adder_rate,
)
from adder_flax.training.processes import connect, peer_errors
from adder_flax.training.program import Run, abstract_batch, trace
from adder_flax.training.setup import build_run, with_statistics
from adder_flax.training.sharding import fetch
from adder_flax.training.step import evaluation_params, make_eval_step, make_train_step
from adder_flax.training.topology import topology_devices
from adder_flax.training.workdir import (
    fingerprint,
    open_workdir,
    other_records,
    read_config,
    write_config,
)

__all__ = [
    "OPTIMIZERS",
    "OptimizerSpec",
    "Checkpoints",
    "CurvatureOptimizer",
    "Estimate",
    "Evaluator",
    "NonFiniteLossError",
    "Result",
    "Run",
    "RunError",
    "SavedCheckpoints",
    "Trainer",
    "abstract_batch",
    "advise",
    "build_run",
    "connect",
    "estimate",
    "evaluation_params",
    "fetch",
    "fingerprint",
    "make_eval_step",
    "make_train_step",
    "open_workdir",
    "other_records",
    "peak_memory",
    "peer_errors",
    "read_config",
    "read_metrics",
    "register_optimizer",
    "scale_by_adder_rate",
    "step_operations",
    "topology_devices",
    "trace",
    "user_errors",
    "write_config",
    "with_statistics",
]

"""What a run will take, known before it starts: its step is compiled for a topology and not run."""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax

from adder_flax import ops
from adder_flax.counting.operations import Operations, count_operations
from adder_flax.training import sharding
from adder_flax.training.program import Run, abstract_batch, trace
from adder_flax.training.step import method_of
from adder_flax.training.topology import GIB, compiler_options, memory_bytes

_STATE_NAMES = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "ema_params": "averaged parameters",
    "model_state": "carried by the model",
    "ema_model_state": "averages of that",
}
# How XLA:TPU complains. Either number is of everything together: what the first message calls
# temporaries includes the arguments.
_REQUIRED = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of one device for one training step.

    Attributes:
      device_kind, num_devices: of the topology.
      memory: bytes on one device by kind: each part of the train state, the batch, the compiled
        program, and "activations, gradients": what the compiler laid out for the step beside them,
        or the peak of what is alive where a TPU's laid out more than there is, and accepted it.
      capacity: bytes that programs can use on one device; None where it is not known.
      compile_seconds: time that the compiler took.
      fits: whether there is room for everything.
    """

    device_kind: str
    num_devices: int
    memory: Mapping[str, int]
    capacity: int | None
    compile_seconds: float
    fits: bool

    @property
    def total(self) -> int:
        """Bytes on one device."""
        return sum(self.memory.values())


def estimate(run: Run) -> Estimate:
    """Compiles the training step of a run for its mesh, whose devices need not be there."""
    device = run.mesh.devices.flat[0]
    memory = {
        label: sum(map(_bytes_per_device, jax.tree.leaves(run.abstract_state[name])))
        for name, label in _STATE_NAMES.items()
        if name in run.abstract_state
    }
    memory["batch"] = sum(map(_bytes_per_device, abstract_batch(run).values()))
    resident, capacity = sum(memory.values()), memory_bytes(device)
    start, accepted = time.perf_counter(), True
    try:
        with ops.use_backend_for(device.platform), jax.set_mesh(run.mesh):
            compiled = trace(run).lower().compile(compiler_options=compiler_options(device))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        memory["activations, gradients"], accepted = _excess(str(error), resident), False
    else:
        checked = capacity if device.platform == "tpu" else None
        memory |= _working_memory(compiled.memory_analysis(), resident, checked)
    seconds = time.perf_counter() - start
    fits = accepted and (capacity is None or sum(memory.values()) <= capacity)
    return Estimate(device.device_kind, run.mesh.size, memory, capacity, seconds, fits)


def _bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _working_memory(analysis: Any, resident: int, checked: int | None) -> dict[str, int]:
    # Donated buffers count as arguments and as results.
    given = analysis.argument_size_in_bytes - analysis.alias_size_in_bytes
    beside = max(given + analysis.output_size_in_bytes - resident, 0)
    working, program = analysis.temp_size_in_bytes + beside, analysis.generated_code_size_in_bytes
    if checked is not None and resident + working + program > checked:
        working = analysis.peak_memory_in_bytes - resident
    return {"activations, gradients": working, "program": program}


def _excess(message: str, resident: int) -> int:
    required = _REQUIRED.search(message)
    return max(round(float(required[1]) * _UNITS[required[2]]) - resident, 0) if required else 0


def advise(run: Run, estimated: Estimate) -> list[str]:
    """Returns what would make a run smaller than estimated, what helps most first."""
    config, memory = run.config, estimated.memory
    state = sum(size for kind, size in memory.items() if kind in _STATE_NAMES.values())
    for_state, for_activations = [], []
    split = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"] / estimated.num_devices
    if split < 1:
        saved = (state + memory[_STATE_NAMES["params"]]) * (1 - split) / GIB
        for_state.append(
            "--config.mesh.data=1 --config.mesh.fsdp=-1: parameters, gradients and optimizer state "
            f"split over all {estimated.num_devices} devices, {saved:.2f} GiB less"
        )
    if not getattr(run.settings.model, "remat", True):
        for_activations.append(
            "--config.model.remat=True: activations computed again in the backward pass, a third "
            "more time"
        )
    at_once = config.batch_size // config.accumulation_steps
    per_device = at_once // sharding.num_batch_shards(run.mesh)
    if per_device > 1:
        parts = next(n for n in range(2, per_device + 1) if per_device % n == 0)
        for_activations.append(
            f"--config.accumulation_steps={parts * config.accumulation_steps}: {at_once // parts} "
            f"{run.task.unit} at a time instead of {at_once}, the same gradient"
        )
    if getattr(run.settings.model, "dtype", "") == "float32":
        for_activations.append("--config.model.dtype=bfloat16: activations half as large")
    state_first = state > estimated.total / 2
    return for_state + for_activations if state_first else for_activations + for_state


def step_operations(run: Run) -> Operations:
    """Returns the operations of a training step, as a mean over the run; nothing is computed.

    Of a model that changes along the training, with a method ``stages()``, each stage counts for
    its length: in the program of the step it is a conditional, which alone would count as its
    dearest branch.
    """
    whole = count_operations(
        run.train_step, run.abstract_state, abstract_batch(run), run.abstract_hyper
    )
    model = run.model(run.abstract_state["params"])
    changes = method_of(model, "stages")
    stages = changes() if changes else ()
    if not stages:
        return whole
    counts: dict[tuple[str, str], float] = dict(whole.counts)
    parts: list[tuple[float, float | None]] = [(-1.0, None)]
    ends = sorted({0.0, *stages, 1.0})
    parts += [(end - start, (start + end) / 2) for start, end in pairwise(ends)]
    for weight, progress in parts:
        for what, number in _differentiated(run, progress).items():
            counts[what] = counts.get(what, 0.0) + weight * number
    mean = {what: round(number) for what, number in counts.items()}
    return Operations(mean, uncounted=whole.uncounted)


def _differentiated(run: Run, progress: float | None) -> Mapping[tuple[str, str], int]:
    def loss_and_gradient(step, params, *args):
        step = step if progress is None else progress * run.num_steps
        loss = run.program.parts({**run.numbers, "step": step}).loss
        return jax.value_and_grad(lambda params: loss(params, *args).loss)(params)

    key = jax.eval_shape(lambda: jax.random.key(0))
    examples = jax.eval_shape(run.program.parts(run.numbers).examples, key, abstract_batch(run))
    step, params = jax.ShapeDtypeStruct((), "int32"), run.abstract_state["params"]
    args = examples, key, run.abstract_state.get("model_state", {})
    return count_operations(loss_and_gradient, step, params, *args).counts

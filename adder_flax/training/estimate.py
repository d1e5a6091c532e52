"""What a run will take, known before it starts.

Its very training step is compiled for a topology and not run.
"""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from adder_flax import ops
from adder_flax.training import gpu_topology, hlo, sharding
from adder_flax.training.setup import Run, abstract_batch, trace
from adder_flax.training.topology import GIB, memory_bytes

_STATE_NAMES = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "ema_params": "averaged parameters",
    "model_state": "carried by the model",
    "ema_model_state": "averages of that",
}
# How XLA:TPU complains. Either number is of everything together: what the first message
# calls temporaries includes the arguments, as a program with 10 GiB of them and 8 GiB of
# temporaries shows, which is refused for 18 GiB.
_REQUIRED = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of one device and traffic between devices, for one training step.

    Attributes:
      device_kind, num_devices: of the topology.
      memory: bytes on one device by kind: each part of the train state, the batch, the compiled
        program, and "activations, gradients": what the compiler laid out for the step beside them.
        That for TPUs packs only as tightly as it must; where it laid out more than there is, and
        accepted it, this is the peak of what is alive.
      capacity: bytes that programs can use on one device; None where it is not known.
      collectives: by kind, from the compiled program; empty where it does not fit.
      compile_seconds: time that the compiler took.
      fits: whether there is room for everything.
    """

    device_kind: str
    num_devices: int
    memory: Mapping[str, int]
    capacity: int | None
    collectives: Mapping[str, hlo.Traffic]
    compile_seconds: float
    fits: bool

    @property
    def total(self) -> int:
        """Bytes on one device."""
        return sum(self.memory.values())


def estimate(run: Run) -> Estimate:
    """Compiles the training step of a run for its mesh, whose devices need not be there.

    Args:
      run: from ``build_run(config, devices=topology_devices(…))``.
    """
    device = run.mesh.devices.flat[0]
    state = {
        label: sum(map(_bytes_per_device, jax.tree.leaves(run.abstract_state[name])))
        for name, label in _STATE_NAMES.items()
        if name in run.abstract_state
    }
    state["batch"] = sum(map(_bytes_per_device, abstract_batch(run).values()))
    start, capacity = time.perf_counter(), memory_bytes(device)
    try:
        compiled = lower(run).compile(compiler_options=gpu_topology.compiler_options(device))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        beside, traffic, found_room = (
            {"activations, gradients": _excess(str(error), sum(state.values()))},
            {},
            False,
        )
    else:
        checked = capacity if device.platform == "tpu" else None
        beside = _working_memory(compiled.memory_analysis(), sum(state.values()), checked)
        traffic = hlo.collectives(compiled.as_text() or "")
        found_room = capacity is None or sum(state.values()) + sum(beside.values()) <= capacity
    seconds = time.perf_counter() - start
    memory = state | beside
    return Estimate(
        device.device_kind, run.mesh.size, memory, capacity, traffic, seconds, found_room
    )


def lower(run: Run) -> jax.stages.Lowered:
    """Returns the training step of a run, traced and lowered for its mesh."""
    with ops.use_backend_for(run.mesh.devices.flat[0].platform), jax.set_mesh(run.mesh):
        return trace(run).lower()


def _bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _working_memory(analysis: Any, resident: int, checked: int | None) -> dict[str, int]:
    """Returns what an accepted program needs beside its state.

    ``checked`` is the room that the compiler looked at.
    """
    # Donated buffers count as arguments and as results; state and batch are told apart
    # above.
    beside = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        - resident
    )
    working, program = (
        analysis.temp_size_in_bytes + max(beside, 0),
        analysis.generated_code_size_in_bytes,
    )
    if checked is not None and resident + working + program > checked:
        working = analysis.peak_memory_in_bytes - resident
    return {"activations, gradients": working, "program": program}


def _excess(message: str, resident: int) -> int:
    """Reads from XLA's complaint how much a program needs beside what it is given.

    0 where it does not say.
    """
    required = _REQUIRED.search(message)
    return max(round(float(required[1]) * _UNITS[required[2]]) - resident, 0) if required else 0


def advise(run: Run, estimated: Estimate) -> list[str]:
    """Returns what would make a run smaller, what helps most first.

    Args:
      run: the run.
      estimated: its estimate.
    """
    config, memory = run.config, estimated.memory
    state = sum(size for kind, size in memory.items() if kind in _STATE_NAMES.values())
    sharded = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"]
    for_state, for_activations = [], []
    if sharded < estimated.num_devices:
        saved = (
            (state + memory[_STATE_NAMES["params"]]) * (1 - sharded / estimated.num_devices) / GIB
        )
        for_state.append(
            "--config.mesh.data=1 --config.mesh.fsdp=-1: parameters, gradients and optimizer state "
            f"split over all {estimated.num_devices} devices, {saved:.2f} GiB less"
        )
    per_device = (
        config.batch_size // sharding.num_batch_shards(run.mesh) // config.accumulation_steps
    )
    if not getattr(run.settings.model, "remat", True):
        for_activations.append(
            "--config.model.remat=True: activations computed again in the backward pass, a third "
            "more time"
        )
    if per_device > 1:
        more = config.accumulation_steps * next(
            n for n in range(2, per_device + 1) if per_device % n == 0
        )
        for_activations.append(
            f"--config.accumulation_steps={more}: {config.batch_size // more} {run.task.unit} at a "
            f"time instead of {config.batch_size // config.accumulation_steps}, the same result"
        )
    if getattr(run.settings.model, "dtype", "") == "float32":
        for_activations.append("--config.model.dtype=bfloat16: activations half as large")
    first = for_state if state > estimated.total / 2 else for_activations
    second = for_activations if first is for_state else for_state
    return [*first, *second]

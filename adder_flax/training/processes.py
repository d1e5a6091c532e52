"""One run in several processes: how they find each other, agree to stop, and end together."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adder_flax.errors import RunError, first_line
from adder_flax.training import sharding

HEARTBEAT_SECONDS = 30
"""A process that has not been heard of for this long is dead, and the others end."""

_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def connect(environ: Mapping[str, str] | None = None, *, detect: bool = False) -> None:
    """Joins the processes of one run, where the environment says that there are several.

    It must come before anything that asks JAX for devices. Understood are, in this order,
    ``JAX_COORDINATOR_ADDRESS`` (host:port of process 0), ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``; a SLURM step (``srun``) of several tasks, one for each GPU; a TPU slice of
    several hosts on GKE (``TPU_WORKER_HOSTNAMES``).

    Args:
      environ: environment variables; ``os.environ`` unless given.
      detect: let JAX look for a cluster of any kind that it knows, and fail where there is none, as
        TPU virtual machines need that were not started by GKE.

    Raises:
      RunError: a variable is missing, or the others cannot be reached within five minutes.
    """
    environ = os.environ if environ is None else environ
    # The address alone may come from a launcher whose other facts JAX finds by itself.
    of_plain = any(environ.get(name) for name in _PLAIN[1:])
    # sbatch and salloc set SLURM_NTASKS too, outside of any step.
    in_slurm_step = "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_NTASKS", "1") != "1"
    on_tpu_slice = "," in environ.get("TPU_WORKER_HOSTNAMES", "")
    if not (of_plain or detect or in_slurm_step or on_tpu_slice):
        return
    plain: dict[str, Any] = {}
    try:
        if of_plain:
            if missing := [name for name in _PLAIN if not environ.get(name)]:
                raise ValueError(f"no {' and no '.join(missing)}")
            address, count, index = (environ[name] for name in _PLAIN)
            plain = {"coordinator_address": address}
            plain |= {"num_processes": int(count), "process_id": int(index)}
        jax.distributed.initialize(**plain, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except Exception as error:  # what its detectors make of odd variables is of every kind
        raise RunError(
            "expected to join the other processes of this run, got: "
            f"{str(error) or type(error).__name__}; start every one of them, or set "
            f"{', '.join(_PLAIN)}"
        ) from error


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    """Explains what one of several processes meets when another one has ended."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Those that come up while a step is handed over are ValueErrors with XLA's status in front.
        status = isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error))
        if not status or jax.process_count() == 1:
            raise
        raise RunError(
            f"expected {jax.process_count()} processes to go on together, got: "
            f"{first_line(error)[:500]}; another one may have ended: look at its output, then "
            "start all of them again, they resume at the last checkpoint"
        ) from error


class InterruptWatch:
    """Notes the first of SIGINT, SIGTERM and SIGHUP while its context is open.

    A second one of any kind ends the process at once, as the system does by itself: nothing is torn
    by it, since whatever a run saves appears whole or not at all.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "InterruptWatch":
        self._previous = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in self._SIGNALS:
            signal.signal(each, signal.SIG_DFL)


class StopVote:
    """Lets every process stop at the same step, whichever of them was signalled.

    Votes are summed up on the devices without waiting: the outcome of one step's votes is read
    after the next step is under way, by all processes at the same step. One alone need not vote.

    Example:
      >>> vote = StopVote(sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1}))
      >>> vote.cast(None), vote.cast(signal.SIGTERM)
      (None, <Signals.SIGTERM: 15>)
    """

    def __init__(self, mesh: Mesh):
        self._alone = jax.process_count() == 1
        self._shape = (mesh.size,)
        self._sharding = NamedSharding(mesh, P(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=sharding.replicated(mesh))
        self._pending: jax.Array | None = None

    def cast(self, request: signal.Signals | None) -> signal.Signals | None:
        """Votes by the signal that this process got, if any."""
        if self._alone:
            return request
        own = np.full(1, request or 0, np.int32)
        votes = jax.make_array_from_callback(self._shape, self._sharding, lambda _: own)
        outcome, self._pending = self._pending, self._largest(votes)
        return signal.Signals(int(outcome)) if outcome is not None and int(outcome) else None

"""Checkpoints of a run: the only module that calls Orbax.

A checkpoint is the train state as plain nested dicts under ``<workdir>/checkpoints/<step>``. The
newest one and the one with the best score are kept. Writing happens on a background thread. Beside
Orbax's own facts a checkpoint holds a record, committed with it: the digest of every array, 32
bits by which a restored state is known to be the one that was saved, and the score of the task,
larger is better.
"""

import functools
import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from adder_flax.arrays import AnyArray
from adder_flax.errors import RunError, first_line, writing
from adder_flax.extras import needs
from adder_flax.text import printable
from adder_flax.training.sharding import leaves_by_path
from adder_flax.training.workdir import differences, saved_steps

with needs("train"):
    from orbax.checkpoint import v1 as ocp

_GOING = ".deleted"


class SavedCheckpoints:
    """The checkpoints in one directory, to be read while a trainer may be at work there."""

    def __init__(self, directory: str | Path, *, of: Mapping[str, Any] | None = None):
        self._directory = Path(directory).absolute()
        self._of = dict(of or {})

    @property
    def steps(self) -> list[int]:
        """Steps of which there are checkpoints, in order."""
        return saved_steps(self._directory)

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the highest score; None where none was evaluated."""
        scored = []
        for step in self.steps:
            try:
                scored.append((self._record(step)["score"], step))
            except ValueError as error:
                if step in self.steps:  # and not deleted by the trainer meanwhile
                    raise RunError(
                        f"expected the score of every checkpoint in {self._directory}, got at step "
                        f"{step}: {error}; name one of {self.steps} instead of the best"
                    ) from error
        return max((pair for pair in scored if pair[0] is not None), default=(0, None))[1]

    def restore(self, abstract_state: Any, which: int | str = "last") -> Any:
        """Loads a checkpoint onto shapes and shardings, and verifies its digests.

        Args:
          abstract_state: the state's tree of ``jax.ShapeDtypeStruct`` with shardings.
          which: a step, ``"best"``, or ``"last"`` for the newest one that can be read.

        Raises:
          RunError: there is no such checkpoint, or it cannot be read.
        """
        failures: dict[int, str] = {}
        while (step := self._choose(which, failures)) is not None:
            state, failure = self._try(step, abstract_state)
            if failure is None:
                self._set_aside({bad: why for bad, why in failures.items() if bad in self.steps})
                return state
            failures[step] = failure
        steps, place, fix = self.steps, self._directory, "restore one from a copy"
        failures = {step: why for step, why in failures.items() if step in steps}
        if failures and which == "last":
            few = dict(list(failures.items())[:3])
            told = f"a readable checkpoint in {place}, got only unreadable ones: {few}"
        elif failures:
            step, reason = failures.popitem()
            told = f"a readable checkpoint of step {step} in {place}, got: {reason}"
            if others := [other for other in steps if other != step]:
                fix += f", or choose one of {others} with --checkpoint"
        elif not steps:
            told, fix = f"a readable checkpoint in {place}, got none", "train first"
        else:
            none = ", but none was evaluated" if which == "best" else ""
            told = f"a checkpoint at one of the steps {steps} in {place}, got {which}{none}"
            fix = "choose one of these with --checkpoint"
        raise RunError(f"expected {told}; {fix}")

    def _choose(self, which: int | str, failures: dict[int, str]) -> int | None:
        """The checkpoint to try next, the same in all processes."""
        candidates = [step for step in self.steps if step not in failures]
        if which == "best":
            # A better one may have come while this one was read, and taken its place.
            candidates = [best] if (best := self.best_step) in candidates else []
        elif which != "last":
            candidates = [step for step in candidates if step == which]
        chosen = candidates[-1] if candidates else -1
        if jax.process_count() > 1:
            chosen = int(multihost_utils.broadcast_one_to_all(np.int64(chosen)))
        return None if chosen < 0 else chosen

    def _try(self, step: int, abstract_state: Any) -> tuple[Any, str | None]:
        state = failure = None
        try:
            digests = self._record(step)["digests"]
            _require_arrays(abstract_state, digests)
            with ThreadPoolExecutor(max_workers=1) as meanwhile:
                meanwhile.submit(_compile_digests, abstract_state)
                state = ocp.load(
                    self._directory / str(step), abstract_state, checkpointable_name="state"
                )
            found, _ = take_digests(state)
            if bad := sorted(name for name in digests if found[name] != digests[name]):
                raise ValueError(
                    f"{len(bad)} of its {len(digests)} arrays are not what was saved: {_shown(bad)}"
                )
        except Exception as error:
            state, failure = None, _reason(error)
        if (
            jax.process_count() > 1
            and multihost_utils.process_allgather(np.int32(failure is not None)).any()
        ):
            state, failure = None, failure or "another process could not read it"
        return state, failure

    def _record(self, step: int) -> dict[str, Any]:
        """What was saved about a checkpoint, else a ValueError."""
        try:
            text = (self._directory / str(step) / "_CHECKPOINT_METADATA").read_bytes()
            facts = json.loads(text)["custom_metadata"]
            record = facts["record"]
            saved, of = record["step"], record["of"] or self._of
            if facts["checksum"] != _checksum(record):
                raise ValueError("its checksum is another")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"its files or its record are damaged: {_reason(error)}") from error
        if saved != step:
            raise ValueError(f"it was saved as that of step {saved}")
        if self._of and (others := differences(of, self._of)):
            raise ValueError(f"another run saved it ({_shown(others, '; ')})")
        return record

    def _set_aside(self, failures: dict[int, str]) -> None:
        for step, reason in failures.items():
            logging.warning(
                "Checkpoint %d cannot be read (%s); an older one is taken", step, reason
            )


class Checkpoints(SavedCheckpoints):
    """The checkpoints in one directory, read and written by the trainer that holds the lock.

    Args:
      directory: created if it does not exist.
      of: facts that make a run this one, saved with every checkpoint.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
      ...     checkpoints.save(7, {"step": jax.numpy.int32(7)}, score=0.5)
      ...     checkpoints.wait()
      ...     checkpoints.steps
      [7]
    """

    def __init__(self, directory: str | Path, *, of: Mapping[str, Any] | None = None):
        super().__init__(directory, of=of)
        self._newest: int | None = None  # that this process saved
        self._scores: dict[int, float | None] = {}
        self._unknown: set[int] = set()
        for step in self.steps:
            try:
                self._scores[step] = self._record(step)["score"]
            except ValueError:
                self._unknown.add(step)
        with writing("a checkpoint", self._directory):
            self._checkpointer = ocp.training.Checkpointer(
                self._directory,
                # _remove_old chooses
                preservation_policy=ocp.training.preservation_policies.PreserveAll(),
                cleanup_tmp_directories=True,
                lightweight_initialize=True,  # it would read what may be damaged
            )
        if jax.process_index() == 0:
            for going in self._directory.glob(f"*{_GOING}"):  # a killed run was about to remove it
                shutil.rmtree(going, ignore_errors=True)
        self._removing = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info) -> None:
        with writing("a checkpoint", self._directory), self._removing:
            self._checkpointer.close()
            self._remove_old()

    def save(
        self,
        step: int,
        state: Any,
        *,
        score: float | None = None,
        digests: dict[str, int] | None = None,
    ) -> None:
        """Starts writing a checkpoint; returns once the state may be donated again.

        Raises:
          RunError: this or the previous checkpoint could not be written (a full disk, say).
        """
        digests = take_digests(state)[0] if digests is None else digests
        if score is not None and math.isnan(score):  # no better and no worse than others
            score = None
        record = {"step": step, "score": score, "of": self._of, "digests": digests}
        self.wait()
        with writing("a checkpoint", self._directory):
            self._checkpointer.save_async(
                step,
                state,
                force=True,
                overwrite=True,
                custom_metadata={"record": record, "checksum": _checksum(record)},
            )
        self._newest, self._scores[step] = step, score

    def wait(self) -> None:
        """Blocks until every checkpoint is on disk, and removes those that are not to be kept."""
        with writing("a checkpoint", self._directory):
            self._checkpointer.wait()
            self._remove_old()

    def _remove_old(self) -> None:
        steps = self.steps
        # Those that were found may be all damaged but one.
        if jax.process_index() != 0 or self._newest not in steps:
            return
        scored = [(score, step) for step in steps if (score := self._scores.get(step)) is not None]
        best = {step for _, step in sorted(scored)[-1:]}
        for step in set(steps[:-1]) - best - self._unknown:
            # Whoever reads it meanwhile finds all of it or nothing.
            going = (self._directory / str(step)).rename(self._directory / f"{step}{_GOING}")
            self._removing.submit(shutil.rmtree, going, ignore_errors=True)

    def _set_aside(self, failures: dict[int, str]) -> None:
        """Renames checkpoints that cannot be read, once an older one could: the fault is theirs."""
        for step, reason in failures.items():
            ends = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
            places = (self._directory / f"{step}.unreadable{end}" for end in ends)
            aside = next(place for place in places if not os.path.lexists(place))
            logging.warning(
                "Checkpoint %d cannot be read (%s); set aside as %s", step, reason, aside
            )
            if jax.process_index() == 0:
                with writing(aside.name, self._directory):
                    (self._directory / str(step)).rename(aside)
        if failures and jax.process_count() > 1:
            multihost_utils.sync_global_devices("unreadable checkpoints are set aside")


def _require_arrays(abstract_state: Any, names: Iterable[str]) -> None:
    wanted, names = set(leaves_by_path(abstract_state)), set(names)
    if wanted == names:
        return
    parts = {"it has": sorted(names - wanted), "it lacks": sorted(wanted - names)}
    told = [f"{verb} {_shown(names)}" for verb, names in parts.items() if names]
    raise ValueError(
        f"another version of the program saved it: {'; '.join(told)}; go on with it by that "
        "version, or begin anew in another workdir"
    )


def _shown(names: list[str], between: str = ", ") -> str:
    return between.join([*names[:3], *["…"] * (len(names) > 3)])


def _reason(error: Exception) -> str:
    """What an error says, without what TensorStore and JSON add for developers."""
    if isinstance(error, json.JSONDecodeError):
        return "a file that should hold JSON does not"
    if not isinstance(error, (OSError, ValueError, RuntimeError)):
        return f"its files do not fit together, {type(error).__name__}"
    return printable(first_line(error).partition(" [tensorstore_spec")[0].rpartition(": Error ")[2])


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def take_digests(tree: Any) -> tuple[dict[str, int], list[str]]:
    """Returns the digest of each array of a tree, and names of those with an infinity or NaN.

    A digest is the sum over all elements, modulo 2³², of a bijective mix of the element's bits and
    its position: the change of one element always changes it, other damage goes unseen with
    probability 2⁻³². It is computed where the array is, in one pass, and does not depend on how the
    array is split over devices and processes.

    Example:
      >>> digests, non_finite = take_digests({"a": jnp.arange(3), "b": [jnp.array([1.0, jnp.nan])]})
      >>> list(digests), non_finite
      (['a', 'b/0'], ['b/0'])
      >>> take_digests({"a": jnp.array([0, 1, 3])})[0]["a"] == digests["a"]
      False
    """
    outcomes = {name: _digest_on(leaf)(leaf) for name, leaf in leaves_by_path(tree).items()}
    outcomes = {name: np.asarray(outcome).tolist() for name, outcome in outcomes.items()}
    digests = {name: digest for name, (digest, _) in outcomes.items()}
    return digests, [name for name, (_, finite) in outcomes.items() if not finite]


def _compile_digests(abstract_tree: Any) -> None:
    distinct = {(x.shape, x.dtype, x.sharding): x for x in jax.tree.leaves(abstract_tree)}
    for leaf in distinct.values():
        _digest_on(leaf).lower(leaf).compile()


def _digest_on(leaf: AnyArray | jax.ShapeDtypeStruct) -> Any:
    # With a result that every process holds.
    split = getattr(leaf, "sharding", None)
    return _jitted(NamedSharding(split.mesh, P()) if isinstance(split, NamedSharding) else None)


@functools.cache
def _jitted(out: NamedSharding | None) -> Any:
    return jax.jit(_digest, out_shardings=out)


# Odd, with evenly spread bits: 2³² over the golden ratio, and the factors of
# MurmurHash3's finaliser.
_SPREAD, _MIX_1, _MIX_2 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def _digest(x: Array) -> Array:
    """Returns ``[digest, whether every element is finite]``."""
    positions = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) * int(_SPREAD) % 2**32)
        positions += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    mixed = (_bits(x) + positions) * _MIX_1
    mixed = (mixed ^ (mixed >> 15)) * _MIX_2
    mixed ^= mixed >> 16
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.uint32(1)])
    # One reduction of both reads the array once.
    digest, finite = jax.lax.reduce(
        (mixed, jnp.isfinite(x)),
        (np.uint32(0), np.bool_(True)),
        lambda one, other: (one[0] + other[0], one[1] & other[1]),
        tuple(range(x.ndim)),
    )
    return jnp.stack([digest, finite.astype(jnp.uint32)])


def _bits(x: Array) -> Array:
    """Returns the elements' bits as 32-bit numbers; of 64 bits, a mix."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    if x.dtype.itemsize == 8:
        bits ^= (bits >> 32) * jnp.uint64(_SPREAD)
    return bits.astype(jnp.uint32)

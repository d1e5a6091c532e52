"""The host's part of the input: which records make up batch i, read by threads ahead of the device.

Batch i is a function of (seed, i) alone, so a run that resumes at step i needs no saved iterator,
and neither the number of threads nor the number of hosts changes what the model sees: each host
reads the rows of the same global batch that its devices hold.
"""

import math
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent import futures

import numpy as np
from jaxtyping import Int

from adder_flax.data._source import Batch, DataError, Source
from adder_flax.extras import needs

with needs("data"):
    import grain

_AHEAD = 2  # batches that are ready or in work ahead of the consumer


def usable_cores() -> int:
    """Number of cores that this process may use, which containers and SLURM may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Rows = Sequence[int] | np.ndarray | None


class _Pipeline:
    """Batches by their number, whose rows on this host are read on threads."""

    def __init__(self, source: Source, global_batch_size: int, *, rows: Rows = None):
        self.source, self.global_batch_size = source, global_batch_size
        self._rows = np.arange(global_batch_size) if rows is None else np.asarray(rows)

    def _read(self, step: int, map_function: Callable) -> Batch:
        raise NotImplementedError

    def _read_ahead(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches of the steps in [start, stop), several at a time, on the same decoding threads.

        These are as many as there are cores. Threads, not processes: Pillow releases the GIL, and
        grain's processes need absl flags to be parsed first, which a library cannot ask of the
        programs that import it.
        """
        options = grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)
        with futures.ThreadPoolExecutor(usable_cores(), thread_name_prefix="decode") as decoders:
            read = lambda step: self._read(int(step), decoders.map)
            batches = iter(grain.MapDataset.range(start, stop).map(read).to_iter_dataset(options))
            try:
                yield from batches
            finally:
                batches.close()


class TrainPipeline(_Pipeline):
    """Endless shuffled batches with random access.

    An epoch is floor(len(source) / global_batch_size) steps over a fresh permutation of the
    records: no record comes twice in it, and the few left over differ from epoch to epoch. With
    `repeats` copies of each record one after the other (repeated augmentation, Hoffer et al., 2020,
    https://arxiv.org/abs/1901.09335, as in DeiT) an epoch has as many steps as without, and sees
    one record in so many.

    Permutations come from raw draws of Philox, whose stream NumPy keeps from version to version.
    They are uniform, unlike those of `grain.MapDataset.shuffle` (grain 0.2.18), whose epochs are
    correlated.

    >>> from adder_flax.data import load_source
    >>> pipeline = TrainPipeline(load_source("digits", "train"), 64, seed=0)
    >>> pipeline.steps_per_epoch, pipeline[1000]["image"].shape, pipeline[1000]["label"].shape
    (22, (64, 8, 8, 1), (64,))

    Args:
        source: what to read.
        global_batch_size: records per step over all hosts.
        seed: chooses the permutations and the random resized crops of sources that crop on the
            host.
        rows: which rows of the global batch this host reads, ascending; None for all of them.
        repeats: rows in a row that are the same record, each cropped and augmented on its own.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        seed: int = 0,
        *,
        rows: Rows = None,
        repeats: int = 1,
    ):
        if not 1 <= global_batch_size <= len(source):
            raise DataError(
                f"Expected a global batch of 1 to {len(source)} records (all of "
                f"{source.name}/{source.split}), got {global_batch_size}."
            )
        super().__init__(source, global_batch_size, rows=rows)
        self.seed, self.repeats = seed, repeats
        self.steps_per_epoch = len(source) // global_batch_size
        self._permutation: tuple[int, Int[np.ndarray, " records"]] = (-1, np.empty(0, int))

    def __getitem__(self, step: int) -> Batch:
        """This host's rows of batch `step`: the source's arrays, such as "image" and "label"."""
        return self._read(step, map)

    def iterate(self, start_step: int = 0) -> Generator[Batch, None, None]:
        """Batches from `start_step` on, read ahead on threads, which ``close()`` ends."""
        return self._read_ahead(start_step, sys.maxsize)

    def record_indices(self, step: int) -> Int[np.ndarray, " global_batch"]:
        """Which records make up the global batch of a step."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        places = step_in_epoch * self.global_batch_size + np.arange(self.global_batch_size)
        return self._epoch_order(epoch)[places // self.repeats]

    def _epoch_order(self, epoch: int) -> Int[np.ndarray, " records"]:
        # Two threads may both see the old epoch at its end, and compute the same permutation.
        cached_epoch, order = self._permutation
        if cached_epoch != epoch:
            generator = np.random.Philox(np.random.SeedSequence((self.seed, epoch)))
            order = np.argsort(generator.random_raw(len(self.source)), kind="stable")
            self._permutation = (epoch, order)
        return order

    def _read(self, step: int, map_function: Callable) -> Batch:
        indices = self.record_indices(step)[self._rows]
        seeds = [(self.seed, step * self.global_batch_size + int(row)) for row in self._rows]
        arrays, readable = self.source.read(indices, seeds, map_function)
        # The next readable record takes the place of each one that was skipped.
        rows = np.flatnonzero(~readable)
        while rows.size:
            if len(self.source.unreadable) == len(self.source):
                whole = f"{self.source.name}/{self.source.split}"
                raise DataError(f"Expected a readable record in {whole}, got none.")
            indices[rows] = (indices[rows] + 1) % len(self.source)
            again = [seeds[row] for row in rows]
            others, readable = self.source.read(indices[rows], again, map_function)
            for name, values in others.items():
                arrays[name][rows] = values
            rows = rows[~readable]
        return arrays


class EvalPipeline(_Pipeline):
    """A whole split in order, each record exactly once.

    The last batch is filled up with blank rows, so every batch has one shape. ``"mask"`` is True
    where a row is a record; sums over a split must be weighted by it.

    >>> from adder_flax.data import load_source
    >>> batches = EvalPipeline(load_source("digits", "test"), 128)
    >>> len(batches), [int(batch["mask"].sum()) for batch in batches]
    (3, [128, 128, 104])

    Arguments are as in `TrainPipeline`.
    """

    def __len__(self) -> int:
        """Number of batches, the same on every host."""
        return math.ceil(len(self.source) / self.global_batch_size)

    def __getitem__(self, step: int) -> Batch:
        """This host's rows: the source's arrays by name, and "mask", bool (B,)."""
        if not 0 <= step < len(self):
            raise IndexError(f"Expected a batch in [0, {len(self)}), got {step}.")
        return self._read(step, map)

    def __iter__(self) -> Iterator[Batch]:
        return self._read_ahead(0, len(self))

    def _read(self, step: int, map_function: Callable) -> Batch:
        indices = step * self.global_batch_size + self._rows
        mask = indices < len(self.source)
        present = np.flatnonzero(mask)
        blank = lambda record: np.zeros((len(indices), *record.shape), record.dtype)
        arrays = {name: blank(record) for name, record in self.source.record_shapes.items()}
        if present.size:
            values, readable = self.source.read(indices[present], None, map_function)
            mask[present] = readable
            for name, filled in arrays.items():
                filled[present[readable]] = values[name][readable]
        return arrays | {"mask": mask}

"""What both groups of files of weights share: valid ones in three formats, and the judgement of
what is loaded."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import safetensors
from flax import nnx

from adder_flax import interop, models
from adder_flax.errors import user_errors
from benchmarks.hostile.case import Case, Fault, Observed, Verdict, judge_call

KEPT = "the file and the model"


def model(seed: int = 0) -> models.VisionTransformer:
    """Returns a small transformer."""
    return models.VisionTransformer(
        image_size=6,
        patch_size=3,
        num_classes=5,
        width=8,
        depth=1,
        num_heads=2,
        rngs=nnx.Rngs(seed),
    )


@functools.cache
def valid(names: str) -> bytes:
    """Returns a file of a format that fits."""
    with tempfile.TemporaryDirectory() as folder:
        interop.save_weights(model(seed=1), f"{folder}/valid", names=names)
        return Path(f"{folder}/valid").read_bytes()


@functools.cache
def _model() -> models.VisionTransformer:
    return model()


def params(of: models.VisionTransformer) -> dict[str, np.ndarray]:
    """Returns parameters by path."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(of, nnx.Param)))
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def judge_file(
    content: bytes | None, names: str, make: Callable[[Path], None] | None = None
) -> Observed:
    """Loads a file and judges what comes of it.

    Right is what the own reader of safetensors says: a file that loads must, once its arrays are
    read by that reader and written back by what this project writes, be the same.

    Args:
      content: of the file, or None.
      names: the format that it was made from.
      make: puts something else than a file in its place.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if make is None:
            path.write_bytes(content)
        else:
            make(path)
        loaded, before = _model(), params(_model())

        def load() -> tuple[str, ...]:
            with user_errors():
                return interop.load_weights(loaded, path)

        def is_right(kept: tuple[str, ...]) -> Verdict | bool:
            theirs = _read_by_safetensors(path)
            if theirs is None:
                return Verdict.ACCEPTED
            interop.save_weights(loaded, f"{folder}/back", names=names)
            ours = _read_by_safetensors(Path(f"{folder}/back"))
            at_random = (
                {name for name in ours if name.startswith(("head.", "classifier."))}
                if kept
                else set()
            )
            return set(theirs) >= set(ours) - at_random and all(
                np.array_equal(theirs[name], ours[name]) for name in set(ours) - at_random
            )

        observed = judge_call(load, is_right)
        if observed.verdict is Verdict.MESSAGE and not _equal(before, params(loaded)):
            return Observed(Verdict.LOST, f"the model was changed: {observed.seen}")
        if observed.verdict is Verdict.MESSAGE and (
            "expected" not in observed.seen or ";" not in observed.seen
        ):
            return Observed(Verdict.TRACEBACK, f"no message of ours: {observed.seen}")
        return observed


def _equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def _read_by_safetensors(path: Path) -> dict[str, np.ndarray] | None:
    """Returns arrays in float32 as the format's own package reads them, or None where it refuses or
    they overflow."""
    try:
        with safetensors.safe_open(path, "flax") as file:
            names = file.keys()
            arrays = {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in names}
    except (safetensors.SafetensorError, TypeError, ValueError):
        return None
    return arrays if all(np.isfinite(array).all() for array in arrays.values()) else None


def spread(kinds: list[tuple[Fault, Callable[[int], Observed]]], count: int) -> Iterator[Case]:
    """Yields cases of all faults in turn; each function takes the number of the case among those of
    its fault."""
    for index in range(count):
        fault, run = kinds[index % len(kinds)]
        yield Case(fault, f"{index}", functools.partial(run, index // len(kinds)))

"""Lets someone outside a model see the attention maps that are computed inside it."""

import contextlib
from collections.abc import Iterator

import jax
from jaxtyping import Array


class _Recorder:
    """A list of maps that is equal to itself alone, as a value that JAX's caches compare has to be."""

    def __init__(self):
        self.maps: list[Array] = []


# Part of the key of JAX's caches: an inner function that was jitted before is traced anew while maps are recorded.
_RECORDER = jax.make_user_context(None)


@contextlib.contextmanager
def recorded_maps() -> Iterator[list[Array]]:
    """Within this context every `attend` appends its map, identity map included, to the list."""
    recorder = _Recorder()
    try:
        with _RECORDER(recorder):
            yield recorder.maps
    finally:
        recorder.maps = []  # JAX's caches, whose key the recorder is, may keep it; they need not keep the maps


def recording() -> bool:
    """Whether someone asked for the maps."""
    return _RECORDER.value is not None


def record(attention_map: Array) -> None:
    """Hands a map to whoever asked for it."""
    if _RECORDER.value is not None:
        _RECORDER.value.maps.append(attention_map)

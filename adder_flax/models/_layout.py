"""What a vision transformer's arguments mean, checked before anything is computed."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adder_flax.models._positions import Grid
from adder_flax.settings import BlockSettings, VitSettings

_BY_BLOCK = ("score", "score_options", "qkv_linear", "proj_linear", "mlp_linear")


def block_settings(settings: VitSettings) -> list[BlockSettings]:
    """Settings of each block: its own score with its options, its own rate of stochastic depth."""
    depth = settings.depth
    if depth < 1:
        raise ValueError(f"expected a depth of at least 1, got {depth}; give the number of blocks.")
    names = [field.name for field in dataclasses.fields(BlockSettings)]
    shared = {name: getattr(settings, name) for name in names}
    own = {name: _per_block(shared[name], depth, name) for name in _BY_BLOCK}
    own["drop_path_rate"] = drop_path_rates(settings.drop_path_rate, depth)
    rows = (dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True))
    return [BlockSettings(**shared | row) for row in rows]


def _per_block(value: Any, depth: int, name: str) -> list[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        return [value] * depth
    if len(value) != depth:
        raise ValueError(
            f"expected {name} to be one setting or a list of depth = {depth}, got a list of "
            f"{len(value)}; give one entry per block."
        )
    return list(value)


def are_alike(blocks: Sequence[BlockSettings]) -> bool:
    """Whether blocks differ in nothing but their rates of stochastic depth."""
    first, *rest = (dataclasses.replace(block, drop_path_rate=0.0) for block in blocks)
    return all(block == first for block in rest)


class Annealing(NamedTuple):
    """When the adder layers of each of `depth` blocks go from the squared distance to L1: between
    the shares `start` and `end` of the training; with an end of 0 they have L1 distances all along.
    """

    depth: int
    start: float
    end: float
    blocks: str  # "together", or "in_turn", one after the other

    def squared_shares(self, progress: Any) -> list[Any]:
        """Share of the squared distance in each block at this progress, which may be traced.

        >>> annealing = Annealing(depth=2, start=0.5, end=1.0, blocks="in_turn")
        >>> [annealing.squared_shares(progress) for progress in (0.0, 0.625, 0.875)]
        [[1.0, 1.0], [0.5, 1.0], [0.0, 0.5]]
        """
        turns, turn = self._turns()
        ends = [self.start + turn * (min(block, turns - 1) + 1) for block in range(self.depth)]
        # A turn shorter than any float32 would be divided by as 0.
        shortest = float(jnp.finfo(jnp.float32).tiny)
        clip = jnp.clip if isinstance(progress, jax.Array) else lambda x, *_: min(max(x, 0.0), 1.0)
        return [clip((end - progress) / max(turn, shortest), 0.0, 1.0) for end in ends]

    def stages(self) -> list[float]:
        """Shares of the training at which a block begins to leave the one distance, or has left it;
        between two of them the same is computed.

        >>> Annealing(depth=2, start=0.5, end=1.0, blocks="in_turn").stages()
        [0.5, 0.75, 1.0]
        """
        turns, turn = self._turns()
        return [self.start + turn * number for number in range(turns + 1)] if self.end else []

    def _turns(self) -> tuple[int, float]:
        """How many turns there are, and the share of the training that each takes."""
        turns = self.depth if self.blocks == "in_turn" else 1
        return turns, (self.end - self.start) / turns


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth of each block, rising linearly from 0 in the first to `last`."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


def grid_of(image_shape: tuple[int, int, int], patch_size: int) -> Grid:
    """Rows and columns of patches of an image."""
    height, width, _ = image_shape
    if patch_size < 1 or height % patch_size or width % patch_size:
        raise ValueError(
            f"expected image sides divisible by patch_size, got {height} x {width} pixels and "
            f"patches of {patch_size}; change image_size or patch_size."
        )
    return height // patch_size, width // patch_size


def check_pooling(settings: VitSettings) -> None:
    """Raises ValueError for an unknown pooling, or what no distillation token goes with."""
    pooling, distilled = settings.pooling, settings.distilled
    if pooling not in ("cls", "mean"):
        raise ValueError(f"expected pooling 'cls' or 'mean', got {pooling!r}; choose one of these.")
    if distilled and pooling != "cls":
        raise ValueError(
            f"expected pooling 'cls' beside a distillation token, got {pooling!r}; leave out "
            "distilled."
        )
    if distilled and settings.fc_norm:
        raise ValueError(
            "expected a norm in front of both heads with a distillation token, got fc_norm=True; "
            "leave out fc_norm or distilled."
        )

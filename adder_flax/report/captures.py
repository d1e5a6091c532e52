"""What flows through a vision transformer for given images: tokens, queries, keys and attention maps of every block."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from adder_flax.models import VisionTransformer
from adder_flax.models.instrument import instrument


@dataclasses.dataclass(frozen=True)
class BlockCapture:
    """One block at work; arrays are NumPy, float32 or wider.

    Attributes:
      tokens: the block's input.
      normalized: output of the LayerNorm before attention, affine part included.
      query, key: projected, per head.
      map: what multiplies the values; rows sum to 2 if the identity map is part of it.
    """

    tokens: Float[np.ndarray, "batch token width"]
    normalized: Float[np.ndarray, "batch token width"]
    query: Float[np.ndarray, "batch head token head_dim"]
    key: Float[np.ndarray, "batch head token head_dim"]
    map: Float[np.ndarray, "batch head token token"]


@dataclasses.dataclass(frozen=True)
class Capture:
    """A forward pass.

    Attributes:
      blocks: every block at work.
      tokens: output of the last block.
      logits: what the model answers.
    """

    blocks: tuple[BlockCapture, ...]
    tokens: Float[np.ndarray, "batch token width"]
    logits: Float[np.ndarray, "batch classes"]

    @property
    def path(self) -> Float[np.ndarray, "step batch token width"]:
        """Tokens before the first block, between blocks and after the last, (blocks + 1, …)."""
        return np.stack([*(block.tokens for block in self.blocks), self.tokens])


def capture(model: VisionTransformer, images: Float[Array, "batch height width channels"]) -> Capture:
    """Runs a model without dropout and keeps what its blocks see; the model itself is left as it is.

    Args:
      model: as trained; its own backend computes it.
      images: as the model expects them, normalised as in training.

    Example:
      >>> model = VisionTransformer(
      ...     image_size=8, patch_size=2, channels=1, num_classes=10, width=16, depth=2, num_heads=2, rngs=nnx.Rngs(0)
      ... )
      >>> captured = capture(model, np.zeros((3, 8, 8, 1), np.float32))
      >>> captured.blocks[0].query.shape, captured.blocks[0].map.shape, captured.path.shape
      ((3, 2, 17, 8), (3, 2, 17, 17), (3, 3, 17, 16))
    """
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state: Any, images: Array) -> tuple[Array, tuple[Array, ...], dict[str, Any]]:
        seen: dict[str, Any] = {}

        def watch(path: str, call: Any, *args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            name = path.split(".")
            if name[0] == "blocks" and (len(name) == 2 or name[2:] in _WATCHED):
                seen[path] = (args[0], out[0]) if len(name) == 2 else out
            return out

        logits, maps = instrument(nnx.merge(graphdef, state), watch)(images, return_weights=True)
        return logits, maps, seen

    logits, maps, seen = jax.tree.map(_wide, run(state, images))
    blocks = tuple(_block(model, seen, index, block_map) for index, block_map in enumerate(maps))
    return Capture(blocks=blocks, tokens=seen[f"blocks.{len(blocks) - 1}"][1], logits=logits)


_WATCHED = (["norm1"], ["attention", "query"], ["attention", "key"])


def _wide(array: Array) -> np.ndarray:
    """As NumPy; bfloat16, which NumPy's linear algebra does not know, as float32."""
    return np.asarray(array, np.promote_types(array.dtype, np.float32))


def _block(model: VisionTransformer, seen: dict[str, Any], index: int, block_map: np.ndarray) -> BlockCapture:
    tokens, _ = seen[f"blocks.{index}"]
    attention = model.blocks[index].attention
    project = lambda name: _heads(seen[f"blocks.{index}.attention.{name}"], tokens.shape, attention.head_dim)
    return BlockCapture(
        tokens=tokens,
        normalized=seen[f"blocks.{index}.norm1"],
        query=project("query"),
        key=np.repeat(project("key"), attention.num_heads // attention.num_kv_heads, axis=1),
        map=block_map,
    )


def _heads(projected: np.ndarray, shape: tuple[int, ...], head_dim: int) -> np.ndarray:
    """(batch · token, head · head_dim) → (batch, head, token, head_dim)."""
    return projected.reshape(*shape[:2], -1, head_dim).swapaxes(1, 2)

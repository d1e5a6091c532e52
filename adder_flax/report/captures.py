"""What flows through a model: queries, keys and maps of its attention, tokens of its blocks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from adder_flax import recorder
from adder_flax.attention import attention_map
from adder_flax.recorder import Record


def tokens_in_front(model: nnx.Module) -> dict[str, Any]:
    """Returns what `attention_figure` and `patch_attention` have to know of a model's tokens."""
    return {
        "prefix_tokens": getattr(model, "prefix_tokens", 0),
        "class_token": getattr(model, "cls_token", None) is not None,
    }


@dataclasses.dataclass(frozen=True)
class BlockCapture:
    """One attention layer at work, and the block around it; arrays are NumPy, float32 or wider.

    Attributes:
      path: of the attention module.
      score: name of its score.
      query, key: projected, per head; one key for each query head.
      map: what multiplies the values; rows sum to 2 if the identity map is part of it.
      tokens, normalized: input of the block, and output of its LayerNorm before attention, affine
        part included; None outside of a block.
    """

    path: str
    score: str
    query: Float[np.ndarray, "batch head token head_dim"]
    key: Float[np.ndarray, "batch head token head_dim"]
    map: Float[np.ndarray, "batch head token token"]
    tokens: Float[np.ndarray, "batch token width"] | None = None
    normalized: Float[np.ndarray, "batch token width"] | None = None

    def around(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``tokens`` and ``normalized``; a ValueError if it is not inside of a block."""
        if self.tokens is None or self.normalized is None:
            alone = f"{self.path!r} on its own; look at a model of blocks"
            raise ValueError(f"expected attention inside of a block, got {alone}")
        return self.tokens, self.normalized


@dataclasses.dataclass(frozen=True)
class Capture:
    """A forward pass: attention layers in the order of the calls, output of the last block (None
    for a model without blocks), and what the model answers.
    """

    blocks: tuple[BlockCapture, ...]
    tokens: Float[np.ndarray, "batch token width"] | None
    logits: Float[np.ndarray, "batch classes"]

    @property
    def path(self) -> Float[np.ndarray, "step batch token width"]:
        """Tokens before the first block, between blocks and after the last, (blocks + 1, …)."""
        steps = [*(block.tokens for block in self.blocks), self.tokens]
        return np.stack([tokens for tokens in steps if tokens is not None])


def capture(model: nnx.Module, *inputs: Any) -> Capture:
    """Runs a model without dropout, keeps what its layers report, and leaves it as it is.

    Args:
      model: as trained, with any attention of this library; its own backend computes it.
      *inputs: as the model expects them: images normalised as in training.

    Example:
      >>> from adder_flax.models import VisionTransformer
      >>> sizes = dict(image_size=8, patch_size=2, channels=1, width=16, depth=2, num_heads=2)
      >>> model = VisionTransformer(**sizes, num_classes=10, rngs=nnx.Rngs(0))
      >>> captured = capture(model, np.zeros((3, 8, 8, 1), np.float32))
      >>> captured.blocks[0].query.shape, captured.blocks[0].map.shape, captured.path.shape
      ((3, 2, 17, 8), (3, 2, 17, 17), (3, 3, 17, 16))
    """
    wanted = {
        "attention": ["query", "key", "weights"],
        "block": ["tokens", "normalized", "output"],
    }
    logits, records = recorder.record(wanted, model, *inputs)
    blocks = tuple(
        _block(record, records[index:])
        for index, record in enumerate(records)
        if record.kind == "attention"
    )
    outputs = [record.arrays["output"] for record in records if record.kind == "block"]
    return Capture(blocks, _wide(outputs[-1]) if outputs else None, _wide(logits))


def _wide(array: jax.Array) -> np.ndarray:
    """As NumPy; bfloat16, which NumPy's linear algebra does not know, as float32."""
    return np.asarray(array, np.promote_types(array.dtype, np.float32))


def _block(record: Record, after: Sequence[Record]) -> BlockCapture:
    query, key = _wide(record.arrays["query"]), _wide(record.arrays["key"])
    key = np.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
    # A block reports at the end of its call: of a block that is called again and again it is the
    # next report.
    outside = (r for r in after if r.kind == "block" and record.path.startswith(f"{r.path}."))
    arrays = next((r.arrays for r in outside), {})
    around = {name: _wide(arrays[name]) for name in ("tokens", "normalized") if arrays}
    weights = _wide(attention_map(record))
    return BlockCapture(record.path, record.facts["score"], query, key, weights, **around)

"""Arrays only: pairwise reductions of adder and additive layers, LayerNorm, and their gradients.

Nothing here stores an array of size (rows x columns x contracted axis), forward or backward. Each
backend has a file of its own.
"""

from adder_flax.ops._arrays import RuleName, as_mask, exact_gradients
from adder_flax.ops._backend import (
    Backend,
    available_backends,
    backend_report,
    build_in_background,
    register_backend,
    set_backend,
    use_backend,
    use_backend_for,
)
from adder_flax.ops._functions import (
    adder_matmul,
    adder_matmul_jvp,
    additive_scores,
    l1_scores,
    layer_norm,
)
from adder_flax.ops._fused import fused_attention, preferred_key_block
from adder_flax.ops._primitive import byte_terms, formula
from adder_flax.ops._sad import (
    SadWeights,
    round_alike,
    sad_attention,
    sad_matmul,
    sad_norm,
    sad_pack,
    sad_scores,
    shared_grid,
    to_bytes,
)

__all__ = [
    "Backend",
    "RuleName",
    "SadWeights",
    "adder_matmul",
    "adder_matmul_jvp",
    "additive_scores",
    "as_mask",
    "available_backends",
    "backend_report",
    "build_in_background",
    "byte_terms",
    "exact_gradients",
    "formula",
    "fused_attention",
    "l1_scores",
    "layer_norm",
    "preferred_key_block",
    "register_backend",
    "round_alike",
    "sad_attention",
    "sad_matmul",
    "sad_norm",
    "sad_pack",
    "sad_scores",
    "set_backend",
    "shared_grid",
    "to_bytes",
    "use_backend",
    "use_backend_for",
]

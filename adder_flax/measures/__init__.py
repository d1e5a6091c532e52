"""Pure numbers on attention: entropy, rank, spectra and walks of maps; variance, gates and
gradients of scores; and on a classifier's answers.
"""

from adder_flax.measures.answers import (
    Calibration,
    calibration,
    confusion_matrix,
    wilson_interval,
)
from adder_flax.measures.brownian import (
    BrownianTest,
    brownian_test,
    dot_product_map,
    gaussian_kernel_map,
    layer_norm,
    relative_radius,
    total_variation,
)
from adder_flax.measures.expressivity import score_parameters, train_xor, xor_bound, xor_pairs
from adder_flax.measures.gating import Gate, gate
from adder_flax.measures.maps import (
    entropy,
    has_identity,
    mean_distance,
    patch_attention,
    patch_grid,
    row_entropy,
    stochastic_part,
)
from adder_flax.measures.saturation import GradientNorms, entropy_by_width, gradient_norms
from adder_flax.measures.spectrum import (
    IdentityEffect,
    asymmetry,
    cumulative,
    effective_rank,
    equivalent_rank,
    identity_effect,
    singular_values,
)
from adder_flax.measures.variance import (
    LiveVariance,
    VarianceEstimate,
    live_variance,
    monte_carlo_variance,
    pair_scores,
    predicted_variance,
)
from adder_flax.measures.walks import (
    diffusion_map,
    eigenvalues,
    irreversibility,
    k_step,
    mixing_time,
    rollout,
    spectral_gap,
    stationary_distribution,
)

__all__ = [
    "BrownianTest",
    "Calibration",
    "Gate",
    "GradientNorms",
    "IdentityEffect",
    "LiveVariance",
    "VarianceEstimate",
    "asymmetry",
    "brownian_test",
    "calibration",
    "confusion_matrix",
    "cumulative",
    "diffusion_map",
    "dot_product_map",
    "effective_rank",
    "eigenvalues",
    "entropy",
    "entropy_by_width",
    "equivalent_rank",
    "gate",
    "gaussian_kernel_map",
    "gradient_norms",
    "has_identity",
    "identity_effect",
    "irreversibility",
    "k_step",
    "layer_norm",
    "live_variance",
    "mean_distance",
    "mixing_time",
    "monte_carlo_variance",
    "pair_scores",
    "patch_attention",
    "patch_grid",
    "predicted_variance",
    "relative_radius",
    "rollout",
    "row_entropy",
    "score_parameters",
    "singular_values",
    "spectral_gap",
    "stationary_distribution",
    "stochastic_part",
    "total_variation",
    "train_xor",
    "wilson_interval",
    "xor_bound",
    "xor_pairs",
]

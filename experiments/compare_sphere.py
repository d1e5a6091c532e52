"""The Brownian paper's own setting: one head, no projections.

Its queries, keys and values are the tokens themselves.

There, section 3.2, LayerNorm puts tokens on the sphere of radius √d, on which the dot product over
√d and the Gaussian -‖q - k‖²/(2√d) differ by the same number for all pairs and give one map. What
LayerNorm has learned, γ and β, takes them off the sphere: dot product and Gaussian are therefore
compared, with LayerNorm in front of the attention, as section 3.1 assumes, and behind the sum
(Post-LN), where the first block's tokens are on no sphere. 6 blocks of width 96, without a
projection behind the attention either; six paired seeds, the recipe of
experiments/compare_mechanisms.py.
Source: "The Brownian motion in the transformer model", sections 3.1, 3.2 and 3.4.2.
Command: python main.py --mode=compare --config=experiments/compare_sphere.py [--workers=2]
"""

import ml_collections

from adder_flax.experiments import compare_mechanisms


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    config = compare_mechanisms.get_config(data)
    with config.unlocked():
        config.title = f"Dot product and Gaussian without projections, on {config.base.data.name}"
        config.base.model.update(num_heads=1, qkv_linear="identity", proj_linear="identity")
        scores = {name: {"model": {"score": name}} for name in ("dot", "gaussian")}
        norms = {
            f"{place}-LayerNorm": {"model": {"norm_position": place}} for place in ("pre", "post")
        }
        config.factors = ml_collections.ConfigDict({"score": scores, "norm": norms})
        config.baseline = ml_collections.ConfigDict({"score": "dot"})
        config.seeds = 6
    return config

"""What the adder transformer's appendix leaves open, one thing at a time.

On a transformer of 6 blocks of width 96.

The baseline has adder attention with the identity map, scale 1/√d, adder layers everywhere but in
the patch embedding and the head, LayerNorm behind them, and AdderNet's gradients (full for the
weights, clipped for the inputs). Every arm changes one of these; each is tuned by the same budget
and run on six paired seeds.
Command: python main.py --mode=compare --config=experiments/compare_adder.py [--workers=2]
"""

import ml_collections

from adder_flax.experiments import common, compare_mechanisms

_ABLATIONS = {
    "as published": {},
    "no identity": {"model": {"identity": "off"}},
    "scale by variance": {"model": {"scale": "variance_matched"}},
    "dense layers": {
        "model": {"qkv_linear": "dense", "proj_linear": "dense", "mlp_linear": "dense"}
    },
    "dense MLP": {"model": {"mlp_linear": "dense"}},
    "dense attention layers": {"model": {"qkv_linear": "dense", "proj_linear": "dense"}},
    "no normaliser": {"model": {"adder_options": {"norm": "none"}}},
    "half the initial scale": {"model": {"adder_options": {"initial_scale": 0.5}}},
    "twice the initial scale": {"model": {"adder_options": {"initial_scale": 2.0}}},
    "weight decay": {"optimizer": {"decay_prototypes": True}},
    "sign gradients": {"model": {"adder_options": {"x_gradient": "sign", "w_gradient": "sign"}}},
    "full gradients": {"model": {"adder_options": {"x_gradient": "full"}}},
    "full gradients, norm of each clipped": {
        "model": {"adder_options": {"x_gradient": "full"}},
        "optimizer": {"clip_scope": "each"},
    },
    "full gradients, norm not clipped": {
        "model": {"adder_options": {"x_gradient": "full"}},
        "optimizer": {"clip_norm": 0.0},
    },
    "slope 4": {"model": {"adder_options": {"hardtanh_slope": 4.0}}},
    "full gradients of scores": {"model": {"score_options": {"gradient": "full"}}},
    "adaptive rate": {"optimizer": {"adder_rate": 0.2}},
}


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on a data set, ``digits`` unless given."""
    config = compare_mechanisms.get_config(data)
    with config.unlocked():
        config.title = f"What the adder transformer leaves open, on {config.base.data.name}"
        config.base.model.update(common.MECHANISMS["adder"])
        config.factors = ml_collections.ConfigDict({"ablation": _ABLATIONS})
        config.baseline = ml_collections.ConfigDict({"ablation": "as published"})
    return config

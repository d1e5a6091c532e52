"""Where gradients vanish: tanh on large inputs, softmax on large dot products."""

import numpy as np

from adder_flax.measures.saturation import (
    GradientNorms,
    entropy_by_width,
    gradient_norms,
    unattended_gradient,
)
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import Claim, Findings, Picture, only_when

_INPUT_NORMS = 2.0 ** np.arange(-3, 11)
_HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256)
_KEYS = 197


@register_claims("saturation", ADDITIVE, of=object)
def judge(study: object) -> Findings:
    """Gradients over the size of the inputs, and entropies over the width of the heads."""
    del study  # a statement on scores, whatever the model
    norms = gradient_norms(_INPUT_NORMS)
    entropies = entropy_by_width(_HEAD_DIMS, keys=_KEYS)
    claims = [_saturation_claim(norms), _layer_norm_claim(norms), _scaling_claim(entropies)]
    claims.append(_unattended_claim(unattended_gradient(_HEAD_DIMS, keys=_KEYS)))
    return Findings(claims, [_saturation_picture(norms, entropies)])


def _saturation_claim(norms: GradientNorms) -> Claim:
    peak = int(norms.additive.argmax())
    left = norms.additive[-1] / norms.additive[peak]
    verdict = norms.additive_rms[-1] <= norms.additive_rms[0] or only_when(
        "a single draw is looked at, not the mean square over draws"
    )
    return ADDITIVE.claim(
        "additive-saturation",
        "Bounded activations and saturation",
        "As inputs grow, the gradient of the additive score with respect to W_s approaches zero.",
        left < 1e-2 and verdict,
        f"median falls to {left:.0e} of its peak",
        f"The median over draws rises up to inputs of norm {norms.input_norms[peak]:g}√d and has "
        f"fallen to {left:.1e} of its peak at {norms.input_norms[-1]:g}√d. The root mean square "
        f"keeps growing ({norms.additive_rms[0]:.2g} to {norms.additive_rms[-1]:.3g}): a unit is "
        "unsaturated with probability ~ 1/norm, and then its gradient is ~ norm.",
        "saturation",
    )


def _layer_norm_claim(norms: GradientNorms) -> Claim:
    steady = np.ptp(norms.additive_layer_norm) / norms.additive_layer_norm.mean()
    return ADDITIVE.claim(
        "additive-layer-norm",
        "Bounded activations and saturation",
        "LayerNorm before tanh keeps the gradient of the additive score from vanishing.",
        steady < 0.05,
        f"constant within {steady:.2%}",
        f"Its norm stays at {norms.additive_layer_norm.mean():.3g} within {steady:.2%} over "
        f"inputs of norm {norms.input_norms[0]:g}√d to {norms.input_norms[-1]:g}√d.",
        "saturation",
    )


def _scaling_claim(entropies: dict[str, np.ndarray]) -> Claim:
    unscaled, scaled = entropies["dot, unscaled"], entropies["dot"]
    drop = unscaled[0] - unscaled[-1], scaled[0] - scaled[-1]
    return ADDITIVE.claim(
        "scaling",
        "The challenge of large dot products",
        "Without 1/√d the softmax over dot products saturates as d grows; with it, it does not.",
        drop[0] > 1.0 and abs(drop[1]) < 0.1 * np.log(_KEYS),
        f"entropy {unscaled[-1]:.2f} against {scaled[-1]:.2f} nats at d = {_HEAD_DIMS[-1]}",
        f"Entropy over {_KEYS} keys from d = {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}: unscaled "
        f"{unscaled[0]:.2f} to {unscaled[-1]:.2f} nats, scaled {scaled[0]:.2f} to "
        f"{scaled[-1]:.2f}; adder at 1/√d {entropies['adder'][-1]:.2f}, variance-matched "
        f"{entropies['adder, variance-matched'][-1]:.2f}; uniform is {np.log(_KEYS):.2f}.",
        "saturation",
    )


def _unattended_claim(gradients: dict[str, np.ndarray]) -> Claim:
    falls = {name: values[-1] / values[0] for name, values in gradients.items()}
    of = lambda name: f"{gradients[name][0]:.1e} to {gradients[name][-1]:.1e}"
    return ADDITIVE.claim(
        "unattended-gradient",
        "The challenge of large dot products",
        "Where large scores make the softmax peaked, the gradients of keys that are not attended "
        "vanish.",
        falls["dot, unscaled"] < 1e-3 < 0.5 < falls["dot"],
        f"{falls['dot, unscaled']:.0e} of it left at d = {_HEAD_DIMS[-1]}; with 1/√d "
        f"{falls['dot']:.2f}",
        "Median of ∂(−ln p)/∂score over keys that are neither wanted nor the likeliest, from d = "
        f"{_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}: unscaled {of('dot, unscaled')}, over √d "
        f"{of('dot')}.",
        "saturation",
    )


def _saturation_picture(norms: GradientNorms, entropies: dict[str, np.ndarray]) -> Picture:
    figure, axes = _style.new_figure(8.8, 3.6, 1, 2)
    gradients, softmax = axes[0]
    series = {
        "additive, median": norms.additive,
        "additive, root mean square": norms.additive_rms,
        "additive with LayerNorm": norms.additive_layer_norm,
        "dot product, 1/√d": norms.dot_scaled,
        "dot product, unscaled": norms.dot,
    }
    _style.draw_lines(gradients, norms.input_norms, series)
    gradients.set_xscale("log", base=2)
    gradients.set_yscale("log")
    gradients.set_ylim(1e-4, 3e3)
    labels = {"xlabel": "norm of query and key (√d)", "ylabel": "gradient norm"}
    _style.dress(gradients, **labels, title="gradients", legend_at="lower left")
    _style.draw_lines(softmax, _HEAD_DIMS, entropies)
    softmax.axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.octaves(softmax, _HEAD_DIMS)
    softmax.set_ylim(0)
    labels = {"xlabel": "head width d", "ylabel": "entropy (nats)"}
    title = f"softmax over {_KEYS} keys"
    _style.dress(softmax, **labels, title=title, legend_at="lower left")
    data = vars(norms) | {"head_dim": np.array(_HEAD_DIMS)}
    data |= {f"entropy {name}": values for name, values in entropies.items()}
    return Picture(
        "saturation",
        figure,
        "Left: gradient with respect to W_s of the additive score, and to the query of a softmax "
        "over dot products. Right: entropy of the softmax between unit-normal queries and keys; "
        "the dotted line is uniform.",
        "Gradient norm against input norm, and softmax entropy against head width.",
        data,
    )

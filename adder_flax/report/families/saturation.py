"""Where gradients vanish: tanh on large inputs, softmax on large dot products."""

import numpy as np

from adder_flax.measures.saturation import GradientNorms, entropy_by_width, gradient_norms
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, Claim, Findings, Picture, only_when

_SOURCE = ADDITIVE.source
_INPUT_NORMS = 2.0 ** np.arange(-3, 11)
_HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256)
_KEYS = 197


@register_claims("saturation", ADDITIVE, of=object)
def judge(study: object) -> Findings:
    """Gradients over the size of the inputs, and entropies over the width of the heads."""
    del study  # a statement on scores, whatever the model
    norms = gradient_norms(_INPUT_NORMS)
    entropies = entropy_by_width(_HEAD_DIMS, keys=_KEYS)
    return Findings(
        [*_saturation_claims(norms), _scaling_claim(entropies)],
        [_saturation_picture(norms, entropies)],
    )


def _saturation_claims(norms: GradientNorms) -> list[Claim]:
    source = f"{_SOURCE}, Bounded activations and saturation"
    peak = int(norms.additive.argmax())
    vanishes = norms.additive[-1] < 1e-2 * norms.additive[peak]
    mean_grows = norms.additive_rms[-1] > norms.additive_rms[0]
    verdict = (
        only_when("a single draw is looked at, not the mean square over draws")
        if mean_grows
        else HOLDS
    )
    steady = np.ptp(norms.additive_layer_norm) / norms.additive_layer_norm.mean()
    return [
        Claim(
            "additive-saturation",
            source,
            "As inputs grow, the gradient of the additive score with respect to W_s approaches "
            "zero.",
            verdict if vanishes else DOES_NOT_HOLD,
            f"median falls to {norms.additive[-1] / norms.additive[peak]:.0e} of its peak",
            f"The median over draws rises up to inputs of norm {norms.input_norms[peak]:g}√d and "
            f"has fallen to {norms.additive[-1] / norms.additive[peak]:.1e} of its peak at "
            f"{norms.input_norms[-1]:g}√d. The root mean square keeps growing "
            f"({norms.additive_rms[0]:.2g} to {norms.additive_rms[-1]:.3g}): a unit is unsaturated "
            "with probability ~ 1/norm, and then its gradient is ~ norm.",
            "saturation",
        ),
        Claim(
            "additive-layer-norm",
            source,
            "LayerNorm before tanh keeps the gradient of the additive score from vanishing.",
            HOLDS if steady < 0.05 else DOES_NOT_HOLD,
            f"constant within {steady:.2%}",
            f"Its norm stays at {norms.additive_layer_norm.mean():.3g} within {steady:.2%} over "
            f"inputs of norm {norms.input_norms[0]:g}√d to {norms.input_norms[-1]:g}√d.",
            "saturation",
        ),
    ]


def _scaling_claim(entropies: dict[str, np.ndarray]) -> Claim:
    drop = {name: values[0] - values[-1] for name, values in entropies.items()}
    holds = drop["dot, unscaled"] > 1.0 and abs(drop["dot"]) < 0.1 * np.log(_KEYS)
    return Claim(
        "scaling",
        f"{_SOURCE}, The challenge of large dot products",
        "Without 1/√d the softmax over dot products saturates as d grows; with it, it does not.",
        HOLDS if holds else DOES_NOT_HOLD,
        f"entropy {entropies['dot, unscaled'][-1]:.2f} against {entropies['dot'][-1]:.2f} nats at "
        f"d = {_HEAD_DIMS[-1]}",
        f"Entropy over {_KEYS} keys from d = {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}: unscaled "
        f"{entropies['dot, unscaled'][0]:.2f} to {entropies['dot, unscaled'][-1]:.2f} nats, scaled "
        f"{entropies['dot'][0]:.2f} to {entropies['dot'][-1]:.2f}; adder at 1/√d "
        f"{entropies['adder'][-1]:.2f}, variance-matched "
        f"{entropies['adder, variance-matched'][-1]:.2f}; uniform is {np.log(_KEYS):.2f}.",
        "saturation",
    )


def _saturation_picture(norms: GradientNorms, entropies: dict[str, np.ndarray]) -> Picture:
    figure, axes = _style.new_figure(8.8, 3.6, 1, 2)
    series = {
        "additive, median": norms.additive,
        "additive, root mean square": norms.additive_rms,
        "additive with LayerNorm": norms.additive_layer_norm,
        "dot product, 1/√d": norms.dot_scaled,
        "dot product, unscaled": norms.dot,
    }
    for line, (label, values) in zip(_style.LINES, series.items(), strict=False):
        axes[0, 0].plot(norms.input_norms, values, **line, markersize=4, linewidth=1.3, label=label)
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylim(1e-4, 3e3)
    _style.dress(
        axes[0, 0], xlabel="norm of query and key (√d)", ylabel="gradient norm", title="gradients"
    )
    _style.legend(axes[0, 0], loc="lower left")
    for line, (label, values) in zip(_style.LINES, entropies.items(), strict=False):
        axes[0, 1].plot(_HEAD_DIMS, values, **line, markersize=4, linewidth=1.3, label=label)
    axes[0, 1].axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    axes[0, 1].set_xscale("log", base=2)
    axes[0, 1].set_xticks(_HEAD_DIMS, [str(dim) for dim in _HEAD_DIMS])
    axes[0, 1].set_ylim(0)
    _style.dress(
        axes[0, 1],
        xlabel="head width d",
        ylabel="entropy (nats)",
        title=f"softmax over {_KEYS} keys",
    )
    _style.legend(axes[0, 1], loc="lower left")
    data = {
        **{name: getattr(norms, name) for name in vars(norms)},
        "head_dim": np.array(_HEAD_DIMS),
    }
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

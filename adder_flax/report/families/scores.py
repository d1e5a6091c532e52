"""What bilinear scores cannot express and additive ones can; and where gradients vanish: tanh on
large inputs, softmax on large dot products. Statements on scores, whatever the model.
"""

import jax.numpy as jnp
import numpy as np

from adder_flax import measures
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, only_when, register_claims
from adder_flax.report._study import Claim, Findings, Picture
from adder_flax.report.figures import xor_figure

_INPUT_NORMS = 2.0 ** np.arange(-3, 11)
_HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256)
_KEYS = 197


@register_claims("exclusive-or", ADDITIVE, of=object)
def judge_exclusive_or(_: object) -> Findings:
    """The bound by enumeration, trained heads, the number of parameters, and both scores' form."""
    accuracies = {score: measures.train_xor(score) for score in ("bilinear", "additive")}
    claims = [*_claims(**accuracies), _form_claim(), _approximation_claim()]
    return Findings(claims, [_xor_picture(accuracies)])


def _form_claim() -> Claim:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weight, w_s, w_h, v = normal(8, 12), normal(16, 8), normal(16, 12), normal(16)
    additive = lambda s, h: v @ jnp.tanh((w_s @ s + w_h @ h) / 4)
    scores = {"multiplicative": lambda s, h: s @ weight @ h, "additive": additive}
    found = {
        name: measures.hessian_blocks(score, normal(8), normal(12))
        for name, score in scores.items()
    }
    share = {name: max(ss, hh) / sh for name, (ss, sh, hh) in found.items()}
    return ADDITIVE.claim(
        "quadratic-form",
        "Multiplicative attention",
        "A multiplicative score is a quadratic form in [query, key] whose diagonal blocks are "
        "zero: it has no relations within the query or within the key.",
        share["multiplicative"] < 1e-5 < 1e-2 < share["additive"],
        f"diagonal {share['multiplicative']:.1g} of the rest, of an additive score "
        f"{share['additive']:.2g}",
        "Largest diagonal block of the second derivatives over the block across, random weights "
        f"and vectors: multiplicative {share['multiplicative']:.1g}, additive "
        f"{share['additive']:.2g}.",
    )


def _approximation_claim() -> Claim:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((16, 16)) / 4
    query, key = rng.uniform(-1, 1, (2, 1000, 16))
    exact, errors = np.einsum("ni,ij,nj->n", query, weight, key), {}
    for size in (0.2, 0.02, 0.002):
        w_s, w_h, b, v = measures.bilinear_as_additive(weight, size)
        score = np.tanh(query @ w_s.T + key @ w_h.T + b) @ v
        errors[size] = float(np.abs(score - exact).max() / np.abs(exact).max())
    shown = ", ".join(f"{error:.1e} with inputs scaled by {size}" for size, error in errors.items())
    return ADDITIVE.claim(
        "additive-bilinear",
        "Universal approximation",
        "An additive score can learn the interactions of a multiplicative one.",
        errors[0.002] < 1e-4 and errors[0.002] < errors[0.02] < errors[0.2],
        f"within {errors[0.002]:.0e} with d_a = {4 * len(weight)}",
        f"Weights in closed form, four hidden units for each rank of W (16 here). Largest error: "
        f"{shown}.",
    )


def _claims(bilinear: np.ndarray, additive: np.ndarray) -> list[Claim]:
    bound, starts, solved = measures.xor_bound(), len(additive), additive == 1.0
    some = solved.any() and only_when(f"training succeeds ({solved.mean():.0%} of starts)")
    span = lambda accuracies: f"{accuracies.min():.0%} to {accuracies.max():.0%}"
    (of_bilinear, below), (_, above) = (measures.score_parameters(64, 128, d) for d in (42, 43))
    return [
        ADDITIVE.claim(
            "xor-bilinear",
            "The limits of bilinearity",
            "No bilinear score, biases included, solves the XOR alignment task.",
            bound < 1 and bilinear.max() <= bound,
            f"at most {float(bound):.0%} of the pairs",
            f"By enumeration at most {bound.numerator * 4} of 16 pairs, {float(bound):.0%}, and a "
            f"W that reaches it is known; trained from {starts} starts: {span(bilinear)}.",
            "xor",
        ),
        ADDITIVE.claim(
            "xor-additive",
            "The power of non-linearity",
            "An additive score solves the XOR alignment task.",
            solved.all() or some,
            f"100 % from {solved.sum()} of {starts} starts",
            f"Hidden width 16, {starts} starts: {span(additive)} of the pairs; weights for width 4 "
            "are known in closed form.",
            "xor",
        ),
        ADDITIVE.claim(
            "parameter-count",
            "The role of the attention dimension",
            "For widths 64 and 128 the two scores have equally many parameters at d_a = 8192/193 ≈ "
            "42.4.",
            below < of_bilinear < above,
            f"{below} < {of_bilinear} < {above} parameters at d_a = 42, 43",
            f"Bilinear {of_bilinear}; additive {below} at d_a = 42 and {above} at 43.",
            "xor",
        ),
    ]


def _xor_picture(accuracies: dict[str, np.ndarray]) -> Picture:
    widths = range(1, 81)
    bilinear, additive = zip(*(measures.score_parameters(64, 128, w) for w in widths), strict=True)
    data = {f"accuracy_{score}": values for score, values in accuracies.items()}
    data |= dict(hidden_width=widths, parameters_bilinear=bilinear, parameters_additive=additive)
    return Picture(
        "xor",
        xor_figure(accuracies),
        "Left: accuracy on the 16 pairs of the XOR task after training, and the proven limit of "
        "bilinear scores. Right: parameters against the additive score's hidden width.",
        "Accuracies of bilinear and additive scores on the XOR task, and parameter counts.",
        data,
    )


@register_claims("saturation", ADDITIVE, of=object)
def judge_saturation(_: object) -> Findings:
    """Gradients over the size of the inputs, and entropies over the width of the heads."""
    norms = measures.gradient_norms(_INPUT_NORMS)
    entropies = measures.entropy_by_width(_HEAD_DIMS, keys=_KEYS)
    claims = [*_gradient_claims(norms), _scaling_claim(entropies), _unattended_claim()]
    return Findings(claims, [_saturation_picture(norms, entropies)])


def _gradient_claims(norms: measures.GradientNorms) -> list[Claim]:
    peak, steady = int(norms.additive.argmax()), norms.additive_layer_norm
    left, within = norms.additive[-1] / norms.additive[peak], np.ptp(steady) / steady.mean()
    condition = only_when("a single draw is looked at, not the mean square over draws")
    return [
        ADDITIVE.claim(
            "additive-saturation",
            "Bounded activations and saturation",
            "As inputs grow, the gradient of the additive score with respect to W_s approaches "
            "zero.",
            left < 1e-2 and (norms.additive_rms[-1] <= norms.additive_rms[0] or condition),
            f"median falls to {left:.0e} of its peak",
            f"The median over draws rises up to inputs of norm {norms.input_norms[peak]:g}√d and "
            f"has fallen to {left:.1e} of its peak at {norms.input_norms[-1]:g}√d. The root mean "
            f"square keeps growing ({norms.additive_rms[0]:.2g} to {norms.additive_rms[-1]:.3g}): "
            "a unit is unsaturated with probability ~ 1/norm, and then its gradient is ~ norm.",
            "saturation",
        ),
        ADDITIVE.claim(
            "additive-layer-norm",
            "Bounded activations and saturation",
            "LayerNorm before tanh keeps the gradient of the additive score from vanishing.",
            within < 0.05,
            f"constant within {within:.2%}",
            f"Its norm stays at {steady.mean():.3g} within {within:.2%} over inputs of norm "
            f"{norms.input_norms[0]:g}√d to {norms.input_norms[-1]:g}√d.",
            "saturation",
        ),
    ]


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


def _unattended_claim() -> Claim:
    gradients = measures.unattended_gradient(_HEAD_DIMS, keys=_KEYS)
    unscaled, scaled = (gradients[name] for name in ("dot, unscaled", "dot"))
    left, left_scaled = unscaled[-1] / unscaled[0], scaled[-1] / scaled[0]
    return ADDITIVE.claim(
        "unattended-gradient",
        "The challenge of large dot products",
        "Where large scores make the softmax peaked, the gradients of keys that are not attended "
        "vanish.",
        left < 1e-3 < 0.5 < left_scaled,
        f"{left:.0e} of it left at d = {_HEAD_DIMS[-1]}; with 1/√d {left_scaled:.2f}",
        "Median of ∂(−ln p)/∂score over keys that are neither wanted nor the likeliest, from d = "
        f"{_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}: unscaled {unscaled[0]:.1e} to {unscaled[-1]:.1e}, "
        f"over √d {scaled[0]:.1e} to {scaled[-1]:.1e}.",
        "saturation",
    )


def _saturation_picture(norms: measures.GradientNorms, entropies: dict[str, np.ndarray]) -> Picture:
    figure, [[gradients, softmax]] = _style.new_figure(8.8, 3.6, 1, 2)
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
    label = "norm of query and key (√d)"
    _style.dress(gradients, label, "gradient norm", "gradients", legend_at="lower left")
    _style.draw_lines(softmax, _HEAD_DIMS, entropies)
    softmax.axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.octaves(softmax, _HEAD_DIMS)
    softmax.set_ylim(0)
    title = f"softmax over {_KEYS} keys"
    _style.dress(softmax, "head width d", "entropy (nats)", title, legend_at="lower left")
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

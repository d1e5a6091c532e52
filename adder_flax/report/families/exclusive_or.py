"""What bilinear scores cannot express and additive ones can: exclusive-or, and what they are."""

import jax.numpy as jnp
import numpy as np

from adder_flax.measures.expressivity import (
    bilinear_as_additive,
    hessian_blocks,
    score_parameters,
    train_xor,
    xor_bound,
)
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import Claim, Findings, Picture, only_when
from adder_flax.report.figures import xor_figure


@register_claims("exclusive-or", ADDITIVE, of=object)
def judge(study: object) -> Findings:
    """The bound by enumeration, trained heads, the number of parameters, and both scores' form."""
    del study  # a statement on scores, whatever the model
    accuracies = {score: train_xor(score) for score in ("bilinear", "additive")}
    claims = [*_claims(**accuracies), _form_claim(), _approximation_claim()]
    return Findings(claims, [_xor_picture(accuracies)])


def _form_claim() -> Claim:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weight, w_s, w_h, v = normal(8, 12), normal(16, 8), normal(16, 12), normal(16)
    additive = lambda s, h: v @ jnp.tanh((w_s @ s + w_h @ h) / 4)
    scores = {"multiplicative": lambda s, h: s @ weight @ h, "additive": additive}
    found = {name: hessian_blocks(score, normal(8), normal(12)) for name, score in scores.items()}
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
        w_s, w_h, b, v = bilinear_as_additive(weight, size)
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
    bound, starts, solved = xor_bound(), len(additive), additive == 1.0
    some = solved.any() and only_when(f"training succeeds ({solved.mean():.0%} of starts)")
    span = lambda accuracies: f"{accuracies.min():.0%} to {accuracies.max():.0%}"
    (of_bilinear, below), (_, above) = (score_parameters(64, 128, d) for d in (42, 43))
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
    widths = np.arange(1, 81)
    bilinear, additive = np.transpose([score_parameters(64, 128, int(width)) for width in widths])
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

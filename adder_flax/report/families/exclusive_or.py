"""Exclusive-or: what bilinear scores cannot express and additive ones can."""

import numpy as np

from adder_flax.measures.expressivity import score_parameters, train_xor, xor_bound
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import Claim, Findings, Picture, only_when
from adder_flax.report.figures import xor_figure


@register_claims("exclusive-or", ADDITIVE, of=object)
def judge(study: object) -> Findings:
    """The bound by enumeration, trained heads, and the number of parameters."""
    del study  # a statement on scores, whatever the model
    accuracies = {score: train_xor(score) for score in ("bilinear", "additive")}
    return Findings(_claims(**accuracies), [_xor_picture(accuracies)])


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

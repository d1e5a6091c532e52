"""Exclusive-or: what bilinear scores cannot express and additive ones can."""

import numpy as np

from adder_flax.measures.expressivity import XorBound, score_parameters, train_xor, xor_bound
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, Claim, Findings, Picture, only_when
from adder_flax.report.figures import xor_figure

_SOURCE = ADDITIVE.source


@register_claims("exclusive-or", ADDITIVE, of=object)
def judge(study: object) -> Findings:
    """The bound by enumeration, trained heads, and the number of parameters."""
    del study  # a statement on scores, whatever the model
    bound = xor_bound()
    accuracies = {score: train_xor(score) for score in ("bilinear", "additive")}
    return Findings(
        [*_xor_claims(bound, accuracies), _parameter_claim()], [_xor_picture(accuracies)]
    )


def _xor_claims(bound: XorBound, accuracies: dict[str, np.ndarray]) -> list[Claim]:
    bilinear, additive = accuracies["bilinear"], accuracies["additive"]
    solved = additive == 1.0
    verdict = (
        HOLDS if solved.all() else only_when(f"training succeeds ({solved.mean():.0%} of starts)")
    )
    return [
        Claim(
            "xor-bilinear",
            f"{_SOURCE}, The limits of bilinearity",
            "No bilinear score, biases included, solves the XOR alignment task.",
            HOLDS if bound.accuracy < 1 and bilinear.max() <= bound.accuracy else DOES_NOT_HOLD,
            f"at most {float(bound.accuracy):.0%} of the pairs",
            f"By enumeration at most {bound.accuracy.numerator * 4} of 16 pairs, "
            f"{float(bound.accuracy):.0%}, and a W that reaches it is known; trained from "
            f"{len(bilinear)} starts: {bilinear.min():.0%} to {bilinear.max():.0%}.",
            "xor",
        ),
        Claim(
            "xor-additive",
            f"{_SOURCE}, The power of non-linearity",
            "An additive score solves the XOR alignment task.",
            verdict if solved.any() else DOES_NOT_HOLD,
            f"100 % from {solved.sum()} of {len(solved)} starts",
            f"Hidden width 16, {len(additive)} starts: {additive.min():.0%} to "
            f"{additive.max():.0%} of the pairs; weights for width 4 are known in closed form.",
            "xor",
        ),
    ]


def _parameter_claim() -> Claim:
    bilinear, below = score_parameters(64, 128, 42)
    above = score_parameters(64, 128, 43)[1]
    return Claim(
        "parameter-count",
        f"{_SOURCE}, The role of the attention dimension",
        "For widths 64 and 128 the two scores have equally many parameters at d_a = 8192/193 ≈ "
        "42.4.",
        HOLDS if below < bilinear < above else DOES_NOT_HOLD,
        f"{below} < {bilinear} < {above} parameters at d_a = 42, 43",
        f"Bilinear {bilinear}; additive {below} at d_a = 42 and {above} at 43.",
        "xor",
    )


def _xor_picture(accuracies: dict[str, np.ndarray]) -> Picture:
    widths = np.arange(1, 81)
    counts = np.array([score_parameters(64, 128, int(width)) for width in widths])
    data = {f"accuracy_{score}": values for score, values in accuracies.items()}
    return Picture(
        "xor",
        xor_figure(accuracies),
        "Left: accuracy on the 16 pairs of the XOR task after training, and the proven limit of "
        "bilinear scores. Right: parameters against the additive score's hidden width.",
        "Accuracies of bilinear and additive scores on the XOR task, and parameter counts.",
        {
            **data,
            "hidden_width": widths,
            "parameters_bilinear": counts[:, 0],
            "parameters_additive": counts[:, 1],
        },
    )

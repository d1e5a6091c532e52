"""Theorem 1: the variance of the scores, sampled and on a model's own queries and keys."""

import numpy as np

from adder_flax.measures.variance import (
    ADDER_VARIANCE_PER_DIM,
    LiveVariance,
    VarianceEstimate,
    live_variance,
    monte_carlo_variance,
    predicted_variance,
)
from adder_flax.report import _style
from adder_flax.report._families import ADDER, register_claims
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_MEASURED,
    TOLERANCE,
    Claim,
    Findings,
    Picture,
    Study,
    only_when,
    spread,
)

_SOURCE = ADDER.source
_HEAD_DIMS = (4, 8, 16, 32, 64, 128)
# Sampled variances may be this many standard errors off: 3 would fail one of a dozen estimates too
# often.
_STANDARD_ERRORS = 4.0


@register_claims("theorem-1", ADDER)
def judge(study: Study) -> Findings:
    """Variances of unit-normal scores against the formula, and of the subject's own scores."""
    estimates = {score: monte_carlo_variance(score, _HEAD_DIMS) for score in ("dot", "adder")}
    live = _live(study)
    return Findings(
        claims=[*_theorem_claims(estimates), _live_claim(study, live)],
        pictures=[_theorem_picture(estimates, live)],
    )


def _live(study: Study) -> dict[int, LiveVariance]:
    """By block, for the blocks whose score has no learned parameters."""
    blocks = zip(study.subject.scores, study.subject.captured.blocks, strict=True)
    return {
        index: live_variance(block.query, block.key, score)
        for index, (score, block) in enumerate(blocks)
        if score in ("dot", "adder", "gaussian")
    }


def _theorem_claims(estimates: dict[str, list[VarianceEstimate]]) -> list[Claim]:
    names = {"dot": ("q·k", "d"), "adder": ("−‖q − k‖₁", "2d(1 − 2/π) ≈ 0.727 d")}
    claims = []
    for score, (symbol, formula) in names.items():
        errors = [
            abs(estimate.variance - predicted_variance(score, estimate.head_dim))
            / estimate.standard_error
            for estimate in estimates[score]
        ]
        largest = estimates[score][-1]
        claims.append(
            Claim(
                f"theorem-1-{score}",
                f"{_SOURCE}, Theorem 1",
                f"For unit-normal q and k the variance of {symbol} is {formula}.",
                HOLDS if max(errors) < _STANDARD_ERRORS else DOES_NOT_HOLD,
                f"{largest.variance / largest.head_dim:.3f} d",
                f"Sampled at d = {_HEAD_DIMS[0]} … {_HEAD_DIMS[-1]}: within {max(errors):.1f} "
                f"standard errors; at d = {largest.head_dim} {largest.variance:.1f} against "
                f"{predicted_variance(score, largest.head_dim):.1f}.",
                "theorem-1",
            )
        )
    left = [estimate.variance / estimate.head_dim for estimate in estimates["adder"]]
    claims.append(
        Claim(
            "theorem-1-scale",
            f"{_SOURCE}, A.2",
            "Scaling by 1/√d counteracts the growth of the adder score's variance.",
            HOLDS if max(left) - min(left) < TOLERANCE * ADDER_VARIANCE_PER_DIM else DOES_NOT_HOLD,
            f"scaled variance {min(left):.3f} to {max(left):.3f}",
            f"The scaled variance is {min(left):.3f} to {max(left):.3f} at every d: constant, but "
            "not 1; the dot product's is 1. The variance-matched scale 1/√(0.727 d) gives "
            f"{np.mean(left) / ADDER_VARIANCE_PER_DIM:.3f}.",
            "theorem-1",
        )
    )
    return claims


def _live_claim(study: Study, live: dict[int, LiveVariance]) -> Claim:
    statement = (
        "The model's own queries and keys are unit-normal enough for Theorem 1 to give their score "
        "variance."
    )
    source = f"{_SOURCE}, A.2 (assumption)"
    if not live:
        scores = ", ".join(sorted(set(study.subject.scores)))
        return Claim(
            "theorem-1-live",
            source,
            statement,
            NOT_MEASURED,
            "",
            f"Scores with learned parameters ({scores}) have no formula.",
        )
    ratios = [entry.measured / entry.predicted for entry in live.values()]
    rescaled = [entry.measured / entry.rescaled for entry in live.values()]
    near = lambda values: all(abs(value - 1) < TOLERANCE for value in values)
    verdict = HOLDS if near(ratios) else DOES_NOT_HOLD
    if not near(ratios) and near(rescaled):
        verdict = only_when("the variance of the components is put in")
    return Claim(
        "theorem-1-live",
        source,
        statement,
        verdict,
        f"{spread(ratios)} × predicted",
        f"Measured over predicted variance by block: {spread(ratios)}; with the measured component "
        f"variances put in {spread(rescaled)}. Root mean square of q: "
        f"{spread([entry.query_rms for entry in live.values()])}, correlation of a token's q with "
        f"its k: {spread([entry.component_correlation for entry in live.values()])}, excess "
        f"kurtosis: {spread([entry.excess_kurtosis for entry in live.values()])}.",
        "theorem-1",
    )


def _theorem_picture(
    estimates: dict[str, list[VarianceEstimate]], live: dict[int, LiveVariance]
) -> Picture:
    figure, axes = _style.new_figure(9.0, 3.9, 1, 2)
    axis = axes[0, 0]
    for line, (score, symbol) in zip(
        _style.LINES, {"dot": "q·k", "adder": "−‖q − k‖₁"}.items(), strict=False
    ):
        predicted = [predicted_variance(score, dim) for dim in _HEAD_DIMS]
        sampled, errors = zip(
            *((e.variance, 3 * e.standard_error) for e in estimates[score]), strict=True
        )
        axis.plot(_HEAD_DIMS, predicted, **{**line, "marker": None}, label=f"{symbol}, Theorem 1")
        marks = {**line, "linestyle": "none", "fillstyle": "none", "markersize": 5, "capsize": 3}
        axis.errorbar(
            _HEAD_DIMS, sampled, yerr=errors, **marks, label=f"{symbol}, sampled (3 s.e.)"
        )
    if live:
        dims, measured = zip(
            *((entry.head_dim, entry.measured) for entry in live.values()), strict=True
        )
        axis.plot(
            dims,
            measured,
            color="#0072B2",
            marker="x",
            linestyle="none",
            label="this model, one × a block",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(_HEAD_DIMS, [str(dim) for dim in _HEAD_DIMS])
    _style.dress(axis, xlabel="head width d", ylabel="variance", title="raw scores")
    _style.legend(axis)
    _draw_scaled_variance(axes[0, 1], estimates)
    return Picture(
        "theorem-1",
        figure,
        "Variance of scores between unit-normal vectors against the head width. Left, raw scores: "
        "Theorem 1 as lines, samples as open marks, the model's own queries and keys as crosses. "
        "Right, after scaling: constant at every width, and 1 for the adder score only with the "
        "variance-matched scale.",
        "Variance of raw and of scaled scores against head width for dot product and L1 distance.",
        _theorem_data(estimates, live),
    )


def _draw_scaled_variance(axis, estimates: dict[str, list[VarianceEstimate]]) -> None:
    per_dim = {
        score: [e.variance / e.head_dim for e in sampled] for score, sampled in estimates.items()
    }
    series = {
        "q·k, 1/√d": per_dim["dot"],
        "−‖q − k‖₁, 1/√d": per_dim["adder"],
        "−‖q − k‖₁, variance-matched": np.array(per_dim["adder"]) / ADDER_VARIANCE_PER_DIM,
    }
    for line, (label, values) in zip(_style.LINES, series.items(), strict=False):
        axis.plot(
            _HEAD_DIMS, values, **line, markersize=5, linewidth=1.3, fillstyle="none", label=label
        )
    for level in (1.0, ADDER_VARIANCE_PER_DIM):
        axis.axhline(level, color=_style.GREY, linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(_HEAD_DIMS, [str(dim) for dim in _HEAD_DIMS])
    axis.set_ylim(0, 1.6)
    _style.dress(axis, xlabel="head width d", ylabel="variance", title="scaled scores")
    _style.legend(axis)


def _theorem_data(
    estimates: dict[str, list[VarianceEstimate]], live: dict[int, LiveVariance]
) -> dict[str, list]:
    rows = [
        (
            score,
            "sampled",
            e.head_dim,
            e.variance,
            e.standard_error,
            predicted_variance(score, e.head_dim),
        )
        for score, sampled in estimates.items()
        for e in sampled
    ]
    rows += [
        ("model", f"block {index + 1}", entry.head_dim, entry.measured, np.nan, entry.predicted)
        for index, entry in live.items()
    ]
    names = ("score", "source", "head_dim", "variance", "standard_error", "predicted")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

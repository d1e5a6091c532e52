"""Theorem 1: the variance of the scores, sampled and on a model's own queries and keys."""

import functools

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
    NOT_MEASURED,
    TOLERANCE,
    Claim,
    Findings,
    Picture,
    Study,
    only_when,
    spread,
)

_HEAD_DIMS = (4, 8, 16, 32, 64, 128)
_SYMBOLS = {"dot": "q·k", "adder": "−‖q − k‖₁"}
# Sampled variances may be this many standard errors off: 3 would fail one of a dozen estimates too
# often.
_STANDARD_ERRORS = 4.0
_Estimates = dict[str, list[VarianceEstimate]]


@register_claims("theorem-1", ADDER)
def judge(study: Study) -> Findings:
    """Variances of unit-normal scores against the formula, and of the subject's own scores."""
    estimates = {score: monte_carlo_variance(score, _HEAD_DIMS) for score in _SYMBOLS}
    live = {
        index: live_variance(block.query, block.key, block.score)
        for index, block in enumerate(study.subject.captured.blocks)
        if block.score in ("dot", "adder", "gaussian")  # those without learned parameters
    }
    claims = [
        _variance_claim("dot", "d", estimates),
        _variance_claim("adder", "2d(1 − 2/π) ≈ 0.727 d", estimates),
        _scale_claim(estimates),
        _live_claim(study, list(live.values())),
    ]
    return Findings(claims, [_theorem_picture(estimates, live)])


def _variance_claim(score: str, formula: str, estimates: _Estimates) -> Claim:
    formula_of, largest = functools.partial(predicted_variance, score), estimates[score][-1]
    off = max(abs(e.variance - formula_of(e.head_dim)) / e.standard_error for e in estimates[score])
    return ADDER.claim(
        f"theorem-1-{score}",
        "Theorem 1",
        f"For unit-normal q and k the variance of {_SYMBOLS[score]} is {formula}.",
        off < _STANDARD_ERRORS,
        f"{largest.variance / largest.head_dim:.3f} d",
        f"Sampled at d = {_HEAD_DIMS[0]} … {_HEAD_DIMS[-1]}: within {off:.1f} standard errors; at "
        f"d = {largest.head_dim} {largest.variance:.1f} against "
        f"{formula_of(largest.head_dim):.1f}.",
        "theorem-1",
    )


def _scale_claim(estimates: _Estimates) -> Claim:
    left = [estimate.variance / estimate.head_dim for estimate in estimates["adder"]]
    return ADDER.claim(
        "theorem-1-scale",
        "A.2",
        "Scaling by 1/√d counteracts the growth of the adder score's variance.",
        max(left) - min(left) < TOLERANCE * ADDER_VARIANCE_PER_DIM,
        f"scaled variance {min(left):.3f} to {max(left):.3f}",
        f"The scaled variance is {min(left):.3f} to {max(left):.3f} at every d: constant, but not "
        "1; the dot product's is 1. The variance-matched scale 1/√(0.727 d) gives "
        f"{np.mean(left) / ADDER_VARIANCE_PER_DIM:.3f}.",
        "theorem-1",
    )


def _live_claim(study: Study, live: list[LiveVariance]) -> Claim:
    claim = functools.partial(
        ADDER.claim,
        "theorem-1-live",
        "A.2 (assumption)",
        "The model's own queries and keys are unit-normal enough for Theorem 1 to give their score "
        "variance.",
    )
    if not live:
        scores = ", ".join(sorted(set(study.subject.scores)))
        return claim(
            NOT_MEASURED, finding=f"Scores with learned parameters ({scores}) have no formula."
        )
    ratios = [entry.measured / entry.predicted for entry in live]
    rescaled = [entry.measured / entry.rescaled for entry in live]
    near = lambda values: all(abs(value - 1) < TOLERANCE for value in values)
    of = lambda name: spread([getattr(entry, name) for entry in live])
    condition = near(rescaled) and only_when("the variance of the components is put in")
    return claim(
        near(ratios) or condition,
        f"{spread(ratios)} × predicted",
        f"Measured over predicted variance by block: {spread(ratios)}; with the measured component "
        f"variances put in {spread(rescaled)}. Root mean square of q: {of('query_rms')}, "
        f"correlation of a token's q with its k: {of('component_correlation')}, excess kurtosis: "
        f"{of('excess_kurtosis')}.",
        "theorem-1",
    )


def _theorem_picture(estimates: _Estimates, live: dict[int, LiveVariance]) -> Picture:
    figure, axes = _style.new_figure(9.0, 3.9, 1, 2)
    _draw_raw_variance(axes[0, 0], estimates, list(live.values()))
    _draw_scaled_variance(axes[0, 1], estimates)
    rows = [
        (score, "sampled", *vars(each).values(), predicted_variance(score, each.head_dim))
        for score, sampled in estimates.items()
        for each in sampled
    ]
    rows += [
        ("model", f"block {index + 1}", entry.head_dim, entry.measured, np.nan, entry.predicted)
        for index, entry in live.items()
    ]
    names = ("score", "source", "head_dim", "variance", "standard_error", "predicted")
    return Picture(
        "theorem-1",
        figure,
        "Variance of scores between unit-normal vectors against the head width. Left, raw scores: "
        "Theorem 1 as lines, samples as open marks, the model's own queries and keys as crosses. "
        "Right, after scaling: constant at every width, and 1 for the adder score only with the "
        "variance-matched scale.",
        "Variance of raw and of scaled scores against head width for dot product and L1 distance.",
        dict(zip(names, zip(*rows, strict=True), strict=True)),
    )


def _draw_raw_variance(axis, estimates: _Estimates, live: list[LiveVariance]) -> None:
    for line, (score, symbol) in zip(_style.LINES, _SYMBOLS.items(), strict=False):
        predicted = [predicted_variance(score, dim) for dim in _HEAD_DIMS]
        axis.plot(_HEAD_DIMS, predicted, **{**line, "marker": None}, label=f"{symbol}, Theorem 1")
        sampled = [estimate.variance for estimate in estimates[score]]
        errors = [3 * estimate.standard_error for estimate in estimates[score]]
        marks = {**line, "linestyle": "none", "fillstyle": "none", "markersize": 5, "capsize": 3}
        label = f"{symbol}, sampled (3 s.e.)"
        axis.errorbar(_HEAD_DIMS, sampled, yerr=errors, **marks, label=label)
    if live:
        dims, measured = zip(*((entry.head_dim, entry.measured) for entry in live), strict=True)
        crosses = dict(color="#0072B2", marker="x", linestyle="none")
        axis.plot(dims, measured, **crosses, label="this model, one × a block")
    _style.octaves(axis, _HEAD_DIMS)
    axis.set_yscale("log")
    labels = {"xlabel": "head width d", "ylabel": "variance"}
    _style.dress(axis, **labels, title="raw scores", legend_at="best")


def _draw_scaled_variance(axis, estimates: _Estimates) -> None:
    dot, adder = (
        np.array([each.variance / each.head_dim for each in estimates[score]]) for score in _SYMBOLS
    )
    series = {
        "q·k, 1/√d": dot,
        "−‖q − k‖₁, 1/√d": adder,
        "−‖q − k‖₁, variance-matched": adder / ADDER_VARIANCE_PER_DIM,
    }
    _style.draw_lines(axis, _HEAD_DIMS, series, markersize=5, fillstyle="none")
    for level in (1.0, ADDER_VARIANCE_PER_DIM):
        axis.axhline(level, color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.octaves(axis, _HEAD_DIMS)
    axis.set_ylim(0, 1.6)
    labels = {"xlabel": "head width d", "ylabel": "variance"}
    _style.dress(axis, **labels, title="scaled scores", legend_at="best")

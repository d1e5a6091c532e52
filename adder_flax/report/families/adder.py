"""Theorem 1, the variance of scores, sampled and on a model's own queries and keys; Proposition 1,
what adding the identity map does to the singular values of a map.
"""

import functools
from typing import Any

import numpy as np

from adder_flax.measures import variance
from adder_flax.measures.spectrum import IdentityEffect
from adder_flax.measures.variance import ADDER_VARIANCE_PER_DIM, predicted_variance
from adder_flax.report import _style
from adder_flax.report._families import ADDER, only_when, register_claims, spread
from adder_flax.report._study import NOT_MEASURED, TOLERANCE, Claim, Findings, Picture, Study

_HEAD_DIMS = (4, 8, 16, 32, 64, 128)
_SYMBOLS = {"dot": "q·k", "adder": "−‖q − k‖₁"}
# Sampled variances may be this many standard errors off: 3 would fail one of a dozen estimates too
# often.
_STANDARD_ERRORS = 4.0
_Estimates = dict[str, list[variance.VarianceEstimate]]


@register_claims("theorem-1", ADDER)
def judge_theorem_1(study: Study) -> Findings:
    """Variances of unit-normal scores against the formula, and of the subject's own scores."""
    estimates = {score: variance.monte_carlo_variance(score, _HEAD_DIMS) for score in _SYMBOLS}
    live = {
        index: variance.live_variance(block.query, block.key, block.score)
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


def _live_claim(study: Study, live: list[variance.LiveVariance]) -> Claim:
    claim = functools.partial(
        ADDER.claim,
        "theorem-1-live",
        "A.2 (assumption)",
        "The model's own queries and keys are unit-normal enough for Theorem 1 to give their score "
        "variance.",
    )
    if not live:
        scores = ", ".join(sorted(set(study.subject.scores)))
        finding = f"Scores with learned parameters ({scores}) have no formula."
        return claim(NOT_MEASURED, finding=finding)
    ratios = [entry.measured / entry.predicted for entry in live]
    rescaled = [entry.measured / entry.rescaled for entry in live]
    near = lambda values: all(abs(value - 1) < TOLERANCE for value in values)
    of = lambda name: spread([getattr(entry, name) for entry in live])
    return claim(
        near(ratios) or (near(rescaled) and only_when("the variance of the components is put in")),
        f"{spread(ratios)} × predicted",
        f"Measured over predicted variance by block: {spread(ratios)}; with the measured component "
        f"variances put in {spread(rescaled)}. Root mean square of q: {of('query_rms')}, "
        f"correlation of a token's q with its k: {of('component_correlation')}, excess kurtosis: "
        f"{of('excess_kurtosis')}.",
        "theorem-1",
    )


def _theorem_picture(estimates: _Estimates, live: dict[int, variance.LiveVariance]) -> Picture:
    figure, [[raw, scaled]] = _style.new_figure(9.0, 3.9, 1, 2)
    _draw_raw_variance(raw, estimates, list(live.values()))
    dot, adder = (
        np.array([each.variance / each.head_dim for each in estimates[score]]) for score in _SYMBOLS
    )
    series = {
        "q·k, 1/√d": dot,
        "−‖q − k‖₁, 1/√d": adder,
        "−‖q − k‖₁, variance-matched": adder / ADDER_VARIANCE_PER_DIM,
    }
    _style.draw_lines(scaled, _HEAD_DIMS, series, markersize=5, fillstyle="none")
    for level in (1.0, ADDER_VARIANCE_PER_DIM):
        scaled.axhline(level, color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.octaves(scaled, _HEAD_DIMS)
    scaled.set_ylim(0, 1.6)
    _style.dress(scaled, "head width d", "variance", "scaled scores", legend_at="best")
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


def _draw_raw_variance(axis, estimates: _Estimates, live: list[variance.LiveVariance]) -> None:
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
    _style.dress(axis, "head width d", "variance", "raw scores", legend_at="best")


@register_claims("proposition-1", ADDER)
def judge_proposition_1(study: Study) -> Findings:
    """Spectra of the subject's maps with and without the identity, and against the baseline's."""
    effects = study.subject.effects
    claims = [*_proposition_claims(_merge(effects)), _rank_claim(study)]
    return Findings(
        claims, [_spectrum_picture(study), _ratio_picture(study), _rank_picture(effects)]
    )


def _merge(effects: list[IdentityEffect]) -> IdentityEffect:
    """The effects of all blocks as one batch."""
    stacked = {name: np.stack([getattr(e, name) for e in effects]) for name in vars(effects[0])}
    return IdentityEffect(**stacked | {"g": effects[0].g})


def _share(condition: Any) -> str:
    return f"{'all' if condition.all() else f'{condition.mean():.1%} of'} {condition.size} maps"


def _proposition_claims(effect: IdentityEffect) -> list[Claim]:
    exact, symmetric = effect.deviation < 0.01, effect.asymmetry < 0.05
    sometimes = exact.any() and only_when("the map is symmetric and positive semidefinite")
    rises, bends = np.diff(effect.f, axis=-1), np.diff(effect.f, n=2, axis=-1)
    shaped = (rises.min(-1) >= -1e-9) & (bends.max(-1, initial=0) <= 1e-9)
    slower = effect.ratio.min(-1) >= 1 - 1e-9
    closer = (effect.difference - effect.difference_identity).min(-1) >= -1e-9
    ranks = effect.rank_identity >= effect.rank
    return [
        ADDER.claim(
            "maps-symmetric",
            "A.3 (assumption)",
            "Attention maps are symmetric.",
            symmetric.all(),
            f"asymmetry {spread(effect.asymmetry)}",
            f"‖A − Aᵀ‖ / ‖A‖ is {spread(effect.asymmetry)}; below 0.05 in {_share(symmetric)}.",
            "ranks",
        ),
        ADDER.claim(
            "proposition-1-shift",
            "Proposition 1, equation 5",
            "Adding the identity raises every singular value by 1.",
            exact.all() or sometimes,
            f"max |σ̃ − σ − 1| = {spread(effect.deviation)}",
            f"max |σ̃ − σ − 1| is {spread(effect.deviation)}; below 0.01 in {_share(exact)}. The "
            f"lowest eigenvalue of the symmetric part is {spread(effect.lowest_eigenvalue)}; the "
            "proof needs it to be at least 0.",
            "ranks",
        ),
        ADDER.claim(
            "proposition-1-concave",
            "Proposition 1, assertion 1",
            "The cumulative curve f of the singular values is increasing and concave.",
            shaped.all(),
            f"{shaped.mean():.1%} of maps",
            f"True of {_share(shaped)}: singular values are sorted and not negative.",
            "spectrum",
        ),
        ADDER.claim(
            "proposition-1-ratio",
            "Proposition 1, equation 11",
            "The cumulative curve rises more slowly with the identity: R(r) = f(r) / f̃(r) ≥ 1 at "
            "every r.",
            slower.all(),
            f"R ≥ {effect.ratio.min():.3f}; R ≥ 1 in {slower.mean():.1%} of maps",
            f"True of {_share(slower)}; the smallest R is {effect.ratio.min():.4f}.",
            "ratio",
        ),
        ADDER.claim(
            "proposition-1-difference",
            "Proposition 1, equation 14",
            "The curve is closer to the straight line g(r) = r/N with the identity: D̃(r) ≤ D(r).",
            closer.all(),
            f"{closer.mean():.1%} of maps",
            f"True of {_share(closer)}; the largest D falls from "
            f"{spread(effect.difference.max(-1))} to {spread(effect.difference_identity.max(-1))}.",
            "ratio",
        ),
        ADDER.claim(
            "proposition-1-rank",
            "Proposition 1, assertion 3",
            "The equivalent rank (f = 0.9) does not fall when the identity is added.",
            ranks.all(),
            f"rank {np.median(effect.rank):.3g} → {np.median(effect.rank_identity):.3g}",
            f"True of {_share(ranks)}; the rank goes from {spread(effect.rank)} to "
            f"{spread(effect.rank_identity)} of {effect.f.shape[-1]}.",
            "ranks",
        ),
    ]


def _rank_claim(study: Study) -> Claim:
    statement = "Adder maps have a much lower rank than multiplicative ones."
    claim = functools.partial(ADDER.claim, "rank-lower", "A.3", statement)
    pair = study.adder_and_dot
    if pair is None:
        return claim(NOT_MEASURED, finding="Needs an adder model and a multiplicative baseline.")
    mean = lambda name: [np.mean([getattr(e, name) for e in each.effects]) for each in pair]
    (adder, dot), effective = mean("rank"), mean("effective_rank")
    margin = float((1 - TOLERANCE) * dot - adder)
    return claim(
        margin > 0,
        f"rank {adder:.2f} against {dot:.2f}",
        f"Mean rank at f = 0.9 (identity taken off): adder {adder:.2f}, multiplicative {dot:.2f}; "
        f"effective ranks {effective[0]:.2f} and {effective[1]:.2f}, of "
        f"{study.subject.maps[0].shape[-1]}.",
        "spectrum",
        margins=(margin,),
    )


def _draw_curve(axis, label: str, values: np.ndarray, line: dict) -> dict[str, np.ndarray]:
    """Draws mean and standard deviation over maps against the rank, and returns them."""
    flat = values.reshape(-1, values.shape[-1])
    ranks, mean, deviation = np.arange(1, flat.shape[-1] + 1), flat.mean(0), flat.std(0)
    axis.plot(ranks, mean, **{**line, "marker": None}, linewidth=1.6, label=label)
    band = dict(color=line["color"], alpha=0.15, linewidth=0)
    axis.fill_between(ranks, mean - deviation, mean + deviation, **band)
    return {f"{label}, mean": mean, f"{label}, std": deviation}


def _spectrum_picture(study: Study) -> Picture:
    chosen = study.subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(3.0 * len(chosen), 3.3, 1, len(chosen), sharey=True)
    g = study.subject.effects[0].g
    data: dict[str, np.ndarray] = {"r": np.arange(1, len(g) + 1), "g": g}
    for axis, index in zip(axes[0], chosen, strict=True):
        effect = study.subject.effects[index]
        curves = {"f, A": effect.f, "f̃, A + I": effect.f_identity}
        if study.baseline is not None and index < len(study.baseline.effects):
            curves[f"f, {study.baseline.name}"] = study.baseline.effects[index].f
        for line, (label, values) in zip(_style.LINES, curves.items(), strict=False):
            drawn = _draw_curve(axis, label, values, line)
            data |= {f"block {index + 1}, {name}": column for name, column in drawn.items()}
        axis.plot(data["r"], g, color=_style.GREY, linewidth=1, linestyle=":", label="g = r/N")
        axis.axhline(0.9, color=_style.GREY, linewidth=0.6)
        axis.set_ylim(0, 1.02)
        _style.whole_ticks(axis)
        label = "share of Σσ" if axis is axes[0, 0] else ""
        _style.dress(axis, "r", label, f"block {index + 1}")
    _style.legend(axes[0, 0], loc="lower right")
    return Picture(
        "spectrum",
        figure,
        "Normalised cumulative singular values of the maps without (A) and with (A + I) the "
        "identity, mean over images and heads with one standard deviation shaded; the straight "
        "line is g(r) = r/N, the thin line the level 0.9.",
        "Cumulative singular-value curves per block; the curve of A + I lies between that of A and "
        "the diagonal.",
        data,
    )


def _ratio_picture(study: Study) -> Picture:
    merged = _merge(study.subject.effects)
    panels = {
        "f(r), f̃(r)": {"A": merged.f, "A + I": merged.f_identity},
        "R(r) = f / f̃": {"A": merged.ratio},
        "D(r) = f − r/N": {"A": merged.difference, "A + I": merged.difference_identity},
    }
    if study.baseline is not None:
        other = _merge(study.baseline.effects)
        others = other.f, other.ratio, other.difference
        for curves, values in zip(panels.values(), others, strict=True):
            curves[study.baseline.name] = values
    labels = dict.fromkeys(label for curves in panels.values() for label in curves)
    lines = dict(zip(labels, _style.LINES, strict=False))
    figure, axes = _style.new_figure(9.6, 3.2, 1, 3)
    data: dict[str, np.ndarray] = {"r": np.arange(1, len(merged.g) + 1)}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, values in curves.items():
            drawn = _draw_curve(axis, label, values, lines[label])
            data |= {f"{title}, {name}": column for name, column in drawn.items()}
        _style.whole_ticks(axis)
        _style.dress(axis, xlabel="r", title=title)
    axes[0, 0].plot(data["r"], merged.g, ":", color=_style.GREY, linewidth=1, label="g = r/N")
    axes[0, 1].axhline(1.0, linewidth=0.8, color=_style.GREY, linestyle=":")
    _style.legend(axes[0, 0], loc="lower right")
    return Picture(
        "ratio",
        figure,
        "The curves of Proposition 1 over all blocks, images and heads, one standard deviation "
        "shaded: cumulative singular values, their ratio without and with the identity (the "
        "proposition has it at 1 or above), and their distance from the straight line (smaller "
        "with the identity).",
        "Mean cumulative singular-value curves, the ratio R and the differences D against the "
        "rank.",
        data,
    )


def _rank_picture(effects: list[IdentityEffect]) -> Picture:
    figure, [[left, right]] = _style.new_figure(8.4, 3.3, 1, 2)
    of = lambda name: [getattr(effect, name) for effect in effects]
    ranks = {
        "rank at 0.9, A": of("rank"),
        "rank at 0.9, A + I": of("rank_identity"),
        "effective rank, A": of("effective_rank"),
        "effective rank, A + I": of("effective_rank_identity"),
    }
    tests = {
        "asymmetry ‖A − Aᵀ‖ / ‖A‖": of("asymmetry"),
        "deviation max |σ̃ − σ − 1|": of("deviation"),
        "−lowest eigenvalue of (A + Aᵀ)/2": [-value for value in of("lowest_eigenvalue")],
    }
    data = _style.by_block(left, ranks) | _style.by_block(right, tests)
    for axis in (left, right):
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.4 * axis.get_ylim()[1])  # room for the legend
    _style.dress(left, "block", "rank", "ranks", legend_at="upper left")
    title = "what the proof assumes, and its error"
    _style.dress(right, "block", "size", title, legend_at="upper left")
    return Picture(
        "ranks",
        figure,
        "Left: ranks with and without the identity. Right: how far the maps are from symmetric, "
        "and how far the singular values of A + I are from σ + 1; bars are one standard deviation "
        "over images and heads.",
        "Ranks by block, with and without identity; asymmetry and deviation from the proposition "
        "by block.",
        data,
    )

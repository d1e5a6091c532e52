"""Proposition 1: what adding the identity map does to the singular values of a map."""

import functools
from typing import Any

import numpy as np

from adder_flax.measures.spectrum import IdentityEffect
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


@register_claims("proposition-1", ADDER)
def judge(study: Study) -> Findings:
    """Spectra of the subject's maps with and without the identity, and against the baseline's."""
    effects = study.subject.effects
    claims = [*_assumption_claims(_merge(effects)), *_curve_claims(_merge(effects))]
    pictures = [_spectrum_picture(study), _ratio_picture(study), _rank_picture(effects)]
    return Findings([*claims, _rank_claim(study)], pictures)


def _merge(effects: list[IdentityEffect]) -> IdentityEffect:
    """The effects of all blocks as one batch."""
    stacked = {name: np.stack([getattr(e, name) for e in effects]) for name in vars(effects[0])}
    return IdentityEffect(**stacked | {"g": effects[0].g})


def _share(condition: Any) -> str:
    return f"{'all' if condition.all() else f'{condition.mean():.1%} of'} {condition.size} maps"


def _assumption_claims(effect: IdentityEffect) -> list[Claim]:
    exact, symmetric = effect.deviation < 0.01, effect.asymmetry < 0.05
    sometimes = exact.any() and only_when("the map is symmetric and positive semidefinite")
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
    ]


def _curve_claims(effect: IdentityEffect) -> list[Claim]:
    rises, bends = np.diff(effect.f, axis=-1), np.diff(effect.f, n=2, axis=-1)
    shaped = (rises.min(-1) >= -1e-9) & (bends.max(-1, initial=0) <= 1e-9)
    slower = effect.ratio.min(-1) >= 1 - 1e-9
    closer = (effect.difference - effect.difference_identity).min(-1) >= -1e-9
    ranks = effect.rank_identity >= effect.rank
    return [
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
        _style.dress(axis, xlabel="r", ylabel=label, title=f"block {index + 1}")
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
    """f, R and D averaged over all blocks, images and heads."""
    merged = _merge(study.subject.effects)
    panels = {
        "f(r), f̃(r)": {"A": merged.f, "A + I": merged.f_identity},
        "R(r) = f / f̃": {"A": merged.ratio},
        "D(r) = f − r/N": {"A": merged.difference, "A + I": merged.difference_identity},
    }
    if study.baseline is not None:
        other, name = _merge(study.baseline.effects), study.baseline.name
        others = other.f, other.ratio, other.difference
        for curves, values in zip(panels.values(), others, strict=True):
            curves[name] = values
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
    dotted = dict(color=_style.GREY, linestyle=":")
    axes[0, 0].plot(data["r"], merged.g, linewidth=1, label="g = r/N", **dotted)
    axes[0, 1].axhline(1.0, linewidth=0.8, **dotted)
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
    figure, axes = _style.new_figure(8.4, 3.3, 1, 2)
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
    data: dict[str, np.ndarray] = {}
    for axis, group in zip(axes[0], (ranks, tests), strict=True):
        data |= _style.by_block(axis, group)
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.4 * axis.get_ylim()[1])  # room for the legend
    titles = {"rank": "ranks", "size": "what the proof assumes, and its error"}
    for axis, (label, title) in zip(axes[0], titles.items(), strict=True):
        _style.dress(axis, xlabel="block", ylabel=label, title=title, legend_at="upper left")
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

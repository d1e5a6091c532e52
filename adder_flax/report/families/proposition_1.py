"""Proposition 1: what adding the identity map does to the singular values of a map."""

import numpy as np

from adder_flax.measures.spectrum import IdentityEffect
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


@register_claims("proposition-1", ADDER)
def judge(study: Study) -> Findings:
    """Spectra of the subject's maps with and without the identity, and against the baseline's."""
    effects = study.subject.effects
    return Findings(
        claims=[*_proposition_claims(_merge(effects)), _rank_claim(study)],
        pictures=[_spectrum_picture(study), _ratio_picture(study), _rank_picture(effects)],
    )


def _merge(effects: list[IdentityEffect]) -> IdentityEffect:
    """The effects of all blocks as one batch."""
    fields = {
        name: np.stack([getattr(effect, name) for effect in effects]) for name in vars(effects[0])
    }
    return IdentityEffect(**{**fields, "g": effects[0].g})


def _proposition_claims(effect: IdentityEffect) -> list[Claim]:
    source = f"{_SOURCE}, Proposition 1"
    exact, symmetric = effect.deviation < 0.01, effect.asymmetry < 0.05
    shift = HOLDS if exact.all() else DOES_NOT_HOLD
    if exact.any() and not exact.all():
        shift = only_when("the map is symmetric and positive semidefinite")
    slower = effect.ratio.min(-1) >= 1 - 1e-9
    closer = (effect.difference - effect.difference_identity).min(-1) >= -1e-9
    ranks = effect.rank_identity >= effect.rank
    share = lambda condition: (
        f"all {condition.size} maps"
        if condition.all()
        else f"{condition.mean():.1%} of {condition.size} maps"
    )
    every = lambda condition: HOLDS if condition.all() else DOES_NOT_HOLD
    return [
        Claim(
            "maps-symmetric",
            f"{_SOURCE}, A.3 (assumption)",
            "Attention maps are symmetric.",
            every(symmetric),
            f"asymmetry {spread(effect.asymmetry)}",
            f"‖A − Aᵀ‖ / ‖A‖ is {spread(effect.asymmetry)}; below 0.05 in {share(symmetric)}.",
            "ranks",
        ),
        Claim(
            "proposition-1-shift",
            f"{source}, equation 5",
            "Adding the identity raises every singular value by 1.",
            shift,
            f"max |σ̃ − σ − 1| = {spread(effect.deviation)}",
            f"max |σ̃ − σ − 1| is {spread(effect.deviation)}; below 0.01 in {share(exact)}. The "
            f"lowest eigenvalue of the symmetric part is {spread(effect.lowest_eigenvalue)}; the "
            "proof needs it to be at least 0.",
            "ranks",
        ),
        Claim(
            "proposition-1-ratio",
            f"{source}, equation 11",
            "The cumulative curve rises more slowly with the identity: R(r) = f(r) / f̃(r) ≥ 1 at "
            "every r.",
            every(slower),
            f"R ≥ {effect.ratio.min():.3f}; R ≥ 1 in {slower.mean():.1%} of maps",
            f"True of {share(slower)}; the smallest R is {effect.ratio.min():.4f}.",
            "ratio",
        ),
        Claim(
            "proposition-1-difference",
            f"{source}, equation 14",
            "The curve is closer to the straight line g(r) = r/N with the identity: D̃(r) ≤ D(r).",
            every(closer),
            f"{closer.mean():.1%} of maps",
            f"True of {share(closer)}; the largest D falls from "
            f"{spread(effect.difference.max(-1))} to {spread(effect.difference_identity.max(-1))}.",
            "ratio",
        ),
        Claim(
            "proposition-1-rank",
            f"{source}, assertion 3",
            "The equivalent rank (f = 0.9) does not fall when the identity is added.",
            every(ranks),
            f"rank {np.median(effect.rank):.3g} → {np.median(effect.rank_identity):.3g}",
            f"True of {share(ranks)}; the rank goes from {spread(effect.rank)} to "
            f"{spread(effect.rank_identity)} of {effect.f.shape[-1]}.",
            "ranks",
        ),
    ]


def _rank_claim(study: Study) -> Claim:
    name, source = "rank-lower", f"{_SOURCE}, A.3"
    statement = "Adder maps have a much lower rank than multiplicative ones."
    pair = study.adder_and_dot
    if pair is None:
        return Claim(
            name,
            source,
            statement,
            NOT_MEASURED,
            "",
            "Needs an adder model and a multiplicative baseline.",
        )
    adder, dot = (np.mean([effect.rank for effect in subject.effects]) for subject in pair)
    effective = [np.mean([effect.effective_rank for effect in subject.effects]) for subject in pair]
    lower = adder < (1 - TOLERANCE) * dot
    return Claim(
        name,
        source,
        statement,
        HOLDS if lower else DOES_NOT_HOLD,
        f"rank {adder:.2f} against {dot:.2f}",
        f"Mean rank at f = 0.9 (identity taken off): adder {adder:.2f}, multiplicative {dot:.2f}; "
        f"effective ranks {effective[0]:.2f} and {effective[1]:.2f}, of "
        f"{study.subject.maps[0].shape[-1]}.",
        "spectrum",
        margins=(float((1 - TOLERANCE) * dot - adder),),
    )


def _curve(
    axis, ranks: np.ndarray, curves: np.ndarray, line: dict, label: str, fill: bool = True
) -> None:
    mean, deviation = curves.mean(0), curves.std(0)
    axis.plot(ranks, mean, **{**line, "marker": None}, linewidth=1.6, label=label)
    if fill:
        axis.fill_between(
            ranks, mean - deviation, mean + deviation, color=line["color"], alpha=0.15, linewidth=0
        )


def _spectrum_picture(study: Study) -> Picture:
    chosen = study.subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(3.0 * len(chosen), 3.3, 1, len(chosen), sharey=True)
    size = len(study.subject.effects[0].g)
    ranks = np.arange(1, size + 1)
    data: dict[str, np.ndarray] = {"r": ranks, "g": study.subject.effects[0].g}
    for axis, index in zip(axes[0], chosen, strict=True):
        effect = study.subject.effects[index]
        curves = {"f, A": effect.f, "f̃, A + I": effect.f_identity}
        if study.baseline is not None and index < len(study.baseline.effects):
            curves[f"f, {study.baseline.name}"] = study.baseline.effects[index].f
        for line, (label, values) in zip(_style.LINES, curves.items(), strict=False):
            _curve(axis, ranks, values.reshape(-1, values.shape[-1]), line, label)
            data[f"block {index + 1}, {label}, mean"] = values.reshape(-1, values.shape[-1]).mean(0)
            data[f"block {index + 1}, {label}, std"] = values.reshape(-1, values.shape[-1]).std(0)
        axis.plot(ranks, effect.g, color=_style.GREY, linewidth=1, linestyle=":", label="g = r/N")
        axis.axhline(0.9, color=_style.GREY, linewidth=0.6)
        axis.set_ylim(0, 1.02)
        _style.whole_ticks(axis)
        _style.dress(
            axis,
            xlabel="r",
            ylabel="share of Σσ" if axis is axes[0, 0] else "",
            title=f"block {index + 1}",
        )
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
    flat = lambda values: values.reshape(-1, values.shape[-1])
    panels = {
        "f(r), f̃(r)": {"A": merged.f, "A + I": merged.f_identity},
        "R(r) = f / f̃": {"A": merged.ratio},
        "D(r) = f − r/N": {"A": merged.difference, "A + I": merged.difference_identity},
    }
    if study.baseline is not None:
        other = _merge(study.baseline.effects)
        panels["f(r), f̃(r)"][study.baseline.name] = other.f
        panels["R(r) = f / f̃"][study.baseline.name] = other.ratio
        panels["D(r) = f − r/N"][study.baseline.name] = other.difference
    lines = dict(
        zip(
            dict.fromkeys(label for panel in panels.values() for label in panel),
            _style.LINES,
            strict=False,
        )
    )
    ranks = np.arange(1, merged.f.shape[-1] + 1)
    figure, axes = _style.new_figure(9.6, 3.2, 1, 3)
    data: dict[str, np.ndarray] = {"r": ranks}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, values in curves.items():
            _curve(axis, np.arange(1, values.shape[-1] + 1), flat(values), lines[label], label)
            data |= {
                f"{title}, {label}, mean": flat(values).mean(0),
                f"{title}, {label}, std": flat(values).std(0),
            }
        _style.whole_ticks(axis)
        _style.dress(axis, xlabel="r", title=title)
    axes[0, 0].plot(ranks, merged.g, color=_style.GREY, linewidth=1, linestyle=":", label="g = r/N")
    axes[0, 1].axhline(1.0, color=_style.GREY, linewidth=0.8, linestyle=":")
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
    blocks = np.arange(1, len(effects) + 1)
    series = {
        "rank at 0.9, A": [effect.rank for effect in effects],
        "rank at 0.9, A + I": [effect.rank_identity for effect in effects],
        "effective rank, A": [effect.effective_rank for effect in effects],
        "effective rank, A + I": [effect.effective_rank_identity for effect in effects],
    }
    tests = {
        "asymmetry ‖A − Aᵀ‖ / ‖A‖": [effect.asymmetry for effect in effects],
        "deviation max |σ̃ − σ − 1|": [effect.deviation for effect in effects],
        "−lowest eigenvalue of (A + Aᵀ)/2": [-effect.lowest_eigenvalue for effect in effects],
    }
    data: dict[str, np.ndarray] = {"block": blocks}
    for axis, group in zip(axes[0], (series, tests), strict=True):
        for line, (label, values) in zip(_style.LINES, group.items(), strict=False):
            flat = np.stack([np.ravel(value) for value in values])
            axis.errorbar(
                blocks,
                flat.mean(1),
                yerr=flat.std(1),
                **line,
                markersize=4,
                linewidth=1.3,
                capsize=2,
                label=label,
            )
            data[f"{label}, mean"], data[f"{label}, std"] = flat.mean(1), flat.std(1)
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.4 * axis.get_ylim()[1])  # room for the legend
        _style.whole_ticks(axis)
        _style.legend(axis, loc="upper left")
    _style.dress(axes[0, 0], xlabel="block", ylabel="rank", title="ranks")
    _style.dress(
        axes[0, 1], xlabel="block", ylabel="size", title="what the proof assumes, and its error"
    )
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

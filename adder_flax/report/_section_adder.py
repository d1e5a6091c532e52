"""Report, part 1: Theorem 1, Proposition 1 and the attention maps of the adder attention paper's appendix."""

import numpy as np

from adder_flax.measures.maps import entropy, mean_distance, patch_attention
from adder_flax.measures.spectrum import IdentityEffect
from adder_flax.measures.variance import (
    ADDER_VARIANCE_PER_DIM,
    LiveVariance,
    VarianceEstimate,
    live_variance,
    monte_carlo_variance,
    predicted_variance,
)
from adder_flax.report import _style
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_MEASURED,
    Claim,
    Picture,
    Section,
    Study,
    only_when,
    spread,
)
from adder_flax.report.figures import attention_figure, comparison_figure

_SOURCE = "Adder attention, appendix"
_HEAD_DIMS = (4, 8, 16, 32, 64, 128)
# Sampled variances may be this many standard errors off: 3 would fail one of a dozen estimates too often.
_STANDARD_ERRORS = 4.0
# Below this share of its size a difference between two numbers of a model is not worth a "does not hold".
_TOLERANCE = 0.1


def adder_section(study: Study) -> Section:
    """Claims and figures of the appendix, measured on the subject and, where given, the baseline."""
    estimates = {score: monte_carlo_variance(score, _HEAD_DIMS) for score in ("dot", "adder")}
    live = _live(study)
    effects = study.subject.effects
    merged = _merge(effects)
    claims = [
        *_theorem_claims(estimates),
        _live_claim(study, live),
        *_proposition_claims(merged),
        _rank_claim(study),
        _global_claim(study),
    ]
    pictures = [
        _theorem_picture(estimates, live),
        _spectrum_picture(study),
        _ratio_picture(study),
        _rank_picture(effects),
        _map_picture(study),
        *_attention_pictures(study),
    ]
    return Section(
        title="Adder attention",
        introduction=(
            "Theorem 1 (the variance of the scores), Proposition 1 (what adding the identity map does to the "
            "singular values) and the maps themselves. The identity, where the model adds it, is taken off "
            "before anything is measured and put back where a figure says A + I."
        ),
        claims=claims,
        pictures=pictures,
    )


def _merge(effects: list[IdentityEffect]) -> IdentityEffect:
    """The effects of all blocks as one batch."""
    fields = {name: np.stack([getattr(effect, name) for effect in effects]) for name in vars(effects[0])}
    return IdentityEffect(**{**fields, "g": effects[0].g})


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
            abs(estimate.variance - predicted_variance(score, estimate.head_dim)) / estimate.standard_error
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
                f"Sampled at d = {_HEAD_DIMS[0]} … {_HEAD_DIMS[-1]}: within {max(errors):.1f} standard errors; at "
                f"d = {largest.head_dim} {largest.variance:.1f} against "
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
            HOLDS if max(left) - min(left) < _TOLERANCE * ADDER_VARIANCE_PER_DIM else DOES_NOT_HOLD,
            f"scaled variance {min(left):.3f} to {max(left):.3f}",
            f"The scaled variance is {min(left):.3f} to {max(left):.3f} at every d: constant, but not 1; the "
            "dot product's is 1. The variance-matched scale 1/√(0.727 d) gives "
            f"{np.mean(left) / ADDER_VARIANCE_PER_DIM:.3f}.",
            "theorem-1",
        )
    )
    return claims


def _live_claim(study: Study, live: dict[int, LiveVariance]) -> Claim:
    statement = "The model's own queries and keys are unit-normal enough for Theorem 1 to give their score variance."
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
    near = lambda values: all(abs(value - 1) < _TOLERANCE for value in values)
    verdict = HOLDS if near(ratios) else DOES_NOT_HOLD
    if not near(ratios) and near(rescaled):
        verdict = only_when("the variance of the components is put in")
    return Claim(
        "theorem-1-live",
        source,
        statement,
        verdict,
        f"{spread(ratios)} × predicted",
        f"Measured over predicted variance by block: {spread(ratios)}; with the measured component variances put in "
        f"{spread(rescaled)}. Root mean square of q: {spread([entry.query_rms for entry in live.values()])}, "
        f"correlation of a token's q with its k: {spread([entry.component_correlation for entry in live.values()])}, "
        f"excess kurtosis: {spread([entry.excess_kurtosis for entry in live.values()])}.",
        "theorem-1",
    )


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
        f"all {condition.size} maps" if condition.all() else f"{condition.mean():.1%} of {condition.size} maps"
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
            f"max |σ̃ − σ − 1| is {spread(effect.deviation)}; below 0.01 in {share(exact)}. The lowest eigenvalue of "
            f"the symmetric part is {spread(effect.lowest_eigenvalue)}; the proof needs it to be at least 0.",
            "ranks",
        ),
        Claim(
            "proposition-1-ratio",
            f"{source}, equation 11",
            "The cumulative curve rises more slowly with the identity: R(r) = f(r) / f̃(r) ≥ 1 at every r.",
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
            f"True of {share(closer)}; the largest D falls from {spread(effect.difference.max(-1))} to "
            f"{spread(effect.difference_identity.max(-1))}.",
            "ratio",
        ),
        Claim(
            "proposition-1-rank",
            f"{source}, assertion 3",
            "The equivalent rank (f = 0.9) does not fall when the identity is added.",
            every(ranks),
            f"rank {np.median(effect.rank):.3g} → {np.median(effect.rank_identity):.3g}",
            f"True of {share(ranks)}; the rank goes from {spread(effect.rank)} to {spread(effect.rank_identity)} of "
            f"{effect.f.shape[-1]}.",
            "ranks",
        ),
    ]


def _rank_claim(study: Study) -> Claim:
    name, source = "rank-lower", f"{_SOURCE}, A.3"
    statement = "Adder maps have a much lower rank than multiplicative ones."
    pair = _adder_and_dot(study)
    if pair is None:
        return Claim(name, source, statement, NOT_MEASURED, "", "Needs an adder model and a multiplicative baseline.")
    adder, dot = (np.mean([effect.rank for effect in subject.effects]) for subject in pair)
    effective = [np.mean([effect.effective_rank for effect in subject.effects]) for subject in pair]
    lower = adder < (1 - _TOLERANCE) * dot
    return Claim(
        name,
        source,
        statement,
        HOLDS if lower else DOES_NOT_HOLD,
        f"rank {adder:.2f} against {dot:.2f}",
        f"Mean rank at f = 0.9 (identity taken off): adder {adder:.2f}, multiplicative {dot:.2f}; effective ranks "
        f"{effective[0]:.2f} and {effective[1]:.2f}, of {study.subject.maps[0].shape[-1]}.",
        "spectrum",
    )


def _global_claim(study: Study) -> Claim:
    name, source = "adder-global", f"{_SOURCE}, A.4"
    statement = "Adder maps focus more on the global information than multiplicative ones."
    pair = _adder_and_dot(study)
    if pair is None:
        return Claim(name, source, statement, NOT_MEASURED, "", "Needs an adder model and a multiplicative baseline.")
    entropies = [np.mean([entropy(block).mean() for block in subject.maps]) for subject in pair]
    reach = [
        np.mean([mean_distance(block, study.grid, class_token=subject.class_token).mean() for block in subject.maps])
        for subject in pair
    ]
    wider = entropies[0] > entropies[1], reach[0] > reach[1]
    verdict = HOLDS if all(wider) else DOES_NOT_HOLD
    if any(wider) and not all(wider):
        verdict = only_when("entropy is meant" if wider[0] else "distance is meant")
    return Claim(
        name,
        source,
        statement,
        verdict,
        f"{entropies[0]:.2f} against {entropies[1]:.2f} nats; {reach[0]:.2f} against {reach[1]:.2f} patches",
        f"Mean entropy of the rows: adder {entropies[0]:.3f} nats, multiplicative {entropies[1]:.3f}; mean distance "
        f"that attention reaches: {reach[0]:.3f} and {reach[1]:.3f} patches.",
        "class-attention",
    )


def _adder_and_dot(study: Study):
    """(adder, multiplicative) among subject and baseline, or None."""
    if study.baseline is None:
        return None
    kinds = {frozenset(subject.scores): subject for subject in (study.subject, study.baseline)}
    adder, dot = kinds.get(frozenset({"adder"})), kinds.get(frozenset({"dot"}))
    return None if adder is None or dot is None else (adder, dot)


def _theorem_picture(estimates: dict[str, list[VarianceEstimate]], live: dict[int, LiveVariance]) -> Picture:
    figure, axes = _style.new_figure(9.0, 3.9, 1, 2)
    axis = axes[0, 0]
    for line, (score, symbol) in zip(_style.LINES, {"dot": "q·k", "adder": "−‖q − k‖₁"}.items(), strict=False):
        predicted = [predicted_variance(score, dim) for dim in _HEAD_DIMS]
        sampled, errors = zip(*((e.variance, 3 * e.standard_error) for e in estimates[score]), strict=True)
        axis.plot(_HEAD_DIMS, predicted, **{**line, "marker": None}, label=f"{symbol}, Theorem 1")
        marks = {**line, "linestyle": "none", "fillstyle": "none", "markersize": 5, "capsize": 3}
        axis.errorbar(_HEAD_DIMS, sampled, yerr=errors, **marks, label=f"{symbol}, sampled (3 s.e.)")
    if live:
        dims, measured = zip(*((entry.head_dim, entry.measured) for entry in live.values()), strict=True)
        axis.plot(dims, measured, color="#0072B2", marker="x", linestyle="none", label="this model, one × a block")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(_HEAD_DIMS, [str(dim) for dim in _HEAD_DIMS])
    _style.dress(axis, xlabel="head width d", ylabel="variance", title="raw scores")
    _style.legend(axis)
    _draw_scaled_variance(axes[0, 1], estimates)
    return Picture(
        "theorem-1",
        figure,
        "Variance of scores between unit-normal vectors against the head width. Left, raw scores: Theorem 1 as lines, "
        "samples as open marks, the model's own queries and keys as crosses. Right, after scaling: constant at every "
        "width, and 1 for the adder score only with the variance-matched scale.",
        "Variance of raw and of scaled scores against head width for dot product and L1 distance.",
        _theorem_data(estimates, live),
    )


def _draw_scaled_variance(axis, estimates: dict[str, list[VarianceEstimate]]) -> None:
    per_dim = {score: [e.variance / e.head_dim for e in sampled] for score, sampled in estimates.items()}
    series = {
        "q·k, 1/√d": per_dim["dot"],
        "−‖q − k‖₁, 1/√d": per_dim["adder"],
        "−‖q − k‖₁, variance-matched": np.array(per_dim["adder"]) / ADDER_VARIANCE_PER_DIM,
    }
    for line, (label, values) in zip(_style.LINES, series.items(), strict=False):
        axis.plot(_HEAD_DIMS, values, **line, markersize=5, linewidth=1.3, fillstyle="none", label=label)
    for level in (1.0, ADDER_VARIANCE_PER_DIM):
        axis.axhline(level, color=_style.GREY, linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(_HEAD_DIMS, [str(dim) for dim in _HEAD_DIMS])
    axis.set_ylim(0, 1.6)
    _style.dress(axis, xlabel="head width d", ylabel="variance", title="scaled scores")
    _style.legend(axis)


def _theorem_data(estimates: dict[str, list[VarianceEstimate]], live: dict[int, LiveVariance]) -> dict[str, list]:
    rows = [
        (score, "sampled", e.head_dim, e.variance, e.standard_error, predicted_variance(score, e.head_dim))
        for score, sampled in estimates.items()
        for e in sampled
    ]
    rows += [
        ("model", f"block {index + 1}", entry.head_dim, entry.measured, np.nan, entry.predicted)
        for index, entry in live.items()
    ]
    names = ("score", "source", "head_dim", "variance", "standard_error", "predicted")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _curve(axis, ranks: np.ndarray, curves: np.ndarray, line: dict, label: str, fill: bool = True) -> None:
    mean, deviation = curves.mean(0), curves.std(0)
    axis.plot(ranks, mean, **{**line, "marker": None}, linewidth=1.6, label=label)
    if fill:
        axis.fill_between(ranks, mean - deviation, mean + deviation, color=line["color"], alpha=0.15, linewidth=0)


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
        _style.dress(axis, xlabel="r", ylabel="share of Σσ" if axis is axes[0, 0] else "", title=f"block {index + 1}")
    _style.legend(axes[0, 0], loc="lower right")
    return Picture(
        "spectrum",
        figure,
        "Normalised cumulative singular values of the maps without (A) and with (A + I) the identity, mean "
        "over images and heads with one standard deviation shaded; the straight line is g(r) = r/N, the thin "
        "line the level 0.9.",
        "Cumulative singular-value curves per block; the curve of A + I lies between that of A and the diagonal.",
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
    lines = dict(zip(dict.fromkeys(label for panel in panels.values() for label in panel), _style.LINES, strict=False))
    ranks = np.arange(1, merged.f.shape[-1] + 1)
    figure, axes = _style.new_figure(9.6, 3.2, 1, 3)
    data: dict[str, np.ndarray] = {"r": ranks}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, values in curves.items():
            _curve(axis, np.arange(1, values.shape[-1] + 1), flat(values), lines[label], label)
            data |= {f"{title}, {label}, mean": flat(values).mean(0), f"{title}, {label}, std": flat(values).std(0)}
        _style.whole_ticks(axis)
        _style.dress(axis, xlabel="r", title=title)
    axes[0, 0].plot(ranks, merged.g, color=_style.GREY, linewidth=1, linestyle=":", label="g = r/N")
    axes[0, 1].axhline(1.0, color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.legend(axes[0, 0], loc="lower right")
    return Picture(
        "ratio",
        figure,
        "The curves of Proposition 1 over all blocks, images and heads, one standard deviation shaded: cumulative "
        "singular values, their ratio without and with the identity (the proposition has it at 1 or above), and their "
        "distance from the straight line (smaller with the identity).",
        "Mean cumulative singular-value curves, the ratio R and the differences D against the rank.",
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
                blocks, flat.mean(1), yerr=flat.std(1), **line, markersize=4, linewidth=1.3, capsize=2, label=label
            )
            data[f"{label}, mean"], data[f"{label}, std"] = flat.mean(1), flat.std(1)
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.4 * axis.get_ylim()[1])  # room for the legend
        _style.whole_ticks(axis)
        _style.legend(axis, loc="upper left")
    _style.dress(axes[0, 0], xlabel="block", ylabel="rank", title="ranks")
    _style.dress(axes[0, 1], xlabel="block", ylabel="size", title="what the proof assumes, and its error")
    return Picture(
        "ranks",
        figure,
        "Left: ranks with and without the identity. Right: how far the maps are from symmetric, and how far the "
        "singular values of A + I are from σ + 1; bars are one standard deviation over images and heads.",
        "Ranks by block, with and without identity; asymmetry and deviation from the proposition by block.",
        data,
    )


def _map_picture(study: Study) -> Picture:
    chosen = study.subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(2.9 * len(chosen), 3.1, 1, len(chosen))
    data = {}
    for axis, index in zip(axes[0], chosen, strict=True):
        matrix = study.subject.walks[index][0, 0]
        image = axis.imshow(matrix, cmap=_style.HEAT, vmin=0)
        figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
        _style.bare(axis, title=f"block {index + 1}, head 1", note="key →")
        axis.set_ylabel("← query", fontsize=8)
        data[f"block_{index + 1}_head_1"] = matrix
    return Picture(
        "maps",
        figure,
        "Whole attention maps of the first image (the paper's figure 2), identity taken off; brighter is more "
        "weight, each map with its own scale. A symmetric map would equal its mirror image in the falling "
        "diagonal.",
        "Attention maps as matrices for three blocks.",
        data,
    )


def _attention_pictures(study: Study) -> list[Picture]:
    """The paper's figure 3: of both models where there are two, else of the one with rollout beside it."""
    models = {subject.name: subject for subject in filter(None, (study.baseline, study.subject))}
    shown = min(4 if len(models) == 1 else 3, len(study.pictures))
    blocks = study.subject.blocks(3, 6, 10)
    options = dict(class_token=study.subject.class_token, captions=study.captions[:shown], with_rollout=True)
    maps = {name: [block[:shown] for block in subject.maps] for name, subject in models.items()}
    if len(models) == 1:
        [(name, only)] = maps.items()
        figure = attention_figure(study.pictures[:shown], only, blocks=blocks, title=name, **options)
    else:
        figure = comparison_figure(study.pictures[:shown], maps, blocks=blocks, **options)
    data = {
        f"{name}, block {index + 1}": patch_attention(subject.maps[index], class_token=subject.class_token)
        for name, subject in models.items()
        for index in subject.blocks(3, 6, 10)
    }
    caption = (
        f"Where {' (upper rows) and '.join(models)}{' (lower rows) look' if len(models) > 1 else ' looks'} from the "
        "class token (the paper's figure 3), mean of the heads, and the rollout through all blocks, in which the "
        "residual counts once and the identity map as the shortcut it is."
    )
    alt = "Test images with attention drawn over them for three blocks, and rollout, one row for each model."
    return [Picture("class-attention", figure, caption, alt, data)]

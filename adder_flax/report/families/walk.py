"""Maps as transition matrices of a walk on tokens."""

import numpy as np

from adder_flax.measures.walks import (
    diffusion_map,
    irreversibility,
    k_step,
    mixing_time,
    spectral_gap,
    stationary_distribution,
)
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import Claim, Findings, Picture, Study, Subject, only_when, spread

_STEPS = (1, 2, 4, 8)


def _steps_to_mix(walk: np.ndarray) -> np.ndarray:
    steps = mixing_time(walk)
    return np.where(steps < 0, np.inf, steps)


# {measure: (function, its unit)}
_MEASURES = {
    "spectral gap": (spectral_gap, "1 − |λ₂|"),
    "mixing time": (_steps_to_mix, "steps, ε = ¼"),
    "irreversibility": (irreversibility, "share of flow"),
}
_Numbers = dict[str, list[np.ndarray]]


@register_claims("walk", BROWNIAN)
def judge(study: Study) -> Findings:
    """Gaps, mixing times and reversibility of the subject's maps."""
    numbers = _numbers(study.subject)
    pictures = [_walk_picture(numbers), _steps_picture(study), _diffusion_picture(study)]
    return Findings(_walk_claims(study.subject, numbers), pictures)


def _numbers(subject: Subject) -> _Numbers:
    every = _MEASURES.items()
    return {name: [function(walk) for walk in subject.walks] for name, (function, _) in every}


def _walk_claims(subject: Subject, numbers: _Numbers) -> list[Claim]:
    every = lambda blocks: np.concatenate([np.ravel(values) for values in blocks])
    sums = every(block.sum(-1) for block in subject.maps)
    time, flow = every(numbers["mixing time"]), every(numbers["irreversibility"])
    adds = subject.adds_identity
    added = f"{sum(adds)} of {len(adds)} blocks add the identity map"
    median = np.median(time)
    mixes = f"mixes in {median:.3g} steps" if np.isfinite(median) else "does not mix"
    return [
        BROWNIAN.claim(
            "markov",
            "sections 2.2 and 3.2",
            "The attention map is the transition matrix of a Markov chain on the tokens.",
            np.abs(sums - 1).max() < 1e-2 or only_when("the identity map is taken off"),
            f"rows sum to {np.median(sums):.3g}; {mixes}",
            f"Rows of what multiplies the values sum to {spread(sums)}; {added}. The walk without "
            f"it mixes (ε = ¼) within {spread(time)} steps.",
            "walk",
        ),
        BROWNIAN.claim(
            "reversible",
            "section 2.3 (diffusion maps assume it)",
            "The walk is reversible, as one made from a symmetric kernel is.",
            flow.max() < 0.01,
            f"circular flow {spread(flow)}",
            f"The share of probability flow that goes round in circles is {spread(flow)}.",
            "walk",
        ),
    ]


def _walk_picture(numbers: _Numbers) -> Picture:
    figure, axes = _style.new_figure(8.8, 3.0, 1, 3)
    data: dict[str, np.ndarray] = {}
    for axis, (name, (_, unit)) in zip(axes[0], _MEASURES.items(), strict=True):
        data |= _style.by_block(axis, {name: numbers[name]})
        _style.dress(axis, xlabel="block", ylabel=unit, title=name)
        axis.set_ylim(bottom=0)
    return Picture(
        "walk",
        figure,
        "Every map as a Markov chain, identity taken off: how fast it forgets, in how many steps "
        "it mixes, and how much of its flow goes round in circles. Bars are one standard deviation "
        "over images and heads.",
        "Spectral gap, mixing time and irreversibility by block.",
        data,
    )


def _middle_walk(subject: Subject) -> tuple[int, np.ndarray]:
    """The middle block and its walk on the first image, mean of the heads."""
    index = len(subject.walks) // 2
    return index, subject.walks[index][0].mean(0)


def _steps_picture(study: Study) -> Picture:
    first, with_class = study.subject.prefix_tokens, study.subject.in_front["class_token"]
    index, walk = _middle_walk(study.subject)
    start, where = (0, "the class token") if with_class else (first, "the first patch")
    rows = {f"{steps} step" + "s" * (steps > 1): k_step(walk, steps)[start] for steps in _STEPS}
    rows["stationary"] = stationary_distribution(walk)
    figure, axes = _style.new_figure(1.75 * len(rows), 2.1, 1, len(rows))
    top = max(row[first:].max() for row in rows.values())
    for axis, (title, row) in zip(axes[0], rows.items(), strict=True):
        axis.imshow(row[first:].reshape(study.grid), cmap=_style.HEAT, vmin=0, vmax=top)
        _style.bare(axis, title=title, note=f"class token {row[0]:.1%}" if with_class else "")
    return Picture(
        "k-steps",
        figure,
        f"Where a walk that starts on {where} is after k steps of block {index + 1} (mean of the "
        "heads, first image), on one scale; at the end the stationary distribution.",
        "Distributions over patches after 1, 2, 4, 8 steps and in the limit.",
        {"k": np.array(_STEPS), "rows": np.stack(list(rows.values()))},
    )


def _diffusion_picture(study: Study) -> Picture:
    first, (index, walk) = study.subject.prefix_tokens, _middle_walk(study.subject)
    widths = [1.5] + [1] * len(_STEPS)
    size = 1.9 * len(widths) + 0.6, 2.5
    figure, axes = _style.new_figure(*size, 1, len(widths), width_ratios=widths)
    plane = diffusion_map(walk, steps=1, dims=2)[first:]
    _draw_plane(axes[0, 0], plane)
    rows, columns = study.grid
    x, y, distances = columns // 2, rows // 2, []
    for axis, steps in zip(axes[0, 1:], _STEPS, strict=True):
        coordinates = diffusion_map(walk, steps=steps, dims=len(walk) - 1)[first:]
        distance = np.linalg.norm(coordinates - coordinates[y * columns + x], axis=-1)
        distances.append(distance)
        axis.imshow(distance.reshape(study.grid), cmap=_style.HEAT, vmin=0)
        axis.plot(x, y, marker="+", color="white", markersize=9)
        _style.bare(axis, title=f"distance, k = {steps}", note=f"up to {distance.max():.2g}")
    return Picture(
        "diffusion",
        figure,
        f"Diffusion coordinates of the first image's patches in block {index + 1} (mean of the "
        "heads), numbered row by row; and the diffusion distance of every patch from the one "
        "marked +, after k steps, each on its own scale (brighter is farther).",
        "Scatter of patches in diffusion coordinates, and distance maps for k = 1, 2, 4, 8.",
        {"k": np.array(_STEPS), "coordinates": plane, "distances": np.stack(distances)},
    )


def _draw_plane(axis, plane: np.ndarray) -> None:
    place = np.arange(len(plane))
    axis.scatter(*plane.T, c=place, cmap="viridis", s=70, edgecolors="black", linewidths=0.5)
    for number, point in zip(place, plane, strict=True):
        color = "white" if number < len(place) / 2 else "black"  # viridis runs from dark to light
        axis.annotate(str(number), point, fontsize=5.5, ha="center", va="center", color=color)
    axis.locator_params(nbins=4)
    _style.dress(axis, xlabel="ψ₁ λ₁", ylabel="ψ₂ λ₂", title="k = 1")

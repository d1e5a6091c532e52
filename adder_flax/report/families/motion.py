"""Whether tokens move through the blocks like Brownian particles."""

from typing import NamedTuple

import numpy as np

from adder_flax.measures.brownian import BrownianTest, brownian_test
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import (
    NOT_MEASURED,
    Claim,
    Findings,
    Picture,
    Study,
    only_when,
    spread,
)


class _Property(NamedTuple):
    """What Brownian motion has; of a path too short to tell ``found`` is None."""

    name: str
    statement: str
    found: bool | None
    number: str
    finding: str


def _properties(test: BrownianTest) -> list[_Property]:
    """Within bounds each of which is far outside what sampling of the tokens could give."""
    exponent, cosine, drift = test.growth_exponent, test.mean_correlation, test.shared_drift
    kurtosis, several = spread(test.excess_kurtosis), len(test.displacement) > 1
    return [
        _Property(
            "brownian-growth",
            "The squared distance of tokens from their start grows in proportion to depth, as for "
            "Brownian motion.",
            0.8 <= exponent <= 1.2 if several else None,
            f"depth^{exponent:.2f}",
            f"‖X_l − X_0‖² grows like depth^{exponent:.2f}; 1 is Brownian, 2 a straight line.",
        ),
        _Property(
            "brownian-independent",
            "The updates of different blocks are independent of each other.",
            abs(cosine) < 0.1 if several else None,
            f"mean cosine {cosine:.3f}",
            f"Their mean cosine is {cosine:.3f}.",
        ),
        _Property(
            "brownian-normal",
            "The updates are normally distributed.",
            bool(np.abs(test.excess_kurtosis).max() < 0.5),
            f"excess kurtosis {kurtosis}",
            f"Excess kurtosis of a component's update, by block: {kurtosis}.",
        ),
        _Property(
            "brownian-centred",
            "The updates have mean zero.",
            drift < 0.1,
            f"shared {drift:.1%}",
            f"{drift:.1%} of their energy is one vector common to all tokens and images.",
        ),
    ]


@register_claims("motion", BROWNIAN)
def judge(study: Study) -> Findings:
    """Growth, correlation, kurtosis and drift of the paths, before and after training."""
    tests = {"trained": brownian_test(study.subject.captured.path)}
    if study.untrained is not None:
        tests["untrained"] = brownian_test(study.untrained.captured.path)
    return Findings(_claims(tests), [_motion_picture(tests)])


def _claims(tests: dict[str, BrownianTest]) -> list[Claim]:
    claims, every = [], {name: _properties(test) for name, test in tests.items()}
    for number, trained in enumerate(every["trained"]):
        finding, untrained = trained.finding, False
        if "untrained" in every:
            before = every["untrained"][number]
            finding += f" Before training: {before.finding}"
            untrained = before.found and only_when("the network is untrained")
        measured = trained.found is not None
        claim = BROWNIAN.claim(
            trained.name,
            "sections 2.4 and 3.2",
            trained.statement,
            trained.found or untrained or False if measured else NOT_MEASURED,
            trained.number if measured else "",
            finding if measured else "Needs 2 blocks or more.",
            "motion",
        )
        claims.append(claim)
    of, count = len(claims), {name: sum(p.found or 0 for p in of) for name, of in every.items()}
    found = ", ".join(f"{number} of {of} properties {name}" for name, number in count.items())
    whole = BROWNIAN.claim(
        "brownian",
        "abstract",
        "The update of the tokens is a Brownian motion.",
        count["trained"] == of
        or (all(p.found is not False for p in every["trained"]) and NOT_MEASURED),
        f"{count['trained']} of {of} properties",
        f"Found: {found}; they are growth, independence, normality and mean zero.",
        "motion",
    )
    return [*claims, whole]


def _motion_picture(tests: dict[str, BrownianTest]) -> Picture:
    figure, axes = _style.new_figure(9.6, 3.2, 1, 3)
    distance, cosines, normality = axes[0]
    trained = tests["trained"]
    depth = np.arange(1, len(trained.displacement) + 1)
    exponents = {name: f"{name}, depth^{test.growth_exponent:.2f}" for name, test in tests.items()}
    displacement = {exponents[name]: test.displacement for name, test in tests.items()}
    _style.draw_lines(distance, depth, displacement)
    for exponent, style in ((1, ":"), (2, "--")):
        slope, label = trained.displacement[0] * depth**exponent, f"depth^{exponent}"
        distance.plot(depth, slope, color=_style.GREY, linestyle=style, linewidth=1, label=label)
    _style.octaves(distance, [2**power for power in range(int(np.log2(depth[-1])) + 1)])
    distance.set_yscale("log")
    labels = {"ylabel": "mean ‖X_l − X_0‖² / d", "title": "distance from the start"}
    _style.dress(distance, xlabel="block", **labels, legend_at="best")
    extent = (0.5, len(depth) + 0.5, len(depth) + 0.5, 0.5)
    correlation = trained.increment_correlation
    image = cosines.imshow(correlation, cmap="gray", vmin=-1, vmax=1, extent=extent)
    figure.colorbar(image, ax=cosines, shrink=0.85).ax.tick_params(labelsize=7)
    _style.dress(cosines, xlabel="block", ylabel="block", title="cosine of updates").grid(False)
    kurtosis = {name: test.excess_kurtosis for name, test in tests.items()}
    _style.draw_lines(normality, depth, kurtosis)
    _style.whole_ticks(normality)
    normality.axhline(0, color=_style.GREY, linewidth=0.8)
    labels = {"ylabel": "excess kurtosis", "title": "normality of updates"}
    _style.dress(normality, xlabel="block", **labels, legend_at="best")
    data: dict[str, np.ndarray] = {"block": depth}
    for name, test in tests.items():
        data[f"displacement, {name}"] = test.displacement
        data[f"excess kurtosis, {name}"] = test.excess_kurtosis
    return Picture(
        "motion",
        figure,
        "How tokens move through the blocks: distance from the start with the slopes of Brownian "
        "(1) and straight (2) motion; cosines between the updates of different blocks (grey is 0, "
        "white 1); excess kurtosis of the updates (normal is 0).",
        "Displacement, correlation matrix and kurtosis of token updates by block.",
        data,
    )

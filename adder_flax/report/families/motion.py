"""Whether tokens move through the blocks like Brownian particles."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adder_flax.measures.brownian import BrownianTest, brownian_test
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import Claim, Findings, Picture, Study, only_when, spread


class _Property(NamedTuple):
    """What Brownian motion has: whether a path has it, and its numbers, short and in a sentence."""

    name: str
    statement: str
    found: Callable[[BrownianTest], bool]
    number: Callable[[BrownianTest], str]
    finding: Callable[[BrownianTest], str]


# A path counts as Brownian within these bounds; each is far outside what sampling of the tokens
# could give.
_PROPERTIES = (
    _Property(
        "brownian-growth",
        "The squared distance of tokens from their start grows in proportion to depth, as for "
        "Brownian motion.",
        lambda test: 0.8 <= test.growth_exponent <= 1.2,
        lambda test: f"depth^{test.growth_exponent:.2f}",
        lambda test: (
            f"‖X_l − X_0‖² grows like depth^{test.growth_exponent:.2f}; 1 is Brownian, 2 a "
            "straight line."
        ),
    ),
    _Property(
        "brownian-independent",
        "The updates of different blocks are independent of each other.",
        lambda test: abs(test.mean_correlation) < 0.1,
        lambda test: f"mean cosine {test.mean_correlation:.3f}",
        lambda test: f"Their mean cosine is {test.mean_correlation:.3f}.",
    ),
    _Property(
        "brownian-normal",
        "The updates are normally distributed.",
        lambda test: np.abs(test.excess_kurtosis).max() < 0.5,
        lambda test: f"excess kurtosis {spread(test.excess_kurtosis)}",
        lambda test: (
            f"Excess kurtosis of a component's update, by block: {spread(test.excess_kurtosis)}."
        ),
    ),
    _Property(
        "brownian-centred",
        "The updates have mean zero.",
        lambda test: test.shared_drift < 0.1,
        lambda test: f"shared {test.shared_drift:.1%}",
        lambda test: (
            f"{test.shared_drift:.1%} of their energy is one vector common to all tokens and "
            "images."
        ),
    ),
)


@register_claims("motion", BROWNIAN)
def judge(study: Study) -> Findings:
    """Growth, correlation, kurtosis and drift of the paths, before and after training."""
    tests = {"trained": brownian_test(study.subject.captured.path)}
    if study.untrained is not None:
        tests["untrained"] = brownian_test(study.untrained.captured.path)
    claims = [_property_claim(tests, each) for each in _PROPERTIES]
    return Findings([*claims, _whole_claim(tests)], [_motion_picture(tests)])


def _property_claim(tests: dict[str, BrownianTest], wanted: _Property) -> Claim:
    trained, before = tests["trained"], tests.get("untrained")
    finding, untrained = wanted.finding(trained), before is not None and wanted.found(before)
    if before is not None:
        finding += f" Before training: {wanted.finding(before)}"
    return BROWNIAN.claim(
        wanted.name,
        "sections 2.4 and 3.2",
        wanted.statement,
        wanted.found(trained) or untrained and only_when("the network is untrained"),
        wanted.number(trained),
        finding,
        "motion",
    )


def _whole_claim(tests: dict[str, BrownianTest]) -> Claim:
    every = len(_PROPERTIES)
    count = {name: sum(each.found(test) for each in _PROPERTIES) for name, test in tests.items()}
    found = ", ".join(f"{number} of {every} properties {name}" for name, number in count.items())
    return BROWNIAN.claim(
        "brownian",
        "abstract",
        "The update of the tokens is a Brownian motion.",
        count["trained"] == every,
        f"{count['trained']} of {every} properties",
        f"Found: {found}; they are growth, independence, normality and mean zero.",
        "motion",
    )


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
    label = "mean ‖X_l − X_0‖² / d"
    _style.dress(distance, xlabel="block", ylabel=label, title="distance from the start")
    _style.legend(distance)
    extent = (0.5, len(depth) + 0.5, len(depth) + 0.5, 0.5)
    correlation = trained.increment_correlation
    image = cosines.imshow(correlation, cmap="gray", vmin=-1, vmax=1, extent=extent)
    figure.colorbar(image, ax=cosines, shrink=0.85).ax.tick_params(labelsize=7)
    _style.dress(cosines, xlabel="block", ylabel="block", title="cosine of updates").grid(False)
    kurtosis = {name: test.excess_kurtosis for name, test in tests.items()}
    _style.draw_lines(normality, depth, kurtosis)
    _style.whole_ticks(normality)
    _style.dress(normality, xlabel="block", ylabel="excess kurtosis", title="normality of updates")
    normality.axhline(0, color=_style.GREY, linewidth=0.8)
    _style.legend(normality)
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

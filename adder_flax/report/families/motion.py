"""Whether tokens move through the blocks like Brownian particles."""

import numpy as np

from adder_flax.measures.brownian import (
    BrownianTest,
    brownian_test,
)
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    Findings,
    Picture,
    Study,
    only_when,
    spread,
)

_SOURCE = BROWNIAN.source
# A path counts as Brownian within these bounds; each is far outside what sampling of the tokens
# could give.
_GROWTH, _CORRELATION, _KURTOSIS, _DRIFT = (0.8, 1.2), 0.1, 0.5, 0.1
# {claim: (statement, whether a path has the property, the number, the numbers in a sentence)}
_PROPERTIES = {
    "brownian-growth": (
        "The squared distance of tokens from their start grows in proportion to depth, as for "
        "Brownian motion.",
        lambda test: _GROWTH[0] <= test.growth_exponent <= _GROWTH[1],
        lambda test: f"depth^{test.growth_exponent:.2f}",
        lambda test: (
            f"‖X_l − X_0‖² grows like depth^{test.growth_exponent:.2f}; 1 is Brownian, 2 a "
            "straight line."
        ),
    ),
    "brownian-independent": (
        "The updates of different blocks are independent of each other.",
        lambda test: abs(test.mean_correlation) < _CORRELATION,
        lambda test: f"mean cosine {test.mean_correlation:.3f}",
        lambda test: f"Their mean cosine is {test.mean_correlation:.3f}.",
    ),
    "brownian-normal": (
        "The updates are normally distributed.",
        lambda test: np.abs(test.excess_kurtosis).max() < _KURTOSIS,
        lambda test: f"excess kurtosis {spread(test.excess_kurtosis)}",
        lambda test: (
            f"Excess kurtosis of a component's update, by block: {spread(test.excess_kurtosis)}."
        ),
    ),
    "brownian-centred": (
        "The updates have mean zero.",
        lambda test: test.shared_drift < _DRIFT,
        lambda test: f"shared {test.shared_drift:.1%}",
        lambda test: (
            f"{test.shared_drift:.1%} of their energy is one vector common to all tokens and "
            "images."
        ),
    ),
}


@register_claims("motion", BROWNIAN)
def judge(study: Study) -> Findings:
    """Growth, correlation, kurtosis and drift of the paths, before and after training."""
    tests = {"trained": brownian_test(study.subject.captured.path)}
    if study.untrained is not None:
        tests["untrained"] = brownian_test(study.untrained.captured.path)
    return Findings(_motion_claims(tests), [_motion_picture(tests)])


def _motion_claims(tests: dict[str, BrownianTest]) -> list[Claim]:
    source = f"{_SOURCE}, sections 2.4 and 3.2"
    claims = []
    for name, (statement, found, number, finding) in _PROPERTIES.items():
        verdict = HOLDS if found(tests["trained"]) else DOES_NOT_HOLD
        text = finding(tests["trained"])
        if "untrained" in tests:
            text += f" Before training: {finding(tests['untrained'])}"
            if verdict == DOES_NOT_HOLD and found(tests["untrained"]):
                verdict = only_when("the network is untrained")
        claims.append(
            Claim(name, source, statement, verdict, number(tests["trained"]), text, "motion")
        )
    count = {
        name: sum(found(test) for _, found, *_ in _PROPERTIES.values())
        for name, test in tests.items()
    }
    properties = ", ".join(
        f"{number} of {len(_PROPERTIES)} properties {name}" for name, number in count.items()
    )
    whole = Claim(
        "brownian",
        f"{_SOURCE}, abstract",
        "The update of the tokens is a Brownian motion.",
        HOLDS if count["trained"] == len(_PROPERTIES) else DOES_NOT_HOLD,
        f"{count['trained']} of {len(_PROPERTIES)} properties",
        f"Found: {properties}; they are growth, independence, normality and mean zero.",
        "motion",
    )
    return [*claims, whole]


def _motion_picture(tests: dict[str, BrownianTest]) -> Picture:
    figure, axes = _style.new_figure(9.6, 3.2, 1, 3)
    depth = np.arange(1, len(tests["trained"].displacement) + 1)
    data: dict[str, np.ndarray] = {"block": depth}
    for line, (name, test) in zip(_style.LINES, tests.items(), strict=False):
        label = f"{name}, depth^{test.growth_exponent:.2f}"
        axes[0, 0].plot(depth, test.displacement, **line, markersize=4, linewidth=1.3, label=label)
        axes[0, 2].plot(
            depth, test.excess_kurtosis, **line, markersize=4, linewidth=1.3, label=name
        )
        data |= {
            f"displacement, {name}": test.displacement,
            f"excess kurtosis, {name}": test.excess_kurtosis,
        }
    start = tests["trained"].displacement[0]
    for exponent, style in ((1, ":"), (2, "--")):
        axes[0, 0].plot(
            depth,
            start * depth**exponent,
            color=_style.GREY,
            linestyle=style,
            linewidth=1,
            label=f"depth^{exponent}",
        )
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_yscale("log")
    powers = [2**power for power in range(int(np.log2(depth[-1])) + 1)]
    axes[0, 0].set_xticks(powers, [str(power) for power in powers])
    _style.whole_ticks(axes[0, 2])
    _style.dress(
        axes[0, 0], xlabel="block", ylabel="mean ‖X_l − X_0‖² / d", title="distance from the start"
    )
    _style.legend(axes[0, 0])
    correlation = tests["trained"].increment_correlation
    extent = (0.5, len(depth) + 0.5, len(depth) + 0.5, 0.5)
    image = axes[0, 1].imshow(correlation, cmap="gray", vmin=-1, vmax=1, extent=extent)
    figure.colorbar(image, ax=axes[0, 1], shrink=0.85).ax.tick_params(labelsize=7)
    _style.dress(axes[0, 1], xlabel="block", ylabel="block", title="cosine of updates").grid(False)
    _style.dress(axes[0, 2], xlabel="block", ylabel="excess kurtosis", title="normality of updates")
    axes[0, 2].axhline(0, color=_style.GREY, linewidth=0.8)
    _style.legend(axes[0, 2])
    return Picture(
        "motion",
        figure,
        "How tokens move through the blocks: distance from the start with the slopes of Brownian "
        "(1) and straight (2) motion; cosines between the updates of different blocks (grey is 0, "
        "white 1); excess kurtosis of the updates (normal is 0).",
        "Displacement, correlation matrix and kurtosis of token updates by block.",
        data,
    )

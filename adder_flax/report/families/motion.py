"""Whether tokens move through the blocks like Brownian particles; whether all heads are needed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adder_flax import measures
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, only_when, register_claims, spread
from adder_flax.report._study import NOT_MEASURED, Claim, Findings, Picture, Study
from adder_flax.report.bypass import without_heads

_INSIGNIFICANT = 0.01  # of accuracy, or one image
_LARGE = 0.2  # share of the heads; Michel et al. remove 20 to 40 %
_SHARES = np.arange(0, 1.01, 0.1)

_OF_HEADS = {
    "heads-removable": "A large share of the heads can be removed from a trained network without a "
    "significant loss.",
    "heads-single": "Some layers can be reduced to a single head.",
}


class _Property(NamedTuple):
    """What Brownian motion has; of a path too short to tell ``found`` is None."""

    name: str
    statement: str
    found: bool | None
    number: str
    finding: str


def _properties(test: measures.BrownianTest) -> list[_Property]:
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
def judge_motion(study: Study) -> Findings:
    """Growth, correlation, kurtosis and drift of the paths, before and after training."""
    tests = {"trained": measures.brownian_test(study.subject.captured.path)}
    if study.untrained is not None:
        tests["untrained"] = measures.brownian_test(study.untrained.captured.path)
    return Findings(_motion_claims(tests), [_motion_picture(tests)])


def _motion_claims(tests: dict[str, measures.BrownianTest]) -> list[Claim]:
    claims, every = [], {name: _properties(test) for name, test in tests.items()}
    for number, (name, statement, found, shown, finding) in enumerate(every["trained"]):
        verdict = found
        if "untrained" in every:
            before = every["untrained"][number]
            finding += f" Before training: {before.finding}"
            verdict = found or (before.found and only_when("the network is untrained"))
        said = verdict or False, shown, finding
        if found is None:
            said = NOT_MEASURED, "", "Needs 2 blocks or more."
        claims.append(BROWNIAN.claim(name, "sections 2.4 and 3.2", statement, *said, "motion"))
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


def _motion_picture(tests: dict[str, measures.BrownianTest]) -> Picture:
    figure, [[distance, cosines, normality]] = _style.new_figure(9.6, 3.2, 1, 3)
    trained = tests["trained"]
    depth = np.arange(1, len(trained.displacement) + 1)
    displacement = {
        f"{name}, depth^{test.growth_exponent:.2f}": test.displacement
        for name, test in tests.items()
    }
    _style.draw_lines(distance, depth, displacement)
    for exponent, style in ((1, ":"), (2, "--")):
        slope, label = trained.displacement[0] * depth**exponent, f"depth^{exponent}"
        distance.plot(depth, slope, color=_style.GREY, linestyle=style, linewidth=1, label=label)
    _style.octaves(distance, [2**power for power in range(int(np.log2(depth[-1])) + 1)])
    distance.set_yscale("log")
    labels = "block", "mean ‖X_l − X_0‖² / d", "distance from the start"
    _style.dress(distance, *labels, legend_at="best")
    extent = (0.5, len(depth) + 0.5, len(depth) + 0.5, 0.5)
    correlation = trained.increment_correlation
    image = cosines.imshow(correlation, cmap="gray", vmin=-1, vmax=1, extent=extent)
    figure.colorbar(image, ax=cosines, shrink=0.85).ax.tick_params(labelsize=7)
    _style.dress(cosines, "block", "block", "cosine of updates").grid(False)
    kurtosis = {name: test.excess_kurtosis for name, test in tests.items()}
    _style.draw_lines(normality, depth, kurtosis)
    _style.whole_ticks(normality)
    normality.axhline(0, color=_style.GREY, linewidth=0.8)
    _style.dress(normality, "block", "excess kurtosis", "normality of updates", legend_at="best")
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


def _heads_claim(name: str, *found: Any, **options: Any) -> Claim:
    place = "section 3.4.1 (of Michel et al., 2019)"
    return BROWNIAN.claim(name, place, _OF_HEADS[name], *found, **options)


@register_claims("heads", BROWNIAN)
def judge_heads(study: Study) -> Findings:
    """Accuracy without heads, those first whose loss alone costs least; and with one in a block."""
    subject, of = study.subject, study.probe
    numbers = {subject.attention(block).num_kv_heads for block in range(len(subject.maps))}
    blocks = list(of.params.get("blocks", ()))
    values: list[Any] = [subject.attention(block).value for block in range(len(subject.maps))]
    # An adder layer without a norm says -Σ|x| where its weights are zeros.
    bare = any(hasattr(layer, "norm") and layer.norm is None for layer in values)
    if len(numbers) > 1 or numbers == {1} or len(blocks) != len(subject.maps) or bare:
        finding = "Needs a vision transformer of more than 1 head whose values can be zeros."
        return Findings([_heads_claim(n, NOT_MEASURED, finding=finding) for n in _OF_HEADS], [])
    [count] = numbers
    every = [(block, head) for block in blocks for head in range(count)]

    def accuracy(removed: Sequence[tuple[Any, int]]) -> float:
        heads = {b: [h for block, h in removed if block == b] for b in blocks}
        return of.accuracy(without_heads(of.params, heads, count))

    whole, limit = accuracy([]), max(_INSIGNIFICANT, 1 / len(of.labels)) + 1e-9
    alone = {one: accuracy([one]) for one in every}
    order = sorted(every, key=lambda one: -alone[one])
    taken = sorted({round(share * len(every)) for share in _SHARES})
    shares = np.array(taken) / len(every)
    left = np.array([accuracy(order[:number]) for number in taken])
    kept = [
        max(accuracy([(block, h) for h in range(count) if h != head]) for head in range(count))
        for block in blocks
    ]
    costs = np.reshape([whole - alone[one] for one in every], (-1, count))
    claims = _heads_claims(whole, limit, shares, left, np.array(kept))
    return Findings(claims, [_heads_picture(shares, left, costs)])


def _heads_claims(
    whole: float, limit: float, shares: np.ndarray, left: np.ndarray, kept: np.ndarray
) -> list[Claim]:
    # That they can be removed is said, so that the largest share counts that was found.
    share, enough = shares[left >= whole - limit].max(), kept >= whole - limit
    return [
        _heads_claim(
            "heads-removable",
            share >= _LARGE,
            f"{share:.0%} of the heads cost at most {limit:.1%}",
            f"Accuracy {whole:.3f} with all heads; without the {share:.0%} that matter least alone "
            f"it falls by at most {limit:.1%}; without all {left[-1]:.3f}.",
            "heads",
        ),
        _heads_claim(
            "heads-single",
            enough.any(),
            f"{enough.sum()} of {len(kept)} blocks",
            f"With the best single head of one block accuracy falls by at most {limit:.1%} in "
            f"{enough.sum()} of {len(kept)} blocks; at most from {whole:.3f} to {kept.min():.3f}.",
            "heads",
        ),
    ]


def _heads_picture(shares: np.ndarray, left: np.ndarray, costs: np.ndarray) -> Picture:
    figure, [[curve, grid]] = _style.new_figure(8.0, 3.2, 1, 2)
    _style.draw_lines(curve, 100 * shares, {"accuracy": left})
    _style.dress(curve, "heads removed (%)", "accuracy")
    image = grid.imshow(costs, cmap=_style.HEAT, aspect="auto")
    figure.colorbar(image, ax=grid, label="accuracy lost")
    grid.set_xticks(range(costs.shape[1]), range(1, costs.shape[1] + 1))
    grid.set_yticks(range(len(costs)), range(1, len(costs) + 1))
    grid.set_xlabel("head")
    grid.set_ylabel("block")
    return Picture(
        "heads",
        figure,
        "Left: accuracy when heads give zeros as values, those first whose removal alone costs "
        "least. Right: what each costs alone.",
        "Accuracy against the share of removed heads, and the cost of each head.",
        {"share": shares, "accuracy": left, "cost": costs},
    )

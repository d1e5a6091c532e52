"""Whether a network needs all its heads."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import NOT_MEASURED, Claim, Findings, Picture, Study
from adder_flax.report.bypass import without_heads

_INSIGNIFICANT = 0.01  # of accuracy, or one image
_LARGE = 0.2  # share of the heads; Michel et al. remove 20 to 40 %
_SHARES = np.arange(0, 1.01, 0.1)

_removable = functools.partial(
    BROWNIAN.claim,
    "heads-removable",
    "section 3.4.1 (of Michel et al., 2019)",
    "A large share of the heads can be removed from a trained network without a significant loss.",
)
_single = functools.partial(
    BROWNIAN.claim,
    "heads-single",
    "section 3.4.1 (of Michel et al., 2019)",
    "Some layers can be reduced to a single head.",
)


@register_claims("heads", BROWNIAN)
def judge(study: Study) -> Findings:
    """Accuracy without heads, those first whose loss alone costs least; and with one in a block."""
    subject, of = study.subject, study.probe
    numbers = {subject.attention(block).num_kv_heads for block in range(len(subject.maps))}
    blocks = list(of.params.get("blocks", ()))
    values = [subject.attention(block).value for block in range(len(subject.maps))]
    # An adder layer without a norm says -Σ|x| where its weights are zeros.
    bare = any(hasattr(layer, "norm") and layer.norm is None for layer in values)
    if len(numbers) > 1 or numbers == {1} or len(blocks) != len(subject.maps) or bare:
        finding = "Needs a vision transformer of more than 1 head whose values can be zeros."
        return Findings([each(NOT_MEASURED, finding=finding) for each in (_removable, _single)], [])
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
    return Findings(
        [_share_claim(whole, shares, left, limit), _single_claim(whole, np.array(kept), limit)],
        [_picture(shares, left, np.reshape([whole - alone[one] for one in every], (-1, count)))],
    )


def _share_claim(whole: float, shares: np.ndarray, left: np.ndarray, limit: float) -> Claim:
    # That they can be removed is said, so that the largest share counts that was found.
    share = shares[left >= whole - limit].max()
    return _removable(
        share >= _LARGE,
        f"{share:.0%} of the heads cost at most {limit:.1%}",
        f"Accuracy {whole:.3f} with all heads; without the {share:.0%} that matter least alone it "
        f"falls by at most {limit:.1%}; without all {left[-1]:.3f}.",
        "heads",
    )


def _single_claim(whole: float, kept: np.ndarray, limit: float) -> Claim:
    enough = kept >= whole - limit
    return _single(
        enough.any(),
        f"{enough.sum()} of {len(kept)} blocks",
        f"With the best single head of one block accuracy falls by at most {limit:.1%} "
        f"in {enough.sum()} of {len(kept)} blocks; at most from {whole:.3f} to {kept.min():.3f}.",
        "heads",
    )


def _picture(shares: np.ndarray, left: np.ndarray, costs: np.ndarray) -> Picture:
    figure, axes = _style.new_figure(8.0, 3.2, 1, 2)
    curve, grid = axes[0]
    _style.draw_lines(curve, 100 * shares, {"accuracy": left})
    _style.dress(curve, xlabel="heads removed (%)", ylabel="accuracy")
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

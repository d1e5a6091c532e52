"""LayerNorm puts tokens on a sphere."""

import numpy as np

from adder_flax.measures.brownian import component_correlation, layer_norm, relative_radius
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import (
    TOLERANCE,
    Claim,
    Findings,
    Picture,
    Study,
    only_when,
    spread,
)


@register_claims("sphere", BROWNIAN)
def judge(study: Study) -> Findings:
    """Radii of the subject's tokens, by LayerNorm without its affine part and as it is used."""
    around = [block.around() for block in study.subject.captured.blocks]
    bare = [relative_radius(layer_norm(tokens)) for tokens, _ in around]
    used = [relative_radius(normalized) for _, normalized in around]
    error, off = (max(np.abs(radius - 1).max() for radius in radii) for radii in (bare, used))
    verdict = off < 0.01 or only_when("LayerNorm has no affine part")
    claim = BROWNIAN.claim(
        "sphere",
        "section 3.1",
        "LayerNorm maps every token to the sphere of radius √d.",
        error < 0.01 and verdict,
        f"‖LN(x)‖ / √d: {spread(np.stack(used))}",
        f"‖LN(x)‖ / √d: without the affine part 1 within {error:.1e}; as the blocks use it "
        f"{spread(np.stack(used))}.",
        "sphere",
    )
    chosen = study.subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(2.9 * len(chosen), 3.0, 1, len(chosen))
    data = {}
    for axis, index in zip(axes[0], chosen, strict=True):
        radii = {"without affine part": bare[index].ravel(), "as used": used[index].ravel()}
        every = np.concatenate(list(radii.values()))
        bins = np.linspace(every.min() - 0.02, every.max() + 0.02, 50)
        for line, (label, radius) in zip(_style.LINES, radii.items(), strict=False):
            data[f"block_{index + 1}_{label.replace(' ', '_')}"] = radius
            style = dict(histtype="step", linewidth=1.5, linestyle=line["linestyle"])
            share = np.full(radius.size, 100 / radius.size)
            axis.hist(radius, bins, weights=share, label=label, color=line["color"], **style)
        axis.set_ylim(0, 135)
        _style.dress(axis, xlabel="‖LN(x)‖ / √d", title=f"block {index + 1}")
    axes[0, 0].set_ylabel("tokens (%)", fontsize=9)
    _style.legend(axes[0, 0], loc="upper left")
    picture = Picture(
        "sphere",
        figure,
        "Radius of the tokens after the LayerNorm before attention, with and without its affine "
        "part; 1 is the sphere of radius √d.",
        "Histograms of token norms for three blocks.",
        data,
    )
    return Findings([claim, _components_claim(study)], [picture])


def _components_claim(study: Study) -> Claim:
    found, chance = zip(
        *(component_correlation(block.around()[0]) for block in study.subject.captured.blocks),
        strict=True,
    )
    times = np.array(found) / chance[0]
    return BROWNIAN.claim(
        "token-components",
        "section 3.2",
        "The components of a token are independent random variables.",
        times.max() < 1 + TOLERANCE,
        f"squared correlation {np.median(times):.2g} times that of chance",
        f"Mean squared correlation of two components over {len(study.labels)} images, by block: "
        f"{spread(times)} times what independent components have. It is not about more than pairs.",
    )

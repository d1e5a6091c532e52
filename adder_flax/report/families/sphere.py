"""LayerNorm puts tokens on a sphere."""

import numpy as np

from adder_flax.measures.brownian import (
    layer_norm,
    relative_radius,
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
    Subject,
    only_when,
    spread,
)

_SOURCE = BROWNIAN.source


@register_claims("sphere", BROWNIAN)
def judge(study: Study) -> Findings:
    """Radii of the subject's tokens."""
    return Findings(_sphere_claims(study.subject), [_sphere_picture(study.subject)])


def _sphere_claims(subject: Subject) -> list[Claim]:
    around = [block.around() for block in subject.captured.blocks]
    bare = [relative_radius(layer_norm(tokens)) for tokens, _ in around]
    affine = [relative_radius(normalized) for _, normalized in around]
    error = max(np.abs(radius - 1).max() for radius in bare)
    off = max(np.abs(radius - 1).max() for radius in affine)
    verdict = HOLDS if off < 0.01 else only_when("LayerNorm has no affine part")
    return [
        Claim(
            "sphere",
            f"{_SOURCE}, section 3.1",
            "LayerNorm maps every token to the sphere of radius √d.",
            verdict if error < 0.01 else DOES_NOT_HOLD,
            f"‖LN(x)‖ / √d: {spread(np.stack(affine))}",
            f"‖LN(x)‖ / √d: without the affine part 1 within {error:.1e}; as the blocks use it "
            f"{spread(np.stack(affine))}.",
            "sphere",
        )
    ]


def _sphere_picture(subject: Subject) -> Picture:
    chosen = subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(2.9 * len(chosen), 3.0, 1, len(chosen))
    data = {}
    for axis, index in zip(axes[0], chosen, strict=True):
        bare, affine = subject.captured.blocks[index].around()
        radii = {"without affine part": layer_norm(bare), "as used": affine}
        radii = {label: relative_radius(tokens).ravel() for label, tokens in radii.items()}
        every = np.concatenate(list(radii.values()))
        bins = np.linspace(every.min() - 0.02, every.max() + 0.02, 50)
        for line, (label, radius) in zip(_style.LINES, radii.items(), strict=False):
            data[f"block_{index + 1}_{label.replace(' ', '_')}"] = radius
            style = {
                "color": line["color"],
                "linestyle": line["linestyle"],
                "linewidth": 1.5,
                "histtype": "step",
            }
            axis.hist(
                radius,
                bins=bins,
                weights=np.full(radius.size, 100 / radius.size),
                label=label,
                **style,
            )
        axis.set_ylim(0, 135)
        _style.dress(axis, xlabel="‖LN(x)‖ / √d", title=f"block {index + 1}")
    axes[0, 0].set_ylabel("tokens (%)", fontsize=9)
    _style.legend(axes[0, 0], loc="upper left")
    return Picture(
        "sphere",
        figure,
        "Radius of the tokens after the LayerNorm before attention, with and without its affine "
        "part; 1 is the sphere of radius √d.",
        "Histograms of token norms for three blocks.",
        data,
    )

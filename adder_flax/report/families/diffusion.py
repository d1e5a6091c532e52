"""Whether a step of attention is a step of diffusion: the continuum limit of the walk."""

import numpy as np

from adder_flax.measures.brownian import diffusion_ratio
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import TOLERANCE, Findings, Picture, only_when

_WIDTHS = (16, 64, 192, 768)
_NARROWER = 2.0 ** np.arange(0, 10)


@register_claims("diffusion-limit", BROWNIAN, of=object)
def judge(study: object) -> Findings:
    """How the walk on the sphere mixes beside diffusion of the same variance, by its kernel."""
    del study  # a statement on the kernel, whatever the model
    ratios = {
        f"d = {width}": np.array([diffusion_ratio(width, k * np.sqrt(width)) for k in _NARROWER])
        for width in _WIDTHS
    }
    own, limit = ([values[place] for values in ratios.values()] for place in (0, -1))
    close = lambda values: all(abs(value - 1) < TOLERANCE for value in values)
    claim = BROWNIAN.claim(
        "diffusion-limit",
        "section 2.3, equation 5",
        "The continuum limit of the walk is diffusion.",
        close(limit) and (close(own) or only_when("the kernel is far narrower than attention's")),
        f"mixes at {own[1]:.2f} of diffusion's rate at d = 64, {limit[1]:.2f} in the limit",
        "Rate at which one step forgets the sphere's first harmonic, over that of diffusion of the "
        "same variance: "
        + ", ".join(f"{name}: {values[0]:.2f}" for name, values in ratios.items())
        + " for the paper's kernel exp(v·w / √d); "
        + ", ".join(f"{value:.2f}" for value in limit)
        + f" for one {_NARROWER[-1]:g} times as concentrated. A step of attention is a jump.",
        "diffusion-limit",
    )
    figure, axes = _style.new_figure(5.4, 3.3)
    _style.draw_lines(axes[0, 0], _NARROWER, ratios)
    axes[0, 0].axhline(1, color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.octaves(axes[0, 0], [int(k) for k in _NARROWER[::2]])
    labels = {"xlabel": "concentration over the paper's √d", "ylabel": "rate over diffusion's"}
    _style.dress(axes[0, 0], **labels, legend_at="lower right")
    picture = Picture(
        "diffusion-limit",
        figure,
        "How fast one step of the walk with kernel exp(κ cos θ) forgets where it was, over "
        "diffusion of the same variance. At 1, left, the kernel of attention; to the right "
        "narrower ones.",
        "Rate of the walk over that of diffusion against the kernel's concentration, by width.",
        {"concentration": _NARROWER, **ratios},
    )
    return Findings([claim], [picture])

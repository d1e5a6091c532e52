"""The second-order term of the loss along training steps."""

import functools

import numpy as np

from adder_flax.report._families import BROWNIAN, register_claims
from adder_flax.report._study import (
    NOT_MEASURED,
    Claim,
    Findings,
    ImageStudy,
    Picture,
    only_when,
    spread,
)
from adder_flax.report.figures import second_order_figure

# Share of the first-order term from which the second is not to be neglected.
_NOTICEABLE = 0.1


@register_claims("second-order", BROWNIAN, of=ImageStudy)
def judge(study: ImageStudy) -> Findings:
    """Its size beside the first-order one, where steps were expanded."""
    claim = functools.partial(
        BROWNIAN.claim,
        "second-order",
        "section 3.3 (the argument for CG-FAC)",
        "The second-order term of the loss along a training step is not negligible beside the "
        "first.",
    )
    if not study.second_order:
        finding = "Needs steps of a run, 0 were given (second_order_along)."
        return Findings([claim(NOT_MEASURED, finding=finding)], [])
    return Findings([_measured(study, claim)], [_picture(study)])


def _measured(study: ImageStudy, claim) -> Claim:
    parts, own, at_peak = [], [], []
    for where, taken in study.second_order.items():
        rates = [step.learning_rate for step in taken]
        ratios = [step.ratio() for step in taken]
        peak = [step.ratio(study.peak_learning_rate) for step in taken]
        smooth = np.abs([step.second / step.first for step in taken])
        by_hessian = f" (from H alone {spread(smooth)})" if np.isfinite(smooth).all() else ""
        parts.append(
            f"{where}, learning rate {min(rates):.2g} to {max(rates):.2g}: {spread(ratios)}"
            f"{by_hessian}; in the same direction at the peak rate of "
            f"{study.peak_learning_rate:.2g} {np.median(peak):.2g}"
        )
        own += ratios
        at_peak += peak
    only_near_peak = np.median(at_peak) >= _NOTICEABLE and only_when(
        "the learning rate is near its peak"
    )
    return claim(
        np.median(own) >= _NOTICEABLE or only_near_peak,
        f"{np.median(own):.2g} of the first",
        f"|second-order| / |first-order| over {len(own)} steps. {'. '.join(parts)}. They are the "
        "even and the odd part of what the batch's loss does along the step, kinks included.",
        "second-order",
    )


def _picture(study: ImageStudy) -> Picture:
    rows = [(where, step) for where, taken in study.second_order.items() for step in taken]
    columns = {name: [getattr(step, name) for _, step in rows] for name in vars(rows[0][1])}
    return Picture(
        "second-order",
        second_order_figure(study.second_order),
        "The loss of a batch along the training step taken on it: its change, the odd part of it "
        "(the first-order term), the even part (the second-order term, kinks included) and, where "
        "it was computed, ½ δᵀHδ from the Hessian.",
        "First- and second-order terms of the loss for single training steps.",
        {"where": [where for where, _ in rows], **columns},
    )

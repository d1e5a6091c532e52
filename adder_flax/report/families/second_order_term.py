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
    return Findings([_measured(study, claim), _kl_claim(study)], [_picture(study)])


def _kl_claim(study: ImageStudy) -> Claim:
    taken = list(study.second_order.items())
    (where, first), (then, last) = taken[0], taken[-1]
    median = lambda name, steps: float(np.median([getattr(step, name) for step in steps]))
    loss, later_loss = median("loss", first), median("loss", last)
    kl, later = median("kl", first), median("kl", last)
    # A step in one direction moves the distribution in proportion to the square of its length.
    rates = [median("learning_rate", steps) for steps in (first, last)]
    of_rate = later / rates[1] ** 2 < kl / rates[0] ** 2
    claim = functools.partial(
        BROWNIAN.claim,
        "kl-shrinks",
        "section 3.3",
        "As the loss gets smaller, the distribution changes less and less between steps.",
    )
    if not (np.isfinite([kl, later]).all() and later_loss < loss):
        return claim(NOT_MEASURED, finding="Needs steps at two losses; 0 such pairs were given.")
    condition = only_when(
        "steps are of one length" if of_rate else "the learning rate falls with it"
    )
    return claim(
        condition if (later < kl) != of_rate else of_rate,
        f"KL {kl:.1e} → {later:.1e} nats",
        f"Mean KL of a step's predictions from those before it, {where} at a loss of {loss:.2g}: "
        f"{kl:.2e} nats; {then} at {later_loss:.2g}: {later:.2e}. Over the square of the learning "
        f"rate: {kl / rates[0] ** 2:.2g} and {later / rates[1] ** 2:.2g}.",
        "second-order",
    )


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

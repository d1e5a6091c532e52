"""Second order: its term of the loss along training steps, and by the letter the Fisher matrix,
Algorithm 1 and what it costs without factors.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kfac
from adder_flax import measures, quantized
from adder_flax.report._families import BROWNIAN, only_when, register_claims, spread
from adder_flax.report._study import NOT_MEASURED, Claim, Findings, ImageStudy, Picture, Study
from adder_flax.report.figures import second_order_figure
from adder_flax.settings import DEIT_SIZES

# Share of the first-order term from which the second is not to be neglected.
_NOTICEABLE = 0.1
_DAMPING = 0.1
_ITERATIONS = 10
_COMPONENTS = 48  # of tokens: with their classes a matrix that can be inverted
_TOKENS, _BATCH = 197, 64


@register_claims("second-order", BROWNIAN, of=ImageStudy)
def judge_second_order(study: ImageStudy) -> Findings:
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
    taken = [*study.second_order.items()]
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
    condition = "steps are of one length" if of_rate else "the learning rate falls with it"
    return claim(
        only_when(condition) if (later < kl) != of_rate else of_rate,
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
    near_peak = np.median(at_peak) >= _NOTICEABLE and only_when(
        "the learning rate is near its peak"
    )
    return claim(
        np.median(own) >= _NOTICEABLE or near_peak,
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


@register_claims("fisher", BROWNIAN, of=ImageStudy)
def judge_fisher(study: ImageStudy) -> Findings:
    """The model's KL along random directions, Algorithm 1 on a layer, and counts."""
    if quantized.in_few_bits(study.subject.model):
        raise ValueError("expected answers that follow small changes, got those of few bits")
    claims = [_fisher_claim(study), _cost_claim()]
    if isinstance(study, Study):
        claims[1:1] = _layer_claims(study)
    return Findings(claims, [])


def _fisher_claim(study: ImageStudy) -> Claim:
    ratios = [_curvature_ratio(study, seed) for seed in range(3)]
    return BROWNIAN.claim(
        "fisher-hessian",
        "section 3.3 (of Watanabe, 2009)",
        "The Fisher information matrix is the Hessian of the KL divergence.",
        np.abs(np.array(ratios) - 1).max() < 0.05,
        f"ratio {spread(ratios)}",
        "KL of this model's predictions along 3 random directions δ, over ½ δᵀFδ from "
        f"differences of its logits: {spread(ratios)}.",
    )


def _curvature_ratio(study: ImageStudy, seed: int, target: float = 0.01) -> float:
    """Returns KL(θ, θ + δ) over ½ δᵀFδ for a random δ that moves logits by ``target``."""
    from scipy.special import log_softmax  # SciPy is not loaded whenever a figure is drawn

    params, logits = study.probe.params, study.probe.logits
    rng = np.random.default_rng(seed)
    scale = lambda p: np.sqrt(np.mean(np.square(p)) + 1e-12)
    direction = jax.tree.map(lambda p: rng.standard_normal(p.shape) * scale(p), params)

    def at(size: float) -> np.ndarray:
        moved = lambda p, d: np.asarray(p + size * d, np.asarray(p).dtype)
        return logits(jax.tree.map(moved, params, direction)).astype(np.float64)

    here, size = at(0.0), 1e-3
    size *= target / max(float(np.sqrt(np.mean((at(size) - here) ** 2))), 1e-12)
    ahead, behind = at(size), at(-size)
    log_p = log_softmax(here, -1)
    p, change = np.exp(log_p), (ahead - behind) / 2
    # Both sides, so that the third order cancels.
    kl = np.mean([(p * (log_p - log_softmax(q, -1))).sum(-1) for q in (ahead, behind)])
    fisher = np.mean((p * change**2).sum(-1) - (p * change).sum(-1) ** 2)
    return float(kl / (fisher / 2))


def _layer_claims(study: Study) -> list[Claim]:
    """Algorithm 1 on a new layer that reads the classes off the model's last tokens."""
    tokens = study.subject.captured.path[-1]
    features = measures.layer_norm(tokens)[:, 0, :_COMPONENTS].astype(np.float32)
    classes, labels = np.unique(study.labels, return_inverse=True)
    params = {"kernel": jnp.zeros((features.shape[-1], len(classes)))}

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        logits = kfac.tap(kfac.Dense(), params, x, path="")
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    args = jnp.asarray(features), jnp.asarray(labels)
    layers = kfac.find_layers(loss, params, *args)
    options: dict[str, Any] = dict(damping=_DAMPING, max_iterations=4 * _ITERATIONS, tolerance=1e-6)
    optimizer = kfac.algorithm_1(1.0, layers, **options)
    value, grads, curvature = kfac.value_grad_and_curvature(loss, fisher="empirical")(params, *args)
    before = float(value)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, curvature=curvature)
    step = -np.asarray(updates["kernel"], np.float64)
    wanted = _dense_solution(features, labels, len(classes))
    error = float(np.linalg.norm(step - wanted) / np.linalg.norm(wanted))
    moved = lambda sign: {"kernel": jnp.asarray(0.1 * sign * step, jnp.float32)}
    up, down = (float(loss(moved(sign), *args)) for sign in (1, -1))
    return [
        BROWNIAN.claim(
            "algorithm-1",
            "Algorithm 1",
            "Conjugate gradients solve (F + γI) x = ∇L from activations and gradients alone.",
            error < 1e-3,
            f"error {error:.0e}",
            f"On a layer of {wanted.size} weights behind this model, γ = {_DAMPING}, at most "
            f"{4 * _ITERATIONS} iterations: ‖x − (F + γI)⁻¹∇L‖ is {error:.1e} of the solution by a "
            "dense matrix in float64.",
        ),
        BROWNIAN.claim(
            "equation-18",
            "equation 18",
            "θ + η F⁻¹∇L lowers the loss.",
            up < before,
            f"loss {before:.3f} → {up:.3f}; with a minus {down:.3f}",
            f"On that layer with η = 0.1 the loss goes from {before:.4f} to {up:.4f}, and to "
            f"{down:.4f} with a minus, which the formula lacks: −F⁻¹∇L descends.",
        ),
    ]


def _dense_solution(features: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    x = features.astype(np.float64)
    errors = 1 / classes - np.eye(classes)[labels]  # of uniform predictions, since the kernel is 0
    each = np.einsum("ni,no->nio", x, errors).reshape(len(x), -1)
    fisher = each.T @ each / len(x) + _DAMPING * np.eye(each.shape[-1])
    return np.linalg.solve(fisher, each.mean(0)).reshape(x.shape[-1], classes)


def _cost_claim() -> Claim:
    """By counted multiplications of the layers of a block, in gradients of it."""
    rows, n = {}, _BATCH * _TOKENS
    for name, (width, _) in zip(("DeiT-Ti", "DeiT-S", "DeiT-B"), DEIT_SIZES.values(), strict=True):
        layers = 4 * [(width, width)] + [(width, 4 * width), (4 * width, width)]
        gradient = sum(3 * n * i * o for i, o in layers)
        free = sum(2 * n * i * o * _ITERATIONS for i, o in layers)
        formed = sum(n * (i * i + o * o) + i**3 + o**3 + i * o * (i + o) for i, o in layers)
        rows[name] = free / gradient, formed / gradient
    shown = ", ".join(f"{name} {free:.1f} against {f:.1f}" for name, (free, f) in rows.items())
    cheaper = min(int(f / free * _ITERATIONS) for free, f in rows.values())
    return BROWNIAN.claim(
        "factor-free-cost",
        "section 3.3 (what it costs)",
        "A step without Kronecker factors is cheaper than one with them.",
        all(free < formed for free, formed in rows.values())
        or (cheaper > 0 and only_when(f"iterations are {cheaper} or fewer")),
        f"{shown} gradients",
        f"Multiplications of a step in gradients, {_BATCH} images of {_TOKENS} tokens, "
        f"{_ITERATIONS} iterations of Algorithm 1 against forming, inverting and applying factors "
        f"in every step: {shown}.",
    )

"""On the sphere the dot product's map is that of a Gaussian kernel."""

import numpy as np

from adder_flax.measures.brownian import (
    dot_product_map,
    gaussian_kernel_map,
    layer_norm,
    total_variation,
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


@register_claims("kernel", BROWNIAN)
def judge(study: Study) -> Findings:
    """How far the two maps are apart on the subject's tokens, queries and keys."""
    kernel = _kernel_distances(study.subject)
    return Findings(_kernel_claims(study.subject, kernel), [_kernel_picture(kernel)])


def _kernel_distances(subject: Subject) -> dict[str, list[np.ndarray]]:
    """Total variation between Gaussian-kernel map and dot-product map.

    It is given by block and from ever less ideal tokens.
    """
    result: dict[str, list[np.ndarray]] = {
        "LayerNorm alone": [],
        "with its affine part": [],
        "the model's q and k": [],
    }
    for block in subject.captured.blocks:
        tokens, normalized = block.around()
        bare = layer_norm(tokens)
        pairs = ((bare, bare), (normalized, normalized), (block.query, block.key))
        for distances, (query, key) in zip(result.values(), pairs, strict=True):
            apart = total_variation(gaussian_kernel_map(query, key), dot_product_map(query, key))
            distances.append(np.asarray(apart))
    return result


def _kernel_claims(subject: Subject, kernel: dict[str, list[np.ndarray]]) -> list[Claim]:
    ideal, _, live = (
        np.concatenate([np.ravel(values) for values in blocks]) for blocks in kernel.values()
    )
    verdict = HOLDS if ideal.max() < 1e-3 else DOES_NOT_HOLD
    norms = [np.linalg.norm(block.key, axis=-1) for block in subject.captured.blocks]
    varied = [float(np.mean(norm.std(-1) / norm.mean(-1))) for norm in norms]
    return [
        Claim(
            "gaussian-kernel",
            f"{_SOURCE}, equation 15",
            "On the sphere, scaled dot-product attention is the row-normalised Gaussian kernel.",
            verdict,
            f"maps differ by {ideal.max():.0e}",
            "With q = k = LN(x) without affine part the two maps differ by at most "
            f"{ideal.max():.1e} of a row's weight.",
            "kernel",
        ),
        Claim(
            "gaussian-kernel-projected",
            f"{_SOURCE}, section 3.4.2",
            "The Gaussian form still describes attention between projected queries and keys.",
            HOLDS if live.max() < 0.01 else only_when("all keys have one norm"),
            f"maps differ by {spread(live)}",
            f"From this model's q and k the two maps differ by {spread(live)} of a row's weight; "
            f"key norms vary by {spread(varied)} of their mean.",
            "kernel",
        ),
    ]


def _kernel_picture(kernel: dict[str, list[np.ndarray]]) -> Picture:
    figure, axes = _style.new_figure(5.4, 3.3)
    data = _style.by_block(axes[0, 0], kernel)
    axes[0, 0].set_yscale("log", nonpositive="clip")
    _style.dress(axes[0, 0], xlabel="block", ylabel="difference, share of a row")
    _style.legend(axes[0, 0])
    return Picture(
        "kernel",
        figure,
        "Total variation between the Gaussian-kernel map and the dot-product map, from LayerNorm "
        "without affine part (exact), with it, and from the model's projected queries and keys.",
        "Difference of the two maps by block, for three kinds of tokens.",
        data,
    )

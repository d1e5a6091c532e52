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
from adder_flax.report._study import Findings, Picture, Study, only_when, spread
from adder_flax.report.captures import BlockCapture


@register_claims("kernel", BROWNIAN)
def judge(study: Study) -> Findings:
    """How far the two maps are apart on the subject's tokens, queries and keys."""
    blocks = study.subject.captured.blocks
    by_block = [_distances(block) for block in blocks]
    distances = {name: [block[name] for block in by_block] for name in by_block[0]}
    ideal, _, live = (np.concatenate(list(map(np.ravel, each))) for each in distances.values())
    norms = [np.linalg.norm(block.key, axis=-1) for block in blocks]
    varied = [float(np.mean(norm.std(-1) / norm.mean(-1))) for norm in norms]
    claims = [
        BROWNIAN.claim(
            "gaussian-kernel",
            "equation 15",
            "On the sphere, scaled dot-product attention is the row-normalised Gaussian kernel.",
            ideal.max() < 1e-3,
            f"maps differ by {ideal.max():.0e}",
            "With q = k = LN(x) without affine part the two maps differ by at most "
            f"{ideal.max():.1e} of a row's weight.",
            "kernel",
        ),
        BROWNIAN.claim(
            "gaussian-kernel-projected",
            "section 3.4.2",
            "The Gaussian form still describes attention between projected queries and keys.",
            live.max() < 0.01 or only_when("all keys have one norm"),
            f"maps differ by {spread(live)}",
            f"From this model's q and k the two maps differ by {spread(live)} of a row's weight; "
            f"key norms vary by {spread(varied)} of their mean.",
            "kernel",
        ),
    ]
    return Findings(claims, [_kernel_picture(distances)])


def _distances(block: BlockCapture) -> dict[str, np.ndarray]:
    """Total variation between the two maps, from ever less ideal tokens."""
    tokens, normalized = block.around()
    bare = layer_norm(tokens)
    pairs = {
        "LayerNorm alone": (bare, bare),
        "with its affine part": (normalized, normalized),
        "the model's q and k": (block.query, block.key),
    }
    return {
        name: np.asarray(total_variation(gaussian_kernel_map(*pair), dot_product_map(*pair)))
        for name, pair in pairs.items()
    }


def _kernel_picture(distances: dict[str, list[np.ndarray]]) -> Picture:
    figure, axes = _style.new_figure(5.4, 3.3)
    data = _style.by_block(axes[0, 0], distances)
    axes[0, 0].set_yscale("log", nonpositive="clip")
    label = "difference, share of a row"
    _style.dress(axes[0, 0], xlabel="block", ylabel=label, legend_at="best")
    return Picture(
        "kernel",
        figure,
        "Total variation between the Gaussian-kernel map and the dot-product map, from LayerNorm "
        "without affine part (exact), with it, and from the model's projected queries and keys.",
        "Difference of the two maps by block, for three kinds of tokens.",
        data,
    )

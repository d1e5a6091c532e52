"""Attention as gating: what a score lets through."""

import numpy as np
from flax import nnx

from adder_flax import attention
from adder_flax.measures.gating import Gate, gate
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import Findings, Picture, Study

_KINDS = {"multiplicative": ("dot", "bilinear"), "additive": ("additive",)}
_IMAGES = 4
_TOKENS = 32  # of each; a tanh gate is a vector for every pair of them


@register_claims("gates", ADDITIVE)
def judge(study: Study) -> Findings:
    """The gates of a multiplicative and of an additive score."""
    gates = {kind: _find_gate(study, scores) for kind, scores in _KINDS.items()}
    (linear_of, linear), (tanh_of, tanh) = gates.values()
    outside = float(np.mean(np.abs(linear.values) > 1))
    both_signs = [0 < found.negative_share < 1 for found in (linear, tanh)]
    span = lambda found: f"{found.values.min():.2f} to {found.values.max():.2f}"
    claims = [
        ADDITIVE.claim(
            "gate-multiplicative",
            "Attention as gating",
            "A multiplicative score is a linear gate on the key, of both signs and not bounded.",
            both_signs[0] and outside > 0,
            f"{span(linear)}; {linear.negative_share:.0%} negative",
            f"Gate g = Wᵀq of {linear_of}: {span(linear)}, {linear.negative_share:.1%} of it "
            f"negative, {outside:.1%} outside [−1, 1].",
            "gates",
        ),
        ADDITIVE.claim(
            "gate-additive",
            "Attention as gating",
            "An additive score is a gate in (−1, 1) of both signs on latent features, unlike an "
            "LSTM's in (0, 1).",
            both_signs[1] and np.abs(tanh.values).max() < 1,
            f"{span(tanh)}; {tanh.negative_share:.0%} negative",
            f"Gate g = tanh(…) of {tanh_of}: {span(tanh)}, {tanh.negative_share:.1%} of it "
            f"negative; {tanh.saturated_share:.1%} is saturated, beyond ±0.99.",
            "gates",
        ),
    ]
    return Findings(claims, [_gate_picture(gates)])


def _find_gate(study: Study, scores: tuple[str, ...]) -> tuple[str, Gate]:
    """Of the first block of a model that has one, else of a new head; and whose it is."""
    subjects = filter(None, (study.subject, study.baseline))
    found = (
        (subject, index, block)
        for subject in subjects
        for index, block in enumerate(subject.captured.blocks)
        if block.score in scores
    )
    if first := next(found, None):
        subject, index, block = first
        owner, module = f"{subject.name}, block {index + 1}", subject.attention(index)
        query, key = (x[:_IMAGES, :, :_TOKENS] for x in (block.query, block.key))
    else:
        owner = "a new head on unit-normal tokens"
        module = attention.MultiHeadAttention(1, 64, score=scores[0], rngs=nnx.Rngs(0))
        query, key = np.random.default_rng(0).standard_normal((2, _IMAGES, 1, _TOKENS, 64))
    parameters = {name: parameter[...] for name, parameter in module.score.items()}
    return owner, gate(module.settings.score, query, key, parameters)


def _gate_picture(gates: dict[str, tuple[str, Gate]]) -> Picture:
    figure, axes = _style.new_figure(8.2, 3.0, 1, 2)
    columns: dict[str, np.ndarray] = {}
    for axis, (kind, (owner, found)) in zip(axes[0], gates.items(), strict=True):
        count, edges = np.histogram(found.values, bins=60)
        share = 100 * count / found.values.size
        axis.stairs(share, edges, fill=True, color="#777777")
        axis.axvline(0, color="black", linewidth=0.8)
        _style.dress(axis, xlabel="value of the gate", ylabel="share (%)", title=f"{kind}: {owner}")
        axis.title.set_fontsize(8.5)
        columns |= {f"{kind}, from": edges[:-1], f"{kind}, to": edges[1:]}
        columns[f"{kind}, share (%)"] = share
    return Picture(
        "gates",
        figure,
        "Scores as gates: how often a gate has which value. Left Wᵀq, which multiplies the key; "
        "right tanh(W_q q + W_k k + b), which multiplies v.",
        "Histograms of the values of a multiplicative and of an additive gate.",
        columns,
    )

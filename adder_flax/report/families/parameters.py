"""What a model's scores let through, as gates, and which of their parameters make no difference, on
its own queries, keys and weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from adder_flax import attention, measures
from adder_flax.measures._arrays import softmax
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import Claim, Findings, Picture, Study
from adder_flax.report.captures import BlockCapture

_KEYS = 197
_BIAS_SIZES = (0.0, 1.0, 3.0, 10.0, 30.0)
# Scores of a few hundred in float32 leave differences of this size after the softmax.
_ROUNDING = 1e-3
_KINDS = {"multiplicative": ("dot", "bilinear"), "additive": ("additive",)}
_IMAGES = 4
_TOKENS = 32  # of each; a tanh gate is a vector for every pair of them


@register_claims("identities", ADDITIVE)
def judge_identities(study: Study) -> Findings:
    """How far maps move when biases and factors change."""
    index = len(study.subject.captured.blocks) // 2
    module, block = study.subject.attention(index), study.subject.captured.blocks[index]
    score = attention.get_score(module.settings.score).name
    where = f"block {index + 1} of this model ({score} score)"
    moves, (entropies, most) = _moves(module, block), _inner_biases()
    scalar, rescaled, per_key = moves.values()
    claims = _identity_claims(where, scalar, rescaled, per_key, entropies, most)
    return Findings(claims, [_identity_picture(where, moves, entropies)])


def _live_map(
    module: attention.MultiHeadAttention, block: BlockCapture, alpha: float = 1.0, **options: Any
) -> np.ndarray:
    """The map of its own queries and keys, weights scaled so that scores grow by ``alpha``."""
    query, key = (jnp.swapaxes(jnp.asarray(x), 1, 2) for x in (block.query, block.key))
    parameters = {name: parameter[...] for name, parameter in module.score.items()}
    score = attention.get_score(module.settings.score).name
    if score in ("additive", "bilinear"):
        name = "v" if score == "additive" else "kernel"
        parameters[name] = alpha * parameters[name]
    elif score == "dot":
        query = alpha * query
    else:  # distances: the L1 one grows like its arguments, the squared one like their square
        factor = alpha if score == "adder" else alpha**0.5
        query, key = factor * query, factor * key
        # The grid of a score in few bits grows like its arguments.
        for name in parameters.keys() & {"lowest", "step"}:
            parameters[name] = factor * parameters[name]
    options |= dict(score=module.settings.score, parameters=parameters, scale=module.settings.scale)
    options |= dict(score_options=module.settings.score_options, identity=False)
    _, weights = attention.attend(query, key, key, return_weights=True, **options)
    return np.asarray(weights, np.float64)


def _moves(module: attention.MultiHeadAttention, block: BlockCapture) -> dict[str, float]:
    """Largest total variation of a row of the map before and after each change of parameters."""
    keys, plain = block.key.shape[-2], _live_map(module, block)
    shift = lambda changed: float(measures.total_variation(plain, changed).max())
    moved = lambda **change: shift(_live_map(module, block, **change))
    normal = jax.random.normal(jax.random.key(0), (keys,))
    return {
        "a scalar bias of 3": moved(key_bias=jnp.full((keys,), 3.0)),
        "scores and temperature × 7": moved(alpha=7.0, temperature=7.0),
        "a bias per key": moved(key_bias=3.0 * normal),
    }


def _identity_claims(
    where: str, scalar: float, rescaled: float, per_key: float, entropies: list[float], most: float
) -> list[Claim]:
    uniform, listed = np.log(_KEYS), lambda values: ", ".join(f"{value:.3g}" for value in values)
    return [
        ADDITIVE.claim(
            "bias-scalar",
            "The role of bias terms",
            "A scalar bias on all scores has no effect on the attention weights.",
            scalar < _ROUNDING,
            f"moves {scalar:.0e} of a row",
            f"On {where} a bias of 3 moves at most {scalar:.1e} of a row's weight.",
            "identities",
        ),
        ADDITIVE.claim(
            "bias-per-key",
            "The role of bias terms",
            "A bias per key makes static preferences possible.",
            per_key > 0.05,
            f"moves {per_key:.2f} of a row",
            f"On {where} normal biases of size 3 move up to {per_key:.2f} of a row's weight.",
            "identities",
        ),
        ADDITIVE.claim(
            "temperature",
            "Parameter identifiability and temperature",
            "Only the ratio of the score's scale and the temperature is identifiable: (αv, αT) "
            "gives the weights of (v, T).",
            rescaled < _ROUNDING,
            f"moves {rescaled:.0e} of a row",
            f"On {where} α = 7 moves at most {rescaled:.1e} of a row's weight.",
            "identities",
        ),
        ADDITIVE.claim(
            "bias-inside",
            "The role of bias terms",
            "A large bias inside tanh saturates it and flattens the attention weights.",
            np.all(np.diff(entropies) > -1e-6) and entropies[-1] > 0.99 * uniform,
            f"entropy {entropies[0]:.2f} → {entropies[-1]:.2f} of {uniform:.2f} nats",
            f"Biases of size {listed(_BIAS_SIZES)}: entropy over {_KEYS} keys {listed(entropies)} "
            f"nats; uniform is {uniform:.2f}.",
            "identities",
        ),
        ADDITIVE.claim(
            "additive-bounded",
            "Bounded activations and saturation",
            "Additive scores are bounded by ‖v‖₁ whatever the inputs.",
            most <= 1,
            f"|score| / ‖v‖₁ ≤ {most:.3f}",
            f"The largest |score| / ‖v‖₁ of {64 * _KEYS * len(_BIAS_SIZES)} pairs is {most:.3f}.",
            "identities",
        ),
    ]


def _inner_biases() -> tuple[list[float], float]:
    """Of normal queries and keys entropies by the size of b, and the largest |score|/‖v‖₁."""
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((64, 1, 64)), rng.standard_normal((1, _KEYS, 64))
    v, sign = rng.standard_normal(64), rng.choice([-1.0, 1.0], 64)
    scores = [np.tanh((queries + keys) / np.sqrt(2) + b * sign) @ v for b in _BIAS_SIZES]
    entropies = [float(measures.entropy(softmax(of_size)).mean()) for of_size in scores]
    return entropies, float(max(np.abs(of_size).max() for of_size in scores) / np.abs(v).sum())


def _identity_picture(where: str, moves: dict[str, float], entropies: list[float]) -> Picture:
    figure, [[changes, biases]] = _style.new_figure(8.2, 2.8, 1, 2)
    smallest = 1e-9  # stands for 0 on the logarithmic axis
    widths = [max(value, smallest) for value in moves.values()]
    changes.barh(range(len(moves)), widths, color="#777777")
    changes.set_xscale("log")
    changes.set_xlim(smallest, 1)
    changes.set_yticks(range(len(moves)), list(moves))
    _style.dress(changes, "largest share of a row that moves", title="what changes the map")
    biases.plot(_BIAS_SIZES, entropies, **_style.LINES[0], markersize=5, linewidth=1.3)
    biases.axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    biases.set_ylim(0)
    _style.dress(biases, "size of the bias inside tanh", "entropy (nats)", f"{_KEYS} keys")
    return Picture(
        "identities",
        figure,
        f"Left: how much of a row's weight moves on {where} when parameters change; two of the "
        "three changes are none but for rounding. Right: a bias inside tanh flattens additive "
        "attention; the dotted line is uniform.",
        "Bars of moved attention weight for three changes, and entropy against the size of the "
        "inner bias.",
        {
            "change": list(moves),
            "largest_total_variation": list(moves.values()),
            "bias_size": np.array(_BIAS_SIZES),
            "entropy": np.array(entropies),
        },
    )


@register_claims("gates", ADDITIVE)
def judge_gates(study: Study) -> Findings:
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


def _find_gate(study: Study, scores: tuple[str, ...]) -> tuple[str, measures.Gate]:
    """Of the first block of a model that has one, else of a new head; and whose it is."""
    found = [
        (subject, index, block)
        for subject in filter(None, (study.subject, study.baseline))
        for index, block in enumerate(subject.captured.blocks)
        if block.score in scores
    ]
    if found:
        subject, index, block = found[0]
        owner, module = f"{subject.name}, block {index + 1}", subject.attention(index)
        query, key = (x[:_IMAGES, :, :_TOKENS] for x in (block.query, block.key))
    else:
        owner = "a new head on unit-normal tokens"
        module = attention.MultiHeadAttention(1, 64, score=scores[0], rngs=nnx.Rngs(0))
        query, key = np.random.default_rng(0).standard_normal((2, _IMAGES, 1, _TOKENS, 64))
    parameters = {name: parameter[...] for name, parameter in module.score.items()}
    return owner, measures.gate(module.settings.score, query, key, parameters)


def _gate_picture(gates: dict[str, tuple[str, measures.Gate]]) -> Picture:
    figure, axes = _style.new_figure(8.2, 3.0, 1, 2)
    columns: dict[str, np.ndarray] = {}
    for axis, (kind, (owner, found)) in zip(axes[0], gates.items(), strict=True):
        count, edges = np.histogram(found.values, bins=60)
        share = 100 * count / found.values.size
        axis.stairs(share, edges, fill=True, color="#777777")
        axis.axvline(0, color="black", linewidth=0.8)
        _style.dress(axis, "value of the gate", "share (%)", f"{kind}: {owner}")
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

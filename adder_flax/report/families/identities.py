"""Which parameters make no difference, on a model's own queries, keys and weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import attention
from adder_flax.measures.brownian import total_variation
from adder_flax.measures.maps import entropy
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    Findings,
    Picture,
    Study,
)
from adder_flax.report.captures import BlockCapture

_SOURCE = ADDITIVE.source
_KEYS = 197
_BIAS_SIZES = (0.0, 1.0, 3.0, 10.0, 30.0)


@register_claims("identities", ADDITIVE)
def judge(study: Study) -> Findings:
    """How far maps move when biases and factors change."""
    moves, biases = _measure_moves(study), _inner_biases()
    return Findings(
        [*_identity_claims(moves), *_additive_bias_claims(*biases)],
        [_identity_picture(moves, biases[0])],
    )


def _live_map(
    module: attention.MultiHeadAttention, block: BlockCapture, alpha: float = 1.0, **options: Any
) -> np.ndarray:
    """The block's map from its own queries and keys.

    Weights are scaled so that scores grow by ``alpha``.
    """
    query, key = (jnp.swapaxes(jnp.asarray(x), 1, 2) for x in (block.query, block.key))
    parameters = {name: parameter[...] for name, parameter in module.score.items()}
    if module.settings.score in ("additive", "bilinear"):
        name = "v" if module.settings.score == "additive" else "kernel"
        parameters[name] = alpha * parameters[name]
    elif module.settings.score == "dot":
        query = alpha * query
    else:  # distances: the L1 one grows like its arguments, the squared one like their square
        factor = alpha if module.settings.score == "adder" else alpha**0.5
        query, key = factor * query, factor * key
    _, weights = attention.attend(
        query,
        key,
        key,
        score=module.settings.score,
        parameters=parameters,
        score_options=module.settings.score_options,
        scale=module.settings.scale,
        identity=False,
        return_weights=True,
        **options,
    )
    return np.asarray(weights, np.float64)


@dataclasses.dataclass(frozen=True)
class _Moves:
    """What changes of parameters move in a block's map.

    This is the largest total variation of a row before and after.
    """

    where: str
    scalar_bias: float
    key_bias: float
    rescaling: float


def _measure_moves(study: Study) -> _Moves:
    index = len(study.subject.captured.blocks) // 2
    module, block = study.subject.attention(index), study.subject.captured.blocks[index]
    keys = block.key.shape[-2]
    plain = _live_map(module, block)
    largest = lambda **change: float(
        total_variation(plain, _live_map(module, block, **change)).max()
    )
    return _Moves(
        where=f"block {index + 1} of this model ({module.settings.score} score)",
        scalar_bias=largest(key_bias=jnp.full((keys,), 3.0)),
        key_bias=largest(key_bias=3.0 * jax.random.normal(jax.random.key(0), (keys,))),
        rescaling=largest(alpha=7.0, temperature=7.0),
    )


def _identity_claims(moves: _Moves) -> list[Claim]:
    # Scores of a few hundred in float32 leave differences of this size after the softmax.
    rounding = 1e-3
    return [
        Claim(
            "bias-scalar",
            f"{_SOURCE}, The role of bias terms",
            "A scalar bias on all scores has no effect on the attention weights.",
            HOLDS if moves.scalar_bias < rounding else DOES_NOT_HOLD,
            f"moves {moves.scalar_bias:.0e} of a row",
            f"On {moves.where} a bias of 3 moves at most {moves.scalar_bias:.1e} of a row's "
            "weight.",
            "identities",
        ),
        Claim(
            "bias-per-key",
            f"{_SOURCE}, The role of bias terms",
            "A bias per key makes static preferences possible.",
            HOLDS if moves.key_bias > 0.05 else DOES_NOT_HOLD,
            f"moves {moves.key_bias:.2f} of a row",
            f"On {moves.where} normal biases of size 3 move up to {moves.key_bias:.2f} of a row's "
            "weight.",
            "identities",
        ),
        Claim(
            "temperature",
            f"{_SOURCE}, Parameter identifiability and temperature",
            "Only the ratio of the score's scale and the temperature is identifiable: (αv, αT) "
            "gives the weights of (v, T).",
            HOLDS if moves.rescaling < rounding else DOES_NOT_HOLD,
            f"moves {moves.rescaling:.0e} of a row",
            f"On {moves.where} α = 7 moves at most {moves.rescaling:.1e} of a row's weight.",
            "identities",
        ),
    ]


def _inner_biases() -> tuple[list[float], float]:
    """Entropy of additive attention by the size of b, and the largest |score|/‖v‖₁.

    Queries and keys are normal.
    """
    rng = np.random.default_rng(0)
    queries, keys, v = (
        rng.standard_normal((64, 1, 64)),
        rng.standard_normal((1, _KEYS, 64)),
        rng.standard_normal(64),
    )
    sign = rng.choice([-1.0, 1.0], 64)
    entropies, most = [], 0.0
    for size in _BIAS_SIZES:
        scores = np.tanh((queries + keys) / np.sqrt(2) + size * sign) @ v
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        entropies.append(float(entropy(weights / weights.sum(-1, keepdims=True)).mean()))
        most = max(most, np.abs(scores).max() / np.abs(v).sum())
    return entropies, float(most)


def _additive_bias_claims(entropies: list[float], most: float) -> list[Claim]:
    flat = np.all(np.diff(entropies) > -1e-6) and entropies[-1] > 0.99 * np.log(_KEYS)
    sizes, by_size = (
        ", ".join(f"{value:.3g}" for value in values) for values in (_BIAS_SIZES, entropies)
    )
    return [
        Claim(
            "bias-inside",
            f"{_SOURCE}, The role of bias terms",
            "A large bias inside tanh saturates it and flattens the attention weights.",
            HOLDS if flat else DOES_NOT_HOLD,
            f"entropy {entropies[0]:.2f} → {entropies[-1]:.2f} of {np.log(_KEYS):.2f} nats",
            f"Biases of size {sizes}: entropy over {_KEYS} keys {by_size} nats; uniform is "
            f"{np.log(_KEYS):.2f}.",
            "identities",
        ),
        Claim(
            "additive-bounded",
            f"{_SOURCE}, Bounded activations and saturation",
            "Additive scores are bounded by ‖v‖₁ whatever the inputs.",
            HOLDS if most <= 1 else DOES_NOT_HOLD,
            f"|score| / ‖v‖₁ ≤ {most:.3f}",
            f"The largest |score| / ‖v‖₁ of {64 * _KEYS * len(_BIAS_SIZES)} pairs is {most:.3f}.",
            "identities",
        ),
    ]


def _identity_picture(moves: _Moves, entropies: list[float]) -> Picture:
    figure, axes = _style.new_figure(8.2, 2.8, 1, 2)
    changes = {
        "a scalar bias of 3": moves.scalar_bias,
        "scores and temperature × 7": moves.rescaling,
        "a bias per key": moves.key_bias,
    }
    smallest = 1e-9  # stands for 0 on the logarithmic axis
    axes[0, 0].barh(
        range(len(changes)), [max(value, smallest) for value in changes.values()], color="#777777"
    )
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xlim(smallest, 1)
    axes[0, 0].set_yticks(range(len(changes)), list(changes))
    _style.dress(
        axes[0, 0], xlabel="largest share of a row that moves", title="what changes the map"
    )
    axes[0, 1].plot(_BIAS_SIZES, entropies, **_style.LINES[0], markersize=5, linewidth=1.3)
    axes[0, 1].axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    axes[0, 1].set_ylim(0)
    _style.dress(
        axes[0, 1],
        xlabel="size of the bias inside tanh",
        ylabel="entropy (nats)",
        title=f"{_KEYS} keys",
    )
    return Picture(
        "identities",
        figure,
        f"Left: how much of a row's weight moves on {moves.where} when parameters change; two of "
        "the three changes are none but for rounding. Right: a bias inside tanh flattens additive "
        "attention; the dotted line is uniform.",
        "Bars of moved attention weight for three changes, and entropy against the size of the "
        "inner bias.",
        {
            "change": list(changes),
            "largest_total_variation": list(changes.values()),
            "bias_size": np.array(_BIAS_SIZES),
            "entropy": np.array(entropies),
        },
    )

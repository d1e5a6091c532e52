"""Which parameters make no difference, on a model's own queries, keys and weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import attention
from adder_flax.measures._arrays import softmax
from adder_flax.measures.brownian import total_variation
from adder_flax.measures.maps import entropy
from adder_flax.report import _style
from adder_flax.report._families import ADDITIVE, register_claims
from adder_flax.report._study import Claim, Findings, Picture, Study
from adder_flax.report.captures import BlockCapture

_KEYS = 197
_BIAS_SIZES = (0.0, 1.0, 3.0, 10.0, 30.0)
# Scores of a few hundred in float32 leave differences of this size after the softmax.
_ROUNDING = 1e-3


@register_claims("identities", ADDITIVE)
def judge(study: Study) -> Findings:
    """How far maps move when biases and factors change."""
    index = len(study.subject.captured.blocks) // 2
    module, block = study.subject.attention(index), study.subject.captured.blocks[index]
    score = attention.get_score(module.settings.score).name
    where = f"block {index + 1} of this model ({score} score)"
    moves, (entropies, most) = _moves(module, block), _inner_biases()
    claims = [*_identity_claims(where, *moves.values()), *_additive_claims(entropies, most)]
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
    moved = lambda **change: float(total_variation(plain, _live_map(module, block, **change)).max())
    normal = jax.random.normal(jax.random.key(0), (keys,))
    return {
        "a scalar bias of 3": moved(key_bias=jnp.full((keys,), 3.0)),
        "scores and temperature × 7": moved(alpha=7.0, temperature=7.0),
        "a bias per key": moved(key_bias=3.0 * normal),
    }


def _identity_claims(where: str, scalar: float, rescaled: float, per_key: float) -> list[Claim]:
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
    ]


def _inner_biases() -> tuple[list[float], float]:
    """Of normal queries and keys entropies by the size of b, and the largest |score|/‖v‖₁."""
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((64, 1, 64)), rng.standard_normal((1, _KEYS, 64))
    v, sign = rng.standard_normal(64), rng.choice([-1.0, 1.0], 64)
    scores = [np.tanh((queries + keys) / np.sqrt(2) + b * sign) @ v for b in _BIAS_SIZES]
    entropies = [float(entropy(softmax(of_size)).mean()) for of_size in scores]
    return entropies, float(max(np.abs(of_size).max() for of_size in scores) / np.abs(v).sum())


def _additive_claims(entropies: list[float], most: float) -> list[Claim]:
    uniform, listed = np.log(_KEYS), lambda values: ", ".join(f"{value:.3g}" for value in values)
    return [
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


def _identity_picture(where: str, moves: dict[str, float], entropies: list[float]) -> Picture:
    figure, axes = _style.new_figure(8.2, 2.8, 1, 2)
    changes, biases = axes[0]
    smallest = 1e-9  # stands for 0 on the logarithmic axis
    widths = [max(value, smallest) for value in moves.values()]
    changes.barh(range(len(moves)), widths, color="#777777")
    changes.set_xscale("log")
    changes.set_xlim(smallest, 1)
    changes.set_yticks(range(len(moves)), list(moves))
    _style.dress(changes, xlabel="largest share of a row that moves", title="what changes the map")
    biases.plot(_BIAS_SIZES, entropies, **_style.LINES[0], markersize=5, linewidth=1.3)
    biases.axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    biases.set_ylim(0)
    label, title = "size of the bias inside tanh", f"{_KEYS} keys"
    _style.dress(biases, xlabel=label, ylabel="entropy (nats)", title=title)
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

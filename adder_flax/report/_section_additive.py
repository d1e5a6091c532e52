"""Report, part 2: what additive and multiplicative scores can express, where they saturate, which parameters matter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from adder_flax import attention
from adder_flax.measures.brownian import total_variation
from adder_flax.measures.expressivity import XorBound, score_parameters, train_xor, xor_bound
from adder_flax.measures.gating import Gate, gate
from adder_flax.measures.maps import entropy
from adder_flax.measures.saturation import GradientNorms, entropy_by_width, gradient_norms
from adder_flax.report import _style
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, Claim, Picture, Section, Study, only_when
from adder_flax.report.captures import BlockCapture
from adder_flax.report.figures import xor_figure

_SOURCE = "Additive vs. multiplicative attention"
_INPUT_NORMS = 2.0 ** np.arange(-3, 11)
_HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256)
_KEYS = 197


def additive_section(study: Study) -> Section:
    """Claims and figures of the comparison; the identities are checked on the subject's own weights."""
    bound = xor_bound()
    accuracies = {score: train_xor(score) for score in ("bilinear", "additive")}
    norms = gradient_norms(_INPUT_NORMS)
    entropies = entropy_by_width(_HEAD_DIMS, keys=_KEYS)
    moves, biases = _measure_moves(study), _inner_biases()
    gates = {kind: _find_gate(study, scores) for kind, scores in _GATE_KINDS.items()}
    return Section(
        title="Additive against multiplicative scores",
        introduction=(
            "Expressive power on the XOR alignment task, where gradients vanish, and which parameters make no "
            "difference. The last are checked on this model's own queries, keys and weights."
        ),
        claims=[
            *_xor_claims(bound, accuracies),
            _parameter_claim(),
            *_saturation_claims(norms),
            _scaling_claim(entropies),
            *_identity_claims(moves),
            *_additive_bias_claims(*biases),
            *_gate_claims(gates),
        ],
        pictures=[
            _xor_picture(accuracies),
            _saturation_picture(norms, entropies),
            _identity_picture(moves, biases[0]),
            _gate_picture(gates),
        ],
    )


def _xor_claims(bound: XorBound, accuracies: dict[str, np.ndarray]) -> list[Claim]:
    bilinear, additive = accuracies["bilinear"], accuracies["additive"]
    solved = additive == 1.0
    verdict = HOLDS if solved.all() else only_when(f"training succeeds ({solved.mean():.0%} of starts)")
    return [
        Claim(
            "xor-bilinear",
            f"{_SOURCE}, The limits of bilinearity",
            "No bilinear score, biases included, solves the XOR alignment task.",
            HOLDS if bound.accuracy < 1 and bilinear.max() <= bound.accuracy else DOES_NOT_HOLD,
            f"at most {float(bound.accuracy):.0%} of the pairs",
            f"By enumeration at most {bound.accuracy.numerator * 4} of 16 pairs, {float(bound.accuracy):.0%}, "
            f"and a W that reaches it is known; trained from {len(bilinear)} starts: {bilinear.min():.0%} to "
            f"{bilinear.max():.0%}.",
            "xor",
        ),
        Claim(
            "xor-additive",
            f"{_SOURCE}, The power of non-linearity",
            "An additive score solves the XOR alignment task.",
            verdict if solved.any() else DOES_NOT_HOLD,
            f"100 % from {solved.sum()} of {len(solved)} starts",
            f"Hidden width 16, {len(additive)} starts: {additive.min():.0%} to {additive.max():.0%} of the "
            "pairs; weights for width 4 are known in closed form.",
            "xor",
        ),
    ]


def _parameter_claim() -> Claim:
    bilinear, below = score_parameters(64, 128, 42)
    above = score_parameters(64, 128, 43)[1]
    return Claim(
        "parameter-count",
        f"{_SOURCE}, The role of the attention dimension",
        "For widths 64 and 128 the two scores have equally many parameters at d_a = 8192/193 ≈ 42.4.",
        HOLDS if below < bilinear < above else DOES_NOT_HOLD,
        f"{below} < {bilinear} < {above} parameters at d_a = 42, 43",
        f"Bilinear {bilinear}; additive {below} at d_a = 42 and {above} at 43.",
        "xor",
    )


def _saturation_claims(norms: GradientNorms) -> list[Claim]:
    source = f"{_SOURCE}, Bounded activations and saturation"
    peak = int(norms.additive.argmax())
    vanishes = norms.additive[-1] < 1e-2 * norms.additive[peak]
    mean_grows = norms.additive_rms[-1] > norms.additive_rms[0]
    verdict = only_when("a single draw is looked at, not the mean square over draws") if mean_grows else HOLDS
    steady = np.ptp(norms.additive_layer_norm) / norms.additive_layer_norm.mean()
    return [
        Claim(
            "additive-saturation",
            source,
            "As inputs grow, the gradient of the additive score with respect to W_s approaches zero.",
            verdict if vanishes else DOES_NOT_HOLD,
            f"median falls to {norms.additive[-1] / norms.additive[peak]:.0e} of its peak",
            f"The median over draws rises up to inputs of norm {norms.input_norms[peak]:g}√d and has fallen to "
            f"{norms.additive[-1] / norms.additive[peak]:.1e} of its peak at {norms.input_norms[-1]:g}√d. The "
            f"root mean square keeps growing ({norms.additive_rms[0]:.2g} to {norms.additive_rms[-1]:.3g}): a "
            "unit is unsaturated with probability ~ 1/norm, and then its gradient is ~ norm.",
            "saturation",
        ),
        Claim(
            "additive-layer-norm",
            source,
            "LayerNorm before tanh keeps the gradient of the additive score from vanishing.",
            HOLDS if steady < 0.05 else DOES_NOT_HOLD,
            f"constant within {steady:.2%}",
            f"Its norm stays at {norms.additive_layer_norm.mean():.3g} within {steady:.2%} over inputs of norm "
            f"{norms.input_norms[0]:g}√d to {norms.input_norms[-1]:g}√d.",
            "saturation",
        ),
    ]


def _scaling_claim(entropies: dict[str, np.ndarray]) -> Claim:
    drop = {name: values[0] - values[-1] for name, values in entropies.items()}
    holds = drop["dot, unscaled"] > 1.0 and abs(drop["dot"]) < 0.1 * np.log(_KEYS)
    return Claim(
        "scaling",
        f"{_SOURCE}, The challenge of large dot products",
        "Without 1/√d the softmax over dot products saturates as d grows; with it, it does not.",
        HOLDS if holds else DOES_NOT_HOLD,
        f"entropy {entropies['dot, unscaled'][-1]:.2f} against {entropies['dot'][-1]:.2f} nats at d = {_HEAD_DIMS[-1]}",
        f"Entropy over {_KEYS} keys from d = {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}: unscaled "
        f"{entropies['dot, unscaled'][0]:.2f} to {entropies['dot, unscaled'][-1]:.2f} nats, scaled "
        f"{entropies['dot'][0]:.2f} to {entropies['dot'][-1]:.2f}; adder at 1/√d {entropies['adder'][-1]:.2f}, "
        f"variance-matched {entropies['adder, variance-matched'][-1]:.2f}; uniform is {np.log(_KEYS):.2f}.",
        "saturation",
    )


def _live_map(
    module: attention.MultiHeadAttention, block: BlockCapture, alpha: float = 1.0, **options: Any
) -> np.ndarray:
    """The block's map from its own queries and keys, weights scaled so that scores grow by ``alpha``."""
    query, key = (jnp.swapaxes(jnp.asarray(x), 1, 2) for x in (block.query, block.key))
    parameters = {name: parameter[...] for name, parameter in module.score.items()}
    if module.score_name in ("additive", "bilinear"):
        name = "v" if module.score_name == "additive" else "kernel"
        parameters[name] = alpha * parameters[name]
    elif module.score_name == "dot":
        query = alpha * query
    else:  # distances: the L1 one grows like its arguments, the squared one like their square
        factor = alpha if module.score_name == "adder" else alpha**0.5
        query, key = factor * query, factor * key
    _, weights = attention.attend(
        query,
        key,
        key,
        score=module.score_name,
        parameters=parameters,
        score_options=dict(module.score_options),
        scale=module.scale,
        identity=False,
        return_weights=True,
        **options,
    )
    return np.asarray(weights, np.float64)


@dataclasses.dataclass(frozen=True)
class _Moves:
    """What changes of parameters move in a block's map: the largest total variation of a row before and after."""

    where: str
    scalar_bias: float
    key_bias: float
    rescaling: float


def _measure_moves(study: Study) -> _Moves:
    index = len(study.subject.captured.blocks) // 2
    module, block = study.subject.attention(index), study.subject.captured.blocks[index]
    keys = block.key.shape[-2]
    plain = _live_map(module, block)
    largest = lambda **change: float(total_variation(plain, _live_map(module, block, **change)).max())
    return _Moves(
        where=f"block {index + 1} of this model ({module.score_name} score)",
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
            f"On {moves.where} a bias of 3 moves at most {moves.scalar_bias:.1e} of a row's weight.",
            "identities",
        ),
        Claim(
            "bias-per-key",
            f"{_SOURCE}, The role of bias terms",
            "A bias per key makes static preferences possible.",
            HOLDS if moves.key_bias > 0.05 else DOES_NOT_HOLD,
            f"moves {moves.key_bias:.2f} of a row",
            f"On {moves.where} normal biases of size 3 move up to {moves.key_bias:.2f} of a row's weight.",
            "identities",
        ),
        Claim(
            "temperature",
            f"{_SOURCE}, Parameter identifiability and temperature",
            "Only the ratio of the score's scale and the temperature is identifiable: (αv, αT) gives the "
            "weights of (v, T).",
            HOLDS if moves.rescaling < rounding else DOES_NOT_HOLD,
            f"moves {moves.rescaling:.0e} of a row",
            f"On {moves.where} α = 7 moves at most {moves.rescaling:.1e} of a row's weight.",
            "identities",
        ),
    ]


_BIAS_SIZES = (0.0, 1.0, 3.0, 10.0, 30.0)


def _inner_biases() -> tuple[list[float], float]:
    """Entropy of additive attention between normal queries and keys by the size of b, and the largest |score|/‖v‖₁."""
    rng = np.random.default_rng(0)
    queries, keys, v = rng.standard_normal((64, 1, 64)), rng.standard_normal((1, _KEYS, 64)), rng.standard_normal(64)
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
    sizes, by_size = (", ".join(f"{value:.3g}" for value in values) for values in (_BIAS_SIZES, entropies))
    return [
        Claim(
            "bias-inside",
            f"{_SOURCE}, The role of bias terms",
            "A large bias inside tanh saturates it and flattens the attention weights.",
            HOLDS if flat else DOES_NOT_HOLD,
            f"entropy {entropies[0]:.2f} → {entropies[-1]:.2f} of {np.log(_KEYS):.2f} nats",
            f"Biases of size {sizes}: entropy over {_KEYS} keys {by_size} nats; uniform is {np.log(_KEYS):.2f}.",
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
    axes[0, 0].barh(range(len(changes)), [max(value, smallest) for value in changes.values()], color="#777777")
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xlim(smallest, 1)
    axes[0, 0].set_yticks(range(len(changes)), list(changes))
    _style.dress(axes[0, 0], xlabel="largest share of a row that moves", title="what changes the map")
    axes[0, 1].plot(_BIAS_SIZES, entropies, **_style.LINES[0], markersize=5, linewidth=1.3)
    axes[0, 1].axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    axes[0, 1].set_ylim(0)
    _style.dress(axes[0, 1], xlabel="size of the bias inside tanh", ylabel="entropy (nats)", title=f"{_KEYS} keys")
    return Picture(
        "identities",
        figure,
        f"Left: how much of a row's weight moves on {moves.where} when parameters change; two of the three changes are "
        "none but for rounding. Right: a bias inside tanh flattens additive attention; the dotted line is uniform.",
        "Bars of moved attention weight for three changes, and entropy against the size of the inner bias.",
        {
            "change": list(changes),
            "largest_total_variation": list(changes.values()),
            "bias_size": np.array(_BIAS_SIZES),
            "entropy": np.array(entropies),
        },
    )


_GATE_KINDS = {"multiplicative": ("dot", "bilinear"), "additive": ("additive",)}
_GATE_IMAGES = 4
_GATE_TOKENS = 32  # of each; a tanh gate is a vector for every pair of them


def _find_gate(study: Study, scores: tuple[str, ...]) -> tuple[str, Gate]:
    """Whose gate it is, and the gate: of a block of one of the models, else of a new head on unit-normal tokens."""
    for subject in filter(None, (study.subject, study.baseline)):
        for index, (score, block) in enumerate(zip(subject.scores, subject.captured.blocks, strict=True)):
            if score in scores:
                tokens = [x[:_GATE_IMAGES, :, :_GATE_TOKENS] for x in (block.query, block.key)]
                return f"{subject.name}, block {index + 1}", _module_gate(subject.attention(index), *tokens)
    module = attention.MultiHeadAttention(1, 64, score=scores[0], rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).standard_normal((2, _GATE_IMAGES, 1, _GATE_TOKENS, 64))
    return "a new head on unit-normal tokens", _module_gate(module, *tokens)


def _module_gate(module: attention.MultiHeadAttention, query: np.ndarray, key: np.ndarray) -> Gate:
    return gate(module.score_name, query, key, {name: parameter[...] for name, parameter in module.score.items()})


def _gate_claims(gates: dict[str, tuple[str, Gate]]) -> list[Claim]:
    source = f"{_SOURCE}, Attention as gating"
    (linear_of, linear), (tanh_of, tanh) = gates["multiplicative"], gates["additive"]
    outside = float(np.mean(np.abs(linear.values) > 1))
    both_signs = [0 < found.negative_share < 1 for found in (linear, tanh)]
    bounded = np.abs(tanh.values).max() < 1
    span = lambda found: f"{found.values.min():.2f} to {found.values.max():.2f}"
    return [
        Claim(
            "gate-multiplicative",
            source,
            "A multiplicative score is a linear gate on the key, of both signs and not bounded.",
            HOLDS if both_signs[0] and outside > 0 else DOES_NOT_HOLD,
            f"{span(linear)}; {linear.negative_share:.0%} negative",
            f"Gate g = Wᵀq of {linear_of}: {span(linear)}, {linear.negative_share:.1%} of it negative, {outside:.1%} "
            "outside [−1, 1].",
            "gates",
        ),
        Claim(
            "gate-additive",
            source,
            "An additive score is a gate in (−1, 1) of both signs on latent features, unlike an LSTM's in (0, 1).",
            HOLDS if both_signs[1] and bounded else DOES_NOT_HOLD,
            f"{span(tanh)}; {tanh.negative_share:.0%} negative",
            f"Gate g = tanh(…) of {tanh_of}: {span(tanh)}, {tanh.negative_share:.1%} of it negative; "
            f"{tanh.saturated_share:.1%} is saturated, beyond ±0.99.",
            "gates",
        ),
    ]


def _gate_picture(gates: dict[str, tuple[str, Gate]]) -> Picture:
    figure, axes = _style.new_figure(8.2, 3.0, 1, 2)
    columns: dict[str, np.ndarray] = {}
    for axis, (kind, (owner, found)) in zip(axes[0], gates.items(), strict=True):
        share, edges = np.histogram(found.values, bins=60)
        share = 100 * share / found.values.size
        axis.stairs(share, edges, fill=True, color="#777777")
        axis.axvline(0, color="black", linewidth=0.8)
        _style.dress(axis, xlabel="value of the gate", ylabel="share (%)", title=f"{kind}: {owner}")
        axis.title.set_fontsize(8.5)
        columns |= {f"{kind}, from": edges[:-1], f"{kind}, to": edges[1:], f"{kind}, share (%)": share}
    return Picture(
        "gates",
        figure,
        "Scores as gates: how often a gate has which value. Left Wᵀq, which multiplies the key; right tanh(W_q q + "
        "W_k k + b), which multiplies v.",
        "Histograms of the values of a multiplicative and of an additive gate.",
        columns,
    )


def _xor_picture(accuracies: dict[str, np.ndarray]) -> Picture:
    widths = np.arange(1, 81)
    counts = np.array([score_parameters(64, 128, width) for width in widths])
    data = {f"accuracy_{score}": values for score, values in accuracies.items()}
    return Picture(
        "xor",
        xor_figure(accuracies),
        "Left: accuracy on the 16 pairs of the XOR task after training, and the proven limit of bilinear "
        "scores. Right: parameters against the additive score's hidden width.",
        "Accuracies of bilinear and additive scores on the XOR task, and parameter counts.",
        {**data, "hidden_width": widths, "parameters_bilinear": counts[:, 0], "parameters_additive": counts[:, 1]},
    )


def _saturation_picture(norms: GradientNorms, entropies: dict[str, np.ndarray]) -> Picture:
    figure, axes = _style.new_figure(8.8, 3.6, 1, 2)
    series = {
        "additive, median": norms.additive,
        "additive, root mean square": norms.additive_rms,
        "additive with LayerNorm": norms.additive_layer_norm,
        "dot product, 1/√d": norms.dot_scaled,
        "dot product, unscaled": norms.dot,
    }
    for line, (label, values) in zip(_style.LINES, series.items(), strict=False):
        axes[0, 0].plot(norms.input_norms, values, **line, markersize=4, linewidth=1.3, label=label)
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylim(1e-4, 3e3)
    _style.dress(axes[0, 0], xlabel="norm of query and key (√d)", ylabel="gradient norm", title="gradients")
    _style.legend(axes[0, 0], loc="lower left")
    for line, (label, values) in zip(_style.LINES, entropies.items(), strict=False):
        axes[0, 1].plot(_HEAD_DIMS, values, **line, markersize=4, linewidth=1.3, label=label)
    axes[0, 1].axhline(np.log(_KEYS), color=_style.GREY, linewidth=0.8, linestyle=":")
    axes[0, 1].set_xscale("log", base=2)
    axes[0, 1].set_xticks(_HEAD_DIMS, [str(dim) for dim in _HEAD_DIMS])
    axes[0, 1].set_ylim(0)
    _style.dress(axes[0, 1], xlabel="head width d", ylabel="entropy (nats)", title=f"softmax over {_KEYS} keys")
    _style.legend(axes[0, 1], loc="lower left")
    data = {**{name: getattr(norms, name) for name in vars(norms)}, "head_dim": np.array(_HEAD_DIMS)}
    data |= {f"entropy {name}": values for name, values in entropies.items()}
    return Picture(
        "saturation",
        figure,
        "Left: gradient with respect to W_s of the additive score, and to the query of a softmax over dot products. "
        "Right: entropy of the softmax between unit-normal queries and keys; the dotted line is uniform.",
        "Gradient norm against input norm, and softmax entropy against head width.",
        data,
    )

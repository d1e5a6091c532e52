"""Report, part 3: tokens on a sphere, maps as random walks, and whether token updates are Brownian."""

import numpy as np

from adder_flax.measures.brownian import (
    BrownianTest,
    brownian_test,
    dot_product_map,
    gaussian_kernel_map,
    layer_norm,
    relative_radius,
    total_variation,
)
from adder_flax.measures.walks import (
    diffusion_map,
    irreversibility,
    k_step,
    mixing_time,
    spectral_gap,
    stationary_distribution,
)
from adder_flax.report import _style
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_MEASURED,
    Claim,
    Picture,
    Section,
    Study,
    Subject,
    only_when,
    spread,
)
from adder_flax.report.figures import second_order_figure

_SOURCE = "Brownian motion in the transformer"
_STEPS = (1, 2, 4, 8)
# A path counts as Brownian within these bounds; each is far outside what sampling of the tokens could give.
_GROWTH, _CORRELATION, _KURTOSIS, _DRIFT = (0.8, 1.2), 0.1, 0.5, 0.1


def brownian_section(study: Study) -> Section:
    """Claims and figures of the Brownian view, for the subject and, where given, the untrained model."""
    kernel = _kernel_distances(study.subject)
    walk = _walk_numbers(study.subject)
    tests = {"trained": brownian_test(study.subject.captured.path)}
    if study.untrained is not None:
        tests["untrained"] = brownian_test(study.untrained.captured.path)
    return Section(
        title="The Brownian view",
        introduction=(
            "LayerNorm puts tokens on a sphere, a row-normalised kernel walks between them, and blocks move "
            "them. Each step of the argument is measured by itself."
        ),
        claims=[
            *_sphere_claims(study.subject),
            *_kernel_claims(study.subject, kernel),
            *_walk_claims(study.subject, walk),
            *_motion_claims(tests),
            _second_order_claim(study),
        ],
        pictures=[
            _sphere_picture(study.subject),
            _kernel_picture(kernel),
            _walk_picture(walk),
            _steps_picture(study),
            _diffusion_picture(study),
            _motion_picture(tests),
            *([_second_order_picture(study)] if study.second_order else []),
        ],
    )


def _sphere_claims(subject: Subject) -> list[Claim]:
    bare = [relative_radius(layer_norm(block.tokens)) for block in subject.captured.blocks]
    affine = [relative_radius(block.normalized) for block in subject.captured.blocks]
    error = max(np.abs(radius - 1).max() for radius in bare)
    off = max(np.abs(radius - 1).max() for radius in affine)
    verdict = HOLDS if off < 0.01 else only_when("LayerNorm has no affine part")
    return [
        Claim(
            "sphere",
            f"{_SOURCE}, section 3.1",
            "LayerNorm maps every token to the sphere of radius √d.",
            verdict if error < 0.01 else DOES_NOT_HOLD,
            f"‖LN(x)‖ / √d: {spread(np.stack(affine))}",
            f"‖LN(x)‖ / √d: without the affine part 1 within {error:.1e}; as the blocks use it "
            f"{spread(np.stack(affine))}.",
            "sphere",
        )
    ]


def _kernel_distances(subject: Subject) -> dict[str, list[np.ndarray]]:
    """Total variation between Gaussian-kernel map and dot-product map, by block and from ever less ideal tokens."""
    result: dict[str, list[np.ndarray]] = {"LayerNorm alone": [], "with its affine part": [], "the model's q and k": []}
    for block in subject.captured.blocks:
        bare = layer_norm(block.tokens)
        pairs = ((bare, bare), (block.normalized, block.normalized), (block.query, block.key))
        for distances, (query, key) in zip(result.values(), pairs, strict=True):
            distances.append(total_variation(gaussian_kernel_map(query, key), dot_product_map(query, key)))
    return result


def _kernel_claims(subject: Subject, kernel: dict[str, list[np.ndarray]]) -> list[Claim]:
    ideal, _, live = (np.concatenate([np.ravel(values) for values in blocks]) for blocks in kernel.values())
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
            f"With q = k = LN(x) without affine part the two maps differ by at most {ideal.max():.1e} of a "
            "row's weight.",
            "kernel",
        ),
        Claim(
            "gaussian-kernel-projected",
            f"{_SOURCE}, section 3.4.2",
            "The Gaussian form still describes attention between projected queries and keys.",
            HOLDS if live.max() < 0.01 else only_when("all keys have one norm"),
            f"maps differ by {spread(live)}",
            f"From this model's q and k the two maps differ by {spread(live)} of a row's weight; key norms vary by "
            f"{spread(varied)} of their mean.",
            "kernel",
        ),
    ]


def _walk_numbers(subject: Subject) -> dict[str, list[np.ndarray]]:
    """By block, for every image and head."""
    functions = {"spectral gap": spectral_gap, "mixing time": mixing_time, "irreversibility": irreversibility}
    return {name: [function(walk) for walk in subject.walks] for name, function in functions.items()}


def _walk_claims(subject: Subject, walk: dict[str, list[np.ndarray]]) -> list[Claim]:
    sums = np.concatenate([np.ravel(block.sum(-1)) for block in subject.maps])
    stochastic = np.abs(sums - 1).max() < 1e-2
    identities = f"{sum(subject.identities)} of {len(subject.identities)} blocks add the identity map"
    flow = np.concatenate([np.ravel(values) for values in walk["irreversibility"]])
    time = np.concatenate([np.ravel(values) for values in walk["mixing time"]])
    return [
        Claim(
            "markov",
            f"{_SOURCE}, sections 2.2 and 3.2",
            "The attention map is the transition matrix of a Markov chain on the tokens.",
            HOLDS if stochastic else only_when("the identity map is taken off"),
            f"rows sum to {np.median(sums):.3g}; mixes in {np.median(time):.3g} steps",
            f"Rows of what multiplies the values sum to {spread(sums)}; {identities}. The walk without it mixes "
            f"(ε = ¼) within {spread(time)} steps.",
            "walk",
        ),
        Claim(
            "reversible",
            f"{_SOURCE}, section 2.3 (diffusion maps assume it)",
            "The walk is reversible, as one made from a symmetric kernel is.",
            HOLDS if flow.max() < 0.01 else DOES_NOT_HOLD,
            f"circular flow {spread(flow)}",
            f"The share of probability flow that goes round in circles is {spread(flow)}.",
            "walk",
        ),
    ]


def _motion_claims(tests: dict[str, BrownianTest]) -> list[Claim]:
    source = f"{_SOURCE}, sections 2.4 and 3.2"
    claims = []
    for name, (statement, found, number, finding) in _PROPERTIES.items():
        verdict = HOLDS if found(tests["trained"]) else DOES_NOT_HOLD
        text = finding(tests["trained"])
        if "untrained" in tests:
            text += f" Before training: {finding(tests['untrained'])}"
            if verdict == DOES_NOT_HOLD and found(tests["untrained"]):
                verdict = only_when("the network is untrained")
        claims.append(Claim(name, source, statement, verdict, number(tests["trained"]), text, "motion"))
    count = {name: sum(found(test) for _, found, *_ in _PROPERTIES.values()) for name, test in tests.items()}
    properties = ", ".join(f"{number} of {len(_PROPERTIES)} properties {name}" for name, number in count.items())
    whole = Claim(
        "brownian",
        f"{_SOURCE}, abstract",
        "The update of the tokens is a Brownian motion.",
        HOLDS if count["trained"] == len(_PROPERTIES) else DOES_NOT_HOLD,
        f"{count['trained']} of {len(_PROPERTIES)} properties",
        f"Found: {properties}; they are growth, independence, normality and mean zero.",
        "motion",
    )
    return [*claims, whole]


# {claim: (statement, whether a path has the property, the number, the numbers in a sentence)}
_PROPERTIES = {
    "brownian-growth": (
        "The squared distance of tokens from their start grows in proportion to depth, as for Brownian motion.",
        lambda test: _GROWTH[0] <= test.growth_exponent <= _GROWTH[1],
        lambda test: f"depth^{test.growth_exponent:.2f}",
        lambda test: f"‖X_l − X_0‖² grows like depth^{test.growth_exponent:.2f}; 1 is Brownian, 2 a straight line.",
    ),
    "brownian-independent": (
        "The updates of different blocks are independent of each other.",
        lambda test: abs(test.mean_correlation) < _CORRELATION,
        lambda test: f"mean cosine {test.mean_correlation:.3f}",
        lambda test: f"Their mean cosine is {test.mean_correlation:.3f}.",
    ),
    "brownian-normal": (
        "The updates are normally distributed.",
        lambda test: np.abs(test.excess_kurtosis).max() < _KURTOSIS,
        lambda test: f"excess kurtosis {spread(test.excess_kurtosis)}",
        lambda test: f"Excess kurtosis of a component's update, by block: {spread(test.excess_kurtosis)}.",
    ),
    "brownian-centred": (
        "The updates have mean zero.",
        lambda test: test.shared_drift < _DRIFT,
        lambda test: f"shared {test.shared_drift:.1%}",
        lambda test: f"{test.shared_drift:.1%} of their energy is one vector common to all tokens and images.",
    ),
}


# Share of the first-order term from which the second is not to be neglected.
_NOTICEABLE = 0.1


def _second_order_claim(study: Study) -> Claim:
    name, source = "second-order", f"{_SOURCE}, section 3.3 (the argument for CG-FAC)"
    statement = "The second-order term of the loss along a training step is not negligible beside the first."
    if not study.second_order:
        finding = "Needs steps of a run, 0 were given (second_order_along)."
        return Claim(name, source, statement, NOT_MEASURED, "", finding)
    own = np.concatenate([[step.ratio() for step in taken] for taken in study.second_order.values()])
    verdict = HOLDS if np.median(own) >= _NOTICEABLE else DOES_NOT_HOLD
    parts, at_peak = [], []
    for where, taken in study.second_order.items():
        rates = [step.learning_rate for step in taken]
        at_peak += [step.ratio(study.peak_learning_rate) for step in taken]
        smooth = np.abs([step.second / step.first for step in taken])
        by_hessian = f" (from H alone {spread(smooth)})" if np.isfinite(smooth).all() else ""
        parts.append(
            f"{where}, learning rate {min(rates):.2g} to {max(rates):.2g}: {spread([s.ratio() for s in taken])}"
            f"{by_hessian}; in the same direction at the peak rate of {study.peak_learning_rate:.2g} "
            f"{np.median(at_peak[-len(taken) :]):.2g}"
        )
    if verdict == DOES_NOT_HOLD and np.median(at_peak) >= _NOTICEABLE:
        verdict = only_when("the learning rate is near its peak")
    return Claim(
        name,
        source,
        statement,
        verdict,
        f"{np.median(own):.2g} of the first",
        f"|second-order| / |first-order| over {len(own)} steps. {'. '.join(parts)}. They are the even and the odd "
        "part of what the batch's loss does along the step, kinks included.",
        "second-order",
    )


def _second_order_picture(study: Study) -> Picture:
    rows = [(where, step) for where, taken in study.second_order.items() for step in taken]
    columns = {name: [getattr(step, name) for _, step in rows] for name in vars(rows[0][1])}
    return Picture(
        "second-order",
        second_order_figure(study.second_order),
        "The loss of a batch along the training step taken on it: its change, the odd part of it (the first-order "
        "term), the even part (the second-order term, kinks included) and, where it was computed, ½ δᵀHδ from the "
        "Hessian.",
        "First- and second-order terms of the loss for single training steps.",
        {"where": [where for where, _ in rows], **columns},
    )


def _sphere_picture(subject: Subject) -> Picture:
    chosen = subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(2.9 * len(chosen), 3.0, 1, len(chosen))
    data = {}
    for axis, index in zip(axes[0], chosen, strict=True):
        block = subject.captured.blocks[index]
        radii = {"without affine part": layer_norm(block.tokens), "as used": block.normalized}
        radii = {label: relative_radius(tokens).ravel() for label, tokens in radii.items()}
        every = np.concatenate(list(radii.values()))
        bins = np.linspace(every.min() - 0.02, every.max() + 0.02, 50)
        for line, (label, radius) in zip(_style.LINES, radii.items(), strict=False):
            data[f"block_{index + 1}_{label.replace(' ', '_')}"] = radius
            style = {"color": line["color"], "linestyle": line["linestyle"], "linewidth": 1.5, "histtype": "step"}
            axis.hist(radius, bins=bins, weights=np.full(radius.size, 100 / radius.size), label=label, **style)
        axis.set_ylim(0, 135)
        _style.dress(axis, xlabel="‖LN(x)‖ / √d", title=f"block {index + 1}")
    axes[0, 0].set_ylabel("tokens (%)", fontsize=9)
    _style.legend(axes[0, 0], loc="upper left")
    return Picture(
        "sphere",
        figure,
        "Radius of the tokens after the LayerNorm before attention, with and without its affine part; 1 is "
        "the sphere of radius √d.",
        "Histograms of token norms for three blocks.",
        data,
    )


def _by_block(axis, groups: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Mean and standard deviation over images and heads, one line a group."""
    columns: dict[str, np.ndarray] = {}
    for line, (label, values) in zip(_style.LINES, groups.items(), strict=False):
        flat = [np.ravel(value).astype(float) for value in values]
        mean, deviation = (np.array([reduce(value) for value in flat]) for reduce in (np.mean, np.std))
        blocks = np.arange(1, len(flat) + 1)
        axis.errorbar(blocks, mean, yerr=deviation, **line, markersize=4, linewidth=1.3, capsize=2, label=label)
        _style.whole_ticks(axis)
        columns = {**columns, "block": blocks, f"{label}, mean": mean, f"{label}, std": deviation}
    return columns


def _kernel_picture(kernel: dict[str, list[np.ndarray]]) -> Picture:
    figure, axes = _style.new_figure(5.4, 3.3)
    data = _by_block(axes[0, 0], kernel)
    axes[0, 0].set_yscale("log", nonpositive="clip")
    _style.dress(axes[0, 0], xlabel="block", ylabel="difference, share of a row")
    _style.legend(axes[0, 0])
    return Picture(
        "kernel",
        figure,
        "Total variation between the Gaussian-kernel map and the dot-product map, from LayerNorm without "
        "affine part (exact), with it, and from the model's projected queries and keys.",
        "Difference of the two maps by block, for three kinds of tokens.",
        data,
    )


def _walk_picture(walk: dict[str, list[np.ndarray]]) -> Picture:
    figure, axes = _style.new_figure(8.8, 3.0, 1, 3)
    units = {"spectral gap": "1 − |λ₂|", "mixing time": "steps, ε = ¼", "irreversibility": "share of flow"}
    data: dict[str, np.ndarray] = {}
    for axis, (name, values) in zip(axes[0], walk.items(), strict=True):
        data |= _by_block(axis, {name: values})
        _style.dress(axis, xlabel="block", ylabel=units[name], title=name)
        axis.set_ylim(bottom=0)
    return Picture(
        "walk",
        figure,
        "Every map as a Markov chain, identity taken off: how fast it forgets, in how many steps it mixes, "
        "and how much of its flow goes round in circles. Bars are one standard deviation over images and "
        "heads.",
        "Spectral gap, mixing time and irreversibility by block.",
        data,
    )


def _steps_picture(study: Study) -> Picture:
    """The walk from the class token (or the first patch) after 1, 2, 4, 8 steps, and its stationary distribution."""
    first = int(study.subject.class_token)
    index = len(study.subject.walks) // 2
    walk = study.subject.walks[index][0].mean(0)
    rows = [(f"{steps} step" + "s" * (steps > 1), k_step(walk, steps)[0]) for steps in _STEPS]
    rows.append(("stationary", stationary_distribution(walk)))
    figure, axes = _style.new_figure(1.75 * len(rows), 2.1, 1, len(rows))
    top = max(row[first:].max() for _, row in rows)
    for axis, (title, row) in zip(axes[0], rows, strict=True):
        axis.imshow(row[first:].reshape(study.grid), cmap=_style.HEAT, vmin=0, vmax=top)
        _style.bare(axis, title=title, note=f"class token {row[0]:.1%}" if first else "")
    return Picture(
        "k-steps",
        figure,
        f"Where a walk that starts on the class token is after k steps of block {index + 1} (mean of the "
        "heads, first image), on one scale; at the end the stationary distribution.",
        "Distributions over patches after 1, 2, 4, 8 steps and in the limit.",
        {"k": np.array(_STEPS), "rows": np.stack([row for _, row in rows])},
    )


def _diffusion_picture(study: Study) -> Picture:
    first = int(study.subject.class_token)
    index = len(study.subject.walks) // 2
    walk = study.subject.walks[index][0].mean(0)
    rows, columns = study.grid
    figure, axes = _style.new_figure(
        1.9 * (len(_STEPS) + 1) + 0.6, 2.5, 1, len(_STEPS) + 1, width_ratios=[1.5] + [1] * len(_STEPS)
    )
    plane = diffusion_map(walk, steps=1, dims=2).coordinates[first:]
    place = np.arange(rows * columns)
    axes[0, 0].scatter(*plane.T, c=place, cmap="viridis", s=70, edgecolors="black", linewidths=0.5)
    for number, point in zip(place, plane, strict=True):
        color = "white" if number < len(place) / 2 else "black"  # viridis runs from dark to light
        axes[0, 0].annotate(str(number), point, fontsize=5.5, ha="center", va="center", color=color)
    axes[0, 0].locator_params(nbins=4)
    _style.dress(axes[0, 0], xlabel="ψ₁ λ₁", ylabel="ψ₂ λ₂", title="k = 1")
    reference = (rows // 2) * columns + columns // 2
    distances = []
    for axis, steps in zip(axes[0, 1:], _STEPS, strict=True):
        coordinates = diffusion_map(walk, steps=steps, dims=len(walk) - 1).coordinates[first:]
        distance = np.linalg.norm(coordinates - coordinates[reference], axis=-1)
        distances.append(distance)
        axis.imshow(distance.reshape(study.grid), cmap=_style.HEAT, vmin=0)
        axis.plot(reference % columns, reference // columns, marker="+", color="white", markersize=9)
        _style.bare(axis, title=f"distance, k = {steps}", note=f"up to {distance.max():.2g}")
    return Picture(
        "diffusion",
        figure,
        f"Diffusion coordinates of the first image's patches in block {index + 1} (mean of the heads), "
        "numbered row by row; and the diffusion distance of every patch from the one marked +, after k steps, "
        "each on its own scale (brighter is farther).",
        "Scatter of patches in diffusion coordinates, and distance maps for k = 1, 2, 4, 8.",
        {"k": np.array(_STEPS), "coordinates": plane, "distances": np.stack(distances)},
    )


def _motion_picture(tests: dict[str, BrownianTest]) -> Picture:
    figure, axes = _style.new_figure(9.6, 3.2, 1, 3)
    depth = np.arange(1, len(tests["trained"].displacement) + 1)
    data: dict[str, np.ndarray] = {"block": depth}
    for line, (name, test) in zip(_style.LINES, tests.items(), strict=False):
        label = f"{name}, depth^{test.growth_exponent:.2f}"
        axes[0, 0].plot(depth, test.displacement, **line, markersize=4, linewidth=1.3, label=label)
        axes[0, 2].plot(depth, test.excess_kurtosis, **line, markersize=4, linewidth=1.3, label=name)
        data |= {f"displacement, {name}": test.displacement, f"excess kurtosis, {name}": test.excess_kurtosis}
    start = tests["trained"].displacement[0]
    for exponent, style in ((1, ":"), (2, "--")):
        axes[0, 0].plot(
            depth, start * depth**exponent, color=_style.GREY, linestyle=style, linewidth=1, label=f"depth^{exponent}"
        )
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_yscale("log")
    powers = [2**power for power in range(int(np.log2(depth[-1])) + 1)]
    axes[0, 0].set_xticks(powers, [str(power) for power in powers])
    _style.whole_ticks(axes[0, 2])
    _style.dress(axes[0, 0], xlabel="block", ylabel="mean ‖X_l − X_0‖² / d", title="distance from the start")
    _style.legend(axes[0, 0])
    correlation = tests["trained"].increment_correlation
    extent = (0.5, len(depth) + 0.5, len(depth) + 0.5, 0.5)
    image = axes[0, 1].imshow(correlation, cmap="gray", vmin=-1, vmax=1, extent=extent)
    figure.colorbar(image, ax=axes[0, 1], shrink=0.85).ax.tick_params(labelsize=7)
    _style.dress(axes[0, 1], xlabel="block", ylabel="block", title="cosine of updates").grid(False)
    _style.dress(axes[0, 2], xlabel="block", ylabel="excess kurtosis", title="normality of updates")
    axes[0, 2].axhline(0, color=_style.GREY, linewidth=0.8)
    _style.legend(axes[0, 2])
    return Picture(
        "motion",
        figure,
        "How tokens move through the blocks: distance from the start with the slopes of Brownian (1) and "
        "straight (2) motion; cosines between the updates of different blocks (grey is 0, white 1); excess "
        "kurtosis of the updates (normal is 0).",
        "Displacement, correlation matrix and kurtosis of token updates by block.",
        data,
    )

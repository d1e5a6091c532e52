"""The Brownian view by steps: LayerNorm puts tokens on a sphere, where the dot product's map is
that of a Gaussian kernel; maps are transition matrices of a walk, whose limit may be diffusion.
"""

import numpy as np

from adder_flax import measures
from adder_flax.report import _style
from adder_flax.report._families import BROWNIAN, only_when, register_claims, spread
from adder_flax.report._study import TOLERANCE, Claim, Findings, Picture, Study, Subject
from adder_flax.report.captures import BlockCapture

_WIDTHS = (16, 64, 192, 768)
_NARROWER = 2.0 ** np.arange(0, 10)
_STEPS = (1, 2, 4, 8)


def _steps_to_mix(walk: np.ndarray) -> np.ndarray:
    steps = measures.mixing_time(walk)
    return np.where(steps < 0, np.inf, steps)


# {measure: (function, its unit)}
_MEASURES = {
    "spectral gap": (measures.spectral_gap, "1 − |λ₂|"),
    "mixing time": (_steps_to_mix, "steps, ε = ¼"),
    "irreversibility": (measures.irreversibility, "share of flow"),
}
_Numbers = dict[str, list[np.ndarray]]


@register_claims("sphere", BROWNIAN)
def judge_sphere(study: Study) -> Findings:
    """Radii of the subject's tokens, by LayerNorm without its affine part and as it is used."""
    around = [block.around() for block in study.subject.captured.blocks]
    bare = [measures.relative_radius(measures.layer_norm(tokens)) for tokens, _ in around]
    used = [measures.relative_radius(normalized) for _, normalized in around]
    error, off = (max(np.abs(radius - 1).max() for radius in radii) for radii in (bare, used))
    claim = BROWNIAN.claim(
        "sphere",
        "section 3.1",
        "LayerNorm maps every token to the sphere of radius √d.",
        error < 0.01 and (off < 0.01 or only_when("LayerNorm has no affine part")),
        f"‖LN(x)‖ / √d: {spread(np.stack(used))}",
        f"‖LN(x)‖ / √d: without the affine part 1 within {error:.1e}; as the blocks use it "
        f"{spread(np.stack(used))}.",
        "sphere",
    )
    chosen = study.subject.blocks(1, 6, 11)
    figure, axes = _style.new_figure(2.9 * len(chosen), 3.0, 1, len(chosen))
    data = {}
    for axis, index in zip(axes[0], chosen, strict=True):
        radii = {"without affine part": bare[index].ravel(), "as used": used[index].ravel()}
        every = np.concatenate(list(radii.values()))
        bins = np.linspace(every.min() - 0.02, every.max() + 0.02, 50)
        for line, (label, radius) in zip(_style.LINES, radii.items(), strict=False):
            data[f"block_{index + 1}_{label.replace(' ', '_')}"] = radius
            style = dict(histtype="step", linewidth=1.5, linestyle=line["linestyle"])
            share = np.full(radius.size, 100 / radius.size)
            axis.hist(radius, bins, weights=share, label=label, color=line["color"], **style)
        axis.set_ylim(0, 135)
        _style.dress(axis, "‖LN(x)‖ / √d", title=f"block {index + 1}")
    axes[0, 0].set_ylabel("tokens (%)", fontsize=9)
    _style.legend(axes[0, 0], loc="upper left")
    picture = Picture(
        "sphere",
        figure,
        "Radius of the tokens after the LayerNorm before attention, with and without its affine "
        "part; 1 is the sphere of radius √d.",
        "Histograms of token norms for three blocks.",
        data,
    )
    return Findings([claim, _components_claim(study)], [picture])


def _components_claim(study: Study) -> Claim:
    blocks = study.subject.captured.blocks
    pairs = [measures.component_correlation(block.around()[0]) for block in blocks]
    times = np.array([found for found, _ in pairs]) / pairs[0][1]
    return BROWNIAN.claim(
        "token-components",
        "section 3.2",
        "The components of a token are independent random variables.",
        times.max() < 1 + TOLERANCE,
        f"squared correlation {np.median(times):.2g} times that of chance",
        f"Mean squared correlation of two components over {len(study.labels)} images, by block: "
        f"{spread(times)} times what independent components have. It is not about more than pairs.",
    )


@register_claims("kernel", BROWNIAN)
def judge_kernel(study: Study) -> Findings:
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
    bare = measures.layer_norm(tokens)
    pairs = {
        "LayerNorm alone": (bare, bare),
        "with its affine part": (normalized, normalized),
        "the model's q and k": (block.query, block.key),
    }
    gaussian, dot = measures.gaussian_kernel_map, measures.dot_product_map
    apart = lambda pair: np.asarray(measures.total_variation(gaussian(*pair), dot(*pair)))
    return {name: apart(pair) for name, pair in pairs.items()}


def _kernel_picture(distances: dict[str, list[np.ndarray]]) -> Picture:
    figure, [[axis]] = _style.new_figure(5.4, 3.3)
    data = _style.by_block(axis, distances)
    axis.set_yscale("log", nonpositive="clip")
    _style.dress(axis, "block", "difference, share of a row", legend_at="best")
    return Picture(
        "kernel",
        figure,
        "Total variation between the Gaussian-kernel map and the dot-product map, from LayerNorm "
        "without affine part (exact), with it, and from the model's projected queries and keys.",
        "Difference of the two maps by block, for three kinds of tokens.",
        data,
    )


@register_claims("walk", BROWNIAN)
def judge_walk(study: Study) -> Findings:
    """Gaps, mixing times and reversibility of the subject's maps."""
    numbers = _numbers(study.subject)
    pictures = [_walk_picture(numbers), _steps_picture(study), _diffusion_picture(study)]
    return Findings(_walk_claims(study.subject, numbers), pictures)


def _numbers(subject: Subject) -> _Numbers:
    walks = subject.walks
    return {name: list(map(function, walks)) for name, (function, _) in _MEASURES.items()}


def _walk_claims(subject: Subject, numbers: _Numbers) -> list[Claim]:
    every = lambda blocks: np.concatenate([np.ravel(values) for values in blocks])
    sums = every(block.sum(-1) for block in subject.maps)
    time, flow = every(numbers["mixing time"]), every(numbers["irreversibility"])
    adds = subject.adds_identity
    added = f"{sum(adds)} of {len(adds)} blocks add the identity map"
    median = np.median(time)
    mixes = f"mixes in {median:.3g} steps" if np.isfinite(median) else "does not mix"
    return [
        BROWNIAN.claim(
            "markov",
            "sections 2.2 and 3.2",
            "The attention map is the transition matrix of a Markov chain on the tokens.",
            np.abs(sums - 1).max() < 1e-2 or only_when("the identity map is taken off"),
            f"rows sum to {np.median(sums):.3g}; {mixes}",
            f"Rows of what multiplies the values sum to {spread(sums)}; {added}. The walk without "
            f"it mixes (ε = ¼) within {spread(time)} steps.",
            "walk",
        ),
        BROWNIAN.claim(
            "reversible",
            "section 2.3 (diffusion maps assume it)",
            "The walk is reversible, as one made from a symmetric kernel is.",
            flow.max() < 0.01,
            f"circular flow {spread(flow)}",
            f"The share of probability flow that goes round in circles is {spread(flow)}.",
            "walk",
        ),
    ]


def _walk_picture(numbers: _Numbers) -> Picture:
    figure, axes = _style.new_figure(8.8, 3.0, 1, 3)
    data: dict[str, np.ndarray] = {}
    for axis, (name, (_, unit)) in zip(axes[0], _MEASURES.items(), strict=True):
        data |= _style.by_block(axis, {name: numbers[name]})
        _style.dress(axis, "block", unit, name)
        axis.set_ylim(bottom=0)
    return Picture(
        "walk",
        figure,
        "Every map as a Markov chain, identity taken off: how fast it forgets, in how many steps "
        "it mixes, and how much of its flow goes round in circles. Bars are one standard deviation "
        "over images and heads.",
        "Spectral gap, mixing time and irreversibility by block.",
        data,
    )


def _middle_walk(subject: Subject) -> tuple[int, np.ndarray]:
    """The middle block and its walk on the first image, mean of the heads."""
    index = len(subject.walks) // 2
    return index, subject.walks[index][0].mean(0)


def _steps_picture(study: Study) -> Picture:
    first, with_class = study.subject.prefix_tokens, study.subject.in_front["class_token"]
    index, walk = _middle_walk(study.subject)
    start, where = (0, "the class token") if with_class else (first, "the first patch")
    rows = {
        f"{steps} step" + "s" * (steps > 1): measures.k_step(walk, steps)[start] for steps in _STEPS
    }
    rows["stationary"] = measures.stationary_distribution(walk)
    figure, axes = _style.new_figure(1.75 * len(rows), 2.1, 1, len(rows))
    top = max(row[first:].max() for row in rows.values())
    for axis, (title, row) in zip(axes[0], rows.items(), strict=True):
        axis.imshow(row[first:].reshape(study.grid), cmap=_style.HEAT, vmin=0, vmax=top)
        _style.bare(axis, title=title, note=f"class token {row[0]:.1%}" if with_class else "")
    return Picture(
        "k-steps",
        figure,
        f"Where a walk that starts on {where} is after k steps of block {index + 1} (mean of the "
        "heads, first image), on one scale; at the end the stationary distribution.",
        "Distributions over patches after 1, 2, 4, 8 steps and in the limit.",
        {"k": np.array(_STEPS), "rows": np.stack(list(rows.values()))},
    )


def _diffusion_picture(study: Study) -> Picture:
    first, (index, walk) = study.subject.prefix_tokens, _middle_walk(study.subject)
    widths = [1.5] + [1] * len(_STEPS)
    size = 1.9 * len(widths) + 0.6, 2.5
    figure, axes = _style.new_figure(*size, 1, len(widths), width_ratios=widths)
    plane = measures.diffusion_map(walk, steps=1, dims=2)[first:]
    _draw_plane(axes[0, 0], plane)
    rows, columns = study.grid
    x, y, distances = columns // 2, rows // 2, []
    for axis, steps in zip(axes[0, 1:], _STEPS, strict=True):
        coordinates = measures.diffusion_map(walk, steps=steps, dims=len(walk) - 1)[first:]
        distance = np.linalg.norm(coordinates - coordinates[y * columns + x], axis=-1)
        distances.append(distance)
        axis.imshow(distance.reshape(study.grid), cmap=_style.HEAT, vmin=0)
        axis.plot(x, y, marker="+", color="white", markersize=9)
        _style.bare(axis, title=f"distance, k = {steps}", note=f"up to {distance.max():.2g}")
    return Picture(
        "diffusion",
        figure,
        f"Diffusion coordinates of the first image's patches in block {index + 1} (mean of the "
        "heads), numbered row by row; and the diffusion distance of every patch from the one "
        "marked +, after k steps, each on its own scale (brighter is farther).",
        "Scatter of patches in diffusion coordinates, and distance maps for k = 1, 2, 4, 8.",
        {"k": np.array(_STEPS), "coordinates": plane, "distances": np.stack(distances)},
    )


def _draw_plane(axis, plane: np.ndarray) -> None:
    place = np.arange(len(plane))
    axis.scatter(*plane.T, c=place, cmap="viridis", s=70, edgecolors="black", linewidths=0.5)
    for number, point in zip(place, plane, strict=True):
        color = "white" if number < len(place) / 2 else "black"  # viridis runs from dark to light
        axis.annotate(str(number), point, fontsize=5.5, ha="center", va="center", color=color)
    axis.locator_params(nbins=4)
    _style.dress(axis, "ψ₁ λ₁", "ψ₂ λ₂", "k = 1")


@register_claims("diffusion-limit", BROWNIAN, of=object)
def judge_diffusion(_: object) -> Findings:
    """How the walk on the sphere mixes beside diffusion of the same variance, by its kernel."""
    ratio = measures.diffusion_ratio  # of the kernel, whatever the model
    ratios = {
        f"d = {width}": np.array([ratio(width, k * np.sqrt(width)) for k in _NARROWER])
        for width in _WIDTHS
    }
    own, limit = ([values[place] for values in ratios.values()] for place in (0, -1))
    close = lambda values: all(abs(value - 1) < TOLERANCE for value in values)
    claim = BROWNIAN.claim(
        "diffusion-limit",
        "section 2.3, equation 5",
        "The continuum limit of the walk is diffusion.",
        close(limit) and (close(own) or only_when("the kernel is far narrower than attention's")),
        f"mixes at {own[1]:.2f} of diffusion's rate at d = 64, {limit[1]:.2f} in the limit",
        "Rate at which one step forgets the sphere's first harmonic, over that of diffusion of the "
        "same variance: "
        + ", ".join(f"{name}: {values[0]:.2f}" for name, values in ratios.items())
        + " for the paper's kernel exp(v·w / √d); "
        + ", ".join(f"{value:.2f}" for value in limit)
        + f" for one {_NARROWER[-1]:g} times as concentrated. A step of attention is a jump.",
        "diffusion-limit",
    )
    figure, [[axis]] = _style.new_figure(5.4, 3.3)
    _style.draw_lines(axis, _NARROWER, ratios)
    axis.axhline(1, color=_style.GREY, linewidth=0.8, linestyle=":")
    _style.octaves(axis, [int(k) for k in _NARROWER[::2]])
    labels = "concentration over the paper's √d", "rate over diffusion's"
    _style.dress(axis, *labels, legend_at="lower right")
    picture = Picture(
        "diffusion-limit",
        figure,
        "How fast one step of the walk with kernel exp(κ cos θ) forgets where it was, over "
        "diffusion of the same variance. At 1, left, the kernel of attention; to the right "
        "narrower ones.",
        "Rate of the walk over that of diffusion against the kernel's concentration, by width.",
        {"concentration": _NARROWER, **ratios},
    )
    return Findings([claim], [picture])

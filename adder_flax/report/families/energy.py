"""Operations and energy of adder networks beside multiplicative ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from adder_flax.counting.energy import HOROWITZ_45NM, PICOJOULE, energy
from adder_flax.counting.operations import Operations, count_operations
from adder_flax.models import VisionTransformer
from adder_flax.report import _style
from adder_flax.report._families import ENERGY, only_when, register_claims
from adder_flax.report._study import TOLERANCE, Claim, Findings, ImageStudy, Picture
from adder_flax.report.summary import summary_rows
from adder_flax.settings import DEIT_SIZES

_NAMES: list[str] = ["DeiT-Ti", "DeiT-S", "DeiT-B"]
SIZES = dict(zip(_NAMES, DEIT_SIZES.values(), strict=True))
_LINEARS = {"qkv_linear": "adder", "proj_linear": "adder", "mlp_linear": "adder"}
VARIANTS: dict[str, dict[str, Any]] = {
    "multiplicative": {},
    "adder scores only": {"score": "adder"},
    "adder": {"score": "adder", **_LINEARS},
}
_HATCHES = {"multiplicative": "", "adder scores only": "///", "adder": "..."}


@register_claims("energy", ENERGY, of=ImageStudy)
def judge(study: ImageStudy) -> Findings:
    """DeiT's sizes under both conventions, with and without memory; and the subject's own table."""
    counted = {
        size: {variant: deit_operations(size, variant) for variant in VARIANTS} for size in SIZES
    }
    ratios = {size: _ratios(variants) for size, variants in counted.items()}
    claims = [*_claims(ratios), _bytes_claim({size: of["adder"] for size, of in counted.items()})]
    return Findings(claims, [_energy_picture(counted, ratios), _subject_picture(study)])


@functools.cache
def deit_operations(size: str, variant: str, *, depth: int = 12) -> Operations:
    """Operations of a DeiT at 224 pixels, patches of 16, for one image, without its layers.

    Every block does the same, so two traces, of one and of two blocks, give any depth exactly.

    >>> of_tiny = deit_operations("DeiT-Ti", "multiplicative")  # published: 1.26 GMACs
    >>> round(of_tiny.multiplications / 1e9, 2)
    1.26
    """
    width, heads = SIZES[size]

    def count(blocks: int) -> Operations:
        options = {"width": width, "num_heads": heads, "depth": blocks, **VARIANTS[variant]}
        model = nnx.eval_shape(lambda: VisionTransformer(rngs=nnx.Rngs(0), **options))
        return count_operations(model, jax.ShapeDtypeStruct((1, 224, 224, 3), "float32"))

    one, two = count(1), count(2)
    beyond = lambda first, second: first + (depth - 1) * (second - first)
    return Operations(
        {key: beyond(one.counts.get(key, 0), number) for key, number in two.counts.items()},
        beyond(one.bytes_moved, two.bytes_moved),
        beyond(one.bytes_at_boundary, two.bytes_at_boundary),
    )


def _ratios(variants: dict[str, Operations]) -> dict[str, float]:
    """How many times less energy than the multiplicative network, by what is counted."""
    single = variants["adder"].with_one_addition_per_l1_element()
    base, scores, adder, single = map(energy, (*variants.values(), single))
    less = lambda one: base.total_arithmetic_joules / one.total_arithmetic_joules
    whole = lambda one, bound: one.total_arithmetic_joules + one.memory_joules["DRAM"][bound]
    return {
        "2 additions an element": less(adder),
        "1 addition an element": less(single),
        "adder scores only": less(scores),
        "with weights and image from DRAM": whole(base, 0) / whole(adder, 0),
        "with every operation through DRAM": whole(base, 1) / whole(adder, 1),
    }


def _claims(ratios: dict[str, dict[str, float]]) -> list[Claim]:
    two, one, scores, loaded, moved = zip(*(of.values() for of in ratios.values()), strict=True)
    by_size = lambda values: ", ".join(map("{} {:.2f}".format, ratios, values))
    within = lambda values, low, high: all(low <= value <= high for value in values)
    saves = within(two, 2.0, 3.0)
    return [
        ENERGY.claim(
            "energy",
            "",
            "Adder transformers take about 2 to 3 times less energy (arithmetic; DeiT-Ti, S, B).",
            saves,
            f"{by_size(two)} times",
            "Scores and linear layers adder, product with the values multiplicative: "
            f"{by_size(two)} times less at two additions an element; {by_size(one)} if only one "
            "is counted.",
            "energy",
        ),
        ENERGY.claim(
            "energy-scores-only",
            "(what it takes)",
            "Adder attention scores alone save 1 to 5 %: the claim needs adder linear layers.",
            within([1 - 1 / times for times in scores], 0.01, 0.05),
            f"{by_size(scores)} times",
            f"With multiplicative linear layers: {by_size(scores)} times less.",
            "energy",
        ),
        ENERGY.claim(
            "energy-memory",
            "(what it leaves out)",
            "The saving of 2 to 3 times remains when memory is counted.",
            saves and (within(loaded, 2.0, 3.0) or only_when("arithmetic alone is counted")),
            f"{by_size(loaded)} times",
            f"With weights and image read once from DRAM: {by_size(loaded)} times less; with every "
            f"operation through DRAM: {by_size(moved)}.",
            "energy",
        ),
    ]


def in_bytes(adder: Operations) -> tuple[float, float]:
    """Returns joules of an adder network's arithmetic with its terms in eight bits, as differences
    and as products, each added up in int32; what is no adder layer or score stays float32.
    """
    of, terms = HOROWITZ_45NM.picojoules, adder.l1_elements * PICOJOULE
    rest = energy(adder).total_arithmetic_joules
    rest -= adder.l1_elements * 2 * of("additions", "float32") * PICOJOULE
    added, kinds = of("additions", "int32"), ("additions", "multiplications")
    difference, product = (rest + terms * (of(kind, "uint8") + added) for kind in kinds)
    return difference, product


def _bytes_claim(adders: dict[str, Operations]) -> Claim:
    joules = {size: in_bytes(adder) for size, adder in adders.items()}
    shown = ", ".join(f"{size} {p / d:.2f}" for size, (d, p) in joules.items())
    millis = ", ".join(f"{1e3 * d:.2f} and {1e3 * p:.2f} mJ" for d, p in joules.values())
    return ENERGY.claim(
        "energy-eight-bits",
        "(in eight bits)",
        "Adder arithmetic stays cheaper than products when both are in eight bits.",
        all(p > (1 + TOLERANCE) * d for d, p in joules.values())
        and only_when("the chip has no multiplier already"),
        f"{shown} times",
        f"Terms as differences of bytes and as products of bytes: {millis}, {shown} times less; a "
        "term alone 0.13 against 0.30 pJ. Where multipliers are there, as in tensor cores, AMX and "
        "VNNI, a product of bytes takes as long as a difference. A layer of constants unrolled in "
        "logic takes 1.07 to 1.79 times a dense one's lookup tables (16 × 16, da4ml 0.6); one unit "
        "that is shared in time takes 24 of them in place of 187.",
    )


def _energy_picture(
    counted: dict[str, dict[str, Operations]], ratios: dict[str, dict[str, float]]
) -> Picture:
    figure, [[left, right]] = _style.new_figure(8.6, 3.4, 1, 2)
    data = _draw_joules(left, counted)
    for line, (size, values) in zip(_style.LINES, ratios.items(), strict=False):
        heights = range(len(values) - 1, -1, -1)
        marks = {**line, "linestyle": "none", "markersize": 6}
        right.plot(list(values.values()), heights, **marks, label=size)
        right.set_yticks(heights, list(values))
    right.axvspan(2, 3, color="#eeeeee", zorder=0)
    right.axvline(1, color=_style.GREY, linewidth=0.8)
    title = "the claim (grey) and what is counted"
    _style.dress(right, "times less than multiplicative", title=title)
    _style.legend(right, loc="lower right", handlelength=1.0)
    return Picture(
        "energy",
        figure,
        "Left: modelled energy of the arithmetic for one 224-pixel image, by what is adder. Right: "
        "how many times less than the multiplicative network, by what is counted; the grey band is "
        "the claim of 2 to 3.",
        "Bars of energy for three DeiT sizes and three variants; ratios under five ways of "
        "counting.",
        data,
    )


def _draw_joules(axis, counted: dict[str, dict[str, Operations]]) -> dict[str, list]:
    rows = []
    for place, (size, variants) in enumerate(counted.items()):
        whole = energy(variants["multiplicative"]).total_arithmetic_joules
        for offset, (variant, hatch) in zip((-1, 0, 1), _HATCHES.items(), strict=True):
            of, label = variants[variant], variant if place == 0 else None
            joules = energy(of).total_arithmetic_joules
            x, percent = place + 0.27 * offset, 100 * joules / whole
            style = dict(width=0.25, color="white" if hatch else "#555555", hatch=hatch)
            axis.bar(x, percent, **style, edgecolor="black", label=label)
            style = dict(ha="center", va="bottom", rotation=90, fontsize=7)
            axis.text(x, percent + 2, f"{1e3 * joules:.3g} mJ", **style)
            rows.append((size, variant, of.multiplications, of.additions, joules))
    axis.set_xticks(range(len(counted)), list(counted))
    axis.set_ylim(0, 145)
    axis.set_yticks(range(0, 101, 25))
    _style.dress(axis, ylabel="energy (%)", title="arithmetic, one image")
    options = dict(ncols=3, handlelength=1.4, columnspacing=0.8, fontsize=7)
    _style.legend(axis, loc="upper center", **options)
    names = ("size", "variant", "multiplications", "additions", "joules")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _subject_picture(study: ImageStudy) -> Picture:
    image = jax.ShapeDtypeStruct((1, *study.pictures.shape[1:]), jnp.float32)
    *parts, _ = summary_rows(study.subject.model, image)
    kinds = ("multiplications", "additions", "comparisons", "exponentials", "divisions", "roots")
    columns = {name: [getattr(part, name) for part in parts] for name in ("part", "parameters")}
    for kind in (*kinds, "l1_elements"):
        columns[kind] = [getattr(part.operations, kind) for part in parts]
    columns["joules"] = [part.joules for part in parts]
    figure, axes = _style.new_figure(8.6, 0.3 * len(parts) + 1.0, 1, 3, sharey=True)
    heights = np.arange(len(parts))[::-1]
    units = {
        "multiplications (millions)": [number / 1e6 for number in columns["multiplications"]],
        "additions (millions)": [number / 1e6 for number in columns["additions"]],
        "energy (µJ)": [joules * 1e6 for joules in columns["joules"]],
    }
    for axis, (label, values) in zip(axes[0], units.items(), strict=True):
        bars = axis.barh(heights, values, color="#777777")
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        axis.set_xlim(0, 1.25 * max(values))
        _style.dress(axis, label)
    axes[0, 0].set_yticks(heights, columns["part"])
    return Picture(
        "operations",
        figure,
        f"Multiplications, additions and modelled energy of the parts of {study.subject.name}, for "
        "one image.",
        "Horizontal bars of operations and energy for each part of the model.",
        columns,
    )

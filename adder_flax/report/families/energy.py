"""Operations and energy of adder networks beside multiplicative ones."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from adder_flax.counting.energy import energy
from adder_flax.counting.operations import Operations, count_operations
from adder_flax.models import VisionTransformer
from adder_flax.report import _style
from adder_flax.report._families import ENERGY, register_claims
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    Findings,
    ImageStudy,
    Picture,
    only_when,
)
from adder_flax.report.summary import summary_rows
from adder_flax.settings import DEIT_SIZES

_SOURCE = ENERGY.source
SIZES: dict[str, tuple[int, int]] = dict(
    zip(("DeiT-Ti", "DeiT-S", "DeiT-B"), DEIT_SIZES.values(), strict=True)
)
_LINEARS = {"qkv_linear": "adder", "proj_linear": "adder", "mlp_linear": "adder"}
VARIANTS: dict[str, dict[str, Any]] = {
    "multiplicative": {},
    "adder scores only": {"score": "adder"},
    "adder": {"score": "adder", **_LINEARS},
}


@register_claims("energy", ENERGY, of=ImageStudy)
def judge(study: ImageStudy) -> Findings:
    """DeiT's sizes under both conventions, with and without memory; and the subject's own table."""
    counted = {
        size: {variant: deit_operations(size, variant) for variant in VARIANTS} for size in SIZES
    }
    ratios = {size: _ratios(variants) for size, variants in counted.items()}
    return Findings(_claims(ratios), [_energy_picture(counted, ratios), _subject_picture(study)])


@functools.cache
def deit_operations(size: str, variant: str, *, depth: int = 12) -> Operations:
    """Operations of a DeiT at 224 pixels, patches of 16, for one image.

    Every block does the same, so two traces, of one and of two blocks, give any depth exactly;
    layers are left out.

    Args:
      size: of :data:`SIZES`.
      variant: of :data:`VARIANTS`.
      depth: number of blocks.

    Example:
      >>> round(
      ...     deit_operations("DeiT-Ti", "multiplicative").multiplications / 1e9, 2
      ... )  # published: 1.26 GMACs
      1.26
    """
    width, heads = SIZES[size]

    def count(blocks: int) -> Operations:
        options = {"width": width, "num_heads": heads, "depth": blocks, **VARIANTS[variant]}
        model = nnx.eval_shape(lambda: VisionTransformer(rngs=nnx.Rngs(0), **options))
        return count_operations(model, jax.ShapeDtypeStruct((1, 224, 224, 3), "float32"))

    one, two = count(1), count(2)
    extrapolate = lambda first, second: first + (depth - 1) * (second - first)
    counts = Counter(
        {key: extrapolate(one.counts.get(key, 0), number) for key, number in two.counts.items()}
    )
    return Operations(
        counts=dict(counts),
        bytes_moved=extrapolate(one.bytes_moved, two.bytes_moved),
        bytes_at_boundary=extrapolate(one.bytes_at_boundary, two.bytes_at_boundary),
    )


def _ratios(variants: dict[str, Operations]) -> dict[str, float]:
    """How many times less energy than the multiplicative network.

    It is given by what is adder and what is counted.
    """
    base = energy(variants["multiplicative"])
    adder = energy(variants["adder"])
    scores = energy(variants["adder scores only"])
    one = energy(variants["adder"].with_one_addition_per_l1_element())
    ratio = lambda other: base.total_arithmetic_joules / other.total_arithmetic_joules
    with_memory = lambda total, bound: (
        total.total_arithmetic_joules + total.memory_joules["DRAM"][bound]
    )
    return {
        "2 additions an element": ratio(adder),
        "1 addition an element": ratio(one),
        "adder scores only": ratio(scores),
        "with weights and image from DRAM": with_memory(base, 0) / with_memory(adder, 0),
        "with every operation through DRAM": with_memory(base, 1) / with_memory(adder, 1),
    }


def _claims(ratios: dict[str, dict[str, float]]) -> list[Claim]:
    by_size = lambda name: ", ".join(
        f"{size} {values[name]:.2f}" for size, values in ratios.items()
    )
    column = lambda name: [values[name] for values in ratios.values()]
    in_range = all(2.0 <= value <= 3.0 for value in column("2 additions an element"))
    little = all(1.0 <= value <= 1.05 for value in column("adder scores only"))
    loaded = all(2.0 <= value <= 3.0 for value in column("with weights and image from DRAM"))
    memory_verdict = HOLDS if loaded else only_when("arithmetic alone is counted")
    return [
        Claim(
            "energy",
            _SOURCE,
            "Adder transformers take about 2 to 3 times less energy (arithmetic; DeiT-Ti, S, B).",
            HOLDS if in_range else DOES_NOT_HOLD,
            f"{by_size('2 additions an element')} times",
            "Scores and linear layers adder, product with the values multiplicative: "
            f"{by_size('2 additions an element')} times less at two additions an element; "
            f"{by_size('1 addition an element')} if only one is counted.",
            "energy",
        ),
        Claim(
            "energy-scores-only",
            f"{_SOURCE} (what it takes)",
            "Adder attention scores alone save 1 to 5 %: the claim needs adder linear layers.",
            HOLDS if little else DOES_NOT_HOLD,
            f"{by_size('adder scores only')} times",
            f"With multiplicative linear layers: {by_size('adder scores only')} times less.",
            "energy",
        ),
        Claim(
            "energy-memory",
            f"{_SOURCE} (what it leaves out)",
            "The saving of 2 to 3 times remains when memory is counted.",
            memory_verdict if in_range else DOES_NOT_HOLD,
            f"{by_size('with weights and image from DRAM')} times",
            "With weights and image read once from DRAM: "
            f"{by_size('with weights and image from DRAM')} times less; with every operation "
            f"through DRAM: {by_size('with every operation through DRAM')}.",
            "energy",
        ),
    ]


def _energy_picture(
    counted: dict[str, dict[str, Operations]], ratios: dict[str, dict[str, float]]
) -> Picture:
    figure, axes = _style.new_figure(8.6, 3.4, 1, 2)
    hatches = {"multiplicative": "", "adder scores only": "///", "adder": "..."}
    columns: dict[str, list] = {
        "size": [],
        "variant": [],
        "multiplications": [],
        "additions": [],
        "joules": [],
    }
    for place, (size, variants) in enumerate(counted.items()):
        whole = energy(variants["multiplicative"]).total_arithmetic_joules
        for offset, (variant, hatch) in enumerate(hatches.items()):
            operations = variants[variant]
            joules = energy(operations).total_arithmetic_joules
            x = place + 0.27 * (offset - 1)
            style = {
                "width": 0.25,
                "color": "white" if hatch else "#555555",
                "edgecolor": "black",
                "hatch": hatch,
            }
            axes[0, 0].bar(x, 100 * joules / whole, **style, label=variant if place == 0 else None)
            label = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7}
            axes[0, 0].text(x, 100 * joules / whole + 2, f"{1e3 * joules:.3g} mJ", **label)
            row = (size, variant, operations.multiplications, operations.additions, joules)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    axes[0, 0].set_xticks(range(len(counted)), list(counted))
    axes[0, 0].set_ylim(0, 145)
    axes[0, 0].set_yticks(range(0, 101, 25))
    _style.dress(axes[0, 0], ylabel="energy (%)", title="arithmetic, one image")
    _style.legend(
        axes[0, 0], loc="upper center", ncols=3, handlelength=1.4, columnspacing=0.8, fontsize=7
    )
    names = list(next(iter(ratios.values())))
    for line, (size, values) in zip(_style.LINES, ratios.items(), strict=False):
        heights = np.arange(len(names))[::-1]
        axes[0, 1].plot(
            list(values.values()),
            heights,
            **{**line, "linestyle": "none"},
            markersize=6,
            label=size,
        )
    axes[0, 1].axvspan(2, 3, color="#eeeeee", zorder=0)
    axes[0, 1].axvline(1, color=_style.GREY, linewidth=0.8)
    axes[0, 1].set_yticks(np.arange(len(names))[::-1], names)
    _style.dress(
        axes[0, 1],
        xlabel="times less than multiplicative",
        title="the claim (grey) and what is counted",
    )
    _style.legend(axes[0, 1], loc="lower right", handlelength=1.0)
    return Picture(
        "energy",
        figure,
        "Left: modelled energy of the arithmetic for one 224-pixel image, by what is adder. Right: "
        "how many times less than the multiplicative network, by what is counted; the grey band is "
        "the claim of 2 to 3.",
        "Bars of energy for three DeiT sizes and three variants; ratios under five ways of "
        "counting.",
        columns,
    )


def _subject_picture(study: ImageStudy) -> Picture:
    image = jax.ShapeDtypeStruct((1, *study.pictures.shape[1:]), jnp.float32)
    *parts, _ = summary_rows(study.subject.model, image)
    figure, axes = _style.new_figure(8.6, 0.3 * len(parts) + 1.0, 1, 3, sharey=True)
    heights = np.arange(len(parts))[::-1]
    units = {
        "multiplications (millions)": [part.operations.multiplications / 1e6 for part in parts],
        "additions (millions)": [part.operations.additions / 1e6 for part in parts],
        "energy (µJ)": [part.joules * 1e6 for part in parts],
    }
    for axis, (label, values) in zip(axes[0], units.items(), strict=True):
        bars = axis.barh(heights, values, color="#777777")
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        axis.set_xlim(0, 1.25 * max(values))
        _style.dress(axis, xlabel=label)
    axes[0, 0].set_yticks(heights, [part.part for part in parts])
    columns: dict[str, list] = {
        "part": [part.part for part in parts],
        "parameters": [part.parameters for part in parts],
    }
    for kind in (
        "multiplications",
        "additions",
        "comparisons",
        "exponentials",
        "divisions",
        "roots",
        "l1_elements",
    ):
        columns[kind] = [getattr(part.operations, kind) for part in parts]
    columns["joules"] = [part.joules for part in parts]
    return Picture(
        "operations",
        figure,
        f"Multiplications, additions and modelled energy of the parts of {study.subject.name}, for "
        "one image.",
        "Horizontal bars of operations and energy for each part of the model.",
        columns,
    )

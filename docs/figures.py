"""Draws pictures of these pages: PYTHONPATH=. python docs/figures.py writes docs/images.

score_*.png: left the score of every key in the plane for one query, right the attention map of
tokens along a spiral. memory.svg: the table of docs/compiled.md. eight_bits.svg: that of
docs/eight_bits.md. kernels.svg: that of GPU kernels in docs/kernels.md.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from adder_flax import attention, report

QUERY = np.array([1.2, 0.6], np.float32)
REACH = 3.0
TOKENS = 24


def parameters(name: str) -> dict[str, np.ndarray]:
    """Learned arrays of one head, chosen to show the shape of the score."""
    if name == "bilinear":
        return {"kernel": np.array([[[0.3, 1.4], [-1.1, 0.6]]], np.float32)}
    if name == "additive":
        rng = np.random.default_rng(5)
        make = lambda *shape: rng.normal(size=shape).astype(np.float32)
        return {
            "query_kernel": make(1, 2, 6),
            "key_kernel": make(1, 2, 6),
            "bias": make(1, 6),
            "v": make(1, 6),
        }
    return {}


def scores(name: str, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Raw scores of (queries, 2) and (keys, 2)."""
    arrays = parameters(name)
    return np.asarray(attention.get_score(name).function(query[None], key[None], **arrays)[0])


def draw(name: str) -> plt.Figure:
    figure, (plane, tokens) = plt.subplots(1, 2, figsize=(8.4, 3.7), layout="constrained")
    axis = np.linspace(-REACH, REACH, 161, dtype=np.float32)
    keys = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    field = plane.contourf(
        axis, axis, scores(name, QUERY[None], keys).reshape(161, 161), levels=15, cmap="viridis"
    )
    plane.annotate(
        "", QUERY, (0, 0), arrowprops=dict(arrowstyle="->", color="white", linewidth=1.5)
    )
    plane.plot(*QUERY, "o", color="white", markeredgecolor="black", markersize=5)
    plane.annotate("query", QUERY, xytext=(6, 4), textcoords="offset points", color="white")
    plane.set(
        xlabel="key, first coordinate",
        ylabel="key, second coordinate",
        title="score of a key",
        aspect="equal",
    )
    figure.colorbar(field, ax=plane)

    turn = np.linspace(0.5, 3 * np.pi, TOKENS)
    spiral = (turn / 4 * np.stack([np.cos(turn), np.sin(turn)])).T.astype(np.float32)[None, :, None]
    _, weights = attention.attend(
        spiral,
        spiral,
        spiral,
        score=name,
        parameters=parameters(name),
        scale=1.0,
        return_weights=True,
    )
    image = tokens.imshow(weights[0, 0], cmap="viridis", vmin=0)
    tokens.set(xlabel="key token", ylabel="query token", title="attention map along a spiral")
    figure.colorbar(image, ax=tokens)
    return figure


GIBIBYTES = {"v5e:2x4": 15.75, "v5e:4x4": 15.75, "h100:1": 59.33, "h100:8": 59.33}


def draw_memory(page: str) -> plt.Figure:
    """Of one device with AdamW, as a share of what it has."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    figure, axes = report.new_figure(4.6, 3.9)
    place = axes[0, 0]
    place.axvline(1, color="#8a8a8a", linewidth=0.9)
    for number, (topology, has) in enumerate(GIBIBYTES.items()):
        found = [float(row.split("|")[2 * number].strip(" *")) / has for _, row in rows]
        look = report.line(number) | {"linestyle": "", "markersize": 5}
        place.plot(found, range(len(rows)), **look, label=topology)
    report.dress(place, xlabel="memory of one device over what it has")
    place.set_xscale("log")
    place.set_xticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    place.minorticks_off()
    place.set_yticks(range(len(rows)), [name.replace("_", " ") for name, _ in rows])
    place.set_ylim(len(rows) - 0.5, -0.5)
    report.legend(place, loc="upper left", bbox_to_anchor=(-0.3, -0.14), ncols=4, handlelength=1)
    return figure


def draw_speed(page: str) -> plt.Figure:
    """Of the last column of the tables of networks, in batches of 8."""
    processors = {"EPYC": "AMD EPYC, without VNNI", "Xeon": "Intel Xeon, with VNNI and AMX"}
    figure, axes = report.new_figure(4.6, 5.2, rows=2)
    for place, (processor, title) in zip(axes[:, 0], processors.items(), strict=True):
        table = page.partition(f"| {processor}, two cores |")[2].partition("\n\n")[0]
        rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
        speeds = sorted((8e3 / float(row[-1].split(",")[0]), row[0]) for row in rows)
        ours = [name.startswith("ours, int8") for _, name in speeds]
        colours = [report.line(0)["color"] if one else "#a5a5a5" for one in ours]
        names, rates = [name for _, name in speeds], [speed for speed, _ in speeds]
        bars = place.barh(names, rates, color=colours)
        place.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        report.dress(place, title=title, xlabel="images a second, DeiT-Small, 224 pixels")
        place.set_xlim(0, 1.12 * rates[-1])
        place.grid(False)
    return figure


def draw_accuracy(page: str) -> plt.Figure:
    """Of the table of trained networks: accuracy over images a second."""
    table = page.partition("| trained networks |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    kinds = {"ours, adder": [], "ours, multiplicative": [], "others, multiplicative": []}
    for name, speed, score, _ in rows:
        kind = f"ours, {name.split()[-1]}" if name.startswith("ours") else "others, multiplicative"
        short = name.removeprefix("ours, ").removesuffix(" adder").removesuffix(" multiplicative")
        kinds[kind].append((float(speed), float(score), short))
    figure, axes = report.new_figure(5.2, 3.8)
    place = axes[0, 0]
    for number, (kind, points) in enumerate(kinds.items()):
        look = report.line(number) | {"linestyle": "", "markersize": 6}
        place.plot([x for x, *_ in points], [y for _, y, _ in points], **look, label=kind)
        for turn, (x, y, name) in enumerate(points):  # in bits side by side, others slanting
            side = dict(xytext=(-6, -3), ha="right") if turn % 2 else dict(xytext=(6, -3))
            spot = side if kind == "ours, adder" else dict(xytext=(2, 4), rotation=40)
            place.annotate(name, (x, y), **spot, textcoords="offset points", fontsize=7)
    report.dress(place, xlabel="images a second", ylabel="test accuracy")
    place.set_xscale("log")
    place.set_xticks([500, 1000, 2000, 4000], ["500", "1,000", "2,000", "4,000"])
    place.minorticks_off()
    place.margins(x=0.15, y=0.25)
    report.legend(place, loc="upper left", bbox_to_anchor=(-0.1, -0.18), ncols=3, handlelength=1)
    return figure


def draw_kernels(page: str) -> plt.Figure:
    """Of the table of GPU kernels: how much of the device's additions each one reaches."""
    table = page.partition("| kernel | instructions a term |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    places, names = range(len(rows)), [row[0].replace("`", "") for row in rows]
    paper, measured = ([float(row[column]) for row in rows] for column in (3, 4))
    figure, axes = report.new_figure(4.6, 4.2)
    place = axes[0, 0]
    place.barh(places, measured, color="#a5a5a5", label="measured")
    look = report.line(0) | {"linestyle": "", "marker": "|", "markersize": 11}
    place.plot(paper, places, **look, label="on paper: instructions issued")
    place.axvline(1, color="#8a8a8a", linewidth=0.9)
    report.dress(place, xlabel="share of an H200's bound")
    place.set_xlim(0, 1.05)
    place.grid(axis="y", visible=False)
    place.set_yticks(places, names)
    place.invert_yaxis()
    report.legend(place, loc="upper left", bbox_to_anchor=(-0.75, -0.12), ncols=2, handlelength=1)
    return figure


def main() -> None:
    images = Path(__file__).parent / "images"
    for name in ("dot", "bilinear", "additive", "adder", "gaussian"):
        draw(name).savefig(images / f"score_{name}.png", dpi=110)
    page = (images.parent / "compiled.md").read_text()
    report.save_figure(draw_memory(page), images / "memory", ("svg",))
    page = (images.parent / "eight_bits.md").read_text()
    report.save_figure(draw_speed(page), images / "eight_bits", ("svg",))
    report.save_figure(draw_accuracy(page), images / "eight_bits_accuracy", ("svg",))
    page = (images.parent / "kernels.md").read_text()
    report.save_figure(draw_kernels(page), images / "kernels", ("svg",))


if __name__ == "__main__":
    main()

"""How all figures look: no global state of pyplot, lines that differ without colour."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adder_flax.extras import needs
from adder_flax.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each line differs from the others in dash and marker as well; the colours (Okabe and Ito, one of
# Tol's and a grey) differ in lightness too.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#0072B2", "linestyle": "-.", "marker": "^"},
    {"color": "#009E73", "linestyle": ":", "marker": "D"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#56B4E9", "linestyle": (0, (8, 2)), "marker": "P"},
    {"color": "#8C6D00", "linestyle": (0, (1, 2)), "marker": "X"},
    {"color": "#882255", "linestyle": (0, (4, 1)), "marker": "<"},
    {"color": "#E69F00", "linestyle": (0, (3, 1, 1, 1)), "marker": "*"},
    {"color": "#777777", "linestyle": (0, (8, 1, 1, 1)), "marker": "d"},
)
GREY = "#8a8a8a"
HEAT = "magma"  # its lightness rises with the value, so a greyscale print keeps the order

# What stands for each colour of a figure where a reader's screen is dark.
_DARK = {
    "#ffffff": "#1b1d24",
    "#000000": "#e8e8e8",
    "#333333": "#cccccc",
    "#e4e4e4": "#3a3d46",
    "#8a8a8a": "#9a9a9a",
    "#d55e00": "#f28a3c",
    "#0072b2": "#4f9bea",
    "#009e73": "#2fc79a",
    "#8c6d00": "#cda937",
    "#882255": "#d0679b",
    "#777777": "#a5a5a5",
}

_SIZE = 9  # of letters, in points
# A dollar sign in the name of a class or run is no formula.
_PLAIN: dict[str, Any] = {"parse_math": False}


def line(number: int) -> dict[str, Any]:
    """Returns how one of many lines looks: where colours recur, dash and marker are others.

    >>> line(0) == LINES[0], line(len(LINES)) == LINES[0], line(len(LINES))["color"]
    (True, False, '#000000')
    """
    rounds, place = divmod(number, len(LINES))
    return {**LINES[(place + rounds) % len(LINES)], "color": LINES[place]["color"]}


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Any, Any]:
    """A figure of ``width`` × ``height`` inches and its axes as an array (rows, columns)."""
    with needs("report"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **grid)


def dress(
    axes: "Axes", xlabel: str = "", ylabel: str = "", title: str = "", *, legend_at: str = ""
) -> "Axes":
    """Labels the axes, opens the frame at the top and right, and draws a faint grid.

    With ``legend_at``, a location of Matplotlib's such as "best", it has a legend.
    """
    axes.set_xlabel(xlabel, fontsize=_SIZE)
    axes.set_ylabel(ylabel, fontsize=_SIZE)
    axes.set_title(title, fontsize=_SIZE + 1, loc="left", **_PLAIN)
    axes.tick_params(labelsize=_SIZE - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    if legend_at:
        legend(axes, loc=legend_at)
    return axes


def whole_ticks(axes: "Axes") -> None:
    """Ticks of the horizontal axis at whole numbers only, for blocks and ranks."""
    with needs("report"):
        from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))


def draw_lines(axes: "Axes", x: Any, series: Mapping[str, Any], **options: Any) -> None:
    """Draws one line for each of the series, which share their x."""
    for line, (label, values) in zip(LINES, series.items(), strict=False):
        axes.plot(x, values, **{**line, "markersize": 4, "linewidth": 1.3, **options}, label=label)


def octaves(axes: "Axes", ticks: Sequence[int]) -> None:
    """A logarithmic horizontal axis with ticks at powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def by_block(axes: "Axes", groups: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Draws mean and standard deviation over images and heads, a line a group; returns them."""
    columns: dict[str, np.ndarray] = {}
    for line, (label, values) in zip(LINES, groups.items(), strict=False):
        mean, std = (np.array([f(np.asarray(v, float)) for v in values]) for f in (np.mean, np.std))
        blocks = np.arange(1, len(mean) + 1)
        style = line | {"markersize": 4, "linewidth": 1.3, "capsize": 2}
        axes.errorbar(blocks, mean, yerr=std, **style, label=label)
        whole_ticks(axes)
        columns |= {"block": blocks, f"{label}, mean": mean, f"{label}, std": std}
    return columns


def bare(axes: "Axes", *, title: str = "", note: str = "") -> "Axes":
    """Axes for a picture: no ticks, a title above, a note below."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=_SIZE, **_PLAIN)
    axes.set_xlabel(note, fontsize=_SIZE - 1.5, color="#333333", **_PLAIN)
    return axes


def legend(axes: "Axes", **options: Any) -> None:
    """A legend without a frame, with handles long enough to tell dashes apart."""
    look = {"frameon": False, "fontsize": _SIZE - 1, "handlelength": 3.2}
    drawn = axes.legend(**look | options)
    for text in drawn.get_texts():
        text.set(**_PLAIN)


def headline(figure: "Figure", title: str) -> "Figure":
    """A title above all axes, if there is one."""
    if title:
        figure.suptitle(printable(title, limit=100), fontsize=11, **_PLAIN)
    return figure


def save_figure(
    figure: "Figure", path: str | Path, formats: Iterable[str] = ("png",)
) -> list[Path]:
    """Writes a figure as ``path``, whose directories are made, with each format for a suffix.

    Formats are "png" (150 dots per inch), "svg" and whatever else Matplotlib writes.

    >>> import tempfile
    >>> from adder_flax.report import curves_figure
    >>> figure = curves_figure([{"step": 1, "train/loss": 2.3}, {"step": 2, "train/loss": 1.9}])
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     [path.name for path in save_figure(figure, f"{directory}/curves", ("png", "svg"))]
    ['curves.png', 'curves.svg']
    """
    with needs("report"):
        from matplotlib import rc_context

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(f".{suffix}") for suffix in formats]
    engine, dots_per_inch = figure.get_layout_engine(), figure.get_dpi()
    try:
        figure.set_dpi(150)
        # Laid out once, not for each format.
        if engine is not None:
            engine.execute(figure)
            figure.set_layout_engine(None)
        # A fixed salt and no date: the same numbers give the same file.
        with rc_context({"svg.hashsalt": "adder_flax", "svg.fonttype": "none"}):
            for target in written:
                metadata = {"Date": None} if target.suffix == ".svg" else None
                figure.savefig(target, dpi=150, metadata=metadata)
                if target.suffix == ".svg":
                    target.write_text(_for_dark_screens(target.read_text("utf-8")), "utf-8")
    finally:
        figure.set_layout_engine(engine)
        figure.set_dpi(dots_per_inch)
    return written


def _for_dark_screens(drawing: str) -> str:
    """Returns an SVG whose colours follow the reader's preference, or the page that shows it."""
    rules = [
        f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in drawing
    ]
    dark = "\n".join((f"text {{ fill: {_DARK['#000000']} }}", *rules))
    sheet = f"<style>@media (prefers-color-scheme: dark) {{\n{dark}\n}}</style>\n"
    return drawing.replace(" <defs>\n", f" {sheet} <defs>\n", 1)

"""Forest plots show the numbers of the table, and figures can be read on dark screens."""

import math
import re

import numpy as np
import pytest

from adder_flax.compare.figures import Line, draw_forest
from adder_flax.report import LINES, new_figure, save_figure
from adder_flax.report._style import _DARK


def drawn(lines, **options):
    """(x, marker, face) of the mark of each arm, and the ends of its interval where it has one."""
    _, axes = new_figure(4, 3)
    columns = draw_forest(axes[0, 0], lines, "difference", **{"largest": True} | options)
    marks, intervals = {}, {}
    for line in axes[0, 0].get_lines()[1:]:
        (x, *_), (place, *_) = line.get_data()
        if line.get_marker() == "None":
            intervals[lines[int(place)].name] = tuple(line.get_xdata())
        else:
            marks[lines[int(place)].name] = x, line.get_marker(), line.get_markerfacecolor()
    return marks, intervals, columns, axes[0, 0]


def test_a_forest_plot_shows_means_and_intervals():
    lines = [Line("dot"), Line("adder", 0.1, 0.06, 0.14), Line("bilinear", -0.02, -0.09, 0.05)]
    marks, intervals, columns, axes = drawn(lines)
    assert {name: x for name, (x, *_) in marks.items()} == dict(dot=0, adder=0.1, bilinear=-0.02)
    assert intervals == {"adder": (0.06, 0.14), "bilinear": (-0.09, 0.05)}
    assert columns["difference"].tolist() == [0.0, 0.1, -0.02]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["dot (baseline)", "adder", "bilinear"]
    low, high = axes.get_xlim()
    assert low < -0.14 < 0.14 < high
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first arm is on top
    assert "better →" in axes.get_xlabel()


def test_what_is_told_is_filled_by_its_side():
    lines = [Line("up", 0.1, 0.06, 0.14, told=True), Line("down", -0.1, -0.14, -0.06, told=True)]
    lines.append(Line("open", 0.1, -0.1, 0.14))
    faces = [
        {n: face for n, (*_, face) in drawn(lines, largest=x)[0].items()} for x in (True, False)
    ]
    assert faces[0]["up"] == faces[1]["down"] != faces[0]["down"] == faces[1]["up"]
    assert faces[0]["open"] == "#ffffff"


@pytest.mark.parametrize(
    ("mean", "marker", "text"),
    [
        (0.6, ">", "+0.600"),
        (-0.6, "<", "-0.600"),
        (math.inf, ">", "diverged"),
        (-math.inf, "<", "baseline diverged"),
    ],
)
def test_an_arm_that_would_hide_the_others_is_an_arrow(mean, marker, text):
    low, high = (mean - 0.01, mean + 0.01) if math.isfinite(mean) else (-math.inf, math.inf)
    lines = [Line(name, 0.01, 0.0, 0.02) for name in "abc"]
    marks, _, _, axes = drawn([*lines, Line("far", mean, low, high)], largest=False)
    assert marks["far"][1] == marker
    assert max(np.abs(axes.get_xlim())) < 0.05
    assert axes.texts[-1].get_text() == text


def test_every_colour_of_a_figure_can_be_read_on_a_dark_screen(tmp_path):
    figure, axes = new_figure(4, 3)
    for number, look in enumerate(LINES):
        axes[0, 0].plot([0, 1], [number, number], **look)
    [path] = save_figure(figure, tmp_path / "lines", ("svg",))
    rules = path.read_text().partition("prefers-color-scheme: dark")[2].partition("</style>")[0]
    background = _DARK["#ffffff"]
    assert f'[style*="fill: #ffffff"] {{ fill: {background} !important }}' in rules
    for look in LINES:
        light = look["color"].lower()
        given = re.search(rf"stroke: {light}\"\] {{ stroke: (#\w+) ", rules)
        assert contrast(given[1] if given else light, background) >= 3  # WCAG's for graphics


def contrast(one, other):
    """The ratio of WCAG 2."""
    lights = []
    for colour in (one, other):
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        lights.append(np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05)
    return max(lights) / min(lights)

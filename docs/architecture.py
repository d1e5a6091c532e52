"""Draws who imports whom: ``python docs/architecture.py`` writes docs/images/architecture.svg from
the sources alone.

A box is a folder of ``adder_flax/``, the package ``kfac``, or the files of the command; an arrow
points to what is imported. An import that others imply is left out: report imports ops, as does
training, which report imports too.
"""

import ast
import html
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

_BOX, _GAP, _ROW = (
    (118, 34),
    16,
    70,
)  # pixels: width and height of a box, between boxes, from row to row
_STYLE = """
text { font: 13px system-ui, sans-serif; text-anchor: middle; dominant-baseline: central; fill: #1a1a1a }
rect.paper { fill: #ffffff } rect.box { fill: #eef1fb; stroke: #4051b5; rx: 6 }
path { fill: none; stroke: #7a86c8; stroke-width: 1.2; marker-end: url(#tip) }
marker path { marker-end: none; fill: #7a86c8 }
"""  # noqa: E501 - lines of another language


def imports() -> dict[str, set[str]]:
    """Returns the boxes and what each imports.

    Files that stand alone in ``adder_flax/`` are in the box ``app``, if any of these imports a
    folder, or in none: what does not import any folder (errors, files, …) may be used everywhere.
    """
    folders = {path.parent.name for path in (ROOT / "adder_flax").glob("*/__init__.py")} - {
        "experiments"
    }
    taken: dict[str, set[str]] = {}
    for path in sorted([*(ROOT / "adder_flax").rglob("*.py"), *(ROOT / "kfac").rglob("*.py")]):
        parts = path.relative_to(ROOT).parts
        place = parts[0] if parts[0] == "kfac" else parts[1]
        found = {name for name in _names(path) if name in folders | {"kfac"}}
        if place in folders | {"kfac"}:
            taken.setdefault(place, set()).update(found - {place})
        elif len(found) > 1:
            taken.setdefault("app", set()).update(found)
    return taken


def _names(path: Path) -> Iterable[str]:
    """Yields what a file imports, as the boxes are called."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            yield rest.partition(".")[0] if package == "adder_flax" else package


def reduced(taken: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns the graph without the edges that follow from others.

    Example:
      >>> reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()})["a"]
      {'b'}
    """
    reach: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set(taken[name]).union(*(reached(other) for other in taken[name]))
        return reach[name]

    return {
        name: {o for o in taken[name] if not any(o in reached(p) for p in taken[name] - {o})}
        for name in taken
    }


def draw(taken: Mapping[str, set[str]]) -> str:
    """Returns the picture as SVG."""
    edges = reduced(taken)
    rows, ways = _rows(edges)
    (width, height), thin = _BOX, 24
    wide = lambda row: sum((width if name in edges else thin) + _GAP for name in row) + _GAP
    across, down = max(map(wide, rows)), len(rows) * _ROW
    centre = {}
    for y, row in enumerate(rows):
        x = (across - wide(row)) / 2 + _GAP
        for name in row:
            breadth = width if name in edges else thin
            centre[name] = x + breadth / 2, y * _ROW + _ROW / 2
            x += breadth + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" role="img">',
        "<title>Who imports whom</title>",
        f"<style>{_STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker>',
        '<rect class="paper" width="100%" height="100%"/>',
        *(f'<path d="{_curve([centre[place] for place in way])}"/>' for way in ways),
    ]
    for name in sorted(edges):
        x, y = centre[name]
        corner = (
            f'x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width}" height="{height}"'
        )
        lines.append(
            f'<rect class="box" {corner}/><text x="{x:.0f}" y="{y:.0f}">{html.escape(name)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _rows(edges: Mapping[str, set[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the boxes by rows, each below all that import it, and the way of each arrow, one
    place a row.

    An arrow has a place of its own in the rows that it passes, so that it runs beside their boxes.
    """
    height: dict[str, int] = {}

    def above(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((above(other) for other in edges[name]), default=-1)
        return height[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(above, sorted(edges))))]
    for name in sorted(edges):
        rows[len(rows) - 1 - height[name]].append(name)
    ways = []
    for name in sorted(edges):
        for other in sorted(edges[name]):
            passed = range(height[name] - 1, height[other], -1)
            way = [name, *(f"{name} {other} {row}" for row in passed), other]
            for row, place in zip(passed, way[1:-1], strict=True):
                rows[len(rows) - 1 - row].append(place)
            ways.append(way)
    for _ in range(8):  # each beside what it is joined with, from above and from below in turn
        for upward in (False, True):
            _order(rows[::-1] if upward else rows, ways)
    return rows, ways


def _order(rows: list[list[str]], ways: list[list[str]]) -> None:
    """Sorts each row by the mean place of what its members are joined with in the row before."""
    joined: dict[str, set[str]] = {}
    for way in ways:
        for one, other in itertools.pairwise(way):
            joined.setdefault(one, set()).add(other)
            joined.setdefault(other, set()).add(one)
    place: dict[str, float] = {}
    for row in rows:
        before = {
            name: [place[other] for other in joined.get(name, ()) if other in place] for name in row
        }
        row.sort(key=lambda name: sum(before[name]) / len(before[name]) if before[name] else 0.5)
        place = {name: (i + 0.5) / len(row) for i, name in enumerate(row)}


def _curve(points: list[tuple[float, float]]) -> str:
    """Returns a path from below the first box to above the last one."""
    half = _BOX[1] / 2
    starts = [(x, y + half) for x, y in points]
    ends = [(x, y - half) for x, y in points]
    parts = [f"M{starts[0][0]:.0f} {starts[0][1]:.0f}"]
    for (x, y), (u, v), (_, below) in zip(starts, ends[1:], starts[1:], strict=False):
        parts.append(f"C{x:.0f} {(y + v) / 2:.0f} {u:.0f} {(y + v) / 2:.0f} {u:.0f} {v:.0f}")
        parts.append(f"L{u:.0f} {below:.0f}")
    return " ".join(parts[:-1])


if __name__ == "__main__":
    PICTURE.write_text(draw(imports()))
    print(PICTURE)

"""What a page to read consists of.

It is one HTML file with its figures inside, and beside it the files they come from.
"""

import base64
import csv
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from adder_flax.report import _style
from adder_flax.report._study import Picture


def html_page(title: str, body: str, *, style: str = "") -> str:
    """Returns a page that needs nothing from the network.

    Args:
      title: of its window.
      body: HTML.
      style: CSS beside that of every page.
    """
    return _PAGE.substitute(title=html.escape(title), style=style.strip("\n"), body=body)


def write_picture(picture: Picture, out_dir: Path) -> list[Path]:
    """Writes a figure as PNG and SVG into ``figures/``, the numbers behind it into ``data/``.

    Returns the files.
    """
    files = _style.save_figure(picture.figure, out_dir / "figures" / picture.name, ("png", "svg"))
    data = out_dir / "data" / picture.name
    data.parent.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {name: np.asarray(values) for name, values in picture.data.items()}
    if (
        len({column.shape for column in columns.values()}) == 1
        and next(iter(columns.values())).ndim == 1
    ):
        target = data.with_suffix(".csv")
        write_csv(target, columns)
    else:
        target = data.with_suffix(".npz")
        np.savez_compressed(target, **columns)
    return [*files, target]


def write_csv(path: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    """Writes equally long columns by their names."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def picture_html(picture: Picture, out_dir: Path) -> str:
    """Returns a figure, which is written, as a part of a page."""
    png = (out_dir / "figures" / picture.name).with_suffix(".png").read_bytes()
    data = next((out_dir / "data").glob(f"{picture.name}.*"))
    # Narrower than 60 % of this it scrolls rather than shrinks.
    width = int(picture.figure.get_figwidth() * 100)
    return (
        f'<figure id="{picture.name}"><div class="scroll" tabindex="0"><img '
        f'alt="{html.escape(picture.alt)}" '
        f'style="max-width:{width}px;min-width:{6 * width // 10}px" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>'
        f"<figcaption>{html.escape(picture.caption)} "
        f'<a href="figures/{picture.name}.svg">SVG</a> <a '
        f'href="data/{data.name}">data</a></figcaption></figure>'
    )


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; }
body { margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin-bottom: .3rem; }
h2 { font-size: 1.3rem; margin-top: 2.5rem; border-top: 2px solid #1a1a1a; padding-top: .6rem; }
figure { margin: 1.8rem 0; }
.scroll { overflow-x: auto; }
img { width: 100%; height: auto; display: block; }
figcaption { font-size: .9rem; color: #333; max-width: 45rem; }
a { color: #00507a; }
$style
</style>
</head>
<body>
$body
</body>
</html>
""")

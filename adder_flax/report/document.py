"""Pages to read, made from templates with their figures inside, and the files beside them."""

import base64
import csv
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax.extras import needs
from adder_flax.report import _style
from adder_flax.report._study import Picture


@functools.cache
def _templates() -> Any:
    with needs("report"):
        import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("adder_flax.report"),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """Returns a page from one of the files in ``templates``; those of HTML escape the values."""
    return _templates().get_template(template).render(values)


def html_page(title: str, body: str, *, style: str = "") -> str:
    """Returns a page that needs nothing from the network, with CSS beside that of every page."""
    return render("page.html", title=title, body=body, style=style.strip("\n"))


def write_picture(picture: Picture, out_dir: Path) -> list[Path]:
    """Writes a figure as PNG and SVG into ``figures/``, and its numbers into ``data/``."""
    files = _style.save_figure(picture.figure, out_dir / "figures" / picture.name, ("png", "svg"))
    columns: dict[str, Any] = {name: np.asarray(values) for name, values in picture.data.items()}
    [shape, *others] = {column.shape for column in columns.values()}
    table = len(shape) == 1 and not others
    target = out_dir / "data" / f"{picture.name}.{'csv' if table else 'npz'}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if table:
        write_csv(target, columns)
    else:
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
    return render(
        "picture.html",
        name=picture.name,
        alt=picture.alt,
        caption=picture.caption,
        # Narrower than 60 % of this it scrolls rather than shrinks.
        width=int(picture.figure.get_figwidth() * 100),
        png=base64.b64encode(png).decode(),
        data=next((out_dir / "data").glob(f"{picture.name}.*")).name,
    )

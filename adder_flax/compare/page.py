"""The page of a comparison: its tables and figures, as Markdown and as one HTML file."""

from collections.abc import Sequence
from pathlib import Path

from adder_flax.compare import figures, table
from adder_flax.compare.blocks import Block, Heading, Paragraph, as_html, as_markdown
from adder_flax.compare.records import write_text
from adder_flax.compare.run import Comparison
from adder_flax.compare.table import Row, rows_of, runs_csv
from adder_flax.report import Picture, document

_STYLE = """
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #d0d0d0; vertical-align: top; }
pre { overflow-x: auto; font-size: .8rem; background: #f4f4f4; padding: .6rem; }
"""  # noqa: E501 - lines of another language


def write_results(comparison: Comparison) -> list[Path]:
    """Packs the records and writes what is known so far beside them; nothing is run.

    Returns:
      The files: ``results.md``, ``runs.csv``, ``results.html``, and the figures with their numbers.
    """
    comparison.pack()
    rows, folder = rows_of(comparison), comparison.results
    folder.mkdir(parents=True, exist_ok=True)
    page, drawn, files = page_of(comparison, rows), [], []
    for block in page:
        if isinstance(block, Picture):
            files += document.write_picture(block, folder)
            drawn.append(document.picture_html(block, folder))
        else:
            drawn.append(as_html(block))
    title = comparison.plan.settings.title
    texts = {
        "results.md": as_markdown(page),
        "runs.csv": runs_csv(comparison, rows),
        "results.html": document.html_page(title, "\n".join(drawn), style=_STYLE),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [*(folder / name for name in texts), *files]


def page_of(comparison: Comparison, rows: Sequence[Row]) -> list[Block | Picture]:
    """Returns the finding and its picture, then tables, costs, what was tuned, and commands."""
    finished = [row for row in rows if row.records]
    along = figures.curves(comparison, finished) if finished else []
    tuned = [Heading(2, "What was tuned"), *table.tuned(comparison, rows)]
    return [
        Heading(1, comparison.plan.settings.title),
        Paragraph(table.finding(comparison, rows), strong=True),
        *figures.forest(comparison, rows),
        *table.about(comparison, rows),
        Heading(2, f"Test {comparison.best.name}"),
        table.scores(comparison, rows),
        *table.cautions(comparison, rows),
        *([Heading(2, "Along training"), *along] if along else []),
        Heading(2, "What it costs"),
        *table.costs(rows),
        *figures.energy(comparison, finished),
        *figures.profiles(comparison, finished),
        *(tuned if comparison.plan.searched else []),
        Heading(2, "Run a row again"),
        *table.commands(comparison, rows),
    ]

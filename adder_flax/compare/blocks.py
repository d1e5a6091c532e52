"""What a page of results consists of, and how it is written as Markdown and as HTML."""

import html
from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
    """A heading of a level from 1 on."""

    level: int
    text: str


class Paragraph(NamedTuple):
    """A paragraph; a strong one is to be seen."""

    text: str
    strong: bool = False


class Table(NamedTuple):
    """A table; lines may be shorter than the head."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


class Code(NamedTuple):
    """Commands."""

    text: str


Block = Heading | Paragraph | Table | Code


def as_markdown(blocks: Sequence[Block]) -> str:
    r"""Returns a Markdown file.

    >>> print(
    ...     as_markdown([Heading(2, "Scores"), Table(["arm", "score"], [["a|b", "1"], ["c"]])]),
    ...     end="",
    ... )
    ## Scores
    <BLANKLINE>
    | arm | score |
    | --- | --- |
    | a\|b | 1 |
    | c |  |
    """
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def as_html(blocks: Sequence[Block]) -> str:
    """Returns the body of a page in HTML.

    >>> as_html([Paragraph("a < b", strong=True)])
    '<p><strong>a &lt; b</strong></p>'
    """
    return "\n".join(map(_html, blocks))


def _filled(table: Table) -> list[list[str]]:
    return [[*line, *[""] * (len(table.head) - len(line))] for line in table.lines]


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text, strong):
            return f"**{text}**" if strong else text
        case Code(text):
            return f"```bash\n{text}\n```"
    rows = [list(block.head), ["---"] * len(block.head), *_filled(block)]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text, strong):
            return (
                f"<p><strong>{html.escape(text)}</strong></p>"
                if strong
                else f"<p>{html.escape(text)}</p>"
            )
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
    row = lambda cells, tag: (
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
    )
    rows = [row(block.head, "th"), *(row(line, "td") for line in _filled(block))]
    return f'<div class="scroll" tabindex="0"><table>{"".join(rows)}</table></div>'

"""What a page of results consists of, and how it is written as Markdown and as HTML."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from adder_flax.report import Picture


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

    def rows(self) -> list[list[str]]:
        """Returns the lines, as long as the head."""
        return [[*line, *[""] * (len(self.head) - len(line))] for line in self.lines]


class Code(NamedTuple):
    """Commands."""

    text: str


Block = Heading | Paragraph | Table | Code


def as_markdown(blocks: Sequence[Block | Picture]) -> str:
    r"""Returns a Markdown file.

    >>> table = Table(["arm", "score"], [["a|b", "1"], ["c"]])
    >>> print(as_markdown([Heading(2, "Scores"), table]), end="")
    ## Scores
    <BLANKLINE>
    | arm | score |
    | --- | --- |
    | a\|b | 1 |
    | c |  |
    """
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block | Picture) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text, strong):
            return f"**{text}**" if strong else text
        case Code(text):
            return f"```bash\n{text}\n```"
        case Picture():
            return f"![{block.alt}](figures/{block.name}.svg)\n\n{block.caption}"
    rows, bar = [block.head, ["---"] * len(block.head), *block.rows()], r"\|"
    return "\n".join(f"| {' | '.join(cell.replace('|', bar) for cell in row)} |" for row in rows)


def as_html(block: Block) -> str:
    """Returns a part of a page in HTML.

    >>> as_html(Paragraph("a < b", strong=True))
    '<p><strong>a &lt; b</strong></p>'
    """
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text, strong):
            return f"<p><strong>{escape(text)}</strong></p>" if strong else f"<p>{escape(text)}</p>"
        case Code(text):
            return f"<pre><code>{escape(text)}</code></pre>"
    rows = [
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"
        for tag, row in [("th", block.head), *(("td", row) for row in block.rows())]
    ]
    return f'<div class="scroll" tabindex="0"><table>{"".join(rows)}</table></div>'

"""How much there is to read on the pages: words, longest cell and paragraph, pictures.

``python -m tests.docs.prose`` prints a line for each page, and with folders, such as the docs of
other libraries, a line for each of them: Markdown and what notebooks say between their cells. Code,
addresses of links and the bars of tables are not words.
"""

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kfac/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


class Prose(NamedTuple):
    """Counts of a page: words, those of its longest cell and paragraph, and pictures."""

    words: int
    cell: int
    paragraph: int
    pictures: int


def measure(text: str) -> Prose:
    """Returns the counts of a page in Markdown.

    >>> measure("# One\\n\\nTwo [three](four.md) `five six`.\\n\\n| a | b c |\\n|---|---|\\n")
    Prose(words=8, cell=2, paragraph=4, pictures=0)
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    pictures = len(re.findall(r"!\[", text))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"<[^>]+>", " ", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    paragraphs = [block for block in blocks if not block.lstrip().startswith("|")]
    longest = lambda parts: max(map(_words, parts), default=0)
    return Prose(_words(text), longest(cells), longest(paragraphs), pictures)


def _words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def text_of(path: Path) -> str:
    """Returns a page as Markdown; of a notebook, its cells of text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def compare(folders: Sequence[Path]) -> None:
    """Prints medians and ninth deciles over the pages of each folder."""
    print("pages  words  9th decile  longest cell  longest paragraph  with pictures")
    for folder in folders:
        pages = {p.with_suffix(""): p for s in ("ipynb", "md") for p in folder.rglob(f"*.{s}")}
        counts = [measure(text_of(page)) for page in pages.values()]
        words, cell, paragraph, pictures = map(list, zip(*counts, strict=True))
        decile, drawn = (
            statistics.quantiles(words, n=10)[-1],
            sum(map(bool, pictures)) / len(counts),
        )
        words, cell, paragraph = map(statistics.median, (words, cell, paragraph))
        told = f"{len(counts):5}  {words:5.0f}  {decile:10.0f}  {cell:12.0f}  {paragraph:17.0f}"
        print(f"{told}  {drawn:13.0%}  {folder}")


def main() -> None:
    """Prints the counts, the longest pages first, and the sum of the first ten."""
    if folders := [Path(folder) for folder in sys.argv[1:]]:
        compare(folders)
        return
    found = {path: measure(path.read_text()) for path in PAGES}
    ranked = sorted(found, key=lambda path: -found[path].words)
    print("words  cell  paragraph  pictures")
    for path in ranked:
        counts = "{:5}  {:4}  {:9}  {:8}".format(*found[path])
        print(f"{counts}  {path.relative_to(ROOT)}")
    print(f"{sum(found[path].words for path in ranked[:10])} words on the ten longest pages")


if __name__ == "__main__":
    main()

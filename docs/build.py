"""Builds the site: its pages into build/docs, and from them site/, which asks no other server for
anything.

    python -m docs.build && python -m http.server --directory site

Zensical, which builds it, reads Markdown that lies in one folder. So what lies elsewhere or has to
be made is put there first: pages of results/, and notebooks with what their cells give. Formulas
are drawn in the pages that it has made.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from docs import notebooks, tex

ROOT = Path(__file__).resolve().parents[1]
PAGES, SITE = ROOT / "build" / "docs", ROOT / "site"
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)#:]+)\)")


def gather(pages: Path = PAGES) -> None:
    """Puts all that the site consists of into a folder, anew.

    Raises:
      SystemExit: a page shows a picture that is not there, which Zensical does not notice.
    """
    shutil.rmtree(pages, ignore_errors=True)
    ours = shutil.ignore_patterns("*.py", "__pycache__", "requirements.txt")
    shutil.copytree(ROOT / "docs", pages, ignore=ours)
    for path in ROOT.glob("results/**/*"):
        if path.suffix in (".md", ".svg"):
            target = pages / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for path in notebooks.notebooks():
        _put_notebook(path, pages / notebooks.TUTORIAL)
    for path in pages.rglob("*.md"):
        path.write_text(links(path.read_text("utf-8")), "utf-8")
    if missing := missing_pictures(pages):
        raise SystemExit("expected pictures that are not there:\n" + "\n".join(missing))


def links(page: str) -> str:
    """Returns a page whose links lead to where things lie in the site.

    Example:
      >>> links("[digits](../results/digits/results.md), [a notebook](tutorial/train.ipynb)")
      '[digits](results/digits/results.md), [a notebook](tutorial/train.md)'
    """
    page = re.sub(r"\]\(\.\./((?:\.\./)*results/)", r"](\1", page)
    return re.sub(r"(\]\((?!files/)[\w/.]+)\.ipynb\)", r"\1.md)", page)


def missing_pictures(pages: Path) -> list[str]:
    """Returns a line for each picture that a page in the folder shows and that is not there."""
    return [
        f"{path.relative_to(pages)}: {picture}"
        for path in sorted(pages.rglob("*.md"))
        for picture in _PICTURE.findall(path.read_text("utf-8"))
        if not (path.parent / picture).is_file()
    ]


def _put_notebook(path: Path, folder: Path) -> None:
    notebook = notebooks.outputs_of(path)
    text, pictures = notebooks.as_page(notebook, path.stem)
    title, _, rest = text.partition("\n")
    link = f"[{path.name}](files/{path.name})"
    note = f"*This page is a notebook: {link}, here with what its cells gave.*"
    (folder / path.name).unlink()
    (folder / "files").mkdir(exist_ok=True)
    nbformat.write(notebook, folder / "files" / path.name)
    (folder / f"{path.stem}.md").write_text(f"{title}\n\n{note}\n{rest}", "utf-8")
    for name, picture in pictures.items():
        (folder / name).write_bytes(picture)


def main() -> None:
    gather()
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    if failed := subprocess.run(build, cwd=ROOT, check=False).returncode:
        raise SystemExit(failed)
    for page in SITE.rglob("*.html"):
        page.write_text(tex.draw_formulas(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()

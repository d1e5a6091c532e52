"""Takes the pages of results/, which lies beside docs/ in the repository, into the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Called by MkDocs with the files of the site: adds pages and figures of results."""
    for path in sorted(ROOT.glob("results/**/*")):
        if path.suffix in (".md", ".svg"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with a page: links lead to results from docs/, in the site its root.

    Example:
      >>> on_page_markdown("[digits](../results/digits/results.md)")
      '[digits](results/digits/results.md)'
    """
    return re.sub(r"\]\(\.\./((?:\.\./)*results/)", r"](\1", markdown)

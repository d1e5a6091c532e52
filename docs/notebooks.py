"""Makes pages of the notebooks in docs/tutorial/ when the site is built: what their cells give is
computed, not kept in the repository.

    python docs/notebooks.py    # runs them all, without a site, and says where they lie

A notebook that ran is kept in build/notebooks/ and runs again when it or the code has changed.
"""

import base64
import fcntl
import functools
import hashlib
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = "tutorial"  # folder of the notebooks in docs/, and of their pages in the site
KEPT = ROOT / "build" / "notebooks"
_LIMIT_SECONDS = 600  # of a cell: an order more than any takes, since a machine may be busy


def notebooks() -> list[Path]:
    """The notebooks of the tutorial."""
    return sorted((ROOT / "docs" / TUTORIAL).glob("*.ipynb"))


def run(path: Path) -> nbformat.NotebookNode:
    """Runs a notebook from its first cell to its last, in a process of its own, and keeps what it
    gave.

    Args:
      path: of the notebook.

    Returns:
      The notebook with its outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; the message shows which, and where.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=_LIMIT_SECONDS, kernel_name="python3")
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})
    kept = _kept(path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: a build of the site may look for it meanwhile.
    written = kept.with_suffix(f".{os.getpid()}")
    nbformat.write(notebook, written)
    written.replace(kept)
    return notebook


def outputs_of(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs: those that are kept where it and the code are still the
    same."""
    kept = _kept(path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as turn:
        fcntl.flock(
            turn, fcntl.LOCK_EX
        )  # who comes second, as a test beside a build of the site, finds it kept
        return nbformat.read(kept, as_version=4) if kept.is_file() else run(path)


def as_page(notebook: nbformat.NotebookNode, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook with outputs as Markdown, and the pictures that it shows, by file name.

    Args:
      notebook: which ran.
      name: what its file names begin with.

    Example:
      >>> cell = nbformat.v4.new_code_cell(
      ...     "print(1)", outputs=[nbformat.v4.new_output("stream", text="1\\n")]
      ... )
      >>> as_page(nbformat.v4.new_notebook(cells=[cell]), "train")[0].split("```")
      ['', 'python\\nprint(1)\\n', '\\n\\n', 'text\\n1\\n', '']
    """
    parts, pictures = [], {}
    for cell in notebook.cells:
        parts.append(
            cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        )
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}_{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![{cell.metadata.alt}]({file})")
            # What goes to stderr is the machine's: which devices JAX looked for.
            elif text := data.get("text/plain") or (output.get("name") == "stdout" and output.text):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts), pictures


def _kept(path: Path) -> Path:
    """Where a notebook that ran is kept: its name says which notebook and which code it ran."""
    key = hashlib.sha256(path.read_bytes() + _code())
    return KEPT / f"{path.stem}-{key.hexdigest()[:16]}.ipynb"


@functools.cache
def _code() -> bytes:
    sources = (
        file
        for package in ("adder_flax", "kfac")
        for file in sorted((ROOT / package).rglob("*.py"))
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).digest()


def main() -> None:
    for path in notebooks():
        outputs_of(path)
        print(_kept(path).relative_to(ROOT))


if __name__ == "__main__":
    main()
